"""LMDeploy's migration backend: decode reads KV blocks out of prefill's cache.

LMDeploy's words: a *memory region* is one cache pool, named by ``mr_key``; of an assignment ``source_offset`` is in the
pool of the side that calls (decode) and ``target_offset`` in the remote one (prefill).
"""

from __future__ import annotations

import json
import os
import threading
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from lmdeploy.pytorch.disagg.backend.backend import MIGRATION_BACKENDS
from lmdeploy.pytorch.disagg.backend.base import MigrationBackendImpl

import torch_mooncake as tm
from torch_mooncake.integrations import _memory
from torch_mooncake.integrations._dial import dial

_TRANSPORTS = {"TCP": ("local", "shm", "tcp"), "RDMA": ("local", "shm", "rdma"), "NVLINK": ("local", "shm")}
NAME = "Mooncake"  # LMDeploy's list of names is closed: this is one that it accepts


def register() -> None:
    """Make LMDeploy's ``--migration-backend Mooncake`` mean this one. In every process that runs a cache engine, before
    its first connection; a second call changes nothing."""
    MIGRATION_BACKENDS.register_module(NAME, force=True, module=TorchMooncakeMigration)


@dataclass
class Link:
    """One remote engine. LMDeploy reads ``remote_engine_config``."""

    remote_engine_config: Any
    protocol: str
    mine: dict[int, tm.Region] = field(default_factory=dict)
    peer: tm.Peer | None = None
    theirs: dict[int, tm.RemoteRegion] = field(default_factory=dict)


class TorchMooncakeMigration(MigrationBackendImpl):
    """Every migration ends, within ``TM_LMDEPLOY_TIMEOUT_S`` seconds (30) and a little: it returns when all bytes are
    there, or raises one of ``tm.errors``; from then on nothing of it is written. Listens at ``TM_LMDEPLOY_LISTEN``
    ("tcp://127.0.0.1:0"; beyond loopback a TM_TOKEN is needed)."""

    def __init__(self) -> None:
        self.links: dict[str, Link] = {}
        self._engines: dict[str, tm.Engine] = {}  # by protocol
        self._lock = threading.Lock()
        self._timeout_s = float(os.environ.get("TM_LMDEPLOY_TIMEOUT_S", 30))

    def p2p_initialize(self, init_request: Any) -> None:
        """A link to a remote engine; one of that id that was there before is given up, with what it had registered."""
        protocol = init_request.protocol.name
        if protocol not in _TRANSPORTS:
            raise tm.Unsupported(f"protocol {protocol}")
        with self._lock:
            if protocol not in self._engines:
                listen = os.environ.get("TM_LMDEPLOY_LISTEN", "tcp://127.0.0.1:0")
                name = f"lmdeploy-{init_request.local_engine_id}-{init_request.rank or 0}"
                self._engines[protocol] = tm.Engine(listen, transports=_TRANSPORTS[protocol], name=name)
            old = self.links.get(init_request.remote_engine_id)
            self.links[init_request.remote_engine_id] = Link(init_request.remote_engine_config, protocol)
        if old is not None:
            self._give_up(old)

    def register_memory_region(self, register_mr_request: Any) -> None:
        link = self._link(register_mr_request.remote_engine_id)
        key, engine = int(register_mr_request.mr_key), self._engines[link.protocol]
        label = f"pool {key} for {register_mr_request.remote_engine_id}"
        link.mine[key] = _memory.register(engine, register_mr_request.addr, register_mr_request.length, label)

    def endpoint_info(self, remote_engine_id: str, protocol: Any) -> dict[str, Any]:
        link = self._link(remote_engine_id)
        engine = self._engines[link.protocol]
        regions = {str(key): region.descriptor().hex() for key, region in link.mine.items()}
        return {"engine": engine.id.hex(), "addresses": engine.addresses, "regions": regions}

    def p2p_connect(self, remote_engine_id: str, conn_req: Any) -> None:
        """PeerLost, AuthError, Unsupported … if the remote engine, or a pool of it, cannot be reached."""
        link = self._link(remote_engine_id)
        told = json.loads(conn_req.endpoint_info)
        link.peer = dial(self._engines[link.protocol], told["addresses"], told["engine"], self._timeout_s)
        link.theirs = {int(key): link.peer.open(bytes.fromhex(text)) for key, text in told["regions"].items()}

    async def p2p_migrate(self, assignment: Any, async_op: bool = False) -> None:
        """Read the assigned bytes. When it is cancelled, the reads are over before it ends."""
        link = self._link(assignment.remote_engine_id)
        if link.peer is None:
            raise tm.InvalidArgument(f"{assignment.remote_engine_id} was not connected")
        by_pool: dict[int, list[tuple[int, int, int]]] = defaultdict(list)
        for each in assignment.batch:
            by_pool[int(each.mr_key)].append((each.source_offset, each.target_offset, each.length))
        unknown = [key for key in by_pool if key not in link.mine or key not in link.theirs]
        if unknown:
            raise tm.InvalidArgument(f"pools {unknown} are not registered on both sides")
        ops: list[tm.Op] = []
        try:
            for key, rows in by_pool.items():
                here, there, sizes = (np.array(column, np.int64) for column in zip(*rows, strict=True))
                ops.append(
                    self._engines[link.protocol].read(
                        link.mine[key],
                        link.theirs[key],
                        local_offsets=here,
                        remote_offsets=there,
                        nbytes=sizes,
                        timeout=self._timeout_s,
                    )
                )
            for op in ops:
                await op
        except BaseException:
            for op in ops:
                op.cancel()
            for op in ops:
                _ended(op)
            raise

    def store(self, assignment: Any, async_op: bool = False) -> None:
        raise tm.Unsupported("LMDeploy does not use store; its decode side reads")

    def load(self, assignment: Any, async_op: bool = False) -> None:
        raise tm.Unsupported("LMDeploy does not use load; see p2p_migrate")

    def close(self) -> None:
        """Give all links and engines up."""
        with self._lock:
            links, self.links = list(self.links.values()), {}
            engines, self._engines = list(self._engines.values()), {}
        for link in links:
            if link.peer is not None:
                link.peer.close()
        for engine in engines:
            engine.close()

    def _link(self, remote_engine_id: str) -> Link:
        link = self.links.get(remote_engine_id)
        if link is None:
            raise tm.InvalidArgument(f"no link to {remote_engine_id} was initialized")
        return link

    def _give_up(self, link: Link) -> None:
        if link.peer is not None:
            link.peer.close()
        for region in link.mine.values():
            self._engines[link.protocol].deregister(region, timeout=self._timeout_s)


def _ended(op: tm.Op) -> None:
    """Returns when nothing of the op can be written any more; how it ended is told elsewhere."""
    try:
        op.wait()
    except tm.Error:
        pass
