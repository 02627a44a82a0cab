"""Bytes that change on the way: no receiver takes them."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from processes import eventually

import torch_mooncake as tm
from torch_mooncake.weights import Place, Publisher, Subscriber, fetch
from torch_mooncake.weights.board import HAS_SUM, VERSION
from torch_mooncake.weights.upstream import Route

COUNT, SIZE = 4, 1 << 20  # float32: 16 MiB
NBYTES = COUNT * SIZE * 4


def tensors(value: float) -> dict[str, torch.Tensor]:
    return {f"w{i}": torch.full((SIZE,), float(value)) for i in range(COUNT)}


def uniform(of: dict[str, torch.Tensor], value: float) -> bool:
    return all(bool(tensor.eq(value).all()) for tensor in of.values())


class Worker:
    def __init__(self, opened: Callable[[Any], Any], name: str, rate: int = 0, **options: Any) -> None:
        engine = opened(tm.Engine(transports=("tcp",), name=name, host_id=name, foreground_rate=rate))
        self.tensors = tensors(0)
        self.subscriber = opened(
            Subscriber("policy", self.tensors, engine=engine, place=Place(name), patience_s=60, **options)
        )


def slot_with(holder: Any, version: int) -> int:
    return holder._memory.board.header[:, VERSION].tolist().index(version)


@pytest.fixture
def trainer(opened: Callable[[Any], Any]) -> tuple[tm.Engine, Publisher, dict[str, torch.Tensor]]:
    engine = opened(tm.Engine(transports=("tcp",), name="trainer", host_id="trainer"))
    mine = tensors(0)
    return engine, opened(Publisher("policy", mine, engine=engine, place=Place("trainer"))), mine


def publish(publisher: Publisher, mine: dict[str, torch.Tensor], step: int) -> None:
    for tensor in mine.values():
        tensor.fill_(step)
    publisher.publish(step=step)


@pytest.mark.parametrize("flip", ["copy", pytest.param("direct", marks=pytest.mark.slow)])
def test_a_relay_whose_memory_changed_is_passed_over(opened, trainer, flip: str):
    engine, publisher, mine = trainer
    relay, last = Worker(opened, "w0"), Worker(opened, "w1", rate=8 << 20, flip=flip)
    sent = engine.stats()["bytes_sent"].get("tcp", 0)
    publish(publisher, mine, 1)
    assert relay.subscriber.update(timeout=60).step == 1
    relay.subscriber._arena.views(slot_with(relay.subscriber, 1))["w3"][-1000:] = 5
    assert last.subscriber.update(timeout=60).step == 1
    assert uniform(last.tensors, 1)
    again = engine.stats()["bytes_sent"]["tcp"] - sent - NBYTES
    assert 0 < again < NBYTES  # what was right was not read again
    publish(publisher, mine, 2)
    assert last.subscriber.update(timeout=60).step == 2
    assert uniform(last.tensors, 2)


def test_a_trainer_whose_memory_changed_is_told_apart(opened, trainer):
    _, publisher, mine = trainer
    worker = Worker(opened, "w0", rate=8 << 20)
    publish(publisher, mine, 1)
    assert worker.subscriber.update(timeout=60).step == 1
    publish(publisher, mine, 2)
    slot = slot_with(publisher, 2)
    sums = publisher._memory.board._sums[slot]
    assert eventually(lambda: sum(int(word) & HAS_SUM > 0 for word in sums[:64]) == len(publisher._sums._chunks))
    publisher._memory.views(slot)["w3"][-1000:] = 5
    with pytest.raises(tm.Corrupt, match="version 2 of the weights came from trainer with other bytes"):
        worker.subscriber.update(timeout=60)
    assert uniform(worker.tensors, 1)
    assert worker.subscriber.version == 1
    publish(publisher, mine, 3)
    while worker.subscriber.version < 3:
        try:
            worker.subscriber.update(timeout=60)
        except tm.Corrupt:  # of another attempt at version 2
            assert worker.subscriber.version == 1
    assert uniform(worker.tensors, 3)


def test_a_late_joiner_with_the_same_layout_compares_too(opened, trainer):
    _, publisher, mine = trainer
    first = Worker(opened, "w0")
    publish(publisher, mine, 1)
    assert first.subscriber.update(timeout=60).step == 1
    first.subscriber._arena.views(slot_with(first.subscriber, 1))["w0"][:10] = 5
    late = Worker(opened, "w1")
    assert late.subscriber.update(timeout=60).step == 1
    assert uniform(late.tensors, 1)


def test_on_one_host_they_are_made_on_demand(opened):
    for verify in (None, True):
        mine, worker = tensors(3), tensors(0)
        publisher = opened(Publisher(f"p{verify}", mine, verify=verify))
        subscriber = opened(Subscriber(f"p{verify}", worker))
        publisher.publish()
        subscriber.update(timeout=60)
        assert uniform(worker, 3)
        words = subscriber._memory.board._sums[slot_with(subscriber, 1)]
        assert bool((words & HAS_SUM).any()) == bool(verify)


def test_checksums_that_cannot_be_made_hold_nobody_up(opened, monkeypatch: pytest.MonkeyPatch):
    mine, worker = tensors(1), tensors(0)
    publisher = opened(Publisher("policy", mine, verify=True))
    subscriber = opened(Subscriber("policy", worker))
    with monkeypatch.context() as broken:

        def fails(*_: Any) -> int:
            raise MemoryError("no plan")

        broken.setattr(publisher._sums, "_wire", fails)
        publish(publisher, mine, 1)
        assert subscriber.update(timeout=60).step == 1
        assert eventually(lambda: publisher._sums._error is not None)
    with pytest.raises(MemoryError, match="no plan"):  # once, and nothing has changed
        publish(publisher, mine, 2)
    assert publisher.version == 1
    publish(publisher, mine, 2)
    assert publisher.version == 2
    assert subscriber.update(timeout=60).step == 2
    assert uniform(worker, 2)
    assert bool((subscriber._memory.board._sums[slot_with(subscriber, 2)] & HAS_SUM).any())


def test_a_source_whose_checksums_never_come_is_lost(opened, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(fetch, "_OP_S", 0.5)
    mine = tensors(1)
    publisher = opened(Publisher("policy", mine, verify=True))
    subscriber = opened(Subscriber("policy", tensors(0)))
    monkeypatch.setattr(publisher._sums, "make", lambda *_: None)
    publish(publisher, mine, 1)
    with pytest.raises(tm.PeerLost, match=r"nothing came from trainer 0 of policy in 0\.5 s"):
        subscriber.update(timeout=60)


def test_after_a_chunk_that_comes_again_nothing_is_asked_for_that_is_not_there():
    """Chunks 0 and 2 are here, 1 comes again, and the node before has three of the four."""
    asked: list[int] = []
    chunks: Any = SimpleNamespace(nbytes=[10] * 4)
    route = Route(7, [0], chunks, next=1, there=[True, False, True, False])
    upstream: Any = SimpleNamespace(slot=0, has={7: 3}, reads=[], routes=[route], inflight=0, window=lambda: 1000)
    node: Any = fetch.Fetch.__new__(fetch.Fetch)
    node._word = lambda upstream, route: None

    def reads(upstream: Any, op: object, route: Route, block: object) -> None:
        asked.append(route.next)
        route.next += 1

    node._read_blob = lambda upstream, route: object()
    node._reading = reads
    assert node._request(upstream)
    assert asked == [1]
    upstream.has[7] = 4
    assert node._request(upstream)
    assert asked == [1, 3]
