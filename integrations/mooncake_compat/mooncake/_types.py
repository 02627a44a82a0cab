"""The small classes of ``mooncake.store``."""

from __future__ import annotations

import ctypes
import enum
import functools
import mmap
from typing import Any

import numpy as np


class SoftPinAction(enum.IntEnum):
    PRESERVE = 0
    ENABLE = 1
    DISABLE = 2


class ObjectDataType(enum.IntEnum):
    UNKNOWN = 0
    KVCACHE = 1
    TENSOR = 2
    WEIGHT = 3
    SAMPLE = 4
    ACTIVATION = 5
    GRADIENT = 6
    OPTIMIZER_STATE = 7
    METADATA = 8
    GENERAL = 9


class ReplicaStatus(enum.IntEnum):
    UNDEFINED = 0
    INITIALIZED = 1
    PROCESSING = 2
    COMPLETE = 3
    REMOVED = 4
    FAILED = 5


_KINDS: dict[str, tuple[type | tuple[type, ...], Any]] = {
    "replica_num": (int, 1),
    "nof_replica_num": (int, 0),
    "dfs_replica_num": (int, 0),
    "with_hard_pin": (bool, False),
    "soft_pin_action": (SoftPinAction, SoftPinAction.PRESERVE),
    "soft_pin_ttl_ms": ((int, type(None)), None),
    "preferred_segment": (str, ""),
    "preferred_segments": (list, []),
    "preferred_nof_segments": (list, []),
    "prefer_alloc_in_same_node": (bool, False),
    "data_type": (ObjectDataType, ObjectDataType.UNKNOWN),
    "group_ids": ((list, type(None)), None),
}


class ReplicateConfig:
    """How a put is kept: ``replica_num`` (as many as the hosts allow), ``with_hard_pin``, ``soft_pin_action`` (or
    ``with_soft_pin``, as it was called). What says where it is kept is taken and has no effect: the pool places values.
    AttributeError for other names, TypeError for other types."""

    def __init__(self) -> None:
        for name, (_, default) in _KINDS.items():
            object.__setattr__(self, name, list(default) if isinstance(default, list) else default)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "with_soft_pin":
            name, value = "soft_pin_action", SoftPinAction.ENABLE if value else SoftPinAction.PRESERVE
        if name not in _KINDS:
            raise AttributeError(f"'ReplicateConfig' object has no attribute {name!r}")
        kind, _ = _KINDS[name]
        if not isinstance(value, kind):
            raise TypeError(f"{name} cannot be a {type(value).__name__}")
        object.__setattr__(self, name, value)

    @property
    def with_soft_pin(self) -> bool:
        return bool(self.__dict__["soft_pin_action"] == SoftPinAction.ENABLE)

    def options(self) -> dict[str, Any]:
        """The pool's words for it."""
        given = self.__dict__
        pin = "hard" if given["with_hard_pin"] else "soft" if self.with_soft_pin else None
        return {"replicas": f"≤{min(64, max(1, given['replica_num']))}", "pin": pin}


class BufferHandle:
    """A value in memory of its own: ``ptr()``, ``size()``, and the buffer protocol."""

    def ptr(self) -> int:
        return ctypes.addressof(self)  # type: ignore[arg-type]

    def size(self) -> int:
        return ctypes.sizeof(self)  # type: ignore[arg-type]

    def tobytes(self) -> bytes:
        return ctypes.string_at(self.ptr(), self.size())


@functools.lru_cache(256)
def _handle_type(nbytes: int) -> Any:
    return type("BufferHandle", (BufferHandle, ctypes.Array), {"_type_": ctypes.c_ubyte, "_length_": nbytes})


def make_handle(nbytes: int) -> BufferHandle:
    handle: BufferHandle = _handle_type(nbytes)()
    return handle


class Descriptor:
    def __init__(self, size: int = 0, transport_endpoint: str = "") -> None:
        self.size = size
        self.transport_endpoint = transport_endpoint
        self.buffer_address = 0  # the pool's own business


class MemoryDescriptor:
    def __init__(self, descriptor: Descriptor) -> None:
        self.buffer_descriptor = descriptor


class ReplicaDescriptor:
    """Where a value lies: in memory ("dram") or on an SSD."""

    def __init__(self, nbytes: int, endpoint: str, tier: str) -> None:
        self._memory = MemoryDescriptor(Descriptor(nbytes, endpoint))
        self._tier = tier
        self.status = ReplicaStatus.COMPLETE

    def is_memory_replica(self) -> bool:
        return self._tier != "ssd"

    def is_disk_replica(self) -> bool:
        return False

    def is_local_disk_replica(self) -> bool:
        return self._tier == "ssd"

    def get_memory_descriptor(self) -> MemoryDescriptor:
        return self._memory


class MooncakeHostMemAllocator:
    """Page-aligned host memory, by address."""

    def __init__(self) -> None:
        self._held: dict[int, mmap.mmap] = {}

    def alloc(self, size: int) -> int:
        memory = mmap.mmap(-1, max(1, size))
        address = int(np.frombuffer(memory, np.uint8).__array_interface__["data"][0])
        self._held[address] = memory
        return address

    def free(self, address: int) -> int:
        """0; -1 for an address that is not from here."""
        return 0 if self._held.pop(address, None) is not None else -1
