"""One sequence's keys and values in a paged cache, in the shape transformers' models want.

A model calls `cache.update(keys, values, layer)` in every attention layer and attends to what comes back. Here the new
keys and values are written into the sequence's pages, and what comes back is read from those pages: whatever lies in
them — computed here, loaded from the pool or pushed by another process — is what the attention sees.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from torch_mooncake import ops
from torch_mooncake.kv import PagedKV


def make_cache(config, num_pages: int, page_size: int, *, make_tensor=torch.zeros) -> PagedKV:
    """A float32 cache for this Llama configuration: [num_pages, 2, page_size, kv heads, head dim] a layer, all layers
    in one storage. `make_tensor(shape, dtype=)` says where (tm.empty for shared memory)."""
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    shape = (config.num_hidden_layers, num_pages, 2, page_size, config.num_key_value_heads, head_dim)
    return PagedKV(list(make_tensor(shape, dtype=torch.float32).unbind(0)), axes="PKNHD")


class PagedSequence(Cache):
    """A transformers Cache of one sequence (batch 1) over `pages` of `kv`.

    `length` tokens are in the pages already. `on_layer(layer)` is called when a layer's new keys and values are in
    place, before the layer attends to them. Owns neither the pages nor the cache.
    """

    def __init__(
        self,
        kv: PagedKV,
        pages: Sequence[int],
        *,
        length: int = 0,
        on_layer: Callable[[int], None] | None = None,
    ) -> None:
        self.kv = kv
        self.page_ids = torch.tensor(pages, dtype=torch.int64)
        self.on_layer = on_layer
        super().__init__(layers=[_PagedLayer(self, layer, length) for layer in range(kv.layout.num_layers)])

    @property
    def capacity(self) -> int:
        return len(self.page_ids) * self.kv.layout.page_size


class _PagedLayer(CacheLayerMixin):
    is_sliding = False

    def __init__(self, sequence: PagedSequence, layer: int, length: int) -> None:
        super().__init__()
        self._sequence = sequence
        self._layer = layer
        self._length = length
        self.is_initialized = True

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs):
        """[1, heads, new, dim] in, [1, heads, all, dim] out."""
        sequence, page_size = self._sequence, self._sequence.kv.layout.page_size
        pool = sequence.kv.layers[self._layer]
        end = self._length + key_states.shape[2]
        if end > sequence.capacity:
            raise IndexError(f"{end} tokens do not fit {len(sequence.page_ids)} pages of {page_size}")
        positions = torch.arange(self._length, end)
        pages, slots = sequence.page_ids[positions // page_size], positions % page_size
        pool[pages, 0, slots] = key_states[0].transpose(0, 1)
        pool[pages, 1, slots] = value_states[0].transpose(0, 1)
        self._length = end
        if sequence.on_layer is not None:
            sequence.on_layer(self._layer)
        used = sequence.page_ids[: -(-end // page_size)]
        gathered = ops.gather_pages(pool, used)  # [pages, 2, page_size, heads, dim]
        keys, values = (gathered[:, part].flatten(0, 1)[:end].transpose(0, 1).unsqueeze(0) for part in (0, 1))
        return keys, values

    def get_seq_length(self) -> int:
        return self._length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._length + query_length, 0

    def get_max_length(self) -> int:
        return self._sequence.capacity

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        pass  # the pages are there from the start
