"""Who takes part changes: a new plan then, the one that there is while nothing changes, and the same for everybody."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import eventually

import torch_mooncake as tm
from torch_mooncake.weights import Place, Publisher, Subscriber, members
from torch_mooncake.weights.plan import PLANNER


def test_a_plan_for_each_set_of_members(opened: Callable[[Any], Any]):
    trainer = {f"w{i}": torch.zeros(1000 + i) for i in range(4)}
    publisher = opened(Publisher("policy", trainer, place=Place("trainer")))
    workers: list[dict[str, torch.Tensor]] = []

    def join() -> Subscriber:
        workers.append({name: torch.full_like(tensor, -1) for name, tensor in trainer.items()})
        return opened(Subscriber("policy", workers[-1], place=Place(f"w{len(workers)}")))

    step = 0

    def update(*subscribers: Subscriber) -> int:
        """Plans that it took."""
        nonlocal step
        step, before = step + 1, PLANNER.made
        for tensor in trainer.values():
            tensor.fill_(step)
        publisher.publish(step=step)
        for subscriber in subscribers:
            while subscriber.update(timeout=20).step < step:  # it came while the version before was current
                pass
        assert eventually(lambda: list(publisher.delivered().values()) == [True] * len(subscribers))
        return PLANNER.made - before

    first, second = join(), join()
    assert update(first, second) == 1  # all of them, in this process, by one
    assert update(first, second) == 0
    assert update(first, second) == 0
    third = join()
    third.update(timeout=20)  # what there is, from those who have it: by a plan of its own
    assert update(first, second, third) == 1
    second.close()
    assert update(first, third) == 1
    assert update(first, third) == 0
    fourth = join()
    fourth.update(timeout=20)
    assert update(first, third, fourth) == 1
    for worker in (workers[0], workers[2], workers[3]):
        assert all(bool(tensor.eq(step).all()) for tensor in worker.values())


def test_who_does_not_answer_is_not_dialled_at_each_version(opened, monkeypatch: pytest.MonkeyPatch):
    trainer = {"w": torch.ones(1000)}
    publisher = opened(Publisher("policy", trainer))
    subscriber = opened(Subscriber("policy", {"w": torch.zeros(1000)}))
    dialled: list[str] = []
    dial = members.discovery.dial

    def dials(engine: tm.Engine, record: Any, *rest: Any) -> Any:
        dialled.append(record.name)
        if engine is publisher._engine:
            raise tm.DeadlineExceeded("it does not answer")
        return dial(engine, record, *rest)

    monkeypatch.setattr(members.discovery, "dial", dials)
    for _ in range(3):
        publisher.publish()
    name = subscriber._member.record.name
    assert dialled.count(name) == 1
    (failure,) = publisher._links._failures.values()
    publisher._links._failures[subscriber._member.uid] = members.Failure(failure.error, failure.pause_s, 0)
    publisher.publish()
    assert dialled.count(name) == 2
    (again,) = publisher._links._failures.values()
    assert again.pause_s == 2 * failure.pause_s
    publisher._links._failures[subscriber._member.uid] = members.Failure(again.error, again.pause_s, 0)
    monkeypatch.undo()
    publisher.publish()
    assert publisher._links._failures == {}
    assert publisher._room.head().targets == (subscriber._member.uid,)


def test_what_the_pool_has_lost_is_entered_again(opened):
    trainer = {"w": torch.ones(1000)}
    publisher = opened(Publisher("policy", trainer))
    publisher.publish()
    keys = [key for key in tm.keys("weights.direct/policy/") if "/member/" in key or "/layout/" in key]
    assert len(keys) == 2
    assert {tm.info(key).pin for key in tm.keys("weights.direct/policy/")} == {"hard"}
    layout = next(key for key in keys if "/layout/" in key)
    tm.delete([layout])
    members._MANIFESTS.clear()
    stranger = members.Room("policy", tm)  # of a process that has not looked at it yet
    assert stranger.member(publisher._member.uid) is None
    tm.delete(keys)
    publisher.publish()
    assert stranger.member(publisher._member.uid) is not None
    worker = {"w": torch.zeros(1000)}
    assert opened(Subscriber("policy", worker)).update(timeout=20).serial == 2
    assert bool(worker["w"].eq(1).all())


def test_who_has_left_is_forgotten(opened):
    trainer = {"w": torch.ones(1000)}
    publisher = opened(Publisher("policy", trainer))
    stays = opened(Subscriber("policy", {"w": torch.zeros(1000)}))
    for _ in range(3):
        with Subscriber("policy", {"w": torch.zeros(1000)}) as other:
            publisher.publish()
            for subscriber in (stays, other):
                while subscriber.version < publisher.version:
                    subscriber.update(timeout=20)
    publisher.publish()
    stays.update(timeout=20)
    uids = {publisher._member.uid, stays._member.uid}
    assert publisher._room._known.keys() == stays._room._known.keys() == uids
    assert publisher._links._open.keys() == publisher._fits.keys() == {stays._member.uid}
    assert stays._bringer.links._open.keys() == {publisher._member.uid}


SAME = """
import hashlib, torch
from torch_mooncake.weights import Layout, Part, Place, Rule, Split, describe
from torch_mooncake.weights.plan import plan
def held(at, ranks):
    layout = Layout([Rule("w{i}", [Part("w{i}", split=[Split("tp", 0)])])], {"tp": (at, ranks)})
    return describe({f"w{i}": torch.empty(240 // ranks, 4000 + i) for i in range(5)}, layout)
sources, targets = [held(i, 4) for i in range(4)] * 2, [held(i, 3) for i in range(3)] * 2
made = plan(sources, targets, [Place(f"host{i // 2}", i % 2) for i in range(14)])
state = hashlib.sha256(repr(made.routes).encode())
for name in ("chunk_route", "chunk_nbytes", "piece_chunk", "piece_whole", "piece_start", "piece_size"):
    state.update(getattr(made, name).tobytes())
print(made.digest, state.hexdigest())
"""


def test_everybody_makes_the_same_plan(capsys: pytest.CaptureFixture[str]):
    """Whatever order their sets and dictionaries have."""
    exec(SAME, {})
    here = capsys.readouterr().out
    environment = {**os.environ, "PYTHONHASHSEED": "7", "PYTHONPATH": str(Path(tm.__file__).parents[1])}
    command = [sys.executable, "-c", SAME]
    assert subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout == here
