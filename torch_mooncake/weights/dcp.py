"""Folders of ``torch.distributed.checkpoint``: what is in them, and where in their files the tensors' bytes are.

Nothing of a checkpoint is unpickled but what describes tensors: names of other classes are Unsupported.
"""

from __future__ import annotations

import io
import math
import pickle
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple

import torch
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from torch_mooncake.errors import Corrupt, Error, IoError, Unsupported
from torch_mooncake.sharding import contiguous_strides
from torch_mooncake.tensors import DTYPES
from torch_mooncake.weights.files import Extent
from torch_mooncake.weights.shards import Whole

if TYPE_CHECKING:
    from torch_mooncake.weights.files import Checkpoint, Share

_METADATA = {
    ("torch.distributed.checkpoint.metadata", name): getattr(metadata, name)
    for name in (
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    )
} | {
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): filesystem._StorageInfo,
    ("torch.serialization", "_get_layout"): torch.serialization._get_layout,
    ("torch", "Size"): torch.Size,
    ("collections", "OrderedDict"): OrderedDict,
    ("pathlib", "PosixPath"): Path,
    ("pathlib", "Path"): Path,
}

_LEGACY_STORAGES = torch.storage._storage_type_to_dtype_map()  # FloatStorage: torch.float32, …


class _Saved(NamedTuple):
    """A tensor as ``torch.save`` described it; ``storage`` names the zip's member with its bytes."""

    storage: str
    dtype: str
    offset: int  # elements
    shape: tuple[int, ...]
    stride: tuple[int, ...]


def describe(checkpoint: Checkpoint) -> None:
    """Fills in the checkpoint's files, tensors and extents."""
    root = Path(checkpoint.path)
    found = _read(root / ".metadata")
    numbers: dict[str, int] = {}
    for name, entry in found.state_dict_metadata.items():
        own = checkpoint.own_name(name)
        if own is None or not isinstance(entry, TensorStorageMetadata):
            continue
        dtype = str(entry.properties.dtype).removeprefix("torch.")
        if dtype not in DTYPES:
            raise Unsupported(f"{root / '.metadata'}: tensor {name!r} is of {dtype}, which does not travel")
        shape = tuple(entry.size)
        whole = len(checkpoint.wholes)
        checkpoint.wholes.append(Whole(own, shape, dtype))
        if sum(math.prod(chunk.sizes) for chunk in entry.chunks) != math.prod(shape):
            raise Corrupt(f"{root / '.metadata'}: the chunks of tensor {name!r} are not its {list(shape)}")
        for chunk in entry.chunks:
            if math.prod(chunk.sizes) == 0:
                continue
            info = (found.storage_data or {}).get(MetadataIndex(name, chunk.offsets))
            if not isinstance(info, filesystem._StorageInfo):
                raise Corrupt(f"{root / '.metadata'} does not say where {name!r} at {list(chunk.offsets)} is")
            if info.transform_descriptors:
                raise Unsupported(f"{root / info.relative_path}: tensor {name!r} is {info.transform_descriptors}")
            if info.relative_path not in numbers:
                if Path(info.relative_path).name != info.relative_path:
                    raise Corrupt(f"{root / '.metadata'}: {name!r} is in {info.relative_path!r}, outside the folder")
                why = f"the metadata says that it has {name!r}"
                numbers[info.relative_path] = checkpoint.add_file(root / info.relative_path, why)
            number = numbers[info.relative_path]
            if info.offset + info.length > checkpoint.identities[number].nbytes:
                end, have = info.offset + info.length, checkpoint.identities[number].nbytes
                file = root / info.relative_path
                raise Corrupt(f"{file}: tensor {name!r} ends at byte {end}, the file has {have} bytes")
            checkpoint.extents.append(
                Extent(whole, tuple(chunk.offsets), tuple(chunk.sizes), number, info.offset, info.length)
            )


def begins(share: Share, file: IO[bytes], numbers: list[int], views: dict[str, torch.Tensor]) -> dict[int, int]:
    """Where the bytes of these parts' extents begin, if they lie there contiguously; the others are copied into
    ``views`` here. Corrupt, naming file and tensor, for what is no tensor as the metadata says."""
    plain = {}
    for number in numbers:
        part = share.part(number)
        extent = part.extent
        whole = share.checkpoint.wholes[extent.whole]
        where = f"{share.checkpoint.files[extent.file]}: tensor {whole.name!r}"
        try:
            saved, offset = _locate(file, extent.offset, extent.length)
        except Unsupported as error:
            raise Unsupported(f"{where}: {error}") from None
        except (zipfile.BadZipFile, pickle.UnpicklingError, KeyError, ValueError, EOFError, TypeError) as error:
            raise Corrupt(f"{where}: not what torch.save writes: {error}") from None
        if saved.dtype != whole.dtype or saved.shape != extent.size:
            raise Corrupt(
                f"{where}: {saved.dtype}{list(saved.shape)} in the file, {whole.dtype}{list(extent.size)} by the "
                "metadata"
            )
        itemsize = DTYPES[whole.dtype]
        if saved.stride == contiguous_strides(saved.shape) or math.prod(saved.shape) == 1:
            plain[number] = offset + saved.offset * itemsize
            continue
        span = 1 + sum((n - 1) * stride for n, stride in zip(saved.shape, saved.stride, strict=True))
        data = bytearray(span * itemsize)
        file.seek(offset + saved.offset * itemsize)
        if file.readinto(data) != len(data):  # type: ignore[attr-defined]
            raise Corrupt(f"{where}: the file ends in it")
        flat = torch.frombuffer(data, dtype=getattr(torch, whole.dtype))
        local = share.manifest.locals[number].name
        views[local].copy_(flat.as_strided(saved.shape, saved.stride)[part.first : part.first + part.count])
        share.told(part.nbytes)
    return plain


