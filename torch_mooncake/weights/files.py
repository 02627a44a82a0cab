"""Checkpoints on disk as a source of weights: described by their headers, read into a publisher's memory.

A safetensors file; a folder of such files, with or without ``model.safetensors.index.json`` (or the index itself); a
folder of ``torch.distributed.checkpoint``. No tensor is loaded before it is published; then its bytes go from the file
to where subscribers read them, with no copy in between. Several ranks share the bytes: each reads its part of them.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from torch_mooncake import sharding
from torch_mooncake.errors import Corrupt, Error, InvalidArgument, IoError, LayoutMismatch
from torch_mooncake.safetensors_io import mapped
from torch_mooncake.tensors import DTYPES
from torch_mooncake.weights.shards import Ints, Local, Manifest, Piece, Whole
from torch_mooncake.weights.sources import Source

if TYPE_CHECKING:
    from torch_mooncake.regions import Region
    from torch_mooncake.transfer import Engine, File, Op
    from torch_mooncake.weights.arena import Arena

_INDEX = "model.safetensors.index.json"
_WINDOW = 64 << 20  # bytes under way
_PAUSE_S = 0.0002  # for what was cancelled to end
_BATCH = 16 << 20  # of one op
_READ_S = 600.0


class Extent(NamedTuple):
    """A box of a whole tensor, and where it is. ``offset``: of its first byte; of a DCP item, of the item."""

    whole: int
    start: tuple[int, ...]
    size: tuple[int, ...]
    file: int
    offset: int
    length: int  # bytes there; of a DCP item more than the tensor's


class Identity(NamedTuple):
    """Of a file as it was when it was described."""

    nbytes: int
    inode: int
    modified_ns: int

    @classmethod
    def of(cls, stat: os.stat_result) -> Identity:
        return cls(stat.st_size, stat.st_ino, stat.st_mtime_ns)


class Checkpoint:
    """The tensors of a checkpoint, described without loading them. ``path``: of a file or folder, or those of
    several safetensors files.

    ``prefix``: only tensors whose names begin so, and they go without it ("model." of what was saved as
    ``{"model": …, "optimizer": …}``). Values of a DCP checkpoint that are no tensors are not weights.

    Errors name the file, and the tensor if it is one's: IoError (a file that is not there), Corrupt (cut short,
    malformed, a shard that is missing), Unsupported (a dtype that torch does not have, transformed DCP items).
    """

    def __init__(self, path: str | os.PathLike[str] | Sequence[str], *, prefix: str = "") -> None:
        several = None if isinstance(path, (str, os.PathLike)) else [os.fspath(file) for file in path]
        root = Path(".") if several is not None else Path(path)  # type: ignore[arg-type]
        self.path, self.prefix = ", ".join(several) if several is not None else os.fspath(root), prefix
        self.files: list[str] = []
        self.identities: list[Identity] = []
        self.wholes: list[Whole] = []
        self.extents: list[Extent] = []
        self.kind = "dcp" if several is None and (root / ".metadata").exists() else "safetensors"
        if several is not None:
            self._together([Path(file) for file in several])
        elif self.kind == "dcp":
            from torch_mooncake.weights import dcp

            dcp.describe(self)
        else:
            self._safetensors(root)
        if not self.wholes:
            raise InvalidArgument(f"{self.path} has no tensors" + (f" under {prefix!r}" if prefix else ""))
        self.extents.sort(key=lambda extent: (extent.file, extent.offset, extent.start))

    @property
    def nbytes(self) -> int:
        """Of all tensors."""
        return sum(math.prod(whole.shape) * DTYPES[whole.dtype] for whole in self.wholes)

    @property
    def manifest(self) -> Manifest:
        """Of all of it."""
        return Share(self, 0, 1).manifest

    def own_name(self, name: str) -> str | None:
        """What a tensor goes by; None if it is not under the prefix."""
        return name.removeprefix(self.prefix) if name.startswith(self.prefix) else None

    def add_file(self, path: Path, why: str) -> int:
        """Its number. ``why``: what it is needed for, for IoError."""
        try:
            identity = Identity.of(os.stat(path))
        except OSError as error:
            raise IoError(f"{path}: {error.strerror} ({why})") from error
        self.files.append(str(path))
        self.identities.append(identity)
        return len(self.files) - 1

    def _safetensors(self, root: Path) -> None:
        if root.name.endswith(".index.json"):
            self._indexed(root)
        elif not root.is_dir():
            self._add(root, None, "the checkpoint")
        elif (root / _INDEX).exists():
            self._indexed(root / _INDEX)
        else:
            files = sorted(root.glob("*.safetensors"))
            if not files:
                raise IoError(f"{root}: neither .safetensors files nor a .metadata of torch.distributed.checkpoint")
            self._together(files)

    def _together(self, files: Iterable[Path]) -> None:
        known: dict[str, str] = {}
        for file in files:
            for name in self._add(file, None, "the checkpoint"):
                if name in known:
                    raise Corrupt(f"{file}: tensor {name!r} is in {known[name]}, too")
                known[name] = file.name

    def _indexed(self, index: Path) -> None:
        try:
            document = json.loads(index.read_bytes())
        except OSError as error:
            raise IoError(f"{index}: {error.strerror}") from error
        except ValueError as error:
            raise Corrupt(f"{index} is not JSON: {error}") from None
        of = document.get("weight_map") if isinstance(document, dict) else None
        if not isinstance(of, dict) or not all(isinstance(file, str) for file in of.values()):
            raise Corrupt(f"{index} has no weight_map from names to files")
        by_file: dict[str, list[str]] = {}
        for name, file in of.items():
            by_file.setdefault(file, []).append(name)
        for file, names in sorted(by_file.items()):
            if Path(file).name != file:
                raise Corrupt(f"{index}: {names[0]!r} is in {file!r}, which is not beside the index")
            self._add(index.parent / file, set(names), f"{index.name} says that it has {names[0]!r}")

    def _add(self, path: Path, wanted: set[str] | None, why: str) -> list[str]:
        """The names of the file's tensors; those not ``wanted`` are left out."""
        number = self.add_file(path, why)
        with mapped(path) as (header, _):
            tensors = header.tensors
        names = [tensor.name for tensor in tensors]
        if wanted is not None and (missing := sorted(wanted.difference(names))):
            raise Corrupt(f"{path} has no tensor {missing[0]!r}, which the index says it has")
        for tensor in tensors:
            name = self.own_name(tensor.name)
            if name is None or (wanted is not None and tensor.name not in wanted):
                continue
            whole = len(self.wholes)
            self.wholes.append(Whole(name, tensor.shape, tensor.dtype))
            start = (0,) * len(tensor.shape)
            if tensor.nbytes:
                self.extents.append(Extent(whole, start, tensor.shape, number, tensor.offset, tensor.nbytes))
        return names

    def __repr__(self) -> str:
        return f"<Checkpoint {self.path}: {len(self.wholes)} tensors, {self.nbytes} bytes in {len(self.files)} files>"


