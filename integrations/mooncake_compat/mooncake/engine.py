"""``mooncake.engine.TransferEngine`` on torch_mooncake's transfer engine.

Calls take and return what Mooncake's do: 0 or a negative code, never an exception for what went wrong at run time; the
reason is logged under "torch_mooncake.compat". Every call ends in bounded time (``MC_TRANSFER_TIMEOUT`` seconds, 30 by
default), and after its end no byte of it is read or written. Peers are named "host:port", found by ``get_rpc_port``.
"""

from __future__ import annotations

import enum
import itertools
import json
import mmap
import os
import socket
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np

import torch_mooncake as tm
from mooncake._codes import INTERNAL_ERROR, logger
from mooncake._directory import Directory
from mooncake._peers import Session, split_session
from mooncake._transfers import Registered, Transfer, notification
from torch_mooncake.config import Config
from torch_mooncake.integrations import _memory

_OVERLAPPED = -7
_NOT_REGISTERED = -3
_UNREACHABLE = -102
_REGISTER_S = 30
_KEPT = 1024  # outcomes of transfers that nobody has asked about yet
_NOTHING: dict[str, Any] = {"id": "", "addresses": [], "regions": []}
_TRANSPORTS = {"tcp": ("local", "shm", "tcp"), "rdma": ("local", "shm", "rdma")}


class TransferOpcode(enum.IntEnum):
    Read = 0
    Write = 1


_Opcode: TypeAlias = TransferOpcode
Sides: TypeAlias = tuple[Sequence[int], Sequence[int], Sequence[int]]  # addresses here, those there, sizes in bytes


class TransferNotify:
    """A message that comes with a transfer: ``get_notifies`` of the peer returns it when the data is there."""

    def __init__(self, name: str = "", msg: str = "") -> None:
        self.name, self.msg = name, msg


def _one(write: bool, later: bool = False) -> Callable[..., int]:
    """A method for one piece of memory, in one direction."""

    def transfer(
        self: TransferEngine,
        target_hostname: str,
        buffer: int,
        peer_buffer_address: int,
        length: int,
        transport_hint: str = "",
    ) -> int:
        return self._transfer(write, target_hostname, ([buffer], [peer_buffer_address], [length]), later=later)

    return transfer


def _many(write: bool, later: bool = False) -> Callable[..., int]:
    """A method for many, in one direction."""

    def transfer(
        self: TransferEngine,
        target_hostname: str,
        buffers: Sequence[int],
        peer_buffer_addresses: Sequence[int],
        lengths: Sequence[int],
        transport_hint: str = "",
    ) -> int:
        return self._transfer(write, target_hostname, (buffers, peer_buffer_addresses, lengths), later=later)

    return transfer


