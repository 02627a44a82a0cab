"""The trainers' side of the direct way: from the trainers' memory to the subscribers', and on between those."""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import Mapping
from typing import Any, Literal

import torch

import torch_mooncake
from torch_mooncake.errors import Busy, DeadlineExceeded, Error, InvalidArgument, LayoutMismatch
from torch_mooncake.transfer import Engine
from torch_mooncake.weights.arena import Arena, Memory, OwnTensors
from torch_mooncake.weights.atoms import fitting
from torch_mooncake.weights.delta import Area, Maker
from torch_mooncake.weights.describe import described
from torch_mooncake.weights.fetch import Progress
from torch_mooncake.weights.files import Checkpoint, Share
from torch_mooncake.weights.layout import Layout
from torch_mooncake.weights.manifest import tensors_of
from torch_mooncake.weights.members import Go, Head, Links, Member, Room, own_place
from torch_mooncake.weights.plan import Place
from torch_mooncake.weights.publish import Published
from torch_mooncake.weights.quantise import Quantised, copy_in, quantised_locals
from torch_mooncake.weights.sources import Source, local_tensors
from torch_mooncake.weights.sums import Sums
from torch_mooncake.weights.watch import Watch

_VIEWED_S = 0.05  # for viewers of the slot that is next; then there is one more slot
_LOOK_AGAIN_S = 0.001
_RANKS_S = 5.0  # what the other ranks give rank 0 beyond its own patience

_WAIT_S = 0.2  # for the head at a time; then it may be that rank 0 has given up


