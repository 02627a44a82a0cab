"""KV events, as a subscriber of vLLM's reads them: real sockets, and vLLM's documented types written down anew."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from typing import Any

import msgspec
import pytest
import torch
import zmq
from caches import SIZE, prefill_cache
from processes import eventually

import torch_mooncake as tm
from torch_mooncake import _core
from torch_mooncake.kv import KVCleared, KVEventPublisher, KVEvents, KVRemoved, KVStored, PagedKV
from torch_mooncake.kv.events import _REQUESTS, _Asker, encode_batch

PROMPT = list(range(100, 100 + 3 * SIZE))


class BlockStored(msgspec.Struct, array_like=True, omit_defaults=True, tag=True):
    block_hashes: list[bytes | int]
    parent_block_hash: bytes | int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None = None
    extra_keys: list[Any] | None = None


class BlockRemoved(msgspec.Struct, array_like=True, omit_defaults=True, tag=True):
    block_hashes: list[bytes | int]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, array_like=True, omit_defaults=True, tag=True):
    pass


class KVEventBatch(msgspec.Struct, array_like=True, omit_defaults=True):
    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


class Subscriber:
    """As vLLM's example: SUB for what comes, REQ's frames on a DEALER for what was missed."""

    def __init__(self, publisher: KVEventPublisher) -> None:
        self.context = zmq.Context()
        self.sub = self.context.socket(zmq.SUB)
        self.sub.connect(publisher.endpoint)
        self.sub.setsockopt(zmq.SUBSCRIBE, b"")
        self.dealer = self.context.socket(zmq.DEALER)
        self.dealer.connect(str(publisher.replay))
        for socket in (self.sub, self.dealer):
            socket.setsockopt(zmq.RCVTIMEO, 10_000)

    def next(self) -> tuple[int, KVEventBatch]:
        _, seq, payload = self.sub.recv_multipart()
        return int.from_bytes(seq, "big"), msgspec.msgpack.decode(payload, type=KVEventBatch)

    def replay(self, first: int) -> list[tuple[int, KVEventBatch]]:
        self.dealer.send_multipart((b"", first.to_bytes(8, "big")))
        return self.answer()

    def answer(self) -> list[tuple[int, KVEventBatch]]:
        out = []
        while True:
            _, seq, payload = self.dealer.recv_multipart()
            if not payload:
                assert int.from_bytes(seq, "big", signed=True) == -1
                return out
            out.append((int.from_bytes(seq, "big"), msgspec.msgpack.decode(payload, type=KVEventBatch)))

    def close(self) -> None:
        self.context.destroy(linger=0)


@pytest.fixture
def listen():
    made: list[Subscriber] = []

    def make(publisher: KVEventPublisher) -> Subscriber:
        made.append(Subscriber(publisher))
        return made[-1]

    yield make
    for subscriber in made:
        subscriber.close()


def publisher(pool: tm.Pool, **options: Any) -> KVEventPublisher:
    return KVEventPublisher(pool, "tcp://127.0.0.1:0", replay="tcp://127.0.0.1:0", **options)


def state_of(batches: list[tuple[int, KVEventBatch]], known: dict | None = None) -> dict:
    known = {} if known is None else known
    for _, batch in batches:
        for event in batch.events:
            if isinstance(event, AllBlocksCleared):
                known.clear()
            elif isinstance(event, BlockStored):
                known.update((h, event) for h in event.block_hashes)
            else:
                for h in event.block_hashes:
                    known.pop(h)
    return known


def test_in_process(pool):
    kv = pool.kv("m", prefill_cache())
    hashes = kv.page_hashes(PROMPT)
    events = KVEvents(pool, "m")
    kv.put_pages(hashes, [0, 1, 2], token_ids=PROMPT)
    pool.kv("other", prefill_cache()).put_pages([b"x"], [0])
    pool.put("kv/no/page", b"1")
    stored: list[Any] = []
    while len(stored) < 3:
        stored += events.get()
    assert all(isinstance(event, KVStored) for event in stored)
    by_hash = {event.page_hash: event for event in stored}
    assert [by_hash[h].parent_hash for h in hashes] == [None, *hashes[:2]]
    assert by_hash[hashes[1]].token_ids == PROMPT[SIZE : 2 * SIZE]
    assert by_hash[hashes[1]].block_size == SIZE
    pool.delete(kv.key(hashes[2]))
    assert events.get() == [KVRemoved("m", hashes[2], "cpu")]
    with pytest.raises(tm.DeadlineExceeded):
        events.get(0.3)


def test_a_vllm_subscriber_follows_the_pool(pool, listen):
    kv = pool.kv("m", prefill_cache())
    hashes = [b"\x01" * 32, 1 << 63, -7]
    kv.put_pages(hashes[:1], [0], token_ids=PROMPT[:SIZE])
    with publisher(pool) as out:
        subscriber = listen(out)
        assert eventually(lambda: out.next_seq == 1)
        tries = []
        while not subscriber.sub.poll(100):  # a SUB is deaf until it has been heard of: what it missed it asks for
            tries.append(b"try %d" % len(tries))
            kv.put_pages(tries[-1:], [0])
        kv.put_pages(hashes[1:], [1, 2], parent=hashes[0])
        got = []
        while not state_of(got).keys() >= set(hashes[1:]):
            got.append(subscriber.next())
        missed = subscriber.replay(0)[: got[0][0]]
        known = state_of(got, state_of(missed))
        assert set(known) - set(tries) == set(hashes)
        first = known[hashes[0]]
        assert (first.parent_block_hash, first.token_ids) == (None, PROMPT[:SIZE])
        assert (first.block_size, first.medium) == (SIZE, "CPU")
        assert known[hashes[1]].parent_block_hash == hashes[0]
        pool.delete(kv.key(hashes[2]))
        seq, batch = subscriber.next()
        assert batch.events == [BlockRemoved([hashes[2]], "CPU")]
        assert seq == out.next_seq - 1
        assert [n for n, _ in subscriber.replay(0)] == list(range(out.next_seq))
        assert subscriber.replay(out.next_seq) == []


def test_who_is_too_far_behind_gets_the_whole_state(pool, listen):
    kv = pool.kv("m", prefill_cache())
    with publisher(pool, buffer_steps=2) as out:
        for i in range(6):
            kv.put_pages([i], [0])
            assert eventually(lambda i=i: out.next_seq > i)
        pool.delete(kv.key(0))
        assert eventually(lambda: out.next_seq > 6)
        missed = listen(out).replay(1)
        assert [seq for seq, _ in missed] == [out.next_seq - 1]
        assert isinstance(missed[0][1].events[0], AllBlocksCleared)
        assert set(state_of(missed, {99: None})) == {1, 2, 3, 4, 5}


def test_a_lost_directory_is_cleared_and_told_anew(pool_env, listen):
    pool = tm.init()
    kv = pool.kv("m", prefill_cache())
    kv.put_pages([1, 2, 3], [0, 1, 2])
    with publisher(pool) as out:
        assert eventually(lambda: out.next_seq >= 1)
        os.kill(pool_env.worker(), signal.SIGKILL)
        assert pool.delete(kv.key(2), timeout=20)
        subscriber = listen(out)
        assert eventually(lambda: set(state_of(subscriber.replay(0))) == {1, 3}, 20)
        assert any(isinstance(e, AllBlocksCleared) for _, b in subscriber.replay(0) for e in b.events)
        assert out.error is None


def test_what_is_no_page_is_not_told(pool, listen):
    """Whatever lies under a page's key, put by whoever."""
    kv = pool.kv("m", prefill_cache())
    odd = [
        {"block_size": SIZE, "parent": "zz"},
        {"block_size": SIZE, "parent": "b0"},
        {"block_size": SIZE, "tokens": b"1234567"},
        {"block_size": "four"},
        {"block_size": 1 << 63},
        None,
    ]
    with publisher(pool) as out:
        for i, meta in enumerate(odd):
            pool.put(kv.key(i), torch.zeros(3), sealed=True, meta=meta)
        client = pool._client(1 << 62)
        for i, head in enumerate((b"junk", b"\0" * 40)):  # as by a program of another language
            client.put(kv.key(100 + i), head, (b"bytes",), _core.PutOptions(sealed=True), 1 << 62)
        kv.put_pages([b"page"], [0])
        subscriber = listen(out)
        assert eventually(lambda: b"page" in state_of(subscriber.replay(0)) or out.error)
        assert out.error is None
        assert set(state_of(subscriber.replay(0))) <= {b"page", 4}


