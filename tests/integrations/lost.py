"""A pool's node that is killed, keeper and all, and a client that has noticed."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

from processes import PoolEnv, eventually


def lose_node(pool_env: PoolEnv, there: Callable[[], Any]) -> None:
    """Kill this pool's node, and return when ``there()`` is not true any more: for a moment (1 s is promised) a client
    may read what it had located there, which is still right."""
    for pid in pool_env.nodes():
        os.kill(pid, signal.SIGKILL)
    assert eventually(lambda: not there(), timeout=30)
