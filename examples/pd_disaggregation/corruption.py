"""Copies of pool pages under another salt, one of them spoiled: if the pool's bytes are what the attention reads, the
answer must change."""

from __future__ import annotations

import torch
from head_pool import HeadPool
from model import config_from_json
from paged_cache import PAGE_SIZE, make_cache
from shard_weights import CONFIG_KEY, namespace_of

import torch_mooncake as tm


def copy_pages(
    prompt: list[int], salt: str, *, serial: int, parts: int, zero: tuple[int, list[int]] | None = None
) -> int:
    """Copies the pages that the workers stored of this prompt (`serial` of their weights, heads cut into `parts`) to
    where `cache_salt` looks for them, `zero`: (page, parts of it) set to zero. Returns how many tokens they hold."""
    kv = make_cache(config_from_json(tm.get(CONFIG_KEY)), 1, PAGE_SIZE)
    pages = (len(prompt) - 1) // PAGE_SIZE  # the last token is always computed
    for number, part in enumerate(HeadPool(kv, namespace_of(serial), parts).parts):
        sources, targets = part.page_keys(prompt), part.page_keys(prompt, cache_salt=salt)
        for index in range(pages):
            page = tm.get(sources[index]).clone()
            spoiled = zero is not None and index == zero[0] and number in zero[1]
            tm.put(targets[index], torch.zeros_like(page) if spoiled else page, sealed=True)
    return pages * PAGE_SIZE
