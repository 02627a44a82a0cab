"""Prefix reuse between workers of different tensor-parallel degrees.

The pool keeps a page in `parts` objects, each with an equal share of the model's KV heads: as many as the finest cut
among the workers needs. A rank loads and stores the parts whose heads it holds, whatever its worker's degree is. Part
i of a page is one run of bytes in the rank's cache (see paged_cache.py), and has a name of its own.
"""

from __future__ import annotations

from paged_cache import AXES

import torch_mooncake as tm
from torch_mooncake.kv import PagedKV, PoolKV


def part_name(namespace: str, part: int, parts: int) -> str:
    return f"{namespace}/heads{part}of{parts}"


class HeadPool:
    """The parts of one rank. `namespace` names the model and its weights."""

    def __init__(self, kv: PagedKV, namespace: str, parts: int, *, rank: int = 0, size: int = 1) -> None:
        held = parts // size
        heads = kv.layers[0].shape[1] // held
        self._page_size = kv.layout.page_size
        self.parts = [
            PoolKV(
                tm,
                PagedKV([layer[:, index * heads : (index + 1) * heads] for layer in kv.layers], axes=AXES),
                model=part_name(namespace, rank * held + index, parts),
            )
            for index in range(held)
        ]

    def load(self, prompt: list[int], pages: list[int], cache_salt: str) -> int:
        """Fills `pages` with the prompt's longest prefix that is there with all its heads; returns its full pages. The
        prompt's last token is always left to compute: its logits are the answer's first token."""
        hits = (len(prompt) - 1) // self._page_size
        for part in self.parts:
            hits = part.get_pages(part.page_keys(prompt, cache_salt=cache_salt)[:hits], pages)
        return hits

    def store(self, tokens: list[int], pages: list[int], cache_salt: str, first: int = 0) -> None:
        """Stores the full pages of `tokens`, from page `first` on. What cannot be stored
        (the pool is full) costs later hits, not this answer: it is counted and said, and the request goes on."""
        for part in self.parts:
            keys = part.page_keys(tokens, cache_salt=cache_salt)
            try:
                part.put_pages(keys[first:], pages[first : len(keys)], parent=keys[first - 1] if first else None)
            except tm.Error as error:
                part.stats.stores_refused += 1
                print(f"{len(keys) - first} pages not stored: {error}", flush=True)

    @property
    def bytes_loaded(self) -> int:
        return sum(part.stats.bytes_loaded for part in self.parts)

    @property
    def load_s(self) -> float:
        return sum(part.stats.load_s for part in self.parts)
