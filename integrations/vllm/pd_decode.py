"""A decode rank's side of the PD connector: asks prefill for prompts, and says when their blocks are in place."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch_mooncake as tm
from torch_mooncake.integrations.vllm.door import Line, call
from torch_mooncake.integrations.vllm.pd_orders import Receive
from torch_mooncake.integrations.vllm.settings import Settings, logger
from torch_mooncake.kv import DecodeSession, KVReceiver, PageAllocator, PagedKV


class HostPages(PageAllocator):
    """Pages that vLLM gives out: a session takes those that were `offer`-ed just before. ``quarantined`` says which of
    them somebody may still write to."""

    def __init__(self, num_pages: int) -> None:
        super().__init__(num_pages)
        self._guard = threading.Lock()
        self._offered: list[int] = []
        self._held: set[int] = set()

    def offer(self, pages: Sequence[int]) -> None:
        """For the next `take`, of the same thread."""
        self._offered = list(pages)

    def take(self, count: int) -> list[int]:
        pages, self._offered = self._offered, []
        if len(pages) != count:
            raise tm.InvalidArgument(f"{count} pages asked for, {len(pages)} offered")
        return pages

    def free(self, pages: Iterable[int]) -> None:
        """They are vLLM's again when it hears of the session's end."""

    def quarantine(self, pages: Iterable[int]) -> None:
        with self._guard:
            self._held.update(pages)

    def release(self, pages: Iterable[int]) -> None:
        with self._guard:
            self._held.difference_update(pages)

    def quiet(self, pages: Iterable[int]) -> bool:
        """Whether nobody can write to any of them."""
        with self._guard:
            return self._held.isdisjoint(pages)

    @property
    def quarantined(self) -> int:
        with self._guard:
            return len(self._held)


@dataclass
class _Arriving:
    order: Receive
    session: DecodeSession | None
    calls: list[Future[Line]] = field(default_factory=list)
    lines: list[Line] = field(default_factory=list)
    why: str = ""  # it ends early
    cancelled: bool = False  # nobody waits for it


class Decode:
    """Used by the worker's thread, which never waits for a prefill engine.

    A request's blocks are asked for by a call to every prefill rank, with a ticket. They arrive by ``timeout_s``, or
    are reported as failed: at once if a prefill engine refuses, ends the request or dies. A block is reported when
    nobody can write to it any more.
    """

    def __init__(self, engine: tm.Engine, kv: PagedKV, rank: int, settings: Settings, token: str) -> None:
        self._pages = HostPages(kv.layout.num_pages)
        self._receiver = KVReceiver(engine, kv, self._pages, tp_rank=rank, tp_size=settings.tp_size)
        self._rank, self._settings, self._token = rank, settings, token
        self._timeout_s = settings.seconds("timeout_s", 120)
        self._connect_s = settings.seconds("connect_timeout_s", 5)
        self._wire = str(settings.extra.get("wire", "auto"))
        self._arriving: dict[str, _Arriving] = {}
        self._failed_blocks: set[int] = set()
        self._threads = ThreadPoolExecutor(8, "tm-vllm-decode")

    def begin(self, orders: Sequence[Receive]) -> None:
        for order in orders:
            self._arriving[order.request_id] = self._ask(order)

    def _ask(self, order: Receive) -> _Arriving:
        count = len(order.blocks)
        try:
            self._pages.offer(order.blocks)
            session = self._receiver.open(count, prompt_pages=count, timeout=self._timeout_s, wire=self._wire)
        except tm.Error as error:
            return _Arriving(order, None, why=f"{type(error).__name__}: {error}")
        message: dict[str, Any] = {
            "kind": "ask",
            "transfer": order.transfer_id,
            "rank": self._rank,
            "size": self._settings.tp_size,
            "skip": order.skip,
            "digest": order.digest,
            "ticket": session.ticket(),
        }
        arriving = _Arriving(order, session)
        for index, address in enumerate(order.remote):
            incarnation = order.incarnations[index] if index < len(order.incarnations) else ""
            told = {**message, "incarnation": incarnation}
            arriving.calls.append(self._threads.submit(call, address, self._token, told, self._connect_s))
        return arriving

    def cancel(self, names: Iterable[str]) -> None:
        """Nobody waits for these any more. They are reported all the same, when their blocks are quiet."""
        for name in names:
            if (arriving := self._arriving.get(name)) is not None and not arriving.cancelled:
                arriving.cancelled = True
                self._stop(arriving, "the decode request ended")

    def unwanted(self, transfers: Iterable[tuple[str, list[str]]]) -> None:
        """Tells prefill that it need not keep these."""
        if self._rank == 0:
            for transfer, remote in transfers:
                for address in remote:
                    self._threads.submit(self._decline, address, transfer)

    def _decline(self, address: str, transfer: str) -> None:
        try:
            call(address, self._token, {"kind": "unwanted", "transfer": transfer}, self._connect_s).close()
        except tm.Error as error:  # it keeps them for a while
            logger.info("prefill was not told that %s is not wanted: %s", transfer, error)

    def _stop(self, arriving: _Arriving, why: str) -> None:
        if not arriving.why:
            arriving.why = why
            if arriving.session is not None:
                self._threads.submit(arriving.session.cancel)

    def received(self) -> set[str]:
        """Requests whose blocks are in place or have failed, each once."""
        over = {name for name, arriving in self._arriving.items() if self._over(arriving)}
        for name in over:
            self._conclude(self._arriving.pop(name))
        return over

    def _over(self, arriving: _Arriving) -> bool:
        session = arriving.session
        if session is None:
            return True
        if session.state == "pending":
            self._listen(arriving)
            return False
        return self._pages.quiet(arriving.order.blocks)

    def _listen(self, arriving: _Arriving) -> None:
        """What prefill says, or that it is gone."""
        for ended in [each for each in arriving.calls if each.done()]:
            arriving.calls.remove(ended)
            if (error := ended.exception()) is not None:
                self._stop(arriving, f"{type(error).__name__}: {error}")
            else:
                arriving.lines.append(ended.result())
        for line in list(arriving.lines):
            try:
                said = line.heard()
            except tm.Error as error:
                said = [{"kind": "failed", "why": f"{type(error).__name__}: {error}"}]
            if any(message.get("kind") == "done" for message in said):
                arriving.lines.remove(line)  # the session is about to say so
                line.close()
            elif failed := [message for message in said if message.get("kind") == "failed"]:
                self._stop(arriving, str(failed[0].get("why")))
            elif line.ended:
                self._stop(arriving, "PeerLost: the prefill engine is gone")

    def _conclude(self, arriving: _Arriving) -> None:
        order, session = arriving.order, arriving.session
        done = session is not None and session.state == "done"
        for ended in arriving.calls:
            ended.add_done_callback(lambda ended: _end_call(ended, order.transfer_id, done))
        for line in arriving.lines:
            _hang_up(line, order.transfer_id, done)
        if done:
            return
        error = None if session is None else session.error
        if arriving.cancelled:
            return
        failed = set(order.blocks) if error is None else set(error.failed_pages) & set(order.blocks)
        why = arriving.why or f"{type(error).__name__}: {error}"
        logger.warning("%d of %d blocks of %s did not come: %s", len(failed), len(order.blocks), order.request_id, why)
        self._failed_blocks |= failed

    def failed_blocks(self) -> set[int]:
        """Blocks that did not come, since the last time."""
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def close(self) -> None:
        self._receiver.close()
        self._threads.shutdown(wait=True, cancel_futures=True)
        for arriving in self._arriving.values():
            self._conclude(arriving)


def _end_call(ended: Future[Line], transfer: str, done: bool) -> None:
    if not ended.cancelled() and ended.exception() is None:
        _hang_up(ended.result(), transfer, done)


def _hang_up(line: Line, transfer: str, done: bool) -> None:
    """``done``: this rank has all it gets, though the prefill rank at the other end may have others to feed."""
    if done:
        try:
            line.send({"kind": "have", "transfer": transfer})
        except tm.PeerLost:
            pass  # it has hung up itself
    line.close()
