"""What becomes of keys: ``pool.subscribe(prefix)``.

    with pool.subscribe("kv/") as subscription:
        for event in subscription:              # first all keys that are there, then what changes
            ...

The home numbers every change and keeps the last 65 536 while somebody listens. A subscriber asks for what comes after
the last one it has, so it can be slow, and lose its connection, without missing anything; one that is too far behind,
or comes to another home, gets ``cleared`` and then all keys anew: never silence.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar

from torch_mooncake.clock import deadline_ns, seconds_left
from torch_mooncake.errors import Closed, DeadlineExceeded, Error

if TYPE_CHECKING:
    from torch_mooncake.pool import Pool

T = TypeVar("T")
Kind = Literal["stored", "moved", "removed", "cleared"]
Tier = Literal["cpu", "disk"]  # memory, or an SSD only
_POLL_S = 30.0
_ANSWER_S = 2.0  # the pool has so long to answer, however short the timeout
_RETRY_S = 0.5


class Event(NamedTuple):
    """``seq`` counts the events of one subscription from 0, without a gap.

    ``stored``: the key is there, with this version (None in the first look, which does not ask). ``moved``: it went to
    an SSD, or came back. ``removed``: it was deleted or taken, expired, was evicted or lost with its node. ``cleared``:
    forget all keys; those that are there follow as ``stored``.
    """

    seq: int
    kind: Kind
    key: str
    version: tuple[int, int] | None
    tier: Tier  # where it is now; of what was removed: where it was last


class Subscription:
    """An iterator over events; ``get`` waits for a limited time. One thread at a time; ``close`` from any."""

    def __init__(self, pool: Pool, prefix: str = "") -> None:
        self._pool, self.prefix = pool, prefix
        self._stream = self._after = 0
        self._there: dict[bytes, tuple[str, Tier]] = {}  # the keys, by hash
        self._seq = 0
        self._started = False
        self._closed = threading.Event()

    @property
    def keys(self) -> set[str]:
        """Those that are there after the events told so far."""
        return {key for key, _ in self._there.values()}

    def get(self, timeout: float | None = 30) -> list[Event]:
        """The next events, at least one; DeadlineExceeded if none comes within ``timeout`` seconds. 0: those that are
        there, None: however long it takes; the pool's answer may take two seconds in any case. Errors of the pool are
        raised, and nothing is lost by them: call again. InvalidArgument for NaN, Closed after ``close``."""
        deadline = deadline_ns(timeout)
        answer_by = max(deadline, deadline_ns(_ANSWER_S))
        while not self._closed.is_set():
            try:
                events = self._ask(deadline, answer_by)
            except DeadlineExceeded:
                if time.monotonic_ns() >= deadline:
                    raise
                continue
            if events:
                return events
            if time.monotonic_ns() >= deadline:
                raise DeadlineExceeded(f"no key under {self.prefix!r} changed")
        raise Closed("the subscription is closed")

    def __iter__(self) -> Iterator[Event]:
        """All events, until ``close``, of this or of the pool. While the pool is out of reach it waits."""
        for events in rounds(self.get, self._closed):
            yield from events

    def close(self) -> None:
        """Iteration ends within some seconds: a question under way is not called back."""
        self._closed.set()

    def __enter__(self) -> Subscription:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _ask(self, deadline: int, answer_by: int) -> list[Event]:
        from torch_mooncake import _core

        wait_s = min(seconds_left(deadline), 2.0) if self._started else 0.0
        until = min(answer_by, deadline_ns(wait_s + 10))
        client = self._pool._client(until)
        stream, last, anew, changes = _core.key_events(
            client, self._stream, self._after, self.prefix, int(wait_s * 1000), until
        )
        if anew:
            if stream == 0:  # the directory is being rebuilt: what is there is not known yet
                self._closed.wait(min(0.2, seconds_left(deadline)))
                return []
            return self._look(client, stream, last, answer_by)
        self._after = last
        return [event for change in changes if (event := self._event(*change)) is not None]

    def _look(self, client: Any, stream: int, last: int, answer_by: int) -> list[Event]:
        """All keys anew. Changes after ``last`` are told by the stream, also those that this look has seen."""
        from torch_mooncake import _core

        keys = self._pool.keys(self.prefix, timeout=seconds_left(answer_by))
        media = _core.key_media(client, keys, answer_by)  # None: it has just gone, or is about to be told
        found: list[tuple[str, Tier]] = [(key, medium or "cpu") for key, medium in zip(keys, media, strict=True)]
        there = dict(zip(_core.key_hashes(client, keys), found, strict=True))
        events = [self._next("cleared", "", None, "cpu")] if self._started else []
        events += [self._next("stored", key, None, tier) for key, tier in found]
        self._started, self._there, self._stream, self._after = True, there, stream, last
        return events

    def _event(
        self, kind: Kind, digest: bytes, key: str, sealed: bool, version: tuple[int, int], tier: Tier
    ) -> Event | None:
        known = self._there.get(digest)
        if kind == "stored":
            if sealed and known:  # the look has told it
                return None
            self._there[digest] = key, tier
            return self._next("stored", key, version, tier)
        if known is None:
            return None
        name, was = known
        if kind == "removed":
            del self._there[digest]
            return self._next("removed", name, None, was)
        self._there[digest] = name, tier
        return None if tier == was else self._next("moved", name, version, tier)

    def _next(self, kind: Kind, key: str, version: tuple[int, int] | None, tier: Tier) -> Event:
        self._seq += 1
        return Event(self._seq - 1, kind, key, version, tier)


def rounds(get: Callable[[float], list[T]], closed: threading.Event) -> Iterator[list[T]]:
    """What ``get(timeout)`` returns, again and again, until ``closed`` is set or the pool is closed. Errors that pass
    are waited out; the others are raised."""
    while not closed.is_set():
        try:
            found = get(_POLL_S)
        except DeadlineExceeded:
            continue
        except Closed:
            return
        except Error as error:
            if not error.retryable:
                raise
            closed.wait(_RETRY_S)
        else:
            yield found


__all__ = ["Event", "Subscription", "Tier", "rounds"]
