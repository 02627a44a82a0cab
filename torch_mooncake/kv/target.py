"""One decode rank as a prefill session sees it: where its pages are, what it gets from us, and what is under way."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from torch_mooncake.errors import DeadlineExceeded, Error, InvalidArgument, KeyNotFound
from torch_mooncake.kv import wire
from torch_mooncake.kv.arrivals import Arrivals
from torch_mooncake.kv.layout import PagedKVLayout
from torch_mooncake.kv.leases import SLOT_NBYTES, accepted
from torch_mooncake.kv.plan import Feed, Plan

if TYPE_CHECKING:
    from torch_mooncake.kv.send import KVSender, PrefillSession
    from torch_mooncake.transfer import Op, Peer, RemoteRegion

Int64s = NDArray[np.int64]


class Chunk(NamedTuple):
    """Local pages `ids` of one layer, for the other side's positions `start`, `start` + 1, …"""

    layer: int
    ids: Int64s
    start: int


class Sent(NamedTuple):
    op: Op
    chunk: Chunk


NOTHING = Chunk(-1, np.zeros(0, np.int64), 0)


def left(deadline: float) -> float:
    """Seconds to go; DeadlineExceeded when there are none."""
    seconds = deadline - time.monotonic()
    if seconds <= 0:
        raise DeadlineExceeded("the session's deadline has passed")
    return seconds


