"""Weights in 8 bits on the way, as FP8 checkpoints have them: quantised by the publisher while it copies into its slot.

A whole tensor that is to be quantised becomes two: itself in float8_e4m3fn, and its float32 scales, one for each block,
under its name and a suffix. Subscribers have both, as tensors of their own. What a shard holds has to be whole blocks,
so that everybody who has an element makes the same bits of it: a shard that cuts one is refused.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from torch_mooncake import sharding
from torch_mooncake.errors import InvalidArgument
from torch_mooncake.weights.arena import copy_tensors
from torch_mooncake.weights.formats import Fp8
from torch_mooncake.weights.shards import Local, Manifest, Piece, Whole

if TYPE_CHECKING:
    from torch_mooncake.weights.layout import Layout

FP8 = "float8_e4m3fn"
_WIDE = ("float32", "float16", "bfloat16")


@dataclass(frozen=True)
class Box:
    """A box of a whole in a contiguous local tensor (as ``Piece``), and its scales: a box of the whole of those, in the
    local tensor of scales."""

    size: tuple[int, ...]
    offset: int
    stride: tuple[int, ...]
    block: tuple[int, int]
    scales_whole: str
    scales_start: tuple[int, ...]
    scales: tuple[int, ...]  # size
    scales_offset: int


@dataclass
class Quantised:
    """One local tensor that is quantised: its boxes, and the local tensor of their scales."""

    scales: str  # name
    boxes: list[Box] = field(default_factory=list)


def quantised_manifest(manifest: Manifest, layout: Layout | None, packed: bool | Collection[str]) -> Manifest:
    """The manifest with what ``layout`` says is quantised, and its scales. InvalidArgument, naming the tensor: a whole
    without rows and columns or of another dtype than float32, float16 or bfloat16, a shard that cuts a block, tensors
    that are tied or fused and not quantised alike, a name that is taken."""
    if layout is None or not layout.quantise:
        return manifest
    formats = {whole.name: layout.format_of(whole.name) for whole in manifest.wholes}
    _check(manifest, formats)
    wholes, locals, pieces = list(manifest.wholes), list(manifest.locals), manifest.pieces()
    for i, whole in enumerate(manifest.wholes):
        form = formats[whole.name]
        if form is not None:
            wholes[i] = whole._replace(dtype=FP8)
            wholes.append(Whole(whole.name + form.suffix, _scales_shape(whole.shape, form), "float32"))
    of_whole = {whole.name: i for i, whole in enumerate(wholes)}
    for number, found in _quantised(manifest, formats).items():
        local = locals[number]
        is_packed = packed if isinstance(packed, bool) else local.name in packed
        locals[number] = local._replace(dtype=FP8 if is_packed else local.dtype)
        locals.append(Local(found.scales, (sum(math.prod(box.scales) for box in found.boxes),), "float32"))
        for box in found.boxes:
            stride = sharding.contiguous_strides(box.scales)
            place = len(locals) - 1, box.scales_start, box.scales, box.scales_offset, stride
            pieces.append(Piece(of_whole[box.scales_whole], *place))
    if len({local.name for local in locals}) < len(locals):
        raise InvalidArgument("names of scales are names of this process's tensors, too")
    aliases = dict(manifest.aliases)
    for name, first in manifest.aliases.items():
        form = formats.get(name)
        if form is not None:
            aliases[name + form.suffix] = first + form.suffix
    return Manifest.of(wholes, locals, pieces, aliases)


def quantised_locals(tensors: Mapping[str, torch.Tensor], layout: Layout | None) -> dict[str, Quantised]:
    """Local tensors that are quantised, by name. Errors as ``describe``."""
    from torch_mooncake.weights.describe import described

    if layout is None or not layout.quantise:
        return {}
    manifest = described(tensors, layout, packed=True)
    formats = {
        whole.name: layout.format_of(whole.name) if whole.dtype == FP8 else None  # not of scales
        for whole in manifest.wholes
    }
    return {manifest.locals[number].name: found for number, found in _quantised(manifest, formats).items()}


def _quantised(manifest: Manifest, formats: Mapping[str, Fp8 | None]) -> dict[int, Quantised]:
    """By the number of the local tensor."""
    found: dict[int, Quantised] = {}
    for piece in manifest.pieces():
        whole, local = manifest.wholes[piece.whole], manifest.locals[piece.local]
        form = formats[whole.name]
        if form is None:
            continue
        start, size = _blocks_of(whole, piece, form)
        boxes = found.setdefault(piece.local, Quantised(local.name + form.suffix)).boxes
        at = sum(math.prod(box.scales) for box in boxes)
        boxes.append(Box(piece.size, piece.offset, piece.stride, form.block, whole.name + form.suffix, start, size, at))
    return found


def _check(manifest: Manifest, formats: Mapping[str, Fp8 | None]) -> None:
    for whole in manifest.wholes:
        form = formats[whole.name]
        if form is None:
            continue
        if len(whole.shape) < 2 or whole.dtype not in _WIDE:
            kind = f"{whole.dtype}{list(whole.shape)}"
            raise InvalidArgument(f"{whole.name}: {kind} is not quantised; rows and columns of {', '.join(_WIDE)} are")
        if whole.name + form.suffix in formats:
            raise InvalidArgument(f"{whole.name + form.suffix}: a tensor of this name is there, and scales for it")
    for name, first in manifest.aliases.items():
        if formats.get(name) != formats.get(first):
            raise InvalidArgument(f"{name}: tied to {first}, and not quantised as that is")
    of_local: dict[int, str] = {}
    for whole_number, local in zip(manifest.whole.tolist(), manifest.local.tolist(), strict=True):
        name = manifest.wholes[whole_number].name
        first = of_local.setdefault(local, name)
        if formats[name] != formats[first]:
            raise InvalidArgument(f"{manifest.locals[local].name}: {first} and {name} in it are not quantised alike")


def _scales_shape(shape: Sequence[int], form: Fp8) -> tuple[int, ...]:
    last = (1 if step == -1 else -(-n // step) for n, step in zip(shape[-2:], form.block, strict=True))
    return (*shape[:-2], *last)


def _blocks_of(whole: Whole, piece: Piece, form: Fp8) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(start, size) of the scales that belong to a piece. InvalidArgument if it cuts a block."""
    start, size = list(piece.start), list(piece.size)
    for d, step in zip((-2, -1), form.block, strict=True):
        n = whole.shape[d]
        step = n if step == -1 else step
        end = start[d] + size[d]
        for at in (start[d], end):
            if at % step and at != n:
                what = "rows" if d == -2 else "columns"
                raise InvalidArgument(
                    f"{whole.name}: a shard has {what} {start[d]} to {end} of {n}, which cuts a block of {step} at {at}"
                )
        start[d], size[d] = start[d] // step, -(-end // step) - start[d] // step
    return tuple(start), tuple(size)


def copy_in(
    views: Mapping[str, torch.Tensor], values: Mapping[str, torch.Tensor], quantised: Mapping[str, Quantised]
) -> None:
    """This process's tensors into the views of a slot, by name: quantised, or as ``copy_tensors`` does."""
    made = {each.scales for each in quantised.values()}
    copy_tensors(views, {name: values[name] for name in views if name not in quantised and name not in made})
    for name, each in quantised.items():
        _fill(views[name], views[each.scales], values[name], each.boxes)


@torch.no_grad()
def _fill(q: torch.Tensor, scales: torch.Tensor, values: torch.Tensor, boxes: Sequence[Box]) -> None:
    """On the values' own device."""
    from torch_mooncake import ops

    values = values.contiguous()
    for box in boxes:
        wide = values.as_strided(box.size, box.stride, values.storage_offset() + box.offset)
        to = q.as_strided(box.size, box.stride, q.storage_offset() + box.offset)
        of_box = scales[box.scales_offset :][: math.prod(box.scales)].view(box.scales)
        if wide.is_cpu:
            ops.quantize_blocks(wide, box.block, out=(to, of_box))
        else:
            for there, made in zip((to, of_box), ops.quantize_blocks(wide, box.block), strict=True):
                there.copy_(made)
