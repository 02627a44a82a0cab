"""How long an update takes, and what it leaves of a model that has changed meanwhile."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from processes import eventually
from test_direct import model, same

import torch_mooncake as tm
from torch_mooncake import weights
from torch_mooncake.weights import Publisher, Subscriber
from torch_mooncake.weights.fetch import Fetch


def test_a_direct_update_that_has_begun_ends_in_time(opened, monkeypatch: pytest.MonkeyPatch):
    trainer, worker = model(1), model(2)
    publisher = opened(Publisher("policy", trainer))
    subscriber = opened(Subscriber("policy", worker, flip="direct"))
    publisher.publish()
    with monkeypatch.context() as stuck:
        stuck.setattr(Fetch, "_prove", lambda *_: None)
        with pytest.raises(weights.Torn, match="the model is torn: no version of weights") as found:
            subscriber.update(timeout=0.5)
        assert isinstance(found.value.__cause__, tm.DeadlineExceeded)
        assert subscriber.torn
    assert subscriber.update(timeout=20).serial == 1
    assert not subscriber.torn
    assert same(worker, trainer)


def test_try_update_does_not_wait_for_what_cannot_be_had(opened, monkeypatch: pytest.MonkeyPatch):
    trainer, worker = model(1), model(2)
    publisher = opened(Publisher("policy", trainer, in_place=True))
    subscriber = opened(Subscriber("policy", worker, flip="direct"))
    assert subscriber.try_update() is None
    publisher.publish()
    publisher._sums.withdraw(0)  # as fence() does when it has waited for long enough
    asked: list[int] = []
    take = subscriber._take

    def counted(head: Any, *rest: Any) -> Any:
        asked.append(head.version)
        return take(head, *rest)

    monkeypatch.setattr(subscriber, "_take", counted)
    assert subscriber.try_update() is None
    assert asked == [1]
    publisher.publish()
    update = subscriber.try_update()
    assert update is not None
    assert update.serial == 2
    assert same(worker, trainer)


@pytest.mark.parametrize("flip", ["copy", "swap"])
def test_a_model_with_another_shape_by_now_stays_as_it_is(opened, flip: Any):
    trainer, worker = model(1), model(2)
    publisher = opened(Publisher("policy", trainer))
    subscriber = opened(Subscriber("policy", worker, flip=flip))
    before = {name: tensor.clone() for name, tensor in worker.items()}
    other = worker["w3"]
    worker["w3"] = torch.zeros(5)
    publisher.publish()
    with pytest.raises(tm.LayoutMismatch, match=r"w3: \[5\], and \[10003\] when the layout was made"):
        subscriber.update(timeout=20)
    worker["w3"] = other
    assert same(worker, before)
    assert subscriber.update(timeout=20).serial == 1
    assert same(worker, trainer)


@pytest.mark.parametrize("error", [tm.PoolUnavailable, tm.DeadlineExceeded])
def test_a_pool_that_is_away_for_a_while(opened, monkeypatch: pytest.MonkeyPatch, error: Any):
    trainer, worker = model(1), model(2)
    publisher = opened(Publisher("policy", trainer))
    subscriber = opened(Subscriber("policy", worker))
    told: list[int] = []
    subscriber._on_version = told.append

    def away(*_: Any) -> Any:
        raise error("the pool is away")

    with monkeypatch.context() as outage:
        outage.setattr(subscriber._room, "await_head", away)
        with pytest.raises(error, match="the pool is away"):
            subscriber.update(timeout=20)
    publisher.publish()
    while subscriber.version == 0:
        try:
            subscriber.update(timeout=20)
        except error:  # of the outage
            pass
    assert same(worker, trainer)
    assert eventually(lambda: told == [1])
