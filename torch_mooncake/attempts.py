"""A call that somebody awaits, who may give up. Whoever takes something away asks first, and nothing is lost.

    if attempt := attempts.current():
        attempt.commit()  # from here on the awaiting task stays until the call has returned
    client.remove(…)

An attempt is open, then committed or abandoned, whichever comes first. A call that nobody awaits has none.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

R = TypeVar("R")
SLICE_NS = 500_000_000  # how long a wait goes on at most before it looks whether it was abandoned

_here = threading.local()


class Abandoned(Exception):
    """The task that awaited the call was cancelled. Nobody sees this."""


class Attempt:
    """Shared by the task that awaits and the thread that runs. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._abandoned = self._committed = False

    def abandon(self) -> bool:
        """Give up; False: too late, the call has committed itself."""
        with self._lock:
            self._abandoned |= not self._committed
            return self._abandoned

    def check(self) -> None:
        """Raises Abandoned."""
        if self._abandoned:
            raise Abandoned

    def commit(self) -> None:
        """No giving up any more. Raises Abandoned."""
        with self._lock:
            self.check()
            self._committed = True

    def reopen(self) -> None:
        """Nothing was taken after all."""
        with self._lock:
            self._committed = False

    def run(self, call: Callable[[], R]) -> R:
        """``call()`` on this thread, as this attempt."""
        _here.attempt = self
        try:
            return call()
        finally:
            del _here.attempt


def current() -> Attempt | None:
    """That of the call which runs on this thread, if somebody awaits it."""
    return getattr(_here, "attempt", None)
