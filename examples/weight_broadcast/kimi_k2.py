"""Kimi-K2's weights as manifests: the shapes of its public configuration, one byte a parameter, without any memory.

config.json of moonshotai/Kimi-K2: 61 layers of which the first is dense, hidden size 7168, 64 heads of multi-head
latent attention (q_lora_rank 1536, kv_lora_rank 512, qk_nope_head_dim 128, qk_rope_head_dim 64, v_head_dim 128), 384
routed experts and one shared of intermediate size 2048, dense intermediate size 18432, vocabulary 163840.

A trainer with tensor, pipeline, expert and data (or context) parallel ranks keeps each expert on one rank of its stage;
a serving engine with tensor and expert parallel of one degree stacks its experts, gate and up fused.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from torch_mooncake.weights.layout import Layout, Part, Rule, Split, Stack
from torch_mooncake.weights.plan import Place
from torch_mooncake.weights.shards import Local, Manifest, Piece, Whole


@dataclass(frozen=True)
class Shapes:
    layers: int = 61
    dense_layers: int = 1
    hidden: int = 7168
    heads: int = 64
    q_lora: int = 1536
    kv_lora: int = 512
    nope: int = 128
    rope: int = 64
    value: int = 128
    experts: int = 384
    inner: int = 2048
    dense_inner: int = 18432
    vocabulary: int = 163840
    dtype: str = "float8_e4m3fn"  # of the matrices
    small_dtype: str = "bfloat16"  # of norms and the router

    def scaled(self, by: int) -> Shapes:
        """Every width divided by ``by``: fewer bytes, as many tensors."""
        widths = ("hidden", "q_lora", "kv_lora", "nope", "rope", "value", "inner", "dense_inner", "vocabulary")
        return replace(self, **{name: max(1, getattr(self, name) // by) for name in widths})

    def whole(self, name: str, *shape: int) -> Whole:
        return Whole(name, shape, self.dtype if len(shape) > 1 and "router" not in name else self.small_dtype)

    def attention(self, layer: int | str) -> dict[str, tuple[tuple[int, ...], int | None]]:
        """Shape, and the dimension that tensor parallel cuts (None: on all ranks)."""
        at, qk = f"model.layers.{layer}", self.nope + self.rope
        return {
            f"{at}.self_attn.q_a_proj": ((self.q_lora, self.hidden), None),
            f"{at}.self_attn.q_a_norm": ((self.q_lora,), None),
            f"{at}.self_attn.q_b_proj": ((self.heads * qk, self.q_lora), 0),
            f"{at}.self_attn.kv_a_proj": ((self.kv_lora + self.rope, self.hidden), None),
            f"{at}.self_attn.kv_a_norm": ((self.kv_lora,), None),
            f"{at}.self_attn.kv_b_proj": ((self.heads * (self.nope + self.value), self.kv_lora), 0),
            f"{at}.self_attn.o_proj": ((self.hidden, self.heads * self.value), 1),
            f"{at}.input_norm": ((self.hidden,), None),
            f"{at}.post_norm": ((self.hidden,), None),
        }

    def mlp(self, layer: int) -> dict[str, tuple[tuple[int, ...], int | None]]:
        at = f"model.layers.{layer}.mlp"
        inner, name = (self.dense_inner, at) if layer < self.dense_layers else (self.inner, f"{at}.shared")
        found: dict[str, tuple[tuple[int, ...], int | None]] = {
            f"{name}.gate_proj": ((inner, self.hidden), 0),
            f"{name}.up_proj": ((inner, self.hidden), 0),
            f"{name}.down_proj": ((self.hidden, inner), 1),
        }
        if layer >= self.dense_layers:
            found[f"{at}.router"] = ((self.experts, self.hidden), None)
            found[f"{at}.router_bias"] = ((self.experts,), None)
        return found

    def expert(self, layer: int, expert: int) -> dict[str, tuple[int, ...]]:
        at = f"model.layers.{layer}.mlp.experts.{expert}"
        return {
            f"{at}.gate_proj": (self.inner, self.hidden),
            f"{at}.up_proj": (self.inner, self.hidden),
            f"{at}.down_proj": (self.hidden, self.inner),
        }

    @property
    def parameters(self) -> int:
        total = 2 * self.vocabulary * self.hidden + self.hidden
        for layer in range(self.layers):
            total += sum(math.prod(shape) for shape, _ in {**self.attention(layer), **self.mlp(layer)}.values())
            if layer >= self.dense_layers:
                total += self.experts * 3 * self.inner * self.hidden
        return total


class _Rank:
    """Collects what one rank has."""

    def __init__(self, shapes: Shapes, tp: tuple[int, int]) -> None:
        self.shapes, self.tp = shapes, tp
        self.wholes: list[Whole] = []
        self.locals: list[Local] = []
        self.pieces: list[Piece] = []

    def sharded(self, name: str, shape: tuple[int, ...], dim: int | None) -> None:
        start, size = [0] * len(shape), list(shape)
        if dim is not None:
            rank, ranks = self.tp
            size[dim] = -(-shape[dim] // ranks)
            start[dim] = min(shape[dim], rank * size[dim])
            size[dim] = min(size[dim], shape[dim] - start[dim])
        whole = self.shapes.whole(name, *shape)
        self.locals.append(Local(name, tuple(size), whole.dtype))
        self._piece(whole, tuple(start), tuple(size), 0)

    def experts(self, layer: int, first: int, count: int, stacked: bool) -> None:
        inner, hidden, dtype = self.shapes.inner, self.shapes.hidden, self.shapes.dtype
        if stacked:
            self.locals.append(Local(f"layers.{layer}.w13", (count, 2 * inner, hidden), dtype))
        base = len(self.locals) - 1
        if stacked:
            self.locals.append(Local(f"layers.{layer}.w2", (count, hidden, inner), dtype))
        for i in range(count):
            for which, (name, shape) in enumerate(self.shapes.expert(layer, first + i).items()):
                whole = Whole(name, shape, dtype)
                if not stacked:
                    self.locals.append(Local(name, shape, dtype))
                    self._piece(whole, (0, 0), shape, 0)
                elif which < 2:
                    self._piece(whole, (0, 0), shape, (2 * i + which) * inner * hidden, base)
                else:
                    self._piece(whole, (0, 0), shape, i * inner * hidden, base + 1)

    def _piece(
        self, whole: Whole, start: tuple[int, ...], size: tuple[int, ...], offset: int, local: int | None = None
    ) -> None:
        stride = (size[1], 1) if len(size) > 1 else (1,)
        local = len(self.locals) - 1 if local is None else local
        self.wholes.append(whole)
        if 0 not in size:
            self.pieces.append(Piece(len(self.wholes) - 1, local, start, size, offset, stride))

    def manifest(self) -> Manifest:
        return Manifest.of(self.wholes, self.locals, self.pieces)


def trainers(shapes: Shapes, *, tp: int = 8, pp: int = 8, dp: int = 4) -> list[Manifest]:
    """The manifests of pp * dp * tp ranks; the experts of a stage are divided over its dp * tp ranks."""
    each = -(-shapes.layers // pp)
    found = []
    for stage in range(pp):
        for ep in range(dp * tp):
            rank = _Rank(shapes, (ep % tp, tp))
            for layer in range(stage * each, min(shapes.layers, (stage + 1) * each)):
                _layer(rank, layer, ep, dp * tp, stacked=False)
            if stage == 0:
                rank.sharded("model.embed", (shapes.vocabulary, shapes.hidden), 0)
            if stage == pp - 1:
                rank.sharded("lm_head", (shapes.vocabulary, shapes.hidden), 0)
                rank.sharded("model.norm", (shapes.hidden,), None)
            found.append(rank.manifest())
    return found


def servers(shapes: Shapes, *, instances: int, tp: int) -> list[Manifest]:
    """The manifests of ``instances`` engines of ``tp`` ranks; the experts are divided over each engine's ranks."""
    one = []
    for at in range(tp):
        rank = _Rank(shapes, (at, tp))
        for layer in range(shapes.layers):
            _layer(rank, layer, at, tp, stacked=True)
        rank.sharded("model.embed", (shapes.vocabulary, shapes.hidden), 0)
        rank.sharded("lm_head", (shapes.vocabulary, shapes.hidden), 0)
        rank.sharded("model.norm", (shapes.hidden,), None)
        one.append(rank.manifest())
    return one * instances