def _read(path: Path) -> Metadata:
    try:
        with open(path, "rb") as file:
            found = _MetadataUnpickler(file, path).load()
    except Error:
        raise
    except OSError as error:
        raise IoError(f"{path}: {error.strerror}") from error
    except Exception as error:  # whatever unpickling meets in bytes that are none
        raise Corrupt(f"{path} is not the metadata of a checkpoint: {error}") from None
    if not isinstance(found, Metadata):
        raise Corrupt(f"{path} is not the metadata of a checkpoint: a {type(found).__name__}")
    return found


class _MetadataUnpickler(pickle.Unpickler):
    def __init__(self, file: IO[bytes], path: Path) -> None:
        super().__init__(file)
        self._path = path

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _METADATA:
            return _METADATA[module, name]
        if module == "torch" and isinstance(found := getattr(torch, name, None), (torch.dtype, torch.memory_format)):
            return found
        raise Unsupported(f"{self._path} has a {module}.{name}, which is not unpickled")


class _SavedUnpickler(pickle.Unpickler):
    """Of a zip's data.pkl: a _Saved for a tensor."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch._utils" and name in ("_rebuild_tensor_v2", "_rebuild_tensor_v3"):
            return _rebuilt_v2 if name == "_rebuild_tensor_v2" else _rebuilt_v3
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        if (module, name) == ("torch.storage", "UntypedStorage"):
            return None
        found = getattr(torch, name, None) if module == "torch" else None
        if isinstance(found, torch.dtype):
            return found
        if module == "torch" and name in _LEGACY_STORAGES:
            return _LEGACY_STORAGES[name]
        raise Unsupported(f"{module}.{name} is not unpickled")

    def persistent_load(self, pid: Any) -> tuple[str, Any]:
        kind, dtype, key, _, _ = pid
        if kind != "storage":
            raise pickle.UnpicklingError(f"a {kind!r} that is no storage")
        return str(key), dtype


def _rebuilt_v2(storage: tuple[str, Any], offset: int, shape: Any, stride: Any, *rest: Any) -> _Saved:
    return _Saved(storage[0], str(storage[1]).removeprefix("torch."), offset, tuple(shape), tuple(stride))


def _rebuilt_v3(storage: tuple[str, Any], offset: int, shape: Any, stride: Any, *rest: Any) -> _Saved:
    return _Saved(storage[0], str(rest[2]).removeprefix("torch."), offset, tuple(shape), tuple(stride))


def _locate(file: IO[bytes], offset: int, length: int) -> tuple[_Saved, int]:
    """(the tensor, where in the file its storage begins) of an item: a zip, uncompressed, as ``torch.save`` writes."""
    view = _View(file, offset, length)
    with zipfile.ZipFile(view) as archive:
        names = {name.partition("/")[2]: name for name in archive.namelist()}
        if "byteorder" in names and archive.read(names["byteorder"]) != b"little":
            raise Unsupported("big-endian bytes")
        saved = _SavedUnpickler(io.BytesIO(archive.read(names["data.pkl"]))).load()
        if not isinstance(saved, _Saved):
            raise ValueError(f"a {type(saved).__name__}")
        member = archive.getinfo(names[f"data/{saved.storage}"])
    if member.compress_type != zipfile.ZIP_STORED:
        raise Unsupported("a compressed member")
    view.seek(member.header_offset + 26)
    lengths = view.read(4)
    begin = member.header_offset + 30 + int.from_bytes(lengths[:2], "little") + int.from_bytes(lengths[2:], "little")
    last = 1 + saved.offset + sum((n - 1) * stride for n, stride in zip(saved.shape, saved.stride, strict=True))
    if saved.dtype not in DTYPES or saved.offset < 0 or last * DTYPES[saved.dtype] > member.file_size:
        raise ValueError(f"{saved.dtype}{list(saved.shape)} in {member.file_size} bytes")
    return saved, offset + begin


class _View(io.RawIOBase):
    """Part of a file."""

    def __init__(self, file: IO[bytes], offset: int, length: int) -> None:
        self._file, self._offset, self._length, self._at = file, offset, length, 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, to: int, whence: int = 0) -> int:
        self._at = max(0, to + (0, self._at, self._length)[whence])
        return self._at

    def read(self, size: int = -1) -> bytes:
        left = max(0, self._length - self._at)
        self._file.seek(self._offset + self._at)
        data = self._file.read(left if size < 0 else min(size, left))
        self._at += len(data)
        return data


__all__ = ["begins", "describe"]
