"""What an engine registers, allocates and copies: plain addresses of this process, and of its peers."""

from __future__ import annotations

import mmap
from collections.abc import Sequence

import numpy as np

import torch_mooncake as tm
from mooncake._codes import INTERNAL_ERROR
from mooncake._engine_life import Life
from torch_mooncake.integrations import _memory

_OVERLAPPED = -7
_NOT_REGISTERED = -3
_REGISTER_S = 30


class Memory(Life):
    """0 or a negative code; addresses, of which 0 is none."""

    def __init__(self) -> None:
        super().__init__()
        self._managed: dict[int, mmap.mmap] = {}

    def register_memory(self, buffer_addr: int, capacity: int, location: str = "*") -> int:
        return self.batch_register_memory([buffer_addr], [capacity], location)

    def batch_register_memory(
        self, buffer_addresses: Sequence[int], capacities: Sequence[int], location: str = "*"
    ) -> int:
        """All of them, or none. -7: a range has bytes of another; -1: it is empty, or not there."""
        if self._engine is None:
            return self._refused("register_memory", "initialize it first")
        if len(buffer_addresses) != len(capacities):
            return self._refused("register_memory", f"{len(buffer_addresses)} addresses, {len(capacities)} sizes")
        made: list[int] = []
        for address, nbytes in zip(buffer_addresses, capacities, strict=True):
            code = self._register(self._engine, address, nbytes)
            if code:
                self.batch_unregister_memory(made)
                return code
            made.append(address)
        return 0

    def _register(self, engine: tm.Engine, address: int, nbytes: int) -> int:
        if nbytes <= 0 or address <= 0:
            return self._refused("register_memory", f"{nbytes} bytes at {address:#x}")
        with self._lock:
            if self._regions.added(address, nbytes, None) is None:  # type: ignore[arg-type]
                self._refused("register_memory", f"{nbytes} bytes at {address:#x} overlap registered memory")
                return _OVERLAPPED
            device = _memory.cuda_device(address)
            if device is None and not (_memory.mapped(address, 1) and _memory.mapped(address + nbytes - 1, 1)):
                return self._refused("register_memory", f"{nbytes} bytes at {address:#x} are not there")
            try:
                region = _memory.register(engine, address, nbytes)
            except tm.Error as error:
                return self._refused("register_memory", f"{type(error).__name__}: {error}")
            regions = self._regions.added(address, nbytes, region)
            assert regions is not None
            self._regions = regions
        return 0

    def unregister_memory(self, buffer_addr: int) -> int:
        """0 when nobody touches the memory any more; -3: it was not registered; -1: a peer does, after 30 s."""
        with self._lock:
            known = self._regions
            left = known.removed(buffer_addr)
            if left is None or self._engine is None:
                return _NOT_REGISTERED
            self._regions = left
        try:
            self._engine.deregister(known.values[known.starts.index(buffer_addr)], timeout=_REGISTER_S)
        except tm.Error as error:
            return self._refused("unregister_memory", f"{type(error).__name__}: {error}")
        return 0

    def batch_unregister_memory(self, buffer_addresses: Sequence[int]) -> int:
        codes = [self.unregister_memory(address) for address in buffer_addresses]
        return next((code for code in codes if code), 0)

    def allocate_managed_buffer(self, length: int) -> int:
        """The address of fresh, registered memory; 0 if there is none."""
        memory = mmap.mmap(-1, max(1, length))
        address = np.frombuffer(memory, np.uint8).__array_interface__["data"][0]
        if self.register_memory(address, max(1, length)) != 0:
            return 0
        self._managed[address] = memory
        return int(address)

    def free_managed_buffer(self, user_tensor: int, length: int) -> int:
        if self._managed.get(user_tensor) is None:
            return INTERNAL_ERROR
        code = self.unregister_memory(user_tensor)
        if code != INTERNAL_ERROR:  # else a peer may still write to it: it stays
            del self._managed[user_tensor]
        return code

    def write_bytes_to_buffer(self, dest_address: int, src: str | bytes, length: int) -> int:
        data = src.encode() if isinstance(src, str) else bytes(src)
        if length > len(data) or not _memory.mapped(dest_address, length):
            return self._refused("write_bytes_to_buffer", f"{length} bytes to {dest_address:#x}, {len(data)} are given")
        _memory.view(dest_address, length)[:] = data[:length]
        return 0

    def read_bytes_from_buffer(self, source_address: int, length: int) -> bytes:
        """b"" for memory that is not there."""
        return bytes(_memory.view(source_address, length)) if _memory.mapped(source_address, length) else b""

    def get_first_buffer_address(self, segment_name: str) -> int:
        """The lowest address that the peer has registered; 0 if there is none, or no peer."""
        try:
            return self._session(segment_name).first_address()
        except tm.Error as error:
            self._refused("get_first_buffer_address", f"{type(error).__name__}: {error}")
            return 0
