"""Pages packed into one piece of bytes and unpacked again, in an order that does not depend on either side's layout.

A packed chunk is `n` pages of one layer: one part after the other in the order of their roles ("k", "v"), each part
`[n, N, H, D]` without gaps, heads `H` those that one rank gives the other. With "packed_fp8" a part is float8_e4m3fn
and its scales `[n, H]` in float32 follow it. Parts and scales begin at multiples of 16 bytes.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, NamedTuple

import torch

from torch_mooncake import ops
from torch_mooncake.errors import Unsupported
from torch_mooncake.kv.groups import Plane, parts_of
from torch_mooncake.kv.layout import narrow_heads

if TYPE_CHECKING:
    from torch_mooncake.kv.cache import PagedKV

_ALIGN = 16
FP8 = torch.float8_e4m3fn
FP8_FROM = ("float32", "float16", "bfloat16")


class _Part(NamedTuple):
    view: torch.Tensor  # [num_pages, N, H, D] of those axes it has, over the cache
    scale_axes: list[int]


class Packer:
    """Packs pages of a cache. Thread-safe: who may touch which page is the sessions' business."""

    def __init__(self, kv: PagedKV) -> None:
        self._kv = kv
        self._planes = {
            layer: (group.num_pages, group.kv_heads, planes)
            for group in kv.layout.groups
            for layer, planes in group.layers
        }
        self._parts: dict[tuple[int, range | None], list[_Part]] = {}

    @property
    def device(self) -> torch.device:
        return self._kv.storages[0].device

    def nbytes(self, layer: int, count: int, heads: range | None, wire: str) -> int:
        return sum(_part_nbytes(part, count, wire) for part in self._of(layer, heads))

    def pack(self, layer: int, ids: torch.Tensor, heads: range | None, wire: str, out: torch.Tensor) -> None:
        """`ids` int64 [n] on the CPU; `out` uint8 [nbytes] on the cache's device."""
        at = 0
        for part in self._of(layer, heads):
            shape = (len(ids), *part.view.shape[1:])
            if wire == "packed_fp8":
                pages = _gather(part.view, ids)
                quantized, scales = _fp8_places(part, out, at, len(ids))
                ops.quantize_pages(pages, part.scale_axes, FP8, out=(quantized, scales))
            else:
                _gather(part.view, ids, _typed(out, at, part.view.dtype, shape))
            at += _part_nbytes(part, len(ids), wire)

    def unpack(self, layer: int, ids: torch.Tensor, heads: range | None, wire: str, data: torch.Tensor) -> None:
        """The reverse: `data` into the pages `ids`, each named once."""
        at = 0
        for part in self._of(layer, heads):
            shape = (len(ids), *part.view.shape[1:])
            if wire == "packed_fp8":
                quantized, scales = _fp8_places(part, data, at, len(ids))
                pages = ops.dequantize_pages(quantized, scales, part.scale_axes, part.view.dtype)
            else:
                pages = _typed(data, at, part.view.dtype, shape)
            ops.scatter_pages(part.view, ids.to(part.view.device), pages)
            at += _part_nbytes(part, len(ids), wire)

    def _of(self, layer: int, heads: range | None) -> list[_Part]:
        found = self._parts.get((layer, heads))
        if found is None:
            num_pages, kv_heads, planes = self._planes[layer]
            parts = sorted((part for plane in planes for part in parts_of(plane)), key=lambda part: part.role)
            if heads is not None:
                parts = [narrow_heads(part, heads, kv_heads) for part in parts]
            found = [self._view(part, num_pages) for part in parts]
            self._parts[layer, heads] = found
        return found

    def _view(self, plane: Plane, num_pages: int) -> _Part:
        dtype = getattr(torch, plane.dtype)
        item = plane.item_nbytes
        if any(n % item for n in (plane.offset, plane.page_stride, *plane.strides)):
            raise Unsupported(f"plane {plane.role!r} is not aligned to its elements: it cannot be packed")
        storage = self._kv.storages[plane.storage]
        view = torch.empty(0, dtype=dtype, device=storage.device).set_(
            storage.untyped_storage(),
            plane.offset // item,
            (num_pages, *plane.shape),
            tuple(stride // item for stride in (plane.page_stride, *plane.strides)),
        )
        axes = "P" + plane.axes
        return _Part(view, [0, axes.index("H")] if "H" in axes else [0])


def _part_nbytes(part: _Part, count: int, wire: str) -> int:
    elements = count * prod(part.view.shape[1:])
    if wire != "packed_fp8":
        return _aligned(elements * part.view.element_size())
    return _aligned(elements) + _aligned(4 * _scales(part, count))


def _scales(part: _Part, count: int) -> int:
    return count * prod(part.view.shape[axis] for axis in part.scale_axes[1:])


def _fp8_places(part: _Part, data: torch.Tensor, at: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    shape = (count, *part.view.shape[1:])
    scales = (count, *(part.view.shape[axis] for axis in part.scale_axes[1:]))
    return _typed(data, at, FP8, shape), _typed(data, at + _aligned(prod(shape)), torch.float32, scales)


def _typed(data: torch.Tensor, at: int, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    return data[at : at + prod(shape) * dtype.itemsize].view(dtype).view(shape)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGN) * _ALIGN


def _gather(view: torch.Tensor, ids: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    return ops.gather_pages(view, ids.to(view.device), out=out)
