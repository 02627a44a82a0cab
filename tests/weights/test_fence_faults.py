"""Processes that die or stand still while tensors are published where they lie, and come and go meanwhile."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from processes import Child, eventually, stopped

import torch_mooncake as tm
from torch_mooncake.weights import Place, Publisher, Subscriber

COUNT, SIZE = 4, 1 << 20  # float32: 16 MiB
RATE = 16 << 20

SUBSCRIBER = """
import torch, torch_mooncake as tm
from torch_mooncake import weights
torch.set_num_threads(1)
tm.init()
engine = tm.Engine(transports=("tcp",), name=name, host_id=name, foreground_rate=rate)
mine = {f"w{i}": torch.zeros(size) for i in range(count)}
subscriber = weights.Subscriber("policy", mine, engine=engine, place=weights.Place(name), patience_s=1.5, flip=flip)
"""
UPDATE = """
step = subscriber.update(timeout=60).step
assert all(bool(tensor.eq(step).all()) for tensor in mine.values()), step
result = step
"""
BYTES = "result = subscriber.progress.bytes_done if subscriber.progress else 0"
TRAINER = """
import torch, torch_mooncake as tm
from torch_mooncake import weights
torch.set_num_threads(1)
tm.init()
engine = tm.Engine(transports=("tcp",), name="trainer", host_id="trainer")
mine = {f"w{i}": torch.full((size,), 1.0) for i in range(count)}
publisher = weights.Publisher("policy", mine, engine=engine, place=weights.Place("trainer"), in_place=True)
publisher.publish(step=1)
publisher.fence()
for tensor in mine.values():
    tensor.fill_(2.0)
publisher.publish(step=2)
"""
END = "subscriber.close(); engine.close(); tm.close()"


@pytest.fixture
def trainer(opened: Callable[[Any], Any]) -> tuple[Publisher, dict[str, torch.Tensor]]:
    mine = {f"w{i}": torch.zeros(SIZE) for i in range(COUNT)}
    engine = opened(tm.Engine(transports=("tcp",), name="trainer", host_id="trainer"))
    publisher = Publisher("policy", mine, engine=engine, place=Place("trainer"), in_place=True, patience_s=2)
    return opened(publisher), mine


def publish(publisher: Publisher, mine: dict[str, torch.Tensor], step: int) -> None:
    for tensor in mine.values():
        tensor.fill_(step)
    publisher.publish(step=step)


def followers(child: Callable[..., Child], rates: list[int], flip: str = "copy") -> list[Child]:
    workers = [child() for _ in rates]
    for i, (worker, rate) in enumerate(zip(workers, rates, strict=True)):
        worker(SUBSCRIBER, name=f"w{i}", rate=rate, count=COUNT, size=SIZE, flip=flip)
    return workers


def test_a_receiver_that_stands_still_is_given_up(child: Callable[..., Child], trainer):
    """The trainer's fence ends after its patience, the other one is not held up, and the one that stood still takes a
    later version; it is not waited for again while it stands."""
    publisher, mine = trainer
    workers = followers(child, [0, RATE])  # the last of the chain stands still
    publish(publisher, mine, 1)
    assert [worker(UPDATE) for worker in workers] == [1, 1]
    assert list(publisher.fence(timeout=30).values()) == [True, True]
    publish(publisher, mine, 2)
    assert eventually(lambda: 0 < workers[1](BYTES) < 16 << 20)
    with stopped(workers[1].pid):
        assert workers[0](UPDATE) == 2
        began = time.monotonic()
        assert sorted(publisher.fence(timeout=60).values()) == [False, True]
        assert time.monotonic() - began < 30
        publish(publisher, mine, 3)
        assert workers[0](UPDATE) == 3
        began = time.monotonic()
        assert sorted(publisher.fence(timeout=60).values()) == [False, True]
        assert time.monotonic() - began < 30
    publish(publisher, mine, 4)
    assert workers[0](UPDATE) == 4
    workers[1]("while subscriber.version < 4:\n    try:\n        subscriber.update(timeout=60)\n"
               "    except tm.PeerLost:\n        pass\n"
               "assert all(bool(tensor.eq(4).all()) for tensor in mine.values())")  # fmt: skip
    assert list(publisher.fence(timeout=30).values()) == [True, True]
    for worker in workers:
        worker(END)


@pytest.mark.parametrize("flip", ["copy", pytest.param("direct", marks=pytest.mark.slow)])
def test_a_killed_receiver_is_not_waited_for(child: Callable[..., Child], trainer, flip: str):
    publisher, mine = trainer
    workers = followers(child, [RATE, RATE], flip)
    publish(publisher, mine, 1)
    for worker in workers:
        worker.start(UPDATE)
    assert [worker.result() for worker in workers] == [1, 1]
    publisher.fence(timeout=30)
    publish(publisher, mine, 2)
    for worker in workers:
        worker.start(UPDATE)
    assert eventually(
        lambda: any(p is not None and p.version == 2 and p.bytes_done for p in publisher.progress().values())
    )
    workers[0].kill()
    assert workers[1].result() == 2
    found = publisher.fence(timeout=60)
    assert sorted(found.values()) == [False, True]
    publish(publisher, mine, 3)
    assert workers[1](UPDATE) == 3
    assert list(publisher.fence(timeout=30).values()) == [True]
    workers[1](END)


def test_a_trainer_killed_while_it_waits_for_its_fence(child: Callable[..., Child], opened):
    killed = child()
    engine = opened(tm.Engine(transports=("tcp",), name="w0", host_id="w0", foreground_rate=RATE))
    mine = {f"w{i}": torch.zeros(SIZE) for i in range(COUNT)}
    subscriber = opened(Subscriber("policy", mine, engine=engine, place=Place("w0")))
    killed(TRAINER, count=COUNT, size=SIZE)
    assert subscriber.update(timeout=60).step == 1
    assert eventually(lambda: subscriber.progress.version == 2 and subscriber.progress.bytes_done)
    killed.start("publisher.fence(timeout=60)")
    killed.kill()
    with pytest.raises(tm.PeerLost, match="version 2 of the weights cannot come from trainer"):
        subscriber.update(timeout=60)
    assert all(bool(tensor.eq(1).all()) for tensor in mine.values())
    assert subscriber.version == 1


def test_subscribers_come_and_go_while_it_publishes(opened):
    """Each sees whole versions, later ones later, and ends with the last; the trainer's tensors change between."""
    mine = {f"w{i}": torch.zeros(50_000 + i) for i in range(4)}
    publisher = opened(Publisher("policy", mine, in_place=True))
    last, failures = 60, []

    def comes_and_goes(flip: str) -> None:
        try:
            seen = 0
            while seen < last:
                theirs = {name: torch.zeros_like(tensor) for name, tensor in mine.items()}
                with Subscriber("policy", theirs, flip=flip) as subscriber:
                    for _ in range(2):
                        if seen < last:
                            step = subscriber.update(timeout=60).step
                            assert step >= seen, (step, seen)
                            assert all(bool(tensor.eq(step).all()) for tensor in theirs.values()), step
                            seen = step
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=comes_and_goes, args=(flip,)) for flip in ("copy", "swap", "direct")]
    for thread in threads:
        thread.start()
    for step in range(1, last + 1):
        publish(publisher, mine, step)
        if step < last:
            publisher.fence(timeout=20)
            for tensor in mine.values():
                tensor.fill_(-1)
    for thread in threads:
        thread.join()
    assert not failures, failures
