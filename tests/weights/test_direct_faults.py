"""Processes that die or stand still while a version is on its way. Rates are limited, so that it is for a while."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch
from processes import Child, eventually

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
subscriber = weights.Subscriber("policy", mine, engine=engine, place=weights.Place(name), patience_s=1.5)
"""
DONE = "result = subscriber.progress.bytes_done if subscriber.progress else 0"
UPDATE = """
step = subscriber.update(timeout=60).step
assert all(bool(tensor.eq(step).all()) for tensor in mine.values()), step
result = step
"""
# One that stood still may find first that its deadlines have passed.
UPDATE_TO = """
while (subscriber.step or 0) < last:
    try:
        subscriber.update(timeout=60)
    except tm.PeerLost as error:
        assert "version 2" in str(error), error
assert all(bool(tensor.eq(last).all()) for tensor in mine.values())
"""
TRAINER = """
import torch, torch_mooncake as tm
from torch_mooncake import weights
torch.set_num_threads(1)
tm.init()
engine = tm.Engine(transports=("tcp",), name="trainer", host_id="trainer")
mine = {f"w{i}": torch.zeros(size) for i in range(count)}
publisher = weights.Publisher("policy", mine, engine=engine, place=weights.Place("trainer"))
"""
PUBLISH = """
for tensor in mine.values():
    tensor.fill_(step)
publisher.publish(step=step)
"""


def tensors() -> dict[str, torch.Tensor]:
    return {f"w{i}": torch.zeros(SIZE) for i in range(COUNT)}


def uniform(of: dict[str, torch.Tensor], value: float) -> bool:
    return all(bool(tensor.eq(value).all()) for tensor in of.values())


def publisher_here(opened: Callable[[Any], Any]) -> tuple[Publisher, dict[str, torch.Tensor]]:
    trainer = tensors()
    engine = opened(tm.Engine(transports=("tcp",), name="trainer", host_id="trainer"))
    return opened(Publisher("policy", trainer, engine=engine, place=Place("trainer"))), trainer


def publish(publisher: Publisher, trainer: dict[str, torch.Tensor], step: int) -> float:
    for tensor in trainer.values():
        tensor.fill_(step)
    return publisher.publish(step=step).seconds


# The chain is trainer, w0, w1, w2.
@pytest.mark.parametrize(
    ("victim", "sign"),
    [
        pytest.param(0, signal.SIGKILL, id="relay-killed"),
        pytest.param(2, signal.SIGKILL, id="last-killed", marks=pytest.mark.slow),
        pytest.param(0, signal.SIGSTOP, id="relay-stopped", marks=pytest.mark.slow),
    ],
)
def test_the_others_get_it(child: Callable[..., Child], opened, victim: int, sign: signal.Signals):
    publisher, trainer = publisher_here(opened)
    workers = [child() for _ in range(3)]
    for i, worker in enumerate(workers):
        worker(SUBSCRIBER, name=f"w{i}", rate=RATE, count=COUNT, size=SIZE)
    publish(publisher, trainer, 1)
    for worker in workers:
        assert worker(UPDATE) == 1
    publish(publisher, trainer, 2)  # does not wait for anybody, dead or alive
    assert eventually(lambda: workers[2](DONE) not in (0, 16 << 20))
    workers[victim].kill(sign)
    others = [worker for i, worker in enumerate(workers) if i != victim]
    for worker in others:
        assert worker(UPDATE) == 2
    if sign == signal.SIGSTOP:
        os.kill(workers[victim].pid, signal.SIGCONT)
        others = workers
    publish(publisher, trainer, 3)
    for worker in others:
        worker(UPDATE_TO, last=3)
    assert eventually(lambda: len(publisher.delivered()) == len(others) and all(publisher.delivered().values()))
    for worker in others:
        worker("subscriber.close(); engine.close(); tm.close()")


def test_a_killed_trainer_leaves_the_old_version_and_a_new_one_goes_on(child: Callable[..., Child], opened):
    trainer = child()
    trainer(TRAINER, count=COUNT, size=SIZE)
    engine = opened(tm.Engine(transports=("tcp",), name="w0", host_id="w0", foreground_rate=RATE))
    mine = tensors()
    subscriber = opened(Subscriber("policy", mine, engine=engine, place=Place("w0")))
    trainer(PUBLISH, step=1)
    assert subscriber.update(timeout=60).step == 1
    trainer(PUBLISH, step=2)
    assert eventually(lambda: subscriber.progress.version == 2 and subscriber.progress.bytes_done)
    trainer.kill()
    with pytest.raises(tm.PeerLost, match="version 2 of the weights cannot come from trainer"):
        subscriber.update(timeout=60)
    assert uniform(mine, 1)
    assert subscriber.version == 1
    heir = child()
    heir(TRAINER, count=COUNT, size=SIZE)
    heir(PUBLISH, step=3)

    def updated() -> bool:
        try:
            return subscriber.update(timeout=5).step == 3
        except (tm.PeerLost, tm.DeadlineExceeded):  # of the attempt before
            return False

    assert eventually(updated, timeout=60)
    assert uniform(mine, 3)
    heir("publisher.close(); engine.close(); tm.close()")


def test_a_slow_receiver_at_the_end_slows_nobody(child: Callable[..., Child], opened):
    publisher, trainer = publisher_here(opened)
    workers = [child() for _ in range(3)]
    for i, worker in enumerate(workers):
        worker(SUBSCRIBER, name=f"w{i}", rate=RATE // 8 if i == 2 else 4 * RATE, count=COUNT, size=SIZE)
    publish(publisher, trainer, 1)
    assert workers[0](UPDATE) == workers[1](UPDATE) == 1
    assert sum(publisher.delivered().values()) == 2  # the third has most of its 8 seconds to go
    assert workers[2](UPDATE) == 1
    for worker in workers:
        worker("subscriber.close(); engine.close(); tm.close()")


def test_progress_is_told_on_both_sides(opened):
    publisher, trainer = publisher_here(opened)
    engine = opened(tm.Engine(transports=("tcp",), name="w0", host_id="w0", foreground_rate=RATE))
    subscriber = opened(Subscriber("policy", tensors(), engine=engine, place=Place("w0")))
    assert subscriber.progress is None
    publish(publisher, trainer, 1)
    assert eventually(lambda: subscriber.progress is not None and subscriber.progress.bytes_done)
    assert list(publisher.delivered().values()) == [False]
    assert subscriber.progress.nbytes == COUNT * SIZE * 4
    assert 0 < subscriber.progress.eta_s < 60
    (seen,) = publisher.progress().values()
    assert (seen.version, seen.nbytes) == (1, COUNT * SIZE * 4)
    assert 0 < seen.bytes_done < seen.nbytes
    assert 0 < seen.eta_s < 60
    subscriber.update(timeout=60)
    assert subscriber.progress.bytes_done == subscriber.progress.nbytes
    (seen,) = publisher.progress().values()
    assert (seen.bytes_done, seen.eta_s) == (seen.nbytes, 0)
    assert list(publisher.delivered().values()) == [True]
