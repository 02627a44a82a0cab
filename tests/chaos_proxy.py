"""A TCP proxy that does to connections what networks do: stalls, resets, half-closes, flips bits, loses one side."""

from __future__ import annotations

import select
import socket
import struct
import threading
from collections.abc import Callable

UP, DOWN = "up", "down"  # from the one who dialled, and back
Hook = Callable[[bytes], bytes]


class Link:
    """One proxied connection. What it does may be changed from any thread."""

    def __init__(self, client: socket.socket, server: socket.socket) -> None:
        self.ends = {UP: (client, server), DOWN: (server, client)}
        self.flowing = {UP: threading.Event(), DOWN: threading.Event()}
        self.hooks: dict[str, Hook] = {}
        self.taken = {UP: 0, DOWN: 0}  # bytes so far
        self.passed = {UP: 0, DOWN: 0}
        self.over = threading.Event()
        self.deaf: set[str] = set()  # directions whose receiver is gone
        self.threads = [threading.Thread(target=self._pump, args=(d,), daemon=True) for d in (UP, DOWN)]
        self.thaw()
        for thread in self.threads:
            thread.start()

    def freeze(self, *directions: str) -> None:
        """Nothing passes any more; what was taken is held. Both sides stay connected."""
        for direction in directions or (UP, DOWN):
            self.flowing[direction].clear()

    def thaw(self) -> None:
        for event in self.flowing.values():
            event.set()

    def reset(self) -> None:
        """RST to both sides."""
        self.over.set()
        for s, _ in self.ends.values():
            _reset(s)

    def reset_client(self) -> None:
        """RST to the one who dialled, while the other side's connection stays, and what is held for it, too."""
        self.deaf.add(DOWN)
        _reset(self.ends[UP][0])

    def half_close(self, direction: str) -> None:
        """The receiver of ``direction`` reads end of file, and may still send."""
        self.deaf.add(direction)
        self.ends[direction][1].shutdown(socket.SHUT_WR)

    def _pump(self, direction: str) -> None:
        source, sink = self.ends[direction]
        while not self.over.is_set():
            try:
                if not select.select([source], [], [], 0.02)[0]:
                    continue
                data = source.recv(1 << 18)
            except (OSError, ValueError):  # closed on this side: what is held was passed on already
                return
            self.taken[direction] += len(data)
            while not self.flowing[direction].wait(0.02):
                if self.over.is_set():
                    return
            self.passed[direction] += len(data)
            if direction in self.hooks:
                data = self.hooks[direction](data)
            try:
                if not data:
                    sink.shutdown(socket.SHUT_WR)
                    return
                if direction not in self.deaf:
                    self._send(sink, data)
            except (OSError, ValueError):
                if not self.deaf:
                    _reset(source)
                return

    def _send(self, sink: socket.socket, data: bytes) -> None:
        view = memoryview(data)
        while view and not self.over.is_set():
            if select.select([], [sink], [], 0.02)[1]:
                view = view[sink.send(view, socket.MSG_DONTWAIT) :]

    def close(self) -> None:
        self.over.set()
        for thread in self.threads:
            thread.join(5)
        for s, _ in self.ends.values():
            s.close()


class Proxy:
    """Listens on loopback and passes every connection on to ``target`` ("tcp://127.0.0.1:port")."""

    def __init__(self, target: str) -> None:
        host, _, port = target.removeprefix("tcp://").rpartition(":")
        self.target = (host, int(port))
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self.listener.getsockname()[1]}"
        self.links: list[Link] = []
        self.open = True
        self.refusing = False
        self.accepting = threading.Lock()
        self.thread = threading.Thread(target=self._accept, daemon=True)
        self.thread.start()

    def _accept(self) -> None:
        while self.open:
            if not select.select([self.listener], [], [], 0.02)[0]:
                continue
            with self.accepting:
                client, _ = self.listener.accept()
                if self.refusing:
                    _reset(client)
                    continue
                try:
                    server = socket.create_connection(self.target)
                except OSError:  # the target is gone
                    _reset(client)
                    continue
                for s in (client, server):
                    s.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self.links.append(Link(client, server))

    def refuse(self, yes: bool = True) -> None:
        """Whoever dials is refused. From here on ``links`` is all there is: a lane that was being opened is in it."""
        with self.accepting:
            self.refusing = yes

    def close(self) -> None:
        self.open = False
        self.thread.join(5)
        self.listener.close()
        for link in self.links:
            link.close()


def _reset(s: socket.socket) -> None:
    try:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        s.close()
    except OSError:
        pass