def test_a_replay_is_whole_however_slow_its_asker(pool, listen, monkeypatch, tmp_path):
    monkeypatch.setattr("torch_mooncake.kv.events._BATCH", 1)  # an event, a message
    count = 5000
    kv = pool.kv("m", prefill_cache())
    with KVEventPublisher(pool, "tcp://127.0.0.1:0", replay=f"ipc://{tmp_path}/replay") as out:
        kv.put_pages(list(range(count)), [0] * count)
        assert eventually(lambda: out.next_seq == count)
        slow, other = listen(out), listen(out)
        slow.dealer.send_multipart((b"", (0).to_bytes(8, "big")))
        assert slow.dealer.poll(10_000)
        assert [seq for seq, _ in other.replay(0)] == list(range(count))  # while the slow one has read nothing
        assert [seq for seq, _ in slow.answer()] == list(range(count))
        assert out.error is None


def test_an_asker_keeps_its_oldest_requests():
    asker = _Asker()
    for number in range(2 * _REQUESTS):
        asker.ask(number)
    assert list(asker.wanted) == list(range(_REQUESTS))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_what_ends_the_replay_is_told(pool, listen, monkeypatch):
    with publisher(pool) as out:
        monkeypatch.delattr(KVEventPublisher, "_missed")
        listen(out).dealer.send_multipart((b"", (0).to_bytes(8, "big")))
        assert eventually(lambda: isinstance(out.error, AttributeError))


