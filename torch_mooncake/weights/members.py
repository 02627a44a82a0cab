"""Who takes part in the direct transfer of a name's weights, and how others find them: small objects in the pool.

weights.direct/<name>/member/<uid>   a process: its engine, its memory, the name of its manifest
weights.direct/<name>/layout/<hash>  a manifest; hundreds of ranks have a few
weights.direct/<name>/target/<uid>   the process wants every version
weights.direct/<name>/ready/<rank>   a trainer rank has the version of that number in its memory
weights.direct/<name>/head           the current version, its sources and its targets. Replacing it is the publication.
"""

from __future__ import annotations

import hashlib
import time
import uuid
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from torch_mooncake import discovery
from torch_mooncake.config import Config
from torch_mooncake.errors import DeadlineExceeded, Error, PeerLost
from torch_mooncake.pool import Version
from torch_mooncake.transfer import Engine, Peer, RemoteRegion
from torch_mooncake.weights.arena import HEADER, SLOTS, Arena
from torch_mooncake.weights.manifest import checked_name
from torch_mooncake.weights.plan import Place
from torch_mooncake.weights.shards import Manifest

_DIAL_S = 5.0
# Of this process, by the hash of their text, while somebody has them.
_MANIFESTS: weakref.WeakValueDictionary[str, Manifest] = weakref.WeakValueDictionary()


@dataclass(frozen=True)
class Member:
    uid: str
    record: discovery.Record
    slots: tuple[bytes, ...]  # descriptors
    board: bytes
    manifest: Manifest  # packed
    place: Place
    part: bool  # one of several processes that together are the model

    @classmethod
    def of(cls, engine: Engine, arena: Arena, place: Place, part: bool) -> Member:
        slots = tuple(region.descriptor() for region in arena.regions)
        return cls(
            uuid.uuid4().hex,
            discovery.record_of(engine),
            slots,
            arena.board_region.descriptor(),
            arena.manifest,
            place,
            part,
        )

    def to_value(self) -> dict[str, Any]:
        return {
            "uid": self.uid,
            "record": self.record.encode(),
            "slots": list(self.slots),
            "board": self.board,
            "place": list(self.place),
            "part": self.part,
        }

    @classmethod
    def from_value(cls, value: dict[str, Any], manifest: Manifest) -> Member:
        record = discovery.Record.decode(value["record"])
        place = Place(*value["place"])
        return cls(value["uid"], record, tuple(value["slots"]), value["board"], manifest, place, value["part"])


@dataclass(frozen=True)
class Head:
    """``sources`` and ``targets`` are uids, in the order of the plan."""

    version: int  # 1, 2, 3, …
    step: int | None
    sources: tuple[str, ...]
    targets: tuple[str, ...]
    subset: bool

    def to_value(self) -> dict[str, Any]:
        return {**self.__dict__, "sources": list(self.sources), "targets": list(self.targets)}

    @classmethod
    def from_value(cls, value: dict[str, Any]) -> Head:
        sources, targets = tuple(value["sources"]), tuple(value["targets"])
        return cls(value["version"], value["step"], sources, targets, value["subset"])


