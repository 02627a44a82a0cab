"""Prefix reuse: KV pages in the pool, under sealed keys named by their content."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from torch_mooncake.errors import Corrupt
from torch_mooncake.kv.hashing import page_hashes, root_hash
from torch_mooncake.kv.layout import PagedKV


@dataclass
class PoolKVStats:
    """Counts since the start; seconds are time spent inside the calls."""

    pages_loaded: int = 0
    bytes_loaded: int = 0
    load_s: float = 0.0
    pages_stored: int = 0
    bytes_stored: int = 0
    store_s: float = 0.0
    stores_refused: int = 0  # counted by callers that go on without storing


class PoolKV:
    """Pages of one model and one cache layout in the pool.

    `pool` is a `torch_mooncake.Pool` or the module itself (its default pool). A page of all layers is one object
    under `kv/<hash>`; the hash names its content, so a key is written once, never replaced, and the same page
    computed by two workers is stored once. Keys of another model, layout or `cache_salt` cannot meet these: all three
    are in the hash.

    Thread safety: calls may run in parallel as long as their pages differ; `stats` are counted without a lock.
    Errors: those of the pool's verbs; on an error during a load the pages' content is unspecified.
    """

    def __init__(self, pool: Any, kv: PagedKV, *, model: str) -> None:
        self._pool = pool
        self._kv = kv
        self._model = model
        self._fingerprint = kv.layout.fingerprint()
        self.stats = PoolKVStats()

    def page_keys(self, token_ids: Sequence[int], *, cache_salt: str = "") -> list[str]:
        """Keys of the full pages of `token_ids`, in order."""
        root = root_hash(model=self._model, fingerprint=self._fingerprint, cache_salt=cache_salt)
        return [f"kv/{digest.hex()}" for digest in page_hashes(root, token_ids, self._kv.layout.page_size)]

    def match_prefix(self, keys: Sequence[str]) -> int:
        """How many leading keys are in the pool now. A hint: a page may be evicted before it is read."""
        present = self._pool.exists(list(keys)) if keys else []
        return next((index for index, found in enumerate(present) if not found), len(present))

    def get_pages(self, keys: Sequence[str], pages: Sequence[int], *, timeout: float = 30) -> int:
        """Loads the longest leading run of `keys` that the pool has into the cache's `pages`; returns its length.

        Values are read where they lie (on one host they are never copied on the way) and scattered to all layers.
        """
        if not keys:
            return 0
        started = time.perf_counter()
        values = self._pool.get_many(list(keys), missing="mask", readonly=True, timeout=timeout)
        count = next((index for index, value in enumerate(values) if value is None), len(values))
        expected = self._kv.page_shape
        for key, value in zip(keys[:count], values[:count], strict=True):
            if not isinstance(value, torch.Tensor) or tuple(value.shape) != expected:
                raise Corrupt(f"{key} holds {getattr(value, 'shape', type(value))}, not a page of shape {expected}")
        self._kv.scatter(pages[:count], values[:count])
        self.stats.load_s += time.perf_counter() - started
        self.stats.pages_loaded += count
        self.stats.bytes_loaded += sum(value.nbytes for value in values[:count])
        return count

    def put_pages(self, keys: Sequence[str], pages: Sequence[int], *, timeout: float = 30) -> int:
        """Stores the cache's `pages` under `keys`, those that are not there yet; returns how many were new."""
        if not keys:
            return 0
        started = time.perf_counter()
        present = self._pool.exists(list(keys))
        absent = [index for index, found in enumerate(present) if not found]
        values = self._kv.gather([pages[index] for index in absent])
        results = self._pool.put_many(
            {keys[index]: value for index, value in zip(absent, values.unbind(0), strict=True)},
            sealed=True,
            timeout=timeout,
        )
        stored = sum(result.stored for result in results.values())
        self.stats.store_s += time.perf_counter() - started
        self.stats.pages_stored += stored
        self.stats.bytes_stored += sum(result.nbytes for result in results.values() if result.stored)
        return stored
