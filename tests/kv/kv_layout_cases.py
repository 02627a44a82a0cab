"""Caches of every framework and physical order, small, each with an accessor that follows the framework's own words
for its tensors' dimensions, not the layout under test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from types import SimpleNamespace
from typing import Any

import torch

from torch_mooncake.kv import PagedKV

VLLM_ORDERS = ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")
SGLANG_ORDERS = ("layer_first", "page_first", "page_first_direct", "page_head")


@dataclass
class Sizes:
    layers: int = 2
    pages: int = 4
    tokens: int = 4
    heads: int = 2
    dim: int = 3
    dtype: torch.dtype = torch.float32


@dataclass
class Case:
    """`at(layer, k, page, token, head, d)` is the 0-dimensional view of one element; k is 0 for keys, 1 for values."""

    name: str
    kv: PagedKV
    at: Callable[[int, int, int, int, int, int], torch.Tensor]
    sizes: Sizes
    mla: bool = False
    keep: Any = None  # memory that the cache only points to

    def elements(self) -> Iterator[tuple[int, int, int, int, int]]:
        """(layer, k, token, head, d) of a page."""
        s = self.sizes
        return product(range(s.layers), range(1 if self.mla else 2), range(s.tokens), range(s.heads), range(s.dim))

    def fill(self) -> None:
        """Every element of every page gets a number of its own."""
        for number, (layer, k, token, head, d) in enumerate(self.elements()):
            for page in range(self.sizes.pages):
                self.at(layer, k, page, token, head, d).fill_(number * self.sizes.pages + page + 1)

    def bytes_of(self, pages: list[int], layers: list[int] | None = None) -> set[int]:
        """Addresses of the bytes of these pages, found by walking every index."""
        item = self.sizes.dtype.itemsize
        found: set[int] = set()
        for (layer, k, token, head, d), page in product(self.elements(), set(pages)):
            if layers is None or layer in layers:
                start = self.at(layer, k, page, token, head, d).data_ptr()
                found.update(range(start, start + item))
        return found


def plain(order: str, s: Sizes) -> Case:
    """`order` of L, P, K, N, H and D in one tensor."""
    size = {"L": s.layers, "P": s.pages, "K": 2, "N": s.tokens, "H": s.heads, "D": s.dim}
    pool = torch.zeros([size[letter] for letter in order], dtype=s.dtype)
    tensors = pool.unbind(order.index("L"))
    axes = order.replace("L", "")

    def at(layer, k, page, token, head, d):
        index = {"P": page, "K": k, "N": token, "H": head, "D": d}
        return tensors[layer][tuple(index[letter] for letter in axes)]

    return Case(f"plain-{order}", PagedKV(tensors, axes=axes), at, s, mla="K" not in order)


def vllm(order: str, s: Sizes, mla: bool = False) -> Case:
    content = s.dim if mla else 2 * s.dim
    size = {"L": s.layers, "B": s.pages, "H": s.heads, "N": s.tokens, "C": content}
    pool = torch.zeros([size[letter] for letter in order], dtype=s.dtype)
    logical = pool.permute([order.index(letter) for letter in "LBHNC"])
    caches = {f"model.layers.{layer}.self_attn.attn": logical[layer] for layer in range(s.layers)}

    def at(layer, k, page, token, head, d):
        return caches[f"model.layers.{layer}.self_attn.attn"][page, head, token, k * s.dim + d]

    return Case(f"vllm-{order}" + "-mla" * mla, PagedKV.from_vllm(caches, mla=mla), at, s, mla)


def sglang(order: str, s: Sizes, mla: bool = False) -> Case:
    L, P, N, H, D = s.layers, s.pages, s.tokens, s.heads, s.dim
    shape = {
        "layer_first": (L, P * N, H, D),
        "page_first": (P * N, L, H, D),
        "page_first_direct": (P, L, N, H, D),
        "page_head": (P, H, N, L, D),
    }[order]
    pool = torch.zeros(shape if mla else (2, *shape), dtype=s.dtype)

    def at(layer, k, page, token, head, d):
        half = pool if mla else pool[k]
        return {
            "layer_first": lambda: half[layer, page * N + token, head, d],
            "page_first": lambda: half[page * N + token, layer, head, d],
            "page_first_direct": lambda: half[page, layer, token, head, d],
            "page_head": lambda: half[page, head, token, layer, d],
        }[order]()

    kv = PagedKV.from_sglang(pool, layout=order, page_size=N, mla=mla)
    return Case(f"sglang-{order}" + "-mla" * mla, kv, at, s, mla)


def sglang_device(s: Sizes, mla: bool = False) -> Case:
    """One buffer a layer, keys and values apart, one page more than asked for: slot 0 is not used there."""
    shape = ((s.pages) * s.tokens, s.heads, s.dim)
    halves = [[torch.zeros(shape, dtype=s.dtype) for _ in range(s.layers)] for _ in range(1 if mla else 2)]

    def at(layer, k, page, token, head, d):
        return halves[k][layer][page * s.tokens + token, head, d]

    kv = PagedKV.from_sglang(halves[0] if mla else tuple(halves), page_size=s.tokens, mla=mla)
    return Case("sglang-device" + "-mla" * mla, kv, at, s, mla)


def trtllm_v1(s: Sizes, mla: bool = False, order: str = "HND") -> Case:
    factor = 1 if mla else 2
    pool = torch.zeros((s.pages, s.layers, factor, s.heads * s.tokens * s.dim), dtype=s.dtype)

    def at(layer, k, page, token, head, d):
        place = head * s.tokens + token if order == "HND" else token * s.heads + head
        return pool[page, layer, k, place * s.dim + d]

    kv = PagedKV.from_trtllm_v1(pool, kv_heads=s.heads, page_size=s.tokens, order=order)
    return Case(f"trtllm-v1-{order}" + "-mla" * mla, kv, at, s, mla)


def trtllm_v2(s: Sizes, mla: bool = False, split: bool = False, mapping: int | None = None) -> Case:
    """One pool whose slots hold all layers' buffers, as one region, or with a gap between two."""
    block = s.heads * s.tokens * s.dim * s.dtype.itemsize
    roles = ("key",) if mla else ("key", "value")
    gap = 64 if split else 0
    half = s.layers // 2 if split else 0
    first = half * len(roles) * block
    size = s.layers * len(roles) * block
    pool = torch.zeros(s.pages * (size + gap), dtype=torch.uint8)
    parts = [(range(half), 0), (range(half, s.layers), first + gap if split else 0)]
    regions = tuple(
        SimpleNamespace(
            base=pool.data_ptr() + offset,
            size=len(layers) * len(roles) * block,
            stride=size + gap,
            num_slots=s.pages,
            buffers=tuple(SimpleNamespace(layer_id=n, role=role, expansion=1) for n in layers for role in roles),
        )
        for layers, offset in parts
        if layers
    )
    group = SimpleNamespace(layer_group_id=0, layer_ids=tuple(range(s.layers)), window_size=None, regions=regions)
    layout = SimpleNamespace(tokens_per_block=s.tokens, groups=(group,), dtype=s.dtype, gpu_pool_mapping_bytes=mapping)

    def at(layer, k, page, token, head, d):
        start = page * (size + gap) + (layer * len(roles) + k) * block + (gap if layer >= half else 0)
        return pool[start : start + block].view(s.dtype)[(head * s.tokens + token) * s.dim + d]

    kv = PagedKV.from_trtllm_v2(layout, kv_heads=s.heads, device="cpu")
    name = "trtllm-v2" + "-split" * split + "-mla" * mla + (f"-mapped{mapping}" if mapping else "")
    return Case(name, kv, at, s, mla, keep=pool)


