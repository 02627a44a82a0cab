"""What the Triton twins refuse, with the words of the operators in C++ (csrc/torch/ops_tensors.cpp)."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch
from torch import Tensor
from triton.runtime.jit import JITFunction


def device(kernel: object, t: Tensor, name: str) -> None:
    """ValueError unless `kernel` can reach `t`: Triton's interpreter has CPU tensors, its compiler those of a GPU."""
    if t.is_cuda or (t.device.type == "cpu" and not isinstance(kernel, JITFunction)):
        return
    raise ValueError(f"{name} is on {t.device}: Triton needs CUDA tensors (or TRITON_INTERPRET=1 before its import)")


def shape(t: Tensor, name: str, expected: Sequence[int]) -> None:
    if list(t.shape) != list(expected):
        raise ValueError(f"{name} has shape {list(t.shape)}, expected {list(expected)}")


def like(t: Tensor, name: str, first: Tensor, first_name: str) -> None:
    """One dtype, one device."""
    if t.dtype != first.dtype:
        raise ValueError(f"{name} and {first_name} differ in dtype")
    same_device(t, name, first, first_name)


def same_device(t: Tensor, name: str, first: Tensor, first_name: str) -> None:
    if t.device != first.device:
        raise ValueError(f"{name} is on {t.device} but {first_name} on {first.device}")


def contiguous_pages(t: Tensor, first: int, name: str) -> None:
    """Dimensions from `first` on lie densely, in order."""
    expected = 1
    for size, stride in zip(reversed(t.shape[first:]), reversed(t.stride()[first:]), strict=True):
        if size == 0:
            return
        if size != 1 and stride != expected:
            raise ValueError(
                f"{name}: each page has to be contiguous, but shape {list(t.shape)} has strides {list(t.stride())}"
            )
        expected *= size


def own_places(t: Tensor, name: str) -> None:
    """No element of a tensor that is written lies where another one does."""
    reach = 1
    if t.numel() == 0:
        return
    for size, stride in sorted(zip(t.shape, t.stride(), strict=True), key=lambda dim: dim[1]):
        if size == 1:
            continue
        if stride < reach:
            raise ValueError(
                f"{name} is written, but its elements overlap: shape {list(t.shape)}, strides {list(t.stride())}"
            )
        reach += (size - 1) * stride


class Range:
    """Bytes from a tensor's first to behind its last element. ``dense``: all of them are the tensor's."""

    __slots__ = ("begin", "dense", "end", "place")

    def __init__(self, t: Tensor) -> None:
        shape, strides, itemsize, numel = t.shape, t.stride(), t.element_size(), t.numel()
        span = 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) if numel else 0
        self.begin: int = t.data_ptr()
        self.end = self.begin + span * itemsize
        self.dense = span == numel
        self.place = (self.begin, strides) if numel else None


def sharing(first: Sequence[Range], second: Sequence[Range]) -> tuple[int, int] | None:
    """Positions of two tensors that share memory: both dense and intersecting, or views of the same places. Views that
    lie between each other's elements (K and V of one pool) share nothing."""
    places = {r.place: k for k, r in reversed(list(enumerate(first))) if r.place is not None}
    for l, r in enumerate(second):
        if r.place in places:
            return places[r.place], l
    spans = [(r.begin, r.end, side, k) for side in (0, 1) for k, r in enumerate((first, second)[side])
             if r.dense and r.end > r.begin]  # fmt: skip
    reach: list[tuple[int, int]] = [(0, 0), (0, 0)]  # of each side: the furthest end so far, and whose
    for begin, end, side, k in sorted(spans):
        furthest, other = reach[1 - side]
        if begin < furthest:
            return (k, other) if side == 0 else (other, k)
        reach[side] = max(reach[side], (end, k))
    return None


def same_memory(ranges: Sequence[Range]) -> tuple[int, int] | None:
    """Positions, in order, of two tensors of one list that share memory, as `sharing` says."""
    places: dict[object, int] = {}
    for k, r in enumerate(ranges):
        if r.place is not None and places.setdefault(r.place, k) != k:
            return places[r.place], k
    furthest, whose = 0, 0
    for begin, end, k in sorted((r.begin, r.end, k) for k, r in enumerate(ranges) if r.dense and r.end > r.begin):
        if begin < furthest:
            return min(k, whose), max(k, whose)
        furthest, whose = end, k
    return None


def page_ids(ids: Tensor, name: str, pool: Tensor, pool_name: str) -> None:
    if ids.dim() != 1:
        raise ValueError(f"{name} has to be one-dimensional, not of shape {list(ids.shape)}")
    if ids.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"{name} has to be int32 or int64")
    if ids.device != pool.device and ids.device.type != "cpu":
        raise ValueError(f"{name} is on {ids.device} but {pool_name} on {pool.device}")


def values(ids: Tensor) -> list[int] | None:
    """The ids, where they can be looked at: on the CPU, or with TM_CHECK_IDS=1 anywhere (which waits for the GPU)."""
    if ids.device.type == "cpu" or os.environ.get("TM_CHECK_IDS") == "1":
        found: list[int] = ids.tolist()
        return found
    return None


def in_range(ids: list[int] | None, name: str, num_pages: int) -> None:
    for position, page in enumerate(ids or ()):
        if not 0 <= page < num_pages:
            raise IndexError(f"{name}[{position}] is {page}, not in [0, {num_pages})")


def once(ids: list[int] | None, name: str) -> None:
    seen: dict[int, int] = {}
    for position, page in enumerate(ids or ()):
        if page in seen:
            raise ValueError(
                f"{name} has {page} twice, at positions {seen[page]} and {position}: a page can be written once"
            )
        seen[page] = position
