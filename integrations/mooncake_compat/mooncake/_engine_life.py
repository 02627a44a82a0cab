"""An engine from its beginning to its end, and the peers it knows."""

from __future__ import annotations

import json
import os
import socket
import threading
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import torch_mooncake as tm
from mooncake._codes import INTERNAL_ERROR, logger
from mooncake._directory import Directory
from mooncake._peers import Session, split_session
from mooncake._transfers import Registered
from torch_mooncake.config import Config
from torch_mooncake.integrations import _memory

_NOTHING: dict[str, Any] = {"id": "", "addresses": [], "regions": []}
_TRANSPORTS = {"tcp": ("local", "shm", "tcp"), "rdma": ("local", "shm", "rdma")}
_Self = TypeVar("_Self", bound="Life")


class Life:
    """Calls before ``initialize`` fail with a code."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._engine: tm.Engine | None = None
        self._directory: Directory | None = None
        self._regions: Registered = _memory.Ranges()
        self._sessions: dict[str, Session] = {}

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

    def get_engine(self: _Self) -> _Self | None:
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

    def __del__(self) -> None:
        if (directory := getattr(self, "_directory", None)) is not None:
            directory.close()
        if (engine := getattr(self, "_engine", None)) is not None:
            engine.close()


def _weakly(owner: Life) -> Callable[[], dict[str, Any]]:
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
