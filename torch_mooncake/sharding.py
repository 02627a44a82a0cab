"""Where the elements of a sharded tensor lie: which part of it a rank holds, and which bytes two layouts share.

A ``Box`` is a dense tensor that holds, in each dimension, some *runs* ``(first global index, length)`` of a global
tensor's indices, in increasing order. A plain tensor is one run a dimension; so is a ``Shard``; a ``_StridedShard`` is
several. Pure arithmetic over shapes: no tensor is touched here, and torch is needed only to recognise placements.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from torch_mooncake.errors import InvalidArgument

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor

Runs = tuple[tuple[int, int], ...]
Ranges = npt.NDArray[np.int64]  # [n, 3]: offset in the object, offset in the destination, length, in bytes


class Box(NamedTuple):
    runs: tuple[Runs, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(sum(length for _, length in runs) for runs in self.runs)

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


class Share(NamedTuple):
    """What one process holds of a tensor on a mesh."""

    box: Box
    owner: bool  # of several with the same elements (replicas), the one that stores them
    layout: str  # the mesh's shape and the placements: the same on all ranks


def whole(shape: Sequence[int]) -> Box:
    """All of a tensor of this shape."""
    return Box(tuple(((0, n),) if n else () for n in shape))


def is_dtensor(value: Any) -> bool:
    module = sys.modules.get("torch.distributed.tensor")  # none can exist before it is imported
    return module is not None and isinstance(value, module.DTensor)


def share_of(tensor: DTensor) -> Share:
    """What this process holds of ``tensor``. InvalidArgument as ``share``."""
    return share(tuple(tensor.shape), tensor.device_mesh, tensor.placements)


def share(shape: tuple[int, ...], mesh: DeviceMesh, placements: Sequence[Any]) -> Share:
    """What this process holds of a tensor of ``shape``. InvalidArgument for partial sums, for placements that do not
    fit the mesh or the shape, and in a process that is not in the mesh."""
    sizes, coordinate = tuple(mesh.shape), _coordinate(mesh)
    box = box_of(shape, sizes, coordinate, placements)
    owner = all(c == 0 for c, p in zip(coordinate, placements, strict=True) if p.is_replicate())
    return Share(box, owner, f"{'x'.join(map(str, sizes))} {','.join(map(str, placements))}")


def rank_in(mesh: DeviceMesh) -> tuple[int, int]:
    """(rank, world) of this process in the mesh, counted in the order of its dimensions. InvalidArgument if it is not
    in it."""
    rank = 0
    for size, c in zip(mesh.shape, _coordinate(mesh), strict=True):
        rank = rank * size + c
    return rank, math.prod(mesh.shape)


def _coordinate(mesh: DeviceMesh) -> tuple[int, ...]:
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise InvalidArgument("this process is not in the tensor's mesh")
    return tuple(coordinate)


def box_of(shape: tuple[int, ...], mesh: Sequence[int], coordinate: Sequence[int], placements: Sequence[Any]) -> Box:
    """What the process at ``coordinate`` of a mesh of this shape holds. Placements apply from left to right."""
    if len(placements) != len(mesh):
        raise InvalidArgument(f"{len(placements)} placements for a mesh of {len(mesh)} dimensions")
    runs = list(whole(shape).runs)
    for size, at, placement in zip(mesh, coordinate, placements, strict=True):
        if placement.is_partial():
            raise InvalidArgument(f"{placement} is a sum that is not done yet: redistribute() the tensor first")
        if placement.is_replicate():
            continue
        dim = placement.dim + len(shape) if placement.dim < 0 else placement.dim
        if not 0 <= dim < len(shape):
            raise InvalidArgument(f"{placement} of a tensor of {len(shape)} dimensions")
        total = sum(length for _, length in runs[dim])
        pieces = chunks(total, getattr(placement, "split_factor", 1))
        runs[dim] = tuple(
            run
            for first, length in pieces
            for start, n in [chunks(length, size)[at]]
            for run in _cut(runs[dim], first + start, n)
        )
    return Box(tuple(runs))


def chunks(n: int, count: int) -> list[tuple[int, int]]:
    """(start, length) of each of ``count`` pieces of ``n``, as torch.chunk cuts: the last may be shorter or empty."""
    size = -(-n // count)
    return [(min(n, i * size), max(0, min(n, (i + 1) * size) - i * size)) for i in range(count)]


def _cut(runs: Runs, first: int, n: int) -> Iterator[tuple[int, int]]:
    """The runs of local indices [first, first + n)."""
    at = 0
    for start, length in runs:
        begin, end = max(first, at), min(first + n, at + length)
        if begin < end:
            yield start + begin - at, end - begin
        at += length


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """In elements."""
    strides, step = [], 1
    for n in reversed(shape):
        strides.append(step)
        step *= max(n, 1)
    return tuple(reversed(strides))


def overlap(source: Box, offset: int, target: Box, strides: Sequence[int], itemsize: int) -> Ranges:
    """The bytes that both hold. ``source`` is dense at ``offset`` of an object; ``target`` lies in memory with these
    ``strides`` (in elements). As few and long ranges as the layouts allow."""
    source_shape, target_shape = source.shape, target.shape
    source_strides = contiguous_strides(source_shape)
    here, there, lengths = np.zeros(1, np.int64), np.zeros(1, np.int64), np.ones(1, np.int64)
    for dim in reversed(range(len(source_shape))):
        common = _common(source.runs[dim], target.runs[dim])
        step = source_strides[dim]
        stride = strides[dim] if target_shape[dim] > 1 else step
        if len(here) == 1 and here[0] == there[0] == 0 and lengths[0] == step == stride:
            # All inner dimensions are one block on both sides: a run of this one is one range.
            here, there, lengths = common[:, 0] * step, common[:, 1] * stride, common[:, 2] * step
            continue
        inside = np.concatenate([np.arange(n) + s for s, _, n in common] or [np.empty(0, np.int64)])
        outside = np.concatenate([np.arange(n) + t for _, t, n in common] or [np.empty(0, np.int64)])
        here = (inside[:, None] * step + here[None, :]).ravel()
        there = (outside[:, None] * stride + there[None, :]).ravel()
        lengths = np.tile(lengths, len(inside))
    return np.stack([offset + here * itemsize, there * itemsize, lengths * itemsize], axis=1)


def _common(a: Runs, b: Runs) -> npt.NDArray[np.int64]:
    """[n, 3]: local index in ``a``, local index in ``b``, length, of each stretch of indices that both have."""
    found = []
    i = j = at_a = at_b = 0
    while i < len(a) and j < len(b):
        (start_a, n_a), (start_b, n_b) = a[i], b[j]
        begin, end = max(start_a, start_b), min(start_a + n_a, start_b + n_b)
        if begin < end:
            found.append((at_a + begin - start_a, at_b + begin - start_b, end - begin))
        if start_a + n_a <= start_b + n_b:
            i, at_a = i + 1, at_a + n_a
        else:
            j, at_b = j + 1, at_b + n_b
    return np.array(found, np.int64).reshape(-1, 3)