class TransferEngine:
    TransferOpcode = TransferOpcode

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._engine: tm.Engine | None = None
        self._directory: Directory | None = None
        self._regions: Registered = _memory.Ranges()
        self._sessions: dict[str, Session] = {}
        self._managed: dict[int, mmap.mmap] = {}
        self._transfers: dict[int, Transfer] = {}
        self._numbers = itertools.count(1)
        self._timeout_s = max(5.0, float(os.environ.get("MC_TRANSFER_TIMEOUT", 30)))

    # --- life ---

    def initialize(self, local_hostname: str, metadata_server: str, protocol: str, device_name: str) -> int:
        """``metadata_server`` is "P2PHANDSHAKE"; ``protocol`` "tcp" or "rdma" (with MC_FORCE_TCP: "tcp"). Memory of the
        same host is shared or copied directly with either. TM_TOKEN has to be set for a host that is not loopback."""
        if metadata_server != "P2PHANDSHAKE":
            return self._refused("initialize", f'only "P2PHANDSHAKE" is supported, not {metadata_server!r}')
        if os.environ.get("MC_FORCE_TCP"):
            protocol = "tcp"
        if protocol not in _TRANSPORTS:
            return self._refused("initialize", f'protocol is "tcp" or "rdma", not {protocol!r}')
        with self._lock:
            if self._engine is not None:
                return 0
            try:
                host = _address(local_hostname)
                listen = f"tcp://[{host}]:0" if ":" in host else f"tcp://{host}:0"
                nics = [name for name in device_name.split(",") if name] if protocol == "rdma" else None
                engine = tm.Engine(listen, transports=_TRANSPORTS[protocol], name="mooncake", nics=nics)
                self._token = Config.from_env().token
                self._directory = Directory(host, self._token, _weakly(self))
            except (tm.Error, OSError) as error:
                return self._refused("initialize", f"{type(error).__name__}: {error}")
            self._engine = engine
        return 0

    def initialize_ext(
        self, local_hostname: str, metadata_server: str, protocol: str, device_name: str, metadata_type: str
    ) -> int:
        return self.initialize(local_hostname, metadata_server, protocol, device_name)

    def get_rpc_port(self) -> int:
        """The port that peers name this engine by; 0 before ``initialize``."""
        return 0 if self._directory is None else self._directory.port

    def get_engine(self) -> TransferEngine | None:
        return None if self._engine is None else self

    def get_local_topology(self, device_name: str | None = None) -> str:
        """JSON: for each NUMA node [its RDMA devices, the other nodes']."""
        known = tm.topology()
        devices = {nic["numa_node"]: nic["rdma_devices"] for nic in known["nics"] if nic["rdma_devices"]}
        found = {}
        for node in (each["id"] for each in known["numa_nodes"]):
            others = [device for where, some in devices.items() if where != node for device in some]
            found[f"cpu:{node}"] = [list(devices.get(node, [])), others]
        return json.dumps(found)

    def describe(self) -> dict[str, Any]:
        """What peers are told: id and addresses of the engine, address, size and descriptor of its regions."""
        engine = self._engine
        if engine is None:
            return dict(_NOTHING)
        known = self._regions
        regions = zip(known.starts, known.values, strict=True)
        return {
            "id": engine.id.hex(),
            "addresses": engine.addresses,
            "regions": [[at, region.nbytes, region.descriptor().hex()] for at, region in regions],
        }

    # --- memory ---

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

    # --- transfers ---

    transfer_sync_write, batch_transfer_sync_write = _one(True), _many(True)
    transfer_sync_read, batch_transfer_sync_read = _one(False), _many(False)
    # A number for get_batch_transfer_status and transfer_check_status; 0 if it did not begin.
    transfer_submit_write, batch_transfer_async_write = _one(True, later=True), _many(True, later=True)
    batch_transfer_async_read = _many(False, later=True)

    def transfer_sync(
        self,
        target_hostname: str,
        buffer: int,
        peer_buffer_address: int,
        length: int,
        opcode: _Opcode,
        notify: TransferNotify | None = None,
        transport_hint: str = "",
    ) -> int:
        return self.batch_transfer_sync(
            target_hostname, [buffer], [peer_buffer_address], [length], opcode, notify, transport_hint
        )

    def batch_transfer_sync(
        self,
        target_hostname: str,
        buffers: Sequence[int],
        peer_buffer_addresses: Sequence[int],
        lengths: Sequence[int],
        opcode: _Opcode,
        notify: TransferNotify | None = None,
        transport_hint: str = "",
    ) -> int:
        sides = buffers, peer_buffer_addresses, lengths
        return self._transfer(opcode == TransferOpcode.Write, target_hostname, sides, notify=notify)

    def batch_transfer_async(
        self,
        target_hostname: str,
        buffers: Sequence[int],
        peer_buffer_addresses: Sequence[int],
        lengths: Sequence[int],
        opcode: _Opcode,
        transport_hint: str = "",
    ) -> int:
        """As ``batch_transfer_async_write``, in the direction that is said."""
        sides = buffers, peer_buffer_addresses, lengths
        return self._transfer(opcode == TransferOpcode.Write, target_hostname, sides, later=True)

    def get_batch_transfer_status(self, batch_ids: Sequence[int]) -> int:
        """Wait for all of them: 0, or -1 if one failed (or is not known). They are forgotten then."""
        codes = []
        for number in batch_ids:
            with self._lock:
                transfer = self._transfers.get(number)
            codes.append(INTERNAL_ERROR if transfer is None else transfer.wait())
            with self._lock:
                self._transfers.pop(number, None)
        return next((code for code in codes if code), 0)

    def transfer_check_status(self, batch_id: int) -> int:
        """0: under way; 1: done; -1: failed, or not known. Forgotten when it is over."""
        with self._lock:
            transfer = self._transfers.get(batch_id)
        if transfer is None:
            return INTERNAL_ERROR
        code = transfer.poll()
        if code is None:
            return 0
        with self._lock:
            self._transfers.pop(batch_id, None)
        return 1 if code == 0 else INTERNAL_ERROR

    def get_notifies(self) -> list[TransferNotify]:
        """What has come with peers' transfers since the last call."""
        found: list[TransferNotify] = []
        engine = self._engine
        while engine is not None:
            try:
                name, message = json.loads(engine.next_notification(0).data)
            except tm.DeadlineExceeded:
                break
            except (ValueError, TypeError) as error:
                logger.warning("get_notifies: a notification of another program: %s", error)
                continue
            found.append(TransferNotify(str(name), str(message)))
        return found

    def send_probe(self, peer_server_name: str) -> int:
        """0: the peer answers."""
        if self._engine is None:
            return INTERNAL_ERROR
        try:
            self._session(peer_server_name).refresh()
        except tm.Error as error:
            self._refused("send_probe", f"{type(error).__name__}: {error}")
            return _UNREACHABLE
        return 0

    # --- inside ---

    def _refused(self, what: str, why: str) -> int:
        logger.warning("%s: %s", what, why)
        return INTERNAL_ERROR

    def _session(self, name: str) -> Session:
        split_session(name)
        with self._lock:
            if self._engine is None:
                raise tm.Closed("initialize the engine first")
            if name not in self._sessions:
                self._sessions[name] = Session(self._engine, name, self._token)
            return self._sessions[name]

    def _transfer(
        self, write: bool, session: str, sides: Sides, *, later: bool = False, notify: TransferNotify | None = None
    ) -> int:
        """Its code when it is over; with ``later`` its number, 0 if it did not begin."""
        transfer = self._begin(write, session, sides, notify)
        if transfer is None:
            return 0 if later else INTERNAL_ERROR
        if not later:
            return transfer.wait()
        with self._lock:
            number = next(self._numbers)
            self._transfers[number] = transfer
            others = list(self._transfers.items())[:-1]
        self._tidy(others)
        return number

    def _tidy(self, transfers: list[tuple[int, Transfer]]) -> None:
        """What nobody asks about keeps no memory registered when it is over, and is forgotten when there is much of
        it."""
        for i, (number, transfer) in enumerate(transfers):
            if transfer.settle() and len(transfers) - i >= _KEPT:
                with self._lock:
                    self._transfers.pop(number, None)

    def _begin(self, write: bool, session: str, sides: Sides, notify: TransferNotify | None) -> Transfer | None:
        """None, and nothing is under way, if it cannot be done."""
        local, remote, lengths = sides
        if not len(local) == len(remote) == len(lengths):
            self._refused(session, f"{len(local)} buffers, {len(remote)} of the peer, {len(lengths)} lengths")
            return None
        try:
            peer, engine = self._session(session), self._engine
        except tm.Error as error:
            self._refused(session, f"{type(error).__name__}: {error}")
            return None
        assert engine is not None
        note = b"" if notify is None else notification(notify.name, notify.msg)
        transfer = Transfer(engine, peer, self._regions, write, *sides, notify=note, timeout_s=self._timeout_s)
        return transfer if transfer.begin() else None

    def __del__(self) -> None:
        if (directory := getattr(self, "_directory", None)) is not None:
            directory.close()
        if (engine := getattr(self, "_engine", None)) is not None:
            engine.close()


def _weakly(owner: TransferEngine) -> Callable[[], dict[str, Any]]:
    """``owner.describe``, by a thread that does not keep it."""
    reference = weakref.ref(owner)

    def describe() -> dict[str, Any]:
        alive = reference()
        return dict(_NOTHING) if alive is None else alive.describe()

    return describe


def _address(hostname: str) -> str:
    """The IP address of "host", "host:port" or "[v6]:port"."""
    host = hostname
    if hostname.startswith("["):
        host = hostname[1:].partition("]")[0]
    elif hostname.count(":") == 1:
        host = hostname.partition(":")[0]
    return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])


__all__ = ["TransferEngine", "TransferNotify", "TransferOpcode"]
