"""Small things every process of the demo needs."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")


def die_with_parent(parent: int | None = None) -> None:
    """The kernel kills this process when the thread that started it ends, whatever ends it. `parent` is its pid;
    DEMO_PARENT_PID by default."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(1, signal.SIGKILL, 0, 0, 0) != 0:  # PR_SET_PDEATHSIG
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    parent = parent or int(os.environ.get("DEMO_PARENT_PID", os.getppid()))
    if os.getppid() != parent:  # it died before the call
        os._exit(1)


def read_json(path: Path) -> dict | None:
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        return None


def write_json(path: Path, value: dict) -> None:
    """Whole or not at all."""
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(value))
    part.replace(path)


def wait_for(check: Callable[[], T], timeout_s: float, what: str) -> T:
    """The first true value of `check`, asked every 50 ms; TimeoutError naming `what`."""
    deadline = time.monotonic() + timeout_s
    while True:
        if value := check():
            return value
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what}: not within {timeout_s} s")
        time.sleep(0.05)
