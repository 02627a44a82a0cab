"""KV events: which pages the pool holds, as vLLM tells it of its blocks, in process and over ZMQ.

    for event in KVEvents(pool, namespace="llama"):     # KVStored, KVRemoved, KVCleared
        ...
    publisher = KVEventPublisher(pool, "tcp://*:5557", replay="tcp://*:5558")

A page is *stored* when its key appears and *removed* when it goes, by whatever way; *cleared* means: forget everything,
what is there follows. ``medium`` is where the page is: "cpu", memory, or "disk", an SSD only. One that moves there, or
is brought back, is stored in the new medium and then removed from the old one. Events come from the pool's directory
(``torch_mooncake.events``); one publisher, anywhere, is enough for a pool.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from torch_mooncake.clock import deadline_ns, seconds_left
from torch_mooncake.errors import Closed, Corrupt, Error, InvalidArgument
from torch_mooncake.events import Event, Subscription, Tier, rounds
from torch_mooncake.kv.hashing import PageHash, hash_of_name
from torch_mooncake.kv.page_keys import PREFIX, PageKey, page_meta
from torch_mooncake.tensors import Decoded

if TYPE_CHECKING:
    from torch_mooncake.pool import Pool

Shape = Literal["vllm", "vllm-map", "rfc1527"]
_END = (-1).to_bytes(8, "big", signed=True)
_BATCH = 1024  # events in one message
_LINGER_MS = 2000
_REQUESTS = 1024  # of one asker that are kept


@dataclass(frozen=True)
class KVStored:
    namespace: str
    page_hash: PageHash
    parent_hash: PageHash | None  # None: the first page of a prompt
    token_ids: list[int] | None  # put_pages(token_ids=)
    block_size: int  # tokens
    medium: Tier


@dataclass(frozen=True)
class KVRemoved:
    namespace: str
    page_hash: PageHash
    medium: Tier


@dataclass(frozen=True)
class KVCleared:
    pass


KVEvent = KVStored | KVRemoved | KVCleared


class KVEvents:
    """An iterator over the pool's KV events, of one namespace or of all. First what is there. One thread at a time;
    ``close`` from any.

    What was put and has gone again before it could be described, and what is no page, is not told at all.
    """

    def __init__(self, pool: Pool, namespace: str | None = None) -> None:
        self._pool, self._namespace = pool, namespace
        self._subscription = Subscription(pool, PREFIX)
        self._pending: list[Event] = []
        self.stored: OrderedDict[str, KVStored] = OrderedDict()  # what has been told and not taken back, by key

    def get(self, timeout: float | None = 30) -> list[KVEvent]:
        """The next events, at least one; DeadlineExceeded if none comes within ``timeout`` seconds (0: those that are
        there; None: however long it takes), see ``Subscription.get``. After another error call again: nothing is lost.
        InvalidArgument for NaN, Closed after ``close``."""
        deadline = deadline_ns(timeout)
        while True:
            if not self._pending:
                self._pending = self._subscription.get(seconds_left(deadline))
            described = self._describe([event.key for event in self._pending if event.kind == "stored"], deadline)
            out = [told for event in self._pending for told in self._told(event, described)]
            self._pending = []
            if out:
                return out

    def __iter__(self) -> Iterator[KVEvent]:
        """All events, until ``close``, of this or of the pool. While the pool is out of reach it waits."""
        for events in rounds(self.get, self._subscription._closed):
            yield from events

    def close(self) -> None:
        """Iteration ends within some seconds: a question under way is not called back. Idempotent."""
        self._subscription.close()

    def __enter__(self) -> KVEvents:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _told(self, event: Event, described: dict[str, KVStored]) -> list[KVEvent]:
        if event.kind == "cleared":
            self.stored.clear()
            return [KVCleared()]
        before = self.stored.get(event.key)
        gone: list[KVEvent] = [] if before is None else [KVRemoved(before.namespace, before.page_hash, before.medium)]
        if event.kind == "removed":
            self.stored.pop(event.key, None)
            return gone
        now = described.get(event.key) if event.kind == "stored" else before
        if now is None:
            return []
        now = self.stored[event.key] = replace(now, medium=event.tier)
        return [now, *(gone if before is not None and before.medium != now.medium else [])]

    def _describe(self, keys: list[str], deadline: int) -> dict[str, KVStored]:
        """Those that are there and are pages."""
        names = {key: name for key in keys if (name := PageKey.parse(key)) is not None}
        keys = [key for key, name in names.items() if self._namespace in (None, name.namespace)]
        deadline = max(deadline, deadline_ns(2))  # for the answer, also without a timeout
        found = self._pool._client(deadline).peek_many(keys, deadline) if keys else []
        described = {}
        for key, item in zip(keys, found, strict=True):
            if isinstance(item, Error) and item.retryable:
                raise item
            if not isinstance(item, Exception) and (stored := _stored(names[key], item)) is not None:
                described[key] = stored
        return described


def _stored(name: PageKey, found: Any) -> KVStored | None:
    """None: whoever put it did not describe it as a page."""
    try:
        meta = page_meta(Decoded(found.meta, found.nbytes, lambda offset, nbytes: b"").user)
        if meta is None:
            return None
        parent = None if meta.parent is None else hash_of_name(meta.parent)
        return KVStored(name.namespace, name.page_hash, parent, meta.token_ids(), meta.block_size, "cpu")
    except (Corrupt, ValueError):
        return None


def encode_batch(
    events: Sequence[KVEvent], *, shape: Shape = "vllm", ts: float, first_id: int = 0, backend_id: str = ""
) -> bytes:
    """One message's payload: msgpack of ``[ts, events, dp_rank]`` (``vllm-map``: of a map with these names).

    ``vllm``: events are arrays ["BlockStored", block_hashes, parent_block_hash, token_ids, block_size, lora_id, medium,
    lora_name], ["BlockRemoved", block_hashes, medium], ["AllBlocksCleared"]; ``vllm-map``: maps with these names and
    "type". ``rfc1527``: the maps of Mooncake's RFC #1527, ``event_id`` counting from ``first_id``.
    """
    if shape == "rfc1527":
        maps = [_rfc_map(e, first_id + i, ts, backend_id) for i, e in enumerate(events)]
        return msgspec.msgpack.encode([ts, maps, 0])
    if shape not in ("vllm", "vllm-map"):
        raise InvalidArgument(f'shape is "vllm", "vllm-map" or "rfc1527", not {shape!r}')
    rows = [_vllm_map(e) for e in events]
    if shape == "vllm":
        return msgspec.msgpack.encode([ts, [list(row.values()) for row in rows], 0])
    return msgspec.msgpack.encode({"ts": ts, "events": rows, "data_parallel_rank": 0})


def _wire_hash(page_hash: PageHash | None) -> bytes | int | None:
    """vLLM's type: bytes, or an int of 64 bits."""
    if isinstance(page_hash, str):
        return page_hash.encode()
    if isinstance(page_hash, int) and not -(1 << 63) <= page_hash < 1 << 64:
        return page_hash.to_bytes((page_hash.bit_length() + 8) // 8, "big", signed=True)
    return page_hash


def _vllm_map(event: KVEvent) -> dict[str, Any]:
    if isinstance(event, KVStored):
        return {
            "type": "BlockStored",
            "block_hashes": [_wire_hash(event.page_hash)],
            "parent_block_hash": _wire_hash(event.parent_hash),
            "token_ids": event.token_ids or [],
            "block_size": event.block_size,
            "lora_id": None,
            "medium": event.medium.upper(),
            "lora_name": None,
        }
    if isinstance(event, KVRemoved):
        return {
            "type": "BlockRemoved",
            "block_hashes": [_wire_hash(event.page_hash)],
            "medium": event.medium.upper(),
        }
    return {"type": "AllBlocksCleared"}


def _rfc_map(event: KVEvent, event_id: int, ts: float, backend_id: str) -> dict[str, Any]:
    kind = {KVStored: "stored", KVRemoved: "removed", KVCleared: "cleared"}[type(event)]
    out: dict[str, Any] = {"event_id": event_id, "timestamp": ts, "event_type": kind, "backend_id": backend_id}
    out |= {"additional_salt": None, "lora_name": None, "tenant_id": None, "dp_rank": 0}
    if isinstance(event, KVCleared):
        return out
    out |= {"model_name": event.namespace, "medium": event.medium, "seq_hashes": [_wire_hash(event.page_hash)]}
    if isinstance(event, KVStored):
        out["block_size"] = event.block_size
        if event.parent_hash is None:
            out["base_block_idx"] = 0
        else:
            out["parent_hash"] = _wire_hash(event.parent_hash)
        if event.token_ids is not None:
            out["token_ids"] = event.token_ids
    return out


@dataclass
class _Asker:
    """Somebody at the ROUTER: the numbers it wants messages from, and what is left of the answer under way."""

    wanted: deque[int] = field(default_factory=deque)
    answer: deque[tuple[bytes, bytes]] = field(default_factory=deque)

    def ask(self, first: int) -> None:
        """One more request than ``_REQUESTS`` is no request: the asker's time runs out."""
        if len(self.wanted) < _REQUESTS:
            self.wanted.append(first)


class KVEventPublisher:
    """KV events over ZMQ, as vLLM publishes its own: PUB frames (topic, sequence number as 8 bytes big-endian,
    payload), and a ROUTER that sends again what a subscriber has missed.

    A request to the ROUTER is (empty, first wanted number); the answers are (empty, number, payload), then (empty, -1,
    empty), all of them, as fast as the asker takes them. Of ``buffer_steps`` messages what was sent is sent again; who
    wants older ones gets the whole state under the last number: cleared, then all pages. The publisher's thread follows
    the pool by itself, through losses of the directory, too. Needs pyzmq. ``close`` ends it.
    """

    def __init__(
        self,
        pool: Pool,
        endpoint: str = "tcp://*:5557",
        *,
        replay: str | None = None,
        namespace: str | None = None,
        topic: str = "",
        shape: Shape = "vllm",
        buffer_steps: int = 10_000,
        hwm: int = 100_000,
        backend_id: str = "torch_mooncake",
    ) -> None:
        import zmq

        encode_batch([], shape=shape, ts=0.0)  # refuses an unknown shape here, not on the thread
        self._events = KVEvents(pool, namespace)
        self._topic, self._shape, self._backend_id = topic.encode(), shape, backend_id
        self._lock = threading.Lock()  # buffer, numbers and state
        self._buffer: deque[tuple[int, bytes]] = deque(maxlen=buffer_steps)
        self._seq = self._event_id = 0
        self._state: OrderedDict[tuple[str, PageHash], KVStored] = OrderedDict()
        self._context = zmq.Context()
        self._stop = threading.Event()
        self.error: Exception | None = None  # what ended one of its threads, if not close()
        try:
            self._pub = self._context.socket(zmq.PUB)
            self._pub.set_hwm(hwm)
            self._pub.setsockopt(zmq.LINGER, 0)
            self.endpoint = _bind(self._pub, endpoint)
            self._router = self._context.socket(zmq.ROUTER)
            self._router.setsockopt(zmq.LINGER, 0)
            self._router.setsockopt(zmq.ROUTER_MANDATORY, 1)  # says that an asker's queue is full; drops nothing
            self.replay = None if replay is None else _bind(self._router, replay)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise InvalidArgument(f"{endpoint}, {replay}: {error}") from error
        self._threads = [threading.Thread(target=self._run, args=(self._publish,), name="kv-events", daemon=True)]
        if replay is not None:
            self._threads.append(
                threading.Thread(target=self._run, args=(self._replay,), name="kv-replay", daemon=True)
            )
        for thread in self._threads:
            thread.start()

    @property
    def next_seq(self) -> int:
        """The number that the next message will have."""
        with self._lock:
            return self._seq

    def close(self) -> None:
        """Ends the threads (within some seconds) and the sockets; what was published is sent to those who take it
        within two seconds more. Idempotent."""
        self._stop.set()
        self._events.close()
        for thread in self._threads:
            thread.join()
        self._pub.close(linger=_LINGER_MS)
        self._context.destroy(linger=_LINGER_MS)

    def __enter__(self) -> KVEventPublisher:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _run(self, work: Callable[[], None]) -> None:
        """A thread's life: what ends it is told."""
        try:
            work()
        except Exception as error:
            self.error = error
            raise

    def _publish(self) -> None:
        for events in rounds(self._events.get, self._stop):
            for at in range(0, len(events), _BATCH):
                self._send(events[at : at + _BATCH])
        if not self._stop.is_set():
            raise Closed("the pool was closed")

    def _send(self, events: list[KVEvent]) -> None:
        with self._lock:
            for event in events:
                if isinstance(event, KVCleared):
                    self._state.clear()
                elif isinstance(event, KVRemoved):
                    page = event.namespace, event.page_hash
                    if page in self._state and self._state[page].medium == event.medium:  # else it has moved
                        del self._state[page]
                else:
                    self._state[event.namespace, event.page_hash] = event
            payload = self._encode(events, self._event_id)
            seq, self._seq, self._event_id = self._seq, self._seq + 1, self._event_id + len(events)
            self._buffer.append((seq, payload))
        self._pub.send_multipart((self._topic, seq.to_bytes(8, "big"), payload))

    def _encode(self, events: Sequence[KVEvent], first_id: int) -> bytes:
        return encode_batch(events, shape=self._shape, ts=time.time(), first_id=first_id, backend_id=self._backend_id)

    def _replay(self) -> None:
        askers: dict[bytes, _Asker] = {}
        while not self._stop.is_set():
            if self._router.poll(20 if askers else 200):
                who, *request = self._router.recv_multipart()
                if len(request) == 2 and len(request[1]) == 8:  # else no request; the asker's time runs out
                    askers.setdefault(who, _Asker()).ask(int.from_bytes(request[1], "big"))
            for who, asker in list(askers.items()):
                if self._answered(who, asker):
                    del askers[who]

    def _answered(self, who: bytes, asker: _Asker) -> bool:
        """Sends what the asker's queue has room for. True: it has everything, or is gone."""
        import zmq

        while asker.answer or asker.wanted:
            if not asker.answer:
                asker.answer += [(n.to_bytes(8, "big"), data) for n, data in self._missed(asker.wanted.popleft())]
                asker.answer.append((_END, b""))
            try:
                self._router.send_multipart((who, b"", *asker.answer[0]), zmq.NOBLOCK)
            except zmq.Again:
                return False
            except zmq.ZMQError:
                return True
            asker.answer.popleft()
        return True

    def _missed(self, first: int) -> list[tuple[int, bytes]]:
        with self._lock:
            if first >= self._seq:
                return []
            if self._buffer and first >= self._buffer[0][0]:
                return [entry for entry in self._buffer if entry[0] >= first]
            whole: list[KVEvent] = [KVCleared(), *self._state.values()]
            return [(self._seq - 1, self._encode(whole, max(0, self._event_id - len(whole))))]


def _bind(socket: Any, endpoint: str) -> str:
    """The address with the port that was taken for ``:0`` or ``:*``."""
    socket.bind(endpoint.removesuffix(":0") + ":*" if endpoint.endswith(":0") else endpoint)
    import zmq

    return socket.getsockopt_string(zmq.LAST_ENDPOINT)
