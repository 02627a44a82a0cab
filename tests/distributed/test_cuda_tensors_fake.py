"""CUDA tensors in the backend without a GPU: torch's device "cuda" is the fake one, in each rank's process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cuda_cases
import pytest
import torch
import torch.distributed as dist
from reference_model import OPS, REDUCED, check, expected, legal, values
from worlds import run_world

import torch_mooncake.distributed as tmd


@pytest.mark.parametrize("case", cuda_cases.CASES)
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
    on.fill_late(tensor, 1.0)
    before = dist.all_reduce(tensor, async_op=True)
    on.cuda.capture(True)
    before.wait()  # on the host: a graph must not wait for it again
    assert before.is_completed()
    for call in (lambda: dist.all_reduce(tensor), lambda: dist.isend(tensor, 1 - rank)):
        with pytest.raises(dist.DistBackendError, match="CUDA graph"):
            call()
    on.cuda.capture(False)
    dist.all_reduce(tensor)
    assert torch.equal(tensor.cpu(), torch.full((10,), 4.0))


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


def routed(rank: int, world: int) -> None:
    """Another group of mooncake's in NCCL's place: what goes where, and that both are right."""
    on = cuda_cases.device(True)
    cuda = torch.device("cuda")
    groups: list[Any] = [dist.new_group(), dist.new_group()]
    ours, dense = (group._get_backend(cuda) for group in groups)
    both: Any = tmd._load().DenseByNccl(mooncake=ours, nccl=dense)

    def goes(work: Callable[[], Any]) -> str:
        before = [one._get_sequence_number_for_group() for one in (ours, dense)]
        work().wait()
        after = [one._get_sequence_number_for_group() for one in (ours, dense)]
        return {(1, 0): "ours", (0, 1): "dense"}[after[0] - before[0], after[1] - before[1]]

    def all_reduce(tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM) -> str:
        options = dist.AllreduceOptions()
        options.reduceOp = op
        where = goes(lambda: both.allreduce([tensor], options))
        if op == dist.ReduceOp.SUM and tensor.dtype == torch.float32:
            assert torch.equal(tensor.cpu(), torch.full(tensor.shape, 2.0))
        return where

    ones = torch.ones(6, 2)
    assert all_reduce(on.put(ones)) == "dense"
    assert all_reduce(ones.clone()) == "ours"
    assert all_reduce(on.put(ones)[:, 0]) == "ours"
    assert all_reduce(on.put(ones.to(torch.int32)), dist.ReduceOp.BOR) == "ours"
    assert all_reduce(on.put(ones.to(torch.int32))) == "dense"
    assert all_reduce(on.put(ones.to(torch.int16))) == "ours"
    assert all_reduce(on.put(ones.to(torch.int32)), dist.ReduceOp.AVG) == "ours"
    assert all_reduce(on.put(ones.to(torch.bfloat16)), dist.ReduceOp.AVG) == "dense"
    assert goes(lambda: both.broadcast([on.put(ones.to(torch.int16))])) == "dense"
    out = on.put(torch.zeros(24))
    assert goes(lambda: both._allgather_base(out, on.put(torch.full((12,), rank + 1.0)))) == "dense"
    assert torch.equal(out.cpu(), torch.tensor([1.0] * 12 + [2.0] * 12))
    assert goes(lambda: both.alltoall_base(on.put(torch.zeros(4)), on.put(torch.zeros(4)), [], [])) == "dense"
    options = dist.GatherOptions()
    options.rootRank = 0
    outs = [[on.put(torch.zeros(6, 2)) for _ in range(world)]] if rank == 0 else []
    assert goes(lambda: both.gather(outs, [on.put(ones)], options)) == "ours"  # the root's list is the root's alone
    sent, got = on.put(ones), on.put(torch.zeros(6, 2))
    works = [both.send([sent], 1 - rank, 7), both.recv([got], 1 - rank, 7)]
    for work in works:
        work.wait()
    on.synchronize()
    assert torch.equal(got.cpu(), ones)


def test_what_goes_to_nccl() -> None:
    run_world(2, routed)


@pytest.mark.skipif(dist.is_nccl_available(), reason="this torch has NCCL: see test_cuda_tensors.py")
def test_nccl_where_there_is_none() -> None:
    with pytest.raises(RuntimeError, match="needs a torch with NCCL"):
        tmd.MooncakeBackendOptions(cuda="nccl")
    with pytest.raises(ValueError, match="'mooncake' or 'nccl'"):
        tmd.MooncakeBackendOptions(cuda="gloo")
