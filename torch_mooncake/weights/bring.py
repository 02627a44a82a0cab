"""How a subscriber gets a version: from whom, by which plan, and into which memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch_mooncake.errors import DeadlineExceeded, Error, LayoutMismatch, PeerLost
from torch_mooncake.transfer import Engine
from torch_mooncake.weights.arena import Memory
from torch_mooncake.weights.board import VERSION
from torch_mooncake.weights.delta import Area, Taker
from torch_mooncake.weights.fetch import Fetch, Progress, Superseded, Wiring
from torch_mooncake.weights.members import Head, Links, Member, Room
from torch_mooncake.weights.ranges import Addresses, names_of
from torch_mooncake.weights.shards import listed
from torch_mooncake.weights.staging import Staging
from torch_mooncake.weights.sums import planned


class Torn(Error):
    """The model's tensors are of two versions. The next ``update()`` that succeeds makes them whole."""

    code = "TORN"
    retryable = True


class NobodyHasIt(Exception):
    """All who had the version have left, or nobody has it who could be asked: it is as if there were none."""


@dataclass(frozen=True)
class Brought:
    head: Head
    slot: int
    nbytes: int
    seconds: float
    names: frozenset[str]  # local tensors that it has
    delta_nbytes: int  # of blobs that came in the place of other bytes


