"""The inference ranks' side of the direct way."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

import torch_mooncake
from torch_mooncake import sharding
from torch_mooncake.errors import (
    Cancelled,
    Closed,
    DeadlineExceeded,
    Error,
    InvalidArgument,
    LayoutMismatch,
    PeerLost,
    Unsupported,
)
from torch_mooncake.pool import Version
from torch_mooncake.transfer import Engine
from torch_mooncake.weights.arena import SLOTS, Arena, copy_tensors
from torch_mooncake.weights.describe import described
from torch_mooncake.weights.fetch import Fetch, Progress, Superseded
from torch_mooncake.weights.layout import Layout
from torch_mooncake.weights.manifest import tensors_of
from torch_mooncake.weights.members import Head, Links, Member, Room, own_place
from torch_mooncake.weights.plan import PLANNER, Place, Plan
from torch_mooncake.weights.publisher import local_tensors
from torch_mooncake.weights.ranges import Chunks, names_of
from torch_mooncake.weights.shards import Local, listed
from torch_mooncake.weights.subscribe import Update

_WAIT_S = 0.2  # what close() waits for the thread to see it, at most, when nothing comes
_LEAST_PAUSE_S, _MOST_PAUSE_S = 0.002, 0.05
_RETRY_S = 0.5  # between attempts at a version whose source is lost


@dataclass(frozen=True)
class _Version:
    head: Head
    slot: int
    nbytes: int
    seconds: float
    names: frozenset[str]  # local tensors that it has


class _NobodyHasIt(Exception):
    """All who had the version have left: it is as if there were none."""


class Subscriber:
    """Follows the weights called ``name`` into this process. A thread brings each new version into memory of its own
    while the model goes on with the one before; ``update()`` puts it in place between two steps, all of it or nothing.

    ``flip``: "copy" copies it into the model's own tensors (any strides, dtypes and devices); "swap" makes the tensors
    refer to the memory that it came into, in no time, and their addresses alternate: for contiguous CPU tensors of the
    published dtypes. Other subscribers read from this process what it has (it is a relay) while it lives.

    ``part``: this process is one of several that together are the model, and what is published may have names that it
    has not; by default so with a ``layout``. ``patience_s``: a relay that sends nothing for so long is passed over.
    ``layout``, ``engine``, ``place``, ``pool``: as for ``Publisher``. ``update`` is for one thread; a context manager.
    """

    def __init__(
        self,
        name: str,
        model_or_state_dict: torch.nn.Module | Mapping[str, torch.Tensor],
        *,
        layout: Layout | None = None,
        part: bool | None = None,
        flip: Literal["copy", "swap"] = "copy",
        engine: Engine | None = None,
        place: Place | None = None,
        patience_s: float = 3.0,
        pool: Any = None,
    ) -> None:
        if flip not in ("copy", "swap"):
            raise InvalidArgument(f'flip is "copy" or "swap", not {flip!r}')
        self.name = name
        self.version = 0  # that the model holds; 0: none yet
        self.step: int | None = None
        self._room = Room(name, torch_mooncake if pool is None else pool)
        self._model, self._flip, self._patience_s = model_or_state_dict, flip, patience_s
        tensors = tensors_of(model_or_state_dict)
        manifest = described(tensors, layout, packed=True)
        if flip == "swap":
            _check_swap(tensors, manifest.locals)
        self._own_engine = engine is None
        self._engine = Engine(name=f"subscriber of {name}") if engine is None else engine
        self._arena = Arena(self._engine, manifest)
        here = local_tensors(model_or_state_dict)
        for slot in range(SLOTS):  # what never comes (padding) is as the model has it
            copy_tensors(views := self._arena.views(slot), {name: here[name] for name in views})
        self._member = Member.of(
            self._engine, self._arena, own_place(place), layout is not None if part is None else part
        )
        self._links = Links(self._engine)
        self._chunks: dict[tuple[str, int, int], Chunks] = {}
        self._chunks_of = ""  # the digest of the plan they belong to
        self._changed = threading.Condition()
        self._ready: _Version | None = None
        self._error: Error | None = None
        self._broken: BaseException | None = None
        self._serving: int | None = None  # the slot that the model's tensors are in
        self._latest: int | None = None  # the slot that was filled last
        self._brought = 0  # version
        self._progress: Progress | None = None
        self._closed = False
        self._room.enter(self._member, target=True)
        self._thread = threading.Thread(target=self._follow, name="tm-weights", daemon=True)
        self._thread.start()

    @property
    def progress(self) -> Progress | None:
        """Of the version that is coming, or came last."""
        return self._progress

    def update(self, *, timeout: float = 30) -> Update:
        """Waits for a version newer than the model's and puts it in place.

        The model is as it was when this raises: DeadlineExceeded (no newer version is complete within ``timeout``
        seconds), PeerLost (a trainer is lost before all had its part; a later call tries again), LayoutMismatch (the
        first ten differences), Closed.
        """
        deadline = time.monotonic() + timeout
        with self._changed:
            while self._ready is None:
                if self._broken is not None:
                    raise self._broken
                if self._error is not None:
                    error, self._error = self._error, None
                    raise error
                if self._closed:
                    raise Closed(f"the subscriber of {self.name!r} is closed")
                left = deadline - time.monotonic()
                if left <= 0:
                    have = f"newer than {self.version}" if self.version else "at all"
                    raise DeadlineExceeded(f"no version of weights {self.name!r} {have} was there in {timeout} s")
                self._changed.wait(left)
            ready, self._ready = self._ready, None
            self._put_in_place(ready)
            self.version, self.step = ready.head.version, ready.head.step
        return Update(ready.head.version, ready.head.step, ready.nbytes, ready.seconds)

    def try_update(self) -> Update | None:
        """As ``update``, without waiting: None if no newer version is complete."""
        with self._changed:
            if self._ready is None and self._error is None and self._broken is None and not self._closed:
                return None
        return self.update(timeout=0)

    def _put_in_place(self, ready: _Version) -> None:
        views = self._arena.views(ready.slot)
        if self._flip == "copy":
            here = local_tensors(self._model)
            copy_tensors(here, {name: views[name] for name in ready.names})
            return
        aliases = self._arena.manifest.aliases
        for name, tensor in _own_tensors(self._model).items():
            tensor.data = views[aliases.get(name, name)]
        self._serving = ready.slot

    def _follow(self) -> None:
        seen: Version | None = None
        try:
            while not self._closed:
                found = self._room.await_head(seen, _WAIT_S)
                head = None if found is None else self._room.head()
                if head is not None and head.version > self._brought:
                    self._attempt(head)
                else:
                    seen = seen if found is None else found
        except Cancelled:
            pass  # by close()
        except BaseException as error:  # update() raises it
            with self._changed:
                self._broken = error
                self._changed.notify_all()

    def _attempt(self, head: Head) -> None:
        try:
            ready = self._bring(head)
        except Superseded:
            time.sleep(_LEAST_PAUSE_S)
            return
        except _NobodyHasIt:
            time.sleep(_MOST_PAUSE_S)
            return
        except (PeerLost, DeadlineExceeded, LayoutMismatch) as error:
            with self._changed:
                self._error = error
                self._changed.notify_all()
                newer = _Newer(self._room, head)
                self._changed.wait_for(lambda: self._closed or newer(), _RETRY_S)
            return
        with self._changed:
            self._error = None
            self._ready = ready
            self._brought = head.version
            self._changed.notify_all()

    def _bring(self, head: Head) -> _Version:
        if head.subset and self._flip == "swap":
            raise Unsupported('flip="swap" is for all of the weights; a subset is published')
        started = time.perf_counter()
        sources = [self._found(uid) for uid in head.sources]
        targets = [self._found(uid) for uid in head.targets]
        if self._member in targets and None not in sources + targets:
            plan, members, me = self._planned(sources, targets, head.subset)
        else:  # it came later, or does not fit, or somebody has left: by itself, from whoever has everything
            plan, members, me = self._planned(self._those_who_have(head, sources), [self._member], head.subset)
        if plan.digest != self._chunks_of:
            self._chunks, self._chunks_of = {}, plan.digest
        names = names_of(plan, [member.manifest for member in members[: plan.sources]])
        with self._changed:
            slot = self._free_slot()
        fetch = Fetch(
            self._engine, self._links, plan, names, members, me, self._arena, slot, head.version, self._chunks,
            self._patience_s,
        )  # fmt: skip
        self._progress = fetch.progress
        fetch.run(lambda: self._closed)
        self._latest = slot
        if self._member.uid not in head.targets:
            self._room.enter(self._member, target=True)
        seconds = time.perf_counter() - started
        return _Version(head, slot, fetch.progress.bytes_done, seconds, self._complete_locals(names))

    def _complete_locals(self, names: list[list[str]]) -> frozenset[str]:
        """The local tensors that consist of published ones. LayoutMismatch for those that do in part."""
        published = {name for group in names for name in group}
        manifest = self._arena.manifest
        parts: dict[int, set[bool]] = {}
        for whole, local in zip(manifest.whole.tolist(), manifest.local.tolist(), strict=True):
            parts.setdefault(local, set()).add(manifest.wholes[whole].name in published)
        mixed = [f"{manifest.locals[i].name}: only in part" for i, found in parts.items() if len(found) > 1]
        if mixed:
            raise LayoutMismatch(listed("a subset of the weights has some tensors", mixed))
        return frozenset(manifest.locals[i].name for i, found in parts.items() if True in found)

    def _planned(
        self, sources: list[Member | None], targets: list[Member | None], subset: bool
    ) -> tuple[Plan, list[Member], int]:
        """(plan, its nodes, which of them this one is)."""
        members = [member for member in (*sources, *targets) if member is not None]
        manifests = [member.manifest for member in members]
        places = [member.place for member in members]
        partial = any(member.part for member in members[len(sources) :])
        plan = PLANNER.plan(
            manifests[: len(sources)], manifests[len(sources) :], places, subset=subset, partial=partial
        )
        return plan, members, members.index(self._member, len(sources))

    def _found(self, uid: str) -> Member | None:
        """None: it has left."""
        return self._member if uid == self._member.uid else self._room.member(uid)

    def _those_who_have(self, head: Head, trainers: list[Member | None]) -> list[Member | None]:
        """Subscribers that have all of the version; and the trainers, if those together lack something."""
        found: list[Member | None] = []
        for uid in head.targets:
            member = self._room.member(uid)
            if member is not None and member is not self._member and self._links.has(member, head.version):
                found.append(member)
        if found:
            try:
                self._planned(found, [self._member], head.subset)
                return found
            except LayoutMismatch:
                pass  # not all of it: the trainers have the rest
        found = [member for member in (*trainers, *found) if member is not None]
        if not found:
            raise _NobodyHasIt
        return found

    def _free_slot(self) -> int:
        """The slot for the next version: not the one that the model is in; and, if there is a choice, not the one that
        was filled last, which others may still be reading."""
        taken = self._serving if self._serving is not None else self._latest
        slot = 0 if taken is None else (taken + 1) % SLOTS
        if self._ready is not None and self._ready.slot == slot:
            self._ready = None
        return slot

    def close(self) -> None:
        """Stop following. The model keeps what it has; nobody can read from this process any more."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._changed.notify_all()
        self._thread.join()
        self._room.leave(self._member.uid)
        self._links.close()
        self._arena.close()
        if self._own_engine:
            self._engine.close()

    def __enter__(self) -> Subscriber:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class _Newer:
    """Whether the head is another one by now; asks once."""

    def __init__(self, room: Room, head: Head) -> None:
        self._room, self._head = room, head

    def __call__(self) -> bool:
        return self._room.head() != self._head


def _own_tensors(model_or_state_dict: torch.nn.Module | Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
    if isinstance(model_or_state_dict, torch.nn.Module):
        return model_or_state_dict.state_dict(keep_vars=True)
    return model_or_state_dict


def _check_swap(tensors: Mapping[str, torch.Tensor], locals: tuple[Local, ...]) -> None:
    travels = {local.name: local.dtype for local in locals}
    for name, tensor in tensors.items():
        if (
            sharding.is_dtensor(tensor)
            or not tensor.is_cpu
            or not tensor.is_contiguous()
            or travels.get(name, str(tensor.dtype).removeprefix("torch.")) != str(tensor.dtype).removeprefix("torch.")
        ):
            raise Unsupported(f'flip="swap" is for contiguous CPU tensors of the published dtype; {name} is not')
