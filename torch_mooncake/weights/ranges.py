"""From boxes of whole tensors to bytes: where a plan's pieces lie in a node's address space."""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from torch_mooncake.errors import InternalError
from torch_mooncake.tensors import DTYPES
from torch_mooncake.weights.arena import STAGED
from torch_mooncake.weights.plan import Plan
from torch_mooncake.weights.shards import Ints, Manifest

Bools = npt.NDArray[np.bool_]

_ALIGN = 64  # of a box in staging memory


class Addresses:
    """Where a node's pieces are in its address space. ``staged``: indices of locals that bytes reach by way of staging
    memory only."""

    def __init__(self, manifest: Manifest, offsets: Ints, staged: frozenset[int] = frozenset()) -> None:
        self._manifest = manifest
        self._offsets = offsets
        self._staged = staged
        self._rows = manifest.rows

    def rows(self, names: Sequence[str], start: Ints, size: Ints) -> list[int]:
        """The pieces that have all of the box; ``names``: those under which the whole goes."""
        manifest, ndim = self._manifest, self._manifest.ndim
        low, high = start[-ndim:], start[-ndim:] + size[-ndim:]
        return [
            row
            for name in names
            for row in self._rows.get(name, ())
            if (manifest.start[row] <= low).all() and (high <= manifest.start[row] + manifest.size[row]).all()
        ]

    def only(self, names: Sequence[str]) -> int:
        """The piece of the whole of these names, if there is but one, and no staging, else -1."""
        rows = [row for name in names for row in self._rows.get(name, ())]
        return rows[0] if len(rows) == 1 and not self.is_staged(rows) else -1

    def simple(self, rows: Ints, start: Ints, size: Ints, itemsize: Ints) -> tuple[Ints, Bools]:
        """([n] addresses of these boxes, whether each lies in the piece ``rows`` has for it, contiguously)."""
        manifest, ndim = self._manifest, self._manifest.ndim
        first, strides = manifest.start[rows], manifest.stride[rows]
        low, lengths = start[:, -ndim:], size[:, -ndim:]
        good = (rows >= 0) & ((first <= low) & (low + lengths <= first + manifest.size[rows])).all(axis=1)
        block = np.ones(len(rows), np.int64)
        for d in reversed(range(ndim)):
            good &= (lengths[:, d] == 1) | (strides[:, d] == block)
            block *= lengths[:, d]
        elements = manifest.offset[rows] + ((low - first) * strides).sum(axis=1)
        return self._offsets[manifest.local[rows]] + elements * itemsize, good

    def place(self, row: int, start: Ints, itemsize: int) -> tuple[int, tuple[int, ...]]:
        """(address, byte strides) of the element of the whole at ``start``."""
        local, elements, strides = self.element(row, start)
        return int(self._offsets[local]) + elements * itemsize, tuple(stride * itemsize for stride in strides)

    def element(self, row: int, start: Ints) -> tuple[int, int, tuple[int, ...]]:
        """(local, element in it, element strides) of the element of the whole at ``start``."""
        manifest = self._manifest
        strides = manifest.stride[row]
        element = int(manifest.offset[row] + ((start[-manifest.ndim :] - manifest.start[row]) * strides).sum())
        fill = len(start) - manifest.ndim
        return int(manifest.local[row]), element, (*(0,) * fill, *strides.tolist())

    def is_staged(self, rows: Sequence[int]) -> bool:
        return bool(self._staged) and any(int(self._manifest.local[row]) in self._staged for row in rows)


def ranges(
    size: Sequence[int], itemsize: int, a: tuple[int, tuple[int, ...]], b: tuple[int, tuple[int, ...]]
) -> tuple[Ints, Ints, int]:
    """(offsets in a, offsets in b, length) of the stretches of a box that are contiguous on both sides, in bytes."""
    block = itemsize
    here, there = np.array([a[0]], np.int64), np.array([b[0]], np.int64)
    whole = True
    for n, step_a, step_b in zip(reversed(size), reversed(a[1]), reversed(b[1]), strict=True):
        if n == 1:
            continue
        if whole and step_a == block == step_b:
            block *= n
            continue
        whole = False
        index = np.arange(n, dtype=np.int64)[:, None]
        here = (index * step_a + here[None, :]).ravel()
        there = (index * step_b + there[None, :]).ravel()
    return here, there, block


class Apply(NamedTuple):
    """A box that came into staging memory, and where it belongs."""

    at: int  # in the chunk's staging memory; bytes
    dtype: str  # of the bytes
    size: tuple[int, ...]
    local: int
    element: int  # of the local tensor
    stride: tuple[int, ...]  # elements


