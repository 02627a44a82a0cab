"""The prefill side of prefill/decode sessions: pushes pages into decode caches, or offers them, layer by layer."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from torch_mooncake.errors import Closed, InvalidArgument
from torch_mooncake.kv import wire
from torch_mooncake.kv.cache import PagedKV
from torch_mooncake.kv.inbox import Inbox
from torch_mooncake.kv.layer_runs import OtherLayouts
from torch_mooncake.kv.packing import Packer
from torch_mooncake.kv.prefill import Event, PrefillSession, PushResult
from torch_mooncake.kv.settle import Settler
from torch_mooncake.kv.staging import Staging
from torch_mooncake.kv.target import Target

if TYPE_CHECKING:
    from torch_mooncake.transfer import Engine

__all__ = ["Event", "KVSender", "PrefillSession", "PushResult"]


class KVSender:
    """Sends pages of `kv` through `engine`, whose notifications it takes. Keeps the cache registered and one connection
    a decode engine. This process is tensor-parallel rank `tp_rank` of `tp_size`, and `kv` holds that rank's heads.
    Packed pages wait to be fetched in `staging_nbytes` of memory, made on first use.

    Thread safety: `open` and `offer` may be called from any thread. `close` deregisters; the engine stays its owner's.
    """

    def __init__(
        self, engine: Engine, kv: PagedKV, *, tp_rank: int = 0, tp_size: int = 1, staging_nbytes: int = 64 << 20
    ) -> None:
        if not 0 <= tp_rank < tp_size:
            raise InvalidArgument(f"tp_rank {tp_rank} is not in 0..{tp_size - 1}")
        self.engine = engine
        self.kv = kv
        self.place = wire.Place(tp_rank, tp_size)
        self.regions = kv.register(engine, writable=False, label="prefill KV cache")
        self.inbox = Inbox.of(engine)
        self.layout_key = wire.pack_layout(kv.layout.to_dict())
        self.group_of = {
            layer: (index, group.num_pages, group.page_nbytes(place))
            for index, group in enumerate(kv.layout.groups)
            for place, layer in enumerate(group.layer_ids)
        }
        self.settler = Settler("tm-kv-settle")
        self.sessions: set[PrefillSession] = set()  # those that have not ended
        self.packer = Packer(kv)
        self.staging_nbytes = staging_nbytes
        self.slots = Staging(engine, 64 << 10, torch.device("cpu"), label="KV sessions' slots")  # read from tables
        self.hungry: set[Target] = set()  # those that wait for staging memory
        self._staging: Staging | None = None
        self.others = OtherLayouts(kv.layout, sending=True)
        self._lock = threading.Lock()
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._worker: threading.Thread | None = None
        self._closed = False

    def open(
        self, tickets: bytes | Sequence[bytes], *, timeout: float | None = None, wire: str = "auto"
    ) -> PrefillSession:
        """Takes the ticket of a decode side, or those of all its tensor-parallel ranks: each gets the heads of ours
        that it holds. Raises LayoutMismatch naming every difference of the two caches, PeerLost or DeadlineExceeded
        when a decode engine cannot be reached, KeyNotFound when its session is over. The decode sides that can be told
        are. Waits for decode engines until its deadline when they stand still: not for a thread that has to go on.

        `timeout` (s) shortens the tickets' own. `wire`: "direct" (each run of bytes to its place), "packed" (packed,
        sent, unpacked), "packed_fp8" (the same as float8, only if the ticket asks for it, too) or "auto".
        """
        messages = [_pushed(data) for data in ([tickets] if isinstance(tickets, bytes) else tickets)]
        if not messages:
            raise InvalidArgument("no ticket")
        allowed = min(message.timeout_s for message in messages)
        deadline = time.monotonic() + (allowed if timeout is None else min(timeout, allowed))
        session = PrefillSession(self, deadline, wire, pulled=False)
        session._open(messages)
        return session

    def offer(self, *, timeout: float = 30, wire: str = "auto") -> PrefillSession:
        """A session that decode pulls: give its `ticket()`, and those of the other prefill ranks, to `KVReceiver.pull`
        of every decode rank. `push_layer` then says which pages may be read, and `finish` waits until every decode rank
        that our heads go to has them; the pages must keep their content until then. `wire` as in `open`."""
        session = PrefillSession(self, time.monotonic() + timeout, wire, pulled=True)
        session._offer()
        return session

    def close(self, timeout: float = 10) -> None:
        """Ends all sessions as closed. Raises Busy when a peer may still be reading (the regions stay registered)."""
        with self._lock:
            first, self._closed = not self._closed, True
        if first:
            for session in list(self.sessions):
                session.closed(Closed("the sender was closed"))
            self._jobs.put(None)
            if self._worker is not None:
                self._worker.join()
            self.settler.close()
            self.inbox.release()
        own = [staging.region for staging in (self._staging, self.slots) if staging is not None] if first else []
        for region in [*own, *self.regions]:
            self.engine.deregister(region, timeout=timeout)
        self.regions, self._staging = [], None

    # ---- for the sessions

    def cannot_pack(self) -> str:
        """Why the decode side could not fetch packed pages from here, or ""."""
        return "" if self.engine.addresses else "the prefill engine does not listen"

    @property
    def staging(self) -> Staging:
        with self._lock:
            if self._staging is None:
                self._staging = Staging(self.engine, self.staging_nbytes, self.packer.device, label="packed KV pages")
            return self._staging

    def give_back(self, offset: int) -> None:
        """A piece of staging memory is free: those that wait for some get their turn."""
        if self._staging is None:
            return
        self._staging.give_back(offset)
        if self.hungry:
            self.run(self._feed)

    def _feed(self) -> None:
        hungry, self.hungry = self.hungry, set()
        for target in hungry:
            target.pump_safely()

    def run(self, job: Callable[[], None]) -> None:
        """On the sender's own thread, in turn: what has to wait for an event, or takes its time. A sender that is
        closed has ended its sessions, and runs nothing more of them."""
        with self._lock:
            if self._worker is None and not self._closed:
                self._worker = threading.Thread(target=self._work, name="tm-kv-send", daemon=True)
                self._worker.start()
        self._jobs.put(job)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()


def _pushed(data: bytes) -> wire.Ticket:
    ticket = wire.decode_ticket(data)
    if ticket.mode != "push":
        raise InvalidArgument("that ticket was made by a prefill side, to be pulled from")
    return ticket
