"""From boxes of whole tensors to bytes: where a plan's pieces lie in a node's slot."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from torch_mooncake.errors import InternalError
from torch_mooncake.tensors import DTYPES
from torch_mooncake.weights.arena import offsets_of
from torch_mooncake.weights.plan import Plan
from torch_mooncake.weights.shards import Ints, Manifest

Bools = npt.NDArray[np.bool_]


class Addresses:
    """Where a packed manifest's pieces are."""

    def __init__(self, manifest: Manifest) -> None:
        self._manifest = manifest
        self._offsets, _ = offsets_of(manifest)
        self._rows: dict[str, list[int]] = {}
        for row, whole in enumerate(manifest.whole.tolist()):
            self._rows.setdefault(manifest.wholes[whole].name, []).append(row)

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
        """The piece of the whole of these names, if there is but one, else -1."""
        rows = [row for name in names for row in self._rows.get(name, ())]
        return rows[0] if len(rows) == 1 else -1

    def inside(self, rows: Ints, start: Ints, size: Ints) -> Bools:
        """Whether each of these boxes lies in the piece ``rows`` names for it."""
        manifest, ndim = self._manifest, self._manifest.ndim
        low, first = start[:, -ndim:], manifest.start[rows]
        found: Bools = ((first <= low) & (low + size[:, -ndim:] <= first + manifest.size[rows])).all(axis=1)
        return found

    def places(self, rows: Ints, start: Ints, itemsize: Ints) -> tuple[Ints, Ints]:
        """([n] byte offsets in the slot, [n, ndim of start] byte strides) of the elements of the wholes at ``start``.
        ``itemsize``: [n]"""
        manifest, ndim = self._manifest, self._manifest.ndim
        strides = manifest.stride[rows]
        elements = manifest.offset[rows] + ((start[:, -ndim:] - manifest.start[rows]) * strides).sum(axis=1)
        fill = start.shape[1] - ndim
        padded = np.pad(strides * itemsize[:, None], ((0, 0), (max(fill, 0), 0)))
        return self._offsets[manifest.local[rows]] + elements * itemsize, padded[:, padded.shape[1] - start.shape[1] :]


def ranges(size: Sequence[int], itemsize: int, a: Sequence[int], b: Sequence[int]) -> tuple[Ints, Ints, int]:
    """(offsets in a, offsets in b, length) of the stretches of a box that are contiguous on both sides, in bytes from
    its first element. ``a``, ``b``: byte strides."""
    block = itemsize
    here, there = np.zeros(1, np.int64), np.zeros(1, np.int64)
    whole = True
    for n, step_a, step_b in zip(reversed(size), reversed(a), reversed(b), strict=True):
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


