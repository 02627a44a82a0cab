"""What peers ask an engine: where it listens, and which memory it has registered.

Mooncake's callers name a peer by "host:port" and its memory by plain addresses. This is the port: a small TCP service
whose one answer is the engine's address and the descriptors of its regions. With a token (TM_TOKEN) both sides prove
that they have it, by an HMAC over two nonces; descriptors by themselves give nobody leave to touch anything, the
engine's own handshake does.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import os
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from torch_mooncake.errors import AuthError, Corrupt, PeerLost

_QUESTION_NBYTES = 512
_ANSWER_NBYTES = 64 << 20
_ASK_S = 5.0
_ANSWERING = 32  # at once
_SILENCE_S = 2.0


def _mac(token: str, *parts: bytes) -> str:
    return hmac.new(token.encode(), b"|".join(parts), hashlib.sha256).hexdigest()


class Directory:
    """Serves ``describe()`` (plain JSON values) on a port of its own, until ``close()``."""

    def __init__(self, host: str, token: str, describe: Callable[[], dict[str, Any]]) -> None:
        self._token, self._describe = token, describe
        self._listener = socket.create_server(
            (host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET, backlog=128
        )
        self.port: int = self._listener.getsockname()[1]
        self._room = threading.BoundedSemaphore(_ANSWERING)
        threading.Thread(target=self._accept, name="mooncake-directory", daemon=True).start()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                if self._listener.fileno() < 0:
                    return
                time.sleep(0.05)  # out of descriptors, say
                continue
            if not self._room.acquire(timeout=_SILENCE_S):
                connection.close()
                continue
            threading.Thread(target=self._answer, args=(connection,), name="mooncake-answer", daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        try:
            with connection, contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                connection.settimeout(_SILENCE_S)
                nonce = os.urandom(16).hex()
                connection.sendall(nonce.encode() + b"\n")
                question = json.loads(_line(connection, _QUESTION_NBYTES))
                theirs = str(question["nonce"])
                proof = _mac(self._token, b"ask", nonce.encode(), theirs.encode())
                if not hmac.compare_digest(proof, str(question["mac"])):
                    connection.sendall(b'{"refused": "token"}\n')
                    return
                body = json.dumps(self._describe()).encode()
                proof = _mac(self._token, b"answer", nonce.encode(), theirs.encode(), body)
                connection.settimeout(_ASK_S)
                connection.sendall(body + b"\n" + proof.encode() + b"\n")
        finally:
            self._room.release()


def ask(host: str, port: int, token: str) -> dict[str, Any]:
    """What the engine behind "host:port" says. PeerLost if nobody does within 5 s, AuthError, Corrupt."""
    try:
        with socket.create_connection((host, port), timeout=_ASK_S) as connection:
            connection.settimeout(_ASK_S)
            theirs, nonce = _line(connection, _QUESTION_NBYTES).strip(), os.urandom(16).hex().encode()
            proof = _mac(token, b"ask", theirs, nonce)
            connection.sendall(json.dumps({"nonce": nonce.decode(), "mac": proof}).encode() + b"\n")
            reply = _line(connection, _ANSWER_NBYTES, lines=2)
    except (OSError, ValueError) as error:
        raise PeerLost(f"nobody answers: {error}", peer=f"{host}:{port}") from None
    body, _, rest = reply.partition(b"\n")
    if not rest:
        raise AuthError("the peer has another token: set TM_TOKEN alike", peer=f"{host}:{port}")
    if not hmac.compare_digest(_mac(token, b"answer", theirs, nonce, body), rest.strip().decode(errors="replace")):
        raise AuthError("the peer does not prove that it has the token", peer=f"{host}:{port}")
    try:
        answer: dict[str, Any] = json.loads(body)
        answer["regions"] = [(int(at), int(size), bytes.fromhex(text)) for at, size, text in answer["regions"]]
        answer["addresses"] = [str(address) for address in answer["addresses"]]
        return answer
    except (ValueError, KeyError, TypeError) as error:
        raise Corrupt(f"the peer's answer makes no sense: {error}", peer=f"{host}:{port}") from None


def _line(connection: socket.socket, limit: int, lines: int = 1) -> bytes:
    """What comes up to the ``lines``-th newline or the end. ValueError beyond ``limit`` bytes, OSError in silence."""
    data = bytearray()
    while data.count(b"\n") < lines:
        chunk = connection.recv(1 << 16)
        if not chunk:
            break
        data += chunk
        if len(data) > limit:
            raise ValueError(f"more than {limit} bytes")
    if not data:
        raise ValueError("it closed without a word")
    return bytes(data)
