"""``mooncake.store`` on torch_mooncake's pool.

``MooncakeDistributedStore`` takes and returns what Mooncake's does: 0, byte counts or negative codes, with the reasons
logged under "torch_mooncake.compat". What a key holds is written once; ``put`` of a key that is there changes nothing
and returns 0, ``upsert`` replaces it. Keys lie in the pool under ``mooncake/<tenant>/``.
"""

from __future__ import annotations

import ctypes
import re
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch_mooncake as tm
from mooncake._codes import (
    INTERNAL_ERROR,
    INVALID_PARAMS,
    NO_AVAILABLE_HANDLE,
    OBJECT_NOT_FOUND,
    TRANSFER_FAIL,
    code_of,
    logger,
)
from mooncake._pools import key_of, open_pool
from mooncake._types import (
    BufferHandle,
    MooncakeHostMemAllocator,
    ObjectDataType,
    ReplicaDescriptor,
    ReplicaStatus,
    ReplicateConfig,
    SoftPinAction,
    make_handle,
)
from torch_mooncake.integrations import _memory
from torch_mooncake.integrations._staging import Staged

Buffer = bytes | bytearray | memoryview | Any
Pieces = Sequence[_memory.Piece]

_ROOM_S = 2.0  # how long a put waits for room
_BYTES_PER_S = 100e6  # and for its bytes to move, at the least
_GET_S = 30.0


def _from_one(if_exists: str) -> Callable[..., int]:
    """A method that stores one piece of memory."""

    def put(
        self: MooncakeDistributedStore,
        key: str,
        buffer_ptr: int,
        size: int,
        config: ReplicateConfig = ReplicateConfig(),  # noqa: B008
    ) -> int:
        return self._put_pieces([key], [[(buffer_ptr, size)]], config, if_exists)[0]

    return put


def _from_many(if_exists: str) -> Callable[..., list[int]]:
    """A method that stores a piece of memory under each key."""

    def put(
        self: MooncakeDistributedStore,
        keys: Sequence[str],
        buffer_ptrs: Sequence[int],
        sizes: Sequence[int],
        config: ReplicateConfig = ReplicateConfig(),  # noqa: B008
    ) -> list[int]:
        if not len(keys) == len(buffer_ptrs) == len(sizes):
            return [INVALID_PARAMS] * len(keys)
        return self._put_pieces(keys, [[piece] for piece in zip(buffer_ptrs, sizes, strict=True)], config, if_exists)

    return put


