"""quantize_pages and dequantize_pages over ``scaling``, hash_pages over ``hashing``: arguments and checks."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from torch_mooncake.triton_ops import checks, hashing, scaling

WIDE = (torch.float32, torch.float16, torch.bfloat16)
NARROW = (torch.float8_e4m3fn, torch.int8)


def _require(dtype: torch.dtype, allowed: tuple[torch.dtype, ...], name: str) -> None:
    if dtype not in allowed:
        text = "float32, float16 or bfloat16" if allowed is WIDE else "float8_e4m3fn or int8"
        raise ValueError(f"{name} has to be {text}")


def _check_axes(scale_axes: Sequence[int], dim: int) -> None:
    for i, axis in enumerate(scale_axes):
        if not 0 <= axis < dim:
            raise ValueError(f"scale_axes[{i}] is {axis}, not in [0, {dim})")
        if i > 0 and axis <= scale_axes[i - 1]:
            raise ValueError(f"scale_axes {list(scale_axes)} have to ascend, each once")
    if not scale_axes or scale_axes[0] != 0:
        raise ValueError(f"scale_axes {list(scale_axes)} have to begin with 0: pages have scales of their own")


def _check(wide: Tensor, wide_name: str, q: Tensor, scales: Tensor, scale_axes: Sequence[int], quantize: bool) -> None:
    given, written = (wide, q) if quantize else (q, wide)
    given_name, written_name = (wide_name, "q") if quantize else ("q", wide_name)
    checks.device(scaling._quantize_kernel, given, given_name)
    _require(wide.dtype, WIDE, wide_name)
    _require(q.dtype, NARROW, "q")
    if scales.dtype != torch.float32:
        raise ValueError("scales has to be float32")
    _check_axes(scale_axes, given.dim())
    checks.shape(written, written_name, given.shape)
    checks.shape(scales, "scales", [given.shape[axis] for axis in scale_axes])
    if not scales.is_contiguous():
        raise ValueError("scales has to be contiguous")
    checks.same_device(written, written_name, given, given_name)
    checks.same_device(scales, "scales", given, given_name)
    checks.own_places(written, written_name)
    if checks.sharing([checks.Range(written)], [checks.Range(given)]):
        raise ValueError(f"{written_name} and {given_name} share memory")


def quantize_pages(pages: Tensor, scale_axes: Sequence[int], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    _require(dtype, NARROW, "dtype")
    _check_axes(scale_axes, pages.dim())
    q = torch.empty(pages.shape, dtype=dtype, device=pages.device)
    scales = pages.new_empty([pages.shape[axis] for axis in scale_axes], dtype=torch.float32)
    quantize_pages_out(pages, scale_axes, q=q, scales=scales)
    return q, scales


def quantize_pages_out(pages: Tensor, scale_axes: Sequence[int], *, q: Tensor, scales: Tensor) -> None:
    _check(pages, "pages", q, scales, scale_axes, quantize=True)
    scaling.quantize(pages, list(scale_axes), q, scales)


def dequantize_pages(q: Tensor, scales: Tensor, scale_axes: Sequence[int], dtype: torch.dtype) -> Tensor:
    _require(dtype, WIDE, "dtype")
    out = torch.empty(q.shape, dtype=dtype, device=q.device)
    dequantize_pages_out(q, scales, scale_axes, out=out)
    return out


def dequantize_pages_out(q: Tensor, scales: Tensor, scale_axes: Sequence[int], *, out: Tensor) -> None:
    _check(out, "out", q, scales, scale_axes, quantize=False)
    scaling.dequantize(q, scales, list(scale_axes), out)


def hash_pages(token_ids: Tensor, page_size: int, root: Tensor) -> Tensor:
    checks.shape(root, "root", [16])
    return _hash(token_ids, torch.tensor([0, token_ids.numel()]), page_size, root[None], "root")


def hash_pages_batch(token_ids: Tensor, offsets: Tensor, page_size: int, roots: Tensor) -> Tensor:
    if offsets.dim() != 1 or offsets.numel() < 1:
        raise ValueError(f"offsets has shape {list(offsets.shape)}, expected [prompts + 1]")
    if offsets.dtype != torch.int64:
        raise ValueError("offsets has to be int64")
    if offsets.device.type != "cpu":
        raise ValueError(f"offsets is on {offsets.device}: it has to be on the cpu")
    checks.shape(roots, "roots", [offsets.numel() - 1, 16] if roots.dim() == 2 else [16])
    return _hash(token_ids, offsets, page_size, roots if roots.dim() == 2 else roots[None], "roots")


def _hash(token_ids: Tensor, offsets: Tensor, page_size: int, roots: Tensor, roots_name: str) -> Tensor:
    if page_size < 1:
        raise ValueError(f"page_size must be at least 1, not {page_size}")
    if token_ids.dim() != 1:
        raise ValueError(f"token_ids has to be one-dimensional, not of shape {list(token_ids.shape)}")
    if token_ids.dtype not in (torch.int32, torch.int64):
        raise ValueError("token_ids has to be int32 or int64")
    if roots.dtype != torch.uint8:
        raise ValueError(f"{roots_name} has to be uint8")
    checks.device(hashing._hash_kernel, token_ids, "token_ids")
    checks.same_device(roots, roots_name, token_ids, "token_ids")
    bounds = offsets.tolist()
    if bounds[0] != 0:
        raise ValueError(f"offsets[0] is {bounds[0]}, not 0")
    for p, (before, after) in enumerate(pairwise(bounds)):
        if after < before:
            raise ValueError(f"offsets[{p + 1}] is {after}, less than the one before it, {before}")
    if bounds[-1] != token_ids.numel():
        raise ValueError(f"offsets end at {bounds[-1]}, token_ids at {token_ids.numel()}")
    hashes = torch.zeros(token_ids.numel() // page_size, 16, dtype=torch.uint8, device=token_ids.device)
    hashing.hash_prompts(token_ids, offsets, page_size, roots, hashes)
    return hashes
