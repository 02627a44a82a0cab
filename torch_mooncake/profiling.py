"""Ranges in ``torch.profiler`` traces: ``torch_mooncake::write``, ``::read`` and ``::wait``.

torch is not imported: a profiler that runs in this process has imported it.
"""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager
from typing import Any


def active() -> bool:
    """A profiler of torch's runs now. About 60 ns."""
    profiler = sys.modules.get("torch.autograd.profiler")
    return profiler is not None and profiler._is_profiler_enabled


def span(name: str, detail: str) -> AbstractContextManager[Any]:
    """The range. ``detail`` (bytes, peer) is recorded as its argument."""
    return sys.modules["torch.autograd.profiler"].record_function(f"torch_mooncake::{name}", detail)
