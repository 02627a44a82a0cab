"""Nothing leaks: after thousands of ops that failed in every way, fds, threads and memory are where they were."""

from __future__ import annotations

import gc
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fault_ways import SETUP, MiB, Two, ends
from processes import Child

import torch_mooncake as tm

ROUNDS = [
    pytest.param(5_000, id="5000"),
    pytest.param(100_000, id="100000", marks=[pytest.mark.slow, pytest.mark.timeout(3600)]),
]


def resources() -> dict[str, int]:
    gc.collect()
    status = dict(
        line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon")
    )
    return {
        "fds": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "maps": len(Path("/proc/self/maps").read_text().splitlines()),
        "rss_kib": int(status["RssAnon"].split()[0]),
    }


def settled(before: dict[str, int], slack_kib: int = 16 << 10) -> dict[str, int]:
    """What is left, once it is back at rest or 10 s have passed: counts must be as before, memory nearly."""
    end = time.monotonic() + 10
    while True:
        now = resources()
        over = {k: v for k, v in now.items() if v > before[k] + {"rss_kib": slack_kib, "maps": 16}.get(k, 0)}
        if not over or time.monotonic() > end:
            return over
        time.sleep(0.1)


def failures(two: Two) -> dict[str, Callable[[], tm.Op]]:
    """Ops that cannot succeed, by the reason."""
    gone = two.engine.register(bytearray(64))
    two.engine.deregister(gone)
    far = two.nbytes - 8
    write, read = two.engine.write, two.engine.read
    return {
        "out of bounds": lambda: write(
            two.region, two.remote, local_offsets=[0, 0], remote_offsets=[0, far], nbytes=[64, 64]
        ),
        "deregistered here": lambda: read(gone, two.remote[:64]),
        "no time": lambda: read(two.region[:MiB], two.remote[:MiB], timeout=0),
        "little time": lambda: write(two.region[:MiB], two.remote[:MiB], timeout=0.0002),
        "cancelled": lambda: _cancelled(read(two.region[:MiB], two.remote[:MiB])),
    }


def _cancelled(op: tm.Op) -> tm.Op:
    op.cancel()
    return op


@pytest.mark.parametrize("rounds", ROUNDS)
def test_failing_ops_leave_nothing(rounds: int, lasting_two: Two) -> None:
    rng = random.Random(1)
    two = lasting_two
    kinds = list(failures(two).items())
    failed = dict.fromkeys(dict(kinds), 0)

    def fail(times: int) -> None:
        for _ in range(times):
            name, attempt = rng.choice(kinds)
            failed[name] += ends(attempt, 10) is not None

    fail(500)
    before, theirs = resources(), two.other(THEIR_RESOURCES)
    fail(rounds // 4)  # of each of the four ways
    assert not settled(before)
    now = two.other(THEIR_RESOURCES)
    assert now["fds"] <= theirs["fds"], (theirs, now)
    assert now["rss_kib"] <= theirs["rss_kib"] + (16 << 10), (theirs, now)
    two.engine.write(two.region, two.remote, timeout=20).wait()
    assert failed["out of bounds"] > 0
    assert failed["deregistered here"] > 0
    stats = two.engine.stats()
    assert stats["quarantined_regions"] == 0
    assert stats["regions"] == 1


THEIR_RESOURCES = """
status = open("/proc/self/status").read().split("RssAnon:")[1].split()[0]
result = {"fds": len(os.listdir("/proc/self/fd")), "rss_kib": int(status)}
"""


@pytest.mark.parametrize(
    "rounds", [pytest.param(300, id="300"), pytest.param(10_000, id="10000", marks=pytest.mark.slow)]
)
def test_connections_that_fail_leave_nothing(rounds: int) -> None:
    with tm.Engine(token="t") as engine, tm.Engine(token="another") as stranger:

        def fail(times: int) -> None:
            for i in range(times):
                address = ("tcp://127.0.0.1:1", stranger.addresses[0])[i % 2]
                with pytest.raises((tm.PeerLost, tm.AuthError)):
                    engine.connect(address, timeout=5)

        fail(30)
        before = resources()
        fail(rounds)
        assert not settled(before)


@pytest.mark.parametrize("rounds", [2, pytest.param(200, marks=[pytest.mark.slow, pytest.mark.timeout(900)])])
def test_peers_that_die_leave_nothing(way: str, rounds: int, make_two: Any) -> None:
    """Ops against peers that are killed in the middle, again and again, on one engine."""
    two = make_two(way, 4 * MiB)

    def lose_one() -> None:
        victim = Child()
        address, descriptor = victim(SETUP, **two.setup)
        remote = two.engine.connect(address).open(bytes.fromhex(descriptor))
        ops = [getattr(two.engine, kind)(two.region, remote, timeout=20) for kind in ("write", "read") * 3]
        victim.kill(signal.SIGKILL)
        for op in ops:
            ends(op, 5)
        victim.close()

    lose_one()
    before = resources()
    for _ in range(rounds):
        lose_one()
    assert not settled(before)
    assert two.engine.stats()["sessions"] == 1
