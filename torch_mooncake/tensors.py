"""Values as the pool keeps them: a small description (msgpack) and the bytes of all tensors, one after the other.

What may be put: tensors (any dense dtype and shape), numpy arrays, bytes-like objects, None, bool, int, float, str, and
dicts, lists and tuples of these, nested. Everything else is a TypeError that names where in the value it stands.
Nothing is ever pickled. Tensors are stored dense and contiguous (strided, conjugated and negated views are resolved,
gradients are left behind), each at a multiple of 64 bytes, from 64 KiB on at a multiple of 4096 (a page).

A ``DTensor`` is stored by all ranks of its mesh together, each its shard (replicas once): every rank's object part
describes its share of the same value, and holds what is not sharded only in part 0. A small dict of the user's may go
with a value.

What comes back: tensors as torch tensors and numpy arrays as numpy arrays, both over the object's memory; bytes-like
objects as bytes; dict subclasses as dict.

The decoder is strict: a description that is not well formed, or that points outside its object, is ``Corrupt``.
torch is imported only where a tensor is met.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import msgspec
import numpy as np

from torch_mooncake import _core, sharding
from torch_mooncake.errors import Corrupt, InvalidArgument

_FORMAT = 1
_INLINE, _SPILLED = b"TMv\x00", b"TMv\x01"  # where the description is: in the metadata, or at the end of the data
_MAX_META = 512 << 10  # longer descriptions are spilled (the pool takes 1 MiB)
_MAX_DEPTH = 64
_MAX_NDIM = 64
_MAX_INLINE_STR = 256
_MAX_USER = 64 << 10
_ALIGN, _PAGE, _PAGE_FROM = 64, 4096, 64 << 10
_ZEROS = bytes(_PAGE)

# The dtypes that travel, by their name in torch. Absent: quantised dtypes and torch's shell dtypes (uint1 …, bits…).
DTYPES: dict[str, int] = {
    **dict.fromkeys(("bool", "uint8", "int8"), 1),
    **dict.fromkeys(("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"), 1),
    "float4_e2m1fn_x2": 1,
    **dict.fromkeys(("int16", "uint16", "float16", "bfloat16"), 2),
    **dict.fromkeys(("int32", "uint32", "float32", "complex32"), 4),
    **dict.fromkeys(("int64", "uint64", "float64", "complex64"), 8),
    "complex128": 16,
}
_NUMPY_DTYPE = re.compile(r"[<>|=][biufcSUmM]\d+(\[\d*[A-Za-z]{1,2}\])?")

Key: TypeAlias = str | int | float | bool | None


class Scalar(msgspec.Struct, tag=0, array_like=True, frozen=True):
    value: bool | int | float | str | None


class BigInt(msgspec.Struct, tag=1, array_like=True, frozen=True):
    digits: str


class Bytes(msgspec.Struct, tag=2, array_like=True, frozen=True):
    offset: int
    nbytes: int


class Text(msgspec.Struct, tag=3, array_like=True, frozen=True):
    """A long str, as UTF-8."""

    offset: int
    nbytes: int


class Tensor(msgspec.Struct, tag=4, array_like=True, frozen=True):
    dtype: str
    shape: tuple[int, ...]
    offset: int


class Array(msgspec.Struct, tag=5, array_like=True, frozen=True):
    dtype: str
    shape: tuple[int, ...]
    offset: int


class List(msgspec.Struct, tag=6, array_like=True, frozen=True):
    items: tuple[Node, ...]


class Tuple(msgspec.Struct, tag=7, array_like=True, frozen=True):
    items: tuple[Node, ...]


class Dict(msgspec.Struct, tag=8, array_like=True, frozen=True):
    items: tuple[tuple[Key, Node], ...]


class Block(msgspec.Struct, array_like=True, frozen=True):
    """A dense tensor at ``offset``: the runs of each dimension's global indices that it holds."""

    offset: int
    runs: tuple[sharding.Runs, ...]

    @property
    def box(self) -> sharding.Box:
        return sharding.Box(self.runs)


