"""Who takes part in the direct transfer of a name's weights, and how others find them: small objects in the pool.

weights.direct/<name>/member/<uid>   a process: its engine, its memory, the name of its manifest
weights.direct/<name>/layout/<hash>  a manifest; hundreds of ranks have a few
weights.direct/<name>/target/<uid>   the process wants every version
weights.direct/<name>/go             the attempt at a version that the trainer ranks may begin with
weights.direct/<name>/ready/<rank>   a trainer rank has the version in its memory, as that attempt wants it
weights.direct/<name>/fenced         the version that nobody waits for any more
weights.direct/<name>/head           the current version, its sources and its targets. Replacing it is the publication.
"""

from __future__ import annotations

import copy
import hashlib
import time
import uuid
import weakref
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from torch_mooncake import discovery
from torch_mooncake.config import Config
from torch_mooncake.errors import DeadlineExceeded, Error, KeyNotFound, PeerLost
from torch_mooncake.pool import Version
from torch_mooncake.regions import Region
from torch_mooncake.transfer import Engine, Op, Peer, RemoteRegion
from torch_mooncake.weights.arena import Arena, Memory
from torch_mooncake.weights.board import (
    AREA,
    BLOBS,
    COMPLETE,
    HEADER,
    MAX_SLOTS,
    SLOT_MEMORY,
    VERSION,
    area_offset,
    descriptor_in,
)
from torch_mooncake.weights.manifest import checked_name
from torch_mooncake.weights.plan import Place
from torch_mooncake.weights.shards import Ints, Manifest

_DIAL_S = 5.0
_READ_AGAIN = 10  # looks at a descriptor, until two in a row are the same
_LEAST_PAUSE_S, _MOST_PAUSE_S = 5.0, 60.0  # between two attempts at one who does not answer
# Of this process, by the hash of their text, while somebody has them.
_MANIFESTS: weakref.WeakValueDictionary[str, Manifest] = weakref.WeakValueDictionary()


@dataclass(frozen=True, eq=False)
class Member:
    uid: str
    record: discovery.Record
    slots: tuple[tuple[bytes, ...], ...]  # of each: descriptors of its regions
    board: bytes
    manifest: Manifest
    offsets: Ints  # of the locals, see Memory
    bases: Ints  # of the regions
    place: Place
    part: bool  # one of several processes that together are the model
    relays: bool  # others may read from it
    follows: bool  # it takes each version by itself; else when it is told to
    has_slots: bool  # whose memory may be viewed

    @classmethod
    def of(
        cls, engine: Engine, memory: Memory, place: Place, part: bool, *, relays: bool = True, follows: bool = True
    ) -> Member:
        return cls(
            uuid.uuid4().hex,
            discovery.record_of(engine),
            tuple(tuple(region.descriptor() for region in slot) for slot in memory.slots) if relays else (),
            memory.board_region.descriptor(),
            memory.manifest,
            memory.offsets,
            memory.bases,
            place,
            part,
            relays,
            follows,
            isinstance(memory, Arena),
        )

    def to_value(self) -> dict[str, Any]:
        return {
            "uid": self.uid,
            "record": self.record.encode(),
            "slots": [list(slot) for slot in self.slots],
            "board": self.board,
            "offsets": self.offsets.astype("<i8").tobytes(),
            "bases": self.bases.astype("<i8").tobytes(),
            "place": list(self.place),
            "part": self.part,
            "relays": self.relays,
            "follows": self.follows,
            "has_slots": self.has_slots,
        }

    @classmethod
    def from_value(cls, value: dict[str, Any], manifest: Manifest) -> Member:
        record = discovery.Record.decode(value["record"])
        place = Place(*value["place"])
        offsets, bases = (np.frombuffer(value[key], "<i8").astype(np.int64) for key in ("offsets", "bases"))
        slots = tuple(tuple(slot) for slot in value["slots"])
        return cls(
            value["uid"], record, slots, value["board"], manifest, offsets, bases, place, value["part"],
            value["relays"], value["follows"], value["has_slots"],
        )  # fmt: skip


