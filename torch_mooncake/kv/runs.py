"""From strides to runs of bytes: the arithmetic under segments and exchanges, with numpy and without a loop over pages.

A *pair* of planes, ours and theirs, holds the same logical elements at different places. What a transfer needs is the
list of the longest runs that are contiguous on both sides: the axes that nest alike on both sides make one run, the
others are stepped through, and what then lies one behind the other on both sides is joined.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from torch_mooncake.errors import InvalidArgument, OutOfBounds
from torch_mooncake.kv.groups import Plane

Int64s = NDArray[np.int64]
Int32s = NDArray[np.int32]
Boundary = tuple[int, int]  # (bytes from one to the next or 0 for none, offset of one of them) within a storage


@dataclass(frozen=True)
class Runs:
    """Byte ranges of the same content on two sides, in the order of our addresses. Arrays of one length; `len()`."""

    our_storage: Int32s
    our_offset: Int64s  # bytes from the storage's start
    their_storage: Int32s
    their_offset: Int64s
    nbytes: Int64s

    def __len__(self) -> int:
        return len(self.nbytes)

    @property
    def total_nbytes(self) -> int:
        return int(self.nbytes.sum())

    def take(self, index: NDArray[np.intp]) -> Runs:
        """The runs at these places."""
        return Runs(
            self.our_storage[index],
            self.our_offset[index],
            self.their_storage[index],
            self.their_offset[index],
            self.nbytes[index],
        )


class Pair(NamedTuple):
    """A part of a page (one role) on both sides: same role, same sizes, no axis K."""

    ours: Plane
    theirs: Plane


class _Axis(NamedTuple):
    span: float  # what decides the nesting: distance from a step to the next, ours
    ours: Int64s
    theirs: Int64s


class Program:
    """The runs of some layers' pairs, prepared: only ids are wanting. `layers`: pairs of each layer."""

    def __init__(self, layers: Sequence[Sequence[Pair]]) -> None:
        alike: dict[object, list[Sequence[Pair]]] = {}
        for pairs in layers:
            alike.setdefault(_shape_of(pairs), []).append(pairs)
        self._passes: list[_Pass] = []
        for same in alike.values():
            if _one_step(same[0]):
                self._passes.append(_Pass(same))
            else:
                self._passes += [_Pass([[pairs[index]] for pairs in same]) for index in range(len(same[0]))]

    def runs(self, our_ids: Int64s, their_ids: Int64s) -> Runs:
        """`our_ids[i]` there is `their_ids[i]`; both int64 [n], in range."""
        order = np.argsort(our_ids, kind="stable")
        parts = [each.runs(our_ids[order], their_ids[order]) for each in self._passes]
        if len(parts) == 1:
            return parts[0]
        return _joined(_chained(parts)) if parts else _empty()


def checked_ids(pages: object, num_pages: int) -> Int64s:
    """`pages` (ints, an integer array or CPU tensor) as int64 [n]. InvalidArgument when they are no list of integers;
    OutOfBounds names the position and value of the first that is not in 0..num_pages - 1."""
    try:
        ids = np.asarray(pages)
    except (TypeError, ValueError) as error:
        raise InvalidArgument(f"page ids are {pages!r}, not one list of integers") from error
    if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
        raise InvalidArgument(f"page ids are {ids.dtype} of shape {ids.shape}, not one list of integers")
    wrong = np.flatnonzero((ids < 0) | (ids >= num_pages))
    if wrong.size:
        place = int(wrong[0])
        raise OutOfBounds(f"page {int(ids[place])} is not in 0..{num_pages - 1} (position {place} of {ids.size})")
    return ids.astype(np.int64, copy=False)


def covered(runs: Runs) -> Runs:
    """The bytes of our side, each once, also where layers share theirs: by address, what touches as one."""
    if not len(runs):
        return runs
    runs = runs.take(np.lexsort((runs.our_offset, runs.our_storage)))
    ends = runs.our_offset + runs.nbytes
    first = np.flatnonzero(np.diff(runs.our_storage, prepend=-1))  # where each storage's begin
    for start, stop in zip(first, [*first[1:], len(runs)], strict=True):
        np.maximum.accumulate(ends[start:stop], out=ends[start:stop])
    apart = np.ones(len(runs), dtype=bool)
    apart[1:] = (runs.our_offset[1:] > ends[:-1]) | (np.diff(runs.our_storage) != 0)
    starts = np.flatnonzero(apart)
    last = np.append(starts[1:], len(runs)) - 1
    kept = runs.take(starts)
    nbytes = ends[last] - kept.our_offset
    return Runs(kept.our_storage, kept.our_offset, kept.our_storage, kept.our_offset, nbytes)


def split_at(runs: Runs, ours: Sequence[Boundary], theirs: Sequence[Boundary]) -> Runs:
    """Cuts runs where they would cross a boundary of their storage on either side."""
    if len(runs) and any(every for every, _ in ours):
        runs = _cut(runs, runs.our_storage, runs.our_offset, ours)
    if len(runs) and any(every for every, _ in theirs):
        runs = _cut(runs, runs.their_storage, runs.their_offset, theirs)
    return runs