class Chunks:
    """The bytes of one route's chunks, from one node's slot to another's: arrays ready for ``Engine.read``."""

    def __init__(self, plan: Plan, names: Sequence[Sequence[str]], route: int, src: Addresses, dst: Addresses) -> None:
        first = int(np.searchsorted(plan.chunk_route, route))
        last = int(np.searchsorted(plan.chunk_route, route, side="right"))
        self.nbytes = plan.chunk_nbytes[first:last].tolist()
        self.total = int(sum(self.nbytes))
        self.copies: list[tuple[int, int, int]] = []  # (from, to, nbytes) within the receiver's slot, at the end
        self.parts: list[tuple[Ints, Ints, Ints]] = []  # of each chunk: offsets there, offsets here, lengths
        pieces = np.searchsorted(plan.piece_chunk, np.arange(first, last + 1))
        self._patterns: dict[tuple[object, ...], tuple[Ints, Ints, int]] = {}
        low, high = int(pieces[0]), int(pieces[-1])
        there, here, lengths, of = self._stretches(plan, names, slice(low, high), src, dst)
        bounds = np.searchsorted(of, pieces - low)
        for a, b in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
            self.parts.append(_merged(there[a:b], here[a:b], lengths[a:b]))

    def _stretches(
        self, plan: Plan, names: Sequence[Sequence[str]], rows: slice, src: Addresses, dst: Addresses
    ) -> tuple[Ints, Ints, Ints, Ints]:
        """(offset there, offset here, length, number of the piece) of every stretch of the pieces."""
        wholes, start, size = plan.piece_whole[rows], plan.piece_start[rows], plan.piece_size[rows]
        different, inverse = np.unique(wholes, return_inverse=True)
        sizes = np.array([DTYPES[plan.wholes[whole].dtype] for whole in different.tolist()], np.int64)
        itemsize = sizes[inverse]
        owners = [np.array([side.only(names[w]) for w in different.tolist()], np.int64)[inverse] for side in (src, dst)]
        for i in np.flatnonzero((owners[0] < 0) | (owners[1] < 0)).tolist():
            for side, found in zip((src, dst), owners, strict=True):
                found[i] = next(iter(side.rows(names[wholes[i]], start[i], size[i])), -1)
            for other in dst.rows(names[wholes[i]], start[i], size[i])[1:]:
                self._twin(dst, int(owners[1][i]), other, start[i], size[i], int(itemsize[i]))
        for side, found in zip((src, dst), owners, strict=True):
            lacking = (found < 0) | ~side.inside(found, start, size)
            if lacking.any():
                name = plan.wholes[int(wholes[int(lacking.argmax())])].name
                raise InternalError(f"a plan sends {name} where it is not")
        (there, far), (here, near) = (
            side.places(found, start, itemsize) for side, found in zip((src, dst), owners, strict=True)
        )
        block, plain = _blocks(size, itemsize, far, near)
        number = np.arange(len(wholes), dtype=np.int64)
        if plain.all():
            return there, here, block, number
        columns: list[list[Ints]] = [[], [], [], []]
        for i, whole in enumerate(plain.tolist()):
            a, b, length = self._PLAIN if whole else self._pattern(size[i], int(itemsize[i]), far[i], near[i])
            length = int(block[i]) if whole else length
            values = there[i] + a, here[i] + b, np.full(len(a), length, np.int64), np.full(len(a), i, np.int64)
            for column, value in zip(columns, values, strict=True):
                column.append(value)
        joined = [np.concatenate(column) for column in columns]
        return joined[0], joined[1], joined[2], joined[3]

    _PLAIN = np.zeros(1, np.int64), np.zeros(1, np.int64), 0

    def _pattern(self, size: Ints, itemsize: int, a: Ints, b: Ints) -> tuple[Ints, Ints, int]:
        key = size.tobytes(), itemsize, a.tobytes(), b.tobytes()
        found = self._patterns.get(key)
        if found is None:
            found = self._patterns[key] = ranges(size.tolist(), itemsize, a.tolist(), b.tolist())
        return found

    def _twin(self, dst: Addresses, row: int, other: int, start: Ints, size: Ints, itemsize: int) -> None:
        """Copies a box from one of the receiver's pieces to another."""
        at, strides = dst.places(np.array([row, other]), np.stack([start, start]), np.array([itemsize, itemsize]))
        here, twin, length = self._pattern(size, itemsize, strides[0], strides[1])
        self.copies.extend(zip((at[0] + here).tolist(), (at[1] + twin).tolist(), [length] * len(here), strict=True))


def _blocks(size: Ints, itemsize: Ints, a: Ints, b: Ints) -> tuple[Ints, Bools]:
    """(bytes of each box if it is contiguous on both sides, whether it is)."""
    block, plain = itemsize.copy(), np.ones(len(size), np.bool_)
    for d in reversed(range(size.shape[1])):
        n = size[:, d]
        plain &= (n == 1) | ((a[:, d] == block) & (b[:, d] == block))
        block *= n
    return block, plain


def _merged(there: Ints, here: Ints, lengths: Ints) -> tuple[Ints, Ints, Ints]:
    """Stretches that follow each other on both sides, as one."""
    follows = (there[1:] == there[:-1] + lengths[:-1]) & (here[1:] == here[:-1] + lengths[:-1])
    first = np.flatnonzero(np.concatenate([[True], ~follows]))
    return there[first], here[first], np.add.reduceat(lengths, first)


def names_of(plan: Plan, sources: Sequence[Manifest]) -> list[list[str]]:
    """The names under which each of the plan's wholes goes: its own, and those that the sources tie to it."""
    tied: dict[str, set[str]] = {}
    for manifest in sources:
        for name, root in manifest.aliases.items():
            tied.setdefault(root, set()).add(name)
    return [[whole.name, *sorted(tied.get(whole.name, ()))] for whole in plan.wholes]