class Sharded(msgspec.Struct, tag=9, array_like=True, frozen=True):
    """A tensor in blocks; in one part's description, those of that part."""

    dtype: str
    shape: tuple[int, ...]
    layout: str
    blocks: tuple[Block, ...]


class Elsewhere(msgspec.Struct, tag=10, array_like=True, frozen=True):
    """A leaf that part 0 holds."""


Node = Scalar | BigInt | Bytes | Text | Tensor | Array | List | Tuple | Dict | Sharded | Elsewhere
Leaf = Bytes | Text | Tensor | Array | Sharded


class Document(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    format: int
    root: Node
    user: dict[str, Any] | None = None
    shared: bool = False  # one value in several parts, not one of several


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Document)


class Memory(msgspec.Struct, frozen=True):
    """A value of the library's own: a dense tensor that lies somewhere, and stays there until it has been put."""

    dtype: str
    shape: tuple[int, ...]
    address: int
    nbytes: int


class Encoded(msgspec.Struct, frozen=True):
    """A value ready to be put. ``data`` is (address, nbytes) or bytes-like pieces, whose concatenation is the object;
    ``keep`` holds the memory they lie in."""

    meta: bytes
    data: list[Any]
    nbytes: int
    keep: list[Any]


def encode(value: Any, user: dict[str, Any] | None = None, writer: tuple[int, int] = (0, 1)) -> Encoded:
    """Describe ``value``. Copies only what is not dense, contiguous CPU memory. Raises TypeError naming the leaf.

    ``writer``: (rank, world) of the processes that store a value with DTensors together, see ``writers``.
    """
    rank, world = writer
    return _encode(value, user, _Writer(shares=world > 1, plain=rank == 0))


def describe_tensor(dtype: Any, shape: tuple[int, ...]) -> Callable[[dict[str, Any] | None], bytes]:
    """What makes the description of objects that are one dense tensor of ``dtype`` (torch's) and ``shape``, each with a
    ``meta`` of its own."""
    root = Tensor(str(dtype).removeprefix("torch."), tuple(shape), 0)

    def describe(user: dict[str, Any] | None) -> bytes:
        document = _INLINE + _encoder.encode(Document(_FORMAT, root, user))
        if len(document) > _MAX_META:
            raise InvalidArgument(f"a description of {len(document)} bytes: at most {_MAX_META} fit")
        return document

    return describe


def describe_bytes(nbytes: int, user: dict[str, Any] | None = None) -> bytes:
    """The description of an object that is ``nbytes`` bytes and nothing else, as ``encode`` makes it of bytes."""
    if user is not None:
        _check_user(user, "meta", 0)
    document = _INLINE + _encoder.encode(Document(_FORMAT, Bytes(0, nbytes), user))
    if len(document) > _MAX_USER:
        raise InvalidArgument(f"a description of {len(document)} bytes: at most {_MAX_USER} fit")
    return document


def encode_part(value: Any, user: dict[str, Any] | None = None) -> Encoded:
    """The same for a value of its own that is one part of an object: ``get`` returns the list of them."""
    return _encode(value, user, _Writer(part=True))


_knows_torch = False


def plain(value: Any) -> tuple[bytes, tuple[int, int]] | None:
    """(metadata, (address, nbytes)) of what needs no look at: bytes, and dense CPU tensors. The same as ``encode``
    makes. None for everything else. ``value`` has to stay until it has been put."""
    _learn_torch()
    return _core.plain(value)


def plain_batch(values: Sequence[Any], writable: bool = False) -> _core.PlainBatch | None:
    """All of ``values``, if all are plain; bytes are not ``writable``."""
    _learn_torch()
    return _core.plain_batch(values if type(values) is list else list(values), writable)


