"""Memory that came back is the caller's: after a deregistration, a cancellation or a timeout in flight, the buffer is
used again, and nothing is written to it later, on either side."""

from __future__ import annotations

import random
import signal
import time
from typing import Any

import pytest
from fault_ways import MiB, Two, ends
from processes import eventually

import torch_mooncake as tm

ROUNDS = [pytest.param(2, id="few"), pytest.param(100, id="many", marks=[pytest.mark.slow, pytest.mark.timeout(900)])]


@pytest.mark.parametrize("rounds", ROUNDS)
@pytest.mark.parametrize("end", ["cancel", "timeout"])
def test_reads_that_ended_early(end: str, rounds: int, lasting_two: Two) -> None:
    rng = random.Random(rounds)
    two = lasting_two
    two.fill_there(1)
    for _ in range(rounds):
        timeout = rng.uniform(0, 0.01) if end == "timeout" else 30
        ops = [two.engine.read(two.region, two.remote, timeout=timeout) for _ in range(2)]
        if end == "cancel":
            time.sleep(rng.uniform(0, 0.01))
            for op in ops:
                op.cancel()
        for op in ops:
            error = ends(op, 5)
            assert error is None or isinstance(error, tm.Cancelled | tm.DeadlineExceeded), error
        two.local[:] = 7
        time.sleep(0.05)
        assert (two.local == 7).all(), "a read that had ended wrote into memory that was ours again"


@pytest.mark.parametrize("rounds", ROUNDS)
@pytest.mark.parametrize("end", ["cancel", "timeout"])
def test_writes_that_ended_early(end: str, rounds: int, lasting_two: Two) -> None:
    """Once an op says that the other side is quiescent, that memory is free for other use."""
    rng = random.Random(rounds)
    two = lasting_two
    two.local[:] = 1
    for _ in range(rounds):
        timeout = rng.uniform(0, 0.01) if end == "timeout" else 30
        ops = [two.engine.write(two.region, two.remote, timeout=timeout) for _ in range(2)]
        if end == "cancel":
            time.sleep(rng.uniform(0, 0.01))
            for op in ops:
                op.cancel()
        for op in ops:
            error = ends(op, 5)
            assert error is None or isinstance(error, tm.Cancelled | tm.DeadlineExceeded), error
        assert eventually(lambda ops=ops: all(op.remote_quiescent for op in ops))
        two.fill_there(9)
        time.sleep(0.05)
        assert (two.there() == 9).all(), "a write that was quiescent landed"


@pytest.mark.parametrize("kind", ["write", "read"])
def test_deregistered_over_there_in_flight(kind: str, lasting_two: Two) -> None:
    """The owner takes its memory back: it gets it at once or waits for the copy inside; then it is its own."""
    two = lasting_two
    two.local[:] = 1
    ops = [getattr(two.engine, kind)(two.region, two.remote, timeout=20) for _ in range(4)]
    two.other("engine.deregister(region, timeout=20); there[:] = 9")
    for op in ops:
        error = ends(op, 25)
        assert error is None or isinstance(error, tm.Error), error
    with pytest.raises(tm.Error) as caught:
        getattr(two.engine, kind)(two.region, two.remote, timeout=5).wait()
    assert not isinstance(caught.value, tm.DeadlineExceeded | tm.PeerLost), "the reason is that it was deregistered"
    time.sleep(0.1)
    assert (two.there() == 9).all()
    assert two.other("result = engine.stats()['quarantined_regions']") == 0
    two.engine.deregister(two.region)
    two.renew()


@pytest.mark.parametrize("kind", ["write", "read"])
def test_deregistered_here_in_flight(kind: str, lasting_two: Two) -> None:
    two = lasting_two
    ops = [getattr(two.engine, kind)(two.region, two.remote, timeout=20) for _ in range(4)]
    two.engine.deregister(two.region, timeout=20)
    two.local[:] = 7
    for op in ops:
        error = ends(op, 25)
        assert error is None or isinstance(error, tm.Error), error
    time.sleep(0.1)
    assert (two.local == 7).all()
    with pytest.raises(tm.Error):
        getattr(two.engine, kind)(two.region, two.remote).wait()
    two.other("engine.deregister(region)")
    two.renew()


def test_busy_names_the_peer_and_keeps_the_memory(make_two: Any) -> None:
    two = make_two("tcp", 64 * MiB)
    two.other.kill(signal.SIGSTOP)
    op = two.engine.read(two.region, two.remote, timeout=2)
    with pytest.raises(tm.Busy, match="other"):
        two.engine.deregister(two.region, timeout=0.2)
    assert two.engine.stats()["quarantined_regions"] == 1
    two.engine.deregister(two.region, timeout=10)
    assert two.engine.stats()["quarantined_regions"] == 0
    assert isinstance(ends(op, 1), tm.DeadlineExceeded)
    two.other.process.send_signal(signal.SIGCONT)
