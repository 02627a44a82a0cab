"""One-sided transport of ``torch.distributed`` over this library's engine.

Upstream proposes a registry of transports (PyTorch #195643: ``torch.distributed._transport``, entry points of the group
``torch.distributed.transports``), which no released torch has yet. This module has the shape of that proposal: memory
views with ``size()``, ``read``/``write`` with ``async_op=True`` returning a ``Work``, awaitable forms, ``close``. The
entry point ``mooncake`` leads to ``create``, which refuses a torch without the registry; ``Transport`` itself works
with any torch.

    transport = Transport()
    view = transport.register(tensor)                        # view.descriptor and transport.address go to the peer
    remote = transport.open(address, descriptor)
    work = transport.write(view, remote, async_op=True)
    work.wait()

Unlike the proposal's "timeout stops waiting, not DMA", an op here ends by its deadline and touches no memory after it.
"""

from __future__ import annotations

import importlib.util
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from torch_mooncake.errors import Error, Unsupported
from torch_mooncake.transfer import Engine, Op, Region, RemoteRegion

REGISTRY = "torch.distributed._transport"
_TIMEOUT = timedelta(seconds=30)


def available() -> bool:
    """This torch has the registry."""
    return importlib.util.find_spec(REGISTRY) is not None


def create(**options: Any) -> Transport:
    """What the entry point ``mooncake`` of ``torch.distributed.transports`` calls. Unsupported if torch lacks it."""
    if not available():
        raise Unsupported(f"torch {torch.__version__} has no {REGISTRY}; use torch_mooncake.torch_transport.Transport")
    return Transport(**options)


class View:
    """Registered memory of this process. Keeps its tensor."""

    def __init__(self, region: Region) -> None:
        self.region = region

    def size(self) -> int:
        """In bytes."""
        return self.region.nbytes

    @property
    def descriptor(self) -> bytes:
        """What a peer needs, besides our address, to reach it."""
        return self.region.descriptor()


class RemoteView:
    """A peer's registered memory."""

    def __init__(self, region: RemoteRegion) -> None:
        self.region = region

    def size(self) -> int:
        """In bytes."""
        return self.region.nbytes


class TransferWork(dist.Work):
    """An op as torch's ``Work``. Safe from any thread."""

    def __init__(self, op: Op) -> None:
        super().__init__()
        self._op = op

    def wait(self, timeout: timedelta | None = None) -> bool:
        """True when it is done; raises its error. DeadlineExceeded if ``timeout`` passes first: it goes on."""
        self._op.wait(timeout.total_seconds() if timeout else None)  # torch's zero means none
        return True

    def is_completed(self) -> bool:
        return self._op.done()

    def is_success(self) -> bool:
        return self._op.state == "done"

    def exception(self) -> Exception | None:
        """Why it failed; None while it goes on or if it went well."""
        if not self._op.done():
            return None
        try:
            self._op.wait(0)
        except Error as error:
            return error
        return None

    def get_future(self) -> torch.futures.Future[None]:
        """Completed, on a thread of the library, when the op is."""
        from torch_mooncake import aio

        future: torch.futures.Future[None] = torch.futures.Future()

        def finish() -> None:
            try:
                self._op.wait()
            except Exception as error:
                future.set_exception(error)  # type: ignore[arg-type]
            else:
                future.set_result(None)

        aio.submit(finish)
        return future

    def __await__(self) -> Any:
        return self._op.__await__()


class Transport:
    """One engine, seen as a one-sided transport. ``engine``: an existing one, which ``close`` leaves open."""

    def __init__(self, engine: Engine | None = None, **options: Any) -> None:
        self._owned = engine is None
        self.engine = engine or Engine(**options)
        self._peers: dict[str, Any] = {}

    @property
    def address(self) -> str:
        """What peers give to ``open``."""
        return self.engine.addresses[0]

    def register(self, tensor: torch.Tensor) -> View:
        """A contiguous tensor; peers may read and write it."""
        return View(self.engine.register(tensor))

    def deregister(self, view: View, timeout: timedelta = _TIMEOUT) -> None:
        """Returns when no peer can touch it any more. Busy at the deadline."""
        self.engine.deregister(view.region, timeout.total_seconds())

    def open(self, address: str, descriptor: bytes, timeout: timedelta = _TIMEOUT) -> RemoteView:
        """The memory behind a peer's descriptor."""
        peer = self._peers.get(address)
        if peer is None or not peer.alive:
            peer = self._peers[address] = self.engine.connect(address, timeout.total_seconds())
        return RemoteView(peer.open(descriptor, timeout.total_seconds()))

    def write(
        self, local: View, remote: RemoteView, *, async_op: bool = False, timeout: timedelta = _TIMEOUT
    ) -> TransferWork | None:
        """All of ``local`` into all of ``remote`` (equal sizes). A Work, or, without ``async_op``, when it is done."""
        return self._finish(self.engine.write(local.region, remote.region, timeout=timeout.total_seconds()), async_op)

    def read(
        self, local: View, remote: RemoteView, *, async_op: bool = False, timeout: timedelta = _TIMEOUT
    ) -> TransferWork | None:
        """All of ``remote`` into all of ``local`` (equal sizes)."""
        return self._finish(self.engine.read(local.region, remote.region, timeout=timeout.total_seconds()), async_op)

    @staticmethod
    def _finish(op: Op, async_op: bool) -> TransferWork | None:
        if async_op:
            return TransferWork(op)
        op.wait()
        return None

    def close(self) -> None:
        """Ends everything under way. Idempotent."""
        self._peers.clear()
        if self._owned:
            self.engine.close()