class MooncakeDistributedStore:
    """A client of the pool. Any thread. Before ``setup`` and after ``close`` calls fail with a code."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pool: tm.Pool | None = None
        self._blobs: tm.Blobs | None = None
        self._prefix = ""
        self._hostname = ""
        self._buffers: _memory.Ranges[int | None] = _memory.Ranges()  # the device of each

    # --- life ---

    def setup(self, *args: Any, **kwargs: Any) -> int:
        """``setup(local_hostname, metadata_server, global_segment_size, local_buffer_size, protocol, rdma_devices,
        master_server_addr, engine=None, …, tenant_id="default", …)``, or one dict of these.

        The pool is the one that TM_ADDRESS, TM_DISCOVERY or TM_POOL name; without them, one of this host for each
        ``master_server_addr``, started if there is none, with ``global_segment_size`` bytes unless TM_MEMORY says how
        many. Nodes lend memory, clients do not. ``metadata_server``, ``protocol``, ``rdma_devices`` and ``engine`` need
        no attention here. -600: something is missing; other codes if the pool cannot be had.
        """
        if len(args) == 1 and not kwargs and isinstance(args[0], dict):
            settings = args[0]
            if not {"local_hostname", "metadata_server"} <= settings.keys():
                logger.warning("setup: local_hostname and metadata_server are required")
                return INVALID_PARAMS
            return self._attach(
                str(settings["local_hostname"]),
                settings.get("global_segment_size", 0),
                str(settings.get("master_server_addr", "")),
                str(settings.get("tenant_id", "default")),
            )
        return self._setup(*args, **kwargs)

    def _setup(
        self,
        local_hostname: str,
        metadata_server: str,
        global_segment_size: int,
        local_buffer_size: int,
        protocol: str,
        rdma_devices: str,
        master_server_addr: str,
        engine: object = None,
        enable_ssd_offload: bool = False,
        ssd_offload_path: str = "",
        tenant_id: str = "default",
        enable_client_http_server: bool = False,
        client_http_port: int = 9300,
    ) -> int:
        return self._attach(local_hostname, global_segment_size, master_server_addr, tenant_id)

    def setup_dummy(self, mem_pool_size: int, local_buffer_size: int, server_address: str) -> int:
        """A client of ``server_address``'s pool; memory need not come from it."""
        return self._attach("127.0.0.1", 0, server_address, "default")

    def _attach(self, hostname: str, segment: int | str, master: str, tenant: str) -> int:
        with self._lock:
            if self._pool is not None:
                return 0
            try:
                pool = open_pool(master, segment)
                self._prefix = key_of(tenant)
            except tm.Error as error:
                return code_of(error, "setup")
            self._pool, self._blobs = pool, tm.Blobs(pool)
            self._hostname = hostname
        return 0

    def close(self) -> int:
        with self._lock:
            pool, self._pool, self._blobs = self._pool, None, None
            self._buffers = _memory.Ranges()
        if pool is not None:
            pool.close()
        return 0

    def health_check(self) -> int:
        """0: the pool answers; 1: not set up, or closed; 2: it does not answer."""
        if self._pool is None:
            return 1
        try:
            self._pool.stat(timeout=5)
        except tm.Error as error:
            code_of(error, "health_check")
            return 2
        return 0

    def get_hostname(self) -> str:
        return self._hostname

    # --- buffers ---

    def register_buffer(self, buffer_ptr: int, size: int) -> int:
        """-600: it has bytes of a registered one, or is not there."""
        if self._pool is None:
            return INTERNAL_ERROR
        device = _memory.cuda_device(buffer_ptr)
        there = device is not None or (
            size > 0 and _memory.mapped(buffer_ptr, 1) and _memory.mapped(buffer_ptr + size - 1, 1)
        )
        with self._lock:
            buffers = self._buffers.added(buffer_ptr, size, device) if there else None
            if buffers is None:
                logger.warning("register_buffer: %d bytes at %#x overlap another, or are not there", size, buffer_ptr)
                return INVALID_PARAMS
            self._buffers = buffers
        return 0

    def unregister_buffer(self, buffer_ptr: int) -> int:
        with self._lock:
            left = self._buffers.removed(buffer_ptr)
            if left is None:
                return INVALID_PARAMS
            self._buffers = left
        return 0

    # --- put ---

    def put(self, key: str, value: Buffer, config: ReplicateConfig = ReplicateConfig()) -> int:  # noqa: B008
        return self.put_batch([key], [value], config)

    def put_parts(self, key: str, *args: Buffer, config: ReplicateConfig = ReplicateConfig()) -> int:  # noqa: B008
        """The parts, one after the other, as one value. Without parts, nothing is done."""
        return self._put_values([key], [list(args)], config, "keep")[0] if args else 0

    def put_batch(
        self,
        keys: Sequence[str],
        values: Sequence[Buffer],
        config: ReplicateConfig = ReplicateConfig(),  # noqa: B008
    ) -> int:
        """0, or the first code that is not; those after it were tried, too."""
        if len(keys) != len(values):
            return INVALID_PARAMS
        codes = self._put_values(keys, [[value] for value in values], config, "keep")
        return next((code for code in codes if code), 0)

    put_from, batch_put_from = _from_one("keep"), _from_many("keep")

    def batch_put_from_multi_buffers(
        self,
        keys: Sequence[str],
        all_buffer_ptrs: Sequence[Sequence[int]],
        all_sizes: Sequence[Sequence[int]],
        config: ReplicateConfig = ReplicateConfig(),  # noqa: B008
    ) -> list[int]:
        """Each key's value is the concatenation of its buffers."""
        pieces = _zipped(keys, all_buffer_ptrs, all_sizes)
        if pieces is None or not all(pieces):
            return [INVALID_PARAMS] * len(keys)
        return self._put_pieces(keys, pieces, config, "keep")

    def upsert(self, key: str, value: Buffer, config: ReplicateConfig = ReplicateConfig()) -> int:  # noqa: B008
        return self._put_values([key], [[value]], config, "replace")[0]

    upsert_from, batch_upsert_from = _from_one("replace"), _from_many("replace")

    def _put_values(
        self, keys: Sequence[str], values: Sequence[Sequence[Buffer]], config: ReplicateConfig, if_exists: str
    ) -> list[int]:
        pieces, held = [], []
        for parts in values:
            pins = [_Pinned(part) for part in parts]
            held.append(pins)
            pieces.append([(pin.address, pin.nbytes) for pin in pins])
        codes = self._put_pieces(keys, pieces, config, if_exists, empty=INVALID_PARAMS)
        del held
        return codes

    def _put_pieces(
        self,
        keys: Sequence[str],
        pieces: Sequence[Pieces],
        config: ReplicateConfig,
        if_exists: str,
        empty: int = 0,
    ) -> list[int]:
        """A code for each key; ``empty`` for one without bytes, which is not stored."""
        if not isinstance(config, ReplicateConfig):
            raise TypeError(f"config is a ReplicateConfig, not {type(config).__name__}")
        blobs = self._blobs
        if blobs is None:
            return [INTERNAL_ERROR] * len(keys)
        codes = [INVALID_PARAMS] * len(keys)
        good, nbytes = [], 0
        for i, (key, of_key) in enumerate(zip(keys, pieces, strict=True)):
            size = sum(each for _, each in of_key)
            if not size or not key:
                codes[i] = empty if key else INVALID_PARAMS
            elif self._there(of_key):
                good.append(i)
                nbytes += size
        if not good:
            return codes
        timeout = _ROOM_S + nbytes / _BYTES_PER_S
        try:
            with Staged([pieces[i] for i in good], self._device) as staged:
                staged.load()
                outcomes = blobs.put_from(
                    [self._key(keys[i]) for i in good],
                    staged.pieces,
                    timeout=timeout,
                    if_exists=if_exists,
                    **config.options(),
                )
        except tm.Error as error:
            outcomes = [error] * len(good)
        full = any(isinstance(outcome, tm.PoolFull) for outcome in outcomes)
        for i, outcome in zip(good, outcomes, strict=True):
            codes[i] = code_of(outcome, f"put {keys[i]!r}") if isinstance(outcome, Exception) else 0
            if full and isinstance(outcome, tm.DeadlineExceeded):  # others of the batch have waited for room, in vain
                codes[i] = NO_AVAILABLE_HANDLE
        return codes

    # --- get ---

    def get(self, key: str) -> bytes:
        """b"" if it is not there."""
        return self.get_batch([key])[0]

    def get_batch(self, keys: Sequence[str]) -> list[bytes]:
        return [b"" if handle is None else handle.tobytes() for handle in self.batch_get_buffer(keys)]

    def get_buffer(self, key: str) -> BufferHandle | None:
        """The value in memory of its own; None if it is not there."""
        return self.batch_get_buffer([key])[0]

    def batch_get_buffer(self, keys: Sequence[str]) -> list[BufferHandle | None]:
        sizes = self._sizes(keys)
        handles = [make_handle(size) if size > 0 else None for size in sizes]
        wanted = [i for i, handle in enumerate(handles) if handle is not None]
        pieces = [[(handles[i].ptr(), sizes[i])] for i in wanted]  # type: ignore[union-attr]
        for i, code in zip(wanted, self._get_pieces([keys[i] for i in wanted], pieces), strict=True):
            if code != sizes[i]:  # gone, or replaced by another size, since it was looked at
                handles[i] = None
        return handles

    def get_into(self, key: str, buffer_ptr: int, size: int) -> int:
        """How many bytes there were; -600: more than ``size``."""
        return self._get_pieces([key], [[(buffer_ptr, size)]])[0]

    def batch_get_into(self, keys: Sequence[str], buffer_ptrs: Sequence[int], sizes: Sequence[int]) -> list[int]:
        if not len(keys) == len(buffer_ptrs) == len(sizes):
            return [INVALID_PARAMS] * len(keys)
        return self._get_pieces(keys, [[piece] for piece in zip(buffer_ptrs, sizes, strict=True)])

    def batch_get_into_multi_buffers(
        self,
        keys: Sequence[str],
        all_buffer_ptrs: Sequence[Sequence[int]],
        all_sizes: Sequence[Sequence[int]],
        prefer_alloc_in_same_node: bool = False,
    ) -> list[int]:
        """How many bytes were spread over each key's buffers. -600: they hold less than the value; -800: several hold
        more (the caller's idea of the value is another one)."""
        pieces = _zipped(keys, all_buffer_ptrs, all_sizes)
        if pieces is None or not all(pieces):
            return [INVALID_PARAMS] * len(keys)
        codes = self._get_pieces(keys, pieces)
        for i, of_key in enumerate(pieces):
            if codes[i] >= 0 and sum(size for _, size in of_key) != codes[i]:
                logger.warning("get %r: the buffers are not of its %d bytes", keys[i], codes[i])
                codes[i] = TRANSFER_FAIL
        return codes

    def _get_pieces(self, keys: Sequence[str], pieces: Sequence[Pieces]) -> list[int]:
        blobs = self._blobs
        if blobs is None:
            return [INTERNAL_ERROR] * len(keys)
        codes = [INVALID_PARAMS] * len(keys)
        good = [i for i, key in enumerate(keys) if key and self._there(pieces[i])]
        try:
            with Staged([pieces[i] for i in good], self._device) as staged:
                outcomes = blobs.get_into([self._key(keys[i]) for i in good], staged.pieces, timeout=_GET_S)
                staged.store()
        except tm.Error as error:
            outcomes = [error] * len(good)
        for i, outcome in zip(good, outcomes, strict=True):
            codes[i] = code_of(outcome, f"get {keys[i]!r}") if isinstance(outcome, Exception) else outcome
        return codes

    # --- what is there ---

    def is_exist(self, key: str) -> int:
        return self.batch_is_exist([key])[0]

    def batch_is_exist(self, keys: Sequence[str]) -> list[int]:
        """1, 0, or -1 if nobody could say."""
        if self._pool is None:
            return [INTERNAL_ERROR] * len(keys)
        named = [i for i, key in enumerate(keys) if key]
        try:
            found = self._pool.exists([self._key(keys[i]) for i in named]) if named else []
        except tm.Error as error:
            code_of(error, "batch_is_exist")
            return [INTERNAL_ERROR] * len(keys)
        there = dict(zip(named, found, strict=True))
        return [int(there.get(i, False)) for i in range(len(keys))]

    def get_size(self, key: str) -> int:
        return self._sizes([key])[0]

    def _sizes(self, keys: Sequence[str]) -> list[int]:
        if self._blobs is None:
            return [INTERNAL_ERROR] * len(keys)
        try:
            outcomes = iter(self._blobs.nbytes([self._key(key) for key in keys if key]))
        except tm.Error as error:
            return [code_of(error, "get_size")] * len(keys)
        found = [next(outcomes) if key else tm.KeyNotFound("") for key in keys]
        return [code_of(each, "get_size") if isinstance(each, Exception) else each for each in found]

    def get_replica_desc(self, key: str) -> list[ReplicaDescriptor]:
        """One for each replica; empty for a key that is not there."""
        return self.batch_get_replica_desc([key]).get(key, [])

    def batch_get_replica_desc(self, keys: Sequence[str]) -> dict[str, list[ReplicaDescriptor]]:
        """Of the keys that are there."""
        found: dict[str, list[ReplicaDescriptor]] = {}
        for key in keys:
            if self._pool is None or not key:
                continue
            try:
                info = self._pool.info(self._key(key))
            except tm.Error as error:
                code_of(error, f"batch_get_replica_desc {key!r}")
                continue
            endpoint = self._hostname if info.local else ""
            found[key] = [ReplicaDescriptor(info.nbytes, endpoint, tier) for tier in info.tiers]
        return found

    # --- removal ---

    def remove(self, key: str, force: bool = False) -> int:
        """0, or -704 if it was not there. What somebody is reading stays whole for them: nothing has to be forced."""
        return self.batch_remove([key], force)[0]

    def batch_remove(self, keys: Sequence[str], force: bool = False) -> list[int]:
        """A code for each: 0, or -704 if it was not there. ``force`` changes nothing: there are no leases."""
        if self._pool is None:
            return [INTERNAL_ERROR] * len(keys)
        named = [i for i, key in enumerate(keys) if key]
        try:
            removed = self._pool.delete([self._key(keys[i]) for i in named]) if named else []
        except tm.Error as error:
            return [code_of(error, "batch_remove")] * len(keys)
        codes = [INVALID_PARAMS] * len(keys)
        for i, gone in zip(named, removed, strict=True):
            codes[i] = 0 if gone else OBJECT_NOT_FOUND
        return codes

    def remove_by_regex(self, regex_pattern: str, force: bool = False) -> int:
        """How many keys were removed in which the pattern was found (Python's ``re.search``)."""
        try:
            pattern = re.compile(regex_pattern)
        except re.error as error:
            logger.warning("remove_by_regex: %s", error)
            return INVALID_PARAMS
        return self._remove_where(lambda key: pattern.search(key) is not None)

    def remove_all(self, force: bool = False) -> int:
        """How many keys were removed: all of this tenant's."""
        return self._remove_where(lambda key: True)

    def _remove_where(self, chosen: Any) -> int:
        if self._pool is None:
            return INTERNAL_ERROR
        try:
            keys = [key for key in self._pool.keys(self._prefix) if chosen(key[len(self._prefix) :])]
            return sum(self._pool.delete(keys)) if keys else 0
        except tm.Error as error:
            return code_of(error, "remove")

    # --- inside ---

    def _key(self, key: str) -> str:
        return key_of(self._prefix, key)

    def _device(self, address: int, nbytes: int) -> int | None:
        buffers = self._buffers
        index = buffers.index(address, nbytes)
        return None if index < 0 else buffers.values[index]

    def _there(self, pieces: Pieces) -> bool:
        """Whether the memory is registered, or at least mapped."""
        for address, nbytes in pieces:
            if nbytes and self._buffers.index(address, nbytes) < 0 and not _memory.mapped(address, nbytes):
                logger.warning("%d bytes at %#x are not there", nbytes, address)
                return False
        return True


