"""The copy of pages in Triton: gather, scatter, page to page and the reordering of heads are all this one copy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

MAX_DIMS = 5  # inside a page, after neighbours in memory have merged
BLOCK = 1024  # words of one program
WORDS = {8: tl.int64, 4: tl.int32, 2: tl.int16, 1: tl.int8}


@dataclass(frozen=True)
class Dim:
    """One dimension inside a page; strides in bytes."""

    size: int
    src_stride: int
    dst_stride: int


@dataclass(frozen=True)
class Copy:
    """Page ``dst_ids[i]`` of every region = page ``src_ids[i]`` of it, for i in [0, count). Ids of None are 0, 1, 2, …

    ``regions``: addresses (source, destination) of page 0. Ids are int32 or int64, on the tensors' device; one out of
    range is skipped. Strides in bytes.
    """

    device: torch.device
    regions: tuple[tuple[int, int], ...]
    count: int
    src_ids: Tensor | None
    dst_ids: Tensor | None
    src_pages: int
    dst_pages: int
    src_page_stride: int
    dst_page_stride: int
    dims: tuple[Dim, ...]
    element_nbytes: int


def merged(dims: Sequence[Dim], element_nbytes: int) -> tuple[list[Dim], int]:
    """(dimensions, bytes of a run): in the order of the destination, neighbours in memory merged; a run is contiguous
    on both sides."""
    found: list[Dim] = []
    for dim in sorted((d for d in dims if d.size != 1), key=lambda d: -abs(d.dst_stride)):
        last = found[-1] if found else None
        if last and (last.src_stride, last.dst_stride) == (dim.src_stride * dim.size, dim.dst_stride * dim.size):
            found[-1] = Dim(last.size * dim.size, dim.src_stride, dim.dst_stride)
        else:
            found.append(dim)
    if found and found[-1].src_stride == found[-1].dst_stride == element_nbytes:
        return found, found.pop().size * element_nbytes
    return found, element_nbytes


@lru_cache(maxsize=128)
def _table(device: torch.device, regions: tuple[tuple[int, int], ...]) -> Tensor:
    """The regions' addresses on the device, kept: a layer's pools are the same at every step."""
    return torch.tensor(regions, dtype=torch.int64).to(device)


def run(copy: Copy) -> None:
    """Queues the copy, one launch, on the current stream of its device."""
    dims, run_nbytes = merged(copy.dims, copy.element_nbytes)
    if len(dims) > MAX_DIMS:
        raise ValueError(
            f"a page has {len(dims)} dimensions that neither side has densely: at most {MAX_DIMS} can be copied"
        )
    runs = 1
    for dim in dims:
        runs *= dim.size
    if not copy.regions or copy.count == 0 or runs * run_nbytes == 0:
        return
    alignment = 16
    for number in [
        *(address for region in copy.regions for address in region),
        *(copy.src_page_stride if copy.src_pages > 1 else 0, copy.dst_page_stride if copy.dst_pages > 1 else 0),
        *(stride for dim in dims for stride in (dim.src_stride, dim.dst_stride)),
        run_nbytes,
    ]:
        while number % alignment:
            alignment //= 2
    word = min(alignment, 8)
    words = runs * (run_nbytes // word)
    block = min(BLOCK, triton.next_power_of_2(words))
    chunks = triton.cdiv(words, block)
    items = len(copy.regions) * copy.count
    if items * chunks >= 1 << 31 or words >= 1 << 31:
        raise ValueError(f"{items} pages of {words} words of {word} bytes: the Triton copy counts to 2^31")
    padded = [*[Dim(1, 0, 0)] * (MAX_DIMS - len(dims)), *dims]
    table = _table(copy.device, copy.regions)
    _copy_kernel[(items * chunks,)](
        table,
        table if copy.src_ids is None else copy.src_ids,
        table if copy.dst_ids is None else copy.dst_ids,
        copy.count,
        chunks,
        words,
        copy.src_pages,
        copy.dst_pages,
        copy.src_page_stride,
        copy.dst_page_stride,
        *(dim.size for dim in padded),
        *(dim.src_stride // word for dim in padded),
        *(dim.dst_stride // word for dim in padded),
        RUN=run_nbytes // word,
        STRIDED=bool(dims),
        SRC_IDS=copy.src_ids is not None,
        DST_IDS=copy.dst_ids is not None,
        WORD=WORDS[word],
        ALIGNMENT=alignment,
        BLOCK=block,
        num_warps=4,
    )


@triton.jit
def _copy_kernel(
    table,
    src_ids,
    dst_ids,
    count,
    chunks,
    words,
    src_pages,
    dst_pages,
    src_page_stride,
    dst_page_stride,
    n0,
    n1,
    n2,
    n3,
    n4,
    s0,
    s1,
    s2,
    s3,
    s4,
    d0,
    d1,
    d2,
    d3,
    d4,
    RUN: tl.constexpr,
    STRIDED: tl.constexpr,
    SRC_IDS: tl.constexpr,
    DST_IDS: tl.constexpr,
    WORD: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A program has `BLOCK` words of one page of one region. Page strides in bytes, s* and d* in words."""
    item = tl.program_id(0) // chunks
    chunk = tl.program_id(0) % chunks
    region = item // count
    place = item % count
    src_page = place.to(tl.int64)
    dst_page = src_page
    if SRC_IDS:
        src_page = tl.load(src_ids + place).to(tl.int64)
    if DST_IDS:
        dst_page = tl.load(dst_ids + place).to(tl.int64)
    good = (src_page >= 0) & (src_page < src_pages) & (dst_page >= 0) & (dst_page < dst_pages)
    src_at = tl.load(table + 2 * region) + src_page * src_page_stride
    dst_at = tl.load(table + 2 * region + 1) + dst_page * dst_page_stride
    src = tl.multiple_of(src_at.to(tl.pointer_type(WORD)), ALIGNMENT)
    dst = tl.multiple_of(dst_at.to(tl.pointer_type(WORD)), ALIGNMENT)

    word = chunk * BLOCK + tl.arange(0, BLOCK)
    mask = word < tl.where(good, words, 0)
    if STRIDED:
        rest = word // RUN
        in_run = word % RUN
        i4 = (rest % n4).to(tl.int64)
        rest = rest // n4
        i3 = (rest % n3).to(tl.int64)
        rest = rest // n3
        i2 = (rest % n2).to(tl.int64)
        rest = rest // n2
        i1 = (rest % n1).to(tl.int64)
        i0 = (rest // n1).to(tl.int64)
        src_word = i0 * s0 + i1 * s1 + i2 * s2 + i3 * s3 + i4 * s4 + in_run
        dst_word = i0 * d0 + i1 * d1 + i2 * d2 + i3 * d3 + i4 * d4 + in_run
    else:
        src_word = word
        dst_word = word
    tl.store(dst + dst_word, tl.load(src + src_word, mask=mask), mask=mask)
