"""Safetensors files and the pool: tensors go from the mapped file into the pool, and from the pool's memory into the
file, without a copy in between.

The format: eight bytes (little endian) with the length of a JSON header, the header, the tensors. The header names each
tensor's dtype, shape and range of bytes; the ranges cover the rest of the file exactly, without a gap or an overlap.
"""

from __future__ import annotations

import contextlib
import json
import math
import mmap
import os
import secrets
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from torch_mooncake import values
from torch_mooncake.clock import deadline_ns, seconds_left
from torch_mooncake.errors import Corrupt, DeadlineExceeded, Error, IoError, KeyNotFound, LayoutMismatch, Unsupported
from torch_mooncake.objects import describe
from torch_mooncake.tensors import DTYPES, Memory, Sharded, Tensor

if TYPE_CHECKING:
    from torch_mooncake.pool import Pool

METADATA = "__metadata__"
_MAX_HEADER = 100_000_000  # what the reference implementation accepts
_MAX_NDIM = 64
_WRITE_BYTES = 64 << 20  # between two looks at the clock

# By the format's names. Absent: those whose elements are not whole bytes in torch's sense (F4, F6_…).
_TORCH_DTYPE = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
    "I16": "int16",
    "U16": "uint16",
    "F16": "float16",
    "BF16": "bfloat16",
    "I32": "int32",
    "U32": "uint32",
    "F32": "float32",
    "I64": "int64",
    "U64": "uint64",
    "F64": "float64",
    "C64": "complex64",
}
_FILE_DTYPE = {torch_name: name for name, torch_name in _TORCH_DTYPE.items()}


class FileTensor(NamedTuple):
    name: str
    dtype: str  # torch's name
    shape: tuple[int, ...]
    offset: int  # in the file
    nbytes: int


class Header(NamedTuple):
    tensors: list[FileTensor]  # in the order of their bytes
    metadata: dict[str, str]


