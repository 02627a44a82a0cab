"""The runs of bytes between two caches, layer by layer: computed once for layers that lie alike.

A prompt's pages are the same in every layer, and layers mostly differ by their storage, or by a constant distance. So
the runs of the first layer serve for all others, moved.
"""

from __future__ import annotations

import threading
from typing import NamedTuple

import numpy as np

from torch_mooncake.kv import wire
from torch_mooncake.kv.exchange import Exchange
from torch_mooncake.kv.groups import Plane
from torch_mooncake.kv.layout import PagedKVLayout
from torch_mooncake.kv.plan import Feed
from torch_mooncake.kv.runs import Int64s, Runs


class Move(NamedTuple):
    """Runs between one storage of ours and one of theirs: int64 arrays of one length, or one size for all."""

    our_storage: int
    their_storage: int
    our_offset: Int64s
    their_offset: Int64s
    nbytes: Int64s


class _Kin(NamedTuple):
    """A layer as seen from the first one that lies alike."""

    first: int
    our_storage: int
    their_storage: int
    our_distance: int
    their_distance: int


class LayerRuns:
    """Between `ours` and `theirs`, one group of each, the heads that one rank gives the other. Any thread."""

    def __init__(
        self,
        ours: PagedKVLayout,
        theirs: PagedKVLayout,
        group: int,
        our_heads: range | None,
        their_heads: range | None,
    ) -> None:
        self._ours, self._theirs, self._group = ours, theirs, group
        self._heads = our_heads, their_heads
        self._exchanges: dict[int, Exchange] = {}
        self._kin = self._find_kin()
        self._lock = threading.Lock()
        self._latest: tuple[bytes, bytes, dict[int, list[Move]]] = (b"", b"", {})

    def moves(self, layer: int, our_ids: Int64s, their_ids: Int64s) -> list[Move]:
        """What moves `our_ids[i]` to or from `their_ids[i]`, in one layer."""
        key = our_ids.tobytes(), their_ids.tobytes()
        with self._lock:
            if self._latest[:2] != key:
                self._latest = (*key, {})
            known = self._latest[2]
        kin = self._kin.get(layer)
        if kin is None:
            return _by_storages(self._exchange(layer).runs(our_ids, their_ids))
        first = known.get(kin.first)
        if first is None:
            first = known[kin.first] = _by_storages(self._exchange(kin.first).runs(our_ids, their_ids))
        return [
            Move(
                kin.our_storage,
                kin.their_storage,
                move.our_offset + kin.our_distance if kin.our_distance else move.our_offset,
                move.their_offset + kin.their_distance if kin.their_distance else move.their_offset,
                move.nbytes,
            )
            for move in first
        ]

    def _exchange(self, layer: int) -> Exchange:
        found = self._exchanges.get(layer)
        if found is None:
            found = Exchange(self._ours, self._theirs, [layer], *self._heads, self._group)
            self._exchanges[layer] = found
        return found

    def _find_kin(self) -> dict[int, _Kin]:
        """Layers of one plane on both sides, without addresses that must not be crossed."""
        kin: dict[int, _Kin] = {}
        if self._ours.boundaries or self._theirs.boundaries:
            return kin
        firsts: dict[object, tuple[int, Plane, Plane]] = {}
        group, their_group = self._ours.group(self._group), self._theirs.group(self._group)
        for (layer, here), (_, there) in zip(group.layers, their_group.layers, strict=True):
            if len(here) != 1 or len(there) != 1:
                continue
            ours, theirs = here[0], there[0]
            first, base, their_base = firsts.setdefault((_alike(ours), _alike(theirs)), (layer, ours, theirs))
            distances = ours.offset - base.offset, theirs.offset - their_base.offset
            kin[layer] = _Kin(first, ours.storage, theirs.storage, *distances)
        return kin


def _alike(plane: Plane) -> object:
    return plane.role, plane.page_stride, plane.axes, plane.shape, plane.strides, plane.dtype


def _by_storages(runs: Runs) -> list[Move]:
    if not len(runs):
        return []
    pair = runs.our_storage.astype(np.int64) << 32 | runs.their_storage
    if (pair == pair[0]).all():
        storages = int(runs.our_storage[0]), int(runs.their_storage[0])
        return [Move(*storages, runs.our_offset, runs.their_offset, runs.nbytes)]
    out = []
    for one in np.unique(pair).tolist():
        chosen = pair == one
        arrays = (array[chosen] for array in (runs.our_offset, runs.their_offset, runs.nbytes))
        out.append(Move(one >> 32, one & 0xFFFFFFFF, *arrays))
    return out


_KEPT = 64  # layouts of others; there are as many as kinds of workers


class OtherLayouts:
    """Layouts of other sides, by the bytes they travelled as, and the runs between each and ours. The latest are kept:
    all tickets and notes of a side have the same. Any thread.

    `sending`: ours is the prefill side.
    """

    def __init__(self, ours: PagedKVLayout, *, sending: bool) -> None:
        self._ours, self._sending = ours, sending
        self._known: dict[bytes, tuple[PagedKVLayout, dict[tuple[int, range | None, range | None], LayerRuns]]] = {}
        self._lock = threading.Lock()

    def layout(self, data: bytes) -> PagedKVLayout:
        """InvalidArgument for bytes that are no layout."""
        with self._lock:
            known = self._known.get(data)
        return known[0] if known is not None else self._keep(data, PagedKVLayout.from_dict(wire.unpack_layout(data)))

    def runs(self, data: bytes, group: int, feed: Feed) -> LayerRuns:
        """Between ours and that one, the heads that `feed` names."""
        theirs = self.layout(data)
        ours, others = feed.source_heads, feed.sink_heads
        if not self._sending:
            ours, others = others, ours
        with self._lock:
            runs = self._known[data][1] if data in self._known else {}
            found = runs.get((group, ours, others))
            if found is None:
                found = runs[group, ours, others] = LayerRuns(self._ours, theirs, group, ours, others)
            return found

    def _keep(self, data: bytes, layout: PagedKVLayout) -> PagedKVLayout:
        with self._lock:
            while len(self._known) >= _KEPT:
                self._known.pop(next(iter(self._known)))
            return self._known.setdefault(data, (layout, {}))[0]
