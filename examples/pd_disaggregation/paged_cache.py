"""Sequences' keys and values in a paged cache, in the shape transformers' models want.

A model calls `cache.update(keys, values, layer)` in every attention layer and attends to what comes back. Here the new
keys and values are written into the sequences' pages, and what comes back is read from those pages: whatever lies in
them — computed here, loaded from the pool or pushed by another process — is what the attention sees.

A page is [kv heads, 2, tokens, head dim]: with the heads outermost, what one tensor-parallel rank holds of a page is
one run of bytes inside the page of a rank that holds more heads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from torch_mooncake import ops
from torch_mooncake.kv import PagedKV

AXES = "PHKND"
PAGE_SIZE = 16  # tokens, everywhere in the demo


def make_cache(config, num_pages: int, page_size: int, *, make_tensor=torch.zeros) -> PagedKV:
    """A float32 cache for this Llama configuration: [num_pages, kv heads, 2, page_size, head dim] a layer, all layers
    in one storage. `make_tensor(shape, dtype=)` says where (tm.empty for shared memory)."""
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    shape = (config.num_hidden_layers, num_pages, config.num_key_value_heads, 2, page_size, head_dim)
    return PagedKV(list(make_tensor(shape, dtype=torch.float32).unbind(0)), axes=AXES)


def pages_for(tokens: int, page_size: int) -> int:
    return -(-tokens // page_size)


class PagedCache(Cache):
    """A transformers Cache for one forward pass: `new` tokens of each of some sequences, all into pages of `kv`.

    Sequence i lies in pages `tables[i]`, of which `lengths[i]` tokens are filled. `before_layer(layer)` is called
    before a layer's pages are touched, `after_layer(layer)` when its new keys and values are in place, before the layer
    attends to them. Owns neither the pages nor the cache. IndexError when a sequence's tokens do not fit its pages.
    """

    def __init__(
        self,
        kv: PagedKV,
        tables: Sequence[Sequence[int]],
        lengths: Sequence[int],
        new: int,
        *,
        before_layer: Callable[[int], None] = lambda layer: None,
        after_layer: Callable[[int], None] = lambda layer: None,
    ) -> None:
        size = kv.layout.page_size
        for table, length in zip(tables, lengths, strict=True):
            if length + new > len(table) * size:
                raise IndexError(f"{length + new} tokens do not fit {len(table)} pages of {size}")
        self.kv = kv
        self.before_layer, self.after_layer = before_layer, after_layer
        self.length = max(lengths) + new  # of the longest
        self.filled = max(lengths)
        starts = torch.tensor(lengths)
        # Where the new tokens go, [sequences, new], and which pages are read, [sequences, pages of the longest]. Short
        # sequences are filled up with their first page: the mask hides it.
        self.positions = starts[:, None] + torch.arange(new)
        columns = pages_for(self.length, size)
        read = torch.tensor([[*table[:columns], *table[:1] * (columns - len(table))] for table in tables])
        self.pages = read.gather(1, self.positions // size)
        self.slots = self.positions % size
        self.read = read.flatten()
        # None where transformers' own causal mask is right: nothing is filled up.
        hidden = torch.arange(self.length)[None, None, :] <= self.positions[:, :, None]
        self.mask = hidden[:, None] if len(set(lengths)) > 1 else None  # [sequences, 1, new, length]
        super().__init__(layers=[_PagedLayer(self, layer) for layer in range(len(kv.layers))])


class _PagedLayer(CacheLayerMixin):
    is_sliding = False

    def __init__(self, cache: PagedCache, layer: int) -> None:
        super().__init__()
        self._cache = cache
        self._layer = layer
        self.is_initialized = True

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs):
        """[sequences, heads, new, dim] in, [sequences, heads, length, dim] out."""
        cache, pool = self._cache, self._cache.kv.layers[self._layer]
        cache.before_layer(self._layer)
        pool[cache.pages, :, 0, cache.slots] = key_states.transpose(1, 2)
        pool[cache.pages, :, 1, cache.slots] = value_states.transpose(1, 2)
        cache.after_layer(self._layer)
        gathered = ops.gather_pages(pool, cache.read)  # [sequences × pages, heads, 2, page_size, dim]
        by_sequence = gathered.unflatten(0, (len(cache.pages), -1)).permute(3, 0, 2, 1, 4, 5)
        keys, values = by_sequence.flatten(3, 4)[..., : cache.length, :]
        return keys, values

    def get_seq_length(self) -> int:
        return self._cache.filled

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._cache.length, 0

    def get_max_length(self) -> int:
        return self._cache.length

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        pass  # the pages are there from the start


def forward(model, cache: PagedCache, tokens: Sequence[Sequence[int]]) -> torch.Tensor:
    """Runs `tokens`, `new` of each sequence; returns the last hidden state of each, [sequences, hidden]."""
    out = model.model(
        input_ids=torch.tensor(tokens),
        attention_mask=cache.mask,
        position_ids=cache.positions,
        past_key_values=cache,
        use_cache=True,
    )
    return out.last_hidden_state[:, -1]