SUBSCRIBE = """
import zmq
sub = zmq.Context().socket(zmq.SUB)
sub.setsockopt(zmq.RCVHWM, 0)
sub.setsockopt(zmq.RCVTIMEO, 10_000)
sub.setsockopt(zmq.SUBSCRIBE, b"")
sub.connect(endpoint)
def next_seq():
    return int.from_bytes(sub.recv_multipart()[1], "big")
"""


def test_close_sends_what_was_published(pool, monkeypatch, tmp_path, child):
    monkeypatch.setattr("torch_mooncake.kv.events._BATCH", 1)
    count = 4000
    kv = pool.kv("m", prefill_cache())
    subscriber = child()
    out = KVEventPublisher(pool, f"ipc://{tmp_path}/events")
    try:
        subscriber(SUBSCRIBE, endpoint=out.endpoint)
        tries = itertools.count()
        while not subscriber("result = sub.poll(100)"):  # a SUB is deaf until it has been heard of
            kv.put_pages([f"try {next(tries)}"], [0])
        subscriber.kill(signal.SIGSTOP)
        before = out.next_seq
        kv.put_pages(list(range(count)), [0] * count)
        assert eventually(lambda: out.next_seq >= before + count)
        closing = threading.Thread(target=out.close)
        closing.start()
        assert eventually(lambda: not any(thread.is_alive() for thread in out._threads))
        subscriber.kill(signal.SIGCONT)
        assert subscriber("while next_seq() != last:\n    pass\nresult = True", last=out.next_seq - 1)
        closing.join()
    finally:
        out.close()


class Media:
    """Where a subscriber that knows of media takes the pages to be, and what it was told, one after the other."""

    def __init__(self) -> None:
        self.of: dict[Any, set[str]] = {}

    def hear(self, event: Any) -> None:
        if isinstance(event, (AllBlocksCleared, KVCleared)):
            return self.of.clear()
        stored = isinstance(event, (BlockStored, KVStored))
        for page in event.block_hashes if isinstance(event, (BlockStored, BlockRemoved)) else [event.page_hash]:
            media = self.of.setdefault(page, set())
            if stored:
                media.add(event.medium)
            else:
                media.remove(event.medium)
                if not media:
                    del self.of[page]
        return None


