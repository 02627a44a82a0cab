"""What one process holds of a set of weights, as numbers: the manifest that planners compare and cut.

A *whole* is a tensor as everybody names it: name, global shape, and the dtype in which its bytes travel. A *piece* is a
box of a whole (start and size in each dimension) that lies in one of this process's tensors, at an element offset and
with element strides: slices, fused and stacked tensors, transposes and padding are all offsets and strides.

Nothing here needs torch. A manifest is JSON outside the process; its digest names the layout.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from torch_mooncake.errors import Corrupt
from torch_mooncake.tensors import DTYPES

Ints = npt.NDArray[np.int64]

_FORMAT = 1
_MAX_NDIM = 64
_LIMIT = 1 << 62
_SHOWN = 10


def listed(what: str, problems: Sequence[str]) -> str:
    """``what``, and the first ten problems, one a line."""
    more = f"\n  and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
    return f"{what}:\n  " + "\n  ".join(problems[:_SHOWN]) + more


class Whole(NamedTuple):
    name: str
    shape: tuple[int, ...]
    dtype: str  # as torch calls it; what travels


class Local(NamedTuple):
    """A tensor of this process. ``shape`` includes padding; ``dtype`` may differ from the whole's."""

    name: str
    shape: tuple[int, ...]
    dtype: str


class Piece(NamedTuple):
    whole: int  # index into Manifest.wholes
    local: int  # index into Manifest.locals
    start: tuple[int, ...]
    size: tuple[int, ...]
    offset: int  # elements, from the first element of the local tensor
    stride: tuple[int, ...]  # elements, one for each dimension of the whole


