"""Ranks that come and go: survivors go on, replacements join, groups are split and shrunk."""

from __future__ import annotations

import datetime
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from worlds import run_world, torchrun

import torch_mooncake.distributed as tmd


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def fails(what: object = None) -> str:
    with pytest.raises(dist.DistBackendError) as caught:
        what() if callable(what) else dist.all_reduce(torch.ones(1000))
    return str(caught.value)


def everything(rank: int, world: int, active: list[int]) -> None:
    """Every collective among the active ranks; items of the others are not touched."""
    total = float(sum(active))
    t = torch.full((5,), float(rank))
    dist.all_reduce(t)
    assert t.tolist() == [total] * 5
    t = torch.full((300_000,), float(rank))
    dist.all_reduce(t, op=dist.ReduceOp.AVG)
    torch.testing.assert_close(t, torch.full((300_000,), total / len(active)))
    root = active[-1]
    t = torch.full((3,), float(rank))
    dist.broadcast(t, root)
    assert t.tolist() == [float(root)] * 3
    t = torch.full((3,), float(rank))
    dist.reduce(t, root)
    assert t.tolist() == [total if rank == root else float(rank)] * 3
    of_all = [float(r) if r in active else -1.0 for r in range(world)]
    for strided in (False, True):
        outs = [torch.full((4, 2), -1.0)[:, 0] if strided else torch.full((4,), -1.0) for _ in range(world)]
        dist.all_gather(outs, torch.full((4,), float(rank)))
        assert [o[0].item() for o in outs] == of_all
        flat = torch.full((world * 2, 2), -1.0)[:, 0] if strided else torch.full((world * 2,), -1.0)
        dist.all_gather_into_tensor(flat, torch.full((2,), float(rank)))
        assert flat[::2].tolist() == of_all
    outs = [torch.full((4,), -1.0) for _ in range(world)] if rank == root else None
    dist.gather(torch.full((4,), float(rank)), outs, dst=root)
    assert outs is None or [o[0].item() for o in outs] == of_all
    t = torch.zeros(2)
    dist.scatter(t, [torch.full((2,), 10.0 * r) for r in range(world)] if rank == root else None, src=root)
    assert t.tolist() == [10.0 * rank] * 2
    t = torch.zeros(2)
    dist.reduce_scatter(t, [torch.full((2,), float(r + rank)) for r in range(world)])
    assert t.tolist() == [sum(rank + r for r in active)] * 2
    t = torch.zeros(2)
    dist.reduce_scatter_tensor(t, torch.arange(float(world)).repeat_interleave(2))
    assert t.tolist() == [float(rank * len(active))] * 2
    outs = [torch.full((1,), -1.0) for _ in range(world)]
    dist.all_to_all(outs, [torch.tensor([100.0 * rank + r]) for r in range(world)])
    assert [o.item() for o in outs] == [100.0 * r + rank if r in active else -1.0 for r in range(world)]
    flat = torch.full((world,), -1.0)
    dist.all_to_all_single(flat, torch.tensor([100.0 * rank + r for r in range(world)]))
    assert flat.tolist() == [100.0 * r + rank if r in active else -1.0 for r in range(world)]
    objects: list[Any] = [None] * len(active)
    if len(active) == world:
        dist.all_gather_object(objects, rank)
        assert objects == active
    dist.barrier()
    if rank == active[0]:
        dist.send(torch.tensor([7.0]), active[1], tag=3)
    if rank == active[1]:
        t = torch.zeros(1)
        assert dist.recv(t, tag=3) == active[0]
        assert t.item() == 7
    assert dist.get_world_size() == world


def go_on(rank: int, world: int, dead: int) -> None:
    dist.all_reduce(torch.ones(3))
    assert tmd.active_ranks() == list(range(world))
    if rank == dead:
        die()
    assert re.search(rf"rank {dead}\b", fails())
    active = [r for r in range(world) if r != dead]
    assert tmd.deactivate_ranks(timeout_s=20) == active
    assert tmd.active_ranks() == active
    everything(rank, world, active)
    with pytest.raises(ValueError, match=f"rank {dead} is not active"):
        dist.send(torch.ones(1), dead)
    with pytest.raises(ValueError, match=f"rank {dead}, is not active"):
        dist.broadcast(torch.ones(1), dead)
    assert "fewer than 3" in fails(lambda: tmd.deactivate_ranks(at_least=3, timeout_s=20))
    dist.barrier()


