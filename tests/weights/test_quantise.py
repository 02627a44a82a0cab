"""Weights that travel in FP8: what they are described as, for every way of sharding, and that subscribers get the bits
that quantising the whole tensor makes."""

from __future__ import annotations

import threading

import pytest
import torch
from test_direct import same
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from worlds import run_world

import torch_mooncake as tm
from torch_mooncake import ops, weights
from torch_mooncake.weights import Fp8Blocks, Fp8Channels, Layout, Part, Publisher, Rule, Split, Stack, Subscriber

FP8 = torch.float8_e4m3fn


def bits(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.view(torch.uint8) if tensor.dtype == FP8 else tensor for name, tensor in tensors.items()}


def test_what_is_described():
    model = {"a.weight": torch.zeros(300, 200).bfloat16(), "b.weight": torch.zeros(4, 6), "norm": torch.ones(6)}
    layout = Layout(quantise={"a.{x}": Fp8Blocks(), "b.weight": Fp8Channels(suffix="_scale")})
    manifest = weights.describe(model, layout)
    assert {whole.name: (whole.dtype, whole.shape) for whole in manifest.wholes} == {
        "a.weight": ("float8_e4m3fn", (300, 200)),
        "a.weight_scale_inv": ("float32", (3, 2)),
        "b.weight": ("float8_e4m3fn", (4, 6)),
        "b.weight_scale": ("float32", (4, 1)),
        "norm": ("float32", (6,)),
    }
    assert weights.Manifest.from_json(manifest.to_json()).digest == manifest.digest
    served = {
        "a.weight": torch.zeros(300, 200, dtype=FP8), "a.weight_scale_inv": torch.zeros(3, 2), "norm": torch.ones(6),
        "b.weight": torch.zeros(4, 6, dtype=FP8), "b.weight_scale": torch.zeros(4, 1),
    }  # fmt: skip
    weights.compare([manifest], [weights.describe(served)])
    with pytest.raises(tm.LayoutMismatch, match=r"b.weight: published as float8_e4m3fn\[4, 6\], float32"):
        weights.compare([manifest], [weights.describe({**served, "b.weight": model["b.weight"]})])


def test_the_first_pattern_counts():
    model = {f"layers.{i}.w": torch.zeros(4, 4) for i in range(3)}
    layout = Layout(quantise={"layers.1.w": None, "layers.{i}.w": Fp8Blocks(2, 2)})
    dtypes = [whole.dtype for whole in weights.describe(model, layout).wholes]
    assert dtypes[:3] == ["float8_e4m3fn", "float32", "float8_e4m3fn"]


def refused(match: str, model: dict[str, torch.Tensor], layout: Layout) -> None:
    with pytest.raises(tm.InvalidArgument, match=match):
        weights.describe(model, layout)


def test_what_cannot_be_is_refused():
    blocks, whole = {"{name}": Fp8Blocks(2, 2)}, torch.zeros(4, 4)
    refused(r"w: float32\[4\] is not quantised", {"w": torch.zeros(4)}, Layout(quantise=blocks))
    refused(r"w: float32\[\] is not quantised", {"w": torch.tensor(1.0)}, Layout(quantise=blocks))
    refused(r"w: int64\[4, 4\] is not quantised", {"w": whole.long()}, Layout(quantise=blocks))
    refused(r"w: float8_e4m3fn\[4, 4\] is not", {"w": whole.to(FP8)}, Layout(quantise=blocks))
    taken = {"w": whole, "w_scale_inv": torch.zeros(2, 2)}
    refused("w_scale_inv: a tensor of this name is there", taken, Layout(quantise={"w": Fp8Blocks(2, 2)}))
    tied = {"w": whole, "v": whole}
    refused("v: tied to w, and not quantised as that is", tied, Layout(quantise={"w": Fp8Blocks(2, 2)}))
    rules = [Rule("qk", [Part("q", (2, -1)), Part("k", (2, -1))])]
    refused("qk: q and k in it are not quantised alike", {"qk": whole}, Layout(rules, quantise={"q": Fp8Blocks(2, 2)}))
    with pytest.raises(tm.InvalidArgument, match="which cannot be"):
        Layout(quantise={"w": Fp8Blocks(0, 2)})
    with pytest.raises(tm.InvalidArgument, match="a publisher quantises"):
        Subscriber("policy", {"w": whole}, layout=Layout(quantise=blocks))


