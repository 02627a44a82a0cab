"""Tensors that are published where they lie, the fence, and updates straight into the model's tensors."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from processes import eventually
from torch import nn

import torch_mooncake as tm
from torch_mooncake import weights
from torch_mooncake.weights import Layout, Part, Place, Publisher, Rule, Split, Subscriber


def model(seed: int, count: int = 6, size: int = 10_000) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {f"w{i}": torch.randn(size + i, generator=generator) for i in range(count)}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("flip", ["copy", "swap", "direct"])
@pytest.mark.parametrize("shared", [False, True])
def test_corrupt_sync_compare_without_copies(opened, flip, shared):
    trainer = model(1) | {"scalar": torch.tensor(3.5), "none": torch.zeros(0, 4), "h": torch.ones(5).bfloat16()}
    if shared:
        before = {name: tensor.clone() for name, tensor in trainer.items()}
        weights.share(trainer)
        assert same(trainer, before)
    publisher = opened(Publisher("policy", trainer, in_place=True))
    worker = {name: torch.full_like(tensor, 7) for name, tensor in trainer.items()}
    places = {name: tensor.data_ptr() for name, tensor in worker.items()}
    subscriber = opened(Subscriber("policy", worker, flip=flip))
    for step in range(4):
        for tensor in trainer.values():
            tensor.add_(1)
        publisher.publish(step=step)
        if flip != "direct":
            assert publisher.fence(timeout=20) == {subscriber._member.uid: True}
            for tensor in trainer.values():
                tensor.sub_(1)  # what an optimiser does
        assert subscriber.update(timeout=20).step == step
        if flip == "direct":
            assert publisher.fence(timeout=20) == {subscriber._member.uid: True}
        else:
            for tensor in trainer.values():
                tensor.add_(1)
        assert same(worker, trainer)
        if flip != "swap":
            assert {name: tensor.data_ptr() for name, tensor in worker.items()} == places
    assert subscriber.try_update() is None


def test_a_version_that_is_not_fenced_is_not_followed(opened):
    trainer = model(1)
    publisher = opened(Publisher("policy", trainer, in_place=True))
    assert publisher.fence() == {}  # nothing is published yet
    publisher.publish()
    with pytest.raises(tm.Busy, match="version 1 can still be read: fence"):
        publisher.publish()
    assert publisher.fence() == {}
    publisher.publish()
    trainer["w0"] = torch.zeros_like(trainer["w0"])
    publisher.fence()
    with pytest.raises(tm.LayoutMismatch, match="w0 lies elsewhere"):
        publisher.publish()


def strided(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "t": torch.randn(30, 20, generator=generator).t(),
        "s": torch.randn(40, 40, generator=generator)[::2, 5:35],
        "f": torch.randn(50, generator=generator),
    }


@pytest.mark.parametrize("flip", ["copy", "direct"])
def test_strides_and_another_dtype_on_the_way(opened, flip):
    trainer = strided(1)
    worker = {"t": torch.zeros(20, 60)[:, ::2], "s": torch.zeros(20, 30), "f": torch.zeros(100)[::2].bfloat16()}
    rules = Layout([Rule("f", [Part("f")], dtype="bfloat16")])
    publisher = opened(Publisher("policy", trainer, layout=rules, in_place=True))
    subscriber = opened(Subscriber("policy", worker, flip=flip))
    for _ in range(2):
        for tensor in trainer.values():
            tensor.add_(0.1)
        publisher.publish()
        subscriber.update(timeout=20)
        publisher.fence()
        assert same(worker, trainer | {"f": trainer["f"].bfloat16()})
    if flip == "direct":
        assert 0 < subscriber.staging_peak <= 60 << 10


def test_a_module_with_tied_weights_in_shared_memory(opened):
    def make(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        module = nn.ModuleDict({"embed": nn.Embedding(30, 8), "head": nn.Linear(8, 30, bias=False)})
        module["head"].weight = module["embed"].weight
        return module

    trainer, tied, untied = make(1), make(2), make(3)
    parameter = trainer["embed"].weight
    weights.share(trainer)
    assert trainer["embed"].weight is parameter
    assert trainer["head"].weight is parameter
    untied["head"].weight = nn.Parameter(torch.zeros(30, 8))
    publisher = opened(Publisher("policy", trainer, in_place=True))
    subscribers = [opened(Subscriber("policy", module, flip="direct")) for module in (tied, untied)]
    publisher.publish()
    for subscriber, module in zip(subscribers, (tied, untied), strict=True):
        assert subscriber.update(timeout=20).nbytes == 960
        assert same(module.state_dict(), trainer.state_dict())


@pytest.mark.parametrize("flip", ["swap", "direct"])
def test_ranks_in_place_to_another_degree(opened, flip):
    """Two ranks that cut rows to three that cut columns: every range of the readers is strided."""
    whole = torch.arange(24.0 * 18).view(24, 18)

    def rank(at: int, ranks: int, dim: int) -> Layout:
        return Layout([Rule("w", [Part("w", (24, 18), [Split("tp", dim)])])], {"tp": (at, ranks)})

    mine = [{"w": whole.chunk(2)[at].clone()} for at in range(2)]
    publishers = [
        opened(Publisher("policy", mine[at], layout=rank(at, 2, 0), rank=at, world=2, in_place=True)) for at in range(2)
    ]
    theirs = [{"w": torch.zeros(24, 6)} for _ in range(3)]
    subscribers = [
        opened(Subscriber("policy", theirs[at], layout=rank(at, 3, 1), flip=flip, place=Place("h", at)))
        for at in range(3)
    ]

    def all_ranks(call: str) -> None:
        threads = [threading.Thread(target=getattr(publisher, call)) for publisher in publishers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    for step in range(1, 4):
        all_ranks("publish")
        updates = [threading.Thread(target=subscriber.update) for subscriber in subscribers]
        for thread in updates:
            thread.start()
        for thread in updates:
            thread.join()
        all_ranks("fence")
        for at in range(3):
            assert subscribers[at].version == step
            assert torch.equal(theirs[at]["w"], (whole + step - 1).chunk(3, dim=1)[at])
        for tensors in mine:
            tensors["w"].add_(1)


def test_what_is_read_while_it_is_written_is_dropped(opened):
    """A fence that waits for nobody, and writes at once: the reader finds out, whatever it has read by then."""
    trainer = {f"w{i}": torch.zeros(1 << 20) for i in range(4)}
    slow = opened(tm.Engine(transports=("tcp",), name="trainer", host_id="trainer"))
    publisher = opened(Publisher("policy", trainer, engine=slow, place=Place("trainer"), in_place=True, verify=False))
    engine = opened(tm.Engine(transports=("tcp",), name="w", host_id="w", foreground_rate=64 << 20))
    mine = {f"w{i}": torch.zeros(1 << 20) for i in range(4)}
    subscriber = opened(Subscriber("policy", mine, engine=engine, place=Place("w")))

    def uniform(value: int) -> bool:
        return all(bool(tensor.eq(value).all()) for tensor in mine.values())

    for step in range(1, 6):
        for tensor in trainer.values():
            tensor.fill_(step)
        publisher.publish(step=step)
        assert eventually(lambda s=step: subscriber.progress is not None and subscriber.progress.version == s)
        assert eventually(lambda: subscriber.progress.bytes_done > 0)
        assert list(publisher.fence(timeout=0.0 if step < 5 else 30).values()) == [step == 5]
        for tensor in trainer.values():
            tensor.fill_(-1)
        assert uniform(0)
    assert subscriber.update(timeout=30).step == 5
    assert uniform(5)


def test_staging_never_exceeds_its_budget(opened):
    """Everything is cast: 24 MiB go through two chunks' worth of memory."""
    trainer = {f"w{i}": torch.randn(1 << 20) for i in range(6)}
    rules = Layout([Rule("{name}", [Part("{name}")], dtype="bfloat16")])
    worker = {name: torch.zeros_like(tensor) for name, tensor in trainer.items()}
    publisher = opened(Publisher("policy", trainer, layout=rules))
    subscriber = opened(Subscriber("policy", worker, layout=rules, flip="direct", staging=4 << 20))
    publisher.publish()
    assert subscriber.update(timeout=30).nbytes == 12 << 20
    assert 0 < subscriber.staging_peak <= 4 << 20
    assert same(worker, {name: tensor.bfloat16().float() for name, tensor in trainer.items()})
    small = opened(Subscriber("policy", {n: torch.zeros_like(t) for n, t in trainer.items()}, layout=rules,
                              flip="direct", staging=100_000))  # fmt: skip
    with pytest.raises(tm.InvalidArgument, match="staging of 100000 bytes cannot hold a chunk"):
        small.update(timeout=30)
    assert not small.torn


