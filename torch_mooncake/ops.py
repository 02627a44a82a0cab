"""Paged-KV operators, as functions and as ``torch.ops.torch_mooncake.*``.

A *pool* is a tensor ``[num_pages, *page]``: any stride between pages, each page contiguous. ``page_ids`` is a
one-dimensional int32 or int64 tensor. All operators work on CPU (vectorised, threaded) and CUDA tensors of every dtype,
have Meta kernels and can stand in ``torch.compile(fullgraph=True)`` and ``torch.export``. They have no gradient.

Errors are raised before anything is written: ``IndexError`` names the position, value and range of a page id that does
not exist; ``ValueError`` names the argument whose shape, dtype, device or layout does not fit, or the id that a scatter
was given twice. On CUDA, ids that live on the GPU are checked there, which waits for the stream; ids on the CPU are
not waited for.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

_LIBRARY = Path(__file__).with_name("_ops.so")
if not _LIBRARY.exists():
    raise ImportError(
        f"{_LIBRARY} is missing: torch_mooncake was built without torch. Install torch, then build again with "
        "`pip install --no-build-isolation .`"
    )
torch.ops.load_library(str(_LIBRARY))
_ops = torch.ops.torch_mooncake

__all__ = ["gather_pages", "gather_pages_layers", "scatter_pages", "scatter_pages_layers"]


def gather_pages(pool: Tensor, page_ids: Tensor, *, out: Tensor | None = None) -> Tensor:
    """The chosen pages in the order of their ids: ``out[i] = pool[page_ids[i]]``.

    pool: ``[num_pages, *page]``; page_ids: ``[n]``, ids may repeat. Returns ``[n, *page]`` of pool's dtype and device:
    a new contiguous tensor, or `out` (contiguous pages, any stride between them, no memory shared with `pool`).
    """
    if out is None:
        return _ops.gather_pages.default(pool, page_ids)
    _ops.gather_pages.out(pool, page_ids, out=out)
    return out


def scatter_pages(pool: Tensor, page_ids: Tensor, pages: Tensor) -> None:
    """Writes pages to their places: ``pool[page_ids[i]] = pages[i]``.

    pool: ``[num_pages, *page]``, changed in place; page_ids: ``[n]``, each id at most once (``ValueError`` otherwise:
    which page would win is not defined); pages: ``[n, *page]``, contiguous pages.
    """
    _ops.scatter_pages.default(pool, page_ids, pages)


def gather_pages_layers(pools: Sequence[Tensor], page_ids: Tensor, out: Tensor) -> None:
    """`gather_pages` of the same ids from every layer at once: ``out[l, i] = pools[l][page_ids[i]]``.

    pools: one ``[num_pages, *page]`` a layer, of one shape, dtype and device; out: ``[layers, n, *page]``. One launch
    on CUDA, one parallel region on CPU.
    """
    _ops.gather_pages_layers.default(list(pools), page_ids, out)


def scatter_pages_layers(pools: Sequence[Tensor], page_ids: Tensor, pages: Tensor) -> None:
    """`scatter_pages` into every layer at once: ``pools[l][page_ids[i]] = pages[l, i]``.

    pools: one ``[num_pages, *page]`` a layer, all different tensors of one shape, dtype and device, changed in place;
    pages: ``[layers, n, *page]``.
    """
    _ops.scatter_pages_layers.default(list(pools), page_ids, pages)


# Meta kernels: shapes and dtypes only; the real ones check the rest.


@torch.library.register_fake("torch_mooncake::gather_pages")
def _(pool: Tensor, page_ids: Tensor) -> Tensor:
    torch._check(pool.dim() >= 1, lambda: "pool has no dimension: expected [num_pages, *page]")
    torch._check(page_ids.dim() == 1, lambda: f"page_ids has to be one-dimensional, not of shape {page_ids.shape}")
    return pool.new_empty([page_ids.shape[0], *pool.shape[1:]])


@torch.library.register_fake("torch_mooncake::gather_pages.out")
def _(pool: Tensor, page_ids: Tensor, *, out: Tensor) -> None:
    _check_list("out", out, [page_ids.shape[0], *pool.shape[1:]], pool)


@torch.library.register_fake("torch_mooncake::scatter_pages")
def _(pool: Tensor, page_ids: Tensor, pages: Tensor) -> None:
    _check_list("pages", pages, [page_ids.shape[0], *pool.shape[1:]], pool)


@torch.library.register_fake("torch_mooncake::gather_pages_layers")
def _(pools: Sequence[Tensor], page_ids: Tensor, out: Tensor) -> None:
    if pools:
        _check_list("out", out, [len(pools), page_ids.shape[0], *pools[0].shape[1:]], pools[0])


@torch.library.register_fake("torch_mooncake::scatter_pages_layers")
def _(pools: Sequence[Tensor], page_ids: Tensor, pages: Tensor) -> None:
    if pools:
        _check_list("pages", pages, [len(pools), page_ids.shape[0], *pools[0].shape[1:]], pools[0])


def _check_list(name: str, given: Tensor, shape: Sequence[int], pool: Tensor) -> None:
    torch._check(given.dim() == len(shape), lambda: f"{name} has shape {tuple(given.shape)}, expected {tuple(shape)}")
    for got, expected in zip(given.shape, shape, strict=True):
        torch._check(got == expected, lambda: f"{name} has shape {tuple(given.shape)}, expected {tuple(shape)}")
    torch._check(given.dtype == pool.dtype, lambda: f"{name} is {given.dtype}, pool is {pool.dtype}")
