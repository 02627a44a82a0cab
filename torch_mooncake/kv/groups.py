"""Planes and groups: where the bytes of a paged cache's pages are. Plain numbers, no tensors; checked when made.

Everything is in bytes and read off strides. Letters name the dimensions of a page, always in this order:

    K key and value (size 2)   N token within the page   H KV head   D element of a head
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from torch_mooncake.errors import InvalidArgument

AXES = "KNHD"
KINDS = ("attention", "mla", "state")
ITEM_NBYTES = {
    **dict.fromkeys(("float64", "int64", "uint64", "complex64"), 8),
    **dict.fromkeys(("float32", "int32", "uint32"), 4),
    **dict.fromkeys(("float16", "bfloat16", "int16", "uint16"), 2),
    **dict.fromkeys(("int8", "uint8", "bool", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu"), 1),
    **dict.fromkeys(("float8_e4m3fnuz", "float8_e5m2fnuz", "float4_e2m1fn_x2"), 1),
}
_MAX_NAME = 128
_MAX_INT = 1 << 62  # sums of a few stay within int64


@dataclass(frozen=True)
class Plane:
    """One strided piece of every page of one layer: page `p`, element `(i, j, …)` is at byte
    `offset + p * page_stride + i * strides[0] + j * strides[1] + …` of the storage.

    `role` says what it holds: "kv" (keys and values, along axis K, or MLA's one latent), "k", "v", or any other name.
    Raises InvalidArgument when made from numbers that cannot be a plane.
    """

    role: str
    storage: int  # index into the layout's storages
    offset: int  # bytes, from the storage's start to page 0
    page_stride: int  # bytes
    axes: str  # letters of the page's dimensions, a subsequence of "KNHD" that ends with D
    shape: tuple[int, ...]  # elements, per letter
    strides: tuple[int, ...]  # bytes, per letter
    dtype: str  # "float32"

    def __post_init__(self) -> None:
        _check_name("role", self.role)
        if not isinstance(self.axes, str) or not self.axes.endswith("D") or not _is_subsequence(self.axes, AXES):
            raise InvalidArgument(f"axes {self.axes!r} are not letters of {AXES!r} in this order that end with D")
        if self.dtype not in ITEM_NBYTES:
            raise InvalidArgument(f"dtype {self.dtype!r} is not known")
        for name in ("storage", "offset", "page_stride"):
            _check_int(name, getattr(self, name))
        for name in ("shape", "strides"):
            values = getattr(self, name)
            if not isinstance(values, tuple) or len(values) != len(self.axes):
                raise InvalidArgument(f"{name} {values!r} does not have one number for each of the axes {self.axes}")
            for value in values:
                _check_int(name, value, at_least=1 if name == "shape" else 0)
        if "K" in self.axes and self.shape[0] != 2:
            raise InvalidArgument(f"axis K (key, value) has size {self.shape[0]}, not 2")
        self.extent(1)  # no element of a page over another

    @property
    def item_nbytes(self) -> int:
        return ITEM_NBYTES[self.dtype]

    @property
    def nbytes(self) -> int:
        """Of one page, without the gaps."""
        return prod(self.shape) * self.item_nbytes

    @property
    def dense(self) -> bool:
        """Whether the bytes of one page are one run."""
        reach = self.item_nbytes + sum(stride * (n - 1) for n, stride in zip(self.shape, self.strides, strict=True))
        return reach == self.nbytes

    @property
    def order(self) -> str:
        """Letters of the axes longer than one, from the outermost in memory to the innermost."""
        axes = zip(self.axes, self.shape, self.strides, strict=True)
        return "".join(letter for letter, _, _ in sorted((a for a in axes if a[1] > 1), key=lambda axis: -axis[2]))

    def size(self, letter: str) -> int:
        """Elements along an axis; 1 when the plane has no such axis."""
        return self.shape[self.axes.index(letter)] if letter in self.axes else 1

    def stride(self, letter: str) -> int:
        """Bytes from an element to the next along an axis; 0 when the plane has no such axis."""
        return self.strides[self.axes.index(letter)] if letter in self.axes else 0

    def extent(self, num_pages: int) -> int:
        """Bytes from the first of `num_pages` pages' first byte to the last one's end. InvalidArgument when elements
        overlap: axes have to nest, each stride at least as long as what it steps over."""
        reach = self.item_nbytes
        steps = [(self.page_stride, num_pages), *zip(self.strides, self.shape, strict=True)]
        for stride, count in sorted(step for step in steps if step[1] > 1):
            if stride < reach:
                raise InvalidArgument(
                    f"plane {self.role!r}: elements overlap (page stride {self.page_stride}, shape {self.shape}, "
                    f"strides {self.strides} bytes)"
                )
            reach += stride * (count - 1)
        return reach if num_pages else 0


Layer = tuple[int, tuple[Plane, ...]]  # the model's number of the layer, and its planes


@dataclass(frozen=True)
class Group:
    """Layers that share page ids: page `p` of the group is page `p` of each of its layers.

    `kind`: "attention" (keys and values by head), "mla" (one latent, the same on every tensor-parallel rank) or
    "state" (opaque bytes, of Mamba layers for example). `page_size` is in tokens, 0 for states that are not by token.
    `replicated`: every tensor-parallel rank holds the same.
    """

    name: str
    kind: str
    layers: tuple[Layer, ...]
    page_size: int
    kv_heads: int
    head_dim: int
    dtype: str
    num_pages: int
    window: int | None = None  # tokens that attention looks back, None: all
    replicated: bool = False

    def __post_init__(self) -> None:
        _check_name("name", self.name)
        if self.kind not in KINDS:
            raise InvalidArgument(f"kind {self.kind!r} is none of {', '.join(KINDS)}")
        if self.dtype not in ITEM_NBYTES:
            raise InvalidArgument(f"dtype {self.dtype!r} is not known")
        tokens = 0 if self.kind == "state" else 1
        for name, least in (("page_size", tokens), ("kv_heads", 1), ("head_dim", 1), ("num_pages", 0)):
            _check_int(name, getattr(self, name), at_least=least)
        if self.window is not None:
            _check_int("window", self.window, at_least=1)
        if not isinstance(self.replicated, bool):
            raise InvalidArgument(f"replicated is {self.replicated!r}, not a bool")
        if not self.layers:
            raise InvalidArgument("a paged KV cache needs at least one layer")
        for layer, planes in self.layers:
            _check_int("layer id", layer)
            self._check_planes(layer, planes)
        if len(self.index) != len(self.layers):
            raise InvalidArgument(f"group {self.name!r} has a layer twice")

    def _check_planes(self, layer: int, planes: tuple[Plane, ...]) -> None:
        parts = [part for plane in planes for part in parts_of(plane)]
        if not planes or len({part.role for part in parts}) != len(parts):
            raise InvalidArgument(f"layer {layer} has no planes, or two of one role: {[p.role for p in parts]}")
        if self.kind == "mla" and self.kv_heads != 1:
            raise InvalidArgument(f"an MLA cache has one head, not {self.kv_heads}")
        for plane in planes:
            for letter, size in (("N", self.page_size), ("H", self.kv_heads)):
                if letter in plane.axes and plane.size(letter) != size:
                    has = f"axis {letter} of plane {plane.role!r} has size {plane.size(letter)}"
                    raise InvalidArgument(f"layer {layer}: {has}, not {size}")

    @property
    def index(self) -> dict[int, int]:
        """Place of each layer by the model's number of it."""
        return {layer: place for place, (layer, _) in enumerate(self.layers)}

    @property
    def layer_ids(self) -> tuple[int, ...]:
        return tuple(layer for layer, _ in self.layers)

    def chosen(self, layers: Sequence[int] | None) -> list[tuple[Plane, ...]]:
        """Planes of `layers` (the model's numbers, None: all). InvalidArgument names one the group does not have."""
        if layers is None:
            return [planes for _, planes in self.layers]
        index = self.index
        for layer in layers:
            if layer not in index:
                raise InvalidArgument(f"layer {layer} is not in {_ranges(self.layer_ids)}")
        return [self.layers[index[layer]][1] for layer in layers]

    def page_nbytes(self, place: int) -> int:
        """Bytes of one page of the layer at `place`."""
        return sum(plane.nbytes for plane in self.layers[place][1])

    def page_order(self, place: int) -> str:
        """What a page of that layer is made of and in which order its bytes are: "k:NHD v:NHD". An axis of size one
        has no place; a size or dtype other than the group's is named."""
        texts = []
        for part in sorted(
            (p for plane in self.layers[place][1] for p in split_outermost(plane)), key=lambda p: p.role
        ):
            text = f"{part.role}:{part.order}"
            if part.size("D") != self.head_dim:
                text += f"[{part.size('D')}]"
            texts.append(text if part.dtype == self.dtype else f"{text} {part.dtype}")
        return " ".join(texts)

    def content(self) -> dict[str, Any]:
        """What has to agree for pages to be exchanged byte for byte, by name; a list has one item a layer."""
        places = range(len(self.layers))
        return {
            "kind": self.kind,
            "num_layers": len(self.layers),
            "page_size": self.page_size,
            "kv_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "dtype": self.dtype,
            "layer_ids": list(self.layer_ids),
            "page_axes": [self.page_order(place) for place in places],
            "page_nbytes": [self.page_nbytes(place) for place in places],
        }


def parts_of(plane: Plane) -> list[Plane]:
    """The plane's keys and its values apart, as planes "k" and "v" without axis K; another plane as it is."""
    if "K" not in plane.axes:
        return [plane]
    stride = plane.strides[0]
    return [
        Plane(
            role,
            plane.storage,
            plane.offset + index * stride,
            plane.page_stride,
            plane.axes[1:],
            plane.shape[1:],
            plane.strides[1:],
            plane.dtype,
        )
        for index, role in enumerate("kv" if plane.role == "kv" else (f"{plane.role}.k", f"{plane.role}.v"))
    ]


def split_outermost(plane: Plane) -> list[Plane]:
    """`parts_of`, when in memory all keys of a page come before all its values."""
    return parts_of(plane) if plane.order.startswith("K") else [plane]


def _ranges(layers: tuple[int, ...]) -> str:
    first, last = layers[0], layers[-1]
    return f"{first}..{last}" if layers == tuple(range(first, last + 1)) else str(list(layers))


def _is_subsequence(letters: str, of: str) -> bool:
    rest = iter(of)
    return all(letter in rest for letter in letters)


def _check_int(name: str, value: Any, at_least: int = 0) -> None:
    if type(value) is not int or not at_least <= value < _MAX_INT:
        raise InvalidArgument(f"{name} is {value!r}, not a number in {at_least}..2**62")


def _check_name(what: str, name: Any) -> None:
    if not isinstance(name, str) or not 0 < len(name) <= _MAX_NAME:
        raise InvalidArgument(f"{what} is {name!r}, not a name of 1 to {_MAX_NAME} characters")