class Room:
    """The objects of one name. Thread-safe, as the pool is."""

    def __init__(self, name: str, pool: Any) -> None:
        self.name = checked_name(name)
        self._pool = pool
        self._prefix = f"weights.direct/{name}"
        self._known: dict[str, Member] = {}

    def enter(self, member: Member, *, target: bool) -> None:
        text = member.manifest.to_json()
        layout = hashlib.sha256(text).hexdigest()
        if not self._pool.exists(f"{self._prefix}/layout/{layout}"):
            self._pool.put(f"{self._prefix}/layout/{layout}", text)
        self._pool.put(f"{self._prefix}/member/{member.uid}", {**member.to_value(), "layout": layout})
        if target:
            self._pool.put(f"{self._prefix}/target/{member.uid}", True)

    def leave(self, uid: str) -> None:
        self._pool.delete([f"{self._prefix}/target/{uid}", f"{self._prefix}/member/{uid}"])

    def head(self) -> Head | None:
        value = self._pool.get(f"{self._prefix}/head", default=None)
        return None if value is None else Head.from_value(value)

    def await_head(self, seen: Version | None, timeout: float) -> Version | None:
        """The pool's version of the head, as soon as it is newer than ``seen``; None if that takes too long."""
        newer = None if seen is None else Version(seen.view, seen.counter + 1)
        try:
            return self._pool.wait(f"{self._prefix}/head", timeout, version=newer)
        except DeadlineExceeded:
            return None

    def replace_head(self, head: Head) -> None:
        self._pool.put(f"{self._prefix}/head", head.to_value())

    def targets(self) -> list[str]:
        prefix = f"{self._prefix}/target/"
        return sorted(key.removeprefix(prefix) for key in self._pool.keys(prefix))

    def member(self, uid: str) -> Member | None:
        """None: it has left. Corrupt as ``Manifest.from_json``."""
        if uid not in self._known:
            value = self._pool.get(f"{self._prefix}/member/{uid}", default=None)
            if value is None:
                return None
            self._known[uid] = Member.from_value(value, self._manifest(value["layout"]))
        return self._known[uid]

    def _manifest(self, layout: str) -> Manifest:
        found = _MANIFESTS.get(layout)
        if found is None:
            found = _MANIFESTS[layout] = Manifest.from_json(self._pool.get(f"{self._prefix}/layout/{layout}"))
        return found

    def forget(self, uids: Sequence[str]) -> None:
        """Keep what is known of these only."""
        self._known = {uid: self._known[uid] for uid in uids if uid in self._known}

    def say_ready(self, rank: int, uid: str, version: int) -> None:
        self._pool.put(f"{self._prefix}/ready/{rank}", {"uid": uid, "version": version})

    def ready(self, rank: int, version: int) -> str | None:
        """The uid of the trainer rank, when it has the version."""
        value = self._pool.get(f"{self._prefix}/ready/{rank}", default=None)
        return value["uid"] if value is not None and value["version"] == version else None


@dataclass(frozen=True)
class Link:
    """A member's memory, opened."""

    peer: Peer
    slots: tuple[RemoteRegion, ...]
    board: RemoteRegion


class Links:
    """Sessions with members, kept. For one thread."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._open: dict[str, Link] = {}

    def open(self, member: Member) -> Link:
        """PeerLost, DeadlineExceeded or what else connecting raises."""
        link = self._open.get(member.uid)
        if link is not None and link.peer.alive:
            return link
        self.drop(member.uid)
        peer = discovery.dial(self._engine, member.record, time.monotonic() + _DIAL_S)
        slots = tuple(peer.open(descriptor, _DIAL_S) for descriptor in member.slots)
        link = self._open[member.uid] = Link(peer, slots, peer.open(member.board, _DIAL_S))
        return link

    def alive(self, member: Member) -> bool | None:
        """None: it does not answer in time, and may be there."""
        try:
            return self.open(member).peer.alive
        except PeerLost:
            return False
        except Error as error:
            if not error.retryable:
                raise
            return None

    def has(self, member: Member, version: int) -> bool:
        """Whether the member has all of the version. False, too, if it cannot be asked."""
        words = np.zeros((SLOTS, HEADER), np.int64)
        region = self._engine.register(words)
        try:
            board = self.open(member).board
            self._engine.read(region, board[: words.nbytes], timeout=_DIAL_S).wait()
        except Error as error:
            if not isinstance(error, PeerLost) and not error.retryable:
                raise
            return False
        finally:
            self._engine.deregister(region)
        return bool(((words[:, 0] == version) & (words[:, 2] == 1)).any())

    def drop(self, uid: str) -> None:
        link = self._open.pop(uid, None)
        if link is not None:
            link.peer.close()

    def close(self) -> None:
        for uid in list(self._open):
            self.drop(uid)


def own_place(place: Place | None) -> Place:
    """``place``, or this host with one NIC: hosts are told apart as engines tell them apart."""
    if place is not None:
        return place
    host = Config.from_env().host_id or Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return Place(host)
