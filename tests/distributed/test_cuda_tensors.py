"""CUDA tensors in the backend on a GPU that all ranks share (``make test-gpu``); test_cuda_tensors_fake.py has the same
on the fake device."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import cuda_cases
import pytest
import torch
import torch.distributed as dist
from worlds import run_world

import torch_mooncake.distributed as tmd

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _gpu() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")


@pytest.mark.parametrize("case", cuda_cases.CASES)
def test_case(case: Callable[..., Any]) -> None:
    run_world(2, case, False)


def test_every_collective_of_three() -> None:
    run_world(3, cuda_cases.every_collective, False)


def test_a_killed_rank() -> None:
    assert run_world(2, cuda_cases.killed, False, expect_dead=(1,)) == {0: "told"}


def captured(rank: int, world: int) -> None:
    tensor = torch.ones(10, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(dist.DistBackendError, match="CUDA graph"), torch.cuda.graph(graph):
        dist.all_reduce(tensor)
    dist.all_reduce(tensor)
    assert torch.equal(tensor.cpu(), torch.full((10,), 2.0))


def test_a_capture_is_refused() -> None:
    run_world(2, captured)


def trained(rank: int, world: int) -> list[float]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 1)).cuda()
    ddp = torch.nn.parallel.DistributedDataParallel(model, device_ids=[0])
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    data = torch.randn(8 * world, 64).cuda()[rank::world]
    losses = []
    for _ in range(20):
        loss = (ddp(data) - data.sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        dist.all_reduce(total := loss.detach().clone(), dist.ReduceOp.AVG)
        losses.append(total.item())
    return losses


def test_ddp_learns_the_same_on_one_rank_and_on_two() -> None:
    two = run_world(2, trained)
    one = run_world(1, trained)[0]
    assert two[0] == two[1]
    torch.testing.assert_close(torch.tensor(two[0]), torch.tensor(one), rtol=1e-3, atol=1e-4)


@pytest.fixture
def nccl_group(tmp_path: Any) -> Iterator[Any]:
    if not dist.is_nccl_available():
        pytest.skip("this torch has no NCCL")
    os.environ.setdefault("TM_LISTEN_HOST", "127.0.0.1")
    dist.init_process_group(
        "mooncake",
        init_method=f"file://{tmp_path / 'store'}",
        rank=0,
        world_size=1,  # NCCL takes no second rank on a device
        pg_options=tmd.MooncakeBackendOptions(cuda="nccl"),
    )
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_dense_collectives_by_nccl(nccl_group: Any) -> None:
    backend = nccl_group._get_backend(torch.device("cuda"))
    assert type(backend).__name__ == "DenseByNccl"
    assert isinstance(backend.nccl, dist.ProcessGroupNCCL)
    tensor = torch.ones(1000, device="cuda")
    before = backend.mooncake._get_sequence_number_for_group()
    dist.all_reduce(tensor)
    dist.all_gather_into_tensor(torch.empty_like(tensor), tensor)
    assert backend.mooncake._get_sequence_number_for_group() == before
    dist.all_reduce(torch.ones(4, device="cuda", dtype=torch.int32), dist.ReduceOp.BOR)  # not NCCL's
    dist.all_reduce(torch.ones(4))
    dist.all_reduce(torch.ones(4, 2, device="cuda")[:, 0])
    assert backend.mooncake._get_sequence_number_for_group() == before + 3
    assert torch.equal(tensor.cpu(), torch.ones(1000))
