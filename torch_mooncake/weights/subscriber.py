"""The inference ranks' side of the direct way."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch

import torch_mooncake
from torch_mooncake import sharding
from torch_mooncake.errors import (
    Cancelled,
    Closed,
    Corrupt,
    DeadlineExceeded,
    Error,
    InvalidArgument,
    LayoutMismatch,
    PeerLost,
    Unsupported,
)
from torch_mooncake.pool import Version
from torch_mooncake.transfer import Engine
from torch_mooncake.weights.arena import SLOTS, Arena, Memory, OwnTensors, check_shapes, copy_tensors
from torch_mooncake.weights.board import WANTED
from torch_mooncake.weights.bring import Bringer, Brought, NobodyHasIt, Torn
from torch_mooncake.weights.delta import Area
from torch_mooncake.weights.describe import described
from torch_mooncake.weights.fetch import Progress, Superseded
from torch_mooncake.weights.layout import Layout
from torch_mooncake.weights.manifest import tensors_of
from torch_mooncake.weights.members import Head, Member, Room, own_place
from torch_mooncake.weights.plan import Place
from torch_mooncake.weights.publisher import not_in_place
from torch_mooncake.weights.shards import Local, Manifest
from torch_mooncake.weights.sources import local_tensors
from torch_mooncake.weights.staging import Staging
from torch_mooncake.weights.subscribe import Update
from torch_mooncake.weights.views import Viewer

_WAIT_S = 0.2  # what close() waits for the thread to see it, at most, when nothing comes
_VIEWED_S = 0.05  # for viewers of the slot that is next; then there is one more slot
_LEAST_PAUSE_S, _MOST_PAUSE_S = 0.002, 0.05
_RETRY_S = 0.5  # between attempts at a version whose source is lost
_FLIPS = ("copy", "swap", "direct", "view")


class Subscriber:
    """Follows the weights called ``name`` into this process; ``update()`` puts a version in place between two steps.

    ``flip`` says how:

    * "copy": a thread brings each version into memory of its own while the model goes on with the one before, and
      ``update`` copies it into the model's tensors (any strides, dtypes and devices). All of it or nothing.
    * "swap": the same, and the tensors refer to the memory that it came into, in no time; their addresses alternate.
      For contiguous CPU tensors of the published dtypes.
    * "direct": ``update`` brings the version straight into the model's tensors, through at most ``staging`` bytes
      where those are on a device, of another dtype, or strided in their last dimension. No second copy of the model
      is held. The model must not be used meanwhile, and when it fails on the way, it is torn: see ``update``.
    * "view": the tensors refer to the memory of a trainer or subscriber of the same host, which does not overwrite it
      while they do. They are for reading only: to write to them is a crash. Nothing is copied.

    Other subscribers read from this process what it has (it is a relay) while it lives: with "copy" and "swap", and
    with "direct" if nothing is staged.

    ``on_version``: called with the number of each version that ``update`` can have, on a thread of this object; what
    it raises, ``update`` raises. ``part``: this process is one of several that together are the model, and what is
    published may have names that it has not; by default so with a ``layout``. ``patience_s``: a relay that sends
    nothing for so long is passed over. ``layout``, ``engine``, ``place``, ``pool``: as for ``Publisher``. ``update``
    is for one thread; a context manager.
    """

    def __init__(
        self,
        name: str,
        model_or_state_dict: torch.nn.Module | Mapping[str, torch.Tensor],
        *,
        layout: Layout | None = None,
        part: bool | None = None,
        flip: Literal["copy", "swap", "direct", "view"] = "copy",
        staging: int = 256 << 20,
        on_version: Callable[[int], None] | None = None,
        engine: Engine | None = None,
        place: Place | None = None,
        patience_s: float = 3.0,
        pool: Any = None,
    ) -> None:
        if flip not in _FLIPS:
            raise InvalidArgument(f"flip is one of {', '.join(_FLIPS)}, not {flip!r}")
        if layout is not None and layout.quantise:
            raise InvalidArgument("a publisher quantises; a subscriber has FP8 tensors, and those of their scales")
        self.name = name
        self.version = 0  # that the model holds; 0: none yet
        self.step: int | None = None
        self.torn = False  # the model's tensors are of two versions
        self._room = Room(name, torch_mooncake if pool is None else pool)
        self._model, self._flip, self._on_version = model_or_state_dict, flip, on_version
        tensors, here = tensors_of(model_or_state_dict), local_tensors(model_or_state_dict)
        self._staging: Staging | None = None
        self._arena: Arena | None = None
        self._area: Area | None = None
        staged: frozenset[int] = frozenset()
        follows = flip in ("copy", "swap")
        self._changed = threading.Condition()
        self._ready: Brought | None = None
        self._error: Error | None = None
        self._broken: BaseException | None = None
        self._serving: int | None = None  # the slot that the model's tensors are in
        self._latest: int | None = None  # the slot that was filled last
        self._brought = 0  # version
        self._head: Version | None = None  # that update() saw last, when there is no thread
        self._closed = False
        with contextlib.ExitStack() as opened:  # what close() closes, the last first
            if engine is None:
                engine = opened.enter_context(Engine(name=f"subscriber of {name}"))
            self._engine = engine
            if flip == "direct":
                names = not_in_place(here, layout) | _scattered(tensors, here, layout)
                manifest = described(tensors, layout)
                self._memory: Memory = OwnTensors(self._engine, manifest, here, sorted(names), hidden=True)
                staged = frozenset(i for i, local in enumerate(manifest.locals) if local.name in names)
            else:
                manifest = described(tensors, layout, packed=True)
                if flip != "copy":
                    _check_swap(flip, tensors, manifest.locals)
                if flip == "view":
                    nothing = Manifest.of((), (), ())
                    self._memory = OwnTensors(self._engine, nothing, {})
                    self._memory.manifest = manifest
                else:
                    self._arena = self._memory = Arena(self._engine, manifest)
            opened.callback(self._memory.close)
            if flip == "direct":
                self._staging = Staging(self._engine, staging, manifest.locals, here)
                opened.callback(self._staging.close)
            if self._arena is not None:
                for slot in range(SLOTS):
                    self._fill(slot)
                self._area = Area(self._engine, self._arena)
                opened.callback(self._area.close)
            self._member = Member.of(
                self._engine, self._memory, own_place(place), layout is not None if part is None else part,
                relays=follows or (flip == "direct" and not staged), follows=follows,
            )  # fmt: skip
            self._bringer = Bringer(
                self._engine,
                self._room,
                self._member,
                self._memory,
                patience_s,
                staged=staged,
                staging=self._staging,
                area=self._area,
            )
            opened.callback(self._bringer.links.close)
            self._viewer = Viewer(self._room, self._bringer.links, self._member)
            self._room.enter(self._member, target=True)
            opened.callback(self._room.leave, self._member.uid)
            self._opened = opened.pop_all()
        self._thread: threading.Thread | None = None
        if follows or on_version is not None:
            self._thread = threading.Thread(target=self._run, name="tm-weights", daemon=True)
            self._thread.start()

    @property
    def progress(self) -> Progress | None:
        """Of the version that is coming, or came last."""
        return self._bringer.progress

    @property
    def staging_peak(self) -> int:
        """The most bytes of staging memory that were in use at one time (``flip="direct"``)."""
        return 0 if self._staging is None else self._staging.peak

    def update(self, *, timeout: float = 30) -> Update:
        """Waits for a version newer than the model's and puts it in place.

        The model is as it was when this raises: DeadlineExceeded (no newer version is complete within ``timeout``
        seconds), PeerLost (a trainer is lost before all had its part; a later call tries again), PoolUnavailable (a
        later call tries again), Corrupt (bytes arrived with wrong checksums, again and again), LayoutMismatch (the
        first ten differences), Unsupported ("view": no slot of this host has the tensors as they are here), Closed.

        But Torn (``flip="direct"``): it failed on the way, for the reason that is its cause, and the model has parts of
        two versions, as ``torn`` says. The next call that succeeds makes it whole.
        """
        deadline = time.monotonic() + timeout
        if self._flip in ("direct", "view"):
            return self._update_now(deadline, timeout)
        with self._changed:
            while self._ready is None or self._broken is not None:
                self._raise_what_happened()
                left = deadline - time.monotonic()
                if left <= 0:
                    raise self._too_late(timeout)
                self._changed.wait(left)
            ready = self._ready
            self._put_in_place(ready)
            self._ready = None
            self.version, self.step = ready.head.version, ready.head.step
        return Update(ready.head.version, ready.head.step, ready.nbytes, ready.seconds, ready.delta_nbytes)

    def try_update(self) -> Update | None:
        """As ``update``, without waiting for a version: None if there is no newer one to be had. ("direct": it
        takes the time that the bytes take, 30 s at most.)"""
        if self._flip in ("direct", "view"):
            return self._try_now(30)
        with self._changed:
            if self._ready is None and self._error is None and self._broken is None and not self._closed:
                return None
            return self.update(timeout=0)

    def _try_now(self, timeout: float) -> Update | None:
        self._raise_what_happened()
        head = self._room.head()
        if head is None or head.version <= self.version:
            return None
        try:
            return self._take(head, time.monotonic() + timeout, timeout)
        except (Superseded, NobodyHasIt, DeadlineExceeded) as error:
            if self.torn:
                raise Torn("the model is torn, and the version cannot be had now") from error
            return None

    def _raise_what_happened(self) -> None:
        if self._broken is not None:
            raise self._broken
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        if self._closed:
            raise Closed(f"the subscriber of {self.name!r} is closed")

    def _too_late(self, timeout: float) -> DeadlineExceeded:
        have = f"newer than {self.version}" if self.version else "at all"
        return DeadlineExceeded(f"no version of weights {self.name!r} {have} was there in {timeout} s")

    # --- "copy" and "swap": a thread brings it, update() puts it in place ---

    def _put_in_place(self, ready: Brought) -> None:
        assert self._arena is not None
        views = self._arena.views(ready.slot)
        if self._flip == "copy":
            here = local_tensors(self._model)
            copy_tensors(here, {name: views[name] for name in ready.names})
            return
        self._refer_to(views)
        self._serving = ready.slot

    def _refer_to(self, views: Mapping[str, torch.Tensor]) -> None:
        aliases = self._memory.manifest.aliases
        own = _own_tensors(self._model)
        found = {name: views[root] for name in own if (root := aliases.get(name, name)) in views}
        check_shapes(own, found, own)
        for name, tensor in own.items():
            tensor.data = found[name]

    def _run(self) -> None:
        seen: Version | None = None
        told = 0
        try:
            while not self._closed:
                version = 0
                try:
                    found = self._room.await_head(seen, _WAIT_S)
                    head = None if found is None else self._room.head()
                    if head is not None and head.version > self._brought and self._arena is not None:
                        self._attempt(head)
                    else:
                        seen = seen if found is None else found
                    version = self._brought if self._arena is not None else head.version if head is not None else 0
                except Error as error:
                    if not error.retryable:
                        raise
                    self._pause(error, lambda: False)  # the pool is away; it may come again
                if self._on_version is not None and version > told:
                    told = version
                    self._on_version(version)
        except Cancelled:
            pass  # by close()
        except BaseException as error:  # update() raises it
            with self._changed:
                self._broken = error
                self._changed.notify_all()

    def _attempt(self, head: Head) -> None:
        try:
            if head.subset and self._flip == "swap":
                raise Unsupported('flip="swap" is for all of the weights; a subset is published')
            slot = self._free_slot()
            ready = self._bringer.bring(head, slot, lambda: self._closed)
            self._bringer.keep(head)
            self._memory.offer(slot)
        except Superseded:
            time.sleep(_LEAST_PAUSE_S)
            return
        except NobodyHasIt:
            time.sleep(_MOST_PAUSE_S)
            return
        except (PeerLost, DeadlineExceeded, LayoutMismatch, Corrupt) as error:
            self._pause(error, _Newer(self._room, head))
            return
        with self._changed:
            self._error = None
            self._ready = ready
            self._latest = ready.slot
            self._brought = head.version
            self._changed.notify_all()

    def _pause(self, error: Error, over: Callable[[], bool]) -> None:
        """``update`` raises the error, and there is another attempt a little later, or when it is ``over()``."""
        with self._changed:
            if self._arena is not None:  # else ``update`` asks for itself
                self._error = error
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._closed or over(), _RETRY_S)

    def _free_slot(self) -> int:
        """The slot for the next version: not the one that the model is in, nor one that is viewed; and, if there is a
        choice, not the one that was filled last, which others may still be reading. One more if there is none."""
        assert self._arena is not None
        while not self._closed:
            with self._changed:
                taken = self._serving if self._serving is not None else self._latest
                ready = None if self._ready is None else self._ready.slot
            count = len(self._arena.slots)
            others = [0, 1] if taken is None else [(taken + i) % count for i in range(1, count)]
            for slot in sorted(others, key=lambda slot: slot == ready):
                if not self._arena.take(slot, _VIEWED_S):
                    continue
                with self._changed:
                    if self._serving == slot:  # update() was quicker
                        self._arena.offer(slot)
                        continue
                    if self._ready is not None and self._ready.slot == slot:
                        self._ready = None
                return slot
            if (more := self._arena.grow()) is not None:
                self._fill(more)
                return more
            time.sleep(_MOST_PAUSE_S)
        raise Cancelled("the subscriber is closed")

    def _fill(self, slot: int) -> None:
        """What never comes (padding) is as the model has it."""
        assert self._arena is not None
        here = local_tensors(self._model)
        copy_tensors(views := self._arena.views(slot), {name: here[name] for name in views})

    # --- "direct" and "view": update() does all of it ---

    def _update_now(self, deadline: float, timeout: float) -> Update:
        self._raise_what_happened()
        if self._flip == "view":
            self._memory.board.announce(1, WANTED)
        cause: BaseException | None = None
        try:
            while True:
                head = self._await_newer(deadline)
                if head is None:
                    if self.torn:
                        raise Torn(f"the model is torn: {self._too_late(timeout)}") from cause
                    raise self._too_late(timeout) from cause
                try:
                    return self._take(head, deadline, timeout)
                except (Superseded, NobodyHasIt) as error:
                    cause = error
                    time.sleep(min(_LEAST_PAUSE_S, max(0.0, deadline - time.monotonic())))
        finally:
            if self._flip == "view":
                self._memory.board.begin(1)

    def _await_newer(self, deadline: float) -> Head | None:
        while True:
            head = self._room.head()
            if head is not None and head.version > self.version:
                return head if time.monotonic() < deadline else None
            left = deadline - time.monotonic()
            if left <= 0:
                return None
            self._head = self._room.await_head(self._head, min(left, _WAIT_S)) or self._head

    def _take(self, head: Head, deadline: float, timeout: float) -> Update:
        """One attempt at it. Superseded, NobodyHasIt."""
        update = self._direct(head, deadline, timeout) if self._flip == "direct" else self._view(head)
        self._bringer.keep(head)
        self.version, self.step = head.version, head.step
        return update

    def _direct(self, head: Head, deadline: float, timeout: float) -> Update:
        self._bringer.check_sources(head)
        before = self.torn
        try:
            self.torn = True
            brought = self._bringer.bring(head, 0, lambda: self._closed or time.monotonic() > deadline)
        except BaseException as error:
            late = isinstance(error, Cancelled) and not self._closed
            reason = self._too_late(timeout) if late else error
            progress = self.progress
            self.torn = before or (progress is not None and progress.version == head.version and progress.began)
            if isinstance(reason, Error) and self.torn:
                raise Torn(f"the model is torn: {reason}") from reason
            if late:
                raise reason from None
            raise
        self.torn = False
        return Update(head.version, head.step, brought.nbytes, brought.seconds)

    def _view(self, head: Head) -> Update:
        started = time.perf_counter()
        views = self._viewer.view(head)
        self._refer_to(views)
        board = self._memory.board
        board.begin(0)
        board.announce(0, head.version)
        board.complete(0)
        nbytes = sum(view.nbytes for view in views.values())
        return Update(head.version, head.step, nbytes, time.perf_counter() - started)

    def close(self) -> None:
        """Stop following. The model keeps what it has (viewed tensors are copied); nobody can read from this process
        any more."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()
        if self._flip == "view" and self.version:
            self._refer_to({name: tensor.clone() for name, tensor in local_tensors(self._model).items()})
        self._opened.close()

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


def _scattered(
    tensors: Mapping[str, torch.Tensor], here: Mapping[str, torch.Tensor], layout: Layout | None
) -> frozenset[str]:
    """Names of tensors whose elements do not lie in runs as they come: a byte range each would be too many."""
    manifest = described(tensors, layout)
    found = set()
    for row, local in enumerate(manifest.local.tolist()):
        if manifest.size[row, -1] > 1 and manifest.stride[row, -1] != 1:
            found.add(manifest.locals[local].name)
    return frozenset(found & here.keys())


def _check_swap(flip: str, tensors: Mapping[str, torch.Tensor], locals: tuple[Local, ...]) -> None:
    travels = {local.name: local.dtype for local in locals}
    for name, tensor in tensors.items():
        if (
            sharding.is_dtensor(tensor)
            or not tensor.is_cpu
            or not tensor.is_contiguous()
            or travels.get(name, str(tensor.dtype).removeprefix("torch.")) != str(tensor.dtype).removeprefix("torch.")
        ):
            raise Unsupported(f'flip="{flip}" is for contiguous CPU tensors of the published dtype; {name} is not')