def _cut(runs: Runs, storage: Int32s, offset: Int64s, boundaries: Sequence[Boundary]) -> Runs:
    every, first = np.asarray(boundaries, dtype=np.int64)[storage].T
    every = np.where(every == 0, 1 << 62, every)
    start = offset - first
    end = start + runs.nbytes
    pieces = (end - 1) // every - start // every + 1
    source = np.repeat(np.arange(len(runs)), pieces)
    nth = np.arange(len(source)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    piece = (start // every)[source] + nth
    begin = np.maximum(start[source], piece * every[source])
    stop = np.minimum(end[source], (piece + 1) * every[source])
    skipped = begin - start[source]
    whole = runs.take(source)
    return Runs(
        whole.our_storage,
        whole.our_offset + skipped,
        whole.their_storage,
        whole.their_offset + skipped,
        stop - begin,
    )


def _shape_of(pairs: Sequence[Pair]) -> object:
    """What layers that are handled together have in common: all but where the first plane of each side is."""
    first = pairs[0]
    return tuple(
        (
            plane.storage == base.storage,
            plane.offset - base.offset if plane.storage == base.storage else 0,
            plane.page_stride,
            plane.axes,
            plane.shape,
            plane.strides,
            plane.dtype,
        )
        for pair in pairs
        for plane, base in zip(pair, first, strict=True)
    )


def _one_step(pairs: Sequence[Pair]) -> bool:
    """Whether the pairs of a layer differ by their offsets only."""
    return (
        len({tuple((p.storage, p.page_stride, p.axes, p.shape, p.strides, p.dtype) for p in pair) for pair in pairs})
        == 1
    )


class _Pass:
    """Layers of one shape whose parts differ by their offsets only."""

    def __init__(self, layers: Sequence[Sequence[Pair]]) -> None:
        first = layers[0]
        ours, theirs = first[0]
        firsts = sorted((pairs[0] for pairs in layers), key=lambda pair: (pair.ours.storage, pair.ours.offset))
        self._storages = np.array(
            [[p.ours.storage for p in firsts], [p.theirs.storage for p in firsts]], dtype=np.int32
        )
        self._page_strides = ours.page_stride, theirs.page_stride
        self._nbytes, steps = inner_run(ours, theirs)
        axes = [
            _Axis(step[1], np.arange(step[0], dtype=np.int64) * step[1], np.arange(step[0], dtype=np.int64) * step[2])
            for step in steps
        ]
        parts = sorted((p.ours.offset - ours.offset, p.theirs.offset - theirs.offset) for p in first)
        if len(parts) > 1:
            offsets = np.array(parts, dtype=np.int64)
            axes.append(_Axis(float(np.diff(offsets[:, 0]).min()), offsets[:, 0], offsets[:, 1]))
        base = np.array([[p.ours.offset, p.theirs.offset] for p in firsts], dtype=np.int64)
        apart = len(firsts) > 1 and (self._storages[0] == self._storages[0, 0]).all()
        span = float(np.diff(base[:, 0]).min()) if apart else float("inf")
        self._layers = _Axis(span, base[:, 0], base[:, 1])
        self._axes = axes

    def runs(self, our_ids: Int64s, their_ids: Int64s) -> Runs:
        pages = _Axis(self._page_strides[0], our_ids * self._page_strides[0], their_ids * self._page_strides[1])
        # The order of our addresses, as far as axes nest: the widest step outermost.
        axes = sorted([self._layers, pages, *self._axes], key=lambda axis: -axis.span)
        ours, theirs = np.zeros(1, np.int64), np.zeros(1, np.int64)
        storages = np.zeros((2, 1), np.int32)
        for axis in axes:
            ours = np.add.outer(ours, axis.ours).reshape(-1)
            theirs = np.add.outer(theirs, axis.theirs).reshape(-1)
            if axis is self._layers:
                storages = np.tile(self._storages, storages.shape[1])
            else:
                storages = np.repeat(storages, len(axis.ours), axis=1)
        return _joined(Runs(storages[0], ours, storages[1], theirs, np.full(len(ours), self._nbytes, np.int64)))


def inner_run(ours: Plane, theirs: Plane) -> tuple[int, list[tuple[int, int, int]]]:
    """Bytes that are one run on both sides whatever the page, and the steps (count, our stride, their stride) left."""
    steps = [
        (size, ours.stride(letter), theirs.stride(letter))
        for letter, size in zip(ours.axes, ours.shape, strict=True)
        if size > 1
    ]
    steps.sort(key=lambda step: step[1])
    nbytes = ours.item_nbytes
    while steps and steps[0][1] == nbytes and steps[0][2] == nbytes:
        nbytes *= steps.pop(0)[0]
    return nbytes, steps


def _joined(runs: Runs) -> Runs:
    """In the order of our addresses, with neighbours on both sides made one."""
    if len(runs) < 2:
        return runs
    new_storage, step = np.diff(runs.our_storage), np.diff(runs.our_offset)
    if not ((new_storage > 0) | ((new_storage == 0) & (step >= 0))).all():
        runs = runs.take(np.lexsort((runs.our_offset, runs.our_storage)))
    apart = np.diff(runs.our_offset) != runs.nbytes[:-1]
    apart |= np.diff(runs.their_offset) != runs.nbytes[:-1]
    apart |= (np.diff(runs.our_storage) != 0) | (np.diff(runs.their_storage) != 0)
    starts = np.flatnonzero(np.concatenate(([True], apart)))
    nbytes = np.add.reduceat(runs.nbytes, starts)
    first = runs.take(starts)
    return Runs(first.our_storage, first.our_offset, first.their_storage, first.their_offset, nbytes)


def _chained(parts: Sequence[Runs]) -> Runs:
    return Runs(
        np.concatenate([part.our_storage for part in parts]),
        np.concatenate([part.our_offset for part in parts]),
        np.concatenate([part.their_storage for part in parts]),
        np.concatenate([part.their_offset for part in parts]),
        np.concatenate([part.nbytes for part in parts]),
    )


def _empty() -> Runs:
    none, at = np.zeros(0, np.int32), np.zeros(0, np.int64)
    return Runs(none, at, none, at, at)
