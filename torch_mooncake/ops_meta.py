"""Meta kernels of ``torch.ops.torch_mooncake.*``: shapes and dtypes only; the real ones check the rest.

Imported by ``torch_mooncake.ops``, which loads the library first.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


@torch.library.register_fake("torch_mooncake::gather_pages")
def _(pool: Tensor, page_ids: Tensor) -> Tensor:
    torch._check(pool.dim() >= 1, lambda: "pool has no dimension: expected [num_pages, *page]")
    torch._check(page_ids.dim() == 1, lambda: f"page_ids has to be one-dimensional, not of shape {page_ids.shape}")
    return pool.new_empty([page_ids.shape[0], *pool.shape[1:]])


@torch.library.register_fake("torch_mooncake::gather_pages.out")
def _(pool: Tensor, page_ids: Tensor, *, out: Tensor) -> None:
    _check_like("out", out, [page_ids.shape[0], *pool.shape[1:]], "pool", pool)


@torch.library.register_fake("torch_mooncake::scatter_pages")
def _(pool: Tensor, page_ids: Tensor, pages: Tensor) -> None:
    _check_like("pages", pages, [page_ids.shape[0], *pool.shape[1:]], "pool", pool)


@torch.library.register_fake("torch_mooncake::gather_pages_layers")
def _(pools: Sequence[Tensor], page_ids: Tensor, out: Tensor) -> None:
    if pools:
        _check_like("out", out, [len(pools), page_ids.shape[0], *pools[0].shape[1:]], "pools[0]", pools[0])


@torch.library.register_fake("torch_mooncake::scatter_pages_layers")
def _(pools: Sequence[Tensor], page_ids: Tensor, pages: Tensor) -> None:
    if pools:
        _check_like("pages", pages, [len(pools), page_ids.shape[0], *pools[0].shape[1:]], "pools[0]", pools[0])


@torch.library.register_fake("torch_mooncake::copy_pages")
def _(src: Sequence[Tensor], src_ids: Tensor, dst: Sequence[Tensor], dst_ids: Tensor) -> None:
    torch._check(len(src) == len(dst), lambda: f"src has {len(src)} layers, dst {len(dst)}")
    torch._check(src_ids.dim() == 1, lambda: f"src_ids has to be one-dimensional, not of shape {src_ids.shape}")
    _check_shape("dst_ids", dst_ids, src_ids.shape)
    for l, (a, b) in enumerate(zip(src, dst, strict=True)):
        _check_like(f"src[{l}]", a, src[0].shape, "src[0]", src[0])
        _check_like(f"dst[{l}]", b, [dst[0].shape[0], *src[0].shape[1:]], "src[0]", src[0])


@torch.library.register_fake("torch_mooncake::reshard_heads")
def _(
    sources: Sequence[Tensor],
    outs: Sequence[Tensor],
    kv_heads: int,
    source_head_axis: int,
    out_head_axis: int,
    source_ranks: Sequence[int],
    source_tp: int,
    out_ranks: Sequence[int],
    out_tp: int,
) -> None:
    torch._check(len(sources) == len(source_ranks), lambda: f"source_ranks has {len(source_ranks)} ranks")
    torch._check(len(outs) == len(out_ranks), lambda: f"out_ranks has {len(out_ranks)} ranks")
    if not sources or not outs:
        return
    shape = list(sources[0].shape)
    heads = max(1, kv_heads // source_tp)
    torch._check(shape[source_head_axis] == heads, lambda: f"sources[0] has shape {shape}: {heads} heads expected")
    del shape[source_head_axis]
    shape.insert(out_head_axis % (len(shape) + 1), max(1, kv_heads // out_tp))
    for i, source in enumerate(sources):
        _check_like(f"sources[{i}]", source, sources[0].shape, "sources[0]", sources[0])
    for i, out in enumerate(outs):
        _check_like(f"outs[{i}]", out, shape, "sources[0]", sources[0])


@torch.library.register_fake("torch_mooncake::quantize_pages")
def _(pages: Tensor, scale_axes: Sequence[int], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    q = torch.empty(pages.shape, dtype=dtype, device=pages.device)
    return q, pages.new_empty([pages.shape[axis] for axis in scale_axes], dtype=torch.float32)


@torch.library.register_fake("torch_mooncake::quantize_pages.out")
def _(pages: Tensor, scale_axes: Sequence[int], *, q: Tensor, scales: Tensor) -> None:
    _check_shape("q", q, pages.shape)
    _check_shape("scales", scales, [pages.shape[axis] for axis in scale_axes])


@torch.library.register_fake("torch_mooncake::dequantize_pages")
def _(q: Tensor, scales: Tensor, scale_axes: Sequence[int], dtype: torch.dtype) -> Tensor:
    _check_shape("scales", scales, [q.shape[axis] for axis in scale_axes])
    return torch.empty(q.shape, dtype=dtype, device=q.device)


@torch.library.register_fake("torch_mooncake::dequantize_pages.out")
def _(q: Tensor, scales: Tensor, scale_axes: Sequence[int], *, out: Tensor) -> None:
    _check_shape("scales", scales, [q.shape[axis] for axis in scale_axes])
    _check_shape("out", out, q.shape)


@torch.library.register_fake("torch_mooncake::quantize_blocks")
def _(weight: Tensor, block_rows: int, block_cols: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    q = torch.empty(weight.shape, dtype=dtype, device=weight.device)
    return q, weight.new_empty(_scales_of_blocks(weight, block_rows, block_cols), dtype=torch.float32)


@torch.library.register_fake("torch_mooncake::quantize_blocks.out")
def _(weight: Tensor, block_rows: int, block_cols: int, *, q: Tensor, scales: Tensor) -> None:
    _check_shape("q", q, weight.shape)
    _check_shape("scales", scales, _scales_of_blocks(weight, block_rows, block_cols))


def _scales_of_blocks(weight: Tensor, block_rows: int, block_cols: int) -> list[int]:
    torch._check(weight.dim() >= 2, lambda: f"weight has {weight.dim()} dimensions: rows and columns are needed")
    sizes = [1 if block == -1 else (n + block - 1) // block
             for n, block in zip(weight.shape[-2:], (block_rows, block_cols), strict=True)]  # fmt: skip
    return [*weight.shape[:-2], *sizes]


@torch.library.register_fake("torch_mooncake::delta_encode")
def _(base: Tensor, fresh: Tensor, limit: int) -> Tensor:
    _check_like("fresh", fresh, base.shape, "base", base)
    return torch.empty(torch.library.get_ctx().new_dynamic_size(), dtype=torch.uint8, device="cpu")


@torch.library.register_fake("torch_mooncake::delta_apply")
def _(blob: Tensor, target: Tensor) -> None:
    torch._check(blob.dim() == 1, lambda: f"blob has to be one-dimensional, not of shape {blob.shape}")


@torch.library.register_fake("torch_mooncake::delta_table")
def _(blob: Tensor) -> Tensor:
    return torch.empty(torch.library.get_ctx().new_dynamic_size(), 2, dtype=torch.int64, device="cpu")


@torch.library.register_fake("torch_mooncake::delta_seal")
def _(blob: Tensor, elements: int, element_nbytes: int, token_nbytes: int, changed: int) -> None:
    torch._check(blob.dim() == 1, lambda: f"blob has to be one-dimensional, not of shape {blob.shape}")


@torch.library.register_fake("torch_mooncake::delta_encode_ranges")
def _(base: Tensor, fresh: Tensor, offsets: Tensor, nbytes: Tensor, element_nbytes: int, limit: int) -> Tensor:
    _check_like("fresh", fresh, base.shape, "base", base)
    _check_shape("nbytes", nbytes, offsets.shape)
    return torch.empty(torch.library.get_ctx().new_dynamic_size(), dtype=torch.uint8, device="cpu")


@torch.library.register_fake("torch_mooncake::delta_apply_ranges")
def _(blob: Tensor, target: Tensor, offsets: Tensor, nbytes: Tensor, base: Tensor | None) -> None:
    _check_shape("nbytes", nbytes, offsets.shape)


@torch.library.register_fake("torch_mooncake::hash_pages")
def _(token_ids: Tensor, page_size: int, root: Tensor) -> Tensor:
    _check_shape("root", root, [16])
    return token_ids.new_empty([token_ids.shape[0] // page_size, 16], dtype=torch.uint8)


@torch.library.register_fake("torch_mooncake::hash_pages_batch")
def _(token_ids: Tensor, offsets: Tensor, page_size: int, roots: Tensor) -> Tensor:
    _check_shape("roots", roots, [16] if roots.dim() == 1 else [offsets.shape[0] - 1, 16])
    return token_ids.new_empty([token_ids.shape[0] // page_size, 16], dtype=torch.uint8)


def _check_shape(name: str, given: Tensor, shape: Sequence[int]) -> None:
    torch._check(given.dim() == len(shape), lambda: f"{name} has shape {tuple(given.shape)}, expected {tuple(shape)}")
    for got, expected in zip(given.shape, shape, strict=True):
        torch._check(got == expected, lambda: f"{name} has shape {tuple(given.shape)}, expected {tuple(shape)}")


def _check_like(name: str, given: Tensor, shape: Sequence[int], first_name: str, first: Tensor) -> None:
    _check_shape(name, given, shape)
    torch._check(given.dtype == first.dtype, lambda: f"{name} is {given.dtype}, {first_name} is {first.dtype}")