def test_a_direct_update_that_fails_says_that_the_model_is_torn(opened):
    trainer = {f"w{i}": torch.full((1 << 20,), 1.0) for i in range(4)}
    engine = opened(tm.Engine(transports=("tcp",), name="trainer", host_id="trainer"))
    publisher = Publisher("policy", trainer, engine=engine, place=Place("trainer"))
    slow = opened(tm.Engine(transports=("tcp",), name="w", host_id="w", foreground_rate=16 << 20))
    mine = {name: torch.zeros_like(tensor) for name, tensor in trainer.items()}
    subscriber = opened(Subscriber("policy", mine, engine=slow, place=Place("w"), flip="direct"))
    publisher.publish(step=1)
    found: list[BaseException] = []

    def update() -> None:
        try:
            subscriber.update(timeout=30)
        except tm.Error as error:
            found.append(error)

    thread = threading.Thread(target=update)
    thread.start()
    assert eventually(lambda: subscriber.progress is not None and subscriber.progress.bytes_done > 0)
    engine.close()
    thread.join()
    assert isinstance(found[0], weights.Torn)
    assert isinstance(found[0].__cause__, tm.PeerLost)
    assert "the model is torn: version 1 of the weights cannot come from trainer" in str(found[0])
    assert subscriber.torn
    assert subscriber.version == 0
    heir = opened(tm.Engine(transports=("tcp",), name="heir", host_id="trainer"))
    with Publisher("policy", trainer, engine=heir, place=Place("trainer")) as publisher:
        publisher.publish(step=2)
        assert subscriber.update(timeout=30).step == 2
    assert not subscriber.torn
    assert same(mine, trainer)


