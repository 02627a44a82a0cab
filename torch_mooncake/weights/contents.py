"""What is published under a name, for those who only look: tools, and receivers that take whatever there is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch_mooncake
from torch_mooncake.errors import KeyNotFound, PeerLost
from torch_mooncake.transfer import Engine
from torch_mooncake.weights.members import Links, Member, Room
from torch_mooncake.weights.shards import Whole


@dataclass(frozen=True)
class Holder:
    """A process that takes part. ``has``: all of the current version; None if it has left or does not answer."""

    uid: str
    name: str
    host: str
    nic: int
    nbytes: int  # of its part
    has: bool | None


@dataclass(frozen=True)
class Contents:
    version: int
    step: int | None
    subset: bool
    tensors: tuple[Whole, ...]  # by name; tied ones under all their names
    sources: tuple[Holder, ...]
    targets: tuple[Holder, ...]

    @property
    def nbytes(self) -> int:
        """Of the sources' parts: what several of them have counts for each."""
        return sum(holder.nbytes for holder in self.sources)


def tensors_of_version(name: str, *, pool: Any = None) -> tuple[Whole, ...]:
    """The current version's tensors, by name. KeyNotFound if nothing is published, PeerLost if a source has left."""
    room = Room(name, torch_mooncake if pool is None else pool)
    head = room.head()
    if head is None:
        raise KeyNotFound(f"no weights {name!r} are published")
    return _tensors(name, [room.member(uid) for uid in head.sources])


def contents(name: str, *, pool: Any = None, engine: Engine | None = None) -> Contents:
    """Who takes part in the current version. Asks each for what it has, with ``engine`` or one of its own.

    KeyNotFound if nothing is published. Sources that have left make ``tensors`` incomplete."""
    room = Room(name, torch_mooncake if pool is None else pool)
    head = room.head()
    if head is None:
        raise KeyNotFound(f"no weights {name!r} are published")
    own = Engine(name="weights contents") if engine is None else engine
    links = Links(own)
    try:
        sources, targets = (
            [(uid, room.member(uid)) for uid in uids]
            for uids in (head.sources, sorted({*head.targets, *room.targets()}))
        )
        found = [member for _, member in sources if member is not None]
        holders = [
            tuple(_holder(links, uid, member, head.version) for uid, member in side) for side in (sources, targets)
        ]
        return Contents(head.version, head.step, head.subset, _union(found), holders[0], holders[1])
    finally:
        links.close()
        if engine is None:
            own.close()


def _holder(links: Links, uid: str, member: Member | None, version: int) -> Holder:
    if member is None:
        return Holder(uid, "", "", 0, 0, None)
    has = links.has(member, version) if links.alive(member) else None
    return Holder(uid, member.record.name, member.place.host, member.place.nic, member.manifest.nbytes, has)


def _tensors(name: str, members: Sequence[Member | None]) -> tuple[Whole, ...]:
    found = [member for member in members if member is not None]
    if len(found) < len(members):
        raise PeerLost(f"{len(members) - len(found)} of the sources of weights {name!r} have left")
    return _union(found)


def _union(members: Sequence[Member]) -> tuple[Whole, ...]:
    wholes = {whole.name: whole for member in members for whole in member.manifest.wholes}
    return tuple(wholes[name] for name in sorted(wholes))
