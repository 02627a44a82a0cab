"""Tensors of another process's slot: no copies, and no slot is overwritten while somebody views it. And publishers
that are faster than their subscribers."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable

import pytest
import torch
from processes import Child, eventually

import torch_mooncake as tm
from torch_mooncake.weights import Layout, Part, Publisher, Rule, Split, Subscriber
from torch_mooncake.weights.board import MAX_SLOTS

VIEWER = """
import gc, torch, torch_mooncake as tm
from torch_mooncake import weights
torch.set_num_threads(1)
tm.init()
mine = {f"w{i}": torch.zeros(50_000 + i) for i in range(count)}
subscriber = weights.Subscriber("policy", mine, flip="view")
"""
UPDATE = "result = subscriber.update(timeout=30).step"
VALUES = "result = sorted({value for tensor in mine.values() for value in tensor.unique().tolist()})"
LIES_IN = """
at = mine["w0"].data_ptr()
with open("/proc/self/maps") as maps:
    result = [line for line in maps if int(line.split("-")[0], 16) <= at < int(line.split("-")[1].split()[0], 16)]
"""


def model(count: int = 4) -> dict[str, torch.Tensor]:
    return {f"w{i}": torch.zeros(50_000 + i) for i in range(count)}


def publish(publisher: Publisher, trainer: dict[str, torch.Tensor], step: int) -> None:
    for tensor in trainer.values():
        tensor.fill_(step)
    publisher.publish(step=step)


def test_viewers_have_the_trainers_memory(child: Callable[..., Child], opened):
    trainer, mine = model(), model()
    publisher = opened(Publisher("policy", trainer))
    viewer = child()
    viewer(VIEWER, count=4)
    here = opened(Subscriber("policy", mine, flip="view"))  # of this process: no map is needed
    for step in range(1, 6):
        publish(publisher, trainer, step)
        assert viewer(UPDATE) == here.update(timeout=20).step == step
        assert viewer(VALUES) == [step]
        slot = int(publisher._memory.board.header[:, 0].argmax())
        assert mine["w0"].data_ptr() == publisher._memory.views(slot)["w0"].data_ptr()
        assert all(publisher.delivered().values())
    assert len(publisher._memory.slots) == 2
    (line,) = viewer(LIES_IN)
    assert "memfd" in line
    assert " r--s " in line
    here.close()
    publish(publisher, trainer, 9)
    assert bool(mine["w1"].eq(5).all())
    viewer("subscriber.close(); tm.close()")
    assert viewer(VALUES) == [5]


def test_a_slot_that_is_viewed_is_not_overwritten(child: Callable[..., Child], opened):
    """Viewers that stay behind: more slots, up to a number; then an error; a dead viewer's slot is free again."""
    trainer = model()
    publisher = opened(Publisher("policy", trainer, patience_s=0.3))
    viewers = [child() for _ in range(MAX_SLOTS)]
    for viewer in viewers:
        viewer(VIEWER, count=4)
    for step, viewer in enumerate(viewers, 1):
        publish(publisher, trainer, step)
        assert viewer(UPDATE) == step
    assert len(publisher._memory.slots) == MAX_SLOTS
    with pytest.raises(tm.Busy, match="all 4 slots of 'policy' are being viewed"):
        publish(publisher, trainer, 9)
    assert [viewer(VALUES) for viewer in viewers] == [[1], [2], [3], [4]]
    viewers[1].kill()
    assert eventually(lambda: publisher._memory.take(1, 0.1))
    publish(publisher, trainer, 9)
    assert [viewers[i](VALUES) for i in (0, 2, 3)] == [[1], [3], [4]]
    assert viewers[0](UPDATE) == 9
    assert viewers[0](VALUES) == [9]
    publish(publisher, trainer, 10)  # into the slot that the first has left
    assert viewers[2](UPDATE) == 10
    for i in (0, 2, 3):
        viewers[i]("subscriber.close(); tm.close()")


@pytest.mark.slow
def test_a_viewer_that_stands_still_keeps_its_slot_and_nobody_waiting(child: Callable[..., Child], opened):
    trainer, mine = model(), model()
    publisher = opened(Publisher("policy", trainer, patience_s=0.3))
    viewer = child()
    viewer(VIEWER, count=4)
    publish(publisher, trainer, 1)
    assert viewer(UPDATE) == 1
    other = opened(Subscriber("policy", mine, flip="view"))
    os.kill(viewer.process.pid, signal.SIGSTOP)
    try:
        for step in range(2, 8):
            publish(publisher, trainer, step)
            assert other.update(timeout=20).step == step
            assert all(bool(tensor.eq(step).all()) for tensor in mine.values())
        assert len(publisher._memory.slots) <= MAX_SLOTS
        other.close()
        began = time.monotonic()
        with pytest.raises(tm.Busy, match="can still be touched by subscriber of policy"):
            publisher.close()
        assert time.monotonic() - began < 60
    finally:
        os.kill(viewer.process.pid, signal.SIGCONT)
    assert viewer(VALUES) == [1]  # its memory is its own until it ends


