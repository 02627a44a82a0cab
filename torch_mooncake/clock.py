"""Absolute deadlines: made once, at the API's edge, on the steady clock that the native core uses."""

from __future__ import annotations

import time

from torch_mooncake.errors import InvalidArgument

NEVER = (1 << 63) - 1


def deadline_ns(timeout: float | None) -> int:
    """The steady-clock time ``timeout`` seconds from now; None: never. InvalidArgument for NaN."""
    if timeout is None:
        return NEVER
    if timeout != timeout:
        raise InvalidArgument("timeout is NaN")
    return min(NEVER, time.monotonic_ns() + int(min(max(timeout, 0.0), 9e9) * 1e9))


def seconds_left(deadline: int) -> float:
    """Seconds until ``deadline``, at least 0."""
    return max(0.0, (deadline - time.monotonic_ns()) * 1e-9)
