"""What has changed since the version before, instead of the version: a blob for each chunk of the plan.

The trainer that a chunk leaves first makes its blob (``ops.delta_encode_ranges``) of the two slots that hold the two
versions, and puts it into an area beside the new one. The board says of each chunk where its blob lies there, or that
it has none: too much has changed. Whoever has the base version whole takes the blobs that there are and makes the chunk
of its own base and the blob; of the others, and wherever anything is wrong with a blob, it takes the chunk itself. A
chunk's elements have one order on all nodes, so a blob is for all of them, and relays pass it on as it came.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from torch_mooncake import ops
from torch_mooncake.regions import Region
from torch_mooncake.shared import empty
from torch_mooncake.tensors import DTYPES
from torch_mooncake.transfer import Engine
from torch_mooncake.weights.arena import Arena
from torch_mooncake.weights.board import BLOBS, COMPLETE, MAX_CHUNKS, VERSION
from torch_mooncake.weights.plan import Plan
from torch_mooncake.weights.shards import Ints

PART = 8  # a blob has at most this part of its chunk's bytes, and so has the area of the slot
_ALIGN = 64


@dataclass(frozen=True)
class Blob:
    """Where a blob lies in a slot's area; bytes."""

    offset: int
    nbytes: int

    def to_word(self) -> int:
        return self.nbytes << 32 | self.offset // _ALIGN

    @classmethod
    def of_word(cls, word: int) -> Blob | None:
        """None: there is none, and none will be. ``word`` is not 0: that says that it is not known yet."""
        return cls((word & 0xFFFFFFFF) * _ALIGN, word >> 32) if word > 0 else None


class Area:
    """Memory for the blobs beside each slot of an arena, as far as it is needed. One thread at a time a slot."""

    def __init__(self, engine: Engine, arena: Arena) -> None:
        self._engine, self._arena, self._board = engine, arena, arena.board
        self._memory: dict[int, torch.Tensor] = {}
        self._regions: dict[int, Region] = {}
        self._used: dict[int, int] = {}

    def begin(self, slot: int) -> None:
        """Of another version from now on. The board has to say so before."""
        self._used[slot] = 0
        if slot not in self._memory:
            self._memory[slot] = empty((self._arena.nbytes // PART + _ALIGN,), torch.uint8)
            region = self._engine.register(self._memory[slot], writable=False, label="weights deltas")
            self._regions[slot] = region
            self._board.describe(slot, BLOBS, region.descriptor())

    def region(self, slot: int) -> Region:
        return self._regions[slot]

    def room(self, slot: int, nbytes: int) -> Blob | None:
        """A place for so many bytes; None if there is none left."""
        offset = self._used[slot]
        if nbytes > len(self._memory[slot]) - offset:
            return None
        self._used[slot] = offset + -(-nbytes // _ALIGN) * _ALIGN
        return Blob(offset, nbytes)

    def holds(self, version: int) -> int | None:
        """The slot that has all of a version."""
        header = self._board.header
        found = np.flatnonzero((header[:, VERSION] == version) & (header[:, COMPLETE] == 1))
        return int(found[0]) if len(found) else None

    def make(self, slot: int, base: int, at: Ints, lengths: Ints, itemsize: int) -> Blob | None:
        """The blob of a chunk, of the slots ``base`` and ``slot``; None if there is too much of it."""
        limit = int(lengths.sum()) // PART
        if limit >= 1 << 31:
            return None
        ranges = torch.from_numpy(at), torch.from_numpy(lengths)
        made = ops.delta_encode_ranges(
            self._arena.memory(base), self._arena.memory(slot), *ranges, itemsize, limit=limit
        )
        place = None if made is None else self.room(slot, made.numel())
        if made is not None and place is not None:
            self.bytes(slot, place).copy_(made)
        return place

    def apply(self, slot: int, base: int, blob: Blob, at: Ints, lengths: Ints) -> bool:
        """Makes a chunk of the base's and the blob. False: the blob is not one of this chunk's, or it was damaged."""
        ranges = torch.from_numpy(at), torch.from_numpy(lengths)
        try:
            ops.delta_apply_ranges(
                self.bytes(slot, blob), self._arena.memory(slot), *ranges, base=self._arena.memory(base)
            )
        except ValueError:
            return False
        return True

    def bytes(self, slot: int, blob: Blob) -> torch.Tensor:
        return self._memory[slot][blob.offset : blob.offset + blob.nbytes]

    def close(self, timeout: float = 30) -> None:
        for region in self._regions.values():
            self._engine.deregister(region, timeout)


def itemsizes(plan: Plan) -> Ints:
    """Of each chunk: bytes of the smallest elements in it, of which a blob counts."""
    sizes = np.array([DTYPES[whole.dtype] for whole in plan.wholes] or [1], np.int64)[plan.piece_whole]
    firsts = np.searchsorted(plan.piece_chunk, np.arange(len(plan.chunk_route)))
    found = np.minimum.reduceat(sizes, firsts) if len(firsts) else sizes
    return np.asarray(np.minimum(found, 8), np.int64)


class Maker:
    """Makes the blobs of a trainer's chunks, on the thread that makes their checksums."""

    def __init__(self, area: Area) -> None:
        self._area = area
        self._made = 0, 0  # (version, bytes of its blobs)

    def begin(self, slot: int, version: int) -> None:
        self._area.begin(slot)
        self._made = version, 0

    def nbytes(self, version: int) -> int:
        """Of the blobs of a version that were made by now."""
        of, nbytes = self._made
        return nbytes if of == version else 0

    def word(
        self, slot: int, against: int, number: int, at: Ints, lengths: Ints, itemsize: int, still: Callable[[], bool]
    ) -> int:
        """What the board has to say of a chunk. ``against``: the base version. ``still()``: the slot has not been given
        to another version."""
        base = self._area.holds(against)
        if number >= MAX_CHUNKS or base is None or base == slot:
            return -1
        blob = self._area.make(slot, base, at, lengths, itemsize)
        if blob is None or self._area.holds(against) != base or not still():
            return -1
        self._made = self._made[0], self._made[1] + blob.nbytes
        return blob.to_word()


class Taker:
    """One fetch's part: ``slot`` is made of ``base``, another slot that has all of the base version. ``everywhere``:
    also of nodes of this host, from which a copy is the quicker way."""

    def __init__(self, area: Area, slot: int, base: int, everywhere: bool) -> None:
        self._area, self.slot, self._base, self.everywhere = area, slot, base, everywhere
        self._in_full: set[int] = set()  # chunks that are taken in full, whatever blob there is

    def begin(self) -> None:
        self._area.begin(self.slot)

    def wanted(self, chunk: int) -> bool:
        return chunk < MAX_CHUNKS and chunk not in self._in_full

    def in_full(self, chunk: int) -> None:
        self._in_full.add(chunk)

    def room(self, blob: Blob, most: int) -> Blob | None:
        """A place for an upstream's blob of a chunk of ``most`` bytes; None if it is to be taken in full."""
        return self._area.room(self.slot, blob.nbytes) if 0 < blob.nbytes <= most else None

    def region(self) -> Region:
        return self._area.region(self.slot)

    def apply(self, blob: Blob, at: Ints, lengths: Ints) -> bool:
        return self._area.apply(self.slot, self._base, blob, at, lengths)