@pytest.mark.parametrize("dead", [0, 1, 2])
def test_survivors_go_on_whoever_died(dead: int) -> None:
    run_world(3, go_on, dead, expect_dead=(dead,))


def in_a_part(rank: int, world: int) -> None:
    """Groups made out of this one need no store."""
    part = dist.group.WORLD.split_group(list(range(1, world)), group_name="part")
    if part is not None:
        t = torch.tensor([float(rank)])
        part.allreduce([t]).wait()
        assert t.item() == sum(range(1, world))


def replacement(contact: str, rank: int, world: int) -> None:
    """The new process."""
    torch.set_num_threads(1)
    tmd.join(contact, rank, world, timeout_s=60)
    assert tmd.active_ranks() == list(range(world))
    everything(rank, world, list(range(world)))
    in_a_part(rank, world)
    dist.barrier()
    dist.destroy_process_group()


def replaced(rank: int, world: int, dead: int, folder: str) -> None:
    """Again and again: the rank dies, and a new process takes its place. The store is gone by then."""
    contact = Path(folder, "contact")
    if rank == dead:
        contact.write_text(tmd.contact())
    dist.barrier()
    if rank == dead:
        die()
    fails()
    active = [r for r in range(world) if r != dead]
    tmd.deactivate_ranks(timeout_s=20)
    everything(rank, world, active)
    if rank == active[-1]:
        code = f"import test_elastic as t; t.replacement({contact.read_text()!r}, {dead}, {world})"
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        new = subprocess.Popen([sys.executable, "-c", code], env=env)
        while not tmd.waiting_ranks():
            assert new.poll() is None
            time.sleep(0.05)
        assert tmd.waiting_ranks() == [dead]
    assert tmd.activate_ranks([dead], timeout_s=60) == list(range(world))
    everything(rank, world, list(range(world)))
    in_a_part(rank, world)
    dist.barrier()
    if rank == active[-1]:
        assert new.wait(timeout=30) == 0


@pytest.mark.parametrize("dead", [0, 2])
def test_a_replacement_joins_without_the_store(dead: int, tmp_path: Path) -> None:
    run_world(3, replaced, dead, str(tmp_path), expect_dead=(dead,))


def nobody_comes(rank: int, world: int) -> None:
    dist.barrier()
    begin = time.monotonic()
    assert "no replacement for rank 1 came in time" in fails(lambda: tmd.activate_ranks([1], timeout_s=1))
    assert time.monotonic() - begin < 10
    dist.barrier()  # nothing has changed
    if rank == 0:
        options = tmd.MooncakeBackendOptions()
        options.join = "tcp://somewhere"
        with pytest.raises(ValueError, match="contact"):
            dist.new_group([0], pg_options=options)


def test_a_replacement_that_never_comes() -> None:
    run_world(2, nobody_comes)


def heartbeats(rank: int, world: int, folder: str) -> float:
    pids: list[Any] = [None] * world
    dist.all_gather_object(pids, os.getpid())
    dist.barrier()
    dist.destroy_process_group()
    options = tmd.MooncakeBackendOptions(heartbeat_s=0.2, heartbeat_timeout_s=2.0)
    dist.init_process_group(
        "mooncake",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=world,
        timeout=datetime.timedelta(seconds=60),
        pg_options=options,
    )
    dist.barrier()
    if rank == 1:
        time.sleep(20)  # is stopped meanwhile
        return 0.0
    work = dist.irecv(torch.zeros(1), 1)
    os.kill(pids[1], signal.SIGSTOP)
    begin = time.monotonic()
    try:
        assert "rank 1 was lost" in fails()
        assert "rank 1 was lost" in fails(work.wait)
        return time.monotonic() - begin
    finally:
        os.kill(pids[1], signal.SIGKILL)


def test_silence_is_noticed_within_the_time_that_was_set(tmp_path: Path) -> None:
    assert run_world(2, heartbeats, str(tmp_path), expect_dead=(1,))[0] < 4  # twice the time of silence


