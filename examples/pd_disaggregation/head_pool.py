"""Prefix reuse between workers of different tensor-parallel degrees.

The pool keeps a page in `parts` objects, each with an equal share of the model's KV heads: as many as the finest cut
among the workers needs. A rank loads and stores the parts whose heads it holds, whatever its worker's degree is. Part
i of a page is one run of bytes in the rank's cache (see paged_cache.py), and has a name of its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from paged_cache import AXES

import torch_mooncake as tm
from torch_mooncake.kv import PagedKV, PoolKV, PrefixLoad


def part_name(namespace: str, part: int, parts: int) -> str:
    return f"{namespace}/heads{part}of{parts}"


class HeadPool:
    """The parts of one rank. `namespace` names the model and its weights."""

    def __init__(self, kv: PagedKV, namespace: str, parts: int, *, rank: int = 0, size: int = 1) -> None:
        held = parts // size
        heads = kv.layers[0].shape[1] // held
        self._page_size = kv.layout.page_size
        self.loads_failed = 0
        self.parts = [
            PoolKV(
                tm,
                PagedKV([layer[:, index * heads : (index + 1) * heads] for layer in kv.layers], axes=AXES),
                model=part_name(namespace, rank * held + index, parts),
            )
            for index in range(held)
        ]

    def load(self, prompt: list[int], pages: list[int], cache_salt: str) -> HeadLoad:
        """Begins to fill `pages` with the prompt's longest prefix that is there. The prompt's last token is always left
        to compute: its logits are the answer's first token."""
        most = (len(prompt) - 1) // self._page_size
        loads: list[PrefixLoad] = []
        try:
            for part in self.parts:
                loads.append(part.load(part.page_keys(prompt, cache_salt=cache_salt)[:most], pages[:most]))
        except tm.Error as error:  # costs the prefix, not the answer
            for load in loads:
                load.cancel()
            self.loads_failed += 1
            print(f"nothing loaded from the pool: {error}", flush=True)
            return HeadLoad([], 0)
        return HeadLoad(loads, sum(part.page_nbytes for part in self.parts))

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


class HeadLoad:
    """Pages that come from the pool, layer by layer. `hits`: how many come with all their heads."""

    def __init__(self, loads: Sequence[PrefixLoad], page_nbytes: int) -> None:
        self._loads = loads
        self._page_nbytes = page_nbytes
        self.hits = min((load.hits for load in loads), default=0)
        self.waited_s = 0.0
        self.error: tm.Error | None = None

    @property
    def nbytes(self) -> int:
        return self.hits * self._page_nbytes

    def settle(self, hits: int) -> None:
        """All ranks go on with this many. What comes beyond them must have come before it is computed over."""
        self.hits = hits
        if any(load.hits > hits for load in self._loads):
            self._wait(lambda load: load.wait())

    def wait_layer(self, layer: int) -> None:
        """Returns when that layer of all pages is in place, or has failed: then `error` says so, and what has been
        computed with it is worth nothing."""
        self._wait(lambda load: load.wait_layer(layer))

    def _wait(self, wait: Callable[[PrefixLoad], object]) -> None:
        began = time.perf_counter()
        try:
            for load in self._loads:
                wait(load)
        except tm.Error as error:
            self.error = self.error or error
        self.waited_s += time.perf_counter() - began

    def end(self) -> None:
        """Returns when no byte lands any more."""
        for load in self._loads:
            load.cancel()