def test_a_subscriber_of_the_host_can_be_viewed(child: Callable[..., Child], opened):
    """The trainer is on another host: the first receiver here has the slots that the others view."""
    engine = opened(tm.Engine(transports=("tcp",), name="trainer", host_id="elsewhere"))
    trainer = model()
    publisher = opened(Publisher("policy", trainer, engine=engine))
    viewer = child()
    viewer(VIEWER, count=4)
    first = opened(Subscriber("policy", model(), flip="swap"))
    for step in range(1, 8):
        publish(publisher, trainer, step)
        assert first.update(timeout=20).step == step
        if step in (1, 2, 7):  # it stays behind meanwhile
            assert viewer(UPDATE) == step
        assert viewer(VALUES) == [max(seen for seen in (1, 2, 7) if seen <= step)]
    assert len(first._memory.slots) == 3
    viewer("subscriber.close(); tm.close()")


def test_shards_of_rows_are_viewed_and_columns_are_not(opened):
    trainer = {"w": torch.arange(24.0 * 6).view(24, 6)}
    publisher = opened(Publisher("policy", trainer))
    publisher.publish()

    def part(dim: int) -> tuple[dict[str, torch.Tensor], Layout]:
        shape = (12, 6) if dim == 0 else (24, 3)
        layout = Layout([Rule("w", [Part("w", (24, 6), [Split("tp", dim)])])], {"tp": (1, 2)})
        return {"w": torch.zeros(shape)}, layout

    rows, layout = part(0)
    opened(Subscriber("policy", rows, layout=layout, flip="view")).update(timeout=20)
    assert torch.equal(rows["w"], trainer["w"][12:])
    columns, layout = part(1)
    with pytest.raises(tm.Unsupported, match="w: does not lie anywhere on this host as it is here"):
        opened(Subscriber("policy", columns, layout=layout, flip="view")).update(timeout=20)
    assert bool(columns["w"].eq(0).all())
    wrong = {"w": torch.zeros(5)}
    with pytest.raises(tm.LayoutMismatch, match="published as"):
        opened(Subscriber("policy", wrong, flip="view")).update(timeout=20)


def test_tensors_in_place_are_not_viewed(opened):
    trainer = model()
    publisher = opened(Publisher("policy", trainer, in_place=True))
    publisher.publish()
    with pytest.raises(tm.Unsupported, match="trainer 0 of policy has the version in its own tensors"):
        opened(Subscriber("policy", model(), flip="view")).update(timeout=20)


def test_nobody_of_the_host_has_it(opened):
    engine = opened(tm.Engine(transports=("tcp",), name="trainer", host_id="elsewhere"))
    publisher = opened(Publisher("policy", model(), engine=engine))
    publisher.publish()
    with pytest.raises(tm.DeadlineExceeded) as caught:
        opened(Subscriber("policy", model(), flip="view")).update(timeout=0.3)
    assert "nobody of this host has version 1" in str(caught.value.__cause__)


@pytest.mark.parametrize("flip", ["copy", "view", pytest.param("direct", marks=pytest.mark.slow)])
def test_a_publisher_that_never_stops_starves_nobody(child: Callable[..., Child], opened, flip: str):
    trainer = model()
    publisher = opened(Publisher("policy", trainer))
    readers = [child() for _ in range(2)]
    for reader in readers:
        reader(VIEWER.replace('"view"', f'"{flip}"'), count=4)
    enough = threading.Event()
    steps = 0

    def loop() -> None:
        nonlocal steps
        while not enough.is_set():
            steps += 1
            publish(publisher, trainer, steps)

    thread = threading.Thread(target=loop)
    thread.start()
    try:
        for reader in readers:
            reader.start(f"seen = []\nfor _ in range(5):\n    {UPDATE}\n    seen.append(result)\n    {VALUES}\n"
                         "    assert result == [seen[-1]], (result, seen)\nresult = seen")  # fmt: skip
        found = [reader.result() for reader in readers]
    finally:
        enough.set()
        thread.join()
    for seen in found:
        assert seen == sorted(set(seen))
        assert len(seen) == 5
    for reader in readers:
        reader("subscriber.close(); tm.close()")
