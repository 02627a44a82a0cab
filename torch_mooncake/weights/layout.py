"""Layouts of plain tensors, declared: which part of which global tensor a process's tensor holds.

Frameworks that shard by hand (tensor, expert and pipeline parallel) keep plain tensors that do not say what they are.
A ``Rule`` says it for all tensors whose names match:

    Layout(
        axes={"tp": (rank, 8), "ep": (rank, 8), "pp": (stage, 4)},
        rules=[
            Rule("layers.{i}.qkv.weight", shift={"i": ("pp", 16)}, parts=[
                Part("model.layers.{i}.q_proj.weight", (4096, -1), split=[Split("tp", 0)]),
                Part("model.layers.{i}.k_proj.weight", (512, -1), split=[Split("tp", 0, groups=4)]),
                Part("model.layers.{i}.v_proj.weight", (512, -1), split=[Split("tp", 0, groups=4)])]),
            Rule("layers.{i}.experts.w13", stack=Stack("e", 64, "ep"), parts=[
                Part("model.layers.{i}.experts.{e}.gate_proj.weight", (1024, -1)),
                Part("model.layers.{i}.experts.{e}.up_proj.weight", (1024, -1))]),
        ],
    )

Tensors that no rule names are whole and go by their own names.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from torch_mooncake.errors import InvalidArgument, LayoutMismatch
from torch_mooncake.sharding import chunks
from torch_mooncake.weights.formats import Fp8, checked

_CAPTURE = re.compile(r"\{(\w+)\}")


@dataclass(frozen=True)
class Split:
    """``dim`` of a global tensor is cut over ``axis``, as ``torch.chunk`` cuts. With ``groups`` it is cut into so many
    chunks, of which several ranks in a row hold the same: key/value heads, when there are fewer than ranks."""

    axis: str
    dim: int
    groups: int | None = None


@dataclass(frozen=True)
class Part:
    """A global tensor that the local one holds a part of. ``name`` may use the rule's captures. ``shape`` is global;
    -1 is what the local tensor has there, times the ranks it is split over."""

    name: str
    shape: tuple[int, ...] | None = None  # None: all -1
    split: Sequence[Split] = ()


@dataclass(frozen=True)
class Stack:
    """The first dimension of the local tensor counts global tensors: ``capture`` runs over this rank's chunk of
    ``range(count)`` along ``axis`` (None: over all)."""

    capture: str
    count: int
    axis: str | None = None


@dataclass(frozen=True)
class Rule:
    """``match``: names of local tensors, with ``{captures}`` that stand for a run of characters other than ".".

    The local tensor is its parts one after another along ``dim`` (counted without the stack's); with ``interleave=n``
    it is n such groups, each of the n-th part of every part. ``transpose``: the last two dimensions are swapped with
    respect to the global tensors. ``shift``: a number to add to a captured number, or (axis, n) for n times the rank.
    ``padded``: the local tensor may be longer along ``dim``; what is behind the parts is nobody's. ``dtype``: in which
    the bytes travel (torch's name), if not the local tensor's.
    """

    match: str
    parts: Sequence[Part]
    dim: int = 0
    interleave: int = 1
    stack: Stack | None = None
    transpose: bool = False
    shift: Mapping[str, int | tuple[str, int]] = field(default_factory=dict)
    padded: bool = False
    dtype: str | None = None

    @cached_property
    def pattern(self) -> re.Pattern[str]:
        return _pattern(self.match)


@dataclass(frozen=True)
class Held:
    """One box of a global tensor in a local tensor; ``stride`` has one number for each dimension of the global one."""

    name: str
    shape: tuple[int, ...]
    start: tuple[int, ...]
    size: tuple[int, ...]
    offset: int
    stride: tuple[int, ...]


@dataclass(frozen=True)
class Layout:
    """``axes``: (rank, size) of this process on each axis the rules name. The first rule that matches counts.

    ``quantise``, of a publisher's layout: which global tensors travel in 8 bits, by patterns of their names (captures
    as in ``Rule.match``), the first that matches: ``{"model.layers.{i}.mlp.{p}_proj.weight": Fp8Blocks()}``. None: as
    they are. DTensors, which say themselves what they are, are quantised by it as well.
    """

    rules: Sequence[Rule] = ()
    axes: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    quantise: Mapping[str, Fp8 | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        checked(self.quantise)

    def format_of(self, name: str) -> Fp8 | None:
        """In which the global tensor travels, if it is quantised."""
        return next((form for pattern, form in self._formats if pattern.fullmatch(name)), None)

    @cached_property
    def _formats(self) -> list[tuple[re.Pattern[str], Fp8 | None]]:
        return [(_pattern(match), form) for match, form in self.quantise.items()]

    def rule_for(self, name: str) -> tuple[Rule, dict[str, str]] | None:
        """The rule, and its captures after their shift."""
        for rule in self.rules:
            if found := rule.pattern.fullmatch(name):
                captures = found.groupdict()
                for key, shift in rule.shift.items():
                    step = shift if isinstance(shift, int) else self._axis(shift[0])[0] * shift[1]
                    captures[key] = str(int(captures[key]) + step)
                return rule, captures
        return None

    def held(
        self, rule: Rule, captures: Mapping[str, str], name: str, shape: Sequence[int], stride: Sequence[int]
    ) -> list[Held]:
        """What the local tensor ``name`` of this shape and these element strides holds. LayoutMismatch if it has not
        the shape that the rule makes."""
        shape, stride = tuple(shape), tuple(stride)
        if rule.stack is None:
            return list(self._matrix(rule, captures, name, shape, stride, 0))
        first, count = 0, rule.stack.count
        if rule.stack.axis is not None:
            at, size = self._axis(rule.stack.axis)
            first, count = chunks(rule.stack.count, size)[at]
        if not shape or shape[0] != count:
            raise LayoutMismatch(f"{name}: {list(shape)} here, and {count} of {rule.stack.capture!r} by its rule")
        found: list[Held] = []
        for i in range(count):
            inner = {**captures, rule.stack.capture: str(first + i)}
            found.extend(self._matrix(rule, inner, name, shape[1:], stride[1:], i * stride[0]))
        return found

    def _axis(self, axis: str) -> tuple[int, int]:
        if axis not in self.axes:
            raise InvalidArgument(f"a rule names the axis {axis!r}; the layout has {sorted(self.axes)}")
        at, size = self.axes[axis]
        if not 0 <= at < size:
            raise InvalidArgument(f"rank {at} of {size} on the axis {axis!r}")
        return at, size

    def _matrix(
        self,
        rule: Rule,
        captures: Mapping[str, str],
        name: str,
        shape: tuple[int, ...],
        stride: tuple[int, ...],
        offset: int,
    ) -> Iterator[Held]:
        dim = _dim(rule.dim, len(shape)) if shape else 0
        if rule.transpose:
            if len(shape) < 2:
                raise LayoutMismatch(f"{name}: its rule transposes it, and it has {len(shape)} dimensions")
            shape, stride = _swap(shape), _swap(stride)  # as the global tensors have them
            dim = {len(shape) - 1: len(shape) - 2, len(shape) - 2: len(shape) - 1}.get(dim, dim)
        boxes = [(part, *self._box(rule, part, name, shape, dim)) for part in rule.parts]
        for part, _, _, size in boxes:
            if shape and size[dim] % rule.interleave:
                raise LayoutMismatch(f"{name}: {size[dim]} of {part.name!r} do not make {rule.interleave} groups")
        chunk = [size[dim] // rule.interleave if shape else 1 for _, _, _, size in boxes]
        self._check_shape(rule, name, shape, dim, boxes)
        at = 0
        for (part, whole, start, size), length in zip(boxes, chunk, strict=True):
            target = _CAPTURE.sub(lambda m: captures[m[1]], part.name)
            if math.prod(size) == 0:
                yield Held(target, whole, start, size, offset, stride)
            elif rule.interleave > 1 and length == 1:  # every n-th row: a stride says it
                far = tuple(s * sum(chunk) if d == dim else s for d, s in enumerate(stride))
                yield Held(target, whole, start, size, offset + at * stride[dim], far)
            else:
                for group in range(rule.interleave):
                    here = _replaced(start, dim, start[dim] + group * length) if shape else start
                    part_size = _replaced(size, dim, length) if shape else size
                    step = (group * sum(chunk) + at) * stride[dim] if shape else 0
                    yield Held(target, whole, here, part_size, offset + step, stride)
            at += length

    def _box(
        self, rule: Rule, part: Part, name: str, shape: tuple[int, ...], dim: int
    ) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """(global shape, start, size) of what this rank holds of the part."""
        given = part.shape if part.shape is not None else (-1,) * len(shape)
        if len(given) != len(shape):
            raise LayoutMismatch(f"{name}: {len(shape)} dimensions here, {len(given)} of {part.name!r} by its rule")
        whole, start, size = list(given), [0] * len(given), list(given)
        for d, n in enumerate(given):
            if n == -1:
                if d == dim and (len(rule.parts) > 1 or rule.padded):
                    raise InvalidArgument(f"the rule for {rule.match!r} has to give the size of {part.name!r} in {d}")
                ranks = [
                    split.groups or self._axis(split.axis)[1]
                    for split in part.split
                    if _dim(split.dim, len(given)) == d
                ]
                whole[d] = size[d] = shape[d] * math.prod(ranks)
        for split in part.split:
            d = _dim(split.dim, len(given))
            at, ranks_on_axis = self._axis(split.axis)
            groups = split.groups or ranks_on_axis
            if groups > ranks_on_axis or ranks_on_axis % groups:
                raise InvalidArgument(f"{ranks_on_axis} ranks of {split.axis!r} do not share {groups} groups evenly")
            first, length = chunks(size[d], groups)[at * groups // ranks_on_axis]
            start[d], size[d] = start[d] + first, length
        return tuple(whole), tuple(start), tuple(size)

    def _check_shape(
        self,
        rule: Rule,
        name: str,
        shape: tuple[int, ...],
        dim: int,
        boxes: Sequence[tuple[Part, tuple[int, ...], tuple[int, ...], tuple[int, ...]]],
    ) -> None:
        for part, _, _, size in boxes:
            for d, (n, here) in enumerate(zip(size, shape, strict=True)):
                if d != dim and n != here:
                    raise LayoutMismatch(f"{name}: {here} in dimension {d} here, {n} of {part.name!r} by its rule")
        wanted = sum(size[dim] for _, _, _, size in boxes) if shape else 0
        if shape and (shape[dim] < wanted or (shape[dim] > wanted and not rule.padded)):
            raise LayoutMismatch(f"{name}: {shape[dim]} in dimension {dim} here, {wanted} by its rule")


def _pattern(match: str) -> re.Pattern[str]:
    pieces = _CAPTURE.split(match)
    return re.compile("".join(f"(?P<{p}>[^.]+)" if i % 2 else re.escape(p) for i, p in enumerate(pieces)))


def _dim(dim: int, ndim: int) -> int:
    if not -ndim <= dim < ndim:
        raise InvalidArgument(f"dimension {dim} of a tensor of {ndim}")
    return dim % ndim


def _swap(values: tuple[int, ...]) -> tuple[int, ...]:
    return (*values[:-2], values[-1], values[-2])


def _replaced(values: tuple[int, ...], at: int, value: int) -> tuple[int, ...]:
    return (*values[:at], value, *values[at + 1 :])
