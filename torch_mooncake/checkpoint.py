"""torch.distributed.checkpoint over the pool.

    dcp.save(state_dict, storage_writer=tm.checkpoint.Writer("run/step100"))
    dcp.load(state_dict, storage_reader=tm.checkpoint.Reader("run/step100"))

A checkpoint is a small head object under its id, and data objects under ``<id>/.data/`` that the head names. The ranks
put data, each its items, as DCP's planners say; the coordinator puts the head last. So a checkpoint is visible whole or
not at all, replacing one is the flip of its head, and a save that fails leaves the one before as it was. What a save
leaves behind that nobody's head names goes with the next save or ``delete`` of the id. One save of an id at a time.

The head is DCP's own metadata, encoded with msgspec. Values that are no tensors are stored as the pool stores values
(None, bool, int, float, str, bytes, list, tuple, dict, arrays): nothing is pickled, and nothing that was read is
unpickled. The pool is a cache: a checkpoint whose data was evicted or lost is KeyNotFound when it is loaded, never
partial; use ``replicas``, or save to files as well, for what must survive.
"""

from __future__ import annotations

import dataclasses
import io
import logging
import math
import os
import secrets
from collections.abc import Iterable
from typing import Any, NamedTuple

import msgspec
import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from torch_mooncake import context, values
from torch_mooncake.clock import deadline_ns, seconds_left
from torch_mooncake.config import parse_bytes
from torch_mooncake.errors import Corrupt, Error, InvalidArgument, KeyExists, KeyNotFound, LayoutMismatch, Unsupported
from torch_mooncake.objects import describe
from torch_mooncake.pool import Pool
from torch_mooncake.sharding import Box
from torch_mooncake.tensors import DTYPES, List, Node, Tensor, encode

_FORMAT = 1
_log = logging.getLogger("torch_mooncake.checkpoint")


class Place(NamedTuple):
    """Where an item is: a data object's key, and its position in it."""

    key: str
    position: int


class _TensorHead(msgspec.Struct, tag=0, array_like=True, frozen=True):
    dtype: str
    requires_grad: bool
    size: tuple[int, ...]
    chunks: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]  # (offsets, sizes)


class _BytesHead(msgspec.Struct, tag=1, array_like=True, frozen=True):
    pass


class _Stored(msgspec.Struct, array_like=True, frozen=True):
    fqn: str
    offset: tuple[int, ...] | None
    index: int | None
    key: int  # in Head.keys
    position: int


class _Head(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    format: int
    save_id: str
    version: str | None
    keys: tuple[str, ...]
    entries: dict[str, _TensorHead | _BytesHead]
    paths: dict[str, tuple[str | int, ...]] | None  # DefaultSavePlanner's: how names were made
    stored: tuple[_Stored, ...]


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_Head)


def exists(checkpoint_id: str | os.PathLike[str], *, pool: Pool | None = None, timeout: float | None = 30) -> bool:
    """Whether there is a whole checkpoint."""
    return _pool(pool).exists(_id(checkpoint_id), timeout=timeout)


def delete(checkpoint_id: str | os.PathLike[str], *, pool: Pool | None = None, timeout: float | None = 30) -> bool:
    """Remove a checkpoint, and what unfinished saves of it left. False if there was none."""
    name, deadline = _id(checkpoint_id), deadline_ns(timeout)
    found = _pool(pool).delete(name, timeout=seconds_left(deadline))
    _sweep(_pool(pool), name, (), deadline)
    return found


