"""The end of memory's use by peers, waited for on a thread of its own.

Withdrawing a region is quick, but a peer that is stopped may keep its map of the memory for as long as it likes. What
waits for such peers waits here, looked at again after 1 ms, 2 ms, … 2 s, and never in anybody's way.
"""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from collections.abc import Callable

_LONGEST_S = 2.0


class Settler:
    """Calls `step()` of each task until it returns True. Any thread may `add`; steps run on one thread, in turn, and
    must not block."""

    def __init__(self, name: str) -> None:
        self._changed = threading.Condition()
        self._queue: list[tuple[float, int, float, Callable[[], bool]]] = []  # (when, number, next delay, step)
        self._numbers = itertools.count()
        self._closing = self._stepping = False
        self._name = name
        self._thread: threading.Thread | None = None

    def add(self, step: Callable[[], bool]) -> None:
        with self._changed:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
            heapq.heappush(self._queue, (0.0, next(self._numbers), 0.001, step))
            self._changed.notify_all()

    @property
    def waiting(self) -> int:
        """Tasks that are not settled."""
        with self._changed:
            return len(self._queue) + self._stepping

    def close(self, timeout: float = 0.5) -> None:
        """Waits that long for the tasks to settle, gives each one more step, and ends the thread. Tasks that are still
        not settled stay so."""
        end = time.monotonic() + timeout
        with self._changed:
            while (self._queue or self._stepping) and (left := end - time.monotonic()) > 0:
                self._changed.wait(left)
            self._closing = True
            self._changed.notify_all()
            thread = self._thread
        if thread is not None:
            thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._closing and (not self._queue or self._queue[0][0] > time.monotonic()):
                    self._changed.wait(self._queue[0][0] - time.monotonic() if self._queue else None)
                if not self._queue:
                    return
                _, number, delay, step = heapq.heappop(self._queue)
                closing, self._stepping = self._closing, True
            settled = step()
            with self._changed:
                self._stepping = False
                if not settled and not closing:
                    again = (time.monotonic() + delay, number, min(2 * delay, _LONGEST_S), step)
                    heapq.heappush(self._queue, again)
                self._changed.notify_all()
