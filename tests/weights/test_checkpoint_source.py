"""Checkpoints on disk as a source: real files, ranks that share them, subscribers of any layout, and damaged files."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from worlds import run_world

import torch_mooncake as tm
from torch_mooncake import weights
from torch_mooncake.weights import Checkpoint, Layout, Part, Publisher, Rule, Split, Stream, Subscriber
from torch_mooncake.weights.atoms import compare
from torch_mooncake.weights.files import Share


def tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "embed": torch.randn(37, 16, generator=generator),
        "q": torch.randn(16, 16, generator=generator).bfloat16(),
        "odd": torch.arange(7, dtype=torch.uint8),
        "o": torch.randn(16, 24, generator=generator),
        "bytes": torch.randint(-100, 100, (3, 5), generator=generator, dtype=torch.int8),
        "scale": torch.randn(9, generator=generator).to(torch.float8_e4m3fn),
        "step": torch.tensor(7 + seed),
        "none": torch.zeros(0, 4),
    }


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    def raw(t: torch.Tensor) -> torch.Tensor:
        return t.contiguous().reshape(-1).view(torch.uint8)

    return a.keys() == b.keys() and all(a[n].dtype == b[n].dtype and torch.equal(raw(a[n]), raw(b[n])) for n in a)


def one_file(folder: Path, seed: int = 0) -> Path:
    save_file(tensors(seed), folder / "model.safetensors")
    return folder / "model.safetensors"


def sharded(folder: Path, seed: int = 0) -> Path:
    found = tensors(seed)
    parts = [list(found)[0::2], list(found)[1::2]]
    files = [f"model-0000{i + 1}-of-00002.safetensors" for i in range(2)]
    for file, names in zip(files, parts, strict=True):
        save_file({name: found[name] for name in names}, folder / file)
    weight_map = {name: file for file, names in zip(files, parts, strict=True) for name in names}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def saved_by_dcp(folder: Path, seed: int = 0) -> Path:
    found = tensors(seed)
    found["o"] = found["o"].t().contiguous().t()  # saved with these strides
    dcp.save(
        {"model": found, "optimizer": {"lr": 0.1, "m": torch.ones(3)}}, checkpoint_id=str(folder / "dcp"), no_dist=True
    )
    return folder / "dcp"


FORMATS: dict[str, tuple[Callable[..., Path], str]] = {
    "file": (one_file, ""),
    "sharded": (sharded, ""),
    "dcp": (saved_by_dcp, "model."),
}


def column_parallel(at: int, ranks: int) -> tuple[dict[str, torch.Tensor], Layout]:
    whole = tensors(99)
    whole["embed"] = torch.zeros(37, 16).chunk(ranks)[at].clone()
    whole["o"] = torch.zeros(16, 24 // ranks)
    rules = [
        Rule("embed", [Part("embed", (37, -1), [Split("tp", 0)])], padded=True),
        Rule("o", [Part("o", split=[Split("tp", 1)])]),
    ]
    return whole, Layout(rules, {"tp": (at, ranks)})


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("kind", FORMATS)
def test_a_checkpoint_in_plain_and_parallel_subscribers(opened, tmp_path: Path, kind: str, ranks: int):
    make, prefix = FORMATS[kind]
    source = Checkpoint(make(tmp_path), prefix=prefix)
    assert {(w.name, w.shape, w.dtype) for w in source.wholes} == {
        (name, tuple(t.shape), str(t.dtype).removeprefix("torch.")) for name, t in tensors().items()
    }
    assert source.nbytes == sum(t.nbytes for t in tensors().values())
    publishers = [opened(Publisher("policy", source, rank=r, world=ranks)) for r in range(ranks)]
    plain = {name: torch.full_like(t, 3) for name, t in tensors().items()}
    whole = opened(Subscriber("policy", plain))
    workers = []
    for at in range(2):
        own, layout = column_parallel(at, 2)
        workers.append((opened(Subscriber("policy", own, layout=layout)), own))
    publish_all(publishers, step=7)
    assert whole.update(timeout=30).step == 7
    assert same(plain, tensors())
    for at, (worker, own) in enumerate(workers):
        worker.update(timeout=30)
        expected = tensors() | {"embed": tensors()["embed"].chunk(2)[at], "o": tensors()["o"].chunk(2, 1)[at]}
        assert same(own, expected)


def publish_all(publishers: list[Publisher], **options: Any) -> None:
    """The ranks in one process: rank 0 waits for the others, so it comes last; they wait for it in threads."""
    import threading

    threads = [threading.Thread(target=p.publish, kwargs=options) for p in publishers[1:]]
    for thread in threads:
        thread.start()
    publishers[0].publish(**options)
    for thread in threads:
        thread.join()


def test_ranks_have_equal_shares_whatever_the_tensors(tmp_path: Path):
    save_file(
        {"big": torch.zeros(1000, 100), "small": torch.zeros(3), "vector": torch.zeros(5001)},
        tmp_path / "m.safetensors",
    )
    source = Checkpoint(tmp_path / "m.safetensors")
    for ranks in (1, 2, 3, 7):
        shares = [Share(source, rank, ranks) for rank in range(ranks)]
        compare([share.manifest for share in shares], [source.manifest])
        sizes = [share.manifest.nbytes for share in shares]
        assert sum(sizes) == source.nbytes
        assert max(sizes) - min(sizes) <= 800  # a row at either end


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_tensors_at_odd_offsets(opened, tmp_path: Path, ranks: int):
    """What other writers make: floats behind three bytes, cut between ranks at elements all the same."""
    value = torch.arange(1001.0)
    header = {
        "odd": {"dtype": "U8", "shape": [3], "data_offsets": [0, 3]},
        "w": {"dtype": "F32", "shape": [1001], "data_offsets": [3, 4007]},
    }
    text = json.dumps(header).encode()
    data = len(text).to_bytes(8, "little") + text + bytes([1, 2, 3]) + value.numpy().tobytes()
    (tmp_path / "odd.safetensors").write_bytes(data)
    source = Checkpoint(tmp_path / "odd.safetensors")
    publishers = [opened(Publisher("policy", source, rank=rank, world=ranks)) for rank in range(ranks)]
    mine = {"odd": torch.zeros(3, dtype=torch.uint8), "w": torch.zeros(1001)}
    subscriber = opened(Subscriber("policy", mine))
    publish_all(publishers)
    subscriber.update(timeout=20)
    assert same(mine, {"odd": torch.tensor([1, 2, 3], dtype=torch.uint8), "w": value})


def test_the_next_checkpoint_is_the_next_version(opened, tmp_path: Path):
    folders = [tmp_path / str(i) for i in range(3)]
    for i, folder in enumerate(folders):
        folder.mkdir()
        one_file(folder, i)
    publisher = opened(Publisher("policy", Checkpoint(folders[0])))
    mine = tensors(50)
    subscriber = opened(Subscriber("policy", mine))
    for i, folder in enumerate(folders):
        publisher.publish(step=i, source=Checkpoint(folder) if i else None)
        assert subscriber.update(timeout=20).step == i
        assert same(mine, tensors(i))
    other = tmp_path / "other.safetensors"
    save_file({"w": torch.ones(3)}, other)
    with pytest.raises(tm.LayoutMismatch, match=r"other\.safetensors has not the tensors of"):
        publisher.publish(source=Checkpoint(other))
    one_file(folders[2], 9)  # overwritten since it was described
    with pytest.raises(tm.Corrupt, match=r"model\.safetensors was changed since it was described"):
        publisher.publish()
    late = tensors(51)
    assert opened(Subscriber("policy", late)).update(timeout=20).step == 2  # what was published stays
    assert same(late, tensors(2))


def test_one_version_takes_one_copy(opened, tmp_path: Path):
    save_file({f"w{i}": torch.ones(1 << 20) for i in range(16)}, tmp_path / "m.safetensors")
    publisher = opened(Publisher("policy", Checkpoint(tmp_path / "m.safetensors")))
    before = shared_kib()
    publisher.publish()
    assert 60 << 10 < shared_kib() - before < 80 << 10  # of 64 MiB


def shared_kib() -> int:
    """Shared memory that this process has touched."""
    fields = [line.split() for line in Path("/proc/self/status").read_text().splitlines()]
    return next(int(field[1]) for field in fields if field[0] == "RssShmem:")


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(30, 8)
        self.head = nn.Linear(8, 30, bias=False)
        self.head.weight = self.embed.weight


@pytest.mark.parametrize("flip", ["copy", "swap"])
def test_a_tied_name_that_the_file_leaves_out(opened, tmp_path: Path, flip: Any):
    value = torch.randn(30, 8)
    save_file({"embed.weight": value}, tmp_path / "m.safetensors")
    model = Tied()
    subscriber = opened(Subscriber("policy", model, flip=flip))
    opened(Publisher("policy", Checkpoint(tmp_path / "m.safetensors"))).publish()
    subscriber.update(timeout=20)
    assert torch.equal(model.embed.weight, value)
    assert model.head.weight.data_ptr() == model.embed.weight.data_ptr()


def saved_by_four_ranks(rank: int, world: int, folder: str) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    value = torch.arange(45 * 6, dtype=torch.float32).reshape(45, 6)
    state = {
        "rows": distribute_tensor(value, mesh, [Shard(0), Shard(0)]),
        "both": distribute_tensor(value + 1, mesh, [Shard(1), Shard(0)]),
        "again": distribute_tensor(value + 2, mesh, [Replicate(), Shard(1)]),
        "plain": value + 3,
    }
    dcp.save(state, checkpoint_id=folder)


def test_what_four_ranks_saved(opened, tmp_path: Path):
    run_world(4, saved_by_four_ranks, str(tmp_path / "dcp"))
    source = Checkpoint(tmp_path / "dcp")
    assert len(source.files) == 4
    publishers = [opened(Publisher("policy", source, rank=rank, world=2)) for rank in range(2)]
    value = torch.arange(45 * 6, dtype=torch.float32).reshape(45, 6)
    mine = {name: torch.zeros(45, 6) for name in ("rows", "both", "again", "plain")}
    subscriber = opened(Subscriber("policy", mine))
    publish_all(publishers)
    subscriber.update(timeout=20)
    for i, name in enumerate(("rows", "both", "again", "plain")):
        assert torch.equal(mine[name], value + i)


def cut(path: Path, nbytes: int) -> None:
    os.truncate(path, path.stat().st_size - nbytes)


def damaged_file(folder: Path) -> Path:
    cut(one_file(folder), 1)
    return folder / "model.safetensors"


def missing_shard(folder: Path) -> Path:
    (sharded(folder) / "model-00002-of-00002.safetensors").unlink()
    return folder


def shard_without_its_tensor(folder: Path) -> Path:
    save_file({"other": torch.ones(3)}, sharded(folder) / "model-00002-of-00002.safetensors")
    return folder


def twice(folder: Path) -> Path:
    for i in range(2):
        save_file({"w": torch.ones(3)}, folder / f"{i}.safetensors")
    return folder


def unknown_dtype(folder: Path) -> Path:
    path = one_file(folder)
    path.write_bytes(path.read_bytes().replace(b'"F8_E4M3"', b'"F6_E2M3"'))
    return path


def dcp_without_a_file(folder: Path) -> Path:
    (saved_by_dcp(folder) / "__0_0.distcp").unlink()
    return folder / "dcp"


def dcp_cut(folder: Path) -> Path:
    data = saved_by_dcp(folder) / "__0_0.distcp"
    cut(data, data.stat().st_size // 2)
    return folder / "dcp"


def dcp_metadata_of_another_kind(folder: Path) -> Path:
    import pickle

    (saved_by_dcp(folder) / ".metadata").write_bytes(pickle.dumps(os.system))
    return folder / "dcp"


def dcp_metadata_cut(folder: Path) -> Path:
    cut(saved_by_dcp(folder) / ".metadata", 20)
    return folder / "dcp"


def index_outside(folder: Path) -> Path:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": "../m.safetensors"}}))
    return folder


def no_index(folder: Path) -> Path:
    (folder / "model.safetensors.index.json").write_text("[1]")
    return folder


@pytest.mark.parametrize(
    ("make", "error", "says"),
    [
        (damaged_file, tm.Corrupt, r"model\.safetensors: tensor '\w+' ends at byte \d+ of a file that has \d+"),
        (missing_shard, tm.IoError, r"model-00002-of-00002\.safetensors: No such file .*it has 'q'"),
        (shard_without_its_tensor, tm.Corrupt, r"model-00002-of-00002\.safetensors has no tensor 'none'"),
        (twice, tm.Corrupt, r"1\.safetensors: tensor 'w' is in 0\.safetensors, too"),
        (unknown_dtype, tm.Unsupported, r"model\.safetensors: tensor 'scale' has dtype 'F6_E2M3'"),
        (dcp_without_a_file, tm.IoError, r"__0_0\.distcp: No such file .*'model\.\w+'"),
        (dcp_cut, tm.Corrupt, r"__0_0\.distcp: tensor 'model\.\w+' ends at byte \d+, the file has \d+ bytes"),
        (dcp_metadata_of_another_kind, tm.Unsupported, r"\.metadata has a posix\.system, which is not unpickled"),
        (dcp_metadata_cut, tm.Corrupt, r"\.metadata is not the metadata of a checkpoint"),
        (index_outside, tm.Corrupt, r"'w' is in '\.\./m\.safetensors', which is not beside the index"),
        (no_index, tm.Corrupt, r"index\.json has no weight_map"),
        (lambda folder: folder, tm.IoError, r"neither \.safetensors files nor a \.metadata"),
        (lambda folder: folder / "no", tm.IoError, r"no: No such file"),
    ],
)
def test_what_is_wrong_names_file_and_tensor(tmp_path: Path, make: Callable[[Path], Path], error: Any, says: str):
    with pytest.raises(error, match=says):
        Checkpoint(make(tmp_path), prefix="model." if "dcp" in getattr(make, "__name__", "") else "")


def test_a_file_that_is_cut_after_it_was_described(opened, tmp_path: Path):
    publisher = opened(Publisher("policy", Checkpoint(one_file(tmp_path))))
    publisher.publish()
    cut(tmp_path / "model.safetensors", 40)
    with pytest.raises(
        tm.Corrupt, match=r"model\.safetensors: tensor '\w+' ends at byte \d+, the file has \d+ bytes by"
    ):
        publisher.publish()
    assert publisher.version == 1
    mine = tensors(5)
    opened(Subscriber("policy", mine)).update(timeout=20)
    assert same(mine, tensors())


def test_dcp_data_that_is_not_what_the_metadata_says(opened, tmp_path: Path):
    folder = saved_by_dcp(tmp_path)
    data = bytearray((folder / "__0_0.distcp").read_bytes())
    data[: len(data)] = data.replace(b"FloatStorage", b"DoubleStorag")[: len(data)]
    (folder / "__0_0.distcp").write_bytes(data)
    publisher = opened(Publisher("policy", Checkpoint(folder, prefix="model.")))
    with pytest.raises((tm.Corrupt, tm.Unsupported), match=r"__0_0\.distcp: tensor 'embed|o'"):
        publisher.publish()
    assert publisher.version == 0


def test_dtypes_that_differ_name_the_tensor(opened, tmp_path: Path):
    opened(Publisher("policy", Checkpoint(one_file(tmp_path)))).publish()
    mine = tensors() | {"q": torch.zeros(16, 16)}
    with pytest.raises(tm.LayoutMismatch, match=r"q: published as bfloat16\[16, 16\], float32\[16, 16\] in the model"):
        opened(Subscriber("policy", mine)).update(timeout=20)


def test_arguments(pool, tmp_path: Path):
    source = Checkpoint(one_file(tmp_path))
    with pytest.raises(tm.InvalidArgument, match="layout and in_place are for"):
        Publisher("policy", source, layout=Layout([]))
    with pytest.raises(tm.InvalidArgument, match="has no tensors under 'x'"):
        Checkpoint(tmp_path, prefix="x")
    with Publisher("policy", {"w": torch.ones(2)}) as publisher, pytest.raises(tm.InvalidArgument, match="checkpoint"):
        publisher.publish(source=source)
    assert weights.compare([source.manifest], [weights.describe(tensors())]) is None


def test_a_stream_of_tensors(opened):
    declared = [(name, t.shape, t.dtype) for name, t in tensors().items()]
    values = tensors()

    def come() -> Any:
        yield from reversed(values.items())
        yield "elsewhere", None

    publisher = opened(Publisher("policy", Stream(declared, come)))
    mine = tensors(5)
    subscriber = opened(Subscriber("policy", mine))
    for step in range(3):
        values = tensors(step)
        publisher.publish(step=step)
        subscriber.update(timeout=20)
        assert same(mine, tensors(step))
    values = tensors() | {"q": torch.zeros(16, 16)}
    with pytest.raises(tm.LayoutMismatch, match=r"q: float32\[16, 16\] came, bfloat16\[16, 16\] was declared"):
        publisher.publish()
    values.pop("q")
    with pytest.raises(tm.LayoutMismatch, match=r"did not come.*: q"):
        publisher.publish()
    for arguments, says in (
        (([*declared, declared[0]],), "declared twice"),
        ((declared,), "held, and not declared: x"),
    ):
        with pytest.raises(tm.InvalidArgument, match=says):
            Stream(*arguments, come, held=["x"] if "held" in says else None)


def test_ranks_that_hold_parts_of_a_stream(opened):
    declared = [(name, t.shape, t.dtype) for name, t in tensors().items()]
    names = list(tensors())
    publishers = [
        opened(Publisher("policy", Stream(declared, lambda: tensors().items(), held=names[r::2]), rank=r, world=2))
        for r in range(2)
    ]
    mine = tensors(5)
    subscriber = opened(Subscriber("policy", mine))
    publish_all(publishers)
    subscriber.update(timeout=20)
    assert same(mine, tensors())
