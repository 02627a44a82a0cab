"""torch.distributed.checkpoint over the pool, beside torch's own file writer."""

from __future__ import annotations

import copy
import pickle
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from processes import eventually
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.planner import LoadPlan
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from worlds import run_world

import torch_mooncake as tm

pytestmark = pytest.mark.filterwarnings("ignore:.*")


def used_bytes() -> int:
    return sum(node["used_bytes"] for node in tm.stat()["nodes"])


def network(seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(16, 33), torch.nn.BatchNorm1d(33), torch.nn.Linear(33, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=seed / 1000)
    model(torch.randn(4, 16)).sum().backward()
    optimizer.step()
    return model, optimizer


def state(seed: int) -> dict[str, Any]:
    model, optimizer = network(seed)
    return {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "step": seed,
        "odd": {"list": [1, "two", None], "tensors": [torch.ones(seed), 3.5], "tuple": (1, b"x")},
        "scalar": torch.tensor(seed),
        "views": {"t": torch.arange(12.0).view(3, 4).t(), "none": torch.empty(0, 2)},
        "bf16": torch.ones(5, dtype=torch.bfloat16),
    }


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return a.dtype is b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)


def zeroed(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return torch.zeros_like(value)
    if isinstance(value, dict):
        return {k: zeroed(v) for k, v in value.items()}
    return type(value)(zeroed(v) for v in value) if isinstance(value, list) else value


def test_saves_and_loads_what_the_file_writer_does(pool: tm.Pool, tmp_path: Path) -> None:
    saved = state(3)
    by_file = dcp.save(saved, storage_writer=dcp.FileSystemWriter(tmp_path))
    ours = dcp.save(saved, storage_writer=tm.checkpoint.Writer("run/step3", bucket=1000))
    assert ours.state_dict_metadata == by_file.state_dict_metadata
    assert ours.planner_data == by_file.planner_data
    assert ours.storage_data.keys() == by_file.storage_data.keys()
    read = tm.checkpoint.Reader("run/step3").read_metadata()
    assert read.state_dict_metadata == by_file.state_dict_metadata
    assert (read.planner_data, read.version) == (by_file.planner_data, by_file.version)
    assert len(tm.keys("run/step3/.data/")) > 3
    assert tm.checkpoint.exists("run/step3")
    assert not tm.checkpoint.exists("run")

    for reader in (dcp.FileSystemReader(tmp_path), tm.checkpoint.Reader("run/step3")):
        loaded = zeroed(saved) | {"step": 0, "odd": {**zeroed(saved["odd"]), "list": None}}
        kept = loaded["model"]["0.weight"]
        dcp.load(loaded, storage_reader=reader)
        assert same(loaded, saved)
        assert loaded["model"]["0.weight"] is kept
    whole = _load_state_dict_from_keys(storage_reader=tm.checkpoint.Reader("run/step3"))
    assert same(whole["model"], saved["model"])
    part = {"model": {"0.weight": torch.zeros(33, 16, dtype=torch.float64)}}
    dcp.load(part, storage_reader=tm.checkpoint.Reader("run/step3"))  # converted on the way, as torch does
    assert torch.equal(part["model"]["0.weight"], saved["model"]["0.weight"].double())

    missing = {"model": {"none": torch.zeros(1)}}
    with pytest.raises(CheckpointException, match="Missing key"):
        dcp.load(missing, storage_reader=tm.checkpoint.Reader("run/step3"))
    dcp.load(
        missing, storage_reader=tm.checkpoint.Reader("run/step3"), planner=DefaultLoadPlanner(allow_partial_load=True)
    )
    with pytest.raises(CheckpointException, match="Size mismatch"):
        dcp.load({"model": {"0.weight": torch.zeros(3, 16)}}, storage_reader=tm.checkpoint.Reader("run/step3"))
    with pytest.raises(CheckpointException, match="nobody"):
        dcp.load(missing, storage_reader=tm.checkpoint.Reader("nobody"))


def test_objects_with_state_of_their_own(pool: tm.Pool) -> None:
    model, optimizer = network(1)
    dcp.save({"model": model, "optimizer": optimizer}, storage_writer=tm.checkpoint.Writer("c"))
    other, other_optimizer = network(2)
    dcp.load({"model": other, "optimizer": other_optimizer}, storage_reader=tm.checkpoint.Reader("c"))
    assert same(model.state_dict(), other.state_dict())
    assert same(optimizer.state_dict(), other_optimizer.state_dict())


def test_a_checkpoint_is_replaced_whole_and_its_memory_comes_back(pool: tm.Pool) -> None:
    empty = used_bytes()
    first, second = {"w": torch.ones(100_000)}, {"w": torch.full((100_000,), 2.0), "v": torch.ones(3)}
    writer = tm.checkpoint.Writer("c")
    dcp.save(first, storage_writer=writer)
    one = used_bytes()
    for _ in range(3):
        dcp.save(first, storage_writer=writer)
    assert eventually(lambda: used_bytes() <= one + 4096, 10)

    # A save that gets no further than its data: the one before is what there is.
    broken = tm.checkpoint.Writer("c")
    planner = DefaultSavePlanner()
    planner.set_up_planner(second, is_coordinator=True)
    broken.reset()
    broken.set_up_storage_writer(True)
    plans, metadata = planner.create_global_plan([broken.prepare_local_plan(planner.create_local_plan())])
    results = broken.write_data(planner.finish_plan(plans[0]), planner).value()
    loaded = {"w": torch.zeros(100_000)}
    dcp.load(loaded, storage_reader=tm.checkpoint.Reader("c"))
    assert torch.equal(loaded["w"], first["w"])
    assert used_bytes() > one + 300_000
    dcp.save(first, storage_writer=writer)
    assert eventually(lambda: used_bytes() <= one + 4096, 10)
    broken.finish(metadata, [results])  # its data went with that save: it is never half there
    with pytest.raises(CheckpointException, match="is gone"):
        dcp.load({"w": torch.zeros(100_000)}, storage_reader=tm.checkpoint.Reader("c"))

    dcp.save(second, storage_writer=writer)
    loaded = {"w": torch.zeros(100_000)}
    dcp.load(loaded, storage_reader=tm.checkpoint.Reader("c"))
    assert torch.equal(loaded["w"], second["w"])
    with pytest.raises(CheckpointException, match="exists"):
        dcp.save(first, storage_writer=tm.checkpoint.Writer("c", overwrite=False))
    dcp.save(first, checkpoint_id="d", storage_writer=tm.checkpoint.Writer("c", overwrite=False))

    assert tm.checkpoint.delete("c")
    assert not tm.checkpoint.delete("c")
    assert tm.checkpoint.delete(Path("d"))
    assert tm.keys() == []
    assert eventually(lambda: used_bytes() <= empty + 4096, 10)


def test_ranks_that_see_different_saves_do_not_mix_them(pool: tm.Pool) -> None:
    reader = tm.checkpoint.Reader("c")
    plans = []
    for value in (1.0, 2.0):
        dcp.save({"w": torch.full((3,), value)}, storage_writer=tm.checkpoint.Writer("c"))
        reader.set_up_storage_reader(reader.read_metadata(), True)
        plans.append(reader.prepare_local_plan(LoadPlan([])))
    with pytest.raises(tm.KeyNotFound, match="replaced while"):
        reader.prepare_global_plan(plans)
    assert reader.prepare_global_plan(plans[1:]) == plans[1:]


class Bomb:
    exploded = False

    def __reduce__(self) -> Any:
        return (setattr, (Bomb, "exploded", True))


def test_nothing_is_pickled(pool: tm.Pool) -> None:
    for value in (object(), {1, 2}, Bomb(), torch.float32):
        with pytest.raises(CheckpointException, match=r"'a\.b': .*cannot be put"):
            dcp.save({"a": {"b": value}}, storage_writer=tm.checkpoint.Writer("c"))
    assert not tm.checkpoint.exists("c")

    class Other(DefaultSavePlanner):
        pass

    dcp.save({"a": 1}, storage_writer=tm.checkpoint.Writer("c"), planner=Other())
    good = tm.get("c")
    hostile = [pickle.dumps(Bomb()), b"", b"\xff" * 10, good[:-1], good + b"x", good[:1] + b"\x02" + good[2:]]
    for head in hostile:
        tm.put("c", head)
        with pytest.raises(tm.Corrupt):
            tm.checkpoint.Reader("c").read_metadata()
    tm.put("c", {"not": "bytes"})
    with pytest.raises(tm.LayoutMismatch, match="no checkpoint"):
        tm.checkpoint.Reader("c").read_metadata()
    for i in range(len(good)):
        for byte in (0, 1, 0x7F, 0xFF):
            damaged = bytearray(good)
            damaged[i] = byte
            tm.put("c", bytes(damaged))
            try:
                dcp.load({"a": 0}, storage_reader=tm.checkpoint.Reader("c"), no_dist=True)
            except (tm.Error, CheckpointException):
                pass
    assert not Bomb.exploded
    with pytest.raises(tm.InvalidArgument, match="id"):
        tm.checkpoint.Writer("")


# --- several ranks ---


def sharded(rank: int, world: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(5)
    model = torch.nn.Sequential(torch.nn.Linear(16, 33), torch.nn.ReLU(), torch.nn.Linear(33, 3))
    model = fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 16) * (rank + 1)).sum().backward()
    optimizer.step()
    return model, optimizer


