"""A one-sided tensor transport of Ray: the receiver reads out of the sender's memory."""

from __future__ import annotations

import os
import threading
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import ray
import torch
from ray.experimental.rdt.tensor_transport_manager import (
    CommunicatorMetadata,
    FetchRequest,
    TensorTransportManager,
    TensorTransportMetadata,
)

import torch_mooncake as tm
from torch_mooncake.integrations.ray import NAME


@dataclass
class Metadata(TensorTransportMetadata):
    """What the receiver needs: whom to dial, and each tensor's region (b"" for one without bytes)."""

    engine: str = ""
    addresses: list[str] = field(default_factory=list)
    regions: list[bytes] = field(default_factory=list)


@dataclass
class Fetch(FetchRequest):
    """Reads under way into ``tensors``. Dropped before its end, it stops them first."""

    op: tm.Op | None = None

    def __del__(self) -> None:
        if self.op is not None and not self.op.done():
            self.op.cancel()


def register(devices: tuple[str, ...] = ("cpu", "cuda")) -> None:
    """Let actors use ``tensor_transport="torch_mooncake"``: before their classes are. A second call does nothing."""
    from ray.experimental import register_tensor_transport
    from ray.experimental.rdt.util import transport_manager_info

    if NAME not in transport_manager_info:
        register_tensor_transport(NAME, list(devices), TorchMooncakeTransport, torch.Tensor)


