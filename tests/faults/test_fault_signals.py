"""SIGKILL, and SIGSTOP with SIGCONT, of either side at random moments: ops end in bounded time with the right reason,
the engine lives on, and memory that came back is never written again."""

from __future__ import annotations

import random
import signal
import time
from typing import Any

import numpy as np
import pytest
from fault_ways import MiB, Two, ends, random_bytes

import torch_mooncake as tm

ROUNDS = [pytest.param(1, id="once"), pytest.param(40, id="many", marks=[pytest.mark.slow, pytest.mark.timeout(900)])]
KEEP_BUSY = """
op = None
while True:
    try:
        op = (engine.write if kind == "write" else engine.read)(region, remote, timeout=30)
        op.wait()
    except tm.Error:
        pass  # the region is gone over there: go on trying
"""


def grace(timeout: float) -> float:
    """When an op with this timeout is over at the latest, and two seconds for a busy machine."""
    return timeout + max(0.1 * timeout, 0.25) + 2


@pytest.mark.parametrize("rounds", ROUNDS)
def test_the_target_is_killed(way: str, rounds: int, make_two: Any) -> None:
    rng = random.Random(rounds)
    for _ in range(rounds):
        two = make_two(way, 8 * MiB)
        ops = []
        stop = time.monotonic() + rng.uniform(0, 0.03)
        while time.monotonic() < stop or len(ops) < 4:
            move = rng.choice([two.engine.write, two.engine.read])
            ops.append(move(two.region, two.remote, timeout=30, notify=b"x" * rng.randrange(2)))
        two.other.kill(signal.SIGKILL)
        killed = time.monotonic()
        outcomes = [ends(op, 5) for op in ops]
        assert time.monotonic() - killed < 3  # promised: 1 s
        assert all(error is None or isinstance(error, tm.PeerLost) for error in outcomes), outcomes
        with pytest.raises(tm.PeerLost):
            two.engine.write(two.region, two.remote).wait()
        assert not two.peer.alive
        two.engine.deregister(two.region, timeout=5)


@pytest.mark.parametrize("rounds", ROUNDS)
@pytest.mark.parametrize("kind", ["write", "read"])
def test_the_initiator_is_killed(way: str, kind: str, rounds: int, make_two: Any) -> None:
    """What it was writing into comes back at once, and is never touched again."""
    rng = random.Random(rounds)
    for _ in range(rounds):
        two = make_two(way, 8 * MiB)
        two.let_the_other_dial()
        two.other.start(KEEP_BUSY, kind=kind)
        time.sleep(rng.uniform(0, 0.1))
        two.other.kill(signal.SIGKILL)
        two.engine.deregister(two.region, timeout=5)
        assert two.engine.stats()["quarantined_regions"] == 0
        two.local[:] = 77
        time.sleep(0.1)
        assert (two.local == 77).all()


@pytest.mark.parametrize("rounds", ROUNDS)
def test_the_target_is_stopped_and_continued(way: str, rounds: int, make_two: Any) -> None:
    rng = random.Random(rounds)
    two = make_two(way, 8 * MiB)
    for round_ in range(rounds):
        two.local[:] = random_bytes(two.nbytes, round_)
        kinds = [rng.choice(["write", "read"]) for _ in range(6)]
        before = [getattr(two.engine, kind)(two.region, two.remote, timeout=0.8) for kind in kinds[:3]]
        time.sleep(rng.uniform(0, 0.01))
        two.other.kill(signal.SIGSTOP)
        start = time.monotonic()
        after = [getattr(two.engine, kind)(two.region, two.remote, timeout=0.8, notify=b"n") for kind in kinds[3:]]
        outcomes = [ends(op, 10) for op in before + after]
        assert time.monotonic() - start < grace(0.8)
        assert all(error is None or isinstance(error, tm.DeadlineExceeded) for error in outcomes), outcomes
        assert all(outcome is not None for outcome in outcomes[3:]), "an answer of a stopped process?"
        two.local[:] = 55  # the memory is ours again: reads that are still on their way must not reach it
        two.other.process.send_signal(signal.SIGCONT)
        time.sleep(0.2)
        assert (two.local == 55).all()
        two.engine.write(two.region, two.remote, timeout=20).wait()  # after what came before it
        assert (two.there() == 55).all()
        time.sleep(0.1)
        assert (two.there() == 55).all(), "a write that had timed out landed later"


def refusal(two: Two) -> tm.Busy | None:
    """What deregister() says."""
    try:
        two.engine.deregister(two.region, timeout=0.5)
    except tm.Busy as busy:
        return busy
    return None


@pytest.mark.parametrize("rounds", ROUNDS)
def test_the_initiator_is_stopped_and_continued(way: str, rounds: int, make_two: Any) -> None:
    """Promise 2: whatever deregister() says holds. Memory it gave back is never written; memory it could not give back
    it keeps."""
    rng = random.Random(rounds)
    for _ in range(rounds):
        two = make_two(way, 8 * MiB)
        two.let_the_other_dial()
        two.other.start(KEEP_BUSY, kind="write")
        time.sleep(rng.uniform(0.02, 0.1))
        two.other.kill(signal.SIGSTOP)
        busy = refusal(two)
        if busy is not None:
            assert "other" in str(busy)
            assert two.engine.stats()["quarantined_regions"] == 1
            two.other.process.send_signal(signal.SIGCONT)
            two.engine.deregister(two.region, timeout=20)
        two.local[:] = 77
        two.other.process.send_signal(signal.SIGCONT)
        time.sleep(0.3)
        assert (two.local == 77).all()
        assert two.engine.stats()["quarantined_regions"] == 0
        two.other.kill(signal.SIGKILL)


def test_a_stopped_peer_holds_up_nobody_else(make_two: Any) -> None:
    stopped, lively = make_two("tcp"), make_two("tcp")
    peer = stopped.engine.connect(lively.address)
    remote = peer.open(lively.descriptor)
    stopped.other.kill(signal.SIGSTOP)
    hanging = [stopped.engine.write(stopped.region, stopped.remote, timeout=4, notify=b"n") for _ in range(20)]
    start = time.monotonic()
    stopped.local[:] = random_bytes(stopped.nbytes, 1)
    for _ in range(50):
        stopped.engine.write(stopped.region, remote, timeout=20).wait()
    assert time.monotonic() - start < 3.5
    assert np.array_equal(lively.there(), stopped.local)
    assert all(isinstance(ends(op, 10), tm.DeadlineExceeded | tm.PeerLost) for op in hanging)
    stopped.other.process.send_signal(signal.SIGCONT)
