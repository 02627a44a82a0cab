"""What stands on torch.distributed runs over the backend as it is: results are those of one process without any."""

from __future__ import annotations

import contextlib
import copy
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from worlds import run_world, torchrun

ROWS = 4  # of a rank's batch


def network() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(8, 32), torch.nn.GELU(), torch.nn.Linear(32, 32), torch.nn.GELU(), torch.nn.Linear(32, 4)
    )


def batch(world: int, step: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(world * ROWS, 8, generator=generator), torch.randn(world * ROWS, 4, generator=generator)


def part(rank: int, world: int, step: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    x, y = batch(world, step)
    return x[rank * ROWS : (rank + 1) * ROWS], y[rank * ROWS : (rank + 1) * ROWS]


def alone(world: int, steps: int = 3) -> torch.nn.Sequential:
    """The network after some steps on the whole batch, in this process."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        x, y = batch(world, step)
        optimizer.zero_grad()
        mse_loss(model(x), y).backward()
        optimizer.step()
    return model


def train(model: torch.nn.Module, rank: int, world: int, steps: int = 3) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        x, y = part(rank, world, step)
        optimizer.zero_grad()
        mse_loss(model(x), y).backward()
        optimizer.step()


def assert_equal_models(ours: torch.nn.Module, theirs: torch.nn.Module, **tolerance: float) -> None:
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        full = mine.full_tensor() if hasattr(mine, "full_tensor") else mine
        torch.testing.assert_close(full.detach(), other.detach(), **tolerance)


# ---- DDP


class Branches(torch.nn.Module):
    """Uses one of its parts, by turns: the others have no gradient."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.parts = torch.nn.ModuleList(torch.nn.Linear(8, 4) for _ in range(2))
        self.turn = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.turn += 1
        return self.parts[self.turn % 2](x)


def ddp(rank: int, world: int) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    for options in ({}, {"gradient_as_bucket_view": True}, {"static_graph": True}):
        model = DistributedDataParallel(network(), bucket_cap_mb=0.001, **options)
        train(model, rank, world)
        assert_equal_models(model, alone(world))

    # By its own name torch allows the second hook for NCCL only.
    for hook in (
        default_hooks.fp16_compress_hook,
        lambda state, bucket: default_hooks.bf16_compress_hook(state, bucket),
    ):
        model = DistributedDataParallel(network())
        model.register_comm_hook(None, hook)
        train(model, rank, world)
        assert_equal_models(model, alone(world), rtol=0, atol=1e-2)

    branches = DistributedDataParallel(Branches(), find_unused_parameters=True)
    train(branches, rank, world, steps=4)
    for parameter in branches.parameters():
        everywhere = [torch.empty_like(parameter) for _ in range(world)]
        dist.all_gather(everywhere, parameter.detach())
        assert all(torch.equal(other, parameter) for other in everywhere)

    model = DistributedDataParallel(network())
    (x0, y0), (x1, y1) = part(rank, world, 0), part(rank, world, 1)
    with model.no_sync():
        mse_loss(model(x0), y0).backward()
    mse_loss(model(x1), y1).backward()
    reference = network()
    for step in (0, 1):
        x, y = batch(world, step)
        mse_loss(reference(x), y).backward()
    for mine, other in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad)


def uneven(rank: int, world: int) -> None:
    """Rank r has 2 + r batches; those that are done count as ranks whose gradient is 0."""
    model = DistributedDataParallel(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with model.join():
        for step in range(2 + rank):
            x, y = part(rank, world, step)
            optimizer.zero_grad()
            mse_loss(model(x), y).backward()
            optimizer.step()
    reference = network()
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
    for step in range(2 + world - 1):
        optimizer.zero_grad()
        for other in range(world):
            if step < 2 + other:
                x, y = part(other, world, step)
                (mse_loss(reference(x), y) / world).backward()
        optimizer.step()
    assert_equal_models(model, reference)


def test_ddp() -> None:
    run_world(2, ddp)


def test_ddp_with_uneven_inputs() -> None:
    run_world(3, uneven)


# ---- FSDP2, HSDP, tensor parallel, pipelines


def fsdp2(rank: int, world: int, shape: tuple[int, ...]) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[2 - len(shape) :])
    half = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32)
    for policy, tolerance in ((MixedPrecisionPolicy(), {}), (half, {"rtol": 0.0, "atol": 2e-2})):
        model = network()
        for layer in model:
            if isinstance(layer, torch.nn.Linear):
                fully_shard(layer, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
        train(model, rank, world)
        assert_equal_models(model, alone(world), **tolerance)


def test_fsdp2() -> None:
    run_world(2, fsdp2, (2,))


def test_hsdp() -> None:
    run_world(4, fsdp2, (2, 2))


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.norm = torch.nn.LayerNorm(8)
        self.up, self.down = torch.nn.Linear(8, 32), torch.nn.Linear(32, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


def tensor_parallel(rank: int, world: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    mesh = init_device_mesh("cpu", (world,))
    x = torch.randn(2, 6, 8, generator=torch.Generator().manual_seed(3))  # batch, sequence, features
    reference = Block()
    expected = reference(x)
    expected.sum().backward()
    plans: list[dict[str, Any]] = [
        {"up": ColwiseParallel(), "down": RowwiseParallel()},
        {
            "": PrepareModuleInput(input_layouts=(Replicate(),), desired_input_layouts=(Shard(1),)),
            "norm": SequenceParallel(),
            "up": ColwiseParallel(input_layouts=Shard(1)),
            "down": RowwiseParallel(output_layouts=Replicate()),
        },
    ]
    for plan in plans:
        model = parallelize_module(Block(), mesh, plan)
        out = model(x)
        torch.testing.assert_close(out, expected)
        out.sum().backward()
        for mine, other in zip(model.parameters(), reference.parameters(), strict=True):
            grad = mine.grad
            assert grad is not None
            torch.testing.assert_close(grad.full_tensor() if hasattr(grad, "full_tensor") else grad, other.grad)


def test_tensor_parallel() -> None:
    run_world(2, tensor_parallel)


def pipelines(rank: int, world: int) -> None:
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(4))
    y = torch.randn(8, 16, generator=torch.Generator().manual_seed(5))

    def layers() -> list[torch.nn.Module]:
        torch.manual_seed(6)
        return [torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Tanh()) for _ in range(2 * world)]

    whole = torch.nn.Sequential(*layers())
    mse_loss(whole(x), y).backward()
    for schedule in (ScheduleGPipe, Schedule1F1B, ScheduleInterleaved1F1B):
        mine = layers()
        if schedule is ScheduleInterleaved1F1B:
            places, count = [rank, rank + world], 2 * world
            modules = [mine[place] for place in places]
        else:
            places, count = [rank], world
            modules = [torch.nn.Sequential(mine[2 * rank], mine[2 * rank + 1])]
        stages = [
            PipelineStage(module, place, count, torch.device("cpu"))
            for module, place in zip(modules, places, strict=True)
        ]
        single = schedule is not ScheduleInterleaved1F1B
        runner: Any = schedule(stages[0] if single else stages, n_microbatches=4, loss_fn=mse_loss)  # type: ignore[arg-type]
        losses: list[torch.Tensor] = []
        first, last = 0 in places, count - 1 in places
        runner.step(*([x] if first else []), **({"target": y, "losses": losses} if last else {}))
        if last:
            torch.testing.assert_close(torch.stack(losses).mean(), mse_loss(whole(x), y))
        layer_of = places if not single else [2 * rank, 2 * rank + 1]
        for place in layer_of:
            for ours, theirs in zip(mine[place].parameters(), whole[place].parameters(), strict=True):
                torch.testing.assert_close(ours.grad, theirs.grad)


def test_pipeline_schedules() -> None:
    run_world(2, pipelines)


# ---- checkpoints, compiled collectives, meshes


def checkpoint(rank: int, world: int, folder: str, save: bool) -> None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
    from torch.distributed.fsdp import fully_shard

    model = alone(2) if save else network()
    fully_shard(model)
    state = get_model_state_dict(model)
    if save:
        dcp.save(state, checkpoint_id=folder)
    else:
        dcp.load(state, checkpoint_id=folder)
        set_model_state_dict(model, state)
        assert_equal_models(model, alone(2), rtol=0, atol=0)


def test_a_checkpoint_of_two_ranks_is_loaded_by_three(tmp_path: Path) -> None:
    run_world(2, checkpoint, str(tmp_path), True)
    run_world(3, checkpoint, str(tmp_path), False)


def compiled(rank: int, world: int) -> None:
    import torch.distributed._functional_collectives as functional

    def fn(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        summed = functional.all_reduce(x * 2, "sum", dist.group.WORLD)
        gathered = functional.all_gather_tensor(summed + x, 0, dist.group.WORLD)
        scattered = functional.reduce_scatter_tensor(gathered, "avg", 0, dist.group.WORLD)
        return summed, gathered, scattered

    x = torch.arange(6.0).reshape(3, 2) + rank
    everyone = [torch.arange(6.0).reshape(3, 2) + r for r in range(world)]
    total = 2 * sum(everyone)
    gathered = torch.cat([total + other for other in everyone])
    for run in (fn, torch.compile(fn, backend="eager", fullgraph=True), torch.compile(fn, backend="aot_eager")):
        out = run(x)
        torch.testing.assert_close(out[0], total)
        torch.testing.assert_close(out[1], gathered)
        torch.testing.assert_close(out[2], gathered[3 * rank : 3 * rank + 3])


def test_compiled_functional_collectives() -> None:
    run_world(2, compiled)


def meshes(rank: int, world: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh

    def total(group: Any) -> int:
        t = torch.tensor(rank)
        dist.all_reduce(t, group=group)
        return int(t)

    flat = init_device_mesh("cpu", (world,))
    assert total(flat.get_group()) == sum(range(world))
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("a", "b"))
    row, column = divmod(rank, world // 2)
    assert tuple(mesh.get_coordinate() or ()) == (row, column)
    assert total(mesh["b"].get_group()) == sum(range(row * (world // 2), (row + 1) * (world // 2)))
    assert total(mesh["a"].get_group()) == sum(range(column, world, world // 2))
    assert total(mesh["a", "b"]._flatten("all").get_group()) == sum(range(world))


def test_device_meshes() -> None:
    run_world(4, meshes)


# ---- debugging, elastic restarts, no gloo


def again(rank: int, world: int, folder: str) -> None:
    """Another default group in the same processes."""
    dist.init_process_group("mooncake", store=dist.FileStore(f"{folder}/store", world), rank=rank, world_size=world)


def detail(rank: int, world: int, folder: str) -> None:
    dist.destroy_process_group()
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    again(rank, world, folder)
    model = DistributedDataParallel(network())
    train(model, rank, world)
    assert_equal_models(model, alone(world))
    mine = dist.all_reduce if rank == 0 else lambda t: dist.broadcast(t, 0)
    with pytest.raises(RuntimeError, match=r"mismatch between collectives"):
        mine(torch.ones(2))


def test_debug_detail(tmp_path: Path) -> None:
    run_world(2, detail, str(tmp_path))


def same_names(rank: int, world: int, folder: str) -> None:
    """What an earlier group left in the store under the same names is not believed, whoever comes first."""
    store = dist.FileStore(f"{folder}/store", world)
    for attempt in range(4):
        dist.destroy_process_group()
        if attempt % world == rank:
            time.sleep(0.3)  # the others are there long before
        dist.init_process_group("mooncake", store=dist.PrefixStore("same", store), rank=rank, world_size=world)
        t = torch.tensor([rank])
        dist.all_reduce(t)
        assert t.item() == sum(range(world))


def test_a_store_serves_one_group_after_another(tmp_path: Path) -> None:
    run_world(3, same_names, str(tmp_path))


ELASTIC = """
import os, signal
import torch, torch.distributed as dist
import torch_mooncake.distributed
dist.init_process_group("mooncake")
attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
t = torch.ones(1)
dist.all_reduce(t)
if attempt == 0 and dist.get_rank() == 1:
    os.kill(os.getpid(), signal.SIGKILL)
dist.all_reduce(t)
print(f"rank {dist.get_rank()} attempt {attempt} has {t.item():g}", flush=True)
dist.destroy_process_group()
"""


def test_torchrun_restarts_the_workers_when_one_dies(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(ELASTIC)
    printed = torchrun(script, world=2, options=("--max-restarts=1",))
    assert "rank 0 attempt 1 has 4" in printed
    assert "rank 1 attempt 1 has 4" in printed
    assert "attempt 0" not in printed


def _no_gloo(*_args: object, **_kwargs: object) -> None:
    raise AssertionError("a gloo process group was made")


def without_gloo(rank: int, world: int, folder: str) -> None:
    import torch.distributed.distributed_c10d as c10d

    dist.destroy_process_group()
    c10d.ProcessGroupGloo = _no_gloo  # type: ignore[assignment, misc]
    dist.ProcessGroupGloo = _no_gloo  # type: ignore[assignment, misc]
    with contextlib.suppress(AssertionError):
        dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/gloo", world), rank=rank, world_size=world)
        raise RuntimeError("the check does not check")
    again(rank, world, folder)
    dist.barrier()
    group = dist.new_group(list(range(world)))
    objects: list[Any] = [None] * world
    dist.all_gather_object(objects, {"rank": rank}, group=group)
    assert objects == [{"rank": r} for r in range(world)]
    first = [f"from {rank}"]
    dist.broadcast_object_list(first, src=0)
    assert first == ["from 0"]
    model = DistributedDataParallel(network())
    train(model, rank, world)
    assert_equal_models(copy.deepcopy(model.module), alone(world))
    fsdp2(rank, world, (world,))
    checkpoint(rank, world, f"{folder}/checkpoint", True)
    checkpoint(rank, world, f"{folder}/checkpoint", False)


def test_no_gloo_object_is_made(tmp_path: Path) -> None:
    run_world(2, without_gloo, str(tmp_path))