@dataclass(frozen=True)
class Part:
    """Rows of an extent: what one rank reads of it."""

    extent: Extent
    first: int  # row of the extent
    count: int
    nbytes: int


class Share(Source):
    """One rank's part of a checkpoint: as many bytes as every other rank's, but for the rows that cannot be cut."""

    def __init__(self, checkpoint: Checkpoint, rank: int, world: int) -> None:
        self.checkpoint = checkpoint
        self._rank, self._world = rank, world
        self._parts = list(_parts(checkpoint, rank, world))
        self.manifest = self._manifest()

    def _manifest(self) -> Manifest:
        wholes: dict[int, int] = {}  # number in the checkpoint: in the manifest
        locals_: list[Local] = []
        pieces: list[Piece] = []
        for part in self._parts:
            extent = part.extent
            whole = self.checkpoint.wholes[extent.whole]
            size = (part.count, *extent.size[1:]) if extent.size else ()
            start = (extent.start[0] + part.first, *extent.start[1:]) if extent.size else ()
            name = whole.name if size == whole.shape else f"{whole.name} {list(start)}"
            number = wholes.setdefault(extent.whole, len(wholes))
            pieces.append(Piece(number, len(locals_), start, size, 0, sharding.contiguous_strides(size)))
            locals_.append(Local(name, size, whole.dtype))
        if self._rank == 0:  # the empty ones
            for number, whole in enumerate(self.checkpoint.wholes):
                if 0 in whole.shape:
                    wholes.setdefault(number, len(wholes))
        return Manifest.of([self.checkpoint.wholes[number] for number in wholes], locals_, pieces)

    def renewed(self, checkpoint: Checkpoint) -> Share:
        """The same part of another checkpoint. LayoutMismatch if it has not the same tensors, in the same shares."""
        found = Share(checkpoint, self._rank, self._world)
        if found.manifest.digest != self.manifest.digest:
            raise LayoutMismatch(f"{checkpoint.path} has not the tensors of {self.checkpoint.path}")
        found.progress = self.progress
        return found

    def fill(self, engine: Engine, arena: Arena, slot: int, first: int = 0) -> None:
        """Reads the files into the slot. Corrupt if one is not as it was when it was described."""
        offsets = arena.offsets[first:].tolist()
        by_file: dict[int, list[int]] = {}
        for number, part in enumerate(self._parts):
            by_file.setdefault(part.extent.file, []).append(number)
        for file, numbers in by_file.items():
            path = self.checkpoint.files[file]
            try:
                with open(path, "rb") as stream:
                    self._check(file, os.fstat(stream.fileno()), "since it was described")
                    if self.checkpoint.kind == "dcp":
                        from torch_mooncake.weights import dcp

                        begins = dcp.begins(self, stream, numbers, arena.views(slot))
                    else:
                        begins = {number: self._parts[number].extent.offset for number in numbers}
                    with engine.open_file(stream) as source:
                        self._read(engine, source, path, begins, arena.slots[slot][0], offsets)
                    self._check(file, os.stat(path), "while it was read")
            except Error:
                raise
            except OSError as error:
                raise IoError(f"{path}: {error.strerror} (tensor {self._name(numbers[0])!r})") from error

    def _check(self, file: int, stat: os.stat_result, when: str) -> None:
        path, then, now = self.checkpoint.files[file], self.checkpoint.identities[file], Identity.of(stat)
        if then == now:
            return
        cut = [
            part.extent
            for part in self._parts
            if part.extent.file == file and part.extent.offset + part.extent.length > now.nbytes
        ]
        if cut:
            end, name = cut[0].offset + cut[0].length, self.checkpoint.wholes[cut[0].whole].name
            raise Corrupt(f"{path}: tensor {name!r} ends at byte {end}, the file has {now.nbytes} bytes by now")
        raise Corrupt(f"{path} was changed {when}")

    def _name(self, number: int) -> str:
        return self.checkpoint.wholes[self._parts[number].extent.whole].name

    def part(self, number: int) -> Part:
        return self._parts[number]

    def _read(
        self,
        engine: Engine,
        source: File,
        path: str,
        begins: Mapping[int, int],
        region: Region,
        offsets: Sequence[int],
    ) -> None:
        """``begins``: of parts, where the bytes of their extents begin in the file."""
        places = []
        for number, begin in begins.items():
            part = self._parts[number]
            places.append((number, begin + part.nbytes // part.count * part.first, part.nbytes))
        under_way: list[tuple[Op, int, list[int]]] = []
        try:
            for batch, there, here, nbytes in _batches(places, offsets):
                total = int(nbytes.sum())
                while under_way and total + sum(n for _, n, _ in under_way) > _WINDOW:
                    self._finish(path, *under_way.pop(0))
                op = engine.read(
                    region, source, local_offsets=here, remote_offsets=there, nbytes=nbytes,
                    timeout=_READ_S,
                )  # fmt: skip
                under_way.append((op, total, batch))
            while under_way:
                self._finish(path, *under_way.pop(0))
        finally:
            for op, _, _ in under_way:
                op.cancel()
            for op, _, _ in under_way:
                while not op.done():  # what it writes to may be filled anew
                    time.sleep(_PAUSE_S)

    def _finish(self, path: str, op: Op, nbytes: int, numbers: list[int]) -> None:
        try:
            op.wait()
        except Error as error:
            first, last = self._name(numbers[0]), self._name(numbers[-1])
            which = f"tensor {first!r}" if first == last else f"tensors {first!r} to {last!r}"
            raise type(error)(f"{path}: {which}: {error}", retryable=error.retryable) from error
        self.told(nbytes)

    def told(self, nbytes: int) -> None:
        if self.progress is not None:
            self.progress(nbytes)


def _parts(checkpoint: Checkpoint, rank: int, world: int) -> Iterable[Part]:
    sizes = [math.prod(e.size) * DTYPES[checkpoint.wholes[e.whole].dtype] for e in checkpoint.extents]
    total, at = sum(sizes), 0
    low, high = total * rank // world, total * (rank + 1) // world
    for extent, nbytes in zip(checkpoint.extents, sizes, strict=True):
        rows = extent.size[0] if extent.size else 1
        row = nbytes // rows
        first, last = (min(rows, max(0, -(-(x - at) // row))) for x in (low, high))
        if first < last:
            yield Part(extent, first, last - first, (last - first) * row)
        at += nbytes


def _batches(
    places: list[tuple[int, int, int]], offsets: Sequence[int]
) -> Iterable[tuple[list[int], Ints, Ints, Ints]]:
    """(parts, offsets in the file, offsets in the slot, lengths): each of about ``_BATCH`` bytes; long ones are cut."""
    batch: list[tuple[int, int, int, int]] = []
    size = 0

    def made() -> tuple[list[int], Ints, Ints, Ints]:
        columns: list[Any] = list(zip(*batch, strict=True))
        return list(columns[0]), *(np.array(column, np.int64) for column in columns[1:])  # type: ignore[return-value]

    for number, there, nbytes in places:
        here = offsets[number]
        for first in range(0, nbytes, _BATCH):
            length = min(_BATCH, nbytes - first)
            if size and size + length > _BATCH:
                yield made()
                batch, size = [], 0
            batch.append((number, there + first, here + first, length))
            size += length
    if batch:
        yield made()
