"""One prefill rank as a decode session sees it: what it says, and what we read from it."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

import numpy as np
import torch

from torch_mooncake.errors import Error, InvalidArgument, LayoutMismatch
from torch_mooncake.kv import wire
from torch_mooncake.kv.fetch import Fetch
from torch_mooncake.kv.inbox import SILENCE_S
from torch_mooncake.kv.layout import PagedKVLayout
from torch_mooncake.kv.plan import Feed
from torch_mooncake.kv.target import left

if TYPE_CHECKING:
    from torch_mooncake.kv.receive import DecodeSession, KVReceiver
    from torch_mooncake.transfer import Op, Peer, RemoteRegion


class Source:
    """Made when it has said hello (push), or when its ticket is taken (pull)."""

    def __init__(
        self,
        session: DecodeSession,
        session_id: bytes,
        attempt: bytes,
        contact: wire.Contact,
        layout: PagedKVLayout,
        layout_key: bytes,
        place: wire.Place,
        feeds: list[Feed | None],
    ) -> None:
        self.session_id, self.attempt, self.contact, self.place = session_id, attempt, contact, place
        self.heard = time.monotonic()  # when it last said something
        self.wire = ""  # as it says
        self.plan = ""
        self.peer: Peer | None = None  # pull
        self.remotes: list[RemoteRegion] = []  # pull: its storages
        self._session = session
        self._layout, self._layout_key, self._feeds = layout, layout_key, feeds
        self._lock = threading.Lock()
        self._staging: RemoteRegion | None = None
        self._early: list[tuple[wire.Note, Fetch]] = []  # packed chunks, before its staging memory has been opened

    @property
    def _receiver(self) -> KVReceiver:
        return self._session._receiver

    def fetch(self, note: wire.Note) -> None:
        """Reads a chunk that it says is ready (inbox thread)."""
        session = self._session
        group = session.group_of(note.layer)
        feed = self._feeds[group]
        if feed is None:
            raise LayoutMismatch(f"prefill rank {self.place.rank} has nothing of layer {note.layer} for this rank")
        reserved = session.group_pages[group]
        if note.start < 0 or note.count < 0 or note.start + note.count > len(reserved):
            raise InvalidArgument(f"{note.count} pages from {note.start} do not fit the {len(reserved)} reserved pages")
        self.wire = str(note.body.get("wire", "direct"))
        if note.kind == "ready":
            self._submit(note, self._read_pages(note, group, feed))
            return
        if self.wire == "packed_fp8" and session.wire != "packed_fp8":
            raise InvalidArgument("pages came as float8, and this side has not asked for it")
        fetch, descriptor = self._read_packed(note, group, feed), bytes(note.body["staging"])
        with self._lock:
            early = self._staging is None
            if early:
                self._early.append((note, fetch))
        if not early:
            self._submit(note, fetch)
        elif len(self._early) == 1:
            self._receiver.inbox.later(self.contact, lambda: self._open_staging(descriptor))

    def _open_staging(self, descriptor: bytes) -> None:
        """On the posting thread."""
        session = self._session
        try:
            peer = self._receiver.inbox.peer(self.contact, left(session.deadline))
            remote = peer.open(descriptor, timeout=left(session.deadline))
            with self._lock:
                self._staging = remote
                early, self._early = self._early, []
            for note, fetch in early:
                self._submit(note, fetch)
        except Error as error:
            session._end(error)
            raise

    def _submit(self, note: wire.Note, fetch: Fetch) -> None:
        if not self._session._fetch_begins():
            return
        try:
            self._receiver.fetcher.submit(fetch)
        except Error:
            self._session._fetch_ended()
            raise

    def _read_packed(self, note: wire.Note, group: int, feed: Feed) -> Fetch:
        session, receiver = self._session, self._receiver
        nbytes, at, how = int(note.body["nbytes"]), int(note.body["at"]), self.wire
        if nbytes != receiver.packer.nbytes(note.layer, note.count, feed.sink_heads, how):
            raise LayoutMismatch(f"{note.count} packed pages of layer {note.layer} are not {nbytes} bytes here")
        scratch = receiver.scratch
        place: list[int] = []

        def begin() -> list[Op] | None:
            if not place and (found := scratch.try_take(nbytes)) is None:
                return None
            elif not place:
                place.append(found)  # type: ignore[arg-type]
            here = scratch.region[place[0] : place[0] + nbytes]
            assert self._staging is not None
            return [receiver.engine.read(here, self._staging[at : at + nbytes], timeout=left(session.deadline))]

        def end(error: Error | None) -> None:
            try:
                if error is None:
                    ids = torch.tensor(session.group_pages[group][note.start : note.start + note.count])
                    data = scratch.memory[place[0] : place[0] + nbytes]
                    receiver.packer.unpack(note.layer, ids, feed.sink_heads, how, data)
            finally:
                if place:
                    scratch.give_back(place[0])
            if error is None:
                ack = wire.Note(
                    self.session_id, "ack", wire.PREFILL, self.attempt, receiver.place.rank, chunk=note.chunk,
                    body={"transport": fetch.ops[0].transport},
                )  # fmt: skip
                receiver.inbox.post(self.contact, wire.encode(ack))
            session._fetched(note, error)

        fetch = Fetch(begin, end, session._pending)
        return fetch

    def _read_pages(self, note: wire.Note, group: int, feed: Feed) -> Fetch:
        session, receiver = self._session, self._receiver
        theirs = np.frombuffer(note.body["pages"], np.int64)
        ours = np.asarray(session.group_pages[group][note.start : note.start + note.count])
        moves = receiver.others.runs(self._layout_key, group, feed).moves(note.layer, ours, theirs)

        def begin() -> list[Op]:
            return [
                receiver.engine.read(
                    receiver.regions[move.our_storage],
                    self.remotes[move.their_storage],
                    local_offsets=move.our_offset,
                    remote_offsets=move.their_offset,
                    nbytes=move.nbytes,
                    timeout=left(session.deadline),
                )
                for move in moves
            ]

        return Fetch(begin, lambda error: session._fetched(note, error), session._pending)

    def say(self, kind: str) -> None:
        note = wire.Note(self.session_id, kind, wire.PREFILL, self.attempt, self._receiver.place.rank)
        self._receiver.inbox.post(self.contact, wire.encode(note))

    def say_failed(self, error: BaseException) -> None:
        note = wire.failed(self.session_id, wire.PREFILL, error, attempt=self.attempt, rank=self._receiver.place.rank)
        self._receiver.inbox.post(self.contact, note)

    def lost(self) -> str:
        """Why it is to be taken for lost, or ""."""
        inbox = self._receiver.inbox
        peer = self.peer or inbox.known_peer(self.contact)
        if peer is not None:
            return "" if peer.alive else f"{peer.name} is gone"
        inbox.greet(self.contact)
        silence = time.monotonic() - self.heard
        return f"it cannot be dialled and has said nothing for {silence:.0f} s" if silence > SILENCE_S else ""
