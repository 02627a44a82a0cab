"""How engines find each other: by a name, in a ``torch.distributed`` Store or in etcd.

    engine.publish("etcd://etcd-0:2379,etcd-1:2379/prod", "prefill-3")       # or a Store instead of the URL
    peer = other.find("etcd://etcd-0:2379,etcd-1:2379/prod", "prefill-3")

A *record* says who an engine is (its incarnation: 16 random bytes) and where it listens. It is read once, then the
engines talk to each other only. In etcd it lives under a lease of ``LEASE_S`` seconds, so that it goes with its engine,
and readers hold a mirror of all records that a watch keeps up to date. A Store has neither: there a record is read
anew by each ``find()`` and stays until its engine withdraws it.

A record whose engine is gone, or where another incarnation answers, gives ``PeerLost``.
"""

from __future__ import annotations

import threading
import time
import urllib.parse
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Generic, TypeVar

import msgspec

from torch_mooncake.errors import DeadlineExceeded, Error, InvalidArgument, IoError, KeyNotFound, PeerLost, Unsupported

if TYPE_CHECKING:
    import torch.distributed as dist

    from torch_mooncake.transfer import Engine, Peer

LEASE_S = 5
_PREFIX = "torch_mooncake"
_LAST_ANSWER_S = 1.0  # what a Store gets for the question it was asked at the deadline
_T = TypeVar("_T")


class Record(msgspec.Struct, frozen=True):
    """What is published under a name."""

    engine: str  # the incarnation's id, in hexadecimal
    name: str  # the engine's own name, for people
    addresses: list[str]

    def encode(self) -> bytes:
        return msgspec.json.encode(self)

    @staticmethod
    def decode(data: bytes) -> Record:
        try:
            return msgspec.json.decode(data, type=Record)
        except msgspec.MsgspecError as error:
            raise InvalidArgument(f"not a record of an engine: {data[:100]!r} ({error})") from None


def record_of(engine: Engine) -> Record:
    """InvalidArgument if ``engine`` listens nowhere."""
    addresses = [a for a in engine.listening if not a.startswith("unix://@")]
    if not addresses:
        raise InvalidArgument("an engine that listens nowhere cannot be found: Engine(listen=…)")
    return Record(engine.id.hex(), engine.name, addresses)


class Publication(ABC):
    """A record that is kept up to date until ``close()``. Thread-safe; never raises after it was made: a directory
    that cannot be reached is tried again for as long as the publication is open."""

    @abstractmethod
    def refresh(self) -> None:
        """The engine's addresses have changed."""

    @abstractmethod
    def close(self) -> None:
        """Withdraw the record, unless another engine has taken the name. Idempotent."""


class Directory(ABC):
    """Where records are. Thread-safe."""

    @abstractmethod
    def publish(self, name: str, describe: Callable[[], Record]) -> Publication:
        """Put the record in place, instead of the one that is there. IoError if that fails."""

    @abstractmethod
    def lookup(self, name: str, deadline: float) -> Record:
        """The record of ``name``, waiting for it until ``deadline`` (``time.monotonic()``); then KeyNotFound, or
        IoError if the directory could not be asked."""

    @abstractmethod
    def close(self) -> None: ...


class Question(threading.Thread, Generic[_T]):
    """``ask()`` on a thread that nobody has to wait for: a Store knows no deadline but its own."""

    def __init__(self, ask: Callable[[], _T], name: str) -> None:
        super().__init__(name=name, daemon=True)
        self._ask = ask
        self._answer: list[_T] = []
        self._error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self._answer.append(self._ask())
        except BaseException as error:  # result() raises it
            self._error = error

    def result(self, seconds: float) -> _T:
        """What ``ask()`` returned or raised; IoError if it has not within ``seconds``: nobody hears it then."""
        self.join(max(0.0, min(seconds, 1e6)))
        if self._error is not None:
            raise self._error
        if not self._answer:
            raise IoError("the directory has not answered in time", retryable=True)
        return self._answer[0]


def open_directory(where: str | dist.Store) -> Directory:
    """``where``: "etcd://host:port[,host:port…][/prefix]", or a Store. Unsupported names an unknown scheme."""
    if not isinstance(where, str):
        return StoreDirectory(where)
    hosts, path = parse_etcd(where)
    from torch_mooncake.etcd import EtcdDirectory

    return EtcdDirectory(hosts, "/".join(part for part in (path, _PREFIX) if part))


