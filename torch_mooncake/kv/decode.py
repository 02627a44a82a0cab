"""One prompt's pages on their way, as the decode side sees it."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np

from torch_mooncake.errors import (
    Busy,
    Cancelled,
    Closed,
    DeadlineExceeded,
    Error,
    InvalidArgument,
    KeyNotFound,
    LayoutMismatch,
    PeerLost,
)
from torch_mooncake.kv import plan as planning
from torch_mooncake.kv import wire
from torch_mooncake.kv.arrivals import Arrivals
from torch_mooncake.kv.inbox import TICK_S
from torch_mooncake.kv.leases import Lease
from torch_mooncake.kv.prefill import check_layouts, few
from torch_mooncake.kv.source import Source
from torch_mooncake.kv.target import left

if TYPE_CHECKING:
    from torch_mooncake.kv.receive import KVReceiver
    from torch_mooncake.transfer import Peer, Region

_DOUBT_S = 0.25  # how long the end of a failed session waits for its peers before its pages are quarantined


class DecodeSession:
    """Made by `KVReceiver.open` and `KVReceiver.pull`. All methods may be called from any thread.

    It ends once: done, failed, timed out or cancelled. When it failed, its own registration of the cache is withdrawn,
    so that nothing of it can land any more, and the pages go back to the allocator; while a peer may still hold its map
    of them (a stopped process) they are in quarantine, and come back by themselves when it lets go or dies. When it is
    done the pages belong to the caller, who frees them.
    """

    def __init__(
        self,
        receiver: KVReceiver,
        counts: list[int],
        prompts: list[int],
        deadline: float,
        asked: str,
        keep_pages: bool,
    ) -> None:
        if asked not in wire.WIRES:
            raise InvalidArgument(f'wire is "auto", "direct", "packed" or "packed_fp8", not {asked!r}')
        self.id = os.urandom(16)
        self.deadline = deadline
        self.wire = asked
        self.group_pages: list[list[int]] = []  # the reserved pages of each group, in the order of the prompt
        self.kept_pages: list[list[int]] = []  # of each group, after a failure, with keep_pages
        self._receiver = receiver
        self._keep = keep_pages
        self._changed = threading.Condition()
        self._prompts = prompts
        self._arrived = Arrivals([group.layer_ids for group in receiver.kv.layout.groups], counts, prompts)
        self._attempts: dict[int, bytes] = {}  # by prefill rank
        self._sources: dict[int, Source] = {}
        self._early: dict[int, list[wire.Note]] = {}  # by prefill rank, before its hello
        self._source_tp = 0
        self._peers: list[Peer] = []
        self._metas: dict[int, dict[str, Any]] = {}
        self._lease: Lease | None = None  # push
        self._regions: list[Region] = []  # of the lease, to be withdrawn
        self._fetching = 0
        self._withdrawn: tuple[float, KeyNotFound] | None = None  # when a read found its pages withdrawn
        self._error: Error | None = None
        self._ended = False  # its outcome is decided
        self._ended_at = 0.0
        self._settled = False  # and final: state says it
        try:
            for allocator, count in zip(receiver.allocators, counts, strict=True):
                self.group_pages.append(allocator.take(count))
            receiver._add(self)
        except BaseException:
            self._drop()
            raise

    # ---- what a user sees

    @property
    def pages(self) -> list[int]:
        """The reserved pages (of the first group), in the order of the prompt."""
        return self.group_pages[0]

    def ticket(self) -> bytes:
        """Push: what the prefill side needs; carry it over any channel. No secret."""
        receiver = self._receiver
        if self._lease is None:
            raise InvalidArgument("this session is pulled: the prefill side makes the tickets")
        return wire.encode(
            wire.Ticket(
                version=wire.VERSION,
                session=self.id,
                mode="push",
                contact=receiver.inbox.contact,
                attempt=b"",
                layout=receiver.layout_key,
                place=receiver.place,
                regions=self._lease.descriptors,
                table=receiver.leases.region.descriptor(),
                slot=self._lease.slot,
                pages=[np.asarray(pages, np.int64).tobytes() for pages in self.group_pages],
                prompt_pages=self._prompts,
                wire=self.wire,
                timeout_s=max(0.0, self.deadline - time.monotonic()),
            )
        )

    def wait_layer(self, layer: int) -> None:
        """Returns when the prompt's pages of `layer` (the model's number) are in place; raises the session's error if
        it ends before that."""
        if layer not in self._arrived.group_of:
            raise InvalidArgument(f"layer {layer} is not in {few(sorted(self._arrived.group_of))}")
        self._wait(lambda: layer in self._arrived.complete)

    def wait(self) -> dict[str, Any]:
        """Returns the prefill side's `meta` (of several ranks: together, the lowest rank's word counts) when everything
        is in place and the pages are ours alone; raises what ended the session otherwise: PeerLost, DeadlineExceeded,
        Cancelled, Closed, LayoutMismatch or the prefill side's error, with `failed_pages`."""
        self._wait(lambda: self._settled)
        meta: dict[str, Any] = {}
        for rank in sorted(self._metas, reverse=True):
            meta.update(self._metas[rank])
        return meta

    def cancel(self) -> None:
        """Ends the session now, if it has not ended, tells the prefill side, and returns when `state` is final."""
        self._end(Cancelled("the decode side cancelled"))
        with self._changed:
            self._changed.wait_for(lambda: self._settled)

    @property
    def state(self) -> str:
        """ "pending", "done", "cancelled", "timeout" or "failed"."""
        with self._changed:
            return wire.state_of(self._settled, self._error)

    @property
    def error(self) -> Error | None:
        """What ended it; None while it is under way and when it is done. Its `failed_pages` are the pages (of all
        groups, first the first's) that did not arrive whole."""
        with self._changed:
            return self._error if self._settled else None

    @property
    def failed_pages(self) -> list[list[int]]:
        """Of each group, the prompt's pages that have not arrived whole (yet)."""
        with self._changed:
            return [
                [pages[place] for place in self._arrived.missing(group)] for group, pages in enumerate(self.group_pages)
            ]

    @property
    def layers(self) -> list[int]:
        """Those that are in place."""
        with self._changed:
            return sorted(self._arrived.complete)

    @property
    def wires(self) -> dict[int, str]:
        """By prefill rank that has come, how its pages travel: "direct", "packed" or "packed_fp8"."""
        with self._changed:
            return {rank: source.wire for rank, source in sorted(self._sources.items())}

    def explain(self) -> str:
        """How each prefill rank's pages travel, and why."""
        with self._changed:
            lines = [source.plan or f"prefill rank {rank}: {source.wire}" for rank, source in self._sources.items()]
        return "\n".join(lines) or "no prefill rank has come yet"

    # ---- its beginning

    def _open(self, peers: list[Peer]) -> None:
        """Push."""
        receiver = self._receiver
        self._peers = peers
        try:
            self._lease = receiver.leases.take(self.id)
        except BaseException:
            self._drop()
            raise
        receiver.inbox.enlist(self.id, b"", self)

    def _pull(self, tickets: list[wire.Ticket]) -> None:
        """Every ticket is checked before the first prefill rank is told that we come."""
        receiver = self._receiver
        ours, our = receiver.kv.layout, receiver.place
        told: list[wire.Ticket] = []
        try:
            size = tickets[0].place.size
            for ticket in tickets:
                theirs = receiver.others.layout(ticket.layout)
                check_layouts(ours, our, theirs, ticket.place, "the prefill cache differs")
                if ticket.place.size != size:
                    raise LayoutMismatch(f"a prefill rank of {size} ranks, and one of {ticket.place.size}")
            sources = planning.sources_of(theirs, size, ours, our)
            needed = set().union(*sources)
            by_rank = {ticket.place.rank: ticket for ticket in tickets}
            if len(by_rank) != len(tickets) or not needed <= by_rank.keys():
                raise InvalidArgument(
                    f"tickets of prefill ranks {few(sorted(by_rank))}; {few(sorted(needed))} are needed"
                )
            self._arrived.expect(sources)
            self._source_tp = size
            for rank in sorted(needed):
                self._sources[rank] = self._source_of(by_rank[rank])
            for rank in sorted(needed):
                receiver.inbox.enlist(by_rank[rank].session, b"", self)
                told.append(by_rank[rank])
                self._say_hello(by_rank[rank], self._sources[rank].remotes[0].transport)
            for rank in by_rank.keys() - needed:  # they need not wait for us
                self._say_hello(by_rank[rank], "")
        except BaseException as error:
            for ticket in tickets:
                receiver.inbox.dismiss(ticket.session, b"")
                if ticket in told or isinstance(error, LayoutMismatch):
                    note = wire.failed(ticket.session, wire.PREFILL, error, attempt=ticket.attempt, rank=our.rank)
                    receiver.inbox.post(ticket.contact, note)
            self._drop()
            raise

    def _source_of(self, ticket: wire.Ticket) -> Source:
        receiver = self._receiver
        theirs = receiver.others.layout(ticket.layout)
        planning.agree(self.wire, ticket.wire)
        feeds = planning.feeds_of(theirs, ticket.place, receiver.kv.layout, receiver.place)
        source = Source(
            self, ticket.session, ticket.attempt, ticket.contact, theirs, ticket.layout, ticket.place, feeds
        )  # fmt: skip
        self._attempts[ticket.place.rank] = ticket.attempt
        source.peer = receiver.inbox.peer(ticket.contact, left(self.deadline))
        source.remotes = [source.peer.open(region, timeout=left(self.deadline)) for region in ticket.regions]
        return source

    def _say_hello(self, ticket: wire.Ticket, transport: str) -> None:
        receiver = self._receiver
        contact = receiver.inbox.contact
        body = {
            "layout": receiver.layout_key,
            "place": [receiver.place.rank, receiver.place.size],
            "contact": contact,
            "wire": self.wire,
            "transport": transport,
            "reserved": [len(pages) for pages in self.group_pages],
            "prompt": self._prompts,
        }
        note = wire.Note(ticket.session, "hello", wire.PREFILL, ticket.attempt, receiver.place.rank, body=body)
        limit = left(self.deadline)
        receiver.inbox.send(ticket.contact, wire.encode(note), limit).wait(limit)

    def _drop(self) -> None:
        """It has not begun."""
        with self._changed:
            self._ended = self._settled = True
        self._receiver._forget(self)
        for allocator, pages in zip(self._receiver.allocators, self.group_pages, strict=False):
            allocator.free(pages)

    # ---- notes (inbox thread)

    def hear(self, note: wire.Note) -> None:
        with self._changed:
            known = self._attempts.setdefault(note.rank, note.attempt)
        try:
            if known != note.attempt:
                self._receiver.inbox.strays += 1
                if note.kind == "hello":
                    raise InvalidArgument(f"prefill rank {note.rank} opened the ticket twice: which pages are right?")
            elif note.kind == "failed":
                self._end(wire.rebuild_error(note, "prefill"), but=note.rank)
            elif note.kind == "hello":
                self._meet(note)
            elif note.rank not in self._sources:
                self._early.setdefault(note.rank, []).append(note)
            else:
                self._heed(note)
        except Error as error:
            self._end(error)
            if note.kind == "hello" and (note.rank not in self._sources or known != note.attempt):
                self._turn_away(note, error)
        except (KeyError, IndexError, TypeError, ValueError) as error:
            self._end(InvalidArgument(f"not a note: {note.kind}, {type(error).__name__}: {error}"))

    def _turn_away(self, note: wire.Note, error: Error) -> None:
        """Tells who said hello that it does not come to anything."""
        with contextlib.suppress(InvalidArgument):  # nobody who could be told
            receiver = self._receiver
            told = wire.failed(self.id, wire.PREFILL, error, attempt=note.attempt, rank=receiver.place.rank)
            receiver.inbox.post(wire.contact_of(note.body), told)

    def _heed(self, note: wire.Note) -> None:
        self._sources[note.rank].heard = time.monotonic()
        if note.kind == "layer":
            self._arrive(note)
        elif note.kind in ("packed", "ready"):
            self._sources[note.rank].fetch(note)
        elif note.kind == "done":
            with self._changed:
                self._metas[note.rank] = dict(note.body["meta"])
                self._arrived.finished(note.rank, note.body["chunks"], note.body["pages"])
                self._changed.notify_all()
            self._complete()

    def _meet(self, note: wire.Note) -> None:
        """Push: a prefill rank has opened the ticket."""
        receiver, body = self._receiver, note.body
        place = wire.Place(*body["place"])
        theirs = receiver.others.layout(body["layout"])
        check_layouts(receiver.kv.layout, receiver.place, theirs, place, "the prefill cache differs")
        sources = planning.sources_of(theirs, place.size, receiver.kv.layout, receiver.place)
        if self._source_tp not in (0, place.size):
            raise LayoutMismatch(f"a prefill rank of {self._source_tp} ranks, and one of {place.size}")
        if place.rank != note.rank or all(place.rank not in ranks for ranks in sources):
            raise LayoutMismatch(f"prefill rank {note.rank} of {place.size} has nothing for this rank")
        contact = wire.contact_of(body)
        feeds = planning.feeds_of(theirs, place, receiver.kv.layout, receiver.place)
        source = Source(self, self.id, note.attempt, contact, theirs, body["layout"], place, feeds)
        source.wire, source.plan = str(body["wire"]), str(body["plan"])
        with self._changed:
            self._sources[note.rank] = source
            if not self._arrived.sources_known:
                self._source_tp = place.size
                self._arrived.expect(sources)
            self._changed.notify_all()
        if self._lease is not None:
            receiver.leases.accept(self._lease, note.attempt)
        receiver.inbox.greet(contact)  # so that its death is seen
        for early in self._early.pop(note.rank, []):
            self._heed(early)

    def group_of(self, layer: int) -> int:
        return self._arrived.group_of[layer]

    def _arrive(self, note: wire.Note) -> None:
        if time.monotonic() >= self.deadline:
            return self.check()
        with self._changed:
            self._arrived.add(note.rank, note.layer, note.start, note.count, note.chunk, note.parts)
            self._changed.notify_all()
        return self._complete()

    def _complete(self) -> None:
        """Ends the session well if everything is there."""
        with self._changed:
            if self._ended or not self._arrived.over:
                return
            missing = any(self._arrived.missing(group) for group in range(len(self.group_pages)))
        self._end(InvalidArgument("the prefill side finished without pushing all of the prompt") if missing else None)

    # ---- reads (fetcher thread)

    def _pending(self) -> bool:
        return not self._ended

    def _fetch_begins(self) -> bool:
        """False when the session is over."""
        with self._changed:
            if not self._ended:
                self._fetching += 1
            return not self._ended

    def _fetch_ended(self) -> None:
        with self._changed:
            self._fetching -= 1

    def _fetched(self, note: wire.Note, error: Error | None) -> None:
        self._fetch_ended()
        if isinstance(error, KeyNotFound):  # withdrawn by a side that is ending: its note says why in a moment
            self._withdrawn = self._withdrawn or (time.monotonic(), error)
            return
        if error is not None:
            self._end(error)
            return
        try:
            self._arrive(note)
        except (KeyError, IndexError) as wrong:
            self._end(InvalidArgument(f"not a note: {note.kind}, {wrong}"))

    # ---- its end

    def _wait(self, reached: Callable[[], bool]) -> None:
        while True:
            with self._changed:
                if self._settled and self._error is not None:
                    raise self._error
                if reached():
                    return
                self._changed.wait(TICK_S)
            self.check()

    def check(self) -> None:
        """Ends the session if its time is up or a peer is gone."""
        if self._ended:
            return
        if time.monotonic() >= self.deadline:
            total = len(self._arrived.group_of)
            self._end(DeadlineExceeded(f"{len(self.layers)} of {total} layers arrived before the deadline"))
            return
        if self._withdrawn is not None and time.monotonic() - self._withdrawn[0] >= wire.REASON_S:
            self._end(Cancelled(f"the prefill side has withdrawn its pages: {self._withdrawn[1]}"))
            return
        gone = [f"{peer.name} is gone" for peer in self._peers if not peer.alive]
        gone += [why for source in list(self._sources.values()) if (why := source.lost())]
        if gone:
            self._end(PeerLost(f"the prefill engine is lost: {gone[0]}"))

    def closed(self, error: Error) -> None:
        self._end(error)

    def _end(self, error: Error | None, but: int = -1) -> None:
        """Decides the outcome, once. `but`: the prefill rank that knows."""
        with self._changed:
            if self._ended:
                return
            self._ended, self._ended_at, self._error = True, time.monotonic(), error
            if error is None:
                self._settled = True  # every source has said that nothing of it is under way
            else:
                error.failed_pages = tuple(page for pages in self.failed_pages for page in pages)
            sources = dict(self._sources)
            self._changed.notify_all()
        receiver = self._receiver
        if self._lease is not None:
            receiver.leases.end(self._lease)
            if error is None:
                receiver.leases.lend_again(self._lease)
            else:
                self._regions = self._lease.regions
        for session in {self.id, *(source.session_id for source in sources.values())}:
            receiver.inbox.dismiss(session, b"", error or KeyNotFound("the session is over"))
        for rank, source in sources.items():
            if error is not None and rank != but:
                source.say_failed(error)
            elif error is None and source.peer is not None:
                source.say("closed")
        receiver._forget(self)
        receiver.fetcher.cancelled()
        receiver.settler.add(self._withdraw)

    def _withdraw(self) -> bool:
        """Settler: whether nobody can touch the pages any more. Gives them back then, if the session failed."""
        kept = []
        for region in self._regions:
            try:
                self._receiver.engine.deregister(region, timeout=0)
            except Busy:
                kept.append(region)
            except Closed:  # the engine is gone, and all access with it
                pass
        self._regions = kept
        quiet = not kept and not self._fetching
        if self._error is None:
            return quiet
        if not self._settled and (quiet or time.monotonic() - self._ended_at >= _DOUBT_S):
            self._give_back(quiet)
        elif self._settled and quiet:
            for allocator, pages in zip(self._receiver.allocators, self.group_pages, strict=True):
                allocator.release(pages)
        return quiet

    def _give_back(self, quiet: bool) -> None:
        for group, (allocator, pages) in enumerate(zip(self._receiver.allocators, self.group_pages, strict=True)):
            if not quiet:
                allocator.quarantine(pages)
            elif self._keep:
                gone = {pages[place] for place in self._arrived.missing(group)}
                gone.update(pages[self._arrived.known(group) :])
                self.kept_pages.append([page for page in pages if page not in gone])
                allocator.free(gone)
            else:
                allocator.free(pages)
        with self._changed:
            self._settled = True
            self._changed.notify_all()

    def __enter__(self) -> DecodeSession:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()
