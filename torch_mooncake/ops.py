"""Operators on paged KV and on weights, as functions and as ``torch.ops.torch_mooncake.*``.

A *pool* is a tensor ``[num_pages, *page]`` with any strides, between pages and inside them: a transposed view of an
NHD pool is read and written as HND. Page ids are a one-dimensional int32 or int64 tensor. The operators that move pages
take tensors of every dtype. All have Meta kernels and can stand in ``torch.compile(fullgraph=True)`` and
``torch.export``. They have no gradient.

Errors are raised before anything is written: ``IndexError`` names the position, value and range of a page id that does
not exist; ``ValueError`` names the argument whose shape, dtype, device or layout does not fit, or the id that would be
written twice. Ids on a GPU are not looked at beforehand: one out of range is skipped (its page is neither read nor
written), nothing waits for the GPU, and the call can be captured in a CUDA graph; with TM_CHECK_IDS=1 in the
environment they are checked as the others are, for which the host waits. Ids on the CPU are not waited for either.
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

from torch_mooncake import ops_meta as _ops_meta  # noqa: E402, F401  (registers the Meta kernels)

__all__ = [
    "copy_pages",
    "delta_apply",
    "delta_apply_ranges",
    "delta_encode",
    "delta_encode_ranges",
    "dequantize_pages",
    "gather_pages",
    "gather_pages_layers",
    "hash_pages",
    "hash_pages_batch",
    "quantize_blocks",
    "quantize_pages",
    "reshard_heads",
    "scatter_pages",
    "scatter_pages_layers",
]


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
    on CUDA, one parallel region on CPU (for each set of strides among the pools).
    """
    _ops.gather_pages_layers.default(list(pools), page_ids, out)


def scatter_pages_layers(pools: Sequence[Tensor], page_ids: Tensor, pages: Tensor) -> None:
    """`scatter_pages` into every layer at once: ``pools[l][page_ids[i]] = pages[l, i]``.

    pools: one ``[num_pages, *page]`` a layer, all different tensors of one shape, dtype and device, changed in place;
    pages: ``[layers, n, *page]``.
    """
    _ops.scatter_pages_layers.default(list(pools), page_ids, pages)


def copy_pages(src: Sequence[Tensor], src_ids: Tensor, dst: Sequence[Tensor], dst_ids: Tensor) -> None:
    """Pages straight from one layout to another: ``dst[l][dst_ids[i]] = src[l][src_ids[i]]``.

    src: one ``[src_pages, *page]`` a layer; dst: one ``[dst_pages, *page]`` a layer, changed in place; any strides on
    both sides, one dtype and device. src_ids, dst_ids: ``[n]``; dst_ids has each id at most once. ``src[l]`` and
    ``dst[l]`` may be one tensor as long as no id is in both lists.
    """
    _ops.copy_pages.default(list(src), src_ids, list(dst), dst_ids)


def reshard_heads(
    sources: Sequence[Tensor],
    outs: Sequence[Tensor],
    *,
    kv_heads: int,
    source_head_axis: int,
    out_head_axis: int | None = None,
    source_ranks: Sequence[int] | None = None,
    source_tp: int | None = None,
    out_ranks: Sequence[int] | None = None,
    out_tp: int | None = None,
) -> None:
    """KV heads of tensor-parallel degree `source_tp` as those of degree `out_tp`.

    `kv_heads` are the model's. One of a degree and `kv_heads` divides the other: rank r of ``tp <= kv_heads`` holds
    ``kv_heads / tp`` heads from ``r * kv_heads / tp`` on; of ``tp > kv_heads`` the one head ``r // (tp / kv_heads)``.

    sources: one tensor for each of `source_ranks` (default: ranks 0, 1, ...), its heads at dimension
    `source_head_axis`; `source_tp` defaults to their number. outs, changed in place: one for each of `out_ranks`, of
    the shape of ``source.movedim(source_head_axis, out_head_axis)`` with its own number of heads; `out_head_axis`
    defaults to `source_head_axis`. NHD to HND is heads from -2 to -3. Any strides; one dtype and device.

    Every head of an out is taken from the first source that holds it. ``ValueError`` for one that none of them holds.
    """
    if not outs:
        return
    _ops.reshard_heads.default(
        list(sources),
        list(outs),
        kv_heads,
        source_head_axis,
        source_head_axis if out_head_axis is None else out_head_axis,
        list(range(len(sources)) if source_ranks is None else source_ranks),
        len(sources) if source_tp is None else source_tp,
        list(range(len(outs)) if out_ranks is None else out_ranks),
        len(outs) if out_tp is None else out_tp,
    )


