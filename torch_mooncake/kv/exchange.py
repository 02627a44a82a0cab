"""Who sends what where: the bytes that two caches of different layout or tensor-parallel degree have in common.

exchange.runs(ours, our_ids, theirs, their_ids)      the byte ranges of one rank to one rank, ready for a write
exchange.head_map(our_tp, their_tp, kv_heads)        which rank sends which of its heads to which rank
"""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from torch_mooncake.errors import InvalidArgument, LayoutMismatch
from torch_mooncake.kv.groups import Group, Plane, parts_of
from torch_mooncake.kv.layout import PagedKVLayout, narrow_heads
from torch_mooncake.kv.runs import Pair, Program, Runs, checked_ids, split_at

if TYPE_CHECKING:
    import torch

__all__ = ["Exchange", "HeadMove", "Runs", "head_map", "heads_of_rank", "incompatibilities", "runs", "total_heads"]


class HeadMove(NamedTuple):
    """Rank `our_rank` sends its local heads `our_heads` to `their_rank`, whose local heads `their_heads` they are."""

    our_rank: int
    our_heads: range
    their_rank: int
    their_heads: range


def heads_of_rank(tp_rank: int, tp_size: int, kv_heads: int) -> range:
    """The model's heads that a rank holds: a tensor-parallel degree divides the heads or is a multiple of them.
    InvalidArgument otherwise."""
    if tp_size < 1 or kv_heads < 1 or (kv_heads % tp_size and tp_size % kv_heads):
        raise InvalidArgument(f"{kv_heads} KV heads cannot be divided between, or repeated on, {tp_size} ranks")
    first = tp_rank * kv_heads // tp_size
    return range(first, first + max(1, kv_heads // tp_size))


def head_map(our_tp: int, their_tp: int, kv_heads: int) -> list[HeadMove]:
    """Every head of every one of their ranks, from exactly one of ours, in the order of their ranks.

    Where several of our ranks hold a head and several of theirs want it, theirs are dealt out to ours in turn.
    """
    per_rank = max(1, kv_heads // our_tp)
    copies = max(1, our_tp // kv_heads)
    their_copies = max(1, their_tp // kv_heads)
    heads_of_rank(0, our_tp, kv_heads)
    moves = []
    for their_rank in range(their_tp):
        wanted = heads_of_rank(their_rank, their_tp, kv_heads)
        head = wanted.start
        while head < wanted.stop:
            holder = head // per_rank  # which of our slices
            stop = min(wanted.stop, (holder + 1) * per_rank)
            our_rank = holder * copies + their_rank % their_copies % copies
            local = range(head - holder * per_rank, stop - holder * per_rank)
            moves.append(HeadMove(our_rank, local, their_rank, range(head - wanted.start, stop - wanted.start)))
            head = stop
    return moves


def total_heads(our_heads: int, our_tp: int, their_heads: int, their_tp: int) -> int:
    """KV heads of the model, from how many each rank of the two sides holds; 0 when they cannot be of one model.

    A side with one head a rank may hold any divisor of its ranks; the largest that fits both is right for every case:
    ranks that hold the same head under it hold the same head under each of its divisors.
    """
    if our_heads == 1 and their_heads == 1:
        return gcd(our_tp, their_tp)
    total = our_heads * our_tp if our_heads > 1 else their_heads * their_tp
    fits = all(
        heads * tp == total or (heads == 1 and tp % total == 0)
        for heads, tp in ((our_heads, our_tp), (their_heads, their_tp))
    )
    return total if fits else 0


def incompatibilities(ours: PagedKVLayout, theirs: PagedKVLayout, our_tp: int = 1, their_tp: int = 1) -> list[str]:
    """See `PagedKVLayout.incompatibilities`."""
    if len(ours.groups) != len(theirs.groups):
        return [f"groups {len(ours.groups)} here, {len(theirs.groups)} there"]
    texts = []
    for index, (here, there) in enumerate(zip(ours.groups, theirs.groups, strict=True)):
        where = f" of group {index} ({here.name})" if len(ours.groups) > 1 else ""
        texts += [text + where for text in _group_incompatibilities(here, there, our_tp, their_tp)]
    return texts


def _group_incompatibilities(ours: Group, theirs: Group, our_tp: int, their_tp: int) -> list[str]:
    texts = []
    for name in ("kind", "page_size", "head_dim", "dtype", "layer_ids"):
        here, there = getattr(ours, name), getattr(theirs, name)
        if here != there:
            if name == "layer_ids" and len(here) != len(there):
                name, here, there = "num_layers", len(here), len(there)
            texts.append(f"{name} {here} here, {there} there")
    divided = ours.kind == "attention" and not ours.replicated
    if divided and not total_heads(ours.kv_heads, our_tp, theirs.kv_heads, their_tp):
        texts.append(
            f"kv_heads {ours.kv_heads} on each of {our_tp} ranks here, "
            f"{theirs.kv_heads} on each of {their_tp} ranks there"
            if (our_tp, their_tp) != (1, 1)
            else f"kv_heads {ours.kv_heads} here, {theirs.kv_heads} there"
        )
    if not divided and ours.kv_heads != theirs.kv_heads:
        texts.append(f"kv_heads {ours.kv_heads} here, {theirs.kv_heads} there")
    if not texts:
        resharded = divided and (our_tp, ours.kv_heads) != (their_tp, theirs.kv_heads)
        for (layer, here), (_, there) in zip(ours.layers, theirs.layers, strict=True):
            if text := _plane_incompatibility(here, there, resharded):
                return [f"layer {layer}: {text}"]
    return texts


def _plane_incompatibility(ours: Sequence[Plane], theirs: Sequence[Plane], resharded: bool) -> str:
    here, there = _parts(ours), _parts(theirs)
    if here.keys() != there.keys():
        return f"planes {', '.join(here)} here, {', '.join(there)} there"
    for role, plane in here.items():
        sizes = [(p.size("N"), p.size("D"), p.dtype) for p in (plane, there[role])]
        if sizes[0] != sizes[1]:
            return f"plane {role} (tokens, elements, dtype) {sizes[0]} here, {sizes[1]} there"
        if resharded and not ("H" in plane.axes and "H" in there[role].axes):
            return f"plane {role} has no head axis to reshard"
    return ""


class Exchange:
    """The runs between two layouts, prepared for many calls. `ours` and `theirs` are one rank's layout each;
    `our_heads` and `their_heads` the local heads that match (a `HeadMove` has them; None: all).

    LayoutMismatch when a part of a page has no counterpart of its role, sizes and dtype. Immutable; any thread.
    """

    def __init__(
        self,
        ours: PagedKVLayout,
        theirs: PagedKVLayout,
        layers: Sequence[int] | None = None,
        our_heads: range | None = None,
        their_heads: range | None = None,
        group: int = 0,
    ) -> None:
        self._ours, self._theirs = ours.group(group), theirs.group(group)
        self._boundaries = ours.boundaries, theirs.boundaries
        ids = self._ours.layer_ids if layers is None else layers
        chosen = zip(ids, self._ours.chosen(ids), self._theirs.chosen(ids), strict=True)
        heads = our_heads or range(self._ours.kv_heads), their_heads or range(self._theirs.kv_heads)
        self._program = Program([self._pairs(layer, a, b, *heads) for layer, a, b in chosen])

    def runs(self, our_ids: object, their_ids: object) -> Runs:
        """Page `our_ids[i]` there is page `their_ids[i]`. Ids may repeat: whoever writes sees to it that no page is a
        target twice. OutOfBounds names the position and value of an id that is no page."""
        here, there = checked_ids(our_ids, self._ours.num_pages), checked_ids(their_ids, self._theirs.num_pages)
        if len(here) != len(there):
            raise InvalidArgument(f"{len(here)} of our pages, but {len(there)} of theirs")
        return split_at(self._program.runs(here, there), *self._boundaries)

    def _pairs(
        self, layer: int, ours: Sequence[Plane], theirs: Sequence[Plane], our_heads: range, their_heads: range
    ) -> list[Pair]:
        here, there = _parts(ours), _parts(theirs)
        if here.keys() != there.keys():
            raise LayoutMismatch(f"layer {layer}: planes {', '.join(here)} here, {', '.join(there)} there")
        pairs = []
        for role, plane in here.items():
            pair = Pair(
                narrow_heads(plane, our_heads, self._ours.kv_heads),
                narrow_heads(there[role], their_heads, self._theirs.kv_heads),
            )
            for name in ("dtype", *"NHD"):
                a, b = (getattr(p, name) if name == "dtype" else p.size(name) for p in pair)
                if a != b:
                    raise LayoutMismatch(f"layer {layer}, plane {role}: {name} {a} here, {b} there")
            pairs.append(pair)
        return pairs


def runs(
    ours: PagedKVLayout,
    our_ids: Sequence[int] | np.ndarray | torch.Tensor,
    theirs: PagedKVLayout,
    their_ids: Sequence[int] | np.ndarray | torch.Tensor,
    layers: Sequence[int] | None = None,
    our_heads: range | None = None,
    their_heads: range | None = None,
    group: int = 0,
) -> Runs:
    """The longest byte ranges that are contiguous on both sides and together hold `our_ids[i]` = `their_ids[i]` of
    `layers` (the model's numbers; None: all), heads `our_heads` = `their_heads`. See `Exchange`."""
    return Exchange(ours, theirs, layers, our_heads, their_heads, group).runs(our_ids, their_ids)


def _parts(planes: Sequence[Plane]) -> dict[str, Plane]:
    return {part.role: part for plane in planes for part in parts_of(plane)}
