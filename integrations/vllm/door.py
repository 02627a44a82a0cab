"""Where prefill engines are asked for a prompt's pages: a listening socket, and calls to it that stay open.

A call is one message, and then a line that lives as long as the request does: whoever is at its other end hears when
this side has gone. Messages are msgpack, each with its length before it and, where the processes have a token
(``TM_TOKEN``), an HMAC-SHA256 of it behind. They carry no pages, and nothing that is secret.
"""

from __future__ import annotations

import contextlib
import hmac
import select
import selectors
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec

import torch_mooncake as tm
from torch_mooncake.integrations.vllm.settings import logger

_MOST_NBYTES = 64 << 20
_HEAD, _MAC = 4, 32
_SEND_S = 2.0


def split_address(address: str) -> tuple[str, int]:
    """ "host:port", "[::1]:port" or "tcp://host:port"; InvalidArgument for anything else."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise tm.InvalidArgument(f"not an address of a prefill engine: {address!r} (host:port)")
    return host.strip("[]"), int(port)


class Line:
    """One end of a call. ``send`` from any thread, the rest from one. A door's ends are closed by the door."""

    def __init__(self, sock: socket.socket, token: str) -> None:
        self._socket, self._token = sock, token.encode()
        self._buffer = bytearray()
        self._sending = threading.Lock()
        self.ended = False  # nothing more will be heard
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, message: dict[str, Any]) -> None:
        """PeerLost if it cannot be sent within two seconds."""
        body = msgspec.msgpack.encode(message)
        frame = len(body).to_bytes(_HEAD, "little") + body + self._mac(body)
        left, until = memoryview(frame), time.monotonic() + _SEND_S
        with self._sending:
            while left:
                try:
                    left = left[self._socket.send(left) :]
                except BlockingIOError:
                    poller = select.poll()
                    poller.register(self._socket, select.POLLOUT)
                    if not poller.poll(max(0.0, 1000 * (until - time.monotonic()))):
                        raise tm.PeerLost("the other end of a call does not listen") from None
                except OSError as error:
                    raise tm.PeerLost(f"the other end of a call has gone: {error}") from error

    def heard(self) -> list[dict[str, Any]]:
        """Messages that have come; does not wait. AuthError and InvalidArgument for what is none of ours."""
        while not self.ended:
            try:
                data = self._socket.recv(1 << 20)
            except (BlockingIOError, TimeoutError):
                break
            except OSError:
                data = b""
            if not data:
                self.ended = True
            self._buffer += data
        messages = []
        while (message := self._next()) is not None:
            messages.append(message)
        return messages

    def _next(self) -> dict[str, Any] | None:
        if len(self._buffer) < _HEAD:
            return None
        nbytes = int.from_bytes(self._buffer[:_HEAD], "little")
        if nbytes > _MOST_NBYTES:
            raise tm.InvalidArgument(f"not a message: {nbytes} bytes")
        mac = _MAC if self._token else 0
        if len(self._buffer) < _HEAD + nbytes + mac:
            return None
        body = bytes(self._buffer[_HEAD : _HEAD + nbytes])
        given = bytes(self._buffer[_HEAD + nbytes : _HEAD + nbytes + mac])
        del self._buffer[: _HEAD + nbytes + mac]
        if not hmac.compare_digest(given, self._mac(body)):
            raise tm.AuthError("a message was made with another token")
        try:
            return msgspec.msgpack.decode(body, type=dict)
        except msgspec.MsgspecError as error:
            raise tm.InvalidArgument(f"not a message: {error}") from error

    def _mac(self, body: bytes) -> bytes:
        return hmac.digest(self._token, body, "sha256") if self._token else b""

    def close(self) -> None:
        self.ended = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


def call(address: str, token: str, message: dict[str, Any], timeout: float) -> Line:
    """Calls a door. PeerLost if nobody answers there."""
    try:
        sock = socket.create_connection(split_address(address), timeout=timeout)
    except OSError as error:
        raise tm.PeerLost(f"no prefill engine answers at {address}: {error}") from error
    line = Line(sock, token)
    try:
        line.send(message)
    except BaseException:
        line.close()
        raise
    return line


class Door:
    """Listens at ``host:port`` (0: any). ``hear(line, message)`` and ``gone(line)`` are called on its thread; they must
    not wait. A host beyond loopback needs a token: InvalidArgument."""

    def __init__(
        self,
        host: str,
        port: int,
        token: str,
        hear: Callable[[Line, dict[str, Any]], None],
        gone: Callable[[Line], None],
    ) -> None:
        if not token and host not in ("127.0.0.1", "::1", "localhost"):
            raise tm.InvalidArgument(f"a prefill engine that listens at {host} needs a token (TM_TOKEN)")
        self._token, self._hear, self._gone = token, hear, gone
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, port), family=family, backlog=128)
        self._listener.setblocking(False)
        bound = self._listener.getsockname()
        self.address = f"[{host}]:{bound[1]}" if ":" in host else f"{host}:{bound[1]}"
        self._wake, self._waker = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._wake, selectors.EVENT_READ)
        self._lines: set[Line] = set()
        self._thread = threading.Thread(target=self._run, name="tm-vllm-door", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is self._wake:
                    return
                if key.fileobj is self._listener:
                    self._accept()
                else:
                    self._listen(key.data)

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError as error:
            logger.warning("a call could not be taken: %s", error)
            return
        line = Line(sock, self._token)
        self._lines.add(line)
        self._selector.register(sock, selectors.EVENT_READ, line)

    def _listen(self, line: Line) -> None:
        try:
            for message in line.heard():
                self._hear(line, message)
        except tm.Error as error:
            logger.warning("a call was refused: %s: %s", type(error).__name__, error)
            line.ended = True
        except Exception as error:  # of one call; the door stays open for the others
            logger.warning("a call made an error", exc_info=error)
            line.ended = True
        if line.ended:
            self._lines.discard(line)
            with contextlib.suppress(KeyError, ValueError):
                self._selector.unregister(line._socket)
            line.close()
            self._gone(line)

    def close(self) -> None:
        """Ends all calls."""
        self._waker.send(b"x")
        self._thread.join()
        self._selector.close()
        for line in self._lines:
            line.close()
        for end in (self._listener, self._wake, self._waker):
            end.close()