class Publisher:
    """One trainer rank's part of the weights called ``name``. All ranks make one and call ``publish`` in step.

    ``source``: a model or a state dict, whose tensors are published as they are at that moment; a ``Checkpoint``, of
    which each rank reads a part; a ``Stream``. ``layout``: as for ``describe``, for the first two. ``rank`` and
    ``world``: of the trainers; all ranks' tensors together are the weights. ``subset``: subscribers may have more
    tensors than these (adapters). ``engine``: what others read from, to be reached by all subscribers; by default one
    of its own, which processes of this host reach. ``place``: this host, and which of its NICs carries this rank.
    ``pool``: where they meet; by default the process's own pool.

    Tensors that ``layout.quantise`` names travel in 8 bits, quantised while they are copied.

    It has two copies of this rank's tensors, in shared memory: what subscribers read is never what an optimiser
    writes. With ``in_place`` it has none, and they read the tensors where they lie: nothing is copied, and ``fence``
    is to be called before the tensors are written again. (Of tensors that travel in another dtype, or are not in CPU
    memory, there is one copy.) Subscribers of the same host read fastest from shared memory: see ``share``.

    ``verify``: chunks have checksums (CRC-32C), made by a thread of this process, and every node that takes one
    compares; None: where bytes go between hosts, and with what has changed. ``patience_s``: a subscriber that is waited
    for, and shows no progress for so long, is waited for no more. For one thread; a context manager.
    """

    def __init__(
        self,
        name: str,
        source: torch.nn.Module | Mapping[str, torch.Tensor] | Checkpoint | Source,
        *,
        layout: Layout | None = None,
        rank: int = 0,
        world: int = 1,
        subset: bool = False,
        in_place: bool = False,
        verify: bool | None = None,
        patience_s: float = 3.0,
        engine: Engine | None = None,
        place: Place | None = None,
        pool: Any = None,
    ) -> None:
        if not 0 <= rank < world:
            raise InvalidArgument(f"rank {rank} of {world}")
        self._room = Room(name, torch_mooncake if pool is None else pool)
        self._rank, self._world, self._subset = rank, world, subset
        self._verify, self._patience_s = verify, patience_s
        here: dict[str, torch.Tensor] = {}
        self.source: Source | None = None  # else ``_model``'s tensors
        staged: frozenset[str] = frozenset()
        self._quantised: dict[str, Quantised] = {}
        if isinstance(source, (Checkpoint, Source)):
            if layout is not None or in_place:
                raise InvalidArgument("layout and in_place are for the tensors of a model or state dict")
            self.source = Share(source, rank, world) if isinstance(source, Checkpoint) else source
            manifest = self.source.manifest
        else:
            self._model = source
            tensors, here = tensors_of(source), local_tensors(source)
            self._quantised = quantised_locals(tensors, layout)
            staged = not_in_place(here, layout) | self._quantised.keys()
            manifest = described(tensors, layout, packed=staged if in_place else True)
        self._made = frozenset(each.scales for each in self._quantised.values())
        self._fits: dict[str, bool] = {}  # targets, by uid
        self._places = {name: (tensor.data_ptr(), tensor.stride()) for name, tensor in here.items()}
        self._entered: list[str] = []  # uids of targets, whether they answer or not; as rank 0 knows
        self._attempt = ""  # the last one that this rank took part in
        self._area: Area | None = None
        self._own: OwnTensors | None = None
        self._arena: Arena | None = None
        with contextlib.ExitStack() as opened:  # what close() closes, the last first
            if engine is None:
                engine = opened.enter_context(Engine(name=f"trainer {rank} of {name}"))
            self._engine = engine
            if in_place:
                self._memory: Memory = OwnTensors(engine, manifest, here, sorted(staged | self._made))
                self._own = self._memory
            else:
                self._memory = self._arena = Arena(engine, manifest)
            opened.callback(self._memory.close)
            if self._arena is not None:
                self._area = Area(engine, self._arena)
                opened.callback(self._area.close)
            self._member = Member.of(engine, self._memory, own_place(place), world > 1)
            self._links = Links(engine, backoff=True)
            opened.callback(self._links.close)
            self._watch = Watch(self._links, patience_s)
            self._maker = None if self._area is None else Maker(self._area)
            self._sums = Sums(self._room, self._memory, self._member.uid, self._maker)
            opened.callback(self._sums.close)
            head = self._room.head()
            self.version = head.version if head is not None else 0  # of what is current
            self._room.enter(self._member, target=False)
            opened.callback(self._room.leave, self._member.uid)
            self._opened = opened.pop_all()

    def publish(
        self,
        *,
        step: int | None = None,
        mode: Literal["auto", "full", "delta"] = "auto",
        timeout: float = 120,
        source: Checkpoint | None = None,
    ) -> Published:
        """Makes the tensors as they are now the current version, and returns when it is: when all ranks have theirs
        ready. It waits for no subscriber, unless versions follow each other faster than they are read: then for those
        that are reading, while they make progress, so that all get some. ``source``: from now on another checkpoint,
        with the same tensors.

        DeadlineExceeded: not all ranks came within ``timeout`` seconds; the version before stays the current one. All
        ranks are to call it again then: what was ready for a call that failed is never part of a later one's version.
        LayoutMismatch: a tensor has not the shape any more that it was made with, or lies elsewhere (``in_place``).
        Busy: the version before was not fenced (``in_place``), or all slots are being viewed. Corrupt, IoError: the
        files of a checkpoint are not what they were when it was described. What kept the last version's checksums from
        being made is raised by the next call, before it does anything: that version is read without them.

        ``mode``, as rank 0 says: "full" sends all bytes. With "auto" a thread of this process finds what has changed
        since the version before, and that goes over networks in the place of what it is much less than: to subscribers
        that have that version whole. The others, and what has changed too much, get all bytes; so do nodes of the same
        host, for which that is quicker, but with "delta". The result is the same to the bit. (``in_place``: there is
        no version before, and all bytes are sent.)
        """
        if mode not in ("auto", "full", "delta"):
            raise InvalidArgument(f'mode is "auto", "full" or "delta", not {mode!r}')
        started = time.perf_counter()
        deadline = time.monotonic() + timeout
        self._sums.check()
        self._room.stay(self._member, target=False)
        if source is not None:
            if not isinstance(self.source, Share):
                raise InvalidArgument("only a publisher of a checkpoint publishes another one")
            self.source = self.source.renewed(source)
        here: dict[str, torch.Tensor] = self._checked() if self.source is None else {}
        if self._own is not None and self._own.board.version(0) > 0:
            raise Busy(f"version {self.version} can still be read: fence() before the tensors are written")
        targets = self._live_targets() if self._rank == 0 else []
        slot, go = self._slot_for(targets, deadline, timeout)
        try:
            self._fill(slot, go.version, here)
            if self._rank == 0:
                head = self._flip(go, step, mode, targets, deadline, timeout)
            else:
                self._room.say_ready(self._rank, self._member.uid, go.attempt)
                head = self._await_flip(go, deadline, timeout)
        except BaseException:
            self._sums.begin(slot)  # nobody reads what was not published
            if self._rank == 0 and self._world > 1:
                with contextlib.suppress(Error):  # without it, the others find out when they begin again
                    self._room.call_off()
            raise
        self.version = go.version
        self._keep({*head.sources, *head.targets, *self._entered})
        if head.verify or head.base:
            self._sums.make(slot, head)
        return Published(go.version, step, self._memory.manifest.nbytes, time.perf_counter() - started)

    def _fill(self, slot: int, version: int, here: Mapping[str, torch.Tensor]) -> None:
        self._sums.begin(slot)
        if self._own is not None:
            copy_in(self._own.copies, here, self._quantised)
        elif self._arena is not None and self.source is not None:
            self.source.fill(self._engine, self._arena, slot)
        elif self._arena is not None:
            views = self._arena.views(slot)
            copy_in(views, here, self._quantised)
        self._memory.board.announce(slot, version)
        self._memory.board.complete(slot)
        self._memory.offer(slot)

    def _checked(self) -> dict[str, torch.Tensor]:
        here = local_tensors(self._model)
        for local in self._memory.manifest.locals:
            name = local.name
            if name in self._made:
                continue
            if name not in here or tuple(here[name].shape) != local.shape:
                raise LayoutMismatch(f"{name}: {list(local.shape)} when the publisher was made, not any more")
            if self._own is not None and (here[name].data_ptr(), here[name].stride()) != self._places[name]:
                raise LayoutMismatch(f"{name} lies elsewhere than when the publisher was made")
        return here

    # --- the slot for a version, and who is still reading another ---

    def _slot_for(self, targets: list[Member], deadline: float, timeout: float) -> tuple[int, Go]:
        if self._rank > 0:
            go = self._await_go(deadline, timeout)
            self._attempt = go.attempt
            self.version = go.version - 1  # also if rank 0 has published one that this rank had given up
            return self._free_slot(set(go.kept)), go
        if (head := self._room.head()) is not None:
            self.version = max(self.version, head.version)  # one may have been published by a call that failed then
        slot, kept = self._await_slot(targets)
        go = Go(self.version + 1, uuid.uuid4().hex, tuple(sorted(kept)))
        if self._world > 1:
            self._room.let_go(go)
        return slot, go

    def _await_go(self, deadline: float, timeout: float) -> Go:
        """An attempt that this rank has not taken part in yet, and that has not succeeded without it."""
        while True:
            go = self._room.go()
            if go is not None and go.attempt != self._attempt and go.version > self.version:
                head = self._room.head()
                if head is None or head.version < go.version:
                    return go
            if time.monotonic() > deadline:
                raise DeadlineExceeded(f"rank 0 did not begin with version {self.version + 1} within {timeout} s")
            time.sleep(_LOOK_AGAIN_S)

    def _await_slot(self, targets: list[Member]) -> tuple[int, set[int]]:
        self._watch.begin()
        began = time.monotonic()
        while True:
            held = {self._memory.board.version(slot) for slot in range(len(self._memory.slots))}
            self._watch.look(targets)
            kept = self._watch.kept(targets, self.version, {version for version in held if version > 0})
            late = time.monotonic() - began > self._patience_s  # they get on, but slowly
            if self._unneeded(kept) or late:
                return self._free_slot(kept), kept
            time.sleep(_LOOK_AGAIN_S)

    def _unneeded(self, kept: set[int]) -> list[int]:
        """Slots with versions that are neither current nor being read, the oldest first."""
        versions = {slot: self._memory.board.version(slot) for slot in range(len(self._memory.slots))}
        free = [slot for slot, version in versions.items() if version <= 0 or version not in {*kept, self.version}]
        return sorted(free, key=lambda slot: versions[slot])

    def _free_slot(self, kept: set[int]) -> int:
        """The oldest that nobody needs, else one more, else the oldest that nobody views; not the current one."""
        if self._arena is None:
            return 0
        for slot in self._unneeded(kept):
            if self._arena.take(slot, _VIEWED_S):
                return slot
        if (more := self._arena.grow()) is not None:
            return more
        slots = sorted(range(len(self._arena.slots)), key=self._arena.board.version)
        for slot in slots:
            if self._arena.board.version(slot) == self.version > 0:
                continue
            if self._arena.take(slot, self._patience_s):
                return slot
        raise Busy(f"all {len(slots)} slots of {self._room.name!r} are being viewed")

    # --- the flip ---

    def _live_targets(self) -> list[Member]:
        """Those that are there."""
        found = []
        self._entered = uids = self._room.targets()
        for uid, member in zip(uids, self._room.members(uids), strict=True):
            if member is None:
                continue
            alive = self._links.alive(member)
            if alive:
                found.append(member)
                continue
            self._links.drop(uid)
            if alive is False:
                self._room.leave(uid)  # its process is gone; one that is not enters again when it finds out
        return found

    def _flip(
        self, go: Go, step: int | None, mode: str, targets: list[Member], deadline: float, timeout: float
    ) -> Head:
        sources = self._await_ranks(go, deadline, timeout)
        self._judge(targets, sources)
        takers = [member for member in targets if self._fits[member.uid]]
        hosts = {member.place.host for member in (*sources, *takers)}
        base = self.version if self._delta(mode, len(hosts)) else 0
        head = Head(
            go.version, step, tuple(member.uid for member in sources), tuple(member.uid for member in takers),
            self._subset, len(hosts) > 1 or base > 0 if self._verify is None else self._verify,
            base, mode == "delta", go.attempt,
        )  # fmt: skip
        self._room.replace_head(head)
        return head

    def _keep(self, uids: set[str]) -> None:
        """What is known of these members only; of the others everything is looked up again, if they come again."""
        self._room.keep(uids)
        self._links.keep(uids)
        self._fits = {uid: fits for uid, fits in self._fits.items() if uid in uids}

    def _await_ranks(self, go: Go, deadline: float, timeout: float) -> list[Member]:
        """All trainer ranks, when all are ready at one look: one that died meanwhile and came again is not."""
        while True:
            uids = self._room.ready(self._world, go.attempt) if self._world > 1 else []
            members = [None if uid is None else self._room.member(uid) for uid in uids]
            found = [member for member in members if member is not None]
            if len(found) == len(members):
                return [self._member, *found]
            if time.monotonic() > deadline:
                rank = members.index(None) + 1
                raise DeadlineExceeded(f"rank {rank} did not publish version {go.version} within {timeout} s")
            time.sleep(_LOOK_AGAIN_S)

    def _delta(self, mode: str, hosts: int) -> bool:
        """Whether there are blobs of what has changed since the version before."""
        if self._area is None or mode == "full" or (mode == "auto" and hosts == 1):
            return False
        return self.version > 0 and self._area.holds(self.version) is not None

    @property
    def delta_nbytes(self) -> int:
        """Bytes of this rank's part of what has changed from the version before to the current one, as far as it was
        found by now; 0 if it is not sent so."""
        return 0 if self._maker is None else self._maker.nbytes(self.version)

    def _judge(self, targets: list[Member], sources: list[Member]) -> None:
        """Which of them can take these weights. Who cannot is told so when it tries by itself."""
        for part in (False, True):
            some = [member for member in targets if member.part == part and member.uid not in self._fits]
            manifests = [member.manifest for member in some]
            fits = fitting([source.manifest for source in sources], manifests, subset=self._subset, partial=part)
            self._fits.update(zip((member.uid for member in some), fits, strict=True))

    def _await_flip(self, go: Go, deadline: float, timeout: float) -> Head:
        seen, over = None, False
        while (head := self._room.head()) is None or head.attempt != go.attempt or self._member.uid not in head.sources:
            if over:
                raise DeadlineExceeded(f"rank 0 did not publish version {go.version} within {timeout} s, or gave it up")
            over = self._room.go() != go
            if not over and time.monotonic() > deadline:
                self._room.say_ready(self._rank, self._member.uid, "")
                over = True
            if not over:
                left = min(deadline - time.monotonic(), _WAIT_S)
                seen = self._room.await_head(seen, max(0.0, left)) or seen
        return head

    # --- after the flip ---

    def fence(self, timeout: float = 30.0) -> dict[str, bool]:
        """Returns when nobody needs the current version from the trainers any more: when each live target has it, or
        was given up because it made no progress for ``patience_s``, or when ``timeout`` seconds have passed. Whoever
        was given up takes a later version.

        With ``in_place`` nobody can read the version from this rank afterwards: the tensors may be written, and a read
        that is still under way comes to nothing. All ranks call it; DeadlineExceeded if rank 0 does not. What is
        returned is ``delivered()``; empty on ranks other than 0.
        """
        version = self.version
        found: dict[str, bool] = {}
        try:
            if self._rank == 0:
                found = self._await_targets(version, time.monotonic() + timeout)
                if self._world > 1:
                    self._room.say_fenced(version)
            else:
                end = time.monotonic() + timeout + _RANKS_S
                while self._room.fenced() < version:
                    if time.monotonic() > end:
                        raise DeadlineExceeded(f"rank 0 did not fence version {version} within {timeout} s")
                    time.sleep(_LOOK_AGAIN_S)
        finally:
            if self._own is not None:
                self._sums.withdraw(0)
        return found

    def _await_targets(self, version: int, deadline: float) -> dict[str, bool]:
        members = self._targets()
        live = [member for member in members.values() if member is not None]
        self._watch.begin()
        while True:
            self._watch.look(live)
            if not self._watch.missing(live, version) or time.monotonic() > deadline:
                break
            time.sleep(_LOOK_AGAIN_S)
        states = self._watch.states
        return {uid: uid in states and states[uid].complete >= version for uid in members}

    def _targets(self) -> dict[str, Member | None]:
        head = self._room.head()
        uids = head.targets if head is not None else ()
        return dict(zip(uids, self._room.members(uids), strict=True))

    def delivered(self) -> dict[str, bool]:
        """Of the targets of the current version: whether each has all of it. Those that are gone have not."""
        members = self._targets()
        self._watch.look([member for member in members.values() if member is not None])
        states = self._watch.states
        return {uid: uid in states and states[uid].complete >= self.version for uid in members}

    def progress(self) -> dict[str, Progress | None]:
        """Of the targets of the current version: how far each is with the newest version that it has begun with. None:
        it has none, is gone, or does not answer."""
        members = self._targets()
        self._watch.look([member for member in members.values() if member is not None])
        states = self._watch.states
        return {uid: states[uid].progress if uid in states else None for uid in members}

    def close(self) -> None:
        """What was published can be had no more, except from subscribers."""
        self._opened.close()

    def __enter__(self) -> Publisher:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def not_in_place(here: Mapping[str, torch.Tensor], layout: Layout | None) -> frozenset[str]:
    """Names of tensors that do not lie as they travel: on a device, or in another dtype."""
    found = set()
    for name, tensor in here.items():
        rule = None if layout is None else layout.rule_for(name)
        dtype = None if rule is None else rule[0].dtype
        if not tensor.is_cpu or (dtype is not None and dtype != str(tensor.dtype).removeprefix("torch.")):
            found.add(name)
    return frozenset(found)
