"""quantize_pages and dequantize_pages in Triton: the bits of csrc/kv/quantize.h, in integer arithmetic and correctly
rounded single-precision operations (no fused multiply-add: ``enable_fp_fusion`` is off)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

MAX_DIMS = 6  # over groups, and as many inside one
BLOCK = 2048  # elements that a program has at a time
BITS = {torch.float32: torch.int32, torch.float16: torch.int16, torch.bfloat16: torch.int16}
KINDS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}


def _dims(wide: Tensor, narrow: Tensor, scale_axes: list[int]) -> tuple[list[int], list[int], int]:
    """Arguments (sizes and strides) of the dimensions over groups and of those inside one, and elements inside one."""
    groups = [(wide.shape[d], wide.stride(d), narrow.stride(d)) for d in scale_axes]
    inside = [(wide.shape[d], wide.stride(d), narrow.stride(d)) for d in range(wide.dim()) if d not in scale_axes]
    inside = sorted((dim for dim in inside if dim[0] != 1), key=lambda dim: -abs(dim[1]))
    merged: list[tuple[int, int, int]] = []
    for dim in inside:
        if merged and merged[-1][1:] == (dim[1] * dim[0], dim[2] * dim[0]):
            merged[-1] = (merged[-1][0] * dim[0], dim[1], dim[2])
        else:
            merged.append(dim)
    elements = 1
    for size, _, _ in merged:
        elements *= size

    def flat(dims: list[tuple[int, int, int]]) -> list[int]:
        if len(dims) > MAX_DIMS:
            raise ValueError(f"pages have {len(dims)} dimensions that are not dense: at most {MAX_DIMS} can be scaled")
        padded = [*[(1, 0, 0)] * (MAX_DIMS - len(dims)), *dims]
        return [number for column in zip(*padded, strict=True) for number in column]

    return flat(groups), flat(merged), elements


def _launch(wide: Tensor, narrow: Tensor, scales: Tensor, scale_axes: list[int], quantize: bool) -> None:
    groups, inside, elements = _dims(wide, narrow, scale_axes)
    if scales.numel() == 0 or (elements == 0 and not quantize):
        return
    if scales.numel() >= 1 << 31 or elements >= 1 << 31:
        raise ValueError("pages with 2^31 or more scales, or elements a scale")
    kernel = _quantize_kernel if quantize else _dequantize_kernel
    kernel[(scales.numel(),)](
        wide.view(BITS[wide.dtype]),
        narrow.view(torch.int8),
        scales,
        elements,
        *groups,
        *inside,
        KIND=KINDS[wide.dtype],
        FP8=narrow.dtype != torch.int8,
        BLOCK=min(BLOCK, triton.next_power_of_2(max(elements, 1))),
        num_warps=4,
        enable_fp_fusion=False,
    )


def quantize(pages: Tensor, scale_axes: list[int], q: Tensor, scales: Tensor) -> None:
    """Writes `q` and `scales`; one launch, a program a scale."""
    _launch(pages, q, scales, scale_axes, quantize=True)


def dequantize(q: Tensor, scales: Tensor, scale_axes: list[int], out: Tensor) -> None:
    """Writes `out`; one launch, a program a scale."""
    _launch(out, q, scales, scale_axes, quantize=False)


@triton.jit
def _offsets(index, n0, n1, n2, n3, n4, n5, a0, a1, a2, a3, a4, a5, b0, b1, b2, b3, b4, b5):
    """Where element `index` of a box [n0, .., n5] lies, on either side."""
    i5 = (index % n5).to(tl.int64)
    rest = index // n5
    i4 = (rest % n4).to(tl.int64)
    rest = rest // n4
    i3 = (rest % n3).to(tl.int64)
    rest = rest // n3
    i2 = (rest % n2).to(tl.int64)
    rest = rest // n2
    i1 = (rest % n1).to(tl.int64)
    i0 = (rest // n1).to(tl.int64)
    wide = i0 * a0 + i1 * a1 + i2 * a2 + i3 * a3 + i4 * a4 + i5 * a5
    narrow = i0 * b0 + i1 * b1 + i2 * b2 + i3 * b3 + i4 * b4 + i5 * b5
    return wide, narrow


@triton.jit
def _widen(element, KIND: tl.constexpr):
    """float32 bits (int32) of an element's bits; NaN with its sign."""
    bits = element.to(tl.int32)
    if KIND == 1:
        rest = bits & 0x7FFF
        scaled = (rest << 13).to(tl.float32, bitcast=True) * 5192296858534827628530496329220096.0  # 2^112
        finite = scaled.to(tl.int32, bitcast=True)
        bits = ((bits & 0x8000) << 16) | tl.where(rest >= 0x7C00, 0x7F800000 | ((rest & 0x3FF) << 13), finite)
    if KIND == 2:
        bits = bits << 16
    return bits


