"""What the ``await`` forms stand on: an eventfd for each event loop (transfers, however many engines and ops), a small
thread pool (the pool's verbs). Nothing here runs until the first ``await``."""

from __future__ import annotations

import asyncio
import itertools
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from torch_mooncake._core import Completions
from torch_mooncake.attempts import Attempt

R = TypeVar("R")

_lock = threading.Lock()
_executor: ThreadPoolExecutor | None = None
_loops: WeakKeyDictionary[asyncio.AbstractEventLoop, LoopEvents] = WeakKeyDictionary()


class LoopEvents:
    """The ends that one event loop waits for. Used only on the loop's thread. No thread waits for them."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._completions = Completions()
        self._waiting: dict[int, set[asyncio.Future[None]]] = {}  # by tag: what was asked to tell, and has not
        self._shared: WeakKeyDictionary[Any, int] = WeakKeyDictionary()  # the tag of each ``shared``
        self._tags = itertools.count()
        loop.add_reader(self._completions.fileno(), self._wake)

    def _wake(self) -> None:
        for tag in self._completions.take():
            for future in self._waiting.pop(tag, ()):
                if not future.done():
                    future.set_result(None)

    async def of(
        self, watch: Callable[[Completions, int], bool], timeout: float | None = None, shared: Any = None
    ) -> None:
        """Return when what ``watch(completions, tag)`` watches has happened, at once if it says False; or after
        ``timeout`` seconds.

        A watch cannot be taken back. What may never happen is watched once, however often it is waited for: by those
        who give the same ``shared`` object (one with weak references)."""
        tag = self._shared.get(shared) if shared is not None else None
        if tag is None or tag not in self._waiting:
            tag = next(self._tags)
            if not watch(self._completions, tag):
                return
            self._waiting[tag] = set()
            if shared is not None:
                self._shared[shared] = tag
        future = asyncio.get_running_loop().create_future()
        self._waiting[tag].add(future)
        try:
            await asyncio.wait((future,), timeout=timeout)
        finally:
            if shared is None:
                self._waiting.pop(tag, None)
            else:
                self._waiting.get(tag, set()).discard(future)


def events_of_running_loop() -> LoopEvents:
    """The events of the loop that runs on this thread."""
    loop = asyncio.get_running_loop()
    with _lock:
        events = _loops.get(loop)
        if events is None:
            events = _loops[loop] = LoopEvents(loop)
        return events


async def in_thread(call: Callable[..., R], *args: Any, **kwargs: Any) -> R:
    """``call(...)`` on the thread pool. A task that is cancelled meanwhile abandons it (see ``attempts``), unless the
    call has committed itself: then the cancellation came too late, and the task gets the outcome."""
    attempt = Attempt()
    future = asyncio.get_running_loop().run_in_executor(_pool(), attempt.run, lambda: call(*args, **kwargs))
    while not future.done():
        try:
            await asyncio.wait((future,))
        except GeneratorExit:  # the loop is gone
            attempt.abandon()
            raise
        except asyncio.CancelledError:
            if attempt.abandon():
                future.cancel()
                raise
            task = asyncio.current_task()
            if task is not None and sys.version_info >= (3, 11):
                task.uncancel()
    return future.result()


def submit(call: Callable[[], None]) -> None:
    """``call()`` on the thread pool, soon; it reports its outcome itself."""
    _pool().submit(call)


def _pool() -> ThreadPoolExecutor:
    global _executor
    with _lock:
        if _executor is None:
            from torch_mooncake.config import Config

            _executor = ThreadPoolExecutor(Config.from_env().async_threads, "torch_mooncake")
        return _executor


def _after_fork() -> None:
    global _executor, _lock
    _lock = threading.Lock()
    _executor = None
    _loops.clear()


os.register_at_fork(after_in_child=_after_fork)
