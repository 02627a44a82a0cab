"""Pages of one group of a paged cache as objects: their bytes in the layout's own order, layer after layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from torch_mooncake import _core
from torch_mooncake.errors import Unsupported
from torch_mooncake.kv.cache import PagedKV
from torch_mooncake.kv.groups import Group, Plane, split_outermost
from torch_mooncake.kv.runs import inner_run


class Piece(NamedTuple):
    """Of page `p`: `nbytes` at `offset + p * page_stride` of a storage."""

    storage: int
    offset: int
    page_stride: int
    nbytes: int


class PageObjects:
    """What the pool's verbs take of a group: names of its content, and where its pages' bytes are.

    Unsupported: a cache that is not on the CPU. Keeps the cache's tensors.
    """

    def __init__(self, kv: PagedKV, group: int) -> None:
        if kv.device.type != "cpu":
            raise Unsupported("pages go to the pool from caches on the CPU only")
        self.group = kv.layout.group(group)
        self.index = group
        self.fingerprint = kv.layout.packed(0, group).fingerprint()
        self.dtype, self.shape = _described(self.group)
        addresses = [storage.data_ptr() for storage in kv.storages]
        layers = [
            [(addresses[piece.storage] + piece.offset, piece.page_stride, piece.nbytes) for piece in pieces_of(planes)]
            for _, planes in self.group.layers
        ]
        self.memory = _core.PagedMemory(layers, self.group.num_pages)
        self.nbytes: int = self.memory.object_nbytes
        self._kv = kv


def pieces_of(planes: Sequence[Plane]) -> list[Piece]:
    """The runs of one layer's page in the order in which its bytes make an object."""
    pieces: list[Piece] = []
    for part in sorted((p for plane in planes for p in split_outermost(plane)), key=lambda part: part.role):
        nbytes, steps = inner_run(part, part)
        offsets = np.array([part.offset], dtype=np.int64)
        for count, stride, _ in reversed(steps):  # the outermost first
            offsets = np.add.outer(offsets, np.arange(count, dtype=np.int64) * stride).reshape(-1)
        for offset in offsets.tolist():
            last = pieces[-1] if pieces else None
            here = Piece(part.storage, offset, part.page_stride, nbytes)
            if last is not None and last._replace(offset=offset, nbytes=nbytes) == here and _follows(last, here):
                pieces[-1] = last._replace(nbytes=last.nbytes + nbytes)
            else:
                pieces.append(here)
    return pieces


def _follows(one: Piece, two: Piece) -> bool:
    return two.offset == one.offset + one.nbytes


def _described(group: Group) -> tuple[torch.dtype, tuple[int, ...]]:
    """dtype and shape of an object, as a tensor: [layers, (2,) axes of a page longer than one, in their order] if that
    is what its bytes are, else bytes. The same for groups of the same content."""
    parts = [[p for plane in planes for p in split_outermost(plane)] for _, planes in group.layers]
    shapes = {tuple((p.role, p.dtype, p.order, tuple(p.size(a) for a in p.order)) for p in sorted(
        of, key=lambda p: p.role)) for of in parts}  # fmt: skip
    first = sorted(parts[0], key=lambda part: part.role)
    alike = len(shapes) == 1 and len({(p.dtype, p.order, p.nbytes) for p in first}) == 1
    if not alike or [p.role for p in first] not in (["k", "v"], [first[0].role]):
        nbytes = sum(group.page_nbytes(place) for place in range(len(group.layers)))
        return torch.uint8, (nbytes,)
    sizes = tuple(first[0].size(letter) for letter in first[0].order)
    both = (2,) if len(first) == 2 else ()
    return getattr(torch, first[0].dtype), (len(group.layers), *both, *sizes)