def training_state(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    from torch.distributed.checkpoint.state_dict import get_state_dict

    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {"model": model_state, "optimizer": optimizer_state}


def full(value: Any) -> Any:
    if isinstance(value, DTensor):
        return value.full_tensor()
    if isinstance(value, dict):
        return {k: full(v) for k, v in value.items()}
    return [full(v) for v in value] if isinstance(value, list) else value


def two_ranks_save(rank: int, world: int) -> Any:
    tm.init()
    model, optimizer = sharded(rank, world)
    saved = training_state(model, optimizer) | {"step": 7, "plain": torch.arange(5)}
    dcp.save(saved, storage_writer=tm.checkpoint.Writer("fsdp"))
    mesh = init_device_mesh("cpu", (world,))
    saved["extra"] = distribute_tensor(torch.arange(35.0).view(5, 7), mesh, [Shard(1)])
    saved["copies"] = distribute_tensor(torch.arange(6.0), mesh, [Replicate()])
    before = full(copy.deepcopy({"model": saved["model"]}))
    group = dist.new_group(backend="gloo")  # it works in a thread: its collectives are its own
    future = dcp.async_save(saved, storage_writer=tm.checkpoint.Writer("async"), process_group=group)
    for parameter in model.parameters():
        parameter.data.zero_()  # what is saved is what it was
    future.result()
    for name in ("fsdp", "async"):
        again, again_optimizer = sharded(rank + 3, world)
        loaded = training_state(again, again_optimizer) | {"step": 0, "plain": torch.zeros(5, dtype=torch.int64)}
        dcp.load(loaded, storage_reader=tm.checkpoint.Reader(name))
        assert loaded["step"] == 7
        assert same(full(loaded["model"]), before["model"])
    with pytest.raises(CheckpointException):
        dcp.save({"bad": object()} if rank else {"good": 1}, storage_writer=tm.checkpoint.Writer("fsdp"))
    dist.barrier()
    everything = {"model": full(loaded["model"]), "optimizer": full(loaded["optimizer"])}
    tm.close()
    return pickle.dumps(everything) if rank == 0 else None


@contextmanager
def rank_of(rank: int, world: int) -> Any:
    """This process as one of a world that does not communicate."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        yield
    finally:
        dist.destroy_process_group()


def test_what_two_ranks_saved_is_loaded_by_one_and_by_four(pool: tm.Pool) -> None:
    want = pickle.loads(run_world(2, two_ranks_save, backend="gloo")[0])
    for name in ("fsdp", "async"):
        whole = {"model": zeroed(want["model"]), "optimizer": zeroed(want["optimizer"]), "step": 0}
        dcp.load(whole, storage_reader=tm.checkpoint.Reader(name))
        assert same(whole["model"], want["model"])
        assert same(whole["optimizer"], want["optimizer"])
        assert whole["step"] == 7
    extra = {"extra": torch.zeros(5, 7), "copies": torch.zeros(6)}
    dcp.load(extra, storage_reader=tm.checkpoint.Reader("async"))
    assert torch.equal(extra["extra"], torch.arange(35.0).view(5, 7))
    assert torch.equal(extra["copies"], torch.arange(6.0))
    for rank in range(4):
        with rank_of(rank, 4):
            mesh = init_device_mesh("cpu", (4,))
            mine = {n: (*t.chunk(4), *[t[:0]] * 4)[rank] for n, t in want["model"].items()}
            local = {
                n: DTensor.from_local(torch.zeros_like(mine[n]), mesh, [Shard(0)], shape=t.shape, stride=t.stride())
                for n, t in want["model"].items()
            }
            before = tm.stat()["client_read_bytes"]
            dcp.load({"model": local}, storage_reader=tm.checkpoint.Reader("fsdp"), no_dist=True)
            read = tm.stat()["client_read_bytes"] - before
            assert all(torch.equal(local[n].to_local(), mine[n]) for n in mine)
            shares = sum(tensor.to_local().nbytes for tensor in local.values())
            heads = 2 * len(tm.get("fsdp")) + (256 << 10)  # descriptions that lie in the data
            assert shares <= read <= shares + heads


def four_ranks_load(rank: int, world: int) -> bool:
    tm.init()
    model, optimizer = sharded(rank, world)
    loaded = training_state(model, optimizer)
    dcp.load(loaded, storage_reader=tm.checkpoint.Reader("fsdp"))
    want = pickle.loads(tm.get("want"))  # the test's own
    assert same(full(loaded["model"]), want["model"])
    assert same(full(loaded["optimizer"]), want["optimizer"])
    dcp.save(loaded, storage_writer=tm.checkpoint.Writer("from four"))
    dist.barrier()
    tm.close()
    return True


@pytest.mark.slow
def test_four_ranks_of_our_backend_load_what_two_saved(pool: tm.Pool) -> None:
    want = run_world(2, two_ranks_save, backend="mooncake")[0]
    tm.put("want", want)
    assert all(run_world(4, four_ranks_load, backend="mooncake").values())
    expected = pickle.loads(want)
    whole = {"model": zeroed(expected["model"]), "optimizer": zeroed(expected["optimizer"])}
    dcp.load(whole, storage_reader=tm.checkpoint.Reader("from four"))
    assert same(whole["model"], expected["model"])
    assert same(whole["optimizer"], expected["optimizer"])