class Writer(StorageWriter):
    """Saves to the pool. ``dcp.save`` and ``dcp.async_save`` take it as ``storage_writer``; it may be used again.

    ``overwrite=False``: KeyExists if the id has a checkpoint. ``replicas``: as of ``put``. ``bucket``: bytes of tensors
    that go into one data object. ``timeout``: seconds for each put. The default pool, if none is given.
    """

    def __init__(
        self,
        checkpoint_id: str | os.PathLike[str],
        *,
        pool: Pool | None = None,
        overwrite: bool = True,
        replicas: int | str = 1,
        bucket: int | str = "512MiB",
        timeout: float | None = 300,
    ) -> None:
        super().__init__()
        self.checkpoint_id = _id(checkpoint_id)
        self.overwrite, self.replicas, self.timeout = overwrite, replicas, timeout
        self.bucket_nbytes = parse_bytes(bucket)
        self.save_id = secrets.token_hex(8)
        self._given = pool

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id:
            self.checkpoint_id = _id(checkpoint_id)

    def storage_meta(self) -> StorageMeta | None:
        return StorageMeta(checkpoint_id=self.checkpoint_id, save_id=self.save_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self.save_id = secrets.token_hex(8)  # DCP calls reset() for a new id only
        if not kwargs.get("use_collectives", True):
            raise Unsupported("a checkpoint in the pool has one head: use_collectives=False cannot make it")
        if is_coordinator and not self.overwrite and exists(self.checkpoint_id, pool=self._given, timeout=self.timeout):
            raise KeyExists(f"the checkpoint {self.checkpoint_id!r} exists")

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        results: list[WriteResult] = []
        bucket: list[tuple[WriteItem, Any, int]] = []
        filled = 0
        for item in plan.items:
            value, nbytes = _resolved(item, planner)
            bucket.append((item, value, nbytes))
            filled += nbytes
            if filled >= self.bucket_nbytes:
                results += self._put(bucket)
                bucket, filled = [], 0
        if bucket:
            results += self._put(bucket)
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def _put(self, bucket: list[tuple[WriteItem, Any, int]]) -> list[WriteResult]:
        key = f"{_data_prefix(self.checkpoint_id)}{secrets.token_hex(12)}"
        items = [value for _, value, _ in bucket]
        _pool(self._given).put(key, items, if_exists="error", replicas=self.replicas, timeout=self.timeout)
        return [
            WriteResult(index=item.index, size_in_bytes=nbytes, storage_data=Place(key, position))
            for position, (item, _, nbytes) in enumerate(bucket)
        ]

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        metadata.version = CURRENT_DCP_VERSION
        metadata.storage_data = {result.index: result.storage_data for rank in results for result in rank}
        metadata.storage_meta = self.storage_meta()
        pool, deadline = _pool(self._given), deadline_ns(self.timeout)
        head, keys = _encoded(metadata, self.save_id)
        pool.put(
            self.checkpoint_id,
            head,
            if_exists="replace" if self.overwrite else "error",
            replicas=self.replicas,
            meta={"kind": "checkpoint"},
            timeout=self.timeout,
        )
        try:
            _sweep(pool, self.checkpoint_id, keys, deadline)
        except Error as error:  # it is saved; what was before it goes with the next save
            _log.warning(
                "checkpoint %r is saved, but older data of it could not be deleted: %s", self.checkpoint_id, error
            )

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return _is_id(checkpoint_id)


class Reader(StorageReader):
    """Loads from the pool, with any number of ranks and any placements: each reads the bytes it needs and no others.

    KeyNotFound if there is no such checkpoint, if its data is gone, or if it was replaced while the ranks looked."""

    def __init__(
        self, checkpoint_id: str | os.PathLike[str], *, pool: Pool | None = None, timeout: float | None = 300
    ) -> None:
        super().__init__()
        self.checkpoint_id = _id(checkpoint_id)
        self.timeout = timeout
        self._given = pool
        self._save_id = ""
        self._stored: dict[MetadataIndex, Place] = {}

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id:
            self.checkpoint_id = _id(checkpoint_id)
        self._stored = {}

    def read_metadata(self) -> Metadata:
        value = _pool(self._given).get(self.checkpoint_id, timeout=self.timeout)
        if not isinstance(value, bytes):
            raise LayoutMismatch(f"key {self.checkpoint_id!r} holds no checkpoint")
        metadata = _decoded(value, self.checkpoint_id)
        assert metadata.storage_meta is not None
        metadata.storage_meta.load_id = secrets.token_hex(8)
        return metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool) -> None:
        self._stored = metadata.storage_data
        self._save_id = (metadata.storage_meta and metadata.storage_meta.save_id) or ""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return dataclasses.replace(plan, storage_data=self._save_id)

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        if len({plan.storage_data for plan in plans}) > 1:
            raise KeyNotFound(
                f"checkpoint {self.checkpoint_id!r} was replaced while it was being loaded", retryable=True
            )
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        deadline = deadline_ns(self.timeout)
        by_key: dict[str, list[tuple[ReadItem, int]]] = {}
        for item in plan.items:
            place = self._stored.get(item.storage_index)
            if place is None:
                raise Corrupt(f"checkpoint {self.checkpoint_id!r} does not say where {item.storage_index} is")
            by_key.setdefault(place.key, []).append((item, place.position))
        client = _pool(self._given)._client(deadline)
        located = client.locate_many(list(by_key), deadline)
        for items, found in zip(by_key.values(), located, strict=True):
            if isinstance(found, KeyNotFound):
                raise KeyNotFound(
                    f"data of checkpoint {self.checkpoint_id!r} is gone: it was replaced, evicted or lost"
                )
            if isinstance(found, Exception):
                raise found
            self._read(client, found, deadline, items, planner)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _read(
        self, client: Any, found: Any, deadline: int, items: list[tuple[ReadItem, int]], planner: LoadPlanner
    ) -> None:
        root = describe(client, found, deadline).root
        if not isinstance(root, List):
            raise Corrupt(f"{found.key.decode()!r} is no data of a checkpoint")
        reader = values.Reader(client, found, deadline)
        targets: list[tuple[ReadItem, torch.Tensor]] = []
        others: list[tuple[ReadItem, Node]] = []
        for item, position in items:
            if not 0 <= position < len(root.items):
                raise Corrupt(f"{found.key.decode()!r} has no item {position}")
            node = root.items[position]
            if (item.type == LoadItemType.TENSOR) != isinstance(node, Tensor):
                raise Corrupt(f"{item.storage_index.fqn!r} is a tensor in the head or in the data, not in both")
            if isinstance(node, Tensor):
                target = planner.resolve_tensor(item).detach()
                _plan(reader, node, item, target)
                targets.append((item, target))
            else:
                others.append((item, node))
        read = values.fresh(client, found, deadline, List(tuple(node for _, node in others)))
        reader.run()
        for item, target in targets:
            planner.commit_tensor(item, target)
        for (item, _), value in zip(others, read, strict=True):
            stream = io.BytesIO()  # what planners expect: made here, of a value that was decoded
            torch.save(value, stream)
            stream.seek(0)
            planner.load_bytes(item, stream)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return _is_id(checkpoint_id)