def _learn_torch() -> None:
    global _knows_torch
    if not _knows_torch and (parameter := getattr(getattr(sys.modules.get("torch"), "nn", None), "Parameter", None)):
        _core.set_tensor_types(sys.modules["torch"].Tensor, parameter)
        _knows_torch = True


def _describe_plain(value: Any) -> tuple[bytes, int] | None:
    try:
        encoded = encode(value)
    except TypeError:  # a dtype that cannot be put: told to whoever encodes it
        return None
    return encoded.meta, encoded.nbytes


_core.set_plain_describer(_describe_plain)


def dense(tensor: Any, torch: Any) -> bool:
    """Whether a plain tensor's elements lie one after the other in this process's memory, as they are."""
    return (
        tensor.layout is torch.strided
        and tensor.is_cpu
        and not tensor.is_nested
        and tensor.is_contiguous()
        and not tensor.is_conj()
        and not tensor.is_neg()
    )


def writers(value: Any) -> tuple[int, int] | None:
    """(rank, world) of the processes that have to put ``value`` together, because it has DTensors; None if it has none.
    InvalidArgument if its DTensors are not all on the same processes, or this one is not among them."""
    if "torch.distributed.tensor" not in sys.modules:
        return None
    found: dict[tuple[int, ...], tuple[int, int]] = {}
    stack = [value]
    while stack:
        item = stack.pop()
        if isinstance(item, dict):
            stack.extend(item.values())
        elif isinstance(item, (list, tuple)):
            stack.extend(item)
        elif sharding.is_dtensor(item):
            found[tuple(item.device_mesh.mesh.flatten().tolist())] = sharding.rank_in(item.device_mesh)
    if len(found) > 1:
        raise InvalidArgument(f"the value has DTensors on {len(found)} different meshes: put them one by one")
    return next(iter(found.values()), None)


def _encode(value: Any, user: dict[str, Any] | None, writer: _Writer) -> Encoded:
    if user is not None:
        _check_user(user, "meta", 0)
        if len(_encoder.encode(user)) > _MAX_USER:
            raise InvalidArgument(f"meta is {len(_encoder.encode(user))} bytes when encoded; at most {_MAX_USER} fit")
    root = writer.node(value, "", 0)
    document = _encoder.encode(Document(_FORMAT, root, user, writer.shares))
    if len(document) <= _MAX_META:
        meta = _INLINE + document
    else:
        offset = writer.add(document, len(document))
        meta = _SPILLED + offset.to_bytes(8, "little") + len(document).to_bytes(8, "little")
    if (writer.shares or writer.part) and writer.nbytes % _PAGE:  # the next part's tensors stay aligned
        writer.data.append(memoryview(_ZEROS)[: -writer.nbytes % _PAGE])
        writer.nbytes += -writer.nbytes % _PAGE
    return Encoded(meta, writer.data, writer.nbytes, writer.keep)


def _check_user(value: Any, path: str, depth: int) -> None:
    kind = type(value)
    if kind is dict and depth < 16:
        for key, item in value.items():
            if type(key) is not str:
                raise TypeError(f"{path} has a key of type {type(key).__name__}: {key!r}")
            _check_user(item, f"{path}[{key!r}]", depth + 1)
    elif kind in (list, tuple) and depth and depth < 16:
        for i, item in enumerate(value):
            _check_user(item, f"{path}[{i}]", depth + 1)
    elif not depth or kind not in (bool, int, float, str, bytes, type(None)):
        raise TypeError(
            f"{path} is a {kind.__qualname__}: it may hold None, bool, int, float, str, bytes, list and dict"
        )
    elif kind is int and not -(1 << 63) <= value < 1 << 64:
        raise InvalidArgument(f"{path} does not fit 64 bits")


