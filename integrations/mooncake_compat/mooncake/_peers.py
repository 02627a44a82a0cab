"""Peers of an engine, by "host:port": their sessions, and the regions behind their addresses."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from mooncake import _directory
from torch_mooncake.errors import InvalidArgument, OutOfBounds
from torch_mooncake.integrations._dial import dial
from torch_mooncake.integrations._memory import Ranges

if TYPE_CHECKING:
    from torch_mooncake import Engine, Peer, RemoteRegion


def split_session(session: str) -> tuple[str, int]:
    """ "host:port" or "[v6]:port". InvalidArgument."""
    host, _, port = session.rpartition(":")
    if not host or not port.isdecimal():
        raise InvalidArgument(f'a session is "host:port", not {session!r}')
    return host.strip("[]"), int(port)


class Session:
    """One peer: what it has registered, opened as it is needed. Any thread."""

    def __init__(self, engine: Engine, name: str, token: str) -> None:
        self._engine, self.name, self._token = engine, name, token
        self._lock = threading.Lock()
        self._peer: Peer | None = None
        self._regions: Ranges[bytes] = Ranges()
        self._opened: dict[bytes, RemoteRegion] = {}

    def refresh(self) -> None:
        """Ask the peer for its regions, and connect if that is not done or is over."""
        answer = _directory.ask(*split_session(self.name), self._token)
        with self._lock:
            if self._peer is None or not self._peer.alive or self._peer.id.hex() != answer["id"]:
                self._peer = dial(self._engine, answer["addresses"], answer["id"], 5)
                self._opened.clear()
            rows = sorted(answer["regions"])
            regions = Ranges(
                tuple(at for at, _, _ in rows), tuple(at + size for at, size, _ in rows), tuple(row[2] for row in rows)
            )
            gone = set(self._opened) - set(regions.values)
            for descriptor in gone:
                del self._opened[descriptor]
            self._regions = regions

    def connected(self) -> None:
        """Ask and connect, unless that is done."""
        with self._lock:
            alive = self._peer is not None and self._peer.alive
        if not alive:
            self.refresh()

    def locate(
        self, addresses: NDArray[np.int64], sizes: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], list[RemoteRegion], list[int]]:
        """(index of each address's region, regions, where each of them begins). OutOfBounds: one is not registered."""
        self.connected()
        for last in (False, True):
            with self._lock:
                found = self._regions.indices(addresses, sizes)
                if (found >= 0).all():
                    return self._open(found)
            if not last:
                self.refresh()  # it may have registered more since
        first = int(np.argmax(found < 0))
        raise OutOfBounds(
            f"{int(sizes[first])} bytes at {int(addresses[first]):#x} lie in no registered memory", peer=self.name
        )

    def _open(self, found: NDArray[np.int64]) -> tuple[NDArray[np.int64], list[RemoteRegion], list[int]]:
        assert self._peer is not None
        used, which = np.unique(found, return_inverse=True)
        regions, starts = [], []
        for index in used.tolist():
            descriptor = self._regions.values[index]
            if descriptor not in self._opened:
                self._opened[descriptor] = self._peer.open(descriptor, timeout=5)
            regions.append(self._opened[descriptor])
            starts.append(self._regions.starts[index])
        return which, regions, starts

    def first_address(self) -> int:
        self.refresh()
        with self._lock:
            return self._regions.starts[0] if self._regions.starts else 0

    def forget(self) -> None:
        """The next use asks anew."""
        with self._lock:
            self._regions = Ranges()
            self._opened.clear()
            if self._peer is not None and not self._peer.alive:
                self._peer = None