def test_nothing_is_written_when_a_source_is_not_there(opened):
    trainer = model(1)
    publisher = Publisher("policy", trainer, in_place=True)
    publisher.publish()
    publisher.fence()
    mine = {name: torch.full_like(tensor, 7) for name, tensor in trainer.items()}
    subscriber = opened(Subscriber("policy", mine, flip="direct"))
    with pytest.raises(tm.DeadlineExceeded):  # it is withdrawn, and may come again
        subscriber.update(timeout=0.3)
    publisher._engine.close()
    with pytest.raises(tm.PeerLost, match="does not answer"):
        subscriber.update(timeout=0.3)
    assert not subscriber.torn
    assert all(bool(tensor.eq(7).all()) for tensor in mine.values())


def test_told_of_versions(opened):
    trainer = model(1)
    publisher = opened(Publisher("policy", trainer))
    told: dict[str, list[int]] = {"copy": [], "direct": []}
    subscribers: dict[str, Any] = {
        flip: opened(Subscriber("policy", model(2), flip=flip, on_version=told[flip].append)) for flip in told
    }
    for version in (1, 2):
        publisher.publish()
        assert eventually(lambda v=version: all(seen[-1:] == [v] for seen in told.values()))
        for subscriber in subscribers.values():
            assert subscriber.update(timeout=20).serial == version

    def fails(version: int) -> None:
        raise ValueError(f"not {version}")

    failing = opened(Subscriber("policy", model(2), on_version=fails))
    assert eventually(lambda: failing._broken is not None)
    with pytest.raises(ValueError, match="not 2"):
        failing.update(timeout=5)
