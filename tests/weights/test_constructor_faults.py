"""A publisher or subscriber that cannot be made leaves nothing: no region, session or thread, of its own engine or of
one that it was given."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_direct import model

import torch_mooncake as tm
from torch_mooncake.transfer import Engine
from torch_mooncake.weights import Publisher, Subscriber
from torch_mooncake.weights.members import Room

MAKES: dict[str, Callable[[Any], Any]] = {
    "publisher": lambda engine: Publisher("policy", model(1), engine=engine),
    "in place": lambda engine: Publisher("policy", model(1), in_place=True, engine=engine),
    **{
        flip: lambda engine, flip=flip: Subscriber("policy", model(1), flip=flip, engine=engine)
        for flip in ("copy", "swap", "direct", "view")
    },
}


@pytest.mark.parametrize("which", MAKES)
@pytest.mark.parametrize("shared", [True, False], ids=["given", "own"])
def test_nothing_is_left(which: str, shared: bool, opened: Any, monkeypatch: pytest.MonkeyPatch):
    made = []
    create = Engine.__init__

    def remembers(engine: Engine, *args: Any, **more: Any) -> None:
        create(engine, *args, **more)
        made.append(engine)

    engine = opened(Engine(name="theirs")) if shared else None
    threads = threading.active_count()
    monkeypatch.setattr(Engine, "__init__", remembers)

    def away(*_: Any, **__: Any) -> None:
        raise tm.PoolUnavailable("as the test wants it")

    monkeypatch.setattr(Room, "enter", away)
    with pytest.raises(tm.PoolUnavailable, match="as the test wants it"):
        MAKES[which](engine)
    assert threading.active_count() == threads
    if shared:
        assert made == []
        counters = engine.stats()
        assert (counters["regions"], counters["quarantined_regions"], counters["sessions"]) == (0, 0, 0)
    else:
        (own,) = made
        with pytest.raises(tm.Closed):
            own.register(torch.zeros(1))
    monkeypatch.undo()
    opened(MAKES[which](engine))  # and can be made when the pool is back