def _plan(reader: values.Reader, node: Tensor, item: ReadItem, target: torch.Tensor) -> None:
    offsets, lengths = tuple(item.storage_offsets), tuple(item.lengths)
    fits = len(offsets) == len(node.shape) and all(
        o >= 0 and n >= 0 and o + n <= size for o, n, size in zip(offsets, lengths, node.shape, strict=True)
    )
    if not fits or tuple(target.shape) != lengths:
        raise LayoutMismatch(f"{item.storage_index.fqn!r}: {lengths} at {offsets} of {node.shape} into {target.shape}")
    reader.plan_tensor(node, target, Box(tuple(((o, n),) if n else () for o, n in zip(offsets, lengths, strict=True))))


def _resolved(item: WriteItem, planner: SavePlanner) -> tuple[Any, int]:
    """(value, its bytes). TypeError that names it, for what cannot be stored."""
    try:
        if item.type != WriteItemType.BYTE_IO:
            tensor = planner.resolve_data(item)
            assert isinstance(tensor, torch.Tensor)
            return tensor.detach(), tensor.numel() * tensor.element_size()
        if not isinstance(planner, DefaultSavePlanner):
            name = type(planner).__name__
            raise Unsupported(f"{name} is no DefaultSavePlanner, which says what a value is before it is pickled")
        value = planner.lookup_object(item.index)
        encoded = encode(value)
        return value, len(encoded.meta) + encoded.nbytes
    except TypeError as error:
        raise TypeError(f"{item.index.fqn!r}: {error}") from None