class Bringer:
    """For one thread. ``staged``: see Addresses. ``progress``: of the version that is coming, or came last."""

    def __init__(
        self,
        engine: Engine,
        room: Room,
        member: Member,
        memory: Memory,
        patience_s: float,
        *,
        staged: frozenset[int] = frozenset(),
        staging: Staging | None = None,
        area: Area | None = None,
    ) -> None:
        self._area = area
        self.links = Links(engine)
        self.progress: Progress | None = None
        self._engine, self._room, self._member, self._memory = engine, room, member, memory
        self._patience_s, self._staging = patience_s, staging
        self._mine = Addresses(memory.manifest, memory.offsets, staged)
        self._wired: Wiring | None = None
        self._names: frozenset[str] = frozenset()

    def wire(self, head: Head) -> tuple[Wiring, bool]:
        """(who sends what, whether there are checksums). LayoutMismatch; NobodyHasIt."""
        self._room.members((*head.sources, *head.targets))  # at once
        sources = [self.found(uid) for uid in head.sources]
        targets = [member for uid in head.targets if (member := self.found(uid)) is None or member.relays]
        known = [member for member in (*sources, *targets) if member is not None]
        if len(known) == len(sources) + len(targets):
            if self._member in known:
                return self._wiring(known, len(sources), head, known.index(self._member, len(sources))), head.verify
            twin = self._twin(known, len(sources))
            if twin is not None:  # behind one with the same layout: what it has, as it gets it
                return self._wiring(known, len(sources), head, twin, behind=True), head.verify
        # It came later, or does not fit, or somebody has left: by itself, from whoever has everything.
        those = self._those_who_have(head, sources)
        return self._wiring([*those, self._member], len(those), head, len(those)), False

    def bring(self, head: Head, slot: int, stopped: Callable[[], bool]) -> Brought:
        """The version, into the slot. Errors as Fetch, and those of ``wire``."""
        started = time.perf_counter()
        wiring, verify = self.wire(head)
        fetch = Fetch(
            self._engine, self.links, wiring, self._memory, slot, head.version, self._patience_s, verify=verify,
            staging=self._staging, deltas=head.base > 0, taker=self._taker(head, slot),
        )  # fmt: skip
        self.progress = fetch.progress
        if self._staging is not None:
            self._staging.prepare([n for route, path in wiring.paths() for n in wiring.chunks(route, path[-1]).staged])
        try:
            fetch.run(stopped)
        except (PeerLost, DeadlineExceeded) as error:
            if set(fetch.lost) & set(head.sources):
                raise
            raise Superseded from error  # a subscriber that was to be read from has left: others have it
        if self._member.uid not in head.targets:
            self._room.enter(self._member, target=True)
        seconds = time.perf_counter() - started
        return Brought(head, slot, fetch.progress.bytes_done, seconds, self._names, fetch.progress.delta_nbytes)

    def keep(self, head: Head) -> None:
        """What is known of those who take part in this version only."""
        uids = {*head.sources, *head.targets, self._member.uid}
        self._room.keep(uids)
        self.links.keep(uids)

    def _taker(self, head: Head, slot: int) -> Taker | None:
        """None: this node has not the base version, whole and in another slot."""
        base = self._area.holds(head.base) if self._area is not None and head.base else None
        if self._area is None or base is None or base == slot:
            return None
        return Taker(self._area, slot, base, head.everywhere)

    def check_sources(self, head: Head) -> None:
        """That all who have the version first can be reached and have it. PeerLost, Superseded."""
        wiring, _ = self.wire(head)
        firsts = sorted({path[0] for _, path in wiring.paths()})
        members = [wiring.members[node] for node in firsts]
        for member, header in zip(members, self.links.headers(members), strict=True):
            if header is None and member.uid not in head.sources:
                raise Superseded
            if header is None:
                name = member.record.name
                raise PeerLost(f"version {head.version} of the weights cannot come from {name}: it does not answer")
            if head.version not in header[:, VERSION]:
                raise Superseded

    def found(self, uid: str) -> Member | None:
        """None: it has left."""
        return self._member if uid == self._member.uid else self._room.member(uid)

    def _twin(self, members: Sequence[Member], sources: int) -> int | None:
        digest = self._member.manifest.digest
        for node in range(sources, len(members)):
            if members[node].manifest.digest == digest and self.links.alive(members[node]):
                return node
        return None

    def _wiring(self, members: Sequence[Member], sources: int, head: Head, me: int, *, behind: bool = False) -> Wiring:
        plan = planned(members[:sources], members[sources:], head.subset)
        wired = self._wired
        key = plan.digest, me, behind, [member.uid for member in members]
        if wired is None or key != (wired.plan.digest, wired.me, wired.behind, [m.uid for m in wired.members]):
            names = names_of(plan, [member.manifest for member in members[:sources]])
            self._names = self._complete_locals(names)
            wired = self._wired = Wiring(plan, members, me, names, self._mine, behind)
        return wired

    def _complete_locals(self, names: Sequence[Sequence[str]]) -> frozenset[str]:
        """The local tensors that consist of published ones. LayoutMismatch for those that do in part."""
        published = {name for group in names for name in group}
        manifest = self._memory.manifest
        parts: dict[int, set[bool]] = {}
        for whole, local in zip(manifest.whole.tolist(), manifest.local.tolist(), strict=True):
            parts.setdefault(local, set()).add(manifest.wholes[whole].name in published)
        mixed = [f"{manifest.locals[i].name}: only in part" for i, found in parts.items() if len(found) > 1]
        if mixed:
            raise LayoutMismatch(listed("a subset of the weights has some tensors", mixed))
        return frozenset(manifest.locals[i].name for i, found in parts.items() if True in found)

    def _those_who_have(self, head: Head, trainers: Sequence[Member | None]) -> list[Member]:
        """Subscribers that have all of the version; and the trainers, if those together lack something. Of a subset
        the trainers only: subscribers have more tensors, and do not say which of them were published."""
        found: list[Member] = []
        if head.subset:
            found = [member for member in trainers if member is not None]
            if len(found) < len(trainers):
                raise NobodyHasIt(f"a trainer that had version {head.version} of the weights has left")
            return found
        for uid in head.targets:
            member = self._room.member(uid)
            if (
                member is not None
                and member.relays
                and member.uid != self._member.uid
                and self.links.has(member, head.version)
            ):
                found.append(member)
        if found:
            try:
                self._wiring([*found, self._member], len(found), head, len(found))
                return found
            except LayoutMismatch:
                pass  # not all of it: the trainers have the rest
        found = [*(member for member in trainers if member is not None), *found]
        if not found:
            raise NobodyHasIt(f"nobody has version {head.version} of the weights any more")
        return found
