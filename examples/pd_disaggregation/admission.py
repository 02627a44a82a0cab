"""How many requests the front serves at a time, how many may wait, and what the rest is told."""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Overloaded(Exception):
    """429: come again in `retry_after_s` seconds."""

    def __init__(self, waiting: int, retry_after_s: int) -> None:
        super().__init__(f"{waiting} requests are waiting already; retry in {retry_after_s} s")
        self.retry_after_s = retry_after_s


class Admission:
    """`running` requests at a time and `waiting` behind them, first come first served. For one event loop."""

    def __init__(self, running: int, waiting: int) -> None:
        self.limit, self.queue_limit = running, waiting
        self.running = 0
        self.refused = 0
        self._queue: deque[asyncio.Future[None]] = deque()
        self._took_s = 1.0  # a request, as of late

    @asynccontextmanager
    async def place(self) -> AsyncIterator[None]:
        """A place for the time of the block; Overloaded at once when even the queue is full."""
        await self._enter()
        began = time.perf_counter()
        try:
            yield
        finally:
            self._took_s += 0.2 * (time.perf_counter() - began - self._took_s)
            self._leave()

    async def _enter(self) -> None:
        if self.running < self.limit:
            self.running += 1
            return
        if len(self._queue) >= self.queue_limit:
            self.refused += 1
            ahead = len(self._queue) + 1
            raise Overloaded(len(self._queue), max(1, math.ceil(self._took_s * ahead / self.limit)))
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queue.append(turn)
        try:
            await turn
        except asyncio.CancelledError:  # the client went away
            if turn.done() and not turn.cancelled():
                self._leave()  # its turn had come all the same
            else:
                self._queue.remove(turn)
            raise

    def _leave(self) -> None:
        """The place goes to whoever is next."""
        while self._queue:
            turn = self._queue.popleft()
            if not turn.done():
                turn.set_result(None)
                return
        self.running -= 1

    def to_dict(self) -> dict:
        return {"running": self.running, "waiting": len(self._queue), "refused": self.refused}
