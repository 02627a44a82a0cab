"""What a paged KV cache looks like in memory: groups of layers, their planes, the storages they lie in.

A layout is numbers only: it travels to the peers that read or write its pages. `PagedKV` makes one from tensors.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, NamedTuple

import numpy as np
import torch

from torch_mooncake.errors import InvalidArgument, OutOfBounds, Unsupported
from torch_mooncake.kv.groups import Group, Plane, parts_of, split_outermost
from torch_mooncake.kv.runs import Boundary, Int32s, Int64s, Pair, Program, checked_ids, covered, split_at


class Segments(NamedTuple):
    """Byte ranges by address, none touching the next unless at a boundary: arrays of one length."""

    storage: Int32s
    offset: Int64s  # bytes from the storage's start
    nbytes: Int64s


@dataclass(frozen=True)
class PagedKVLayout:
    """Groups, and the sizes of the storages their planes point into. Immutable; travels as `to_dict()`.

    Checked when made: every page of every plane lies within its storage. A layout from the wire is safe to do
    arithmetic with; whether the storages are as large as it says is for whoever opens them to compare.

    `boundaries`: one `(nbytes, first)` a storage when a transfer must not cross the bytes `first + k * nbytes`
    (TensorRT-LLM's mapped pools); empty when there are none.

    With one group its numbers can be asked of the layout: `page_size`, `kv_heads`, `num_pages`, ….
    """

    groups: tuple[Group, ...]
    storage_nbytes: tuple[int, ...]
    boundaries: tuple[Boundary, ...] = ()

    def __post_init__(self) -> None:
        if not self.groups:
            raise InvalidArgument("a paged KV layout needs at least one group")
        for nbytes in self.storage_nbytes:
            if type(nbytes) is not int or not 0 <= nbytes < 1 << 62:
                raise InvalidArgument(f"a storage has {nbytes!r} bytes")
        if self.boundaries and len(self.boundaries) != len(self.storage_nbytes):
            raise InvalidArgument(f"{len(self.boundaries)} boundaries for {len(self.storage_nbytes)} storages")
        for boundary in self.boundaries:
            if len(boundary) != 2 or any(type(n) is not int or not 0 <= n < 1 << 62 for n in boundary):
                raise InvalidArgument(f"{boundary!r} is not (bytes, offset of the first)")
        for group in self.groups:
            for layer, planes in group.layers:
                for plane in planes:
                    self._check_inside(f"group {group.name!r}, layer {layer}", plane, group.num_pages)

    def _check_inside(self, where: str, plane: Plane, num_pages: int) -> None:
        extent = plane.extent(num_pages)
        if plane.storage >= len(self.storage_nbytes):
            raise InvalidArgument(f"{where}: storage {plane.storage} of {len(self.storage_nbytes)}")
        nbytes = self.storage_nbytes[plane.storage]
        if extent and plane.offset + extent > nbytes:
            raise InvalidArgument(
                f"{where}: plane {plane.role!r} ends at byte {plane.offset + extent} of a storage of {nbytes} bytes"
            )

    # --- comparing ---

    def fingerprint(self) -> str:
        """16 hex digits: equal exactly when pages of the two can be exchanged byte for byte as they are. Includes the
        order inside a page, but not where pages lie, how many there are, or what groups are called."""
        content = json.dumps([group.content() for group in self.groups], sort_keys=True)
        return hashlib.blake2b(content.encode(), digest_size=8, person=b"tm-kv-layout-v2").hexdigest()

    def differences(self, other: PagedKVLayout) -> list[str]:
        """What differs, as "kv_heads 3 here, 4 there"; empty exactly when the fingerprints are equal."""
        if len(self.groups) != len(other.groups):
            return [f"groups {len(self.groups)} here, {len(other.groups)} there"]
        texts = []
        for index, (ours, theirs) in enumerate(zip(self.groups, other.groups, strict=True)):
            where = f" of group {index} ({ours.name})" if len(self.groups) > 1 else ""
            texts += [text + where for text in _content_differences(ours.content(), theirs.content())]
        return texts

    def incompatibilities(self, other: PagedKVLayout, tp_size: int = 1, other_tp_size: int = 1) -> list[str]:
        """What keeps the two from exchanging pages even with bytes reordered and heads moved between tensor-parallel
        ranks, as "page_size 16 here, 32 there"; empty when `exchange` can do it. Each layout is one rank's of its
        side, `tp_size` and `other_tp_size` how many ranks there are."""
        from torch_mooncake.kv.exchange import incompatibilities

        return incompatibilities(self, other, tp_size, other_tp_size)

    # --- addresses ---

    def segments(
        self, page_ids: Sequence[int] | np.ndarray | torch.Tensor, layers: Sequence[int] | None = None, group: int = 0
    ) -> Segments:
        """Bytes of the pages `page_ids` (n ids) of `layers` (the model's numbers; None: all of the group), each byte
        once, however often its page is named and however many layers share it. OutOfBounds names the position and
        value of an id that is no page, -1 included."""
        chosen = self.group(group)
        ids = np.unique(checked_ids(page_ids, chosen.num_pages))
        program = Program(
            [[Pair(p, p) for plane in planes for p in parts_of(plane)] for planes in chosen.chosen(layers)]
        )
        runs = split_at(covered(program.runs(ids, ids)), self.boundaries, ())
        return Segments(runs.our_storage, runs.our_offset, runs.nbytes)

    def group(self, index: int) -> Group:
        if not 0 <= index < len(self.groups):
            raise InvalidArgument(f"group {index} is not in 0..{len(self.groups) - 1}")
        return self.groups[index]

    def head_slice(self, tp_rank: int, tp_size: int, kv_heads: int | None = None) -> PagedKVLayout:
        """The layout narrowed to the heads that rank `tp_rank` of `tp_size` holds: same storages, other offsets and
        shapes. `tp_size` divides the heads, or is a multiple of them (each head is then held by several ranks);
        InvalidArgument otherwise. Groups that are the same on every rank (MLA, states, `replicated`) stay.

        `kv_heads`, if given, is checked to be what the layout holds.
        """
        from torch_mooncake.kv.exchange import heads_of_rank

        if not 0 <= tp_rank < tp_size:
            raise InvalidArgument(f"rank {tp_rank} is not in 0..{tp_size - 1}")
        groups = []
        for group in self.groups:
            if group.kind == "attention" and not group.replicated:
                if kv_heads is not None and kv_heads != group.kv_heads:
                    raise InvalidArgument(f"kv_heads is {kv_heads}, group {group.name!r} holds {group.kv_heads}")
                group = _narrowed(group, heads_of_rank(tp_rank, tp_size, group.kv_heads))
            groups.append(group)
        return replace(self, groups=tuple(groups))

    def packed(self, num_pages: int, group: int = 0) -> PagedKVLayout:
        """Pages of one group in one storage without gaps: page after page, in it layer after layer, each in this
        layout's order (same fingerprint, if there is no other group). What a page's bytes are as an object."""
        source = self.group(group)
        page_nbytes = sum(source.page_nbytes(place) for place in range(len(source.layers)))
        offset = 0
        layers = []
        for layer, planes in source.layers:
            out = []
            for part in sorted((p for plane in planes for p in split_outermost(plane)), key=lambda part: part.role):
                out.append(_dense(part, offset, page_nbytes))
                offset += part.nbytes
            layers.append((layer, tuple(out)))
        return PagedKVLayout((replace(source, layers=tuple(layers), num_pages=num_pages),), (page_nbytes * num_pages,))

    # --- on the wire ---

    def to_dict(self) -> dict[str, Any]:
        """Ints, strings, bools, None, lists, dicts and tuples: what msgpack and JSON carry."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Any) -> PagedKVLayout:
        """The layout that `to_dict` gave, after any transport. InvalidArgument for anything else, wherever it comes
        from: no layout that is returned has a page outside its storages."""
        try:
            known = _fields(cls, values)
            groups = []
            for group in known["groups"]:
                group = _fields(Group, group)
                layers = [(layer, tuple(map(_plane, planes))) for layer, planes in group["layers"]]
                groups.append(Group(**{**group, "layers": tuple(layers)}))
            boundaries = tuple(tuple(pair) for pair in known["boundaries"])
            return cls(tuple(groups), tuple(known["storage_nbytes"]), boundaries)
        except (TypeError, ValueError, KeyError) as error:
            if isinstance(error, InvalidArgument):
                raise
            raise InvalidArgument(f"not a paged KV layout: {error}") from error

    # --- of the only group ---

    @property
    def only(self) -> Group:
        """The group, when there is one; Unsupported names the others otherwise."""
        if len(self.groups) != 1:
            raise Unsupported(f"the layout has {len(self.groups)} groups: {', '.join(g.name for g in self.groups)}")
        return self.groups[0]

    @property
    def num_layers(self) -> int:
        """Of all groups together."""
        return len({layer for group in self.groups for layer in group.layer_ids})

    @property
    def page_size(self) -> int:
        return self.only.page_size

    @property
    def kv_heads(self) -> int:
        return self.only.kv_heads

    @property
    def head_dim(self) -> int:
        return self.only.head_dim

    @property
    def dtype(self) -> str:
        return self.only.dtype

    @property
    def num_pages(self) -> int:
        return self.only.num_pages

    @property
    def page_nbytes(self) -> int:
        """Of one page of one layer; Unsupported when layers differ."""
        sizes = {self.only.page_nbytes(place) for place in range(len(self.only.layers))}
        if len(sizes) > 1:
            raise Unsupported(f"pages of the layers have different sizes: {sorted(sizes)} bytes")
        return sizes.pop()

    @property
    def page_axes(self) -> str:
        """Order of the bytes in a page of the first layer, "k:NHD v:NHD"."""
        return self.only.page_order(0)

    def page_ids(self, pages: Sequence[int] | torch.Tensor, group: int = 0) -> torch.Tensor:
        """`pages` as int64 [n], checked: OutOfBounds names the first id that is not a page of this cache."""
        return torch.from_numpy(checked_ids(pages, self.group(group).num_pages))


def _content_differences(ours: dict[str, Any], theirs: dict[str, Any]) -> list[str]:
    texts = []
    for name, here in ours.items():
        there = theirs[name]
        if here == there:
            continue
        if isinstance(here, list):
            if len(here) != len(there):
                continue  # num_layers says it
            here, there = next((a, b) for a, b in zip(here, there, strict=True) if a != b)
        texts.append(f"{name} {here} here, {there} there")
    return texts


def _narrowed(group: Group, heads: range) -> Group:
    layers = tuple(
        (layer, tuple(narrow_heads(p, heads, group.kv_heads) for p in planes)) for layer, planes in group.layers
    )
    return replace(group, layers=layers, kv_heads=len(heads))


def narrow_heads(plane: Plane, heads: range, kv_heads: int) -> Plane:
    """The plane with only the heads `heads` (of step one) of the group's `kv_heads`. Unsupported when it has no head
    axis to cut."""
    if heads == range(kv_heads):
        return plane
    if "H" not in plane.axes:
        raise Unsupported(f"plane {plane.role!r} has no head axis: it cannot be divided between ranks")
    if not 0 <= heads.start < heads.stop <= plane.size("H"):
        raise OutOfBounds(f"heads {heads.start}..{heads.stop - 1} are not in 0..{plane.size('H') - 1}")
    at = plane.axes.index("H")
    shape = (*plane.shape[:at], len(heads), *plane.shape[at + 1 :])
    return replace(plane, offset=plane.offset + heads.start * plane.strides[at], shape=shape)


def _dense(plane: Plane, offset: int, page_stride: int) -> Plane:
    """The plane without gaps, in its order, in storage 0."""
    strides = dict.fromkeys(plane.axes, plane.item_nbytes)
    step = plane.item_nbytes
    for letter in reversed(plane.order):
        strides[letter] = step
        step *= plane.size(letter)
    return replace(
        plane, storage=0, offset=offset, page_stride=page_stride, strides=tuple(strides[a] for a in plane.axes)
    )


def _fields(cls: type, values: Any) -> dict[str, Any]:
    """`values`, if it is a dict with exactly the fields of `cls`."""
    names = {field.name for field in fields(cls)}
    if not isinstance(values, dict) or set(values) != names:
        raise InvalidArgument(f"not a {cls.__name__}: {sorted(values) if isinstance(values, dict) else type(values)}")
    return values


def _plane(values: Any) -> Plane:
    known = _fields(Plane, values)
    return Plane(**{**known, "shape": tuple(known["shape"]), "strides": tuple(known["strides"])})
