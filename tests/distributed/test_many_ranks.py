"""Many groups of the same ranks, and many ranks: what a process holds does not grow with them."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist
from worlds import run_world

GROUPS = 128
LARGE_BOARD_KIB = 1028  # of a rank, csrc/collectives/board.h


def resident_kib() -> dict[str, int]:
    """Shared memory that this rank has made for groups, by the size of the segments."""
    out = {"small": 0, "large": 0}
    kind = ""
    with open("/proc/self/smaps") as lines:
        for line in lines:
            words = line.split()
            if not words[0].endswith(":"):  # a map: from-to permissions …
                begin, end = (int(x, 16) for x in words[0].split("-"))
                ours = "torch-mooncake board" in line and words[1] == "rw-s"
                kind = ("large" if end - begin > 1 << 20 else "small") if ours else ""
            elif words[0] == "Rss:" and kind:
                out[kind] += int(words[1])
    return out


def held() -> tuple[int, int]:
    """Threads and file descriptors."""
    return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))


def many_groups(rank: int, world: int) -> dict[str, int]:
    dist.all_reduce(torch.ones(4))
    threads, fds = held()
    groups = [dist.new_group() for _ in range(GROUPS)]

    def check(data: torch.Tensor, factor: int) -> None:
        assert (data == factor * sum(range(1, world + 1))).all()

    for turn in range(3):  # one after the other, each with a small and a large one
        for i, group in enumerate(groups):
            for count in (4, 30_000 + 1000 * i):
                data = torch.full((count,), (rank + 1.0) * (i + turn))
                dist.all_reduce(data, group=group)
                check(data, i + turn)
    assert held() == (threads, fds)
    # All at once, each group in the order of its own calls.
    started = []
    for turn in range(4):
        for i, group in enumerate(groups):
            data = torch.full((20_000 if turn % 2 else 100,), (rank + 1.0) * (i + turn))
            started.append((dist.all_reduce(data, group=group, async_op=True), data, i + turn))
    for work, data, factor in started:
        work.wait()
        check(data, factor)
    # A few that are used all the time among many that are not.
    for i in range(GROUPS):
        for group in (groups[0], groups[1], groups[i]):
            data = torch.full((50_000,), rank + 1.0)
            dist.all_reduce(data, group=group)
            check(data, 1)
    end = time.monotonic() + 60
    while held()[0] > threads and time.monotonic() < end:  # threads of idle groups end after two seconds
        time.sleep(0.1)
    assert held() == (threads, fds), (held(), threads, fds)
    out = resident_kib()
    for group in groups:
        dist.destroy_process_group(group)
    del groups, group, started, work  # each holds its group
    dist.barrier()
    left = resident_kib()
    assert left["small"] + left["large"] < 3 * LARGE_BOARD_KIB  # the world's own
    return out


def test_128_groups_do_not_take_128_buffers() -> None:
    for resident in run_world(2, many_groups).values():
        assert 0 < resident["large"] < 16 * LARGE_BOARD_KIB
        assert 0 < resident["small"] < GROUPS * 72


def many_ranks(rank: int, world: int) -> None:
    for count in (1, 1000, 100_000):
        data = torch.full((count,), rank, dtype=torch.int64)
        dist.all_reduce(data)
        assert (data == sum(range(world))).all()
    outs = [torch.zeros(2) for _ in range(world)]
    dist.all_gather(outs, torch.full((2,), float(rank)))
    assert torch.stack(outs)[:, 1].tolist() == list(range(world))
    out = torch.zeros(world, dtype=torch.int64)
    dist.all_to_all_single(out, torch.arange(world) + 1000 * rank)
    assert out.tolist() == [1000 * r + rank for r in range(world)]
    data = torch.full((3,), float(rank))
    dist.broadcast(data, world - 1)
    assert data.tolist() == [world - 1.0] * 3
    mine = torch.zeros(1, dtype=torch.int64)
    dist.reduce_scatter_tensor(mine, torch.arange(world))
    assert mine.item() == rank * world
    half = dist.new_group(list(range(0, world, 2)))
    if rank % 2 == 0:
        data = torch.ones(5)
        dist.all_reduce(data, group=half)
        assert data.tolist() == [world / 2] * 5
    send = dist.isend(torch.tensor([rank]), (rank + 1) % world)
    got = torch.zeros(1, dtype=torch.int64)
    dist.recv(got, (rank - 1) % world)
    send.wait()
    assert got.item() == (rank - 1) % world
    dist.barrier()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_more_than_64_ranks() -> None:
    run_world(66, many_ranks, timeout_s=300, limit_s=550)
