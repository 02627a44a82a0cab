"""vLLM's caches as a paged cache of this library."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch_mooncake as tm
from torch_mooncake.kv import PagedKV

if TYPE_CHECKING:
    import torch

    from torch_mooncake.integrations.vllm.settings import Settings


def paged(caches: Mapping[str, torch.Tensor], settings: Settings) -> PagedKV:
    """What ``register_kv_caches`` is given: layers are numbered in its order. Layers that share a tensor count once.
    Unsupported when a block is not the scheduler's, or a layer has no blocks of tokens."""
    distinct: dict[str, torch.Tensor] = {}
    seen: set[tuple[int, tuple[int, ...]]] = set()
    for name, cache in caches.items():
        if not hasattr(cache, "dim") or cache.dim() != 4:
            raise tm.Unsupported(f"layer {name!r} holds no blocks of keys and values (a state?)")
        if (identity := (cache.data_ptr(), tuple(cache.stride()))) not in seen:
            seen.add(identity)
            distinct[name] = cache
    kv = PagedKV.from_vllm(distinct, mla=settings.mla, layer_ids={name: i for i, name in enumerate(distinct)})
    if kv.layout.page_size != settings.block_size:
        raise tm.Unsupported(
            f"blocks of {settings.block_size} tokens in the scheduler, {kv.layout.page_size} in memory"
        )
    return kv


def layer_numbers(caches: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """The number that ``paged`` gives each layer; those that share a tensor have one, of the first."""
    numbers: dict[str, int] = {}
    by_memory: dict[tuple[int, tuple[int, ...]], int] = {}
    for name, cache in caches.items():
        numbers[name] = by_memory.setdefault((cache.data_ptr(), tuple(cache.stride())), len(by_memory))
    return numbers