class _Pinned:
    """Any buffer, by address, for as long as this lives."""

    def __init__(self, value: Buffer) -> None:
        if isinstance(value, str):
            raise TypeError("a value is bytes or another buffer, not str")
        self._view = memoryview(value).cast("B")
        self.nbytes = self._view.nbytes
        if self._view.readonly or not self.nbytes:
            import numpy as np

            self._array = np.frombuffer(self._view, np.uint8)
            self.address = int(self._array.__array_interface__["data"][0]) if self.nbytes else 0
        else:
            self._anchor = (ctypes.c_char * self.nbytes).from_buffer(self._view)
            self.address = ctypes.addressof(self._anchor)


def _zipped(
    keys: Sequence[str], addresses: Sequence[Iterable[int]], sizes: Sequence[Iterable[int]]
) -> list[list[_memory.Piece]] | None:
    """Pieces for each key; None if the lists differ in length."""
    if not len(keys) == len(addresses) == len(sizes):
        return None
    pieces = []
    for some, lengths in zip(addresses, sizes, strict=True):
        some, lengths = list(some), list(lengths)
        if len(some) != len(lengths):
            return None
        pieces.append(list(zip(some, lengths, strict=True)))
    return pieces


__all__ = [
    "BufferHandle",
    "MooncakeDistributedStore",
    "MooncakeHostMemAllocator",
    "ObjectDataType",
    "ReplicaDescriptor",
    "ReplicaStatus",
    "ReplicateConfig",
    "SoftPinAction",
]