def shrunk(rank: int, world: int) -> None:
    dist.barrier()
    if rank == 1:
        die()
    fails()
    group = dist.shrink_group([1], shrink_flags=dist.distributed_c10d.SHRINK_ABORT)
    assert group is dist.group.WORLD
    assert dist.get_world_size() == world - 1
    assert dist.get_rank() == {0: 0, 2: 1, 3: 2}[rank]
    t = torch.tensor([float(rank)])
    dist.all_reduce(t)
    assert t.item() == sum(range(world)) - 1
    dist.barrier()


@pytest.mark.skipif(not hasattr(dist, "shrink_group"), reason="this torch has no shrink_group")
def test_shrink_group_after_a_death() -> None:
    run_world(4, shrunk, expect_dead=(1,))


def split(rank: int, world: int) -> None:
    # torch's function asks for an accelerator, and for a device that the group is bound to: the CPU, it is told here.
    pytest.MonkeyPatch().setattr(torch.accelerator, "is_available", lambda: True)
    pytest.MonkeyPatch().setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cpu"))
    world_group = dist.group.WORLD
    assert world_group is not None
    world_group.bound_device_id = torch.device("cpu", 0)
    for _ in range(2):  # the same split twice makes two groups
        group = dist.split_group(split_ranks=[[0, 2], [1, 3]])
        assert group is not None
        assert dist.get_group_rank(group, rank) == rank // 2
        t = torch.tensor([float(rank)])
        dist.all_reduce(t, group=group)
        assert t.item() == (2 if rank % 2 == 0 else 4)
        t = torch.ones(400_000)
        dist.all_reduce(t, group=group)
        assert t.sum() == 800_000
    some = dist.split_group(split_ranks=[[1, 2, 3]])
    if rank == 0:
        assert some is None
    else:
        t = torch.tensor([float(rank)])
        dist.broadcast(t, 3, group=some)
        assert t.item() == 3
    dist.barrier()


def test_split_group() -> None:
    run_world(4, split)


def hooks(rank: int, world: int) -> None:
    infos: list[Any] = []
    group = dist.new_group()
    assert group is not None
    group._register_on_completion_hook(infos.append)
    with pytest.raises(RuntimeError, match="has a completion hook already"):
        group._register_on_completion_hook(infos.append)
    for i in range(3):
        dist.all_reduce(torch.ones(10 * i), group=group)
    work = dist.broadcast(torch.ones(1_000_000), 0, group=group, async_op=True)
    work.wait()
    group._wait_for_pending_works()
    assert [info.seq for info in infos] == [1, 2, 3, 4]
    assert [str(info.op_type).rsplit(".", 1)[-1] for info in infos] == ["ALLREDUCE"] * 3 + ["BROADCAST"]
    for info in infos:
        assert info.time_finished >= info.time_started
    assert work._get_duration() > 0
    tmd.monitored_barrier(group, timeout_s=20)
    slow = dist.new_group()
    if rank == 0:
        assert "rank 1, rank 2" in fails(lambda: tmd.monitored_barrier(slow, timeout_s=1))
    dist.barrier()


def timeouts(rank: int, world: int) -> None:
    five, six = datetime.timedelta(seconds=5), datetime.timedelta(seconds=6)
    given = tmd.MooncakeBackendOptions()
    for options, timeout in ((None, five), (given, five), (tmd.MooncakeBackendOptions(six), six)):
        group: Any = dist.new_group(timeout=five, pg_options=options)
        assert group._get_backend(torch.device("cpu")).options._timeout == timeout
    assert given._timeout != five  # a group has options of its own


def test_the_timeout_is_the_groups_unless_asked_for() -> None:
    run_world(2, timeouts)


def test_hooks_durations_and_monitored_barriers() -> None:
    run_world(3, hooks)


EXAMPLE = Path(__file__).parents[2] / "examples" / "elastic_train.py"


def example(*arguments: str) -> str:
    return torchrun(EXAMPLE, "--steps=40", *arguments, world=3)


def test_the_example_ends_with_the_weights_of_an_undisturbed_run() -> None:
    undisturbed = example().splitlines()[-1]
    assert undisturbed.startswith("40 steps, weights ")
    disturbed = example("--kill=0:10", "--kill=2:25")
    assert disturbed.count("a new process takes its place") == 2
    assert disturbed.splitlines()[-1] == undisturbed
