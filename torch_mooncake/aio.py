"""What the ``await`` forms stand on: an eventfd for each event loop (transfers), a small thread pool (the pool's
verbs). Nothing here runs until the first ``await``."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from torch_mooncake._core import EventFd

R = TypeVar("R")

_lock = threading.Lock()
_executor: ThreadPoolExecutor | None = None
_loops: WeakKeyDictionary[asyncio.AbstractEventLoop, LoopEvents] = WeakKeyDictionary()


class LoopEvents:
    """The ops that one event loop waits for. Used only on the loop's thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.fd = EventFd()
        self.pending: dict[asyncio.Future[None], Any] = {}
        loop.add_reader(self.fd.fileno(), self._wake)

    def _wake(self) -> None:
        self.fd.clear()
        for future, op in list(self.pending.items()):
            if op.done():
                self.pending.pop(future, None)
                if not future.done():
                    future.set_result(None)

    async def ended(self, op: Any) -> None:
        """Return when ``op.done()``. ``op`` signals ``fd`` at its end."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.pending[future] = op
        try:
            if not op.done():  # it may have ended before it was pending; its signal then found nobody
                await future
        finally:
            self.pending.pop(future, None)


def events_of_running_loop() -> LoopEvents | None:
    """The events of the loop that runs on this thread, or None."""
    loop = asyncio._get_running_loop()
    if loop is None:
        return None
    with _lock:
        events = _loops.get(loop)
        if events is None:
            events = _loops[loop] = LoopEvents(loop)
        return events


async def in_thread(call: Callable[..., R], *args: Any, **kwargs: Any) -> R:
    """``call(...)`` on the thread pool."""
    loop = asyncio.get_running_loop()
    return await loop.run_in_executor(_pool(), lambda: call(*args, **kwargs))


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