class Chunks:
    """The bytes of one route's chunks, from one node's memory to another's: arrays ready for ``Engine.read``. The
    ranges of a chunk follow each other as its elements do, so a checksum over them is the same on both sides."""

    def __init__(self, plan: Plan, names: Sequence[Sequence[str]], route: int, src: Addresses, dst: Addresses) -> None:
        first = int(np.searchsorted(plan.chunk_route, route))
        last = int(np.searchsorted(plan.chunk_route, route, side="right"))
        self.first = first  # of the plan's chunks
        self.nbytes = plan.chunk_nbytes[first:last].tolist()
        self.total = int(sum(self.nbytes))
        pieces = np.searchsorted(plan.piece_chunk, np.arange(first, last + 1))
        self.parts: list[tuple[Ints, Ints, Ints]] = []  # of each chunk: addresses there, addresses here, lengths
        self.copies: list[tuple[int, int, int]] = []  # (from, to, nbytes) within the receiver's memory, at the end
        self.applies: list[list[Apply]] = []  # of each chunk
        self.staged: list[int] = []  # bytes of each chunk that go through staging memory
        base = int(pieces[0])
        there, here, lengths, simple = _simple(plan, names, base, int(pieces[-1]), src, dst)
        for low, high in zip(pieces[:-1].tolist(), pieces[1:].tolist(), strict=True):
            self._applies: list[Apply] = []
            self._at = 0
            these = slice(low - base, high - base)
            if simple[these].all():
                self.parts.append(_merged(there[these], here[these], lengths[these]))
            else:
                self.parts.append(self._part(plan, names, low, high, src, dst))
            self.applies.append(self._applies)
            self.staged.append(self._at)

    def _part(
        self, plan: Plan, names: Sequence[Sequence[str]], low: int, high: int, src: Addresses, dst: Addresses
    ) -> tuple[Ints, Ints, Ints]:
        theirs, ours, lengths = [], [], []
        for row in range(low, high):
            whole = plan.wholes[int(plan.piece_whole[row])]
            start, size = plan.piece_start[row], plan.piece_size[row]
            itemsize = DTYPES[whole.dtype]
            sources, targets = (side.rows(names[int(plan.piece_whole[row])], start, size) for side in (src, dst))
            if not sources or not targets:
                raise InternalError(f"a plan sends {whole.name} where it is not")
            from_ = src.place(sources[0], start, itemsize)
            if dst.is_staged(targets):
                to = self._stage(dst, targets, start, size.tolist(), whole.dtype)
            else:
                to = dst.place(targets[0], start, itemsize)
                for other in targets[1:]:
                    again, twin, step = ranges(size.tolist(), itemsize, to, dst.place(other, start, itemsize))
                    self.copies.extend((a, b, step) for a, b in zip(again.tolist(), twin.tolist(), strict=True))
            there, here, length = ranges(size.tolist(), itemsize, from_, to)
            theirs.append(there)
            ours.append(here)
            lengths.append(np.full(len(there), length, np.int64))
        return _merged(np.concatenate(theirs), np.concatenate(ours), np.concatenate(lengths))

    def _stage(
        self, dst: Addresses, rows: Sequence[int], start: Ints, size: list[int], dtype: str
    ) -> tuple[int, tuple[int, ...]]:
        for row in rows:
            self._applies.append(Apply(self._at, dtype, tuple(size), *dst.element(row, start)))
        itemsize = DTYPES[dtype]
        strides = tuple(itemsize * math.prod(size[d + 1 :]) for d in range(len(size)))
        place = STAGED + self._at, strides
        self._at += -(-math.prod(size) * itemsize // _ALIGN) * _ALIGN
        return place


def _simple(
    plan: Plan, names: Sequence[Sequence[str]], low: int, high: int, src: Addresses, dst: Addresses
) -> tuple[Ints, Ints, Ints, Bools]:
    """(addresses there, addresses here, bytes, whether that is all there is to say) of each of the pieces."""
    start, size = plan.piece_start[low:high], plan.piece_size[low:high]
    wholes, inverse = np.unique(plan.piece_whole[low:high], return_inverse=True)
    itemsize = np.array([DTYPES[plan.wholes[whole].dtype] for whole in wholes.tolist()], np.int64)[inverse]
    sides = []
    for side in (src, dst):
        rows = np.array([side.only(names[whole]) for whole in wholes.tolist()], np.int64)[inverse]
        sides.append(side.simple(rows, start, size, itemsize))
    (there, good), (here, fine) = sides
    return there, here, plan.piece_nbytes[low:high], good & fine


def _merged(there: Ints, here: Ints, lengths: Ints) -> tuple[Ints, Ints, Ints]:
    """Stretches that follow each other on both sides, as one."""
    follows = (there[1:] == there[:-1] + lengths[:-1]) & (here[1:] == here[:-1] + lengths[:-1])
    first = np.flatnonzero(np.concatenate([[True], ~follows]))
    return there[first], here[first], np.add.reduceat(lengths, first)


_NAMES: weakref.WeakKeyDictionary[Plan, list[list[str]]] = weakref.WeakKeyDictionary()


def names_of(plan: Plan, sources: Sequence[Manifest]) -> list[list[str]]:
    """The names under which each of the plan's wholes goes: its own, and those that the sources tie to it. The same
    list each time: do not write into it."""
    found = _NAMES.get(plan)
    if found is None:
        tied: dict[str, set[str]] = {}
        for manifest in sources:
            for name, root in manifest.aliases.items():
                tied.setdefault(root, set()).add(name)
        found = _NAMES[plan] = [[whole.name, *sorted(tied.get(whole.name, ()))] for whole in plan.wholes]
    return found
