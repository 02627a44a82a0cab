"""DTensors: put by the ranks that have them, got in any layout by anybody, and no byte read in vain."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from worlds import run_world

import torch_mooncake as tm

pytestmark = pytest.mark.filterwarnings("ignore:.*")

SHAPES = {"even": (8, 12), "odd": (7, 5, 3), "few": (1, 4), "none": (0, 4), "big": (513, 300)}
PLACEMENTS = {"rows": [Shard(0)], "columns": [Shard(1)], "all": [Replicate()]}


def tensor(name: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    shape = SHAPES[name]
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float64).view(shape).to(dtype)


def model(width: int = 16) -> torch.nn.Module:
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(width, 33), torch.nn.ReLU(), torch.nn.Linear(33, 3))


def two_ranks(rank: int, world: int) -> dict[str, Any]:
    """The writers' side of the tests below."""
    tm.init()
    mesh = init_device_mesh("cpu", (world,))
    for name in SHAPES:
        for kind, placements in PLACEMENTS.items():
            tm.put(f"{name}/{kind}", distribute_tensor(tensor(name), mesh, placements))
    tm.put("bf16", distribute_tensor(tensor("big", torch.bfloat16), mesh, [Shard(1)]), version="v1", meta={"a": 1})
    grid = init_device_mesh("cpu", (world, 1))
    tm.put("copies", distribute_tensor(tensor("big"), grid, [Replicate(), Shard(0)]))

    # Replaced again and again, without a label: the rounds meet.
    for step in range(5):
        tm.put("steps", distribute_tensor(torch.full((6,), step), mesh, [Shard(0)]))
        assert tm.get("steps").unique().tolist() in ([step], [step + 1])
        dist.barrier()

    # Own half, into memory that is there, and nothing else.
    mine = distribute_tensor(torch.zeros(513, 300), mesh, [Shard(1)])
    before = tm.stat()["client_read_bytes"]
    assert tm.get("big/rows", out=mine) is mine
    read = tm.stat()["client_read_bytes"] - before
    assert read == mine.to_local().nbytes == 513 * 150 * 4
    assert torch.equal(mine.full_tensor(), tensor("big"))
    got = tm.get("big/columns", placements=[Shard(0)], mesh=mesh, dtype=torch.bfloat16)
    assert got.to_local().dtype is torch.bfloat16
    assert got.placements == (Shard(0),)
    assert torch.equal(got.full_tensor(), tensor("big", torch.bfloat16))

    # Writers that do not agree.
    layout = [Shard(0)] if rank == 0 else [Shard(1)]
    tm.put(
        "mixed",
        DTensor.from_local(
            torch.zeros(4, 8) if rank == 0 else torch.zeros(8, 4), mesh, layout, shape=(8, 8), stride=(8, 1)
        ),
    )
    with pytest.raises(tm.LayoutMismatch, match="different values"):
        tm.get("mixed")
    with pytest.raises(TypeError, match=r"\['a'\] is a DTensor that cannot be put: .*not done yet"):
        tm.put("sum", {"a": DTensor.from_local(torch.ones(3), mesh, [Partial()])})

    # A sharded model and its optimizer.
    from torch.distributed.fsdp import fully_shard

    net = fully_shard(model(), mesh=mesh)
    optimizer = torch.optim.AdamW(net.parameters())
    net(torch.ones(2, 16)).sum().backward()
    optimizer.step()
    tm.put_state_dict("run", {"model": net, "optimizer": optimizer, "step": 7, "list": [1, 2]})
    other = fully_shard(torch.nn.Sequential(*model().children()), mesh=mesh)
    for parameter in other.parameters():
        parameter.data.zero_()
    into = {"model": other}
    before = tm.stat()["client_read_bytes"]
    tm.get_state_dict("run", into, strict=False)
    local = sum(p.to_local().nbytes for p in other.parameters())
    assert tm.stat()["client_read_bytes"] - before == local
    assert all(
        torch.equal(a.full_tensor(), b.full_tensor()) for a, b in zip(net.parameters(), other.parameters(), strict=True)
    )
    full = {name: p.full_tensor().detach().double().sum().item() for name, p in net.named_parameters()}
    dist.barrier()
    tm.close()
    return full


