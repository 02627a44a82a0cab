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
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from torch_mooncake import _core
from torch_mooncake.errors import Closed, DeadlineExceeded, Error, InternalError, InvalidArgument, PeerLost
from torch_mooncake.kv import wire

if TYPE_CHECKING:
    from torch_mooncake.transfer import Engine, Op, Peer, RemoteRegion

ALIVE_S = 1.0  # how often prefill says that it lives
SILENCE_S = 5.0  # how long a side that cannot be dialled may say nothing
TICK_S = 0.25  # how often deadlines and peers are looked at when nothing arrives
_REMEMBERED = 256  # ends of sessions, and engines
_KEPT = 8192  # regions of one engine
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
        self._listeners: dict[tuple[bytes, bytes], Listener] = {}  # by session, and attempt for prefill sides
        self._over: dict[tuple[bytes, bytes], Error] = {}  # how the latest failed ones ended
        self._lock = threading.Lock()
        self._peers: dict[bytes, Peer] = {}  # by engine
        self._dialling: dict[bytes, threading.Lock] = {}
        self._refused: dict[bytes, float] = {}  # when an engine did not answer
        self._mailboxes: dict[bytes, RemoteRegion] = {}
        self._kept: dict[bytes, dict[bytes, RemoteRegion]] = {}  # by engine, then by descriptor
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
        self._kept.clear()
        for peer in self._peers.values():
            peer.close()
        try:
            self.engine.deregister(self._mailbox, timeout=0)
        except Error:  # the engine is gone, or a peer still has eight bytes in reach that hold nothing
            pass

    @property
    def contact(self) -> wire.Contact:
        return wire.Contact(self.engine.id, list(self.engine.addresses), self._mailbox.descriptor())

    def enlist(self, session: bytes, attempt: bytes, listener: Listener) -> None:
        """`listener` hears notes to the decode side of the session (`attempt` b""), or to that attempt of prefill."""
        with self._lock:
            self._listeners[session, attempt] = listener
        os.eventfd_write(self._wake, 1)  # it sleeps for ticks now

    def dismiss(self, session: bytes, attempt: bytes, why: Error | None = None) -> None:
        """It hears no more. A side that says hello too late is told `why`."""
        with self._lock:
            if self._listeners.pop((session, attempt), None) is not None and why is not None:
                self._over[session, attempt] = why
                while len(self._over) > _REMEMBERED:
                    self._over.pop(next(iter(self._over)))

    # ---- out

    def peer(self, contact: wire.Contact, timeout: float) -> Peer:
        """A connection, kept for the next who asks. PeerLost, AuthError … as `Engine.connect`; PeerLost, too, if
        another engine answers at its address (of a host that calls itself 127.0.0.1, for example)."""
        if not contact.addresses:
            raise InvalidArgument("that side names no address: its engine does not listen")
        with self._lock:
            dialling = self._dialling.setdefault(contact.engine, threading.Lock())
        with dialling:
            peer = self.known_peer(contact)
            if peer is not None and peer.alive:
                return peer
            fresh = self.engine.connect(contact.addresses[0], timeout=timeout)
            if fresh.id != contact.engine:
                fresh.close()
                raise PeerLost(f"another engine answers at {contact.addresses[0]}: {fresh.name}")
            with self._lock:
                if len(self._peers) > _REMEMBERED:
                    self._forget_the_dead()
                self._peers[contact.engine] = fresh
                self._refused.pop(contact.engine, None)
            return fresh

    def _forget_the_dead(self) -> None:
        """With the lock: of engines that are gone nothing is kept."""
        for engine in [engine for engine, peer in self._peers.items() if not peer.alive]:
            for of in (self._peers, self._dialling, self._refused, self._kept):
                of.pop(engine, None)
        self._mailboxes = {name: remote for name, remote in self._mailboxes.items() if remote.peer.alive}

    def known_peer(self, contact: wire.Contact) -> Peer | None:
        """The connection to that side, if there is (or was) one."""
        with self._lock:
            return self._peers.get(contact.engine)

    def mailbox(self, contact: wire.Contact, timeout: float) -> RemoteRegion:
        """Where notes for that side go."""
        peer = self.peer(contact, timeout)
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

    def keep(self, peer: Peer, descriptor: bytes, timeout: float) -> RemoteRegion:
        """A peer's region, opened on first use and kept for the sessions to come, and with it its map."""
        with self._lock:
            kept = self._kept.setdefault(peer.id, {})
            remote = kept.pop(descriptor, None)
            if remote is not None and remote.peer.alive:
                kept[descriptor] = remote  # used last
                return remote
        remote = peer.open(descriptor, timeout=timeout)
        with self._lock:
            kept[descriptor] = remote
            while len(kept) > _KEPT:  # withdrawn by a session of somebody else, most likely
                del kept[next(iter(kept))]
        return remote

    def drop(self, engine: bytes, descriptors: list[bytes]) -> None:
        """Regions that the other side has withdrawn."""
        with self._lock:
            for descriptor in descriptors:
                self._kept.get(engine, {}).pop(descriptor, None)

    def greet(self, contact: wire.Contact) -> None:
        """Connects to that side in the background, so that its death is seen."""
        if contact.addresses and self.known_peer(contact) is None:
            self.later(contact, lambda: self.peer(contact, _DIAL_S))

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
            while self._sent and self._sent[0].done():
                self._sent.popleft()
            if time.monotonic() - self._refused.get(contact.engine, -_DIAL_S) < _DIAL_S:
                self.undelivered += 1
                continue
            try:
                job()
            except Closed:
                return
            except Error:
                self.undelivered += 1
                with self._lock:
                    self._refused[contact.engine] = time.monotonic()

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
            target = self._listeners.get((note.session, note.attempt if note.to == wire.PREFILL else b""))
            why = self._over.get((note.session, note.attempt if note.to == wire.PREFILL else b""))
        if target is not None:
            try:
                target.hear(note)
            except Exception as error:  # a bug; the thread goes on for the other sessions
                target.closed(InternalError(f"note {note.kind!r}: {type(error).__name__}: {error}"))
            return
        self.strays += 1
        if note.kind == "hello" and why is not None:
            to = wire.DECODE if note.to == wire.PREFILL else wire.PREFILL
            with contextlib.suppress(InvalidArgument):  # nobody who could be told
                self.post(wire.contact_of(note.body), wire.failed(note.session, to, why, attempt=note.attempt))

    def _snapshot(self) -> list[Listener]:
        with self._lock:
            return list(dict.fromkeys(self._listeners.values()))  # a session may be enlisted more than once


_inboxes: weakref.WeakKeyDictionary[Engine, Inbox] = weakref.WeakKeyDictionary()
_inboxes_lock = threading.Lock()
