"""A prefill rank's side of the PD connector: pushes layers while the next ones are computed, the rest behind them."""

from __future__ import annotations

import os
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch_mooncake as tm
from torch_mooncake.integrations.vllm.door import Door, Line
from torch_mooncake.integrations.vllm.pd_orders import PDMeta, PDPlace, Send
from torch_mooncake.integrations.vllm.pd_transfer import Ask, Transfer
from torch_mooncake.integrations.vllm.settings import Settings, logger
from torch_mooncake.kv import KVSender, PagedKV

_REMEMBERED = 1024  # transfers that are over: who asks for one hears so


@dataclass
class _Part:
    """What a step does for a transfer."""

    transfer: Transfer
    ready: int  # positions that are whole when it is over
    live: bool = False  # it is pushed within the step


class Prefill:
    """Used by the worker's thread, which never waits for a decode engine.

    A transfer begins when the prompt's first blocks are scheduled or the first decode rank calls, and goes on when both
    have happened. What a step computes is pushed layer by layer within the step if the session is open by then, else by
    a thread behind it. It ends when all is in place, when either side fails, or when nobody has come for it within
    ``hold_s`` of the request's end.
    """

    def __init__(self, engine: tm.Engine, kv: PagedKV, rank: int, settings: Settings, token: str) -> None:
        self._sender = KVSender(engine, kv, tp_rank=rank, tp_size=settings.tp_size)
        self._kv, self._rank = kv, rank
        self._layers = [layer for layer, _ in kv.layout.groups[0].layers]
        self._hold_s = settings.seconds("hold_s", 120)
        self._incarnation = os.urandom(8).hex()
        self._lock = threading.Lock()
        self._transfers: dict[str, Transfer] = {}
        self._requests: dict[str, Transfer] = {}  # by request
        self._over: OrderedDict[str, str] = OrderedDict()  # why, by transfer
        self._finished: dict[str, float] = {}  # requests, and when they finished
        self._step: list[_Part] = []
        self._done: list[int] = []  # layers of it
        self.pushed_early = 0  # layers of requests that were pushed within their steps
        self._threads = ThreadPoolExecutor(8, "tm-vllm-prefill")
        port = int(settings.extra.get("port", 0))
        self._door = Door(
            str(settings.extra.get("host", "127.0.0.1")), port and port + rank, token, self._hear, self._gone
        )

    @property
    def place(self) -> PDPlace:
        return PDPlace(self._door.address, self._incarnation)

    # ---- decode's calls (the door's thread)

    def _hear(self, line: Line, message: dict[str, Any]) -> None:
        name = str(message.get("transfer", ""))
        if message.get("kind") == "unwanted":
            self._threads.submit(self.drop, name, tm.Cancelled("the decode request ended before it had blocks"))
            return
        if message.get("kind") == "have":
            with self._lock:
                known = self._transfers.get(name)
            if known is not None:
                with known.lock:
                    known.content.add(line)
            return
        rank, ask = Ask.of(line, message)
        try:
            if message.get("incarnation") not in (None, "", self._incarnation):
                raise tm.PeerLost("the prefill engine has been restarted")
            transfer = self._transfer(name)
            transfer.add(rank, ask)
        except tm.Error as error:
            line.send(_failed(error))
            return
        self._advance_later(transfer)

    def _transfer(self, name: str) -> Transfer:
        with self._lock:
            if (why := self._over.get(name)) is not None:
                raise tm.KeyNotFound(f"transfer {name} is over: {why}")
            return self._transfers.setdefault(name, Transfer(name))

    def _gone(self, line: Line) -> None:
        """A decode rank has hung up: a session that is open knows by itself."""
        with self._lock:
            transfers = list(self._transfers.values())
        for transfer in transfers:
            with transfer.lock:
                ours = line not in transfer.content and any(ask.line is line for ask in transfer.asks.values())
                waiting = transfer.session is None
            if ours and waiting:
                self.drop(transfer.id, tm.PeerLost("the decode engine hung up before it was served"))

    # ---- the worker's steps

    def begin(self, meta: PDMeta) -> None:
        """Before the step's first layer."""
        self._step, self._done = [], []
        for send in meta.sends:
            transfer = self._known(send)
            with transfer.lock:
                transfer.blocks[len(transfer.blocks) :] = send.blocks[len(transfer.blocks) :]
            self._step.append(_Part(transfer, send.ready))

    def _known(self, send: Send) -> Transfer:
        """The transfer of a request; one that has ended already if it cannot be."""
        with self._lock:
            if (known := self._requests.get(send.request_id)) is not None:
                return known
            transfer = self._transfers.setdefault(send.transfer_id, Transfer(send.transfer_id))
            taken = transfer.request_id is not None or send.transfer_id in self._over
            if taken:
                logger.warning("%s is not sent: transfer %s is another request's", send.request_id, send.transfer_id)
                transfer = Transfer(send.transfer_id)
                transfer.ended = True
            transfer.request_id, transfer.digest, transfer.total = send.request_id, send.digest, send.total
            self._requests[send.request_id] = transfer
            return transfer

    def layer(self, number: int) -> None:
        """A layer of the step has been computed (CUDA: is queued on the current stream)."""
        if not self._step or number in self._done:
            return
        event = self._event()
        for part in self._step:
            if not part.live and not part.transfer.join():
                continue
            if not part.live:
                part.live = True
                for earlier in self._done:
                    self._push(part, earlier, event)
            self._push(part, number, event)
        self._done.append(number)

    def _push(self, part: _Part, layer: int, event: Any) -> None:
        transfer = part.transfer
        try:
            transfer.push(layer, transfer.ready, part.ready, event)
            self.pushed_early += 1
        except tm.Error as error:
            with transfer.lock:
                transfer.dead = transfer.dead or error

    def end(self) -> None:
        """After the step's last layer."""
        if not self._step:
            return
        event, whole = self._event(), len(self._done) == len(self._layers)
        for part in self._step:
            transfer = part.transfer
            with transfer.lock:
                if part.live and not whole:
                    transfer.dead = transfer.dead or tm.InternalError(
                        "a step did not say when its layers were computed"
                    )
                if part.live and transfer.dead is None:
                    transfer.pushed = part.ready
                transfer.ready, transfer.event = part.ready, event
            if part.live:
                transfer.release()
            self._advance_later(transfer)
        self._step, self._done = [], []

    def _event(self) -> Any:
        if self._kv.device.type != "cuda":
            return None
        import torch

        event = torch.cuda.Event()
        event.record()
        return event

    # ---- behind the steps (threads)

    def _advance_later(self, transfer: Transfer) -> None:
        try:
            self._threads.submit(self._advance, transfer)
        except RuntimeError:  # closed meanwhile
            self._end(transfer, tm.Closed("the prefill engine is closing"))

    def _advance(self, transfer: Transfer) -> None:
        """Does what can be done for it now."""
        if not transfer.claim():
            return
        try:
            while todo := transfer.next():
                if todo == "open":
                    self._open(transfer)
                elif todo == "push":
                    start, end, event = transfer.pushed, transfer.ready, transfer.event
                    for layer in self._layers:
                        transfer.push(layer, start, end, event)
                    transfer.pushed = end
                elif todo == "finish":
                    assert transfer.session is not None
                    transfer.session.finish()
                    self._end(transfer, None)
                    return
                else:
                    self._end(transfer, transfer.dead)
                    return
        except Exception as error:
            self._end(transfer, transfer.dead or error)

    def _open(self, transfer: Transfer) -> None:
        session = self._sender.open([transfer.asks[rank].ticket for rank in sorted(transfer.asks)])
        with transfer.lock:
            transfer.session = session

    def _end(self, transfer: Transfer, error: BaseException | None) -> None:
        """Nothing of it is under way when this returns. Whoever is on the line hears why."""
        if error is not None:
            logger.warning("%s was not sent: %s: %s", transfer.request_id or transfer.id, type(error).__name__, error)
            if transfer.session is not None:
                transfer.session.abort(error)
        with self._lock:
            self._remember(transfer.id, "it was sent" if error is None else str(error))
            if self._transfers.get(transfer.id) is transfer:
                del self._transfers[transfer.id]
        transfer.tell({"kind": "done"} if error is None else _failed(error))
        with transfer.lock:
            transfer.ended = True

    def _remember(self, name: str, why: str) -> None:
        """With the lock."""
        self._over.setdefault(name, why)
        while len(self._over) > _REMEMBERED:
            self._over.popitem(last=False)

    def drop(self, name: str, error: tm.Error) -> None:
        """Ends a transfer, or sees to it that it does not begin. When this returns its blocks are not read any more,
        unless it had been sent already."""
        with self._lock:
            transfer = self._transfers.get(name)
            if transfer is None:
                self._remember(name, str(error))
                return
        with transfer.lock:
            transfer.dead = transfer.dead or error
            session = transfer.session
        if session is not None:
            session.abort(error)
        self._advance_later(transfer)

    def preempt(self, meta: PDMeta) -> None:
        """Before anybody writes into the blocks of preempted requests."""
        for name in meta.preempted:
            self.drop(name, tm.Cancelled(meta.dropped[name]))

    def heed(self, meta: PDMeta) -> None:
        """What else the step says: requests that have ended early."""
        for name, why in meta.dropped.items():
            if name not in meta.preempted:
                self._threads.submit(self.drop, name, tm.Cancelled(why))

    def sent(self, finished: Iterable[str]) -> set[str]:
        """Of the requests that have finished, now or before, those whose blocks are free; each once."""
        now = time.monotonic()
        for name in finished:
            if name in self._requests:
                self._finished[name] = now
        free = {name for name in self._finished if self._requests[name].ended}
        for name in free:
            del self._requests[name], self._finished[name]
        for name, since in self._finished.items():
            transfer = self._requests[name]
            if now - since > self._hold_s and transfer.dead is None and transfer.session is None:
                why = tm.DeadlineExceeded(f"nobody came for it within {self._hold_s} s")
                self._threads.submit(self.drop, transfer.id, why)
        with self._lock:  # calls for requests that never came
            stale = [t for t in self._transfers.values() if not t.total and now - t.since > self._hold_s and not t.dead]
        for transfer in stale:
            self.drop(transfer.id, tm.DeadlineExceeded(f"no request of that name came within {self._hold_s} s"))
        return free

    def close(self) -> None:
        with self._lock:
            transfers = list(self._transfers.values())
        for transfer in transfers:
            self.drop(transfer.id, tm.Closed("the prefill engine is closing"))
        self._threads.shutdown(wait=True)
        self._door.close()
        try:
            self._sender.close()
        except tm.Busy as error:  # its memory goes with the process
            logger.warning("a decode engine still reads: %s", error)


def _failed(error: BaseException) -> dict[str, Any]:
    return {"kind": "failed", "why": f"{type(error).__name__}: {error}"}
