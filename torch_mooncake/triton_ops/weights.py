"""quantize_blocks over ``scaling``, deltas over ``deltas``: arguments and checks."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_mooncake.triton_ops import checks, deltas, scaling
from torch_mooncake.triton_ops.scaled import NARROW, WIDE, _require


def _blocks(size: int, block: int, name: str) -> int:
    if block == -1:
        return 1
    if block < 1:
        raise ValueError(f"{name} is {block}, not 1 or more, or -1")
    return -(-size // block)


def _scale_shape(weight: Tensor, block_rows: int, block_cols: int) -> list[int]:
    if weight.dim() < 2:
        raise ValueError(f"weight has {weight.dim()} dimensions: rows and columns are needed")
    *batch, rows, columns = weight.shape
    return [*batch, _blocks(rows, block_rows, "block_rows"), _blocks(columns, block_cols, "block_cols")]


def quantize_blocks(weight: Tensor, block_rows: int, block_cols: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    _require(weight.dtype, WIDE, "weight")
    _require(dtype, NARROW, "dtype")
    shape = _scale_shape(weight, block_rows, block_cols)
    q = torch.empty(weight.shape, dtype=dtype, device=weight.device)
    scales = weight.new_empty(shape, dtype=torch.float32)
    quantize_blocks_out(weight, block_rows, block_cols, q=q, scales=scales)
    return q, scales


def quantize_blocks_out(weight: Tensor, block_rows: int, block_cols: int, *, q: Tensor, scales: Tensor) -> None:
    checks.device(scaling._quantize_kernel, weight, "weight")
    _require(weight.dtype, WIDE, "weight")
    _require(q.dtype, NARROW, "q")
    if scales.dtype != torch.float32:
        raise ValueError("scales has to be float32")
    checks.shape(scales, "scales", _scale_shape(weight, block_rows, block_cols))
    checks.shape(q, "q", weight.shape)
    if not scales.is_contiguous():
        raise ValueError("scales has to be contiguous")
    checks.same_device(q, "q", weight, "weight")
    checks.same_device(scales, "scales", weight, "weight")
    checks.own_places(q, "q")
    if checks.sharing([checks.Range(q)], [checks.Range(weight)]):
        raise ValueError("q and weight share memory")
    for rows, row_block, row_scales in _spans(weight.shape[-2], block_rows):
        for columns, column_block, column_scales in _spans(weight.shape[-1], block_cols):
            blocked = [
                t[..., rows, columns].unflatten(-1, (column_scales.stop - column_scales.start, column_block))
                .unflatten(-3, (row_scales.stop - row_scales.start, row_block))
                for t in (weight, q)
            ]  # fmt: skip
            batch = list(range(weight.dim() - 2))
            axes = [*batch, weight.dim() - 2, weight.dim()]
            part = scales.new_empty([blocked[0].shape[axis] for axis in axes])
            scaling.quantize(blocked[0], axes, blocked[1], part)
            scales[..., row_scales, column_scales] = part


def _spans(size: int, block: int) -> list[tuple[slice, int, slice]]:
    """(elements, those of a block, blocks) of the whole blocks along a dimension, and of the one at the edge."""
    if block == -1:
        return [(slice(0, size), size, slice(0, 1))]
    whole = size // block
    spans = [(slice(0, whole * block), block, slice(0, whole))] if whole else []
    return spans + ([(slice(whole * block, size), size % block, slice(whole, whole + 1))] if size % block else [])


def _check_delta(t: Tensor, name: str) -> None:
    if not t.is_contiguous():
        raise ValueError(f"{name} has to be contiguous")


def _check_size(t: Tensor, name: str) -> None:
    if t.element_size() > 8:
        raise ValueError(f"{name} has elements of {t.element_size()} bytes: 1, 2, 4 or 8 are needed")


def delta_encode(base: Tensor, fresh: Tensor, limit: int) -> Tensor:
    checks.device(deltas._find_kernel, base, "base")
    checks.like(fresh, "fresh", base, "base")
    checks.shape(fresh, "fresh", base.shape)
    _check_delta(base, "base")
    _check_delta(fresh, "fresh")
    _check_size(base, "base")
    found = deltas.encode(base, fresh, limit)
    if found is None:
        return torch.empty(0, dtype=torch.uint8)
    blob, header = found
    torch.ops.torch_mooncake.delta_seal(blob, *header)
    return blob


def delta_apply(blob: Tensor, target: Tensor) -> None:
    checks.device(deltas._apply_kernel, target, "target")
    _check_delta(target, "target")
    table = torch.ops.torch_mooncake.delta_table(blob)
    elements, size = table[0].tolist()
    _check_size(target, "target")
    if (elements, size) != (target.numel(), target.element_size()):
        raise ValueError(
            f"the delta is of {elements} elements of {size} bytes, target has {target.numel()} of "
            f"{target.element_size()}"
        )
    if target.device == blob.device and checks.sharing([checks.Range(target)], [checks.Range(blob)]):
        raise ValueError("target and blob share memory")
    deltas.apply(blob, table, target)
