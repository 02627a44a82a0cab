"""Manifests of tensors: plain ones, DTensors (FSDP2 among them), and plain ones under declared rules."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import numpy as np
import torch

from torch_mooncake import sharding
from torch_mooncake.errors import InvalidArgument, LayoutMismatch
from torch_mooncake.tensors import DTYPES
from torch_mooncake.weights.layout import Layout
from torch_mooncake.weights.manifest import tensors_of
from torch_mooncake.weights.quantise import quantised_manifest
from torch_mooncake.weights.shards import Local, Manifest, Piece, Whole, listed


def describe(
    model_or_state_dict: torch.nn.Module | Mapping[str, torch.Tensor], layout: Layout | None = None
) -> Manifest:
    """What this process holds of the weights.

    A DTensor is a part of the tensor of its name, as its placements say (``Shard``, ``_StridedShard``, ``Replicate``,
    on any mesh); what FSDP2 makes are such. A plain tensor is whole, unless a rule of ``layout`` says otherwise. Tied
    tensors are described once. Any strides will do.

    TypeError for what are no tensors. LayoutMismatch, with the first ten differences: shapes that are not what a rule
    makes, two tensors that claim the same elements under one name, partial sums, dtypes that do not travel.
    """
    return described(tensors_of(model_or_state_dict), layout)


def described(
    tensors: Mapping[str, torch.Tensor], layout: Layout | None, *, packed: bool | Collection[str] = False
) -> Manifest:
    """``packed``: as if each local tensor (or each of these) were contiguous and of the dtype that travels."""
    found = _Found(packed)
    problems: list[str] = []
    for name, tensor in tensors.items():
        try:
            found.add(name, tensor, layout)
        except (LayoutMismatch, InvalidArgument) as error:
            if isinstance(error, InvalidArgument) and not sharding.is_dtensor(tensor):
                raise  # the layout is wrong, not the tensor
            text = str(error)
            problems.append(text if text.startswith(f"{name}:") else f"{name}: {text}")
    if problems:
        raise LayoutMismatch(listed("the weights cannot be described", problems))
    return quantised_manifest(found.manifest(), layout, packed)


class _Found:
    def __init__(self, packed: bool | Collection[str]) -> None:
        self._packed = packed
        self.wholes: dict[str, Whole] = {}
        self.index: dict[str, int] = {}
        self.locals: list[Local] = []
        self.pieces: list[Piece] = []
        self.aliases: dict[str, str] = {}
        self._places: dict[tuple[Any, ...], str] = {}

    def add(self, name: str, tensor: torch.Tensor, layout: Layout | None) -> None:
        here = tensor.to_local() if sharding.is_dtensor(tensor) else tensor  # type: ignore[attr-defined]
        dtype = str(here.dtype).removeprefix("torch.")
        if dtype not in DTYPES or here.layout is not torch.strided:
            raise LayoutMismatch(f"{name}: {dtype} tensors of {here.layout} do not travel")
        rule = None if layout is None else layout.rule_for(name)
        if sharding.is_dtensor(tensor):
            if rule is not None:
                raise LayoutMismatch(f"{name}: a DTensor says itself what it is; a rule names it, too")
            self._whole(name, name, Whole(name, tuple(tensor.shape), dtype))
            if not self._tied(name, here):
                self._dtensor(name, tensor, here, dtype)
        elif rule is None:
            self._whole(name, name, Whole(name, tuple(here.shape), dtype))
            if not self._tied(name, here):
                local = self._local(name, here, dtype)
                if here.numel():
                    self._piece(name, local, (0,) * here.dim(), tuple(here.shape), 0, self._stride(name, here))
        else:
            assert layout is not None
            held = layout.held(rule[0], rule[1], name, here.shape, self._stride(name, here))
            for part in held:
                self._whole(name, part.name, Whole(part.name, part.shape, rule[0].dtype or dtype))
            if len(held) == 1 and self._tied(held[0].name, here):
                return
            local = self._local(name, here, (rule[0].dtype or dtype) if self._is_packed(name) else dtype)
            for part in held:
                if 0 not in part.size:
                    self._piece(part.name, local, part.start, part.size, part.offset, part.stride)

    def _dtensor(self, name: str, tensor: Any, here: torch.Tensor, dtype: str) -> None:
        box = sharding.share_of(tensor).box
        if box.shape != tuple(here.shape):
            raise LayoutMismatch(f"{name}: {list(here.shape)} here, {list(box.shape)} by its placements")
        local = self._local(name, here, dtype)
        if not here.numel():
            return
        strides = self._stride(name, here)
        for runs in itertools.product(*map(_with_local, box.runs)):
            offset = sum(at * stride for (_, _, at), stride in zip(runs, strides, strict=True))
            start, size = tuple(first for first, _, _ in runs), tuple(n for _, n, _ in runs)
            self._piece(name, local, start, size, offset, strides)

    def _is_packed(self, name: str) -> bool:
        return self._packed if isinstance(self._packed, bool) else name in self._packed

    def _stride(self, name: str, here: torch.Tensor) -> tuple[int, ...]:
        return sharding.contiguous_strides(here.shape) if self._is_packed(name) else here.stride()

    def _whole(self, local: str, name: str, whole: Whole) -> None:
        known = self.wholes.setdefault(name, whole)
        if known != whole:
            shape, dtype = list(known.shape), known.dtype
            raise LayoutMismatch(f"{local}: {name} is {whole.dtype}{list(whole.shape)} here, {dtype}{shape} elsewhere")
        self.index.setdefault(name, len(self.index))

    def _local(self, name: str, tensor: torch.Tensor, dtype: str) -> int:
        self.locals.append(Local(name, tuple(tensor.shape), dtype))
        return len(self.locals) - 1

    def _tied(self, name: str, here: torch.Tensor) -> bool:
        """Whether its bytes are exactly those of an earlier tensor."""
        if not here.numel():
            return False
        place = (here.data_ptr(), here.dtype, tuple(here.shape), here.stride())
        first = self._places.setdefault(place, name)
        if first == name or self.wholes[first].shape != self.wholes[name].shape:
            return False
        self.aliases[name] = first
        return True

    def _piece(
        self,
        name: str,
        local: int,
        start: tuple[int, ...],
        size: tuple[int, ...],
        offset: int,
        stride: tuple[int, ...],
    ) -> None:
        self.pieces.append(Piece(self.index[name], local, start, size, offset, stride))

    def manifest(self) -> Manifest:
        manifest = Manifest.of(self.wholes.values(), self.locals, self.pieces, self.aliases)
        if doubled := _doubled(manifest):
            raise LayoutMismatch(listed("the weights cannot be described", doubled))
        return manifest


def _with_local(runs: sharding.Runs) -> Iterator[tuple[int, int, int]]:
    """(first global index, length, first local index) of each run."""
    at = 0
    for first, length in runs:
        yield first, length, at
        at += length


def _doubled(manifest: Manifest) -> list[str]:
    """Wholes of which two pieces hold the same element."""
    by_whole: dict[int, list[int]] = {}
    several = np.bincount(manifest.whole) > 1 if len(manifest.whole) else np.empty(0, np.bool_)
    for row in np.flatnonzero(several[manifest.whole]).tolist():
        by_whole.setdefault(int(manifest.whole[row]), []).append(row)
    found = []
    for whole, rows in by_whole.items():
        start, end = manifest.start[rows], manifest.start[rows] + manifest.size[rows]
        for i in range(1, len(rows)):
            meet = (np.maximum(start[:i], start[i]) < np.minimum(end[:i], end[i])).all(axis=1)
            if meet.any():
                other = manifest.locals[int(manifest.local[rows[int(meet.argmax())]])].name
                mine = manifest.locals[int(manifest.local[rows[i]])].name
                found.append(f"{mine}: holds elements of {manifest.wholes[whole].name} that {other} holds, too")
                break
    return found