def _layer(rank: _Rank, layer: int, ep: int, ranks: int, *, stacked: bool) -> None:
    shapes = rank.shapes
    for name, (shape, dim) in {**shapes.attention(layer), **shapes.mlp(layer)}.items():
        rank.sharded(name, shape, dim)
    if layer >= shapes.dense_layers:
        count = shapes.experts // ranks
        rank.experts(layer, ep * count, count, stacked)


def trainer_layout(shapes: Shapes, rank: int, *, tp: int = 8) -> Layout:
    """What ``trainers`` say of the rank's tensors, as rules for ``weights.Publisher``. Experts are whole: no rule."""
    return Layout(_split_rules(shapes), {"tp": (rank % tp, tp)})


def server_layout(shapes: Shapes, rank: int, *, tp: int) -> Layout:
    """What ``servers`` say of the rank's tensors, as rules for ``weights.Subscriber``."""
    inner, hidden, expert = shapes.inner, shapes.hidden, "model.layers.{i}.mlp.experts.{e}"
    w13 = [Part(f"{expert}.{name}", (inner, hidden)) for name in ("gate_proj", "up_proj")]
    stack = Stack("e", shapes.experts, "tp")
    stacked = [
        Rule("layers.{i}.w13", w13, stack=stack),
        Rule("layers.{i}.w2", [Part(f"{expert}.down_proj", (hidden, inner))], stack=stack),
    ]
    return Layout([*stacked, *_split_rules(shapes)], {"tp": (rank % tp, tp)})


def _split_rules(shapes: Shapes) -> list[Rule]:
    tensors = {**shapes.attention("{i}"), "model.embed": ((shapes.vocabulary, shapes.hidden), 0)}
    tensors["lm_head"] = tensors["model.embed"]
    for layer in range(shapes.dense_layers):
        tensors.update(shapes.mlp(layer))
    for name, tensor in shapes.mlp(shapes.dense_layers).items():
        tensors[name.replace(f".{shapes.dense_layers}.", ".{i}.", 1)] = tensor
    return [
        Rule(name, [Part(name, shape, [Split("tp", dim)])]) for name, (shape, dim) in tensors.items() if dim is not None
    ]


def places(count: int, of: str, *, each: int = 8) -> Iterator[Place]:
    """Hosts of ``each`` ranks, one NIC a rank."""
    for rank in range(count):
        yield Place(f"{of}{rank // each}", rank % each)