def parse_header(start: bytes, file_nbytes: int) -> Header:
    """The header of a file that begins with ``start`` (at least its header) and has ``file_nbytes`` bytes. Corrupt."""
    size = int.from_bytes(start[:8], "little")
    if file_nbytes < 8 or size > _MAX_HEADER or size > file_nbytes - 8 or len(start) < 8 + size:
        raise Corrupt(f"a header of {size} bytes does not fit a file of {file_nbytes} bytes")
    try:
        header = json.loads(start[8 : 8 + size], object_pairs_hook=_no_duplicates, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise Corrupt(f"the header is not JSON: {error}") from None
    if not isinstance(header, dict):
        raise Corrupt("the header is not a JSON object")
    metadata = header.pop(METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise Corrupt(f"{METADATA} is not a map from text to text")
    for text in (*header, *metadata, *metadata.values()):
        if not _is_unicode(text):
            raise Corrupt(f"{text!r} is not Unicode")
    data = 8 + size
    tensors = sorted((_tensor(name, entry, data) for name, entry in header.items()), key=lambda t: (t.offset, t.nbytes))
    end = data
    for tensor in tensors:
        if tensor.offset != end:
            what = "overlaps the one before" if tensor.offset < end else "leaves a gap"
            raise Corrupt(f"tensor {tensor.name!r} at byte {tensor.offset - data} {what}")
        end += tensor.nbytes
    if end > file_nbytes:
        first = next(tensor for tensor in tensors if tensor.offset + tensor.nbytes > file_nbytes)
        last = first.offset + first.nbytes
        raise Corrupt(f"tensor {first.name!r} ends at byte {last} of a file that has {file_nbytes}")
    if end != file_nbytes:
        raise Corrupt(f"the header describes a file of {end} bytes, this one has {file_nbytes}")
    return Header(tensors, metadata)


def _is_unicode(text: str) -> bool:
    """False for half of a surrogate pair, which JSON can write and UTF-8 cannot."""
    return not any("\ud800" <= c <= "\udfff" for c in text)


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name stands there twice")
    return found


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _tensor(name: str, entry: Any, data: int) -> FileTensor:
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise Corrupt(f"tensor {name!r} is not described by dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    for numbers in (shape, offsets):
        if not isinstance(numbers, list) or not all(type(n) is int and 0 <= n < 1 << 63 for n in numbers):
            raise Corrupt(f"tensor {name!r} has a shape or offsets that are not lists of natural numbers")
    if len(offsets) != 2 or len(shape) > _MAX_NDIM:
        raise Corrupt(f"tensor {name!r} has {len(offsets)} offsets and {len(shape)} dimensions")
    if not isinstance(dtype, str):
        raise Corrupt(f"tensor {name!r} has a dtype that is no text")
    if dtype not in _TORCH_DTYPE:
        raise Unsupported(f"tensor {name!r} has dtype {dtype!r}, of which torch has no tensors")
    begin, end = offsets
    nbytes = math.prod(shape) * DTYPES[_TORCH_DTYPE[dtype]]
    if end - begin != nbytes:
        raise Corrupt(f"tensor {name!r}, {dtype} {shape}, has {nbytes} bytes, not {end - begin}")
    return FileTensor(name, _TORCH_DTYPE[dtype], tuple(shape), data + begin, nbytes)


@contextlib.contextmanager
def mapped(path: str | os.PathLike[str]) -> Iterator[tuple[Header, Any]]:
    """(header, the file's bytes as a read-only numpy array). Corrupt, Unsupported, IoError."""
    try:
        with open(path, "rb") as file:
            nbytes = os.fstat(file.fileno()).st_size
            if nbytes < 8:
                raise Corrupt(f"{os.fspath(path)} has {nbytes} bytes")
            memory = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    except OSError as error:
        raise IoError(f"{os.fspath(path)}: {error.strerror}") from error
    data = np.frombuffer(memory, np.uint8)
    try:
        size = int.from_bytes(data[:8].tobytes(), "little")
        try:
            header = parse_header(data[: 8 + min(size, _MAX_HEADER)].tobytes(), nbytes)
        except (Corrupt, Unsupported) as error:
            raise type(error)(f"{os.fspath(path)}: {error}") from None
        yield header, data
    finally:
        del data  # a map cannot be closed under an array
        with contextlib.suppress(BufferError):  # a traceback holds the array: the map goes with it
            memory.close()


def import_file(
    pool: Pool, path: str | os.PathLike[str], prefix: str, *, timeout: float | None = 30, **options: Any
) -> list[str]:
    from torch_mooncake.pool import checked_key

    deadline = deadline_ns(timeout)
    with mapped(path) as (header, data):
        keys = [checked_key(prefix + tensor.name) for tensor in header.tensors]  # all before the first put
        if header.metadata:
            checked_key(prefix + METADATA)
        base = data.__array_interface__["data"][0]
        for key, tensor in zip(keys, header.tensors, strict=True):
            value = Memory(tensor.dtype, tensor.shape, base + tensor.offset, tensor.nbytes)
            pool.put(key, value, timeout=seconds_left(deadline), **options)
        if header.metadata:
            pool.put(prefix + METADATA, header.metadata, timeout=seconds_left(deadline), **options)
    return keys


def export_file(
    pool: Pool,
    prefix: str,
    path: str | os.PathLike[str],
    *,
    keys: Sequence[str] | None = None,
    timeout: float | None = 30,
) -> int:
    deadline = deadline_ns(timeout)
    client = pool._client(deadline)
    wanted = sorted(set(pool.keys(prefix, timeout=timeout) if keys is None else keys))
    metadata: dict[str, str] = {}
    found = []
    for key, object_ in zip(wanted, client.locate_many(wanted, deadline), strict=True):
        if isinstance(object_, Exception):
            raise object_
        if key == prefix + METADATA:
            metadata = _metadata(values.load(client, object_, deadline), key)
            continue
        leaf = describe(client, object_, deadline).root
        if not key.startswith(prefix) or not isinstance(leaf, (Tensor, Sharded)):
            raise LayoutMismatch(f"key {key!r} is not one tensor under {prefix!r}")
        if leaf.dtype not in _FILE_DTYPE:
            raise Unsupported(f"key {key!r} is of dtype {leaf.dtype}, which safetensors does not have")
        found.append((key, object_, leaf, math.prod(leaf.shape) * DTYPES[leaf.dtype]))
    if not found:
        raise KeyNotFound(f"no tensor under {prefix!r}")
    found.sort(key=lambda item: (-DTYPES[item[2].dtype], item[0]))  # so that each is aligned in the file
    entries: dict[str, Any] = {METADATA: metadata} if metadata else {}
    end = 0
    for key, _, leaf, nbytes in found:
        entries[key.removeprefix(prefix)] = {
            "dtype": _FILE_DTYPE[leaf.dtype],
            "shape": list(leaf.shape),
            "data_offsets": [end, end + nbytes],
        }
        end += nbytes
    header = json.dumps(entries, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    target = os.fspath(path)
    temporary = f"{target}.{secrets.token_hex(4)}.tmp"
    try:
        with open(temporary, "xb", buffering=0) as file:
            _write(file, len(header).to_bytes(8, "little") + header, deadline)
            for _, object_, leaf, nbytes in found:
                _write(file, _bytes_of(client, object_, leaf, nbytes, deadline), deadline)
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except Error:  # the pool's own, of which some (a deadline, a lost peer) are OSErrors too
        raise
    except OSError as error:
        raise IoError(f"{target}: {error.strerror}") from error
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
    return 8 + len(header) + end


def _metadata(value: Any, key: str) -> dict[str, str]:
    if not isinstance(value, dict) or not all(type(k) is type(v) is str for k, v in value.items()):
        raise LayoutMismatch(f"key {key!r} is not a map from text to text")
    return value


def _bytes_of(client: Any, object_: Any, leaf: Tensor | Sharded, nbytes: int, deadline: int) -> memoryview:
    """The tensor's bytes: in the pool's own memory if it is on this host."""
    if isinstance(leaf, Sharded):
        import torch

        dense = values.fresh(client, object_, deadline, leaf)
        return memoryview(dense.reshape(-1).view(torch.uint8).numpy() if nbytes else b"")
    return memoryview(client.map(object_, True, deadline))[leaf.offset : leaf.offset + nbytes]


def _write(file: Any, data: Any, deadline: int) -> None:
    view = memoryview(data)
    while view.nbytes:
        if seconds_left(deadline) == 0:
            raise DeadlineExceeded(f"with {view.nbytes} bytes of a tensor to write: no file was made")
        view = view[file.write(view[:_WRITE_BYTES]) :]
