"""What a node says about its slots: 64-bit words that others read, one-sided.

For each slot which version it holds, under which plan it comes in, whether all of it is there, how often something had
to come again, how far it is; of each route how many chunks are there and how many of those are proven; of each chunk
the checksum that its source made, and where what changed in it since the version before lies; and where memory lies
that the members' records do not name. Whoever reads from a slot reads its words afterwards: a version that is still the
same says that nothing was overwritten meanwhile, and a chunk that is proven there is proven here.
"""

from __future__ import annotations

import time

import numpy as np
import torch

from torch_mooncake.errors import Unsupported
from torch_mooncake.shared import empty
from torch_mooncake.weights.shards import Ints

MAX_SLOTS = 4
HEADER = 8  # words a slot, these:
VERSION = 0  # 0: nothing to be read; -v: version v was here and is to be read no more
PLAN = 1
COMPLETE = 2
RESTARTS = 3  # never fewer
NBYTES, DONE, ELAPSED_US = 4, 5, 6  # of the version that is coming
COUNTERS = 2  # words a route: chunks that are there, without a gap; of those, proven ones
MAX_ROUTES = 1 << 15  # of further routes a relay passes nothing on until it has all of the version
MAX_CHUNKS = 1 << 16  # further ones of a plan have no checksums
AREA = 512  # words of a descriptor: its length in bytes, then the bytes
SLOT_MEMORY, VIEW, BLOBS = 0, 1, 2  # kinds of descriptors
HAS_SUM = 1 << 32  # set where a checksum is
NO_SUM = 1 << 33  # a chunk that has none: nobody could say
NO_PLAN = -1  # of a source that could not make the plan, and so no checksums
WANTED = 1 << 62  # the version of a slot that is empty: whatever comes next is waited for

_AREAS = MAX_SLOTS * HEADER
_KINDS = 3
_COUNTERS = _AREAS + MAX_SLOTS * _KINDS * AREA
_SUMS = _COUNTERS + MAX_ROUTES * MAX_SLOTS * COUNTERS
_BLOBS = _SUMS + MAX_SLOTS * MAX_CHUNKS
_WORDS = _BLOBS + MAX_SLOTS * MAX_CHUNKS
HEADER_NBYTES = 8 * MAX_SLOTS * HEADER
COUNTER_NBYTES = 8 * MAX_SLOTS * COUNTERS  # of one route, all slots


def counter_offset(route: int) -> int:
    return (_COUNTERS + route * MAX_SLOTS * COUNTERS) * 8


def sum_offset(slot: int, chunk: int) -> int:
    return (_SUMS + slot * MAX_CHUNKS + chunk) * 8


def blob_offset(slot: int, chunk: int) -> int:
    return (_BLOBS + slot * MAX_CHUNKS + chunk) * 8


def area_offset(slot: int, kind: int) -> int:
    return (_AREAS + (slot * _KINDS + kind) * AREA) * 8


class Board:
    """The owner's side. One thread writes the words of a slot, but for ``put_sum`` and ``put_blob``."""

    def __init__(self) -> None:
        self.memory = empty((_WORDS,), torch.int64).zero_()
        words: Ints = self.memory.numpy()
        self.header = words[:_AREAS].reshape(MAX_SLOTS, HEADER)
        self._areas = words[_AREAS:_COUNTERS].reshape(MAX_SLOTS, _KINDS, AREA)
        self._counters = words[_COUNTERS:_SUMS].reshape(MAX_ROUTES, MAX_SLOTS, COUNTERS)
        self._sums = words[_SUMS:_BLOBS].reshape(MAX_SLOTS, MAX_CHUNKS)
        self._blobs = words[_BLOBS:].reshape(MAX_SLOTS, MAX_CHUNKS)
        self._routes, self._chunks = [0] * MAX_SLOTS, [0] * MAX_SLOTS  # how many of them are not nought
        self._began = [0.0] * MAX_SLOTS

    def version(self, slot: int) -> int:
        return int(self.header[slot, VERSION])

    def begin(self, slot: int, plan: int = 0, nbytes: int = 0) -> None:
        """The slot is about to be overwritten: who reads from it will notice."""
        row = self.header[slot]
        row[VERSION] = 0  # first
        row[RESTARTS] += 1  # if the same version comes again, it is not the one that somebody is reading
        row[[PLAN, COMPLETE, NBYTES, DONE, ELAPSED_US]] = 0
        self._counters[: self._routes[slot], slot] = 0
        self._sums[slot, : self._chunks[slot]] = 0
        self._blobs[slot, : self._chunks[slot]] = 0
        self._routes[slot] = self._chunks[slot] = 0
        row[PLAN], row[NBYTES] = plan, nbytes
        self._began[slot] = time.monotonic()

    def announce(self, slot: int, version: int) -> None:
        """From now on the slot holds this version, or what has come of it."""
        self.header[slot, VERSION] = version

    def withdraw(self, slot: int) -> None:
        """What the slot holds is to be read no more: who has read it and not looked at this word since drops it."""
        self.header[slot, VERSION] = -abs(int(self.header[slot, VERSION]))

    def count(self, slot: int, route: int, there: int, proven: int) -> None:
        if route < MAX_ROUTES:
            self._routes[slot] = max(self._routes[slot], route + 1)
            self._counters[route, slot] = there, proven

    def advance(self, slot: int, nbytes: int) -> None:
        """So much of the version has come."""
        self.header[slot, DONE] = nbytes
        self.header[slot, ELAPSED_US] = int((time.monotonic() - self._began[slot]) * 1e6)

    def restart(self, slot: int) -> None:
        """Chunks that were there come again: who has read them drops them."""
        self.header[slot, RESTARTS] += 1

    def complete(self, slot: int) -> None:
        self.header[slot, COMPLETE] = 1

    def set_plan(self, slot: int, plan: int) -> None:
        """The checksums that follow are of this plan's chunks."""
        self.header[slot, PLAN] = plan

    def put_sum(self, slot: int, chunk: int, crc: int | None) -> None:
        if chunk < MAX_CHUNKS:
            self._chunks[slot] = max(self._chunks[slot], chunk + 1)
            self._sums[slot, chunk] = NO_SUM if crc is None else crc | HAS_SUM

    def put_blob(self, slot: int, chunk: int, word: int) -> None:
        """``word``: see delta.Blob; negative: the chunk has none."""
        if chunk < MAX_CHUNKS:
            self._chunks[slot] = max(self._chunks[slot], chunk + 1)
            self._blobs[slot, chunk] = word

    def describe(self, slot: int, kind: int, descriptor: bytes) -> None:
        """Empty: there is none. Unsupported: it is longer than its place."""
        if len(descriptor) > 8 * (AREA - 1):
            raise Unsupported(f"a descriptor of {len(descriptor)} bytes; {8 * (AREA - 1)} have room on a board")
        area = self._areas[slot, kind]
        area[0] = 0
        area[1:].view(np.uint8)[: len(descriptor)] = np.frombuffer(descriptor, np.uint8)
        area[0] = len(descriptor)


def descriptor_in(area: Ints) -> bytes:
    """What ``describe`` put there."""
    nbytes = min(max(int(area[0]), 0), 8 * (AREA - 1))
    return area[1:].tobytes()[:nbytes]
