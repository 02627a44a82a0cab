"""Where the pages of SGLang's host pools lie, for those layouts of which SGLang does not say it itself."""

from __future__ import annotations

from typing import Any

import torch_mooncake as tm

UNIFIED = "page_unified"


def spans(host_pool: Any, host_indices: Any, parts: int) -> tuple[list[int], list[int]]:
    """(addresses, bytes) of the pieces of each page, page by page; the pieces of one of ``parts`` equal parts of
    the heads lie together. Unsupported: the layout cannot be cut so."""
    if getattr(host_pool, "layout", "") == UNIFIED:
        return _unified(host_pool, host_indices, parts)
    found = (
        host_pool.get_split_heads_page_buffer_meta(host_indices, parts)
        if parts > 1
        else host_pool.get_page_buffer_meta(host_indices)
    )
    return list(map(int, found[0])), list(map(int, found[1]))


def _unified(host_pool: Any, host_indices: Any, parts: int) -> tuple[list[int], list[int]]:
    """A page is one block, whose outer axis are groups of heads: a part of it is one piece."""
    shape = host_pool.page_unified_layout
    if shape.head_group_num % parts:
        raise tm.Unsupported(f"{shape.head_group_num} groups of heads in {parts} parts")
    size = shape.bytes_per_page // parts
    pages = [int(slot) // host_pool.page_size for slot in host_indices[:: host_pool.page_size]]
    base = host_pool.kv_buffer.data_ptr()
    addresses = [base + page * shape.bytes_per_page + part * size for page in pages for part in range(parts)]
    return addresses, [size] * len(addresses)


def form(host_pool: Any) -> str:
    """What the bytes of a page look like, of any number of heads: pages of pools that say the same may be shared."""
    shape = getattr(host_pool, "page_unified_layout", None)
    grouped = shape.heads_per_group if shape is not None else None
    kind = type(host_pool).__name__, getattr(host_pool, "layout", ""), str(getattr(host_pool, "dtype", ""))
    dims = [getattr(host_pool, name, None) for name in ("page_size", "layer_num", "head_dim")]
    return repr((kind, dims, grouped) if grouped else (kind, dims))
