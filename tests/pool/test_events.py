"""A subscriber is told what becomes of keys: whatever happens in between, its keys are the pool's in the end."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from processes import PoolEnv, eventually, running, stopped

import torch_mooncake as tm
from torch_mooncake.events import Event, Subscription
from torch_mooncake.kv import KVEvents


def drain(subscription: Subscription, quiet: float = 0.7) -> list[Event]:
    """All events until none comes for a moment."""
    out: list[Event] = []
    while True:
        try:
            out += subscription.get(quiet)
        except tm.DeadlineExceeded:
            return out


def told(events: list[Event]) -> list[tuple[str, str]]:
    return [(event.kind, event.key) for event in events]


def test_puts_and_deletes_of_a_prefix_in_order(pool: tm.Pool) -> None:
    pool.put("a/before", b"1")
    with pool.subscribe("a/") as subscription:
        assert told(subscription.get()) == [("stored", "a/before")]
        version = pool.put("a/x", b"1").version
        pool.put("b/x", b"1")
        pool.delete("a/x")
        pool.put("a/y", b"1", sealed=True)
        pool.delete("b/x")
        pool.put("a/before", b"2")
        events = drain(subscription)
        assert told(events) == [("stored", "a/x"), ("removed", "a/x"), ("stored", "a/y"), ("stored", "a/before")]
        assert events[0].version == version
        assert [event.seq for event in events] == [1, 2, 3, 4]
        assert subscription.keys == {"a/before", "a/y"}


def test_what_expires_or_is_evicted_is_told(pool: tm.Pool) -> None:
    with pool.subscribe() as subscription:
        pool.put("short", b"1", ttl_s=0.3)
        assert told(drain(subscription, 1.5)) == [("stored", "short"), ("removed", "short")]
        for i in range(20):
            pool.put(f"big/{i}", torch.zeros(16 << 20, dtype=torch.uint8))
        events = drain(subscription)
        assert sum(event.kind == "removed" for event in events) >= 4
        assert subscription.keys == set(pool.keys())


def test_a_slow_subscriber_is_told_to_start_anew(pool: tm.Pool) -> None:
    with pool.subscribe("k") as subscription:
        pool.put("k/old", b"1")
        assert drain(subscription)
        pool.delete("k/old")
        pool.put("k/new", b"1")
        subscription._after = 1 << 40  # as after another directory's numbers
        events = drain(subscription)
        assert told(events) == [("cleared", ""), ("stored", "k/new")]
        assert [event.seq for event in events] == [1, 2]


def test_a_directory_that_is_lost_and_rebuilt(pool: tm.Pool, pool_env: PoolEnv) -> None:
    with pool.subscribe() as subscription:
        pool.put("a", b"1")
        pool.put("b", b"1")
        assert len(drain(subscription)) == 2
        os.kill(pool_env.worker(), signal.SIGKILL)
        assert pool.delete("a", timeout=20)
        events: list[Event] = []

        def anew() -> bool:
            events.extend(drain(subscription, 0.2))
            return any(event.kind == "cleared" for event in events)

        assert eventually(anew, 20)
        assert subscription.keys == {"b"}


def test_under_load_a_subscriber_ends_with_what_is_there(pool: tm.Pool) -> None:
    stop = threading.Event()

    def churn(seed: int) -> None:
        rng = random.Random(seed)
        while not stop.is_set():
            key = f"k/{rng.randrange(300)}"
            if rng.random() < 0.6:
                pool.put(key, bytes(rng.randrange(1, 3000)), sealed=rng.random() < 0.01 and not pool.exists(key))
            else:
                pool.delete(key)

    def safe(seed: int) -> None:
        while not stop.is_set():
            try:
                churn(seed)
            except tm.InvalidArgument:  # two of us chose different kinds of key
                pass

    threads = [threading.Thread(target=safe, args=(seed,)) for seed in range(2)]
    for thread in threads:
        thread.start()
    with pool.subscribe("k/") as subscription:
        end = time.monotonic() + 2
        seen = 0
        while time.monotonic() < end:
            seen += len(subscription.get())
        stop.set()
        for thread in threads:
            thread.join()
        drain(subscription)
        assert seen > 300
        assert subscription.keys == set(pool.keys("k/"))


def test_the_command_line_prints_events(pool: tm.Pool) -> None:
    pool.put("a", b"1")
    command = [sys.executable, "-m", "torch_mooncake", "events", "--json"]
    with running(command, stdout=subprocess.PIPE, text=True) as listening:
        lines: Any = listening.stdout
        assert json.loads(lines.readline())["key"] == "a"
        pool.delete("a")
        assert json.loads(lines.readline())["kind"] == "removed"
        listening.send_signal(signal.SIGINT)
        assert listening.wait(15) == 130


def test_a_timeout_is_what_it_says(pool: tm.Pool, pool_env: PoolEnv) -> None:
    pool.put("a", b"1")
    with pool.subscribe() as subscription:
        assert told(subscription.get(0)) == [("stored", "a")]  # what is there, also in no time
        for nothing in (0, -1, 0.05):
            with pytest.raises(tm.DeadlineExceeded):
                subscription.get(nothing)
        with pytest.raises(tm.InvalidArgument, match="NaN"):
            subscription.get(float("nan"))
        pool.put("b", b"1")
        assert told(subscription.get(None)) == [("stored", "b")]
        with stopped(pool_env.worker()):
            started = time.monotonic()
            with pytest.raises(tm.DeadlineExceeded):
                subscription.get(0.1)
            assert time.monotonic() - started < 6  # the answer's two seconds
        pool.put("c", b"1")
        assert told(subscription.get()) == [("stored", "c")]


class Listening(threading.Thread):
    """Iterates on a thread of its own; what ended it, if it was not ``close``, is in ``error``."""

    def __init__(self, events: Iterable[Any]) -> None:
        super().__init__(daemon=True)
        self.events, self.heard, self.error = events, [], None
        self.start()

    def run(self) -> None:
        try:
            for event in self.events:
                self.heard.append(event)
        except Exception as error:
            self.error = error


def frames(thread: threading.Thread) -> list[str]:
    """The functions that a thread is in."""
    return [name for _, _, name, _ in traceback.extract_stack(sys._current_frames().get(thread.ident or 0))]


def test_an_iterator_goes_on_when_its_node_was_lost(pool: tm.Pool, pool_env: PoolEnv) -> None:
    subscription = pool.subscribe()
    listening = Listening(subscription)
    pool.put("a", b"1")
    assert eventually(lambda: {event.key for event in listening.heard} == {"a"})  # the first look may have seen it, too
    for pid in pool_env.nodes():
        os.kill(pid, signal.SIGKILL)
    assert eventually(lambda: any(event.kind == "cleared" for event in listening.heard), 20)
    pool.put("b", b"1")
    assert eventually(lambda: listening.heard[-1].key == "b")
    assert listening.error is None
    subscription.close()
    listening.join(15)
    assert not listening.is_alive()


@pytest.mark.parametrize("kind", [Subscription, KVEvents])
def test_close_ends_an_iterator_that_waits(pool: tm.Pool, kind: Any) -> None:
    events = kind(pool)
    listening = Listening(events)
    assert eventually(lambda: any("_ask" in name for name in frames(listening)))
    events.close()
    events.close()
    listening.join(15)
    assert not listening.is_alive()
    assert listening.error is None
    with pytest.raises(tm.Closed):
        events.get(1)


def test_a_closed_subscription_says_so(pool: tm.Pool) -> None:
    subscription = pool.subscribe()
    subscription.close()
    with pytest.raises(tm.Closed):
        subscription.get()
    assert list(subscription) == []
