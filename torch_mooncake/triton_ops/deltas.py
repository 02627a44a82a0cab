"""Deltas in Triton (csrc/kv/delta.h says which bytes): a program a segment. Blobs are the host's, as for the CUDA
operators: what is found is copied there, and what is applied is looked at there before."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

SEGMENT = 4096  # elements
HEADER = 48  # bytes
FAR_GAP, RUN, SHORTEST_RUN = 254, 255, 4
BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def encode(base: Tensor, fresh: Tensor, limit: int) -> tuple[Tensor, list[int]] | None:
    """A blob whose header is not filled in, and what belongs there: elements, bytes of one, bytes of tokens, changes.
    None: it would have more than `limit` bytes."""
    size, elements = base.element_size(), base.numel()
    a, b = base.view(-1).view(BITS[size]), fresh.view(-1).view(BITS[size])
    segments = -(-elements // SEGMENT)
    like = torch.empty(0, dtype=torch.int32, device=base.device)
    positions, groups = like.new_empty(segments, SEGMENT), like.new_empty(segments, SEGMENT + 2)
    counts, tokens_of = like.new_empty(segments), like.new_empty(segments)
    nothing = torch.empty(0, dtype=torch.uint8, device=base.device)
    if segments:
        _find_kernel[(segments,)](a, b, elements, positions, groups, counts, SEGMENT=SEGMENT, num_warps=8)
        _tokens_kernel[(segments,)](
            b, positions, groups, counts, tokens_of, counts, counts, nothing, b,
            WRITE=False, SEGMENT=SEGMENT, FAR_GAP=FAR_GAP, RUN=RUN, SHORTEST_RUN=SHORTEST_RUN, num_warps=8,
        )  # fmt: skip
    changed, written = counts.cpu().long(), tokens_of.cpu().long()
    total, token_nbytes = int(changed.sum()), int(written.sum())
    tokens_at = HEADER + 4 * segments
    values_at = -(-(tokens_at + token_nbytes) // 8) * 8
    if 0 <= limit < values_at + total * size:
        return None
    tokens = torch.empty(token_nbytes, dtype=torch.uint8, device=base.device)
    values = torch.empty(total, dtype=BITS[size], device=base.device)
    if total:
        starts = [(of.cumsum(0) - of).to(base.device) for of in (written, changed)]
        _tokens_kernel[(segments,)](
            b, positions, groups, counts, tokens_of, *starts, tokens, values,
            WRITE=True, SEGMENT=SEGMENT, FAR_GAP=FAR_GAP, RUN=RUN, SHORTEST_RUN=SHORTEST_RUN, num_warps=8,
        )  # fmt: skip
    blob = torch.zeros(values_at + total * size, dtype=torch.uint8)
    blob[HEADER:tokens_at] = torch.stack([changed, written], 1).to(torch.int16).view(torch.uint8).view(-1)
    blob[tokens_at : tokens_at + token_nbytes] = tokens.cpu()
    blob[values_at:] = values.cpu().view(torch.uint8)
    return blob, [elements, size, token_nbytes, total]


def apply(blob: Tensor, table: Tensor, target: Tensor) -> None:
    """`table`: of the blob, by ``delta_table``; it has as many elements as `target`, of the same size."""
    segments = len(table) - 2
    if segments <= 0:
        return
    there, table = blob.to(target.device), table.to(target.device)
    values = there[int(table[1, 1]) :].view(BITS[target.element_size()])  # at a multiple of 8 bytes
    _apply_kernel[(segments,)](
        target.view(-1).view(BITS[target.element_size()]), there, values, table,
        SIZE=target.element_size(), SEGMENT=SEGMENT, FAR_GAP=FAR_GAP, RUN=RUN, num_warps=1,
    )  # fmt: skip


@triton.jit
def _find_kernel(base, fresh, elements, positions, groups, counts, SEGMENT: tl.constexpr):
    """Of a segment: the positions of its changes, in order, and how many. A change that is no neighbour of the one
    before begins a group: groups[0] = -1, groups[g] is the number of the change that the g-th group begins with, and
    behind the last is the number of changes. Before the first element there is a change by agreement."""
    segment = tl.program_id(0)
    first = segment.to(tl.int64) * SEGMENT
    at = tl.arange(0, SEGMENT)
    there = first + at < elements
    changed = there & (tl.load(base + first + at, mask=there) != tl.load(fresh + first + at, mask=there))
    within = there & (at > 0)
    before = tl.load(base + first + at - 1, mask=within) != tl.load(fresh + first + at - 1, mask=within)
    begins = changed & (at > 0) & (before == 0)
    ones = changed.to(tl.int32)
    number = tl.cumsum(ones, 0) - 1
    count = tl.sum(ones, 0)
    tl.store(positions + segment * SEGMENT + number, at, mask=changed)
    group = tl.cumsum(begins.to(tl.int32), 0)
    row = groups + segment * (SEGMENT + 2)
    tl.store(row, -1)
    tl.store(row + group, number, mask=begins)
    tl.store(row + tl.sum(begins.to(tl.int32), 0) + 1, count)
    tl.store(counts + segment, count)


@triton.jit
def _tokens_kernel(
    fresh, positions, groups, counts, tokens_of, token_starts, value_starts, tokens, values,
    WRITE: tl.constexpr, SEGMENT: tl.constexpr, FAR_GAP: tl.constexpr, RUN: tl.constexpr, SHORTEST_RUN: tl.constexpr,
):  # fmt: skip
    """Counts a segment's bytes of tokens, or writes them and its values."""
    segment = tl.program_id(0)
    count = tl.load(counts + segment)
    k = tl.arange(0, SEGMENT)
    there = k < count
    position = tl.load(positions + segment * SEGMENT + k, mask=there, other=0)
    previous = tl.load(positions + segment * SEGMENT + k - 1, mask=there & (k > 0), other=-1)
    gap = position - previous - 1
    begins = there & (gap > 0)
    group = tl.cumsum(begins.to(tl.int32), 0)
    row = groups + segment * (SEGMENT + 2)
    group_at = tl.load(row + group, mask=there, other=0)
    run = tl.load(row + group + 1, mask=there, other=0) - group_at - 1  # changes of the group behind its first
    long_run = run >= SHORTEST_RUN
    heads = there & (gap == 0) & (k - 1 == group_at) & long_run
    nbytes = tl.where(begins, tl.where(gap >= FAR_GAP, 3, 1), 0)
    nbytes = tl.where(there & (gap == 0), tl.where(long_run, tl.where(heads, 3, 0), 1), nbytes)
    ends = tl.cumsum(nbytes, 0)
    if WRITE:
        to = tokens + tl.load(token_starts + segment) + ends - nbytes
        wide = nbytes == 3
        number = tl.where(heads, run, gap)
        first = tl.where(wide, tl.where(heads, RUN, FAR_GAP), gap)
        tl.store(to, first.to(tl.uint8), mask=nbytes > 0)
        tl.store(to + 1, (number & 0xFF).to(tl.uint8), mask=wide)
        tl.store(to + 2, (number >> 8).to(tl.uint8), mask=wide)
        value = tl.load(fresh + segment.to(tl.int64) * SEGMENT + position, mask=there)
        tl.store(values + tl.load(value_starts + segment) + k, value, mask=there)
    else:
        tl.store(tokens_of + segment, tl.sum(nbytes, 0))


@triton.jit
def _apply_kernel(
    target, blob, values, table,
    SIZE: tl.constexpr, SEGMENT: tl.constexpr, FAR_GAP: tl.constexpr, RUN: tl.constexpr,
):  # fmt: skip
    segment = tl.program_id(0)
    row = table + (segment + 1) * 2
    at, end = tl.load(row), tl.load(row + 2)
    value = (tl.load(row + 1) - tl.load(table + 3)) // SIZE
    position = segment.to(tl.int64) * SEGMENT
    lanes = tl.arange(0, 128)
    while at < end:
        token = tl.load(blob + at).to(tl.int64)
        number = token
        at += 1
        if token >= FAR_GAP:
            number = tl.load(blob + at).to(tl.int64) | (tl.load(blob + at + 1).to(tl.int64) << 8)
            at += 2
        n = tl.where(token == RUN, number, 1)
        position += tl.where(token == RUN, 0, number)
        for first in range(0, n, 128):
            mask = first + lanes < n
            tl.store(target + position + first + lanes, tl.load(values + value + first + lanes, mask=mask), mask=mask)
        position += n
        value += n
