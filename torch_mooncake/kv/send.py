"""The prefill side of a prefill/decode session: pushes pages into a decode cache, layer by layer."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch

from torch_mooncake.errors import Closed, DeadlineExceeded, Error, InvalidArgument, LayoutMismatch
from torch_mooncake.kv import wire
from torch_mooncake.kv.cache import PagedKV
from torch_mooncake.kv.layout import PagedKVLayout

if TYPE_CHECKING:
    from torch_mooncake.transfer import Engine, Op, Peer, Region, RemoteRegion


@dataclass(frozen=True)
class PushResult:
    """What a session moved. `exposed_s` is the time the caller spent in `push_layer` and `finish`: transfer that ran
    while the caller computed is not in it."""

    nbytes: int
    exposed_s: float
    transport: str


class KVSender:
    """Pushes pages of `kv` through `engine`. Keeps the cache registered and one connection a decode engine.

    Thread safety: `open` may be called from any thread. `close` deregisters; the engine stays its owner's.
    """

    def __init__(self, engine: Engine, kv: PagedKV) -> None:
        self.engine = engine
        self.kv = kv
        self.regions = kv.register(engine, writable=False, label="prefill KV cache")
        self._peers: dict[str, Peer] = {}
        self._lock = threading.Lock()

    def open(self, ticket: bytes, *, timeout: float | None = None) -> PrefillSession:
        """Takes a decode side's ticket. Raises LayoutMismatch naming every difference of the two caches, PeerLost or
        DeadlineExceeded when the decode engine cannot be reached. `timeout` (s) shortens the ticket's own."""
        message = wire.decode_ticket(ticket)
        layout = PagedKVLayout.from_dict(message.layout)
        if differences := self.kv.layout.differences(layout):
            raise LayoutMismatch("the decode cache differs: " + "; ".join(differences))
        allowed = message.timeout_s if timeout is None else min(timeout, message.timeout_s)
        deadline = time.monotonic() + allowed
        peer = self._connect(message.addresses, deadline)
        remotes = [peer.open(descriptor, timeout=_left(deadline)) for descriptor in message.regions]
        return PrefillSession(self, message, layout, remotes, deadline)

    def _connect(self, addresses: Sequence[str], deadline: float) -> Peer:
        if not addresses:
            raise InvalidArgument("the ticket names no address: the decode engine does not listen")
        address = addresses[0]
        with self._lock:
            peer = self._peers.get(address)
            if peer is None or not peer.alive:
                peer = self._peers[address] = self.engine.connect(address, timeout=_left(deadline))
            return peer

    def close(self, timeout: float = 10) -> None:
        """Raises Busy when a peer may still be reading (the regions stay registered)."""
        for region in self.regions:
            self.engine.deregister(region, timeout=timeout)
        self.regions = []
        with self._lock:
            for peer in self._peers.values():
                peer.close()
            self._peers.clear()


class PrefillSession:
    """One prompt's pages on their way. Made by `KVSender.open`; used by one thread.

    Ends once, by `finish` or `abort`; leaving the `with` block without `finish` aborts. After the end no byte of it
    lands any more and the local pages may be reused.
    """

    def __init__(
        self,
        sender: KVSender,
        ticket: wire.Ticket,
        layout: PagedKVLayout,
        remotes: list[RemoteRegion],
        deadline: float,
    ) -> None:
        self.id = ticket.session
        self.deadline = deadline
        self.remote_pages = ticket.pages
        self._sender = sender
        self._layout = layout
        self._remotes = remotes
        self._ops: list[Op] = []
        self._exposed_s = 0.0
        self._ended = False

    def push_layer(self, layer: int, pages: Sequence[int] | torch.Tensor, *, start: int = 0) -> None:
        """Posts local `pages` of one layer to the decode side's pages `start`, `start` + 1, …; the decode side hears
        of the layer when its bytes are in place. Returns at once; the pages must keep their content until the end."""
        self._check_open()
        began = time.perf_counter()
        ours = self._sender.kv.layout
        if not 0 <= layer < ours.num_layers:
            raise InvalidArgument(f"layer {layer} is not in 0..{ours.num_layers - 1}")
        local_ids = ours.page_ids(pages)
        if start < 0 or start + len(local_ids) > len(self.remote_pages):
            raise InvalidArgument(
                f"{len(local_ids)} pages from {start} do not fit the {len(self.remote_pages)} reserved pages"
            )
        remote_ids = self._layout.page_ids(self.remote_pages[start : start + len(local_ids)])
        region, remote = self._side(layer)
        note = wire.encode(wire.Note(self.id, "layer", layer))
        if len(local_ids):
            op = self._sender.engine.write(
                region,
                remote,
                local_offsets=ours.offsets(layer, local_ids),
                remote_offsets=self._layout.offsets(layer, remote_ids),
                nbytes=ours.page_nbytes,
                timeout=_left(self.deadline),
                notify=note,
            )
        else:
            op = self._sender.engine.write(region[0:0], remote[0:0], timeout=_left(self.deadline), notify=note)
        self._ops.append(op)
        self._exposed_s += time.perf_counter() - began

    def finish(self, meta: dict[str, Any] | None = None) -> PushResult:
        """Waits until every byte is in place, then tells the decode side, with `meta` (msgpack's types). Raises the
        first failed op's error after telling the decode side of it."""
        self._check_open()
        began = time.perf_counter()
        try:
            for op in self._ops:
                op.wait(_left(self.deadline))
            self._send(wire.Note(self.id, "done", meta=meta or {}))
        except Error as error:
            self.abort(error)
            raise
        self._ended = True
        transport = self._ops[-1].transport if self._ops else self._remotes[0].transport
        nbytes = sum(op.nbytes for op in self._ops)
        return PushResult(nbytes, self._exposed_s + time.perf_counter() - began, transport)

    def abort(self, error: BaseException) -> None:
        """Cancels what is under way and tells the decode side why, if it can be reached. Never raises for a peer that
        is gone: its own deadline and session end tell it."""
        if self._ended:
            return
        self._ended = True
        for op in self._ops:
            op.cancel()
        for op in self._ops:
            with suppress(Error):  # each ends with its own error; `error` is the one that counts
                op.wait(5)
        with suppress(Error):
            self._send(wire.Note(self.id, "failed", error=type(error).__name__, message=str(error)), timeout=2)

    def _send(self, note: wire.Note, timeout: float | None = None) -> None:
        region, remote = self._side(0)
        limit = _left(self.deadline) if timeout is None else timeout
        self._sender.engine.write(region[0:0], remote[0:0], timeout=limit, notify=wire.encode(note)).wait(limit)

    def _side(self, layer: int) -> tuple[Region, RemoteRegion]:
        ours = self._sender.kv.layout.storage_index[layer]
        return self._sender.regions[ours], self._remotes[self._layout.storage_index[layer]]

    def _check_open(self) -> None:
        if self._ended:
            raise Closed("this prefill session has ended")

    def __enter__(self) -> PrefillSession:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abort(error or InvalidArgument("left without finish()"))


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise DeadlineExceeded("the session's deadline has passed")
    return left