def lmdeploy(s: Sizes, mla: bool = False) -> Case:
    shape = (s.tokens, s.heads, s.dim)
    nbytes = s.tokens * s.heads * s.dim * s.dtype.itemsize
    aligned = -(-nbytes // 256) * 256
    roles = ("kv",) if mla else ("k", "v")
    pool = torch.zeros((s.layers, s.pages, aligned * len(roles)), dtype=torch.uint8)

    def at(layer, k, page, token, head, d):
        return pool[layer, page, k * aligned : k * aligned + nbytes].view(s.dtype).view(shape)[token, head, d]

    kv = PagedKV.from_lmdeploy(pool, entries=dict.fromkeys(roles, (shape, s.dtype)), mla=mla)
    return Case("lmdeploy" + "-mla" * mla, kv, at, s, mla)


def attention_cases(s: Sizes) -> list[Case]:
    return [
        *(plain(order, s) for order in ("LPKNHD", "PLKNHD", "KLPNHD", "LPNHKD", "LPKHDN", "DHNKPL")),
        *(vllm(order, s) for order in VLLM_ORDERS),
        *(sglang(order, s) for order in SGLANG_ORDERS),
        sglang_device(s),
        trtllm_v1(s),
        trtllm_v1(s, order="NHD"),
        trtllm_v2(s),
        trtllm_v2(s, split=True),
        trtllm_v2(s, mapping=40),
        lmdeploy(s),
    ]


def mla_cases(s: Sizes) -> list[Case]:
    return [
        _latent(s),
        *(vllm(order, s, mla=True) for order in VLLM_ORDERS),
        *(sglang(order, s, mla=True) for order in SGLANG_ORDERS[:3]),
        sglang_device(s, mla=True),
        trtllm_v1(s, mla=True),
        trtllm_v2(s, mla=True),
        lmdeploy(s, mla=True),
    ]


def _latent(s: Sizes) -> Case:
    pool = torch.zeros((s.layers, s.pages, s.tokens, s.dim), dtype=s.dtype)
    kv = PagedKV(pool.unbind(0), axes="PND")
    return Case("plain-LPND", kv, lambda layer, k, page, token, head, d: pool[layer, page, token, d], s, True)
