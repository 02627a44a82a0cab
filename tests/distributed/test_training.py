"""Training over the backend: DDP and FSDP2 follow gloo's losses."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from worlds import run_world

EXAMPLE = Path(__file__).parents[2] / "examples" / "ddp_train.py"


def _no_gloo(*_args: object, **_kwargs: object) -> None:
    raise AssertionError("a gloo process group was made")


def train(rank: int, world: int, kind: str, backend: str) -> list[float]:
    from torch.nn.parallel import DistributedDataParallel

    if backend == "mooncake":
        import torch.distributed.distributed_c10d as c10d

        c10d.ProcessGroupGloo = _no_gloo  # type: ignore[assignment, misc]
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(32, 256), torch.nn.GELU(), torch.nn.Linear(256, 256), torch.nn.GELU(), torch.nn.Linear(256, 4)
    )
    if kind == "ddp":
        model = DistributedDataParallel(model, bucket_cap_mb=0.2)
    else:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (world,))
        for layer in model:
            if isinstance(layer, torch.nn.Linear):
                fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(rank)
    losses = []
    for _ in range(20):
        x = torch.randn(16, 32, generator=generator)
        loss = torch.nn.functional.cross_entropy(model(x), (x[:, 0] > 0).long() + 2 * (x[:, 1] > 0).long())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(total.item() / world)
    return losses


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
@pytest.mark.parametrize("world", [2, 3])
def test_losses_follow_gloo(kind: str, world: int) -> None:
    if kind == "fsdp2":
        # gloo has no AVG, which FSDP2 uses: DDP over gloo is the same training.
        reference = run_world(world, train, "ddp", "gloo", backend="gloo")
    else:
        reference = run_world(world, train, kind, "gloo", backend="gloo")
    ours = run_world(world, train, kind, "mooncake")
    assert reference[0][-1] < reference[0][0]
    for rank in range(world):
        assert ours[rank] == pytest.approx(reference[0], rel=1e-4)


def test_the_example_runs_under_torchrun() -> None:
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node=2",
            str(EXAMPLE),
            "--steps=10",
        ],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "step   10" in done.stdout