@pytest.mark.parametrize(("dim", "what"), [(0, "rows 3 to 6 of 6"), (1, "columns 3 to 6 of 6")])
def test_a_shard_that_cuts_a_block(dim, what):
    rules = [Rule("w", [Part("w", split=[Split("tp", dim)])])]
    shape = [3, 6] if dim == 0 else [6, 3]
    layout = Layout(rules, {"tp": (1, 2)}, {"w": Fp8Blocks(2, 2)})
    refused(f"w: a shard has {what}, which cuts a block of 2 at 3", {"w": torch.zeros(shape)}, layout)
    if dim == 1:
        layout = Layout(rules, {"tp": (1, 2)}, {"w": Fp8Channels()})
        refused(f"w: a shard has {what}, which cuts a block of 6 at 3", {"w": torch.zeros(shape)}, layout)


def wholes(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"q": (16, 10), "k": (8, 10), "v": (8, 10), "o": (10, 16), "norm": (10,)}
    shapes |= {f"expert.{e}": (6, 12) for e in range(4)}
    return {name: torch.randn(shape, generator=generator).bfloat16() for name, shape in shapes.items()}


def trainer_shard(tp: int, at: int, values: dict[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], Layout]:
    """Fused and row-parallel projections, stacked experts that lie transposed."""
    experts = [e for e in range(4) if e * tp // 4 == at]
    tensors = {
        "qkv": torch.cat([values[n].chunk(tp)[at] for n in "qkv"]),
        "o": values["o"].chunk(tp, dim=1)[at],  # not contiguous
        "w2": torch.stack([values[f"expert.{e}"].t() for e in experts]),
        "norm": values["norm"].clone(),
    }
    rules = [
        Rule("qkv", [Part(n, ({"q": 16, "k": 8, "v": 8}[n], -1), [Split("tp", 0)]) for n in "qkv"]),
        Rule("o", [Part("o", split=[Split("tp", 1)])]),
        Rule("w2", [Part("expert.{e}")], stack=Stack("e", 4, "tp"), transpose=True),
    ]
    quantise = {**dict.fromkeys("qkv", Fp8Blocks(4, 4)), "o": Fp8Blocks(8, 8), "expert.{e}": Fp8Channels()}
    return tensors, Layout(rules, {"tp": (at, tp)}, quantise)


def served(values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What quantising the whole tensors makes."""
    found = {"norm": values["norm"]}
    for name, value in values.items():
        if name != "norm":
            block = (4, 4) if name in "qkv" else (8, 8) if name == "o" else (1, -1)
            found[name], found[name + "_scale_inv"] = ops.quantize_blocks(value, block)
    return found


@pytest.mark.parametrize("tp", [1, 2])
def test_tensor_parallel_trainers(opened, tp):
    publishers = []
    for at in range(tp):
        tensors, layout = trainer_shard(tp, at, wholes(0))
        publishers.append((opened(Publisher("policy", tensors, layout=layout, rank=at, world=tp)), tensors))
    worker = {name: torch.zeros_like(tensor) for name, tensor in served(wholes(0)).items()}
    subscriber = opened(Subscriber("policy", worker))
    for step in (1, 2, 3):
        values = wholes(step)
        for at, (_, tensors) in enumerate(publishers):
            for name, value in trainer_shard(tp, at, values)[0].items():
                tensors[name].copy_(value)
        threads = [threading.Thread(target=p.publish, kwargs={"step": step}) for p, _ in publishers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        update = subscriber.update(timeout=20)
        assert same(bits(worker), bits(served(values)))
        assert update.nbytes == sum(tensor.nbytes for tensor in worker.values())


def test_to_subscribers_that_shard_the_scales_too(opened):
    value = torch.randn(16, 8)
    publisher = opened(Publisher("policy", {"w": value}, layout=Layout(quantise={"w": Fp8Blocks(4, 4)})))
    whole, scales = ops.quantize_blocks(value, (4, 4))
    rules = [Rule("{n}", [Part("{n}", split=[Split("tp", 0)])])]
    workers = [{"w": torch.zeros(8, 8, dtype=FP8), "w_scale_inv": torch.zeros(2, 2)} for _ in range(2)]
    subscribers = [
        opened(Subscriber("policy", worker, layout=Layout(rules, {"tp": (at, 2)}), flip="swap"))
        for at, worker in enumerate(workers)
    ]
    publisher.publish()
    for at, (subscriber, worker) in enumerate(zip(subscribers, workers, strict=True)):
        subscriber.update(timeout=20)
        expected = {"w": whole.chunk(2)[at], "w_scale_inv": scales.chunk(2)[at]}
        assert same(bits(worker), bits(expected))


def test_tied_weights(opened):
    value = torch.randn(8, 8)
    layout = Layout(quantise={"{n}": Fp8Blocks(4, 4)})
    publisher = opened(Publisher("policy", {"embed": value, "head": value}, layout=layout))
    names = ("embed", "embed_scale_inv", "head", "head_scale_inv")
    worker = {n: torch.zeros(2, 2) if "scale" in n else torch.zeros(8, 8, dtype=FP8) for n in names}
    subscriber = opened(Subscriber("policy", worker))
    publisher.publish()
    assert subscriber.update(timeout=20).nbytes == 64 + 16
    q, scales = ops.quantize_blocks(value, (4, 4))
    assert same(bits(worker), bits({"embed": q, "embed_scale_inv": scales, "head": q, "head_scale_inv": scales}))


def fsdp_rank(rank: int, world: int) -> str:
    torch.manual_seed(5)
    module = torch.nn.Linear(8, 13, bias=False)
    fully_shard(module, mesh=init_device_mesh("cpu", (world,)))
    with pytest.raises(tm.InvalidArgument) as caught:
        Publisher("policy", module, layout=Layout(quantise={"weight": Fp8Blocks(4, 4)}), rank=rank, world=world)
    layout = Layout(quantise={"weight": Fp8Blocks(7, 4)})
    with Publisher("policy", module, layout=layout, rank=rank, world=world) as publisher:
        publisher.publish(step=8)
        tm.wait("updated", 100)
    return str(caught.value)


def test_fsdp2_ranks(opened):
    torch.manual_seed(5)
    q, scales = ops.quantize_blocks(torch.nn.Linear(8, 13, bias=False).weight.detach(), (7, 4))
    worker = {"weight": torch.zeros(13, 8, dtype=FP8), "weight_scale_inv": torch.zeros(2, 2)}
    subscriber = opened(Subscriber("policy", worker))

    def update() -> None:
        assert subscriber.update(timeout=100).step == 8
        tm.put("updated", True)

    thread = threading.Thread(target=update)
    thread.start()
    refusals = run_world(2, fsdp_rank)
    thread.join()
    assert refusals[0] == "weight: a shard has rows 0 to 7 of 13, which cuts a block of 4 at 7"
    assert refusals[1] == "weight: a shard has rows 7 to 13 of 13, which cuts a block of 4 at 7"
    assert same(bits(worker), bits({"weight": q, "weight_scale_inv": scales}))


def test_in_place_there_is_a_copy_of_what_is_quantised(opened):
    mine = {"w": torch.randn(16, 8), "norm": torch.randn(8)}
    layout = Layout(quantise={"w": Fp8Blocks(4, 4)})
    publisher = opened(Publisher("policy", mine, layout=layout, in_place=True))
    worker = {"w": torch.zeros(16, 8, dtype=FP8), "w_scale_inv": torch.zeros(4, 2), "norm": torch.zeros(8)}
    subscriber = opened(Subscriber("policy", worker))
    for step in (1, 2):
        publisher.publish(step=step)
        subscriber.update(timeout=20)
        publisher.fence()
        q, scales = ops.quantize_blocks(mine["w"], (4, 4))
        assert same(bits(worker), bits({"w": q, "w_scale_inv": scales, "norm": mine["norm"]}))
        mine["w"].normal_()
        mine["norm"].normal_()
