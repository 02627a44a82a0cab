"""Ranks that die, never come, give up, fork or are busy: what others see of it. Deaths everywhere: test_faults.py."""

from __future__ import annotations

import atexit
import ctypes
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


def killed_in_messages(rank: int, world: int) -> None:
    dist.barrier()
    if rank == 1:
        for other in (0, 2):
            dist.recv(torch.zeros(1), other)
        os.kill(os.getpid(), signal.SIGKILL)
    dist.send(torch.zeros(1), 1)
    if rank == 0:
        assert _seconds(lambda: dist.recv(torch.zeros(4), 1), r"rank 1\b") < SEEN_S
        dist.send(torch.ones(4), 2)
    else:
        assert _seconds(lambda: dist.send(torch.zeros(4_000_000), 1), r"rank 1\b") < SEEN_S
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


def holds_the_gil(rank: int, world: int, seconds: int) -> float:
    dist.barrier()
    dist.all_reduce(torch.ones(400_000))
    pending = dist.irecv(torch.zeros(1), 1, tag=3) if rank == 0 else None
    begin = time.monotonic()
    if rank == 1:
        ctypes.PyDLL(None).sleep(seconds)  # unlike CDLL it keeps the interpreter's lock: no Python thread runs
    for count in (4, 400_000):
        data = torch.full((count,), float(rank))
        dist.all_reduce(data)
        assert (data == sum(range(world))).all()
    if rank == 1:
        dist.send(torch.ones(1), 0, tag=3)
    if pending:
        pending.wait()
    return time.monotonic() - begin


@pytest.mark.parametrize("seconds", [8, pytest.param(60, marks=pytest.mark.slow)])
def test_a_rank_that_holds_the_gil_is_alive(seconds: int) -> None:
    for took in run_world(3, holds_the_gil, seconds, timeout_s=120).values():
        assert took > seconds - 1


def abort_in(rank: int, world: int, what: str) -> None:
    group = dist.new_group()
    dist.barrier(group=group)
    data = torch.ones(4 if what == "small" else 400_000)
    if rank == 0:
        timer = threading.Timer(0.3, group._get_backend(torch.device("cpu")).abort)
        timer.start()
        if what == "message":
            assert _seconds(lambda: dist.recv(data, 1, group=group), "aborted") < 5
        elif what == "asynchronous":
            for work in [dist.all_reduce(data, async_op=True, group=group) for _ in range(3)]:
                assert _seconds(work.wait, "aborted") < 5
        else:
            assert _seconds(lambda: dist.all_reduce(data, group=group), "aborted") < 5
        timer.join()
        _seconds(lambda: dist.all_reduce(data, group=group), "aborted")  # so does everything later
    dist.barrier()  # another group is not touched


@pytest.mark.parametrize("what", ["small", "large", "asynchronous", "message"])
def test_abort_ends_what_another_thread_waits_for(what: str) -> None:
    run_world(3, abort_in, what)


def destroyed(rank: int, world: int) -> None:
    group = dist.new_group()
    dist.barrier(group=group)
    works = [dist.irecv(torch.zeros(n), (rank + 1) % world, group=group) for n in (1, 400_000)]
    strided = dist.irecv(torch.zeros(4, 2)[:, 0], (rank + 1) % world, group=group, tag=1)
    begin = time.monotonic()
    dist.destroy_process_group(group)
    assert time.monotonic() - begin < 5
    for work in (*works, strided):
        # Closed on this side, or the other has left first.
        assert _seconds(work.wait, "was closed|has left the group") < SEEN_S
    dist.barrier()


def test_destroying_a_group_ends_its_pending_receives() -> None:
    run_world(2, destroyed)


def forks(rank: int, world: int) -> None:
    data = torch.ones(400_000)
    dist.all_reduce(data)
    child = os.fork() if rank == 1 else -1
    if child == 0:
        try:
            for call in (lambda: dist.all_reduce(torch.ones(4)), lambda: dist.all_reduce(torch.ones(400_000))):
                _seconds(call, "forked")
            atexit._run_exitfuncs()  # nor does its end take the parent's place
        except BaseException:
            os._exit(1)
        os._exit(0)
    for _ in range(3):
        data = torch.ones(400_000)
        dist.all_reduce(data)
        assert (data == world).all()
        dist.barrier()
    if child > 0:
        assert os.waitpid(child, 0)[1] == 0
    dist.all_reduce(data)
    assert (data == world * world).all()


def test_a_forked_child_is_no_rank_and_harms_none() -> None:
    run_world(3, forks)


def raises(rank: int, world: int) -> None:
    # In a callback: it is the callback's, not the collective's.
    work = dist.all_reduce(torch.ones(4), async_op=True)
    chained = work.get_future().then(lambda _: 1 // 0)
    work.wait()
    with pytest.raises(Exception, match="ZeroDivisionError"):
        chained.wait()
    # In a thread of the user's that has started something: others wait for the same work.
    started: list[dist.Work] = []

    def thread() -> None:
        started.append(dist.all_reduce(torch.ones(400_000), async_op=True))
        raise RuntimeError("on purpose")

    broken: list[object] = []
    hook, threading.excepthook = threading.excepthook, lambda args: broken.append(args.exc_value)
    user = threading.Thread(target=thread)
    user.start()
    user.join()
    threading.excepthook = hook
    assert str(broken[0]) == "on purpose"
    waiting = [threading.Thread(target=started[0].wait) for _ in range(3)]
    for other in waiting:
        other.start()
    for other in waiting:
        other.join()
    assert started[0].is_success()
    # On the main thread: the process ends, and is missed by name.
    if rank == 1:
        return
    assert _seconds(lambda: [dist.barrier() for _ in range(2)], "rank 1 .*(left|lost)") < SEEN_S


def test_exceptions_in_user_code() -> None:
    run_world(3, raises)
