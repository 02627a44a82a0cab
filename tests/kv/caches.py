"""Small paged caches for the session tests. Both processes of a test make the same ones."""

import functools

import torch

import torch_mooncake as tm
from torch_mooncake.kv import PagedKV

LAYERS, SIZE, HEADS, DIM = 4, 4, 2, 8


def prefill_cache(pages: int = 12) -> PagedKV:
    """Layers one after the other, filled with numbers that name their place."""
    shape = (LAYERS, pages, 2, SIZE, HEADS, DIM)
    tensor = tm.empty(shape, dtype=torch.float32, shared=True)
    tensor.copy_(torch.arange(tensor.numel(), dtype=torch.float32).view(shape))
    return PagedKV(list(tensor.unbind(0)))


def decode_cache(pages: int = 20, *, shared: bool = True, heads: int = HEADS, size: int = SIZE) -> PagedKV:
    """Pages one after the other, all layers of a page together: another placement, the same content."""
    make = functools.partial(tm.empty, shared=True) if shared else torch.empty
    return PagedKV(list(make((pages, LAYERS, 2, size, heads, DIM), dtype=torch.float32).fill_(-1).unbind(1)))
