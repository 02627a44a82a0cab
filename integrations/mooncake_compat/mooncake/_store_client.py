"""A store as a client of the pool: its life, and the memory that it was told of."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from typing import Any

import torch_mooncake as tm
from mooncake._codes import INTERNAL_ERROR, INVALID_PARAMS, code_of, logger
from mooncake._pools import key_of, open_pool
from torch_mooncake.integrations import _memory

Pieces = Sequence[_memory.Piece]


class Client:
    """Any thread. Before ``setup`` and after ``close`` calls fail with a code."""

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


def zipped(
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
