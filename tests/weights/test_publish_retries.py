"""A version that not all trainer ranks published: what was ready for it is never part of a later one."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from processes import eventually

import torch_mooncake as tm
from torch_mooncake.weights import Layout, Part, Publisher, Rule, Split, Subscriber
from torch_mooncake.weights.board import RESTARTS, VERSION, Board


class Rank:
    def __init__(self, opened: Callable[[Any], Any], at: int, ranks: int, **options: Any) -> None:
        layout = Layout([Rule("w", [Part("w", split=[Split("tp", 0)])])], {"tp": (at, ranks)})
        self.tensors = {"w": torch.zeros(1000)}
        self.publisher = opened(Publisher("policy", self.tensors, layout=layout, rank=at, world=ranks, **options))
        self.error: tm.Error | None = None

    def begin(self, value: float, timeout: float = 30) -> threading.Thread:
        self.tensors["w"].fill_(value)
        self.error = None
        thread = threading.Thread(target=self._publish, args=(timeout,))
        thread.start()
        return thread

    def _publish(self, timeout: float) -> None:
        try:
            self.publisher.publish(timeout=timeout)
        except tm.Error as error:
            self.error = error


def all_of(ranks: list[Rank], value: float, timeout: float = 30) -> list[tm.Error | None]:
    for thread in [rank.begin(value, timeout) for rank in ranks]:
        thread.join()
    return [rank.error for rank in ranks]


@pytest.fixture(params=[False, True], ids=["slots", "in_place"])
def ranks(opened, request: pytest.FixtureRequest) -> list[Rank]:
    return [Rank(opened, at, 3, in_place=request.param) for at in range(3)]


def test_what_was_ready_for_a_failed_call_is_not_taken(opened, ranks: list[Rank]):
    failed = all_of(ranks[:2], 1, 0.3)
    assert [type(error) for error in failed] == [tm.DeadlineExceeded] * 2
    assert all((rank.publisher._memory.board.header[:, VERSION] == 0).all() for rank in ranks)
    room = ranks[0].publisher._room
    threads = [ranks[0].begin(2), ranks[2].begin(2)]
    assert eventually(lambda: (go := room.go()) is not None and room.ready(3, go.attempt)[1] is not None)
    assert room.ready(3, room.go().attempt)[0] is None
    assert room.head() is None
    for thread in [*threads, ranks[1].begin(2)]:
        thread.join()
    assert [rank.error for rank in ranks] == [None] * 3
    worker = {"w": torch.zeros(3000)}
    assert opened(Subscriber("policy", worker)).update(timeout=30).serial == 1
    assert bool(worker["w"].eq(2).all())


def test_a_call_that_rank_0_gave_up_ends_at_once_elsewhere(ranks: list[Rank]):
    room = ranks[0].publisher._room
    first = ranks[1].begin(1, 600)
    zeroth = ranks[0].begin(1, 0.5)
    zeroth.join()
    first.join(60)
    assert not first.is_alive()
    assert isinstance(ranks[1].error, tm.DeadlineExceeded)
    assert room.go() is None
    assert all_of(ranks, 2) == [None] * 3


def test_a_rank_that_gave_up_what_was_published_follows(opened, ranks: list[Rank], monkeypatch: pytest.MonkeyPatch):
    with monkeypatch.context() as late:

        def gives_up(*_: Any) -> Any:
            raise tm.DeadlineExceeded("it had no more time")

        late.setattr(ranks[1].publisher, "_await_flip", gives_up)
        failed = all_of(ranks, 1)
    assert [error is None for error in failed] == [True, False, True]
    assert ranks[0].publisher.version == 1
    assert 1 not in ranks[1].publisher._memory.board.header[:, VERSION]  # what it has then is not of version 1
    for rank in (ranks[0], ranks[2]):
        if rank.publisher._own is not None:
            rank.publisher._sums.withdraw(0)  # as fence() does
    assert all_of(ranks, 2) == [None] * 3
    assert [rank.publisher.version for rank in ranks] == [2] * 3
    worker = {"w": torch.zeros(3000)}
    assert opened(Subscriber("policy", worker)).update(timeout=30).serial == 2
    assert bool(worker["w"].eq(2).all())


def test_a_rank_that_came_again_before_the_flip_is_the_one_that_counts(opened):
    zeroth, before, last = Rank(opened, 0, 3), Rank(opened, 1, 3), Rank(opened, 2, 3)
    room = zeroth.publisher._room
    thread = zeroth.begin(1)
    assert eventually(lambda: room.go() is not None)
    room.say_ready(1, before.publisher._member.uid, room.go().attempt)  # and its process ends
    before.publisher._room.leave(before.publisher._member.uid)
    again = Rank(opened, 1, 3)
    for each in (again.begin(1), last.begin(1), thread):
        each.join()
    assert [rank.error for rank in (zeroth, again, last)] == [None] * 3
    assert room.head().sources == tuple(rank.publisher._member.uid for rank in (zeroth, again, last))


def test_the_same_number_again_is_noticed():
    board = Board()
    seen = []
    for _ in range(3):
        board.begin(1)
        board.announce(1, 7)
        seen.append(int(board.header[1, RESTARTS]))
        board.restart(1)
    assert seen == sorted(set(seen))
