"""Manifests say where every element lies: each piece is looked up in the memory it names and compared with the global
tensor it says it is a part of."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard
from worlds import run_world

import torch_mooncake as tm
from torch_mooncake.weights import Layout, Manifest, Part, Rule, Split, Stack, compare, describe


def check(manifest: Manifest, tensors: Mapping[str, Any], wholes: Mapping[str, torch.Tensor]) -> int:
    """Every piece's memory has what the whole has there. The number of elements looked at."""
    seen = 0
    for piece in manifest.pieces():
        whole, local = manifest.wholes[piece.whole], manifest.locals[piece.local]
        tensor = tensors[local.name]
        tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        memory = torch.as_strided(tensor, piece.size, piece.stride, tensor.storage_offset() + piece.offset)
        box = tuple(slice(a, a + n) for a, n in zip(piece.start, piece.size, strict=True))
        assert tuple(wholes[whole.name].shape) == whole.shape
        assert torch.equal(memory, wholes[whole.name][box]), (whole.name, piece)
        seen += memory.numel()
    return seen


def numbers(*shape: int, at: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (torch.arange(torch.Size(shape).numel(), dtype=torch.float64).view(shape) + at).to(dtype)


# --- plain tensors ---


def test_plain_tensors_are_whole_whatever_their_strides():
    wholes = {"a": numbers(3, 4), "t": numbers(5, 6).t(), "cut": numbers(8, 8)[1:5, ::2], "scalar": numbers()}
    wholes["none"] = torch.zeros(0, 7)
    manifest = describe(wholes)
    assert check(manifest, wholes, wholes) == 12 + 30 + 16 + 1
    assert {w.name: w.shape for w in manifest.wholes}["none"] == (0, 7)
    assert manifest.nbytes == 4 * (12 + 30 + 16 + 1)
    compare([manifest], [manifest])


def test_a_manifest_survives_json_and_its_digest_names_the_layout():
    tensors = {"a": numbers(3, 4), "b": numbers(2, 2, 2).to(torch.bfloat16), "s": numbers()}
    manifest = describe(tensors)
    again = Manifest.from_json(manifest.to_json())
    assert again.pieces() == manifest.pieces()
    assert (again.wholes, again.locals, again.aliases) == (manifest.wholes, manifest.locals, manifest.aliases)
    assert again.digest == manifest.digest == describe({k: t.clone() for k, t in tensors.items()}).digest
    for other in ({**tensors, "a": numbers(4, 3)}, {**tensors, "a": numbers(4, 3).t()}, {"a": tensors["a"]}):
        assert describe(other).digest != manifest.digest


def _without(document: dict) -> None:
    del document["pieces"]


def _changed(field: int, value: Any):
    def change(document: dict) -> None:
        document["pieces"][0][field] = value

    return change


@pytest.mark.parametrize(
    "change",
    [
        _without,
        _changed(0, 7),
        _changed(1, -1),
        _changed(2, [2, 0]),
        _changed(3, [3, 5]),
        _changed(3, [0, 4]),
        _changed(4, -1),
        _changed(5, [4]),
        _changed(5, [-4, 1]),
        lambda d: d.update(format=2),
        lambda d: d.update(extra=1),
        lambda d: d["wholes"][0].__setitem__(2, "float9"),
        lambda d: d["wholes"][0].__setitem__(1, [1 << 40, 1 << 40]),
    ],
)
def test_a_malformed_manifest_is_corrupt(change):
    document = json.loads(describe({"a": numbers(3, 4)}).to_json())
    change(document)
    with pytest.raises(tm.Corrupt):
        Manifest.from_json(json.dumps(document))
    with pytest.raises(tm.Corrupt):
        Manifest.from_json(b"\x00")


def test_tied_tensors_are_described_once():
    embed, head = nn.Embedding(10, 4), nn.Linear(4, 10, bias=False)
    head.weight = embed.weight
    tied = describe(nn.ModuleDict({"embed": embed, "head": head}))
    assert tied.aliases == {"head.weight": "embed.weight"}
    assert tied.nbytes == 160
    untied = describe({"embed.weight": numbers(10, 4), "head.weight": numbers(10, 4)})
    compare([tied], [untied])
    compare([tied], [tied])
    with pytest.raises(tm.LayoutMismatch, match=r"head\.weight: tied to embed\.weight in the model, not tied where"):
        compare([untied], [tied])


def test_a_hundred_thousand_tensors():
    memory = torch.zeros(100_000, 2)
    tensors = {f"layer.{i}.weight": row for i, row in enumerate(memory)}
    manifest = describe(tensors)
    assert len(manifest.wholes) == len(manifest.pieces()) == 100_000
    compare([manifest], [Manifest.from_json(manifest.to_json())])


# --- differences ---


def test_the_first_ten_differences_are_listed():
    ours = {f"w{i:02}": numbers(2) for i in range(14)}
    theirs = {f"w{i:02}": numbers(3) for i in range(12)} | {"w12": numbers(2, dtype=torch.float16), "extra": numbers(1)}
    with pytest.raises(tm.LayoutMismatch) as caught:
        compare([describe(ours)], [describe(theirs)])
    lines = str(caught.value).splitlines()
    assert lines[1].strip() == "extra: float32[1] in the model, not published"
    assert lines[2].strip() == "w00: published as float32[2], float32[3] in the model"
    assert len(lines) == 12
    assert lines[-1].strip() == "and 5 more"


def test_dtypes_names_and_subsets():
    one = describe({"w": numbers(2), "v": numbers(1)})
    with pytest.raises(tm.LayoutMismatch, match=r"w: published as float32\[2\], float16\[2\] in the model"):
        compare([one], [describe({"w": numbers(2, dtype=torch.float16), "v": numbers(1)})])
    with pytest.raises(tm.LayoutMismatch, match=r"v: float32\[1\] in the model, not published"):
        compare([describe({"w": numbers(2)})], [one])
    compare([describe({"w": numbers(2)})], [one], subset=True)
    with pytest.raises(tm.LayoutMismatch, match=r"v: published as float32\[1\], not in the model"):
        compare([one], [describe({"w": numbers(2)})], subset=True)


def test_what_no_source_has_is_told():
    def rank(r: int) -> Manifest:
        return describe({"w": numbers(2, 6)}, Layout([Rule("w", [Part("w", split=[Split("tp", 0)])])], {"tp": (r, 3)}))

    compare([rank(0), rank(1), rank(2)], [describe({"w": numbers(6, 6)})])
    with pytest.raises(tm.LayoutMismatch, match=r"w: nobody has \[2:4, 0:6\]"):
        compare([rank(0), rank(2)], [describe({"w": numbers(6, 6)})])
    compare([rank(0), rank(2)], [rank(2), rank(0)])


# --- rules ---

HEADS, KV, DIM, HIDDEN, EXPERTS, INNER = 8, 2, 4, 16, 8, 10


def decoder(layers: int) -> dict[str, torch.Tensor]:
    """A model as its checkpoint has it."""
    wholes: dict[str, torch.Tensor] = {"model.embed.weight": numbers(21, HIDDEN)}
    at = 1000
    for i in range(layers):
        shapes = {
            "q_proj.weight": (HEADS * DIM, HIDDEN),
            "k_proj.weight": (KV * DIM, HIDDEN),
            "v_proj.weight": (KV * DIM, HIDDEN),
            "o_proj.weight": (HIDDEN, HEADS * DIM),
            "norm.weight": (HIDDEN,),
        }
        for e in range(EXPERTS):
            shapes |= {f"experts.{e}.{name}.weight": (INNER, HIDDEN) for name in ("gate", "up")}
            shapes |= {f"experts.{e}.down.weight": (HIDDEN, INNER)}
        for name, shape in shapes.items():
            wholes[f"model.layers.{i}.{name}"] = numbers(*shape, at=at)
            at += 1000
    return wholes


def serving(wholes: dict[str, torch.Tensor], layers: int, tp: int, at: int) -> tuple[dict[str, torch.Tensor], Layout]:
    """A rank of a serving engine: fused qkv with shared kv heads, stacked experts with gate and up fused and the down
    projection transposed, a padded vocabulary."""
    tensors: dict[str, torch.Tensor] = {}
    embed = torch.full((24 // tp, HIDDEN), -1.0)
    rows = wholes["model.embed.weight"].chunk(tp)  # torch.chunk's ceil: the last ones are shorter
    mine = rows[at] if at < len(rows) else wholes["model.embed.weight"][:0]
    embed[: len(mine)] = mine
    tensors["embed"] = embed
    ep = torch.arange(EXPERTS).chunk(tp)[at].tolist()
    for i in range(layers):
        layer = {k.removeprefix(f"model.layers.{i}."): v for k, v in wholes.items() if f"layers.{i}." in k}
        groups = min(KV, tp)
        q = layer["q_proj.weight"].chunk(tp)[at]
        k, v = (layer[f"{n}_proj.weight"].chunk(groups)[at * groups // tp] for n in "kv")
        tensors[f"{i}.qkv"] = torch.cat([q, k, v])
        tensors[f"{i}.o"] = layer["o_proj.weight"].chunk(tp, dim=1)[at].contiguous()
        tensors[f"{i}.norm"] = layer["norm.weight"].clone()
        tensors[f"{i}.w13"] = torch.stack(
            [torch.cat([layer[f"experts.{e}.{n}.weight"] for n in ("gate", "up")]) for e in ep]
        )
        tensors[f"{i}.w2"] = torch.stack([layer[f"experts.{e}.down.weight"].t() for e in ep])
    kv = [Split("tp", 0, groups=min(KV, tp))]
    name = "model.layers.{i}"
    rules = [
        Rule("embed", [Part("model.embed.weight", (21, -1), [Split("tp", 0)])], padded=True),
        Rule(
            "{i}.qkv",
            [
                Part(f"{name}.q_proj.weight", (HEADS * DIM, -1), [Split("tp", 0)]),
                Part(f"{name}.k_proj.weight", (KV * DIM, -1), kv),
                Part(f"{name}.v_proj.weight", (KV * DIM, -1), kv),
            ],
        ),
        Rule("{i}.o", [Part(f"{name}.o_proj.weight", split=[Split("tp", 1)])]),
        Rule("{i}.norm", [Part(f"{name}.norm.weight")]),
        Rule(
            "{i}.w13",
            [Part(f"{name}.experts.{{e}}.{n}.weight", (INNER, -1)) for n in ("gate", "up")],
            stack=Stack("e", EXPERTS, "tp"),
        ),
        Rule("{i}.w2", [Part(f"{name}.experts.{{e}}.down.weight")], stack=Stack("e", EXPERTS, "tp"), transpose=True),
    ]
    return tensors, Layout(rules, {"tp": (at, tp)})


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_fused_stacked_transposed_and_padded_tensors(tp: int):
    wholes = decoder(2)
    manifests = []
    for at in range(tp):
        tensors, layout = serving(wholes, 2, tp, at)
        manifest = describe(tensors, layout)
        padding = sum(int(t.eq(-1).sum()) for t in tensors.values())
        assert check(manifest, tensors, wholes) == sum(t.numel() for t in tensors.values()) - padding
        manifests.append(manifest)
    compare(manifests, [describe(wholes)])
    compare([describe(wholes)], manifests)


def test_parts_in_groups():
    """Megatron's fused qkv: for each group of heads its queries, its key, its value. And rows that alternate."""
    q, k, v = numbers(8 * 3, 5), numbers(4 * 3, 5, at=500), numbers(4 * 3, 5, at=900)
    grouped = [torch.cat([q[6 * g : 6 * g + 6], k[3 * g : 3 * g + 3], v[3 * g : 3 * g + 3]]) for g in range(4)]
    gate, up = numbers(6, 5), numbers(6, 5, at=100)
    wholes = {"q": q, "k": k, "v": v, "gate": gate, "up": up}
    for rank in range(2):
        parts = [Part(n, (len(wholes[n]), -1), [Split("tp", 0)]) for n in "qkv"]
        rows = [Part(n, (6, -1), [Split("tp", 0)]) for n in ("gate", "up")]
        layout = Layout([Rule("qkv", parts, interleave=2), Rule("mlp", rows, interleave=3)], {"tp": (rank, 2)})
        mine = slice(3 * rank, 3 * rank + 3)
        tensors = {
            "qkv": torch.cat(grouped[2 * rank : 2 * rank + 2]),
            "mlp": torch.stack([gate[mine], up[mine]], dim=1).reshape(6, 5),
        }
        manifest = describe(tensors, layout)
        assert check(manifest, tensors, wholes) == 24 * 5 + 30
        assert len(manifest.pieces()) == 6 + 2


def test_pipeline_stages_count_their_layers_from_nought():
    layout = Layout([Rule("h.{i}.w", [Part("model.{i}.w")], shift={"i": ("pp", 2)})], {"pp": (3, 4)})
    manifest = describe({"h.0.w": numbers(2), "h.1.w": numbers(2)}, layout)
    assert [w.name for w in manifest.wholes] == ["model.6.w", "model.7.w"]
    assert [
        w.name for w in describe({"h.1.w": numbers(2)}, Layout([Rule("h.{i}.w", [Part("{i}")], shift={"i": 5})])).wholes
    ] == ["6"]


def test_the_dtype_that_travels_may_be_another():
    layout = Layout([Rule("{name}", [Part("{name}")], dtype="bfloat16")])
    manifest = describe({"w": numbers(4)}, layout)
    assert (manifest.wholes[0].dtype, manifest.locals[0].dtype, manifest.nbytes) == ("bfloat16", "float32", 8)
    compare([manifest], [describe({"w": numbers(4, dtype=torch.bfloat16)})])


@pytest.mark.parametrize(
    ("rule", "says"),
    [
        (Rule("w", [Part("w", (8, -1), [Split("tp", 0)])]), r"w: 6 in dimension 0 here, 4 by its rule"),
        (Rule("w", [Part("w", (12, 7), [Split("tp", 0)])]), r"w: 5 in dimension 1 here, 7 of 'w' by its rule"),
        (Rule("w", [Part("w", (30,))]), r"w: 2 dimensions here, 1 of 'w' by its rule"),
        (Rule("w", [Part("a.{e}")], stack=Stack("e", 5)), r"w: \[6, 5\] here, and 5 of 'e' by its rule"),
        (Rule("w", [Part("w", (6, -1))], interleave=4), r"w: 6 of 'w' do not make 4 groups"),
    ],
)
def test_shapes_that_a_rule_does_not_make(rule: Rule, says: str):
    with pytest.raises(tm.LayoutMismatch, match=says):
        describe({"w": numbers(6, 5)}, Layout([rule], {"tp": (0, 2)}))


@pytest.mark.parametrize(
    "rule",
    [
        Rule("w", [Part("w", split=[Split("ep", 0)])]),
        Rule("w", [Part("w", split=[Split("tp", 0, groups=3)])]),
        Rule("w", [Part("w", split=[Split("tp", 2)])]),
        Rule("w", [Part("a"), Part("b")]),
    ],
)
def test_rules_that_make_no_sense(rule: Rule):
    with pytest.raises(tm.InvalidArgument):
        describe({"w": numbers(6, 5)}, Layout([rule], {"tp": (0, 2)}))


def test_two_tensors_that_claim_the_same_elements():
    layout = Layout([Rule("{x}.w", [Part("w")])])
    with pytest.raises(tm.LayoutMismatch, match=r"b\.w: holds elements of w that a\.w holds, too"):
        describe({"a.w": numbers(4), "b.w": numbers(4)}, layout)
    with pytest.raises(tm.LayoutMismatch, match=r"b\.w: w is float32\[5\] here, float32\[4\] elsewhere"):
        describe({"a.w": numbers(4), "b.w": numbers(5)}, layout)


# --- DTensors ---


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.head = nn.Linear(6, 10), nn.Linear(10, 7), nn.Linear(7, 3, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.down(self.up(x)))


def on_four_ranks(rank: int, world: int) -> dict[str, Any]:
    mesh, grid = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2))
    wholes = {f"{a}x{b}": numbers(a, b) for a, b in ((8, 8), (7, 5), (1, 3), (0, 4), (13, 6))}
    wholes["flat"] = numbers(11)
    wholes["scalar"] = numbers()
    out: dict[str, Any] = {"manifests": {}}
    kinds = {
        "rows": (mesh, [Shard(0)]),
        "columns": (mesh, [Shard(-1)]),
        "copies": (mesh, [Replicate()]),
        "hybrid": (grid, [Replicate(), Shard(0)]),
        "both": (grid, [Shard(0), Shard(1)]),
        "twice": (grid, [Shard(0), Shard(0)]),
    }
    for kind, (where, placements) in kinds.items():
        fits = {
            name: whole
            for name, whole in wholes.items()
            if all(p.is_replicate() or -whole.dim() <= p.dim < whole.dim() for p in placements)
        }
        tensors = {name: distribute_tensor(whole, where, placements) for name, whole in fits.items()}
        manifest = describe(tensors)
        check(manifest, tensors, fits)
        out["manifests"][kind] = manifest.to_json()
    try:
        describe({"w": DTensor.from_local(numbers(2), mesh, [Partial()])})
    except tm.LayoutMismatch as error:
        out["partial"] = str(error)

    # Tensor parallel in one dimension, FSDP2 in the other: strided shards, uneven ones, a tied embedding.
    torch.manual_seed(0)
    plain = Layers()
    whole = {name: tensor.clone() for name, tensor in plain.state_dict().items()}
    named = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = parallelize_module(plain, named["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    fully_shard(model, mesh=named["dp"])
    tensors = model.state_dict()
    assert isinstance(tensors["up.weight"].placements[0], _StridedShard)
    manifest = describe(model)
    check(manifest, tensors, whole)
    out["manifests"]["fsdp"] = manifest.to_json()
    dist.barrier()
    return out


def test_dtensors_of_every_placement():
    ranks = run_world(4, on_four_ranks)
    for kind in ranks[0]["manifests"]:
        manifests = [Manifest.from_json(ranks[r]["manifests"][kind]) for r in range(4)]
        wanted = [Manifest.of(m.wholes, m.locals, [], {}) for m in manifests[:1]]
        whole = describe({w.name: numbers(*w.shape) for w in wanted[0].wholes})
        compare(manifests, [whole])
        compare([whole], manifests)
        copies = {"copies": 4, "hybrid": 2}.get(kind, 1)
        if kind != "fsdp":  # its head and biases have copies, too
            assert sum(m.nbytes for m in manifests) == copies * whole.nbytes
    assert "redistribute() the tensor first" in ranks[3]["partial"]