def quantize_pages(
    pages: Tensor,
    scale_axes: Sequence[int],
    dtype: torch.dtype = torch.float8_e4m3fn,
    *,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Pages in 8 bits, with a scale for each index of `scale_axes`.

    pages: float32, float16 or bfloat16, any shape and strides; scale_axes: ascending dimensions, the first is 0: (0, 2)
    for a page's heads in ``[n, N, H, D]``. Returns q, of `dtype` (float8_e4m3fn or int8) and pages' shape, and scales,
    float32 ``[pages.size(a) for a in scale_axes]``; `out`: such a pair to write to (q with any strides).

    A scale is ``max(amax / 448, 2**-100)`` (int8: 127 for 448), amax the largest finite magnitude of its elements; q is
    ``x * (1 / scale)`` in float32, rounded to nearest even and saturated. Infinities become the largest, NaN stays NaN
    (0 in int8), zeros stay zeros. ``|dequantised - x|`` is at most ``max(|x| / 16, scale / 1024)`` in fp8 and
    ``scale / 2`` in int8, but for rounding errors of float32 and of the dtype dequantised to. The bits are the same on
    every device.
    """
    if out is None:
        return _ops.quantize_pages.default(pages, list(scale_axes), dtype)
    q, scales = out
    _ops.quantize_pages.out(pages, list(scale_axes), q=q, scales=scales)
    return out


def dequantize_pages(
    q: Tensor,
    scales: Tensor,
    scale_axes: Sequence[int],
    dtype: torch.dtype = torch.float32,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """What `quantize_pages` made of: ``q * scale``, in float32 and then rounded to `dtype`.

    q: float8_e4m3fn or int8, any strides; scales: float32 ``[q.size(a) for a in scale_axes]``, contiguous. Returns a
    tensor of q's shape and of `dtype` (float32, float16 or bfloat16): new, or `out` (any strides; its dtype counts).
    """
    if out is None:
        return _ops.dequantize_pages.default(q, scales, list(scale_axes), dtype)
    _ops.dequantize_pages.out(q, scales, list(scale_axes), out=out)
    return out


def quantize_blocks(
    weight: Tensor,
    block: tuple[int, int] = (128, 128),
    dtype: torch.dtype = torch.float8_e4m3fn,
    *,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """A matrix in 8 bits with a scale for each block, as FP8 checkpoints have it (``weight``, ``weight_scale_inv``).

    weight: float32, float16 or bfloat16 ``[*batch, rows, columns]``, any strides; block: rows and columns of one, -1
    for all of them: (128, 128), or (1, -1) for a scale a row (per channel). Blocks at the edges have the elements that
    there are. Returns q, of `dtype` (float8_e4m3fn or int8) and weight's shape, and float32 scales ``[*batch,
    ceil(rows / block[0]), ceil(columns / block[1])]``; `out`: such a pair to write to (q with any strides).

    A block's elements and its scale are what `quantize_pages` makes of them, to the bit: ``q * scale`` is the element
    again. ``ValueError``: fewer than two dimensions, another dtype, a block below 1.
    """
    rows, columns = block
    if out is None:
        return _ops.quantize_blocks.default(weight, rows, columns, dtype)
    q, scales = out
    _ops.quantize_blocks.out(weight, rows, columns, q=q, scales=scales)
    return out


def delta_encode(base: Tensor, fresh: Tensor, *, limit: int | None = None) -> Tensor | None:
    """What has changed from `base` to `fresh`, as bytes for `delta_apply`. Bits are compared: exact for every dtype.

    base, fresh: one shape, dtype (elements of 1, 2, 4 or 8 bytes) and device, contiguous. Returns uint8 ``[nbytes]`` on
    the CPU: about an element and a byte for each change, less where neighbours change, and 0.05 % of 2-byte elements
    for their places; None if that is more than `limit` bytes. The bytes are the same on every device.
    """
    blob = _ops.delta_encode.default(base, fresh, -1 if limit is None else limit)
    return blob if limit is None or blob.numel() else None


def delta_apply(blob: Tensor, target: Tensor) -> None:
    """Makes of `delta_encode`'s base its fresh one, in place.

    blob: uint8 ``[nbytes]`` on the CPU, from anywhere: bytes that are no delta, or one that was damaged (it has a
    checksum), are a ``ValueError``, as is one of another number or size of elements; nothing is written then. target:
    contiguous, any shape, CPU or CUDA (the host waits for the GPU).
    """
    _ops.delta_apply.default(blob, target)


def delta_encode_ranges(
    base: Tensor, fresh: Tensor, offsets: Tensor, nbytes: Tensor, element_nbytes: int, *, limit: int | None = None
) -> Tensor | None:
    """`delta_encode` of elements that lie in several places: ``cat(base[o : o + n] for o, n in zip(offsets, nbytes))``.

    base, fresh: uint8 ``[total]`` on the CPU; offsets, nbytes: int64 ``[ranges]`` on the CPU, in bytes, whole elements
    of `element_nbytes` (1, 2, 4 or 8). ``IndexError``: a range leaves the arrays.
    """
    blob = _ops.delta_encode_ranges.default(
        base, fresh, offsets, nbytes, element_nbytes, -1 if limit is None else limit
    )
    return blob if limit is None or blob.numel() else None


def delta_apply_ranges(
    blob: Tensor, target: Tensor, offsets: Tensor, nbytes: Tensor, *, base: Tensor | None = None
) -> None:
    """`delta_apply` to elements that lie in several places, not necessarily those of the encoder: all that counts is
    their order. Arguments as of `delta_encode_ranges`; ``ValueError`` if there are not as many elements as in the blob.

    base: another array like `target`, which then gets from it what the delta does not change (of the ranges).
    """
    _ops.delta_apply_ranges.default(blob, target, offsets, nbytes, base)


def hash_pages(token_ids: Tensor, page_size: int, root: Tensor) -> Tensor:
    """The hashes of a prompt's full pages: ``torch_mooncake.kv.page_hashes(..., "xxh3")`` as a tensor.

    token_ids: int64 or int32 ``[n]``; page_size: tokens a page; root: uint8 ``[16]``. Returns uint8
    ``[n // page_size, 16]``: XXH3-128 of the hash before (at first the root) and the page's tokens as little-endian
    int64.
    """
    return _ops.hash_pages.default(token_ids, page_size, root)


def hash_pages_batch(token_ids: Tensor, offsets: Tensor, page_size: int, roots: Tensor) -> Tensor:
    """`hash_pages` of many prompts, on several threads.

    Prompt p is ``token_ids[offsets[p] : offsets[p + 1]]``. token_ids: int64 or int32 ``[n]``; offsets: int64 on the
    CPU, ``[prompts + 1]``, ascending from 0 to n; roots: uint8 ``[16]`` for all or ``[prompts, 16]``. Returns uint8
    ``[n // page_size, 16]``: the hashes of prompt 0, of prompt 1 and so on, ``(length // page_size)`` each; rows behind
    the last one are zero.
    """
    return _ops.hash_pages_batch.default(token_ids, offsets, page_size, roots)
