"""One-sided windows through torch's own interface, which has them from 2.14 on (csrc/tests/collectives/window_test.cpp
tests what is below with any torch)."""

from __future__ import annotations

import datetime

import pytest
import torch
import torch.distributed as dist
from worlds import run_world

pytestmark = pytest.mark.skipif(not hasattr(dist.ProcessGroup, "new_window"), reason="needs torch 2.14 or later")


def ring(rank: int, world: int, count: int) -> None:
    group = dist.group.WORLD
    assert group.supports_window()
    memory = torch.zeros(world, count)
    window = group.new_window(memory)
    right, left = (rank + 1) % world, (rank - 1) % world
    for step in range(3):
        block = torch.arange(count, dtype=torch.float32) + 1000 * rank + step
        works = [window.put(block.expand(2, -1).t()[:, 0], right, rank * count, True), window.signal(right, True)]
        window.wait_signal(left, False)
        assert torch.equal(memory[left], torch.arange(count, dtype=torch.float32) + 1000 * left + step)
        for work in works:
            work.wait()
        dist.barrier()
    assert torch.equal(window.map_remote_tensor(rank), memory)
    window.put(torch.ones(count), rank, rank * count, False)
    assert memory[rank].sum() == count
    window.tensor_deregister()


@pytest.mark.parametrize("world", [2, 3])
def test_a_ring_of_puts_and_signals(world: int) -> None:
    run_world(world, ring, 1000)


def test_large_puts() -> None:
    run_world(2, ring, 4 << 20)


def mistakes(rank: int, world: int) -> None:
    group = dist.group.WORLD
    window = group.new_window()
    with pytest.raises(ValueError, match="no tensor is registered"):
        window.put(torch.ones(1), 0, 0, False)
    with pytest.raises(ValueError, match="must be contiguous"):
        window.tensor_register(torch.ones(4, 4).t())
    window.tensor_register(torch.zeros(4 + rank), owning=False)
    with pytest.raises(ValueError, match="is registered with this window already"):
        window.tensor_register(torch.zeros(4))
    with pytest.raises(TypeError, match="a tensor of Double"):
        window.put(torch.ones(1, dtype=torch.float64), 1 - rank, 0, False)
    with pytest.raises(dist.DistBackendError, match="OUT_OF_BOUNDS"):
        window.put(torch.ones(5), 1 - rank, rank, False)
    with pytest.raises(NotImplementedError, match="map_remote_tensor"):
        window.map_remote_tensor(1 - rank)
    work = window.wait_signal(1 - rank, True)
    with pytest.raises(dist.DistBackendError, match="has not ended within 100 ms"):
        work.wait(datetime.timedelta(milliseconds=100))
    dist.barrier()
    window.signal(1 - rank, False)
    work.wait()
    window.tensor_deregister()
    window.tensor_register(torch.zeros(2))
    window.tensor_deregister()


def test_mistakes_raise_and_leave_the_window_usable() -> None:
    run_world(2, mistakes)