@triton.jit
def _narrow(bits, KIND: tl.constexpr):
    """The element's bits of float32 bits (int32), rounded to nearest even; NaN becomes the quiet one of its sign."""
    rest = bits & 0x7FFFFFFF
    sign = bits ^ rest
    if KIND == 0:
        return tl.where(rest > 0x7F800000, sign | 0x7FC00000, bits)
    sign = (sign >> 16) & 0x8000
    if KIND == 2:
        rounded = (rest + 0x7FFF + ((rest >> 16) & 1)) >> 16
        return (sign | tl.where(rest > 0x7F800000, 0x7FC0, rounded)).to(tl.int16)
    # Below 2^-14 halves are 2^-24 apart, as are float32 in [0.5, 1): an addition rounds there.
    small = (rest.to(tl.float32, bitcast=True) + 0.5).to(tl.int32, bitcast=True) - 0x3F000000
    rounded = ((rest + 0xFFF + ((rest >> 13) & 1)) >> 13) - (112 << 10)
    half = tl.where(rest < 0x38800000, small, rounded)
    half = tl.where(rest >= 0x477FF000, 0x7C00, half)  # 65520
    return (sign | tl.where(rest > 0x7F800000, 0x7E00, half)).to(tl.int16)


@triton.jit
def _quantized(bits, inverse, FP8: tl.constexpr):
    """The narrow element of float32 bits (int32)."""
    rest = bits & 0x7FFFFFFF
    negative = rest != bits
    nan = rest > 0x7F800000
    y = rest.to(tl.float32, bitcast=True) * inverse
    if FP8:
        y_bits = y.to(tl.int32, bitcast=True)
        # Below 2^-6 they are 2^-9 apart, as are float32 in [2^14, 2^15).
        small = (y + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
        rounded = ((y_bits + 0x7FFFF + ((y_bits >> 20) & 1)) >> 20) - (120 << 3)
        magnitude = tl.where(y_bits < 0x3C800000, small, rounded)
        magnitude = tl.where(y_bits >= 0x43E00000, 0x7E, magnitude)  # 448
        return (tl.where(nan, 0x7F, magnitude) | tl.where(negative, 0x80, 0)).to(tl.int8)
    clamped = tl.where(y < 127.0, y, 127.0)
    whole = (clamped + 8388608.0).to(tl.int32, bitcast=True) - 0x4B000000
    return tl.where(nan, 0, tl.where(negative, -whole, whole)).to(tl.int8)


@triton.jit
def _dequantized(q, scale, FP8: tl.constexpr):
    """float32 bits (int32) of a narrow element times its scale."""
    if FP8:
        q_bits = q.to(tl.int32)
        rest = q_bits & 0x7F
        sign = (q_bits & 0x80) << 24
        magnitude = (rest << 20).to(tl.float32, bitcast=True) * 1329227995784915872903807060280344576.0  # 2^120
        product = (magnitude * scale).to(tl.int32, bitcast=True)
        return sign | tl.where(rest == 0x7F, 0x7FC00000, product)
    return (q.to(tl.float32) * scale).to(tl.int32, bitcast=True)


@triton.jit
def _quantize_kernel(
    wide_at, narrow_at, scales, elements,
    gn0, gn1, gn2, gn3, gn4, gn5, ga0, ga1, ga2, ga3, ga4, ga5, gb0, gb1, gb2, gb3, gb4, gb5,
    n0, n1, n2, n3, n4, n5, a0, a1, a2, a3, a4, a5, b0, b1, b2, b3, b4, b5,
    KIND: tl.constexpr, FP8: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """g*: over groups; the others: inside a group. n: sizes; a: strides of the wide side, b: of the narrow one."""
    group = tl.program_id(0)
    wide_group, narrow_group = _offsets(
        group, gn0, gn1, gn2, gn3, gn4, gn5, ga0, ga1, ga2, ga3, ga4, ga5, gb0, gb1, gb2, gb3, gb4, gb5
    )  # fmt: skip
    most = tl.zeros((BLOCK,), tl.int32)
    for first in range(0, elements, BLOCK):
        at = first + tl.arange(0, BLOCK)
        wide, _ = _offsets(at, n0, n1, n2, n3, n4, n5, a0, a1, a2, a3, a4, a5, b0, b1, b2, b3, b4, b5)
        bits = _widen(tl.load(wide_at + wide_group + wide, mask=at < elements, other=0), KIND) & 0x7FFFFFFF
        most = tl.maximum(most, tl.where(bits < 0x7F800000, bits, 0))  # as integers they order as the numbers do
    amax = tl.max(most, 0).to(tl.float32, bitcast=True)
    largest = 448.0 if FP8 else 127.0
    scale = tl.div_rn(amax, tl.full((), largest, tl.float32))
    scale = tl.where(scale > 7.888609052210118e-31, scale, 7.888609052210118e-31)  # 2^-100
    tl.store(scales + group, scale)
    inverse = tl.div_rn(tl.full((), 1.0, tl.float32), scale)
    for first in range(0, elements, BLOCK):
        at = first + tl.arange(0, BLOCK)
        wide, narrow = _offsets(at, n0, n1, n2, n3, n4, n5, a0, a1, a2, a3, a4, a5, b0, b1, b2, b3, b4, b5)
        bits = _widen(tl.load(wide_at + wide_group + wide, mask=at < elements, other=0), KIND)
        tl.store(narrow_at + narrow_group + narrow, _quantized(bits, inverse, FP8), mask=at < elements)


@triton.jit
def _dequantize_kernel(
    wide_at, narrow_at, scales, elements,
    gn0, gn1, gn2, gn3, gn4, gn5, ga0, ga1, ga2, ga3, ga4, ga5, gb0, gb1, gb2, gb3, gb4, gb5,
    n0, n1, n2, n3, n4, n5, a0, a1, a2, a3, a4, a5, b0, b1, b2, b3, b4, b5,
    KIND: tl.constexpr, FP8: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Arguments as of `_quantize_kernel`."""
    group = tl.program_id(0)
    wide_group, narrow_group = _offsets(
        group, gn0, gn1, gn2, gn3, gn4, gn5, ga0, ga1, ga2, ga3, ga4, ga5, gb0, gb1, gb2, gb3, gb4, gb5
    )  # fmt: skip
    scale = tl.load(scales + group)
    for first in range(0, elements, BLOCK):
        at = first + tl.arange(0, BLOCK)
        wide, narrow = _offsets(at, n0, n1, n2, n3, n4, n5, a0, a1, a2, a3, a4, a5, b0, b1, b2, b3, b4, b5)
        q = tl.load(narrow_at + narrow_group + narrow, mask=at < elements, other=0)
        tl.store(wide_at + wide_group + wide, _narrow(_dequantized(q, scale, FP8), KIND), mask=at < elements)