def _encoded(metadata: Metadata, save_id: str) -> tuple[bytes, tuple[str, ...]]:
    """(the head, the keys of its data)."""
    entries: dict[str, _TensorHead | _BytesHead] = {}
    for fqn, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, BytesStorageMetadata):
            entries[fqn] = _BytesHead()
            continue
        chunks = tuple((tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in entry.chunks)
        dtype = str(entry.properties.dtype).removeprefix("torch.")
        entries[fqn] = _TensorHead(dtype, entry.properties.requires_grad, tuple(entry.size), chunks)
    numbers: dict[str, int] = {}
    stored = []
    for index, place in (metadata.storage_data or {}).items():
        offset = None if index.offset is None else tuple(index.offset)
        number = numbers.setdefault(place.key, len(numbers))
        stored.append(_Stored(index.fqn, offset, index.index, number, place.position))
    paths = metadata.planner_data
    if paths is not None:
        plain = isinstance(paths, dict) and all(
            isinstance(path, tuple) and all(type(step) in (str, int) for step in path) for path in paths.values()
        )
        if not plain:
            raise Unsupported(f"planner data of type {type(paths).__name__} cannot be stored without pickling it")
    head = _Head(_FORMAT, save_id, metadata.version, tuple(numbers), entries, paths, tuple(stored))
    return _encoder.encode(head), tuple(numbers)


def _decoded(head: bytes, name: str) -> Metadata:
    """Corrupt for what is not a head, or describes what cannot be."""
    try:
        decoded = _decoder.decode(head)
    except (msgspec.DecodeError, RecursionError) as error:
        raise Corrupt(f"key {name!r} holds no checkpoint: {error}") from None
    if decoded.format != _FORMAT:
        raise Corrupt(f"checkpoint {name!r} has format {decoded.format}; this version reads {_FORMAT}")
    entries: dict[str, Any] = {}
    for fqn, entry in decoded.entries.items():
        if isinstance(entry, _BytesHead):
            entries[fqn] = BytesStorageMetadata()
            continue
        if entry.dtype not in DTYPES or not _sound(entry):
            raise Corrupt(f"checkpoint {name!r}: {fqn!r} has a dtype, shape or chunks that make no sense")
        entries[fqn] = TensorStorageMetadata(
            TensorProperties(dtype=getattr(torch, entry.dtype), requires_grad=entry.requires_grad),
            torch.Size(entry.size),
            [ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for offsets, sizes in entry.chunks],
        )
    stored = {}
    for item in decoded.stored:
        if not 0 <= item.key < len(decoded.keys):
            raise Corrupt(f"checkpoint {name!r} does not name the data of {item.fqn!r}")
        stored[MetadataIndex(item.fqn, item.offset, item.index)] = Place(decoded.keys[item.key], item.position)
    return Metadata(
        entries,
        planner_data=decoded.paths,
        storage_data=stored,
        storage_meta=StorageMeta(checkpoint_id=name, save_id=decoded.save_id),
        version=decoded.version,
    )


def _sound(entry: _TensorHead) -> bool:
    dims = len(entry.size)
    if any(n < 0 for n in entry.size) or math.prod(entry.size) >= 1 << 62:
        return False
    return all(
        len(offsets) == len(sizes) == dims
        and all(o >= 0 and n >= 0 and o + n <= size for o, n, size in zip(offsets, sizes, entry.size, strict=True))
        for offsets, sizes in entry.chunks
    )


def _sweep(pool: Pool, name: str, kept: Iterable[str], deadline: int) -> None:
    """Delete the data of ``name`` that is not kept."""
    found = pool.keys(_data_prefix(name), timeout=seconds_left(deadline))
    pool.delete(sorted(set(found) - set(kept)), timeout=seconds_left(deadline))


def _pool(given: Pool | None) -> Pool:
    return context.default() if given is None else given


def _data_prefix(name: str) -> str:
    return f"{name}/.data/"


def _is_id(checkpoint_id: Any) -> bool:
    name = os.fspath(checkpoint_id) if isinstance(checkpoint_id, os.PathLike) else checkpoint_id
    return isinstance(name, str) and 0 < len(name.encode()) <= 900


def _id(checkpoint_id: str | os.PathLike[str]) -> str:
    if not _is_id(checkpoint_id):
        raise InvalidArgument(f"a checkpoint's id is text of 1 to 900 bytes, not {checkpoint_id!r}")
    return os.fspath(checkpoint_id)


__all__ = ["Place", "Reader", "Writer", "delete", "exists"]
