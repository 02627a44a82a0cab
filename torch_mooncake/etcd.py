"""Records of engines in etcd, over its HTTP gateway (etcd3gw). See ``discovery``."""

from __future__ import annotations

import base64
import json
import socket
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

from torch_mooncake.discovery import LEASE_S, Directory, Publication, Record
from torch_mooncake.errors import Error, InvalidArgument, IoError, KeyNotFound, Unsupported

_REFRESH_S = 1.5
_REQUEST_S = 2.0  # one request to etcd
_RESYNC_S = 15.0  # a watch that has said nothing for so long is made anew
_MAX_PAUSE_S = 0.5  # between two tries
_NOT_AN_ANSWER = (ValueError, KeyError, TypeError, AttributeError)  # JSON of another shape: an error's, a proxy's
_T = TypeVar("_T")


class _Etcd:
    """The keys below one prefix. One thread at a time; goes to the next host when one does not answer."""

    def __init__(self, hosts: list[tuple[str, int]], prefix: str) -> None:
        try:
            import etcd3gw
        except ImportError:
            raise Unsupported("etcd:// needs the package etcd3gw: pip install 'torch_mooncake[etcd]'") from None
        self.prefix = f"/{prefix}/"
        self._clients = [
            etcd3gw.client(host=host, port=port, timeout=_REQUEST_S, api_path="/v3/") for host, port in hosts
        ]
        self._failures = (etcd3gw.exceptions.Etcd3Exception, OSError, *_NOT_AN_ANSWER)

    def ask(self, request: Callable[[Any], _T]) -> _T:
        """What ``request(client)`` makes of an answer. IoError if no host gives one that it understands."""
        for _ in self._clients:
            try:
                return request(self._clients[0])
            except self._failures as error:
                failure, host = error, self._clients[0].base_url
                self._clients.append(self._clients.pop(0))
        raise IoError(f"etcd at {host} does not answer: {failure}", retryable=True)

    def key(self, name: str) -> str:
        return self.prefix + name

    def read_all(self) -> tuple[dict[str, bytes], int]:
        """All values by name, and the revision they are of."""
        end = self.prefix[:-1] + chr(ord(self.prefix[-1]) + 1)
        asked = {"key": _b64(self.prefix), "range_end": _b64(end)}

        def read(client: Any) -> tuple[dict[str, bytes], int]:
            answer = client.post(client.get_url("/kv/range"), json=asked)
            values = {self._name(kv): base64.b64decode(kv.get("value", "")) for kv in answer.get("kvs", [])}
            return values, int(answer["header"]["revision"])

        return self.ask(read)

    def watch(self, after: int) -> Any:
        """An open HTTP response that streams the changes after that revision, a JSON document a line."""
        end = self.prefix[:-1] + chr(ord(self.prefix[-1]) + 1)
        create: dict[str, Any] = {"key": _b64(self.prefix), "range_end": _b64(end), "start_revision": after + 1}
        asked = {"create_request": create}

        def open_stream(client: Any) -> Any:
            url, timeout = client.get_url("/watch"), (_REQUEST_S, _RESYNC_S)
            stream = client.session.post(url, json=asked, stream=True, timeout=timeout)
            if stream.status_code != 200:
                stream.close()
                raise OSError(f"status {stream.status_code} for a watch")
            return stream

        return self.ask(open_stream)

    def events(self, line: bytes) -> list[tuple[str, bytes | None]] | None:
        """(name, value or None) of each change in a line of the stream; None if the watch is over."""
        result = json.loads(line).get("result", {})
        if result.get("canceled") or not result:
            return None
        changes: list[tuple[str, bytes | None]] = []
        for event in result.get("events", []):
            kv = event["kv"]
            gone = event.get("type") == "DELETE"
            changes.append((self._name(kv), None if gone else base64.b64decode(kv.get("value", ""))))
        return changes

    def _name(self, kv: dict[str, str]) -> str:
        return base64.b64decode(kv["key"]).decode(errors="replace")[len(self.prefix) :]


def _b64(text: str | bytes) -> str:
    return base64.b64encode(text.encode() if isinstance(text, str) else text).decode()