@contextmanager
def rank_of(rank: int, world: int) -> Iterator[None]:
    """This process as one of a world that does not communicate."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        yield
    finally:
        dist.destroy_process_group()


def test_what_two_ranks_put_is_got_in_every_layout(pool: tm.Pool) -> None:
    full = run_world(2, two_ranks, backend="gloo")[0]

    for name in SHAPES:
        for kind in PLACEMENTS:
            whole = tm.get(f"{name}/{kind}")
            assert type(whole) is torch.Tensor
            assert torch.equal(whole, tensor(name)), (name, kind)
    info = tm.info("copies")
    assert info.parts == 2
    assert info.nbytes < 1.1 * tensor("big").nbytes  # replicas are stored once
    assert (tm.info("bf16").label, tm.info("bf16").meta) == ("v1", {"a": 1})
    assert torch.equal(tm.get("bf16", dtype=torch.float32), tensor("big", torch.bfloat16).float())
    out = torch.zeros(513, 400)
    tm.get("big/columns", out=out[:, 50:350])
    assert torch.equal(out[:, 50:350], tensor("big"))
    assert out[:, :50].eq(0).all()

    layouts: list[tuple[tuple[int, ...], list[Any]]] = [
        ((1,), [Shard(0)]),
        ((3,), [Shard(1)]),
        ((4,), [Shard(0)]),
        ((2, 2), [_StridedShard(0, split_factor=2), Shard(0)]),
        ((2, 3), [Replicate(), Shard(-1)]),
    ]
    for shape, placements in layouts:
        world = torch.Size(shape).numel()
        for rank in range(world):
            with rank_of(rank, world):
                mesh = DeviceMesh("cpu", torch.arange(world).view(shape))
                for key in ("big/rows", "big/columns", "odd/rows", "few/rows"):
                    want = _local(tensor(key.split("/")[0]), mesh, placements)
                    before = tm.stat()["client_read_bytes"]
                    got = tm.get(key, placements=placements, mesh=mesh)
                    assert tm.stat()["client_read_bytes"] - before == want.nbytes
                    assert torch.equal(got.to_local(), want), (shape, placements, rank, key)
                    assert got.shape == tensor(key.split("/")[0]).shape

    state = tm.get_state_dict("run")
    assert (state["step"], state["list"]) == (7, [1, 2])
    assert {k: v.double().sum().item() for k, v in state["model"].items()} == pytest.approx(full)
    plain = {"model": model(), "step": 0}
    tm.get_state_dict("run", plain, strict=False)
    assert plain["step"] == 7
    assert {k: v.double().sum().item() for k, v in plain["model"].state_dict().items()} == pytest.approx(full)


def _local(full: torch.Tensor, mesh: DeviceMesh, placements: list[Any]) -> torch.Tensor:
    for dim, placement in enumerate(placements):
        if not placement.is_replicate():
            if placement.dim < 0:
                placement = Shard(placement.dim + full.ndim)
            pieces, _ = placement._split_tensor(full, mesh.size(dim), with_padding=False, contiguous=True)
            full = pieces[mesh.get_coordinate()[dim]]
    return full


def test_a_plain_tensor_is_read_in_shares(pool: tm.Pool) -> None:
    value = torch.randn(513, 300)
    tm.put("k", value)
    tm.put("dict", {"w": value})
    with rank_of(2, 3):
        mesh = init_device_mesh("cpu", (3,))
        before = tm.stat()["client_read_bytes"]
        got = tm.get("k", placements=[Shard(0)], mesh=mesh)
        assert tm.stat()["client_read_bytes"] - before == got.to_local().nbytes == 171 * 300 * 4
        assert torch.equal(got.to_local(), value[342:])
        wide = torch.zeros(513, 250)
        out = DTensor.from_local(wide[:, 100:200], mesh, [Shard(1)], shape=value.shape, stride=value.stride())
        tm.get("k", out=out)
        assert torch.equal(wide[:, 100:200], value[:, 200:])
        assert wide[:, :100].eq(0).all()
        # A local tensor of another size than the layout says is refused before a byte is written.
        for rows in (100, 180):
            local = torch.zeros(rows, 300)
            odd = DTensor.from_local(local, mesh, [Shard(0)], shape=value.shape, stride=value.stride(), run_check=False)
            with pytest.raises(tm.LayoutMismatch, match=f"{rows}, 300.*171, 300"):
                tm.get("k", out=odd)
            assert local.eq(0).all()
        for wrong, says in (
            ([Partial()], "not done yet"),
            ([Shard(0), Shard(1)], "2 placements"),
            ([Shard(5)], "2 dim"),
        ):
            with pytest.raises(tm.InvalidArgument, match=says):
                tm.get("k", placements=wrong, mesh=mesh)
        with pytest.raises(tm.InvalidArgument, match="belong together"):
            tm.get("k", mesh=mesh)
        with pytest.raises(tm.InvalidArgument, match="one tensor"):
            tm.get("dict", placements=[Shard(0)], mesh=mesh)
        with pytest.raises(tm.InvalidArgument, match="out="):
            tm.get("k", placements=[Shard(0)], mesh=mesh, out=value)
        for useless in ({"device": "cpu"}, {"readonly": True}):
            with pytest.raises(tm.InvalidArgument, match="device"):
                tm.get("k", placements=[Shard(0)], mesh=mesh, **useless)
        sub = DeviceMesh("cpu", [0, 1])
        with pytest.raises(tm.InvalidArgument, match="not in the tensor's mesh"):
            tm.get("k", placements=[Shard(0)], mesh=sub)


def test_a_rank_that_does_not_come_fails_the_others(pool: tm.Pool) -> None:
    with rank_of(0, 2):
        mesh = init_device_mesh("cpu", (2,))
        mine = DTensor.from_local(torch.ones(3), mesh, [Shard(0)])
        with pytest.raises(tm.DeadlineExceeded, match="1 of 2 parts"):
            tm.put("k", mine, timeout=0.5)
    with rank_of(1, 2):  # it comes late, with what is old by now: it does not meet the next round
        mesh = init_device_mesh("cpu", (2,))
        late = DTensor.from_local(torch.zeros(3), mesh, [Shard(0)])
        stale = tm.Pool()
        again = threading.Thread(target=_put_quietly, args=(pool, "k", mine))
        again.start()
        _put_quietly(stale, "k", late)
        again.join()
        stale.close()
    assert not tm.exists("k")


def _put_quietly(pool: tm.Pool, key: str, value: Any) -> None:
    with pytest.raises(tm.DeadlineExceeded):
        pool.put(key, value, timeout=1)


def test_dtensors_of_different_meshes_do_not_go_into_one_object(pool: tm.Pool) -> None:
    with rank_of(0, 4):
        one = DTensor.from_local(torch.ones(3), DeviceMesh("cpu", [0, 1]), [Shard(0)])
        two = DTensor.from_local(torch.ones(3), DeviceMesh("cpu", [0, 1, 2, 3]), [Shard(0)])
        with pytest.raises(tm.InvalidArgument, match="2 different meshes"):
            tm.put("k", {"one": one, "two": two})
        with pytest.raises(TypeError, match="give no part="):
            tm.put("k", one, part=(0, 2), group="g")
        single = DTensor.from_local(torch.ones(3), DeviceMesh("cpu", [0]), [Shard(0)])
        tm.put("k", single)
    assert torch.equal(tm.get("k"), torch.ones(3))
