"""Memory by address: views of it, whether it is there, whose it is, and which registered range it lies in."""

from __future__ import annotations

import bisect
import ctypes
import functools
import os
import sys
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

import torch_mooncake as tm

T = TypeVar("T")
Piece = tuple[int, int]  # (address, nbytes)

_PAGE = 4096
_WRITABLE = 0x200
_IOVECS = 1024
_view_of = ctypes.pythonapi.PyMemoryView_FromMemory
_view_of.restype = ctypes.py_object
_view_of.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)


class _IoVec(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


_libc = ctypes.CDLL(None, use_errno=True)
_libc.process_vm_readv.restype = ctypes.c_ssize_t
_libc.process_vm_readv.argtypes = (
    *(ctypes.c_int, ctypes.POINTER(_IoVec), ctypes.c_ulong),
    *(ctypes.POINTER(_IoVec), ctypes.c_ulong, ctypes.c_ulong),
)


def view(address: int, nbytes: int) -> memoryview:
    """A writable view, which keeps nothing alive."""
    memory: memoryview = _view_of(address, nbytes, _WRITABLE)
    return memory


def mapped(address: int, nbytes: int) -> bool:
    """Whether every page of the range can be read by this process, as far as the kernel says (it is asked for a byte of
    each); True where it does not say. Programs that pass an address that is not there get a code instead of a crash."""
    if nbytes == 0:
        return True
    if address <= 0:
        return False
    pages = [address, *range((address & ~(_PAGE - 1)) + _PAGE, address + nbytes, _PAGE)]
    sink = (ctypes.c_char * _IOVECS)()
    for start in range(0, len(pages), _IOVECS):
        some = pages[start : start + _IOVECS]
        here = _IoVec(ctypes.addressof(sink), len(some))
        there = (_IoVec * len(some))(*[_IoVec(page, 1) for page in some])
        got = _libc.process_vm_readv(os.getpid(), ctypes.byref(here), 1, there, len(some), 0)
        if got < 0 and ctypes.get_errno() != 14:  # EFAULT; anything else: not allowed to ask
            return True
        if got != len(some):
            return False
    return True


def cuda_device(address: int) -> int | None:
    """The device that the address lies on, None for host memory. Asks CUDA only where this process uses it already."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return None
    kind, ordinal = ctypes.c_uint(0), ctypes.c_int(0)
    driver = ctypes.CDLL("libcuda.so.1")
    if driver.cuPointerGetAttribute(ctypes.byref(kind), 2, ctypes.c_void_p(address)) != 0 or kind.value != 2:
        return None
    if driver.cuPointerGetAttribute(ctypes.byref(ordinal), 9, ctypes.c_void_p(address)) != 0:
        return None
    return ordinal.value


def register(
    engine: tm.Engine, address: int, nbytes: int, label: str = "", *, readable: bool = True, writable: bool = True
) -> tm.Region:
    """Let an engine reach memory of this process that is known by its address: host memory, or a device's.
    ``readable``, ``writable``: by peers."""
    device = cuda_device(address)
    memory = view(address, nbytes) if device is None else cuda_tensor(address, nbytes, device)
    return engine.register(memory, label=label, readable=readable, writable=writable)


def cuda_tensor(address: int, nbytes: int, device: int) -> Any:
    """A uint8 tensor over device memory, which keeps nothing alive."""
    import torch

    described = {"shape": (nbytes,), "typestr": "|u1", "data": (address, False), "version": 3}
    holder = type("DeviceMemory", (), {"__cuda_array_interface__": described})()
    return torch.as_tensor(holder, device=torch.device("cuda", device))


@dataclass(frozen=True)
class Ranges(Generic[T]):
    """Address ranges that do not overlap, in order, each with a value. Immutable: any thread may look at one."""

    starts: tuple[int, ...] = ()
    ends: tuple[int, ...] = ()
    values: tuple[T, ...] = ()

    def added(self, start: int, nbytes: int, value: T) -> Ranges[T] | None:
        """With one more; None if bytes of it are in another."""
        at = bisect.bisect_right(self.starts, start)
        if (at and self.ends[at - 1] > start) or (at < len(self.starts) and start + nbytes > self.starts[at]):
            return None
        end, starts, ends, values = start + nbytes, self.starts, self.ends, self.values
        return Ranges(
            (*starts[:at], start, *starts[at:]), (*ends[:at], end, *ends[at:]), (*values[:at], value, *values[at:])
        )

    def removed(self, start: int) -> Ranges[T] | None:
        """Without the one that begins at ``start``; None if there is none."""
        at = bisect.bisect_left(self.starts, start)
        if at == len(self.starts) or self.starts[at] != start:
            return None
        starts, ends, values = self.starts, self.ends, self.values
        return Ranges(starts[:at] + starts[at + 1 :], ends[:at] + ends[at + 1 :], values[:at] + values[at + 1 :])

    def index(self, start: int, nbytes: int) -> int:
        """Of the range that has all of it; -1 if there is none."""
        at = bisect.bisect_right(self.starts, start) - 1
        return at if at >= 0 and start + nbytes <= self.ends[at] else -1

    def indices(self, starts: NDArray[np.int64], sizes: NDArray[np.int64]) -> NDArray[np.int64]:
        """``index`` of each."""
        if not self.starts:
            return np.full(len(starts), -1, np.int64)
        begins, ends = self._arrays
        at = np.searchsorted(begins, starts, side="right") - 1
        return np.where((at >= 0) & (starts + sizes <= ends[at]), at, -1)

    @functools.cached_property
    def _arrays(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        return np.array(self.starts, np.int64), np.array(self.ends, np.int64)