def parse_etcd(where: str) -> tuple[list[tuple[str, int]], str]:
    """The hosts and the prefix of "etcd://host:port[,host:port…][/prefix]"."""
    url = urllib.parse.urlsplit(where)
    if url.scheme != "etcd":
        raise Unsupported(f"directory {where!r} is not known (etcd://host:port, or a torch.distributed Store)")
    hosts = []
    for place in url.netloc.split(","):
        try:
            host = urllib.parse.urlsplit(f"//{place}")
            hosts.append((host.hostname or "", host.port or 2379))
        except ValueError as error:
            raise InvalidArgument(f"directory {where!r}: {error}") from None
    if not all(host for host, _ in hosts):
        raise InvalidArgument(f"directory {where!r} names no host")
    return hosts, url.path.strip("/")


def find(engine: Engine, directory: Directory, name: str, timeout: float | None) -> Peer:
    """A peer of ``engine``: who is published as ``name``. See ``Engine.find``."""
    deadline = time.monotonic() + (timeout if timeout is not None else 1e9)
    record = directory.lookup(name, deadline)
    while True:
        try:
            return dial(engine, record, deadline)
        except (PeerLost, DeadlineExceeded) as error:
            latest = directory.lookup(name, deadline)
            if latest != record and time.monotonic() < deadline:
                record = latest
                continue
            raise PeerLost(
                f"the record of {name!r} is of an incarnation that is gone ({record.name}, {record.engine[:8]}… at "
                f"{', '.join(record.addresses)}): {error}",
                peer=record.name,
            ) from error


def dial(engine: Engine, record: Record, deadline: float) -> Peer:
    """The engine of ``record``, at whichever of its addresses answers before ``deadline`` (``time.monotonic()``)."""
    last: Error = PeerLost(f"{record.name} published no address")
    for i, address in enumerate(record.addresses):
        left = (deadline - time.monotonic()) / (len(record.addresses) - i)
        try:
            peer = engine.connect(address, max(left, 0.001))
        except (PeerLost, DeadlineExceeded) as error:
            last = error
            continue
        if peer.id.hex() == record.engine:
            return peer
        last = PeerLost(f"another engine ({peer.name}, {peer.id.hex()[:8]}…) answers at {address}")
    raise last


# --- torch.distributed Store ---


class StoreDirectory(Directory):
    """Records in a Store. A withdrawn record is an empty value: stores cannot delete conditionally."""

    def __init__(self, store: dist.Store) -> None:
        self._store = store

    def publish(self, name: str, describe: Callable[[], Record]) -> Publication:
        return _StorePublication(self._store, f"{_PREFIX}/{name}", describe)

    def lookup(self, name: str, deadline: float) -> Record:
        polling = Question(lambda: self._poll(name, deadline), "tm-store-lookup")
        return polling.result(max(0.0, deadline - time.monotonic()) + _LAST_ANSWER_S)

    def _poll(self, name: str, deadline: float) -> Record:
        key, pause = f"{_PREFIX}/{name}", 0.005
        while True:
            data = _asking_store(lambda: self._store.get(key) if self._store.check([key]) else b"")
            if data:
                return Record.decode(data)
            left = deadline - time.monotonic()
            if left <= 0:
                raise KeyNotFound(f"no engine is published as {name!r} in this Store")
            time.sleep(min(pause, left))
            pause = min(2 * pause, 0.1)

    def close(self) -> None:
        pass


class _StorePublication(Publication):
    def __init__(self, store: dist.Store, key: str, describe: Callable[[], Record]) -> None:
        self._store, self._key, self._describe = store, key, describe
        self._lock = threading.Lock()
        self._closed = False
        self._written = describe().encode()
        _asking_store(lambda: store.set(key, self._written.decode()))

    def refresh(self) -> None:
        with self._lock:
            if not self._closed:
                self._replace(self._describe().encode())

    def close(self) -> None:
        with self._lock:
            if not self._closed:
                self._closed = True
                self._replace(b"")

    def _replace(self, data: bytes) -> None:
        # Only while the value is ours: another incarnation may have taken the name.
        try:
            if _asking_store(lambda: self._store.compare_set(self._key, self._written.decode(), data.decode())) == data:
                self._written = data
        except IoError:
            pass  # the Store is gone, and the record with it


def _asking_store(ask: Callable[[], _T]) -> _T:
    try:
        return ask()
    except (RuntimeError, OSError) as error:  # DistStoreError and DistNetworkError among them
        raise IoError(f"the Store does not answer: {error}") from None
