"""What the decode side reads: packed pages out of prefill's staging memory, and pages of a prefill side that is pulled
from.

One thread a receiver begins reads, sleeps until one of them ends (an eventfd, no polling), unpacks and reports. It
waits for no single peer: a read that does not end holds up nothing but its own session, until that one's deadline.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import queue
import select
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch_mooncake import _core
from torch_mooncake.errors import Cancelled, Closed, Error

if TYPE_CHECKING:
    from torch_mooncake.transfer import Op

Begin = Callable[[], "list[Op] | None"]


@dataclass(eq=False)
class Fetch:
    """Some reads that belong together. `begin` starts them, or returns None: no room now, ask again when another fetch
    has ended. `end(error)` is called once, when all have ended; None: well. Both on the fetcher's thread."""

    begin: Begin
    end: Callable[[Error | None], None]
    wanted: Callable[[], bool]  # False: its session is over
    ops: list[Op] = field(default_factory=list)
    left: int = 0
    error: Error | None = None


class Fetcher:
    """Any thread may `submit`."""

    def __init__(self) -> None:
        self._completions = _core.Completions()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._new: queue.SimpleQueue[Fetch] = queue.SimpleQueue()
        self._blocked: deque[Fetch] = deque()
        self._going: dict[int, tuple[Fetch, Op]] = {}
        self._tags = itertools.count(1)
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._closing = False

    def submit(self, fetch: Fetch) -> None:
        with self._lock:
            if self._closing:
                raise Closed("the receiver is closed")
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="tm-kv-fetch", daemon=True)
                self._thread.start()
        self._new.put(fetch)
        os.eventfd_write(self._wake, 1)

    def cancelled(self) -> None:
        """Some sessions have ended: their reads are cancelled."""
        if self._thread is not None and not self._closing:
            os.eventfd_write(self._wake, 1)

    def close(self) -> None:
        """Cancels what is under way and returns when it has ended."""
        with self._lock:
            if self._closing:
                return
            self._closing = True
        if self._thread is not None:
            os.eventfd_write(self._wake, 1)
            self._thread.join()
        os.close(self._wake)

    def _run(self) -> None:
        poller = select.poll()
        for fd in (self._wake, self._completions.fileno()):
            poller.register(fd, select.POLLIN)
        while True:
            poller.poll()
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._wake)
            for tag in self._completions.take():
                self._ended(tag)
            for fetch, op in list(self._going.values()):
                if self._closing or not fetch.wanted():
                    op.cancel()
            while not self._new.empty():
                self._blocked.append(self._new.get())
            self._begin()
            if self._closing and not self._going:
                while self._blocked:
                    self._blocked.popleft().end(Closed("the receiver was closed"))
                return

    def _begin(self) -> None:
        while self._blocked:
            fetch = self._blocked[0]
            try:
                if self._closing or not fetch.wanted():
                    raise Cancelled("the session is over")
                ops = fetch.begin()
            except Error as error:
                self._blocked.popleft()
                fetch.end(error)
                continue
            if ops is None:
                return
            self._blocked.popleft()
            fetch.ops, fetch.left = ops, len(ops)
            if not ops:
                fetch.end(None)
            for op in ops:
                tag = next(self._tags)
                self._going[tag] = (fetch, op)
                if not op._core.watch(self._completions, tag):
                    self._ended(tag)

    def _ended(self, tag: int) -> None:
        fetch, op = self._going.pop(tag)
        try:
            op.wait(0)
        except Error as error:
            fetch.error = fetch.error or error
            for other in fetch.ops:
                other.cancel()
        fetch.left -= 1
        if not fetch.left:
            fetch.end(fetch.error)
