"""CUDA tensors in the backend without a GPU: torch's device "cuda" is the fake one, in each rank's process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cuda_cases
import pytest
import torch
import torch.distributed as dist
from model import OPS, REDUCED, check, expected, legal, values
from worlds import run_world

import torch_mooncake.distributed as tmd


@pytest.mark.parametrize(
    "case",
    [
        cuda_cases.every_collective,
        cuda_cases.order,
        cuda_cases.dropped,
        cuda_cases.futures,
        cuda_cases.messages,
        cuda_cases.never_comes,
        cuda_cases.aborted,
        cuda_cases.sparse_and_barrier,
        cuda_cases.mixed_devices,
    ],
)
def test_case(case: Callable[..., Any]) -> None:
    run_world(2, case, True)


def test_every_collective_of_three() -> None:
    run_world(3, cuda_cases.every_collective, True)


def test_a_killed_rank() -> None:
    assert run_world(2, cuda_cases.killed, True, expect_dead=(1,)) == {0: "told"}


def shared_memory(rank: int, world: int) -> int:
    """Much data goes from device to device: the peer's memory is mapped."""
    on = cuda_cases.device(True)
    dist.all_reduce(on.put(torch.ones(1000)))
    on.synchronize()
    few = on.cuda.mappings_made()
    dist.all_reduce(on.put(torch.ones(cuda_cases.LARGE)))
    on.synchronize()
    assert few == 0
    made: int = on.cuda.mappings_made()
    return made


def test_large_collectives_map_the_memory_of_peers() -> None:
    assert all(made > 0 for made in run_world(2, shared_memory).values())


def no_flags(rank: int, world: int) -> None:
    """A device whose streams cannot wait for a word of memory: the host waits instead."""
    on = cuda_cases.device(True)
    on.cuda.no_flags(True)
    tensor = on.put(torch.zeros(1000))
    on.fill_late(tensor, rank + 1)
    work = dist.all_reduce(tensor, async_op=True)
    future = work.get_future()
    work.wait()
    assert work.is_completed()
    future.wait()
    assert torch.equal(tensor.cpu(), torch.full((1000,), 3.0))


def test_devices_without_stream_memory_operations() -> None:
    run_world(2, no_flags)


def captured(rank: int, world: int) -> None:
    on = cuda_cases.device(True)
    tensor = on.put(torch.ones(10))
    on.cuda.capture(True)
    for call in (lambda: dist.all_reduce(tensor), lambda: dist.isend(tensor, 1 - rank)):
        with pytest.raises(dist.DistBackendError, match="CUDA graph"):
            call()
    on.cuda.capture(False)
    dist.all_reduce(tensor)
    assert torch.equal(tensor.cpu(), torch.full((10,), 2.0))


def test_a_capture_is_refused_before_anything_is_sent() -> None:
    run_world(2, captured)


def test_the_reduction_of_cuda_tensors_gives_what_the_hosts_gives() -> None:
    c10d = tmd._load()
    for dtype in REDUCED:
        for op in OPS[:-1]:  # PREMUL_SUM is a SUM of other inputs
            if not legal(dtype, op):
                continue
            inputs = [values(dtype, r, 1000) for r in range(3)]
            out = torch.empty_like(inputs[0])
            c10d._reduce_tensors(out, inputs, getattr(dist.ReduceOp, op))
            check(out, expected(dtype, op, range(3), 1000), (dtype, op))
    many = [torch.ones(1, dtype=torch.int8) for _ in range(200)]  # 200 is no int8
    out = torch.empty(1, dtype=torch.int8)
    c10d._reduce_tensors(out, many, dist.ReduceOp.AVG)
    assert out.item() == 0  # -56 / 200, as on the host


@pytest.mark.skipif(dist.is_nccl_available(), reason="this torch has NCCL: see test_cuda.py")
def test_nccl_where_there_is_none() -> None:
    with pytest.raises(RuntimeError, match="needs a torch with NCCL"):
        tmd.MooncakeBackendOptions(cuda="nccl")
    with pytest.raises(ValueError, match="'mooncake' or 'nccl'"):
        tmd.MooncakeBackendOptions(cuda="gloo")