class _Writer:
    def __init__(self, *, shares: bool = False, plain: bool = True, part: bool = False) -> None:
        self.shares, self.plain, self.part = shares, plain, part
        self.data: list[Any] = []
        self.keep: list[Any] = []
        self.nbytes = 0

    def add(self, piece: Any, nbytes: int) -> int:
        """Append a piece; its offset."""
        align = _PAGE if nbytes >= _PAGE_FROM else _ALIGN
        offset = -(-self.nbytes // align) * align if nbytes else self.nbytes
        if offset > self.nbytes:
            self.data.append(memoryview(_ZEROS)[: offset - self.nbytes])
        if nbytes:
            self.data.append(piece)
        self.nbytes = offset + nbytes
        return offset

    def node(self, value: Any, path: str, depth: int) -> Node:
        kind = type(value)
        if not self.plain and not (isinstance(value, (dict, list, tuple)) or sharding.is_dtensor(value)):
            return Elsewhere()
        if value is None or kind is bool or kind is float:
            return Scalar(value)
        if kind is int:
            return Scalar(value) if -(1 << 63) <= value < 1 << 64 else BigInt(hex(value))
        if kind is str:
            return self.text(value, path)
        if isinstance(value, (bytes, bytearray, memoryview)):
            return self.bytes(value, path)
        if depth >= _MAX_DEPTH:
            raise TypeError(f"{_at(path)} is nested deeper than {_MAX_DEPTH} levels")
        if isinstance(value, dict):
            items = []
            for key, item in value.items():
                if type(key) not in (str, int, float, bool, type(None)) or (
                    type(key) is int and not -(1 << 63) <= key < 1 << 64
                ):
                    raise TypeError(f"{_at(path)} has a key of type {type(key).__name__}: {key!r}")
                items.append((key, self.node(item, f"{path}[{key!r}]", depth + 1)))
            return Dict(tuple(items))
        if isinstance(value, list):
            return List(tuple(self.node(v, f"{path}[{i}]", depth + 1) for i, v in enumerate(value)))
        if kind is tuple or (isinstance(value, tuple) and kind.__module__ == "torch" and kind.__name__ == "Size"):
            return Tuple(tuple(self.node(v, f"{path}[{i}]", depth + 1) for i, v in enumerate(value)))
        if isinstance(value, np.ndarray):
            return self.array(value, path)
        if kind is Memory:
            return Tensor(value.dtype, value.shape, self.add((value.address, value.nbytes), value.nbytes))
        torch = sys.modules.get("torch")  # a tensor cannot exist before torch is imported
        if torch is not None and isinstance(value, torch.Tensor):
            return self.tensor(value, path, torch)
        hint = "; use .item()" if isinstance(value, np.generic) else ""
        raise TypeError(f"{_at(path)} is a {kind.__module__}.{kind.__qualname__}, which cannot be put{hint}")

    def text(self, value: str, path: str) -> Node:
        try:
            utf8 = value.encode()
        except UnicodeEncodeError as error:
            raise TypeError(f"{_at(path)} is a str that is not valid Unicode: {error}") from None
        if len(utf8) <= _MAX_INLINE_STR:
            return Scalar(value)
        return Text(self.add(utf8, len(utf8)), len(utf8))

    def bytes(self, value: Any, path: str) -> Node:
        view = memoryview(value)
        return Bytes(self.add(value if view.c_contiguous else view.tobytes(), view.nbytes), view.nbytes)

    def array(self, value: np.ndarray, path: str) -> Node:
        if not _NUMPY_DTYPE.fullmatch(value.dtype.str) or not value.dtype.itemsize:
            raise TypeError(f"{_at(path)} is a numpy array of dtype {value.dtype}, which cannot be put")
        value = np.ascontiguousarray(value).reshape(value.shape)
        self.keep.append(value)
        address = value.__array_interface__["data"][0]
        return Array(value.dtype.str, tuple(value.shape), self.add((address, value.nbytes), value.nbytes))

    def sharded(self, value: Any, path: str, torch: Any) -> Node:
        if self.part:
            raise TypeError(f"{_at(path)} is a DTensor, which decides by itself who puts which part: give no part=")
        try:
            share = sharding.share_of(value)
        except InvalidArgument as error:
            raise TypeError(f"{_at(path)} is a DTensor that cannot be put: {error}") from None
        local = value.to_local()
        if tuple(local.shape) != share.box.shape:
            raise TypeError(
                f"{_at(path)} is a DTensor whose local tensor is {list(local.shape)}, not {share.box.shape}"
            )
        blocks: tuple[Block, ...] = ()
        if share.owner and share.box.numel:
            offset = self.dense(local.trigger_wait() if hasattr(local, "trigger_wait") else local, path, torch).offset
            blocks = (Block(offset, share.box.runs),)
        return Sharded(str(value.dtype).removeprefix("torch."), tuple(value.shape), share.layout, blocks)

    def tensor(self, value: Any, path: str, torch: Any) -> Node:
        if sharding.is_dtensor(value):
            return self.sharded(value, path, torch)
        return self.dense(value, path, torch)

    def dense(self, value: Any, path: str, torch: Any) -> Tensor:
        dense = dense_tensor(value, path, torch)
        self.keep.append(dense)
        nbytes = dense.numel() * dense.element_size()
        name = str(dense.dtype).removeprefix("torch.")
        return Tensor(name, tuple(dense.shape), self.add((dense.data_ptr(), nbytes), nbytes))


def dense_tensor(value: Any, path: str, torch: Any) -> Any:
    """``value`` as a contiguous CPU tensor without views' flags or gradients. TypeError for what has no such form."""
    problem = None
    if value.layout is not torch.strided:
        problem = f"a sparse tensor (layout {value.layout})"
    elif value.is_quantized:
        problem = "a quantised tensor"
    elif value.is_nested:
        problem = "a nested tensor"
    elif value.device.type == "meta":
        problem = "a meta tensor: it has no data"
    elif type(value).__torch_dispatch__ not in (torch.Tensor.__torch_dispatch__, torch.nn.Parameter.__torch_dispatch__):
        problem = f"a tensor subclass, {type(value).__name__}"
    elif str(value.dtype).removeprefix("torch.") not in DTYPES:
        problem = f"a tensor of dtype {value.dtype}"
    if problem:
        raise TypeError(f"{_at(path)} is {problem}, which cannot be put")
    dense = value.detach().resolve_conj().resolve_neg()
    if dense.device.type != "cpu":
        dense = dense.cpu()
    if not dense.is_contiguous():
        # Bytes of the same width: torch has no copy for every dtype.
        same = {1: torch.uint8, 2: torch.int16}.get(dense.element_size())
        dense = dense.view(same).contiguous().view(dense.dtype) if same else dense.contiguous()
    return dense


def is_spilled(meta: bytes) -> bool:
    """Whether the description lies in the object's bytes."""
    return meta.startswith(_SPILLED)


def _at(path: str) -> str:
    return f"the value at {path}" if path else "the value"


class Decoded:
    """A description of an object of ``nbytes`` bytes, checked. Raises Corrupt."""

    def __init__(self, meta: bytes, nbytes: int, read: Callable[[int, int], bytes]) -> None:
        """``read(offset, nbytes)`` reads of the object; it is used only for a spilled description."""
        self.nbytes = nbytes
        document = self._document(meta, read)
        if document.format != _FORMAT:
            raise Corrupt(f"the object has value format {document.format}; this version reads {_FORMAT}")
        self.root, self.user, self.shared = document.root, document.user, document.shared
        _check_depth(self.root)
        end = 0
        for offset, size in sorted(extent for leaf in self.leaves() for extent in _extents(leaf)):
            if offset < 0 or size < 0 or offset + size > nbytes:
                raise Corrupt(f"a leaf of {size} bytes at {offset} leaves its object of {nbytes} bytes")
            if size and offset < end:
                raise Corrupt(f"a leaf of {size} bytes at {offset} overlaps another")
            end = max(end, offset + size)

    def _document(self, meta: bytes, read: Callable[[int, int], bytes]) -> Document:
        if not meta:  # put by a program that speaks to the pool in C++: plain bytes
            return Document(_FORMAT, Bytes(0, self.nbytes))
        kind, body = meta[:4], meta[4:]
        if kind == _SPILLED and len(body) == 16:
            offset, size = (int.from_bytes(body[i : i + 8], "little") for i in (0, 8))
            if offset + size > self.nbytes:
                raise Corrupt(f"the description lies outside its object of {self.nbytes} bytes")
            body = read(offset, size)
        elif kind != _INLINE:
            raise Corrupt(f"the object's metadata is not torch_mooncake's: it starts with {meta[:4]!r}")
        try:
            return _decoder.decode(body)
        except (msgspec.DecodeError, RecursionError) as error:
            raise Corrupt(f"the object's description is malformed: {error}") from None

    def leaves(self) -> Iterator[Leaf]:
        """In the order of their offsets."""
        return leaves_of(self.root)

    def build(self, leaf: Callable[[Leaf], Any]) -> Any:
        """The value, with ``leaf(description)`` in the place of each leaf."""
        return build(self.root, leaf)


def leaves_of(root: Node) -> Iterator[Leaf]:
    stack: list[Node] = [root]
    while stack:
        node = stack.pop()
        if isinstance(node, (List, Tuple)):
            stack.extend(reversed(node.items))
        elif isinstance(node, Dict):
            stack.extend(item for _, item in reversed(node.items))
        elif isinstance(node, (Bytes, Text, Tensor, Array, Sharded)):
            yield node


def _check_depth(root: Node) -> None:
    """Corrupt if ``root`` is nested deeper than what can be put."""
    level: list[Node] = [root]
    for _ in range(_MAX_DEPTH + 1):
        level = [item for node in level for item in _items(node)]
    if level:
        raise Corrupt(f"the object's description is nested deeper than {_MAX_DEPTH} levels")


def _items(node: Node) -> Iterator[Node]:
    if isinstance(node, (List, Tuple)):
        yield from node.items
    elif isinstance(node, Dict):
        yield from (item for _, item in node.items)


def check_blocks(root: Node) -> None:
    """Corrupt unless the blocks of each tensor in blocks hold each of its elements once. They form a grid: what two of
    them hold of a dimension is the same, or has nothing in common."""
    for leaf in leaves_of(root):
        if not isinstance(leaf, Sharded):
            continue
        if len({block.runs for block in leaf.blocks}) != len(leaf.blocks):
            raise Corrupt("two blocks of a tensor hold the same elements")
        for pieces in map(set, zip(*(block.runs for block in leaf.blocks), strict=True)):
            end = 0
            for start, length in sorted(run for runs in pieces for run in runs):
                if start < end:
                    raise Corrupt(f"blocks of a tensor overlap at index {start}")
                end = start + length
        held = sum(block.box.numel for block in leaf.blocks)
        if held != math.prod(leaf.shape):
            raise Corrupt(f"the blocks of a tensor of shape {list(leaf.shape)} hold {held} elements")


def _extents(leaf: Leaf) -> list[tuple[int, int]]:
    """(offset, nbytes) of what is stored of a leaf. Corrupt if its description makes no sense."""
    nbytes = leaf_nbytes(leaf)
    if not isinstance(leaf, Sharded):
        return [(leaf.offset, nbytes)]
    for block in leaf.blocks:
        if len(block.runs) != len(leaf.shape):
            raise Corrupt("a block has another number of dimensions than its tensor")
        for runs, size in zip(block.runs, leaf.shape, strict=True):
            end = 0
            for start, length in runs:
                if start < end or length < 1 or start + length > size:
                    raise Corrupt(f"a block's run of {length} indices at {start} does not fit a dimension of {size}")
                end = start + length
    return [(block.offset, block.box.numel * DTYPES[leaf.dtype]) for block in leaf.blocks]


def leaf_nbytes(leaf: Leaf) -> int:
    """Bytes of a leaf; Corrupt if its dtype or shape makes no sense."""
    if isinstance(leaf, (Bytes, Text)):
        return leaf.nbytes
    if isinstance(leaf, Array):
        itemsize = numpy_dtype(leaf.dtype).itemsize
    elif leaf.dtype in DTYPES:
        itemsize = DTYPES[leaf.dtype]
    else:
        raise Corrupt(f"unknown dtype {leaf.dtype!r}")
    # Strides are 64 bits, also those of a tensor without elements.
    possible = len(leaf.shape) <= _MAX_NDIM and all(n >= 0 for n in leaf.shape)
    if not possible or math.prod(max(n, 1) for n in leaf.shape) * itemsize >= 1 << 63:
        raise Corrupt(f"impossible shape {leaf.shape}")
    return math.prod(leaf.shape) * itemsize


def numpy_dtype(name: str) -> np.dtype[Any]:
    try:
        if _NUMPY_DTYPE.fullmatch(name) and (dtype := np.dtype(name)).itemsize:
            return dtype
    except (TypeError, ValueError, OverflowError):
        pass
    raise Corrupt(f"unknown numpy dtype {name!r}")


def build(node: Node, leaf: Callable[[Leaf], Any]) -> Any:
    """The value of ``node``, with ``leaf(description)`` in the place of each leaf."""
    if isinstance(node, Scalar):
        return node.value
    if isinstance(node, BigInt):
        try:
            return int(node.digits, 16)
        except ValueError:
            raise Corrupt(f"not a number: {node.digits[:32]!r}") from None
    if isinstance(node, List):
        return [build(item, leaf) for item in node.items]
    if isinstance(node, Tuple):
        return tuple(build(item, leaf) for item in node.items)
    if isinstance(node, Dict):
        return {key: build(item, leaf) for key, item in node.items}
    if isinstance(node, Elsewhere):
        raise Corrupt("a leaf that part 0 should hold is nowhere")
    return leaf(node)


def loader(root: Node) -> Callable[[Any], Any]:
    """What makes the value of ``root`` over the memory of its object, again and again."""
    if isinstance(root, Tensor) and (nbytes := leaf_nbytes(root)):
        import torch

        dtype, count, offset, shape = getattr(torch, root.dtype), nbytes // DTYPES[root.dtype], root.offset, root.shape
        if len(shape) == 1:
            return lambda memory: torch.frombuffer(memory, dtype=dtype, count=count, offset=offset)
        return lambda memory: torch.frombuffer(memory, dtype=dtype, count=count, offset=offset).view(shape)
    return lambda memory: build(root, lambda leaf: leaf_over(memory, leaf))


def leaf_over(memory: Any, leaf: Leaf) -> Any:
    """The leaf's value over ``memory`` (the whole object, with the buffer protocol): tensors and arrays without a copy
    and keeping ``memory`` alive, bytes and str as copies."""
    nbytes = leaf_nbytes(leaf)
    if isinstance(leaf, Sharded):
        raise Corrupt("a tensor in blocks cannot be mapped")
    if isinstance(leaf, Tensor):
        import torch

        dtype = getattr(torch, leaf.dtype)
        if nbytes == 0:
            return torch.empty(leaf.shape, dtype=dtype)
        count = nbytes // DTYPES[leaf.dtype]
        return torch.frombuffer(memory, dtype=dtype, count=count, offset=leaf.offset).view(leaf.shape)
    if isinstance(leaf, Array):
        dtype = numpy_dtype(leaf.dtype)
        if nbytes == 0:
            return np.empty(leaf.shape, dtype)
        count = nbytes // dtype.itemsize
        return np.frombuffer(memory, dtype=dtype, count=count, offset=leaf.offset).reshape(leaf.shape)
    raw = bytes(memoryview(memory)[leaf.offset : leaf.offset + nbytes])
    if isinstance(leaf, Bytes):
        return raw
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise Corrupt(f"a str of the object is not UTF-8: {error}") from None