@dataclass(frozen=True)
class Head:
    """``sources`` and ``targets`` are uids, in the order of the plan."""

    version: int  # 1, 2, 3, …
    step: int | None
    sources: tuple[str, ...]
    targets: tuple[str, ...]
    subset: bool
    verify: bool = False  # chunks have checksums
    base: int = 0  # the version that blobs of what changed are made against; 0: there are none
    everywhere: bool = False  # blobs are for nodes of one host, too
    attempt: str = ""  # see Go

    def to_value(self) -> dict[str, Any]:
        return {**self.__dict__, "sources": list(self.sources), "targets": list(self.targets)}

    @classmethod
    def from_value(cls, value: dict[str, Any]) -> Head:
        sources, targets = tuple(value["sources"]), tuple(value["targets"])
        return cls(value["version"], value["step"], sources, targets, value["subset"], value["verify"],
                   value["base"], value["everywhere"], value["attempt"])  # fmt: skip


@dataclass(frozen=True)
class Go:
    """An attempt of all trainer ranks at a version. One that fails is not continued: the next one at the same version
    is another."""

    version: int
    attempt: str  # no two have the same
    kept: tuple[int, ...] = ()  # versions that are still being read


class Room:
    """The objects of one name. Thread-safe, as the pool is."""

    def __init__(self, name: str, pool: Any) -> None:
        self.name = checked_name(name)
        self._pool = pool
        self._prefix = f"weights.direct/{name}"
        self._known: dict[str, Member] = {}
        self._layouts: dict[str, str] = {}  # of members of this process

    def enter(self, member: Member, *, target: bool) -> None:
        text = member.manifest.to_json()
        layout = hashlib.sha256(text).hexdigest()
        self._layouts[member.uid] = layout
        if not self._pool.exists(f"{self._prefix}/layout/{layout}"):
            self._put(f"{self._prefix}/layout/{layout}", text)
        self._put(f"{self._prefix}/member/{member.uid}", {**member.to_value(), "layout": layout})
        self._known[member.uid] = member
        if target:
            self._put(f"{self._prefix}/target/{member.uid}", True)

    def stay(self, member: Member, *, target: bool) -> None:
        """Enter again if what the pool had of the member is lost, with the node that it was on."""
        keys = [f"{self._prefix}/layout/{self._layouts[member.uid]}", f"{self._prefix}/member/{member.uid}"]
        if not all(self._pool.exists(keys)):
            self.enter(member, target=target)

    def _put(self, key: str, value: Any) -> None:
        """These are never evicted: the pool may be full of other things."""
        self._pool.put(key, value, pin="hard")

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
        self._put(f"{self._prefix}/head", head.to_value())

    def targets(self) -> list[str]:
        prefix = f"{self._prefix}/target/"
        return sorted(key.removeprefix(prefix) for key in self._pool.keys(prefix))

    def members(self, uids: Sequence[str]) -> list[Member | None]:
        """None: it has left, or the pool has lost it. Those that are not known yet are looked up together. Corrupt as
        ``Manifest.from_json``."""
        known = self._known  # ``keep`` puts another in its place
        found = {uid: known[uid] for uid in dict.fromkeys(uids) if uid in known}
        unknown = [uid for uid in dict.fromkeys(uids) if uid not in found]
        values = self._pool.get_many([f"{self._prefix}/member/{uid}" for uid in unknown], missing="mask")
        for uid, value in zip(unknown, values, strict=True):
            manifest = None if value is None else self._manifest(value["layout"])
            if manifest is not None:
                found[uid] = self._known[uid] = Member.from_value(value, manifest)
        return [found.get(uid) for uid in uids]

    def member(self, uid: str) -> Member | None:
        """None: it has left."""
        return self.members([uid])[0]

    def _manifest(self, layout: str) -> Manifest | None:
        found = _MANIFESTS.get(layout)
        if found is None:
            text = self._pool.get(f"{self._prefix}/layout/{layout}", default=None)
            if text is not None:
                found = _MANIFESTS[layout] = Manifest.from_json(text)
        return found

    def keep(self, uids: Collection[str]) -> None:
        """What is known of these members only."""
        self._known = {uid: member for uid, member in list(self._known.items()) if uid in uids}

    def let_go(self, go: Go) -> None:
        """The trainer ranks may begin with it."""
        self._put(f"{self._prefix}/go", {**go.__dict__, "kept": list(go.kept)})

    def call_off(self) -> None:
        """Nobody begins with the attempt any more, and who has waits no more."""
        self._pool.delete([f"{self._prefix}/go"])

    def go(self) -> Go | None:
        """The latest attempt; None: there is none, or it was called off."""
        value = self._pool.get(f"{self._prefix}/go", default=None)
        return None if value is None else Go(value["version"], value["attempt"], tuple(value["kept"]))

    def say_fenced(self, version: int) -> None:
        """Nobody waits for the version any more."""
        self._put(f"{self._prefix}/fenced", version)

    def fenced(self) -> int:
        return int(self._pool.get(f"{self._prefix}/fenced", default=0))

    def say_ready(self, rank: int, uid: str, attempt: str) -> None:
        """``attempt``: empty: it is not, after all."""
        self._put(f"{self._prefix}/ready/{rank}", {"uid": uid, "attempt": attempt})

    def ready(self, world: int, attempt: str) -> list[str | None]:
        """The uids of the trainer ranks from 1 on, of those that have what the attempt wants."""
        keys = [f"{self._prefix}/ready/{rank}" for rank in range(1, world)]
        values = self._pool.get_many(keys, missing="mask")
        return [value["uid"] if value is not None and value["attempt"] == attempt else None for value in values]


