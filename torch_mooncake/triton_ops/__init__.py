"""The operators of ``torch_mooncake.ops`` written in Triton: same names, arguments, results (bit for bit) and errors.
Those of ranges, which are for memory of the host, are not among them.

    from torch_mooncake import triton_ops as ops

Nothing chooses them by itself: they are for GPUs and builds that the CUDA plug-in is not for, and to compare with. They
take CUDA tensors; with ``TRITON_INTERPRET=1`` in the environment before the first import they run in Triton's
interpreter, on CPU tensors, slowly. As ``torch.ops.torch_mooncake_triton.*`` they have the schemas and Meta kernels of
``torch.ops.torch_mooncake.*``. Triton has to be installed; it comes with CUDA builds of torch.

Page ids on a GPU are treated as the CUDA operators treat them: one out of range is skipped, unless TM_CHECK_IDS=1.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torch_mooncake.triton_ops.library import namespace as _ops

__all__ = [
    "copy_pages",
    "delta_apply",
    "delta_encode",
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
    """``torch_mooncake.ops.gather_pages`` in Triton."""
    if out is None:
        return _ops.gather_pages.default(pool, page_ids)
    _ops.gather_pages.out(pool, page_ids, out=out)
    return out


def scatter_pages(pool: Tensor, page_ids: Tensor, pages: Tensor) -> None:
    """``torch_mooncake.ops.scatter_pages`` in Triton."""
    _ops.scatter_pages.default(pool, page_ids, pages)


def gather_pages_layers(pools: Sequence[Tensor], page_ids: Tensor, out: Tensor) -> None:
    """``torch_mooncake.ops.gather_pages_layers`` in Triton."""
    _ops.gather_pages_layers.default(list(pools), page_ids, out)


def scatter_pages_layers(pools: Sequence[Tensor], page_ids: Tensor, pages: Tensor) -> None:
    """``torch_mooncake.ops.scatter_pages_layers`` in Triton."""
    _ops.scatter_pages_layers.default(list(pools), page_ids, pages)


def copy_pages(src: Sequence[Tensor], src_ids: Tensor, dst: Sequence[Tensor], dst_ids: Tensor) -> None:
    """``torch_mooncake.ops.copy_pages`` in Triton."""
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
    """``torch_mooncake.ops.reshard_heads`` in Triton."""
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
    """``torch_mooncake.ops.quantize_pages`` in Triton."""
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
    """``torch_mooncake.ops.dequantize_pages`` in Triton."""
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
    """``torch_mooncake.ops.quantize_blocks`` in Triton."""
    rows, columns = block
    if out is None:
        return _ops.quantize_blocks.default(weight, rows, columns, dtype)
    q, scales = out
    _ops.quantize_blocks.out(weight, rows, columns, q=q, scales=scales)
    return out


def delta_encode(base: Tensor, fresh: Tensor, *, limit: int | None = None) -> Tensor | None:
    """``torch_mooncake.ops.delta_encode`` in Triton."""
    blob = _ops.delta_encode.default(base, fresh, -1 if limit is None else limit)
    return blob if limit is None or blob.numel() else None


def delta_apply(blob: Tensor, target: Tensor) -> None:
    """``torch_mooncake.ops.delta_apply`` in Triton."""
    _ops.delta_apply.default(blob, target)


def hash_pages(token_ids: Tensor, page_size: int, root: Tensor) -> Tensor:
    """``torch_mooncake.ops.hash_pages`` in Triton."""
    return _ops.hash_pages.default(token_ids, page_size, root)


def hash_pages_batch(token_ids: Tensor, offsets: Tensor, page_size: int, roots: Tensor) -> Tensor:
    """``torch_mooncake.ops.hash_pages_batch`` in Triton."""
    return _ops.hash_pages_batch.default(token_ids, offsets, page_size, roots)
