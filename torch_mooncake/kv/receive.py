"""The decode side of a prefill/decode session: reserves pages, hands out a ticket, hears of each layer."""

from __future__ import annotations

import os
import threading
import time
from types import TracebackType
from typing import TYPE_CHECKING, Any

from torch_mooncake.errors import Busy, Cancelled, Closed, DeadlineExceeded, Error, InvalidArgument, PeerLost
from torch_mooncake.kv import wire
from torch_mooncake.kv.cache import PagedKV
from torch_mooncake.kv.pages import PageAllocator

if TYPE_CHECKING:
    from torch_mooncake.transfer import Engine, Peer

_TICK_S = 0.25  # how often deadlines and peers are looked at when nothing arrives


class KVReceiver:
    """Receives pages into `kv` through `engine`, whose notifications it takes (one receiver an engine).

    One thread sleeps on the engine's notifications and, four times a second, ends sessions whose deadline has passed
    or whose peer is gone, so that every session ends even if nobody waits for it. Thread safety: all methods.
    """

    def __init__(self, engine: Engine, kv: PagedKV, allocator: PageAllocator) -> None:
        self.engine = engine
        self.kv = kv
        self.allocator = allocator
        self.stray_notes = 0  # of sessions that have ended
        self._sessions: dict[bytes, DecodeSession] = {}
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._listen, name="tm-kv-receiver", daemon=True)
        self._thread.start()

    def open(self, num_pages: int, *, timeout: float = 30, peer: Peer | None = None) -> DecodeSession:
        """Reserves `num_pages` (PoolFull if there are not so many) for one prompt. With `peer`, the prefill engine,
        the session fails with PeerLost as soon as that engine is gone rather than at the deadline."""
        if self._closing.is_set():
            raise Closed("this receiver is closed")
        session = DecodeSession(self, self.allocator.take(num_pages), time.monotonic() + timeout, peer)
        with self._lock:
            self._sessions[session.id] = session
        return session

    def close(self) -> None:
        """Ends all sessions as closed and stops the thread. The engine stays its owner's."""
        self._closing.set()
        self._thread.join()
        for session in self._snapshot():
            session._end(Closed("the receiver was closed"))

    def _listen(self) -> None:
        while not self._closing.is_set():
            try:
                note = wire.decode_note(self.engine.next_notification(timeout=_TICK_S).data)
            except DeadlineExceeded:
                note = None
            except Closed:
                for session in self._snapshot():
                    session._end(Closed("the engine was closed"))
                return
            if note is not None:
                with self._lock:
                    target = self._sessions.get(note.session)
                if target is None:
                    self.stray_notes += 1
                else:
                    target._hear(note)
            for session in self._snapshot():
                session._check()

    def _snapshot(self) -> list[DecodeSession]:
        with self._lock:
            return list(self._sessions.values())

    def _forget(self, session: DecodeSession) -> None:
        with self._lock:
            self._sessions.pop(session.id, None)


class DecodeSession:
    """Pages on their way to us. Made by `KVReceiver.open`. All methods may be called from any thread.

    It ends once: done, failed, timed out or cancelled. At the end its own registration of the cache is withdrawn, so
    nothing of it can land any more; when it failed the pages go back to the allocator, and when even that withdrawal
    is not confirmed (Busy) they are quarantined. When it is done the pages belong to the caller, who frees them.
    """

    def __init__(self, receiver: KVReceiver, pages: list[int], deadline: float, peer: Peer | None) -> None:
        self.id = os.urandom(16)
        self.pages = pages
        self.deadline = deadline
        self._receiver = receiver
        self._peer = peer
        self._changed = threading.Condition()
        self._layers: set[int] = set()
        self._meta: dict[str, Any] | None = None
        self._error: Error | None = None
        self._ended = False
        self._settled = False
        try:
            # A registration of its own: withdrawing it fences this session and no other.
            self._regions = receiver.kv.register(receiver.engine, writable=True, label="decode KV pages")
        except BaseException:
            receiver.allocator.free(pages)
            raise

    def ticket(self) -> bytes:
        """What the prefill side needs; carry it over any channel. No secret."""
        return wire.encode(
            wire.Ticket(
                version=wire.VERSION,
                session=self.id,
                addresses=list(self._receiver.engine.addresses),
                layout=self._receiver.kv.layout.to_dict(),
                regions=[region.descriptor() for region in self._regions],
                pages=self.pages,
                timeout_s=max(0.0, self.deadline - time.monotonic()),
            )
        )

    def wait_layer(self, layer: int) -> None:
        """Returns when every page of `layer` is in place; raises the session's error if it ends before that."""
        if not 0 <= layer < self._receiver.kv.layout.num_layers:
            raise InvalidArgument(f"layer {layer} is not in 0..{self._receiver.kv.layout.num_layers - 1}")
        self._wait(lambda: layer in self._layers)

    def wait(self) -> dict[str, Any]:
        """Returns the prefill side's `meta` when everything is in place and the pages are ours alone; raises what
        ended the session otherwise: PeerLost, DeadlineExceeded, Cancelled, Closed or the prefill side's error."""
        self._wait(lambda: self._settled and self._meta is not None)
        assert self._meta is not None
        return self._meta

    def cancel(self) -> None:
        """Ends the session now, if it has not ended, and returns when it is settled: `state` is final then."""
        self._end(Cancelled("the session was cancelled"))
        with self._changed:
            self._changed.wait_for(lambda: self._settled)

    @property
    def state(self) -> str:
        """ "pending", "done", "cancelled", "timeout" or "failed"."""
        with self._changed:
            if not self._settled:
                return "pending"
            if self._error is None:
                return "done"
        return {Cancelled: "cancelled", DeadlineExceeded: "timeout"}.get(type(self._error), "failed")

    def _wait(self, reached: Any) -> None:
        while True:
            with self._changed:
                if self._settled and self._error is not None:
                    raise self._error
                if reached():
                    return
                self._changed.wait(_TICK_S)
            self._check()

    def _hear(self, note: wire.Note) -> None:
        if note.kind == "failed":
            self._end(wire.rebuild_error(note))
            return
        with self._changed:
            if note.kind == "layer":
                self._layers.add(note.layer)
            elif note.kind == "done":
                self._meta = note.meta
            complete = self._meta is not None and len(self._layers) == self._receiver.kv.layout.num_layers
            self._changed.notify_all()
        if complete:
            self._end(None)

    def _check(self) -> None:
        """Ends the session if its time is up or its peer is gone. A caller who finds it ended but not settled waits
        for the one who is settling it."""
        if time.monotonic() >= self.deadline:
            self._end(DeadlineExceeded(f"{len(self._layers)} of the prompt's layers arrived before the deadline"))
        elif self._peer is not None and not self._peer.alive:
            self._end(PeerLost("the prefill engine is gone"))

    def _end(self, error: Error | None) -> None:
        with self._changed:
            if self._ended:
                return
            self._ended = True
            self._error = error
        quiet = True
        for region in self._regions:
            try:
                self._receiver.engine.deregister(region, timeout=2)
            except Busy as busy:
                quiet = False
                error = error or busy
            except Closed:  # the engine is gone, and all access with it
                pass
        if error is not None:
            (self._receiver.allocator.free if quiet else self._receiver.allocator.quarantine)(self.pages)
        self._receiver._forget(self)
        with self._changed:
            self._error = error
            self._settled = True
            self._changed.notify_all()

    def __enter__(self) -> DecodeSession:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()
