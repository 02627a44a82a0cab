"""Notes between the sides of sessions: one inbox an engine, shared by the senders and receivers on it.

One thread sleeps on the engine's notifications, hands each note to its session and, while there are sessions, lets each
look at its deadline and its peers four times a second. A second one (made on first use) posts notes that may have to
dial first, so that a peer that does not answer holds up no other session's notes to us.
"""

from __future__ import annotations

import collections
import contextlib
import os
import queue
import select
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from torch_mooncake import _core
from torch_mooncake.errors import Closed, DeadlineExceeded, Error, InvalidArgument
from torch_mooncake.kv import wire

if TYPE_CHECKING:
    from torch_mooncake.transfer import Engine, Op, Peer, RemoteRegion

TICK_S = 0.25  # how often deadlines and peers are looked at when nothing arrives
_DIAL_S = 2.0  # a note that cannot be posted in that time is given up: deadlines are the guarantee, notes the speed


class Listener(Protocol):
    """What an inbox tells a session."""

    def hear(self, note: wire.Note) -> None: ...
    def check(self) -> None: ...
    def closed(self, error: Error) -> None: ...


class Inbox:
    """Of one engine, whose notifications it takes. Made by `Inbox.of`, given back by `release`. Any thread."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.strays = 0  # notes of sessions that have ended
        self.undelivered = 0  # notes that could not be posted
        self._users = 0
        self._listeners: dict[tuple[bytes, str], Listener] = {}  # by session and side
        self._lock = threading.Lock()
        self._peers: dict[str, Peer] = {}
        self._dialling: dict[str, threading.Lock] = {}
        self._refused: dict[str, float] = {}  # when an address did not answer
        self._mailboxes: dict[bytes, RemoteRegion] = {}
        self._mailbox = engine.register(bytearray(8), readable=False, writable=True, label="KV mailbox")
        self._posts: queue.SimpleQueue[tuple[wire.Contact, Callable[[], object]] | None] = queue.SimpleQueue()
        self._sent: collections.deque[Op] = collections.deque()
        self._poster: threading.Thread | None = None
        self._completions = _core.Completions()
        self._watching = False
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._poller = select.poll()
        for fd in (self._wake, self._completions.fileno()):
            self._poller.register(fd, select.POLLIN)
        self._closing = False
        self._thread = threading.Thread(target=self._listen, name="tm-kv-inbox", daemon=True)

    @classmethod
    def of(cls, engine: Engine) -> Inbox:
        """The engine's inbox, with one more user."""
        with _inboxes_lock:
            inbox = _inboxes.get(engine)
            if inbox is None:
                inbox = _inboxes[engine] = cls(engine)
                inbox._thread.start()
            inbox._users += 1
            return inbox

    def release(self) -> None:
        """One user fewer; the last one stops the threads. The engine stays its owner's."""
        with _inboxes_lock:
            self._users -= 1
            if self._users:
                return
            _inboxes.pop(self.engine, None)
        self._closing = True
        os.eventfd_write(self._wake, 1)
        self._posts.put(None)
        if self._poster is not None:
            self._poster.join()
        self._thread.join()
        os.close(self._wake)
        self._mailboxes.clear()
        for peer in self._peers.values():
            peer.close()
        try:
            self.engine.deregister(self._mailbox, timeout=0)
        except (Closed, Error):  # the engine is gone, or a peer still looks at eight bytes that hold nothing
            pass

    @property
    def contact(self) -> wire.Contact:
        return wire.Contact(list(self.engine.addresses), self._mailbox.descriptor())

    def enlist(self, session: bytes, side: str, listener: Listener) -> None:
        """`listener` hears notes to that side ("prefill" or "decode") of the session."""
        with self._lock:
            self._listeners[session, side] = listener
        os.eventfd_write(self._wake, 1)  # it sleeps for ticks now

    def dismiss(self, session: bytes, side: str) -> None:
        with self._lock:
            self._listeners.pop((session, side), None)

    # ---- out

    def peer(self, addresses: Sequence[str], timeout: float) -> Peer:
        """A connection, kept for the next who asks. PeerLost, AuthError … as `Engine.connect`."""
        if not addresses:
            raise InvalidArgument("that side names no address: its engine does not listen")
        address = addresses[0]
        with self._lock:
            peer = self._peers.get(address)
            if peer is not None and peer.alive:
                return peer
            dialling = self._dialling.setdefault(address, threading.Lock())
        with dialling:
            with self._lock:
                peer = self._peers.get(address)
            if peer is None or not peer.alive:
                fresh = self.engine.connect(address, timeout=timeout)
                with self._lock:
                    self._peers[address] = fresh
                    self._refused.pop(address, None)
                return fresh
            return peer

    def known_peer(self, addresses: Sequence[str]) -> Peer | None:
        """The connection to that side, if there is (or was) one."""
        with self._lock:
            return self._peers.get(addresses[0]) if addresses else None

    def mailbox(self, contact: wire.Contact, timeout: float) -> RemoteRegion:
        """Where notes for that side go."""
        peer = self.peer(contact.addresses, timeout)
        with self._lock:
            remote = self._mailboxes.get(contact.mailbox)
        if remote is None or not remote.peer.alive:
            remote = peer.open(contact.mailbox, timeout=timeout)
            with self._lock:
                self._mailboxes[contact.mailbox] = remote
        return remote

    def send(self, contact: wire.Contact, note: bytes, timeout: float) -> Op:
        """Posts a note from the caller's thread, dialling if need be. The op ends when the note has been delivered."""
        remote = self.mailbox(contact, timeout)
        return self.engine.write(self._mailbox[0:0], remote[0:0], timeout=timeout, notify=note)

    def post(self, contact: wire.Contact, note: bytes) -> None:
        """The same without waiting or failing: a note that cannot be delivered is counted."""
        self.later(contact, lambda: self._sent.append(self.send(contact, note, _DIAL_S)))

    def greet(self, contact: wire.Contact) -> None:
        """Connects to that side in the background, so that its death is seen."""
        if contact.addresses and self.known_peer(contact.addresses) is None:
            self.later(contact, lambda: self.peer(contact.addresses, _DIAL_S))

    def later(self, contact: wire.Contact, job: Callable[[], object]) -> None:
        """Runs what may have to wait for that side, on the posting thread. An Error of the job is counted; a side that
        has not answered is not asked again for a moment."""
        with self._lock:
            if self._poster is None:
                self._poster = threading.Thread(target=self._post, name="tm-kv-post", daemon=True)
                self._poster.start()
        self._posts.put((contact, job))

    def _post(self) -> None:
        while (item := self._posts.get()) is not None:
            contact, job = item
            address = contact.addresses[0] if contact.addresses else ""
            while self._sent and self._sent[0].done():
                self._sent.popleft()
            if time.monotonic() - self._refused.get(address, -_DIAL_S) < _DIAL_S:
                self.undelivered += 1
                continue
            try:
                job()
            except Closed:
                return
            except Error:
                self.undelivered += 1
                with self._lock:
                    self._refused[address] = time.monotonic()

    # ---- in

    def _listen(self) -> None:
        checked = 0.0
        while not self._closing:
            try:
                note = wire.decode_note(self.engine.next_notification(timeout=0).data)
                if note is not None:
                    self._deliver(note)
            except DeadlineExceeded:  # none is there
                self._sleep()
            except Closed:
                for listener in self._snapshot():
                    listener.closed(Closed("the engine was closed"))
                return
            now = time.monotonic()
            if now - checked >= TICK_S:
                checked = now
                for listener in self._snapshot():
                    listener.check()

    def _sleep(self) -> None:
        """Until a note comes or, while there are sessions, for a tick."""
        if not self._watching and not self.engine._core.watch_notifications(self._completions, 1):
            return
        self._watching = True
        self._poller.poll(TICK_S * 1000 if self._listeners else None)
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake)
        if self._completions.take():
            self._watching = False

    def _deliver(self, note: wire.Note) -> None:
        with self._lock:
            target = self._listeners.get((note.session, note.to))
        if target is None:
            self.strays += 1
        else:
            target.hear(note)

    def _snapshot(self) -> list[Listener]:
        with self._lock:
            return list(dict.fromkeys(self._listeners.values()))  # a session may be enlisted more than once


_inboxes: weakref.WeakKeyDictionary[Engine, Inbox] = weakref.WeakKeyDictionary()
_inboxes_lock = threading.Lock()