@dataclass(frozen=True)
class Link:
    """A member's memory, as far as it was opened."""

    peer: Peer
    board: RemoteRegion
    words: Ints  # [MAX_SLOTS, HEADER]; where its board is read to
    region: Region  # of those
    slots: dict[int, tuple[RemoteRegion, ...]] = field(default_factory=dict)
    blobs: dict[int, RemoteRegion] = field(default_factory=dict)


@dataclass(frozen=True)
class Failure:
    """A member that could not be reached, and when it may be tried again."""

    error: Error
    pause_s: float
    until: float


class Links:
    """Sessions with members, kept. For one thread. ``backoff``: a member that does not answer is not dialled again at
    once: until then, the same is said of it again."""

    def __init__(self, engine: Engine, *, backoff: bool = False) -> None:
        self._engine, self._backoff = engine, backoff
        self._open: dict[str, Link] = {}
        self._failures: dict[str, Failure] = {}

    def open(self, member: Member) -> Link:
        """PeerLost, DeadlineExceeded or what else connecting raises."""
        link = self._open.get(member.uid)
        if link is not None and link.peer.alive:
            return link
        self.drop(member.uid)
        failure = self._failures.get(member.uid)
        if failure is not None and time.monotonic() < failure.until:
            raise copy.copy(failure.error)
        try:
            peer = discovery.dial(self._engine, member.record, time.monotonic() + _DIAL_S)
            board = peer.open(member.board, _DIAL_S)
        except Error as error:
            if self._backoff and error.retryable and not isinstance(error, PeerLost):  # it may be there
                pause_s = _LEAST_PAUSE_S if failure is None else min(2 * failure.pause_s, _MOST_PAUSE_S)
                self._failures[member.uid] = Failure(error, pause_s, time.monotonic() + pause_s)
            raise
        self._failures.pop(member.uid, None)
        words = np.zeros((MAX_SLOTS, HEADER), np.int64)
        link = self._open[member.uid] = Link(peer, board, words, self._engine.register(words))
        return link

    def slot(self, member: Member, slot: int) -> tuple[RemoteRegion, ...]:
        """The regions of one of its slots. KeyNotFound if it has no such slot, or nobody may read it."""
        link = self.open(member)
        if slot not in link.slots:
            descriptors = member.slots[slot] if slot < len(member.slots) else (self.area(member, slot, SLOT_MEMORY),)
            link.slots[slot] = tuple(link.peer.open(descriptor, _DIAL_S) for descriptor in descriptors)
        return link.slots[slot]

    def blobs(self, member: Member, slot: int) -> RemoteRegion:
        """What lies beside one of its slots. KeyNotFound if nothing does."""
        link = self.open(member)
        if slot not in link.blobs:
            link.blobs[slot] = link.peer.open(self.area(member, slot, BLOBS), _DIAL_S)
        return link.blobs[slot]

    def area(self, member: Member, slot: int, kind: int) -> bytes:
        """A descriptor from the member's board. KeyNotFound if there is none."""
        words, before = np.zeros(AREA, np.int64), np.full(AREA, -1, np.int64)
        region = self._engine.register(words)
        try:
            at = area_offset(slot, kind)
            for _ in range(_READ_AGAIN):
                self._engine.read(region, self.open(member).board[at : at + words.nbytes], timeout=_DIAL_S).wait()
                if (words == before).all():
                    break
                before[:] = words  # it may be half of one and half of another
            else:
                words[0] = 0
        finally:
            self._engine.deregister(region)
        descriptor = descriptor_in(words)
        if not descriptor:
            raise KeyNotFound(f"slot {slot} of {member.record.name} is not to be read")
        return descriptor

    def alive(self, member: Member) -> bool | None:
        """None: it does not answer in time, and may be there."""
        try:
            return self.open(member).peer.alive
        except (PeerLost, KeyNotFound):  # or its board is gone: it is closing
            return False
        except Error as error:
            if not error.retryable:
                raise
            return None

    def headers(self, members: Sequence[Member], timeout: float = _DIAL_S) -> list[Ints | None]:
        """What the boards say of the slots, [MAX_SLOTS, HEADER] each; None of those that cannot be asked in time."""
        asked: list[tuple[Link, Op] | None] = []
        for member in members:
            try:
                link = self.open(member)
                nbytes = link.words.nbytes
                asked.append((link, self._engine.read(link.region[:nbytes], link.board[:nbytes], timeout=timeout)))
            except Error as error:
                _reraise_unless_lost(error)
                asked.append(None)
        found: list[Ints | None] = []
        for each in asked:
            try:
                if each is not None:
                    each[1].wait()
                found.append(None if each is None else each[0].words.copy())
            except Error as error:
                _reraise_unless_lost(error)
                found.append(None)
        return found

    def has(self, member: Member, version: int) -> bool:
        """Whether the member has all of the version. False, too, if it cannot be asked."""
        (header,) = self.headers([member])
        return header is not None and bool(((header[:, VERSION] == version) & (header[:, COMPLETE] == 1)).any())

    def keep(self, uids: Collection[str]) -> None:
        """Those of these only."""
        for uid in self._open.keys() - set(uids):
            self.drop(uid)
        self._failures = {uid: failure for uid, failure in self._failures.items() if uid in uids}

    def drop(self, uid: str) -> None:
        link = self._open.pop(uid, None)
        if link is not None:
            link.peer.close()
            self._engine.deregister(link.region)

    def close(self) -> None:
        for uid in list(self._open):
            self.drop(uid)


def _reraise_unless_lost(error: Error) -> None:
    if not isinstance(error, (PeerLost, KeyNotFound)) and not error.retryable:  # KeyNotFound: it is closing
        raise error


def own_place(place: Place | None) -> Place:
    """``place``, or this host with one NIC: hosts are told apart as engines tell them apart."""
    if place is not None:
        return place
    host = Config.from_env().host_id or Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return Place(host)
