"""The memory that others read weights from: two slots for a node's tensors, and a board that says what is in them.

A slot has the node's local tensors one after another, contiguous, in the dtypes that travel, so who knows the manifest
knows every address. One slot holds the version that is current while the next one comes into the other.

The board is 64-bit words: for each slot which version it holds, under which plan it comes in, whether all of it is
there, how often something had to come again; and of each route how many chunks are there and how many of those are
proven. Whoever reads from a slot reads its words afterwards: a version that is still the same says that nothing was
overwritten meanwhile, and a chunk that is proven there is proven here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import torch

import torch_mooncake
from torch_mooncake.shared import empty
from torch_mooncake.tensors import DTYPES
from torch_mooncake.weights.shards import Ints, Manifest

SLOTS = 2
_ALIGN = 64
HEADER = 4  # words a slot: version, plan, complete, restarts
COUNTERS = 2  # words a route: chunks that are there, without a gap; of those, proven ones
MAX_ROUTES = 1 << 15  # of further routes a relay passes nothing on until it has all of the version
_WORDS = SLOTS * HEADER + SLOTS * MAX_ROUTES * COUNTERS


def offsets_of(manifest: Manifest) -> tuple[Ints, int]:
    """(offset of each local tensor in a slot, size of the slot), in bytes. ``manifest``: a packed one."""
    found = np.empty(len(manifest.locals), np.int64)
    at = 0
    for i, local in enumerate(manifest.locals):
        found[i] = at
        at += -(-math.prod(local.shape) * DTYPES[local.dtype] // _ALIGN) * _ALIGN
    return found, at


def header_offset(slot: int) -> int:
    return slot * HEADER * 8


def counter_offset(slot: int, route: int) -> int:
    return _counter(slot, route) * 8


def _counter(slot: int, route: int) -> int:
    return SLOTS * HEADER + (slot * MAX_ROUTES + route) * COUNTERS


class Arena:
    """Memory of one node, registered with its engine. ``close()`` when nobody shall read it any more."""

    def __init__(self, engine: torch_mooncake.Engine, manifest: Manifest) -> None:
        self.manifest = manifest
        self.offsets, self.nbytes = offsets_of(manifest)
        self._engine = engine
        self.slots = [empty((max(self.nbytes, 1),), torch.uint8) for _ in range(SLOTS)]
        self._board_memory = empty((_WORDS,), torch.int64).zero_()
        self.board = self._board_memory.numpy()
        self.regions = [engine.register(slot, writable=False, label="weights") for slot in self.slots]
        self.board_region = engine.register(self._board_memory, writable=False, label="weights board")

    def views(self, slot: int) -> dict[str, torch.Tensor]:
        """The local tensors in a slot, by name."""
        found = {}
        for local, offset in zip(self.manifest.locals, self.offsets.tolist(), strict=True):
            nbytes = math.prod(local.shape) * DTYPES[local.dtype]
            memory = self.slots[slot][offset : offset + nbytes]
            found[local.name] = memory.view(getattr(torch, local.dtype)).view(local.shape)
        return found

    def version(self, slot: int) -> int:
        return int(self.board[slot * HEADER])

    def begin(self, slot: int, plan: int = 0) -> None:
        """The slot is about to be overwritten: who reads from it will notice."""
        header = slot * HEADER
        self.board[header : header + HEADER] = 0
        self.board[_counter(slot, 0) : _counter(slot + 1, 0)] = 0
        self.board[header + 1] = plan

    def announce(self, slot: int, version: int) -> None:
        """From now on the slot holds this version, or what has come of it."""
        self.board[slot * HEADER] = version

    def count(self, slot: int, route: int, there: int, proven: int) -> None:
        if route < MAX_ROUTES:
            at = _counter(slot, route)
            self.board[at], self.board[at + 1] = there, proven

    def restart(self, slot: int) -> None:
        """Chunks that were there come again: who has read them drops them."""
        self.board[slot * HEADER + 3] += 1

    def complete(self, slot: int) -> None:
        self.board[slot * HEADER + 2] = 1

    def close(self, timeout: float = 30) -> None:
        for region in (*self.regions, self.board_region):
            self._engine.deregister(region, timeout)


@torch.no_grad()
def copy_tensors(targets: Mapping[str, torch.Tensor], values: Mapping[str, torch.Tensor]) -> int:
    """Copies values into the targets of the same names (converting dtypes); bytes of the targets."""
    nbytes = 0
    for name, value in values.items():
        target = targets[name]
        target.copy_(value)
        nbytes += target.nbytes
    return nbytes