class _Document(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    format: int
    wholes: tuple[Whole, ...]
    locals: tuple[Local, ...]
    aliases: dict[str, str]
    pieces: tuple[Piece, ...]


@dataclass(frozen=True, eq=False)
class Manifest:
    """One process's part of the weights. Boxes are rows of ``[n, ndim]`` arrays, ``ndim`` the largest of any whole;
    a whole of fewer dimensions has leading ones of size 1. Immutable: do not write into the arrays."""

    wholes: tuple[Whole, ...]
    locals: tuple[Local, ...]
    aliases: Mapping[str, str]  # tied name -> the name its bytes go under
    whole: Ints  # [n]
    local: Ints  # [n]
    start: Ints  # [n, ndim]
    size: Ints  # [n, ndim]
    offset: Ints  # [n]
    stride: Ints  # [n, ndim]

    @classmethod
    def of(
        cls,
        wholes: Iterable[Whole],
        locals: Iterable[Local],
        pieces: Sequence[Piece],
        aliases: Mapping[str, str] | None = None,
    ) -> Manifest:
        wholes = tuple(wholes)
        ndim = max([1, *(len(w.shape) for w in wholes)])

        def rows(values: list[tuple[int, ...]], fill: int) -> Ints:
            padded = [(fill,) * (ndim - len(value)) + value for value in values]
            return np.array(padded, np.int64).reshape(len(values), ndim)

        return cls(
            wholes,
            tuple(locals),
            dict(aliases or {}),
            np.array([p.whole for p in pieces], np.int64),
            np.array([p.local for p in pieces], np.int64),
            rows([p.start for p in pieces], 0),
            rows([p.size for p in pieces], 1),
            np.array([p.offset for p in pieces], np.int64),
            rows([p.stride for p in pieces], 0),
        )

    @property
    def ndim(self) -> int:
        return self.start.shape[1]

    @cached_property
    def names(self) -> frozenset[str]:
        """Of the wholes."""
        return frozenset(whole.name for whole in self.wholes)

    @cached_property
    def rows(self) -> dict[str, list[int]]:
        """The pieces of each whole, by its name."""
        found: dict[str, list[int]] = {}
        for row, whole in enumerate(self.whole.tolist()):
            found.setdefault(self.wholes[whole].name, []).append(row)
        return found

    @cached_property
    def nbytes(self) -> int:
        """Bytes of all pieces, as they travel."""
        itemsize = np.array([DTYPES[w.dtype] for w in self.wholes] or [0], np.int64)
        return int((self.size.prod(axis=1) * itemsize[self.whole]).sum()) if len(self.whole) else 0

    def pieces(self) -> list[Piece]:
        first = [self.ndim - len(whole.shape) for whole in self.wholes]
        columns = (a.tolist() for a in (self.whole, self.local, self.start, self.size, self.offset, self.stride))
        return [
            Piece(whole, local, tuple(start[n:]), tuple(size[n:]), offset, tuple(stride[n:]))
            for whole, local, start, size, offset, stride in zip(*columns, strict=True)
            for n in (first[whole],)
        ]

    def to_json(self) -> bytes:
        return msgspec.json.encode(
            _Document(_FORMAT, self.wholes, self.locals, dict(sorted(self.aliases.items())), tuple(self.pieces()))
        )

    @classmethod
    def from_json(cls, data: bytes | str) -> Manifest:
        """Corrupt for what is not a manifest: malformed, another format, a box outside its whole, memory outside its
        tensor."""
        try:
            document = msgspec.json.decode(data, type=_Document)
        except msgspec.DecodeError as error:
            raise Corrupt(f"not a manifest of weights: {error}") from None
        if document.format != _FORMAT:
            raise Corrupt(f"a manifest of format {document.format}; this version reads {_FORMAT}")
        tensors: list[Whole | Local] = [*document.wholes, *document.locals]
        for tensor in tensors:
            if tensor.dtype not in DTYPES or len(tensor.shape) > _MAX_NDIM:
                raise Corrupt(f"a manifest with a tensor {tensor.name!r} of {tensor.dtype}{list(tensor.shape)}")
            _check_sizes(tensor.name, tensor.shape)
        for piece in document.pieces:
            if not (0 <= piece.whole < len(document.wholes) and 0 <= piece.local < len(document.locals)):
                raise Corrupt("a manifest with a piece of a tensor that it does not have")
            whole = document.wholes[piece.whole]
            if not len(piece.start) == len(piece.size) == len(piece.stride) == len(whole.shape):
                raise Corrupt(
                    f"a manifest with a piece of {whole.name!r} that has not its {len(whole.shape)} dimensions"
                )
        try:
            found = cls.of(document.wholes, document.locals, document.pieces, document.aliases)
        except OverflowError:
            raise Corrupt("a manifest with numbers that no memory has") from None
        outside = found._outside()
        if outside.any():
            name = found.wholes[int(found.whole[int(outside.argmax())])].name
            raise Corrupt(f"a manifest with a piece of {name!r} outside its tensor")
        return found

    def _outside(self) -> npt.NDArray[np.bool_]:
        """Of each piece: whether it leaves its whole, or has no place in memory. Local tensors need not be contiguous:
        their own strides are not in the manifest, but nothing lies before them."""
        shapes = np.array(
            [(1,) * (self.ndim - len(whole.shape)) + whole.shape for whole in self.wholes], np.int64
        ).reshape(len(self.wholes), self.ndim)[self.whole]
        numel = np.array([math.prod(local.shape) for local in self.locals], np.int64)[self.local]
        box = (self.start < 0) | (self.size <= 0) | (self.start > shapes) | (self.size > shapes - self.start)
        last = self.offset.astype(np.float64) + ((self.size - 1.0) * self.stride).sum(axis=1)
        memory = (self.offset < 0) | (last >= _LIMIT) | (numel == 0)
        found: npt.NDArray[np.bool_] = box.any(axis=1) | (self.stride < 0).any(axis=1) | memory
        return found

    @cached_property
    def digest(self) -> str:
        """Equal for equal layouts: the same wholes, pieces and memory layout. 64 hex digits."""
        names = msgspec.json.encode((self.wholes, self.locals, sorted(self.aliases.items())))
        state = hashlib.sha256(len(names).to_bytes(8, "little") + names)
        for array in (self.whole, self.local, self.start, self.size, self.offset, self.stride):
            state.update(np.array(array.shape, "<i8").tobytes() + array.astype("<i8").tobytes())
        return state.hexdigest()

    def __repr__(self) -> str:
        return f"<Manifest of {len(self.wholes)} tensors, {len(self.whole)} pieces, {self.nbytes} bytes>"


def _check_sizes(name: str, sizes: tuple[int, ...]) -> None:
    numel = 1
    for size in sizes:
        numel *= size
        if size < 0 or numel >= _LIMIT:
            raise Corrupt(f"a manifest with a tensor {name!r} of shape {list(sizes)}")