class TorchMooncakeTransport(TensorTransportManager):
    """One engine a process. Reads end within ``TM_RAY_TIMEOUT_S`` (60 s), done or with one of ``tm.errors``.

    Listens on this node's address if TM_TOKEN is set (the same on all nodes), else on loopback: actors of one host then
    reach each other, those of several do not. A tensor is registered for as long as Ray holds its object.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._engine: tm.Engine | None = None
        self._peers: dict[str, tm.Peer] = {}
        self._sent: dict[str, list[tm.Region]] = {}
        self._fetches: dict[str, list[tm.Op]] = defaultdict(list)
        self._timeout_s = float(os.environ.get("TM_RAY_TIMEOUT_S", 60))

    @property
    def tensor_transport_backend(self) -> str:
        return NAME

    @staticmethod
    def is_one_sided() -> bool:
        return True

    @staticmethod
    def can_abort_transport() -> bool:
        return True

    def actor_has_tensor_transport(self, actor: Any) -> bool:
        return True

    def engine(self) -> tm.Engine:
        """This process's, made with its first transfer."""
        with self._lock:
            if self._engine is None:
                listen = "tcp://127.0.0.1:0"
                if os.environ.get("TM_TOKEN"):
                    host = ray.util.get_node_ip_address()
                    listen = f"tcp://[{host}]:0" if ":" in host else f"tcp://{host}:0"
                self._engine = tm.Engine(listen, name=f"ray-{os.getpid()}")
            return self._engine

    # --- the sender ---

    def extract_tensor_transport_metadata(self, obj_id: str, rdt_object: list[Any]) -> Metadata:
        """Register the tensors (of one that is not contiguous, a copy), read-only for peers."""
        devices = {tensor.device.type for tensor in rdt_object}
        if len(devices) > 1:
            raise ValueError(f"the tensors of one object are on {sorted(devices)}: Ray wants one kind of device")
        engine = self.engine()
        if rdt_object and rdt_object[0].is_cuda:
            torch.cuda.current_stream(rdt_object[0].device).synchronize()  # peers read what has been computed
        regions: list[tm.Region | None] = []
        for tensor in rdt_object:
            dense = tensor.detach().contiguous()
            regions.append(engine.register(dense, writable=False, label=obj_id) if dense.nbytes else None)
        with self._lock:
            self._sent[obj_id] = [region for region in regions if region is not None]
        return Metadata(
            tensor_meta=[(tensor.shape, tensor.dtype) for tensor in rdt_object],
            tensor_device=devices.pop() if devices else None,
            engine=engine.id.hex(),
            addresses=engine.addresses,
            regions=[b"" if region is None else region.descriptor() for region in regions],
        )

    def get_communicator_metadata(self, src_actor: Any, dst_actor: Any, backend: str | None = None) -> Any:
        return CommunicatorMetadata()

    def send_multiple_tensors(self, tensors: Any, tensor_transport_metadata: Any, communicator_metadata: Any) -> None:
        raise tm.Unsupported("the receiver reads: Ray does not ask a one-sided transport to send")

    def garbage_collect(self, obj_id: str, tensor_transport_meta: Any, tensors: Any) -> None:
        """Returns when nobody can read the tensors any more."""
        with self._lock:
            regions = self._sent.pop(obj_id, [])
        for region in regions:
            self.engine().deregister(region, timeout=self._timeout_s)

    # --- the receiver ---

    def recv_multiple_tensors(
        self,
        obj_id: str,
        tensor_transport_metadata: Any,
        communicator_metadata: Any,
        target_buffers: list[Any] | None = None,
    ) -> list[Any]:
        fetch = self.fetch_multiple_tensors(obj_id, tensor_transport_metadata, communicator_metadata, target_buffers)
        return self.wait_fetch_complete(fetch)

    def fetch_multiple_tensors(
        self,
        obj_id: str,
        tensor_transport_metadata: Any,
        communicator_metadata: Any,
        target_buffers: list[Any] | None = None,
    ) -> Fetch:
        """Begin to read. ``target_buffers`` that fit (shape, dtype, contiguous) are filled, LayoutMismatch else."""
        told: Metadata = tensor_transport_metadata
        tensors = [
            _target(i, shape, dtype, told.tensor_device or "cpu", target_buffers)
            for i, (shape, dtype) in enumerate(told.tensor_meta)
        ]
        wanted = [i for i, descriptor in enumerate(told.regions) if descriptor]
        if not wanted:
            return Fetch(obj_id, tensors)
        engine = self.engine()
        peer = self._peer(engine, told)
        regions = [engine.register(tensors[i], readable=False, writable=False) for i in wanted]
        try:
            pairs = [(region, peer.open(told.regions[i])) for i, region in zip(wanted, regions, strict=True)]
            op = engine.read(pairs, timeout=self._timeout_s)
        finally:
            for region in regions:  # the op keeps what it needs until its end
                _release(engine, region)
        with self._lock:
            self._fetches[obj_id].append(op)
        return Fetch(obj_id, tensors, op)

    def wait_fetch_complete(self, fetch_request: Any, timeout: float = -1) -> list[Any]:
        """The tensors. TimeoutError if they are not there in time (the fetch goes on); what failed is raised."""
        op = fetch_request.op
        if op is not None:
            op.wait(None if timeout < 0 else timeout)
            with self._lock:
                self._fetches.pop(fetch_request.obj_id, None)
        tensors: list[Any] = fetch_request.tensors
        return tensors

    def abort_transport(self, obj_id: str, communicator_metadata: Any) -> None:
        """Stop reading it; the sender has nothing to stop."""
        with self._lock:
            ops = self._fetches.pop(obj_id, [])
        for op in ops:
            op.cancel()

    def _peer(self, engine: tm.Engine, told: Metadata) -> tm.Peer:
        with self._lock:
            known = self._peers.get(told.engine)
        if known is not None and known.alive:
            return known
        failure: tm.Error = tm.PeerLost("the sender listens nowhere")
        for address in told.addresses:
            try:
                peer = engine.connect(address, timeout=self._timeout_s)
            except (tm.PeerLost, tm.Unsupported) as error:
                failure = error
                continue
            if peer.id.hex() == told.engine:
                with self._lock:
                    self._peers[told.engine] = peer
                return peer
            peer.close()
            failure = tm.PeerLost("the sender is gone: another engine answers there", peer=address)
        raise failure


def _target(index: int, shape: Any, dtype: Any, device: str, buffers: list[Any] | None) -> Any:
    if not buffers:
        return torch.empty(shape, dtype=dtype, device=device)
    given = buffers[index]
    if tuple(given.shape) != tuple(shape) or given.dtype != dtype or not given.is_contiguous():
        raise tm.LayoutMismatch(
            f"buffer {index} is {tuple(given.shape)} {given.dtype}, sent was {tuple(shape)} {dtype}"
        )
    return given


def _release(engine: tm.Engine, region: tm.Region) -> None:
    try:
        engine.deregister(region, timeout=0)
    except tm.Busy:
        pass  # its op is under way, and gives it back at its end