class EtcdDirectory(Directory):
    """Records in etcd. The first ``lookup`` starts a thread that mirrors them; ``close()`` ends it."""

    def __init__(self, hosts: list[tuple[str, int]], prefix: str) -> None:
        self._hosts, self._prefix = hosts, prefix
        self._changed = threading.Condition()
        self._records: dict[str, bytes] = {}
        self._failure: Error | None = None
        self._synced = False
        self._closed = False
        self._stream: Any = None
        self._thread: threading.Thread | None = None

    def publish(self, name: str, describe: Callable[[], Record]) -> Publication:
        return _EtcdPublication(_Etcd(self._hosts, self._prefix), name, describe)

    def lookup(self, name: str, deadline: float) -> Record:
        with self._changed:
            if self._thread is None:
                etcd = _Etcd(self._hosts, self._prefix)
                self._thread = threading.Thread(target=self._mirror, args=(etcd,), name="tm-etcd-watch", daemon=True)
                self._thread.start()
            while True:
                if name in self._records:  # perhaps an old one: whoever dials finds out
                    return Record.decode(self._records[name])
                left = deadline - time.monotonic()
                if left <= 0 or self._closed:
                    break
                self._changed.wait(min(left, 3600))
            if not self._synced:
                raise self._failure or IoError("etcd has not answered in time", retryable=True)
            raise KeyNotFound(f"no engine is published as {name!r} in etcd")

    def close(self) -> None:
        with self._changed:
            self._closed = True
            stream, thread = self._stream, self._thread
            self._changed.notify_all()
        if stream is not None:
            _shut_down(stream)
        if thread is not None:
            thread.join(timeout=_REQUEST_S + 1)

    def _mirror(self, etcd: _Etcd) -> None:
        pause = 0.05
        while not self._closed:
            try:
                records, revision = etcd.read_all()
                stream = etcd.watch(revision)
                with self._changed:
                    self._records, self._synced, self._stream = records, True, stream
                    self._changed.notify_all()
                start = time.monotonic()
                self._follow(etcd, stream)
                if time.monotonic() - start > 1:  # it was a watch, not a server that hangs up at once
                    pause = 0.05
            except Error as error:
                with self._changed:
                    self._failure, self._synced = error, False
                    self._changed.notify_all()
            with self._changed:
                self._changed.wait_for(lambda: self._closed, pause)
            pause = min(2 * pause, _MAX_PAUSE_S)

    def _follow(self, etcd: _Etcd, stream: Any) -> None:
        """Until the stream breaks or is silent for too long; then all is read again."""
        try:
            with stream:
                for line in stream.iter_lines(chunk_size=1):
                    if not line:
                        continue
                    changes = etcd.events(line)
                    if changes is None or self._closed:
                        return
                    with self._changed:
                        for name, value in changes:
                            if value is None:
                                self._records.pop(name, None)
                            else:
                                self._records[name] = value
                        self._changed.notify_all()
        except (OSError, *_NOT_AN_ANSWER):  # requests' errors are OSErrors
            pass


def _shut_down(stream: Any) -> None:
    """Ends a read that another thread is blocked in."""
    try:
        stream.raw.connection.sock.shutdown(socket.SHUT_RDWR)
    except (AttributeError, OSError):
        pass  # it is over already


class _EtcdPublication(Publication):
    """Keeps the lease alive on a thread of its own; puts the record again after a lease was lost."""

    def __init__(self, etcd: _Etcd, name: str, describe: Callable[[], Record]) -> None:
        self._etcd, self._key, self._describe = etcd, etcd.key(name), describe
        self._wake = threading.Event()
        self._closed = False
        self._lease: Any = None
        self._written = b""
        self._put(only_if=None)
        self._thread = threading.Thread(target=self._keep, name="tm-etcd-lease", daemon=True)
        self._thread.start()

    def refresh(self) -> None:
        self._wake.set()

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._wake.set()
        self._thread.join(timeout=2 * _REQUEST_S)
        if self._lease is not None and not self._thread.is_alive():
            try:
                self._etcd.ask(lambda client: self._revoke(client))
            except IoError:
                pass  # the lease ends by itself

    def _keep_alive(self) -> bool:
        asked = {"ID": self._lease.id}

        def seconds_left(client: Any) -> int:
            return int(client.post(client.get_url("/lease/keepalive"), json=asked)["result"].get("TTL", 0))

        return self._etcd.ask(seconds_left) > 0

    def _revoke(self, client: Any) -> None:
        client.post(client.get_url("/lease/revoke"), json={"ID": self._lease.id})

    def _put(self, only_if: dict[str, Any] | None) -> None:
        """Write the record under a fresh lease; KeyNotFound if ``only_if`` does not hold: another has the name."""
        data = self._describe().encode()
        lease = self._etcd.ask(lambda client: client.lease(LEASE_S))
        key = _b64(self._key)
        put = {"request_put": {"key": key, "value": _b64(data), "lease": lease.id}}
        txn = {"compare": [{"key": key, "result": "EQUAL", **only_if}] if only_if else [], "success": [put]}
        if not self._etcd.ask(lambda client: client.transaction(txn).get("succeeded", False)):
            raise KeyNotFound(f"{self._key} belongs to another engine now")
        self._lease, self._written = lease, data

    def _keep(self) -> None:
        while True:
            self._wake.wait(_REFRESH_S)
            self._wake.clear()
            if self._closed:
                return
            try:
                if not self._keep_alive():  # it ran out, and the key went with it
                    self._put({"target": "CREATE", "create_revision": 0})
                elif self._describe().encode() != self._written:
                    self._put({"target": "VALUE", "value": _b64(self._written)})
            except IoError:
                continue  # tried again for as long as we are open
            except (KeyNotFound, InvalidArgument):
                self._lease = None  # the name is somebody else's now
                return
