"""Whether the tests of what all transports promise run for RDMA alone: in the virtual machine of tests/rdma/vm."""

from __future__ import annotations

import os

VERBS = bool(os.environ.get("TM_TEST_VERBS"))


def nics(side: int) -> list[str] | None:
    """The devices of the engine on that side (0 or 1) of the machine's two cables; elsewhere no choice."""
    return [f"rxe_?{side}"] if VERBS else None