class Target:
    """Made when both sides' layouts are known to fit."""

    def __init__(
        self,
        session: PrefillSession,
        session_id: bytes,
        contact: wire.Contact,
        layout: PagedKVLayout,
        layout_key: bytes,
        place: wire.Place,
        feeds: list[Feed | None],
    ) -> None:
        self.session_id, self.contact, self.layout, self.place, self.feeds = session_id, contact, layout, place, feeds
        self.plan: Plan  # set when it is known over what it is reached
        self.pages: list[Int64s] = []
        self.peer: Peer | None = None  # push
        self.lock = threading.Lock()  # dispatch
        self.sent: deque[Sent] = deque()
        self.unfetched: dict[int, tuple[Chunk, int]] = {}  # packed chunks without ack, and where they are staged
        self.waiting: deque[tuple[Chunk, int]] = deque()  # chunks (and their groups) that found no staging memory
        self.chunks = 0  # sent on their way
        self.nbytes = 0
        self.transport = ""  # what has carried it
        self.closed = False  # a pulling decode side has everything
        self._session = session
        self._layout_key = layout_key
        self._descriptors: list[bytes] = []
        self._remotes: dict[int, RemoteRegion] = {}
        self._opening = threading.Lock()

    def reserve(self, pages: list[Int64s], prompt: list[int]) -> None:
        """`pages`: the decode side's, of each group (pull: only their number counts); `prompt`: how many of them have
        to be pushed, or UNKNOWN."""
        self.pages = pages
        groups = zip(self.layout.groups, self.feeds, strict=True)
        fed = [group.layer_ids if feed is not None else () for group, feed in groups]
        self._pushed = Arrivals(fed, [len(ids) for ids in pages], prompt)
        self._pushed.expect([{0}] * len(fed))
        self._extent = [0] * len(pages)  # of each group: positions up to which pages were pushed

    def reach(self, peer: Peer, ticket: wire.Ticket) -> str:
        """Push: where the pages lie, and over what they are reached. KeyNotFound for a stale ticket."""
        self.peer, self._descriptors, self._slot = peer, ticket.regions, ticket.slot
        self._table = self._sender.inbox.keep(peer, ticket.table, left(self._session.deadline))
        if self._read_slot() is None:
            raise KeyNotFound("the decode session is over")
        return self.remote(0).transport

    def await_welcome(self) -> None:
        """Until the decode side has heard our hello, and its lease of memory is ours to write to. Raises KeyNotFound
        when the session is over, or what it has failed with."""
        pause = 0.0001
        while not (welcome := self._read_slot()):
            if welcome is None:
                raise self._session._heard_why() or KeyNotFound("the decode session is over")
            left(self._session.deadline)
            time.sleep(pause)
            pause = min(2 * pause, 0.01)

    def _read_slot(self) -> bool | None:
        sender, at = self._sender, self._slot * SLOT_NBYTES
        while (place := sender.slots.try_take(SLOT_NBYTES)) is None:  # a hundred others are being opened
            left(self._session.deadline)
            time.sleep(0.001)
        try:
            here, there = sender.slots.region[place : place + SLOT_NBYTES], self._table[at : at + SLOT_NBYTES]
            sender.engine.read(here, there, timeout=left(self._session.deadline)).wait()
            slot = bytes(sender.slots.memory[place : place + SLOT_NBYTES].tolist())
        finally:
            sender.slots.give_back(place)
        return accepted(slot, self.session_id, self._session.attempt)

    @property
    def num_regions(self) -> int:
        return len(self._descriptors)

    @property
    def _sender(self) -> KVSender:
        return self._session._sender

    def remote(self, storage: int) -> RemoteRegion:
        """The region of a decode storage, opened on first use. KeyNotFound: the session is over there."""
        with self._opening:
            remote = self._remotes.get(storage)
            if remote is None:
                assert self.peer is not None
                limit = left(self._session.deadline)
                remote = self._remotes[storage] = self._sender.inbox.keep(self.peer, self._descriptors[storage], limit)
            return remote

    def open_all(self) -> None:
        """Opens what is not open yet, in the background, so that no push has to wait for it."""
        for storage in range(len(self._descriptors)):
            if self._session.ended:
                return
            self.remote(storage)

    def check(self, chunk: Chunk, group: int) -> None:
        """InvalidArgument when a chunk leaves the reserved pages."""
        reserved = len(self.pages[group])
        if chunk.start < 0 or chunk.start + len(chunk.ids) > reserved:
            raise InvalidArgument(f"{len(chunk.ids)} pages from {chunk.start} do not fit the {reserved} reserved pages")

    def dispatch(self, chunk: Chunk, group: int) -> None:
        """Sends a chunk on its way, if this rank gets any of that group from us. Packed chunks may have to wait: `pump`
        again when staging memory comes free."""
        feed = self.feeds[group]
        if feed is None:
            return
        self.check(chunk, group)
        with self.lock:
            self._pushed.add(0, chunk.layer, chunk.start, len(chunk.ids), self.chunks, 1)
            self._extent[group] = max(self._extent[group], chunk.start + len(chunk.ids))
            if self.plan.wire != "direct" and len(chunk.ids):
                self.waiting.extend((piece, group) for piece in self._pieces(chunk, feed))
            elif self._session.pulled and len(chunk.ids):
                self._offer(chunk)
            else:
                self._write(chunk, group, feed)
        if self.waiting:
            self.pump()

    # ---- the three wires

    def _write(self, chunk: Chunk, group: int, feed: Feed) -> None:
        sender, session, number = self._sender, self._session, self._count()
        if not len(chunk.ids):
            note = self._note("layer", chunk, number)
            self.sent.append(Sent(self._send(note), chunk))
            return
        theirs = self.pages[group][chunk.start : chunk.start + len(chunk.ids)]
        runs = sender.others.runs(self._layout_key, group, feed)
        moves = runs.moves(chunk.layer, chunk.ids, theirs)
        note = self._note("layer", chunk, number, parts=len(moves))
        timeout = left(session.deadline)
        for move in moves:
            op = sender.engine.write(
                sender.regions[move.our_storage],
                self.remote(move.their_storage),
                local_offsets=move.our_offset,
                remote_offsets=move.their_offset,
                nbytes=move.nbytes,
                timeout=timeout,
                notify=note,
            )
            self.sent.append(Sent(op, chunk))
            self.nbytes += op.nbytes

    def _offer(self, chunk: Chunk) -> None:
        """Pull: the other side may read these pages now."""
        most = wire.MAX_NOTE_NBYTES // 8
        for first in range(0, len(chunk.ids), most):
            part = Chunk(chunk.layer, chunk.ids[first : first + most], chunk.start + first)
            note = self._note("ready", part, self._count(), body={"pages": part.ids.tobytes()})
            self._sender.inbox.post(self.contact, note)

    def _pieces(self, chunk: Chunk, feed: Feed) -> Iterator[Chunk]:
        """A chunk cut so that several pieces find room in the staging memory."""
        sender = self._sender
        one = sender.packer.nbytes(chunk.layer, 1, feed.source_heads, self.plan.wire)
        most = max(1, sender.staging_nbytes // 4 // one)
        for first in range(0, len(chunk.ids), most):
            yield Chunk(chunk.layer, chunk.ids[first : first + most], chunk.start + first)

    def pump(self) -> None:
        """Packs what waits and finds room, and tells the other side to fetch it."""
        sender, session = self._sender, self._session
        staging = sender.staging
        with self.lock:
            while self.waiting and not session.ended:
                chunk, group = self.waiting[0]
                feed = self.feeds[group]
                assert feed is not None
                nbytes = sender.packer.nbytes(chunk.layer, len(chunk.ids), feed.source_heads, self.plan.wire)
                if (at := staging.try_take(nbytes)) is None:
                    sender.hungry.add(self)
                    return
                number = self._count()
                self.unfetched[number] = (chunk, at)
                self.waiting.popleft()
                sender.packer.pack(
                    chunk.layer, torch.from_numpy(chunk.ids), feed.source_heads, self.plan.wire,
                    staging.memory[at : at + nbytes],
                )  # fmt: skip
                self.nbytes += nbytes
                body = {"staging": session.staging(), "at": at, "nbytes": nbytes, "wire": self.plan.wire}
                sender.inbox.post(self.contact, self._note("packed", chunk, number, body=body))

    def pump_safely(self) -> None:
        """What goes wrong ends the session."""
        self._session._guarded(self.pump)

    def fetched(self, number: int) -> None:
        """The other side has a packed chunk."""
        if (entry := self.unfetched.pop(number, None)) is not None:
            self._sender.give_back(entry[1])

    def _count(self) -> int:
        number, self.chunks = self.chunks, self.chunks + 1
        return number

    # ---- notes

    def _note(self, kind: str, chunk: Chunk, number: int, parts: int = 1, body: dict[str, Any] | None = None) -> bytes:
        session = self._session
        return wire.encode(
            wire.Note(
                self.session_id, kind, wire.DECODE, session.attempt, self._sender.place.rank, chunk.layer, chunk.start,
                len(chunk.ids), number, parts, body or {},
            )
        )  # fmt: skip

    def _send(self, note: bytes) -> Op:
        return self._sender.inbox.send(self.contact, note, left(self._session.deadline))

    def say_hello(self) -> None:
        sender = self._sender
        contact = sender.inbox.contact
        body = {
            "layout": sender.layout_key,
            "place": [sender.place.rank, sender.place.size],
            "contact": contact,
            "wire": self.plan.wire,
            "plan": str(self.plan),
        }
        self.sent.append(Sent(self._send(self._note("hello", NOTHING, -1, body=body)), NOTHING))

    def say_alive(self) -> None:
        self._sender.inbox.post(self.contact, self._note("alive", NOTHING, -1))

    def say_done(self, meta: dict[str, Any]) -> Op:
        body = {"meta": meta, "pages": self._extent, "chunks": self.chunks}
        return self._send(self._note("done", NOTHING, -1, body=body))

    def not_pushed(self) -> list[tuple[int, list[int], list[int]]]:
        """What of the prompt has not been pushed: (group, layers, positions)."""
        self._pushed.finished(0, self.chunks, self._extent)
        out = []
        for group, feed in enumerate(self.feeds):
            if feed is not None and (missing := self._pushed.missing(group)):
                layers = [layer for layer, of in self._pushed.group_of.items() if of == group]
                out.append((group, [layer for layer in layers if layer not in self._pushed.complete], missing))
        return out

    def let_go(self) -> None:
        """Nothing is under way any more."""
        for number in list(self.unfetched):
            self.fetched(number)
        self.waiting.clear()
        self.sent.clear()
        self._remotes.clear()
        if self.peer is not None and self._session.error is not None:
            self._sender.inbox.drop(self.peer.id, self._descriptors)

    def free_staging(self) -> None:
        """Nobody can read it any more."""
        for number in list(self.unfetched):
            self.fetched(number)

    def failed_op(self) -> Error | None:
        """The error of the first op that has ended badly. Ops that have ended well are let go."""
        while self.sent and (state := self.sent[0].op.state) != "pending":
            if state != "done":
                try:
                    self.sent[0].op.wait(0)
                except Error as error:
                    return error
            self.carried(self.sent.popleft())
        return None

    def carried(self, sent: Sent) -> None:
        """An op is done."""
        if sent.op.nbytes:
            self.transport = sent.op.transport

    def unfinished_pages(self) -> list[int]:
        """Local pages of chunks that have not arrived."""
        chunks = [sent.chunk for sent in self.sent if sent.op.state != "done"]
        chunks += [chunk for chunk, _ in [*self.unfetched.values(), *self.waiting]]
        return sorted({int(page) for chunk in chunks for page in chunk.ids})
