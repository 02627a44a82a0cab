"""Two engines, one in a child process, over each way bytes can go; with the other side's memory in plain sight.

Where memory is private to the engines (process_vm, unix, tcp), the child's is a memfd that the test has mapped too:
what lies there can be looked at in the instant in which an op ends.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from processes import Child
from verbs import VERBS, nics

import torch_mooncake as tm
from torch_mooncake import _core

# way: (transports allowed, memory that peers can map, the child claims to be another host)
WAYS = {
    "shm": (("shm", "tcp"), True, False),
    "process_vm": (("shm", "tcp"), False, False),
    "unix": (("tcp",), False, False),
    "tcp": (("tcp",), False, True),
}
if VERBS:
    WAYS = {"rdma": (("rdma",), False, False)}
MiB = 1 << 20

SETUP = """
import mmap, os, time
import numpy as np, torch_mooncake as tm
from torch_mooncake._core import SharedBuffer
engine = tm.Engine(listen=listen, transports=transports, token="t", host_id=host_id or None, name="other", nics=nics)
window = np.frombuffer(mmap.mmap(os.open(window_path, os.O_RDWR), nbytes), np.uint8)
there = np.frombuffer(SharedBuffer(nbytes), np.uint8) if shared else window
region = engine.register(there)
result = [engine.addresses[0], region.descriptor().hex()]
"""


def memory(way: str, nbytes: int) -> np.ndarray[Any, Any]:
    """Zeros in memory of the kind that makes ``way`` carry the bytes; touched, so that it does not grow later."""
    array = np.frombuffer(_core.SharedBuffer(nbytes), np.uint8) if WAYS[way][1] else np.empty(nbytes, np.uint8)
    array.fill(0)
    return array


def random_bytes(nbytes: int, seed: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)


class Two:
    """``engine`` and ``region`` here; ``other`` (a Child) with ``engine``, ``region`` and ``there`` over there."""

    def __init__(
        self,
        way: str,
        child: Callable[..., Child],
        nbytes: int = MiB,
        *,
        env: dict[str, str] | None = None,
        listen: str = "tcp://127.0.0.1:0",
        connect: bool = True,
    ) -> None:
        self.way, self.nbytes = way, nbytes
        transports, shared, other_host = WAYS[way]
        self.engine = tm.Engine(transports=transports, token="t", name="ours", nics=nics(0))
        self.local = memory(way, nbytes)
        self.region = self.engine.register(self.local)
        self._memfd = os.memfd_create("tm-test")
        os.ftruncate(self._memfd, nbytes)
        self.window = np.frombuffer(mmap.mmap(self._memfd, nbytes), np.uint8)
        self.other = child(env)
        self.setup: dict[str, Any] = {
            "transports": list(transports),
            "shared": shared,
            "host_id": "another-host" if other_host else "",
            "nics": nics(1),
            "window_path": f"/proc/{os.getpid()}/fd/{self._memfd}",
            "nbytes": nbytes,
            "listen": listen,
        }
        self.address, descriptor = self.other(SETUP, **self.setup)
        self.descriptor = bytes.fromhex(descriptor)
        if connect:
            self.connect()

    def connect(self, address: str = "") -> None:
        """Opens the other's region as ``remote``; over this way and no other."""
        self.peer = self.engine.connect(address or self.address)
        self.remote = self.peer.open(self.descriptor)
        assert self.remote.transport == self.way

    def renew(self) -> None:
        """Registered and opened anew, on both sides."""
        self.region = self.engine.register(self.local)
        self.descriptor = bytes.fromhex(
            self.other("region = engine.register(there); result = region.descriptor().hex()")
        )
        self.remote = self.peer.open(self.descriptor)

    def let_the_other_dial(self) -> None:
        """Over there, ``remote`` becomes our region."""
        self.other(
            "remote = engine.connect(address).open(bytes.fromhex(descriptor)); result = remote.transport",
            address=self.engine.addresses[0],
            descriptor=self.region.descriptor().hex(),
        )

    def there(self) -> np.ndarray[Any, Any]:
        """The other side's memory as it is now. (Shared memory: a copy, made by the child.)"""
        if WAYS[self.way][1]:
            self.other("window[:] = there")
        return self.window

    def fill_there(self, content: Any) -> None:
        self.window[:] = content
        if WAYS[self.way][1]:
            self.other("there[:] = window")

    def close(self) -> None:
        self.engine.close()
        os.close(self._memfd)


def ends(op: tm.Op | Callable[[], tm.Op], within_s: float) -> tm.Error | None:
    """How the op ended, or why it could not begin: None is well. It must have ended within ``within_s`` seconds."""
    start = time.monotonic()
    try:
        op = op if isinstance(op, tm.Op) else op()
    except tm.Error as error:
        return error
    try:
        op.wait(within_s)
    except tm.Error as error:
        assert op.done(), f"still pending after {time.monotonic() - start:.1f} s: {op!r}"
        return error
    return None
