"""Ranks that die, hang or never come: the others raise in bounded time, naming them."""

from __future__ import annotations

import datetime
import os
import signal
import threading
import time

import pytest
import torch
import torch.distributed as dist
from worlds import run_world

SEEN_S = 6.0  # docs/distributed.md: a dead rank is seen at once, and after so long at the latest


def _seconds(fn: object, match: str) -> float:
    begin = time.monotonic()
    with pytest.raises(dist.DistBackendError, match=match):
        fn()  # type: ignore[operator]
    return time.monotonic() - begin


def killed(rank: int, world: int, collective: str) -> list[float]:
    big = torch.ones(400_000)
    calls = {
        "all_reduce": lambda: dist.all_reduce(big),
        "broadcast": lambda: dist.broadcast(big, 1),
        "all_gather": lambda: dist.all_gather([torch.ones(400_000) for _ in range(world)], big),
        "barrier": dist.barrier,
    }
    dist.all_reduce(big)
    if rank == 1:
        for other in (0, 2):  # not before the others have the result, too
            dist.recv(torch.zeros(1), other)
        os.kill(os.getpid(), signal.SIGKILL)
    dist.send(torch.zeros(1), 1)
    first = _seconds(calls[collective], "rank 1 ")
    later = _seconds(dist.barrier, "rank 1 ")  # the group stays broken, at once
    return [first, later]


@pytest.mark.parametrize("collective", ["all_reduce", "broadcast", "all_gather", "barrier"])
def test_a_killed_rank_fails_the_others_by_name(collective: str) -> None:
    for first, later in run_world(3, killed, collective, expect_dead=(1,)).values():
        assert first < SEEN_S
        assert later < 2


def killed_in_messages(rank: int, world: int) -> None:
    dist.barrier()
    if rank == 1:
        for other in (0, 2):
            dist.recv(torch.zeros(1), other)
        os.kill(os.getpid(), signal.SIGKILL)
    dist.send(torch.zeros(1), 1)
    if rank == 0:
        assert _seconds(lambda: dist.recv(torch.zeros(4), 1), "rank 1 ") < SEEN_S
        dist.send(torch.ones(4), 2)
    else:
        assert _seconds(lambda: dist.send(torch.zeros(4_000_000), 1), "rank 1 ") < SEEN_S
        got = torch.zeros(4)
        dist.recv(got, 0)  # survivors still talk
        assert got.sum() == 4


def test_messages_with_a_killed_rank() -> None:
    run_world(3, killed_in_messages, expect_dead=(1,))


def timeouts(rank: int, world: int) -> None:
    dist.barrier()
    slow = dist.new_group(timeout=datetime.timedelta(seconds=1))
    if rank == 0:
        # wait(timeout) that runs out raises, and the operation goes on.
        work = dist.irecv(torch.zeros(1), 1, tag=5)
        with pytest.raises(dist.DistBackendError, match="has not ended within 200 ms: waiting for rank 1"):
            work.wait(datetime.timedelta(milliseconds=200))
        assert not work.is_completed()
        assert _seconds(lambda: dist.all_reduce(torch.ones(3), group=slow), "DEADLINE_EXCEEDED.*rank 1") < 5
        dist.send(torch.ones(1), 1)
        work.wait()
    else:
        dist.recv(torch.zeros(1), 0)  # never takes part in the all_reduce
        assert _seconds(lambda: dist.all_reduce(torch.ones(3), group=slow), "gave up") < 5
        dist.send(torch.ones(1), 0, tag=5)
    dist.barrier()  # another group is not touched


def test_timeouts_raise_and_name_the_absent() -> None:
    run_world(2, timeouts)


def stopped(rank: int, world: int, count: int, when: str) -> float:
    pids: list[object] = [None] * world
    dist.all_gather_object(pids, os.getpid())
    group = dist.new_group(timeout=datetime.timedelta(seconds=3))
    data = torch.ones(count)

    def forever() -> None:
        while True:
            dist.all_reduce(data, op=dist.ReduceOp.MAX, group=group)

    if when != "before the first":
        dist.all_reduce(data, op=dist.ReduceOp.MAX, group=group)
    if rank == 1:
        if when == "inside":
            return _seconds(forever, "")  # until rank 0 has given up
        time.sleep(6)  # rank 0 stops and continues this process meanwhile
        return 0.0
    stop = threading.Timer(0.3 if when == "inside" else 0, os.kill, (int(str(pids[1])), signal.SIGSTOP))
    stop.start()
    if when != "inside":
        stop.join()
    try:
        return _seconds(forever, "rank 1")
    finally:
        os.kill(int(str(pids[1])), signal.SIGCONT)


@pytest.mark.parametrize(
    ("count", "when"), [(1_000_000, "before the first"), (4, "after the first"), (4, "inside"), (4_000_000, "inside")]
)
def test_a_stopped_rank_costs_no_more_than_the_timeout(count: int, when: str) -> None:
    assert run_world(2, stopped, count, when)[0] < 10


def mismatch(rank: int, world: int) -> None:
    _seconds(lambda: dist.all_reduce(torch.ones(100 + rank)), "LAYOUT_MISMATCH|gave up")


def test_sizes_that_differ_raise_on_all_ranks() -> None:
    run_world(2, mismatch)


def early_exit(rank: int, world: int) -> None:
    for _ in range(3):
        dist.barrier()
    if rank == 0:
        return  # leaves at once; what the others do among themselves is not disturbed
    pair = list(range(1, world))
    t = torch.zeros(1)
    if rank == pair[0]:
        time.sleep(1)
        dist.send(torch.ones(1), pair[1])
    else:
        dist.recv(t, pair[0])
        assert t.item() == 1


def test_a_rank_that_leaves_does_not_disturb_the_others() -> None:
    run_world(3, early_exit)


def never_comes() -> None:
    import torch_mooncake.distributed  # noqa: F401

    store = dist.HashStore()
    dist.init_process_group("mooncake", store=store, rank=0, world_size=2, timeout=datetime.timedelta(seconds=1))


def test_a_rank_that_never_joins_is_named() -> None:
    begin = time.monotonic()
    with pytest.raises(dist.DistStoreError, match="rank 1 did not join"):
        never_comes()
    assert time.monotonic() - begin < 10
