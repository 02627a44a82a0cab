"""Staging memory, when versions are given up on the way and when it is full."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

import torch_mooncake as tm
from torch_mooncake.weights import Layout, Part, Publisher, Rule, Subscriber, bring
from torch_mooncake.weights import subscriber as subscriber_module
from torch_mooncake.weights.fetch import Fetch
from torch_mooncake.weights.staging import Staging

CAST = Layout([Rule("{name}", [Part("{name}")], dtype="bfloat16")])


def tensors(value: float) -> dict[str, torch.Tensor]:
    return {f"w{i}": torch.full((1 << 20,), value) for i in range(4)}


def test_a_version_that_is_given_up_leaves_its_blocks(opened, monkeypatch: pytest.MonkeyPatch):
    publisher = opened(Publisher("policy", tensors(1), layout=CAST))
    worker = tensors(0)
    subscriber = opened(Subscriber("policy", worker, layout=CAST, flip="direct", staging=4 << 20))
    held: list[int] = []
    take = Fetch._take

    def taken(fetch: Fetch, upstream: Any) -> bool:
        moved = take(fetch, upstream)
        if fetch._blocks:
            held.append(len(fetch._blocks))
        return moved

    monkeypatch.setattr(Fetch, "_take", taken)
    publisher.publish()
    head = subscriber._room.head()
    for _ in range(3):  # each with all of the staging memory
        held.clear()
        with pytest.raises(tm.Cancelled):
            subscriber._bringer.bring(head, 0, lambda: bool(held))
        assert held
        assert subscriber._staging._used == 0
    assert subscriber.update(timeout=20).nbytes == 8 << 20
    assert all(bool(tensor.eq(1).all()) for tensor in worker.values())


def test_a_relay_is_not_lost_because_our_staging_is_full(opened, monkeypatch: pytest.MonkeyPatch):
    """Of a subscriber whose tensors are staged as if they were on a device, behind one with the same layout."""
    publisher = opened(Publisher("policy", tensors(1)))
    relay = opened(Subscriber("policy", tensors(0)))
    worker = tensors(0)
    with monkeypatch.context() as staged:
        staged.setattr(subscriber_module, "not_in_place", lambda here, _: frozenset(here))
        last = opened(Subscriber("policy", worker, flip="direct", staging=8 << 20, patience_s=0.1))
    made: list[Fetch] = []

    class Kept(Fetch):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            made.append(self)

    publisher.publish()
    relay.update(timeout=20)
    take, began = Staging.take, time.monotonic()
    monkeypatch.setattr(Staging, "take", lambda self: None if time.monotonic() < began + 1 else take(self))
    monkeypatch.setattr(bring, "Fetch", Kept)
    assert last.update(timeout=20).serial == 1
    assert [fetch._wiring.behind for fetch in made] == [True]  # the relay is the one before it
    assert [fetch.lost for fetch in made] == [[]]
    assert all(bool(tensor.eq(1).all()) for tensor in worker.values())