def test_pages_that_go_to_an_ssd_and_back_are_told_with_their_medium(pool_env, monkeypatch, listen):
    disk = tempfile.mkdtemp(prefix="tm-test-ssd-", dir="/var/tmp")
    monkeypatch.setenv("TM_MEMORY", "8MiB")
    monkeypatch.setenv("TM_SSD", f"{disk}/a:256MiB")
    try:
        pool = tm.init()
        kv = pool.kv("m", PagedKV([torch.zeros(2, 2, SIZE, 4, 1 << 13)]))  # pages of 1 MiB
        with publisher(pool, buffer_steps=4) as out, KVEvents(pool) as events:
            hashes = list(range(24))
            heard = Media()
            for page in hashes:
                kv.put_pages([page], [0], token_ids=PROMPT[:SIZE])

            def where() -> dict[Any, set[str]]:
                tiers = [pool.info(kv.key(page)).tiers for page in hashes]
                return {page: {"disk" if tier == ("ssd",) else "cpu"} for page, tier in zip(hashes, tiers, strict=True)}

            def agree() -> bool:
                try:
                    while True:
                        for event in events.get(0.3):
                            heard.hear(event)
                except tm.DeadlineExceeded:
                    return heard.of == where()

            def published() -> dict[Any, set[str]]:
                replayed = Media()
                for _, batch in listen(out).replay(0):  # further behind than is kept: the whole state
                    for event in batch.events:
                        replayed.hear(event)
                return replayed.of

            assert eventually(agree)
            assert heard.of[0] == {"disk"}
            assert eventually(lambda: published() == {p: {m.upper() for m in media} for p, media in where().items()})
            pool.get(kv.key(0))
            assert eventually(agree)
            assert heard.of[0] == {"cpu"}
            assert eventually(lambda: published()[0] == {"CPU"})
            pool.delete(kv.key(1))
            gone: list[Any] = []
            while not gone:  # others may still be on their way to the disk
                gone = [event for event in events.get() if isinstance(event, KVRemoved) and event.page_hash == 1]
            assert gone == [KVRemoved("m", 1, "disk")]
            assert eventually(lambda: 1 not in published())
    finally:
        tm.close()
        assert eventually(lambda: not pool_env.nodes(), 15)
        shutil.rmtree(disk, ignore_errors=True)


def test_a_page_that_moves_in_each_shape():
    events = [KVStored("m", 5, 4, [1, 2], 2, "disk"), KVRemoved("m", 5, "cpu")]
    batch = msgspec.msgpack.decode(encode_batch(events, ts=0), type=KVEventBatch)
    assert [event.medium for event in batch.events] == ["DISK", "CPU"]
    maps = msgspec.msgpack.decode(encode_batch(events, shape="vllm-map", ts=0))["events"]
    assert [event["medium"] for event in maps] == ["DISK", "CPU"]
    _, rows, _ = msgspec.msgpack.decode(encode_batch(events, shape="rfc1527", ts=0))
    assert [(row["event_type"], row["medium"]) for row in rows] == [("stored", "disk"), ("removed", "cpu")]


def test_other_shapes():
    stored = KVStored("m", 5, 4, [1, 2], 2, "cpu")
    root = KVStored("m", b"r", None, None, 2, "cpu")
    events = [root, stored, KVRemoved("m", "sglang", "cpu"), KVCleared()]
    maps = msgspec.msgpack.decode(encode_batch(events, shape="vllm-map", ts=1.5))
    assert maps["events"][1]["parent_block_hash"] == 4
    assert [event["type"] for event in maps["events"]] == ["BlockStored"] * 2 + ["BlockRemoved", "AllBlocksCleared"]
    ts, rows, rank = msgspec.msgpack.decode(encode_batch(events, shape="rfc1527", ts=1.5, first_id=7, backend_id="b"))
    assert (ts, rank) == (1.5, 0)
    assert [row["event_id"] for row in rows] == [7, 8, 9, 10]
    assert [row["event_type"] for row in rows] == ["stored", "stored", "removed", "cleared"]
    assert rows[0]["base_block_idx"] == 0
    assert rows[1]["parent_hash"] == 4
    assert rows[1]["token_ids"] == [1, 2]
    assert "token_ids" not in rows[0]
    assert rows[2]["seq_hashes"] == [b"sglang"]
    assert {row["backend_id"] for row in rows} == {"b"}
    big = KVRemoved("m", 1 << 200, "cpu")
    decoded = msgspec.msgpack.decode(encode_batch([big], ts=0), type=KVEventBatch)
    assert int.from_bytes(decoded.events[0].block_hashes[0], "big", signed=True) == 1 << 200
    with pytest.raises(tm.InvalidArgument, match="shape"):
        encode_batch([], shape="json", ts=0)  # type: ignore[arg-type]


def test_the_command_line_publishes(pool, listen):
    kv = pool.kv("m", prefill_cache())
    command = [sys.executable, "-m", "torch_mooncake", "events", "--zmq", "tcp://127.0.0.1:0"]
    command += ["--replay", "tcp://127.0.0.1:0", "--namespace", "m"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        places = json.loads(process.stdout.readline())
        subscriber = listen(type("Places", (), {"endpoint": places["zmq"], "replay": places["replay"]}))
        kv.put_pages([1], [0])
        assert eventually(lambda: set(state_of(subscriber.replay(0))) == {1})
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(15) == 0
        process.stdout.close()
    assert torch.is_tensor(tm.get(kv.key(1)))
