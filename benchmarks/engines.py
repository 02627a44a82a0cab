"""The engines that are compared, behind one small interface, each in its process (see pair.py).

An engine has ``memory``, one touched buffer; tells the other side how to reach it (``info``, JSON) and is told the same
(``meet``); prepares a batch of equal blocks (outside the timing), runs it to its end, and releases it. Peers are set
up as they do best: descriptors prepared before, transports pinned.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

Offsets = Sequence[int]


def touched(nbytes: int) -> np.ndarray[Any, Any]:
    array = np.frombuffer(mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), np.uint8)
    array.fill(1)
    return array


class TorchMooncake:
    """This library. ``way`` says what has to carry the bytes; anything else is an error."""

    # way: (transports allowed, memory that can be mapped, host id of the target: another one forces TCP)
    WAYS: ClassVar = {
        "shm": (("shm", "tcp"), True, None),
        "process_vm": (("shm", "tcp"), False, None),
        "unix": (("tcp",), False, None),
        "tcp": (("tcp",), False, "another-host"),
    }

    def __init__(self, way: str, target: bool, nbytes: int) -> None:
        import torch_mooncake as tm
        from torch_mooncake import _core

        self.way, self.target = way, target
        transports, shared, host_id = self.WAYS[way]
        self.engine = tm.Engine(transports=transports, token="benchmark", host_id=host_id if target else None)
        self.memory = np.frombuffer(_core.SharedBuffer(nbytes), np.uint8) if shared else touched(nbytes)
        self.memory.fill(1)
        self.region = self.engine.register(self.memory)

    def info(self) -> Any:
        return [self.engine.addresses[0], self.region.descriptor().hex()]

    def meet(self, info: Any) -> None:
        if self.target:
            return
        self.remote = self.engine.connect(info[0]).open(bytes.fromhex(info[1]))
        if self.remote.transport != self.way:
            raise RuntimeError(f"{self.way} was asked for, {self.remote.transport} would carry it")
        if self.way == "shm":
            # The target's memory is new to this process: each page of its map costs a fault, once. The raw loops are
            # measured over memory that they have touched, and so is this.
            self.engine.write(self.region, self.remote).wait()

    def prepare(self, op: str, local: Offsets, remote: Offsets, block: int) -> Any:
        move = self.engine.write if op == "write" else self.engine.read
        if len(local) == 1:
            there = self.remote[remote[0] : remote[0] + block]
            return move, (self.region[local[0] : local[0] + block], there), {}
        offsets = {"local_offsets": np.array(local, np.int64), "remote_offsets": np.array(remote, np.int64)}
        return move, (self.region, self.remote), {**offsets, "nbytes": block}

    def submit(self, handle: Any) -> Any:
        move, regions, places = handle
        return move(*regions, **places)

    def run(self, handle: Any) -> None:
        move, regions, places = handle
        move(*regions, **places).wait()

    def release(self, handle: Any) -> None:
        pass


class Mooncake:
    """mooncake-transfer-engine-non-cuda over TCP."""

    MOST = 1024  # requests a call: above about 2000 it fails (queue limits)

    def __init__(self, way: str, target: bool, nbytes: int) -> None:
        os.environ.update(MC_FORCE_TCP="1", MC_LOG_LEVEL="ERROR", GLOG_minloglevel="2")
        from mooncake.engine import TransferEngine

        self.engine = TransferEngine()
        _ok(self.engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", ""))
        self.memory = touched(nbytes)
        _ok(self.engine.register_memory(self.memory.ctypes.data, nbytes))

    def info(self) -> Any:
        return [f"127.0.0.1:{self.engine.get_rpc_port()}", self.memory.ctypes.data]

    def meet(self, info: Any) -> None:
        self.peer, self.there = info

    def prepare(self, op: str, local: Offsets, remote: Offsets, block: int) -> Any:
        here = self.memory.ctypes.data
        if len(local) == 1:
            name = f"transfer_sync_{op}"
            return [(getattr(self.engine, name), here + local[0], self.there + remote[0], block)]
        call = getattr(self.engine, f"batch_transfer_sync_{op}")
        addresses = [here + x for x in local], [self.there + x for x in remote]
        starts = range(0, len(local), self.MOST)
        parts = [[side[i : i + self.MOST] for side in addresses] for i in starts]
        return [(call, ours, theirs, [block] * len(ours)) for ours, theirs in parts]

    def run(self, handle: Any) -> None:
        for call, *arguments in handle:
            _ok(call(self.peer, *arguments))

    def release(self, handle: Any) -> None:
        pass


class Nixl:
    """nixl-cu12 with its UCX backend; ``way`` "tcp" or "shm" pins what UCX may use."""

    TRANSPORTS: ClassVar = {
        "tcp": {"UCX_TLS": "tcp"},
        "shm": {"UCX_MM_ERROR_HANDLING": "y", "UCX_TLS": "posix,cma,tcp"},
    }

    def __init__(self, way: str, target: bool, nbytes: int) -> None:
        os.environ.update(self.TRANSPORTS[way], NIXL_LOG_LEVEL="ERROR", UCX_LOG_LEVEL="error")
        from nixl_cu12._api import nixl_agent, nixl_agent_config

        self.agent = nixl_agent("target" if target else "initiator", nixl_agent_config(backends=[]))
        self.agent.create_backend("UCX", {"ucx_error_handling_mode": "peer"})
        self.memory = touched(nbytes)
        self.registered = self.agent.register_memory([(self.memory.ctypes.data, nbytes, 0, "")], "DRAM")
        self.lists: dict[int, Any] = {}

    def info(self) -> Any:
        return [self.agent.get_agent_metadata().hex(), self.memory.ctypes.data]

    def meet(self, info: Any) -> None:
        self.peer, self.there = self.agent.add_remote_agent(bytes.fromhex(info[0])), info[1]

    def _blocks(self, block: int) -> Any:
        """The whole buffers as prepared lists of blocks, made once a size."""
        if block not in self.lists:
            count = self.memory.nbytes // block
            both = []
            for agent, base in (("NIXL_INIT_AGENT", self.memory.ctypes.data), (self.peer, self.there)):
                blocks = [(base + i * block, block, 0) for i in range(count)]
                both.append(self.agent.prep_xfer_dlist(agent, self.agent.get_xfer_descs(blocks, "DRAM")))
            self.lists[block] = both
        return self.lists[block]

    def prepare(self, op: str, local: Offsets, remote: Offsets, block: int) -> Any:
        ours, theirs = self._blocks(block)
        here, there = [x // block for x in local], [x // block for x in remote]
        return self.agent.make_prepped_xfer(op.upper(), ours, here, theirs, there, b"")

    def run(self, handle: Any) -> None:
        state = self.agent.transfer(handle)
        while state == "PROC":
            state = self.agent.check_xfer_state(handle)
        if state != "DONE":
            raise RuntimeError(f"NIXL says {state}")

    def release(self, handle: Any) -> None:
        self.agent.release_xfer_handle(handle)


def _ok(code: int) -> None:
    if code != 0:
        raise RuntimeError(f"Mooncake says {code}")


ENGINES = {"torch_mooncake": TorchMooncake, "mooncake": Mooncake, "nixl": Nixl}
