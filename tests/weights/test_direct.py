"""Publisher and Subscriber: every value in its place whatever the layouts, whole versions, and who reads from whom."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from processes import Child, eventually
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from worlds import run_world

import torch_mooncake as tm
from torch_mooncake import weights
from torch_mooncake.weights import Layout, Part, Place, Publisher, Rule, Split, Stack, Subscriber


def model(seed: int, count: int = 6, size: int = 10_000) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {f"w{i}": torch.randn(size + i, generator=generator) for i in range(count)}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("flip", ["copy", "swap"])
def test_corrupt_sync_compare(opened, flip):
    trainer = model(1) | {"scalar": torch.tensor(3.5), "none": torch.zeros(0, 4), "h": torch.ones(5).bfloat16()}
    publisher = opened(Publisher("policy", trainer))
    worker = {name: torch.full_like(tensor, 7) for name, tensor in trainer.items()}
    places = {name: tensor.data_ptr() for name, tensor in worker.items()}
    subscriber = opened(Subscriber("policy", worker, flip=flip))
    for step in range(5):
        for tensor in trainer.values():
            tensor.add_(1)
        before = {name: tensor.clone() for name, tensor in worker.items()}
        published = publisher.publish(step=step)
        assert eventually(lambda: all(publisher.delivered().values()))
        assert same(worker, before)  # not before the update is asked for
        update = subscriber.update(timeout=20)
        assert same(worker, trainer)
        assert (update.serial, update.step) == (published.serial, published.step) == (step + 1, step)
        assert update.nbytes == published.nbytes == sum(tensor.nbytes for tensor in trainer.values())
        assert (subscriber.version, subscriber.step) == (step + 1, step)
        if flip == "copy":
            assert {name: tensor.data_ptr() for name, tensor in worker.items()} == places
        for tensor in worker.values():
            tensor.fill_(9) if flip == "copy" else None
    assert subscriber.try_update() is None
    with pytest.raises(tm.DeadlineExceeded, match="newer than 5"):
        subscriber.update(timeout=0.05)


def test_a_module_and_its_tied_weights(opened):
    def make(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        module = nn.ModuleDict({"embed": nn.Embedding(30, 8), "head": nn.Linear(8, 30, bias=False)})
        module["head"].weight = module["embed"].weight
        return module

    trainer, tied, untied = make(1), make(2), make(3)
    untied["head"].weight = nn.Parameter(torch.zeros(30, 8))
    publisher = opened(Publisher("policy", trainer))
    subscribers = [opened(Subscriber("policy", module, flip="swap")) for module in (tied, untied)]
    publisher.publish()
    for subscriber, module in zip(subscribers, (tied, untied), strict=True):
        assert subscriber.update(timeout=20).nbytes == 960
        assert same(module.state_dict(), trainer.state_dict())
    assert tied["head"].weight.data_ptr() == tied["embed"].weight.data_ptr()


def tensor_parallel(wholes: dict[str, torch.Tensor], tp: int, at: int) -> tuple[dict[str, torch.Tensor], Layout]:
    """Fused q and kv, a row-parallel output, stacked experts with a transposed projection, a padded embedding."""
    experts = [e for e in range(8) if e * tp // 8 == at]
    rows = -(-21 // tp)
    embed = torch.full((24 // tp + 1, 8), -5.0)
    mine = wholes["embed"][at * rows : (at + 1) * rows]
    embed[: len(mine)] = mine
    tensors = {
        "embed": embed,
        "qkv": torch.cat([wholes[n].chunk(tp)[at] for n in "qkv"]),
        "o": wholes["o"].chunk(tp, dim=1)[at].contiguous(),
        "w2": torch.stack([wholes[f"expert.{e}"].t() for e in experts]),
        "norm": wholes["norm"].clone(),
    }
    rules = [
        Rule("embed", [Part("embed", (21, -1), [Split("tp", 0)])], padded=True),
        Rule("qkv", [Part(n, (16, -1), [Split("tp", 0)]) for n in "qkv"]),
        Rule("o", [Part("o", split=[Split("tp", 1)])]),
        Rule("w2", [Part("expert.{e}")], stack=Stack("e", 8, "tp"), transpose=True),
    ]
    return tensors, Layout(rules, {"tp": (at, tp)})


def parallel_wholes(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"embed": (21, 8), "q": (16, 8), "k": (16, 8), "v": (16, 8), "o": (8, 16), "norm": (8,)}
    shapes |= {f"expert.{e}": (8, 12) for e in range(8)}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


@pytest.mark.parametrize(("have", "want"), [(4, 2), (2, 4), (1, 2)])
def test_from_one_tensor_parallel_degree_to_another(opened, have, want):
    publishers = []
    for at in range(have):
        tensors, layout = tensor_parallel(parallel_wholes(0), have, at)
        publishers.append((opened(Publisher("policy", tensors, layout=layout, rank=at, world=have)), tensors))
    workers = []
    for instance in range(2):
        for at in range(want):
            tensors, layout = tensor_parallel(parallel_wholes(99), want, at)
            place = Place(f"host{instance}", at)
            workers.append((opened(Subscriber("policy", tensors, layout=layout, place=place)), tensors, at))
    for step in (1, 2, 3):
        wholes = parallel_wholes(step)
        for at, (_, tensors) in enumerate(publishers):
            for name, value in tensor_parallel(wholes, have, at)[0].items():
                tensors[name].copy_(value)
        threads = [threading.Thread(target=p.publish, kwargs={"step": step}) for p, _ in publishers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for subscriber, tensors, at in workers:
            assert subscriber.update(timeout=20).step == step
            assert same(tensors, tensor_parallel(wholes, want, at)[0])


def test_another_dtype_on_the_way(opened):
    """Trained in float32, sent and served in bfloat16."""
    trainer, worker = model(1), {name: tensor.bfloat16() for name, tensor in model(2).items()}
    rules = Layout([Rule("{name}", [Part("{name}")], dtype="bfloat16")])
    publisher, subscriber = opened(Publisher("policy", trainer, layout=rules)), opened(Subscriber("policy", worker))
    assert publisher.publish().nbytes == sum(tensor.nbytes for tensor in worker.values())
    subscriber.update(timeout=20)
    assert same(worker, {name: tensor.bfloat16() for name, tensor in trainer.items()})


def test_strided_tensors_on_both_sides(opened):
    trainer, worker = {"w": torch.randn(30, 20).t()}, {"w": torch.zeros(40, 40)[::2, 5:35]}
    assert not trainer["w"].is_contiguous()
    publisher, subscriber = opened(Publisher("policy", trainer)), opened(Subscriber("policy", worker))
    publisher.publish()
    subscriber.update(timeout=20)
    assert same(worker, trainer)
    with pytest.raises(tm.Unsupported, match="swap"):
        Subscriber("policy", worker, flip="swap")


def test_adapters_are_a_subset(opened):
    base, worker = model(1), model(1)
    adapter = {"w1": torch.randn_like(base["w1"]), "w4": torch.randn_like(base["w4"])}
    publisher, subscriber = opened(Publisher("lora", adapter, subset=True)), opened(Subscriber("lora", worker))
    publisher.publish()
    assert subscriber.update(timeout=20).nbytes == sum(tensor.nbytes for tensor in adapter.values())
    assert same(worker, base | adapter)


def test_a_late_joiner_of_a_subset_gets_what_was_published_only(opened):
    base, worker = model(1), model(1)
    adapter = {"w1": torch.randn_like(base["w1"]), "w4": torch.randn_like(base["w4"])}
    publisher, subscriber = opened(Publisher("lora", adapter, subset=True)), opened(Subscriber("lora", worker))
    publisher.publish()
    subscriber.update(timeout=20)  # it could send all of its tensors
    mine = {"w0": torch.full_like(base["w0"], 7), "w1": torch.zeros_like(base["w1"])}
    late = opened(Subscriber("lora", mine, part=True))  # with a layout of its own
    assert late.update(timeout=20).nbytes == adapter["w1"].nbytes
    assert bool(mine["w0"].eq(7).all())
    assert torch.equal(mine["w1"], adapter["w1"])


def test_the_current_version_is_not_overwritten_before_the_flip(opened, monkeypatch: pytest.MonkeyPatch):
    """Where all other slots are viewed."""
    trainer, worker = model(1), model(2)
    publisher = opened(Publisher("policy", trainer))
    publisher.publish()
    published = {name: tensor.clone() for name, tensor in trainer.items()}
    for tensor in trainer.values():
        tensor.add_(1)
    arena = publisher._arena
    with monkeypatch.context() as viewed:
        viewed.setattr(arena, "grow", lambda: None)
        viewed.setattr(arena, "take", lambda slot, timeout: arena.board.version(slot) == 1)
        with pytest.raises(tm.Busy, match="being viewed"):
            publisher.publish()
    assert publisher.version == 1
    opened(Subscriber("policy", worker)).update(timeout=20)
    assert same(worker, published)
    publisher.publish()
    assert publisher.version == 2


def test_several_models_at_once(opened):
    names = ("policy", "critic", "draft")
    trainers = {name: model(i, size=1000 * (i + 1)) for i, name in enumerate(names)}
    publishers = {name: opened(Publisher(name, trainers[name])) for name in names}
    workers = {name: {k: torch.zeros_like(t) for k, t in trainers[name].items()} for name in names}
    subscribers = {name: opened(Subscriber(name, workers[name])) for name in names}
    for name in names:
        publishers[name].publish()
    for name in names:
        subscribers[name].update(timeout=20)
        assert same(workers[name], trainers[name])


def test_who_does_not_fit_is_told_and_holds_nobody_up(opened):
    trainer, good = model(1), model(2)
    publisher = opened(Publisher("policy", trainer))
    bad = opened(Subscriber("policy", {"w0": torch.zeros(3), "other": torch.zeros(1)}))
    subscriber = opened(Subscriber("policy", good))
    publisher.publish()
    subscriber.update(timeout=20)
    assert same(good, trainer)
    with pytest.raises(tm.LayoutMismatch) as caught:
        bad.update(timeout=20)
    assert "other: float32[1] in the model, not published" in str(caught.value)
    assert "w0: published as float32[10000], float32[3] in the model" in str(caught.value)


def test_a_late_joiner_gets_the_current_version_from_its_peers(opened):
    trainer, first, late = model(1), model(2), model(3)
    publisher = Publisher("policy", trainer)
    early = opened(Subscriber("policy", first))
    publisher.publish(step=4)
    early.update(timeout=20)
    publisher.close()  # nobody but the other subscriber has it now
    joiner = opened(Subscriber("policy", late))
    assert joiner.update(timeout=20).step == 4
    assert same(late, trainer)


def test_every_byte_leaves_the_trainer_once_counted_at_the_engines(opened):
    """Four subscribers, as if on hosts of their own: over TCP, each gets the model once, the trainer sends it once."""
    trainer = model(1, count=8, size=1 << 20)
    nbytes = sum(tensor.nbytes for tensor in trainer.values())

    def engine(name: str) -> tm.Engine:
        return opened(tm.Engine(transports=("tcp",), name=name, host_id=name))

    sends = engine("trainer")
    publisher = opened(Publisher("policy", trainer, engine=sends, place=Place("trainer")))
    workers, engines, subscribers = [], [], []
    for i in range(4):
        workers.append({name: torch.zeros_like(tensor) for name, tensor in trainer.items()})
        engines.append(engine(f"worker{i}"))
        subscribers.append(
            opened(Subscriber("policy", workers[i], engine=engines[i], place=Place(f"w{i}"), patience_s=60))
        )
    publisher.publish()
    for subscriber, worker in zip(subscribers, workers, strict=True):
        assert subscriber.update(timeout=60).nbytes == nbytes
        assert same(worker, trainer)
    little = 2 << 20  # boards, frames
    assert nbytes <= sends.stats()["bytes_sent"]["tcp"] <= nbytes + little
    for each in engines:
        assert nbytes <= each.stats()["bytes_received"]["tcp"] <= nbytes + little
    assert sum(each.stats()["bytes_sent"].get("tcp", 0) for each in engines) >= 3 * nbytes


def fsdp_rank(rank: int, world: int) -> dict[str, list[Any]]:
    torch.manual_seed(5)
    module = nn.Sequential(nn.Linear(7, 9), nn.ReLU(), nn.Linear(9, 3))
    whole = {name: (tensor + 1).tolist() for name, tensor in module.state_dict().items()}
    fully_shard(module, mesh=init_device_mesh("cpu", (world,)))
    with Publisher("policy", module, rank=rank, world=world) as publisher:
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.add_(1)
        publisher.publish(step=8)
        tm.wait("updated", 100)
    return whole


def test_fsdp2_ranks_to_a_plain_model(opened):
    worker = {"0.weight": torch.zeros(9, 7), "0.bias": torch.zeros(9), "2.weight": torch.zeros(3, 9)}
    worker["2.bias"] = torch.zeros(3)
    subscriber = opened(Subscriber("policy", worker))

    def update() -> None:
        assert subscriber.update(timeout=100).step == 8
        tm.put("updated", True)

    thread = threading.Thread(target=update)
    thread.start()
    ranks = run_world(3, fsdp_rank)
    thread.join()
    assert {name: tensor.tolist() for name, tensor in worker.items()} == ranks[0]


WORKER = """
import torch, torch_mooncake as tm
from torch_mooncake import weights
torch.set_num_threads(1)
tm.init()
seen = []
mine = {f"w{i}": torch.zeros(50_000 + i) for i in range(8)}
subscriber = weights.Subscriber("policy", mine, flip=flip)
"""
FOLLOW = """
while not seen or seen[-1] < last:
    step = subscriber.update(timeout=60).step
    assert all(bool(tensor.eq(step).all()) for tensor in mine.values()), step
    seen.append(step)
result = seen
"""


def test_never_half_a_version_while_the_optimiser_runs(child: Callable[..., Child], opened):
    """Tensors that change all the time, versions that follow each other at once, relays: each version uniform."""
    trainer = {f"w{i}": torch.zeros(50_000 + i) for i in range(8)}
    publisher = opened(Publisher("policy", trainer))
    workers = [child() for _ in range(3)]
    for i, worker in enumerate(workers):
        worker(WORKER, flip=("copy", "swap")[i % 2])
    last = 30
    for worker in workers:
        worker.start(FOLLOW, last=last)
    for step in range(1, last + 1):
        for tensor in trainer.values():
            tensor.fill_(step)
        publisher.publish(step=step)
        for tensor in trainer.values():
            tensor.fill_(-1)  # what an optimiser does meanwhile
        if step % 5 == 0:  # else nobody has time to get one whole
            assert eventually(lambda: all(publisher.delivered().values()))
    for worker in workers:
        seen = worker.result()
        assert seen[-1] == last
        assert seen == sorted(set(seen))
        worker("subscriber.close(); tm.close()")


def test_names_ranks_and_arguments():
    for name in ("", "a/b"):
        with pytest.raises(tm.InvalidArgument):
            Publisher(name, model(1))
    with pytest.raises(tm.InvalidArgument, match="rank 2 of 2"):
        Publisher("policy", model(1), rank=2, world=2)
    with pytest.raises(tm.InvalidArgument, match="flip"):
        Subscriber("policy", model(1), flip="both")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="'w' is a int"):
        Publisher("policy", {"w": 1})  # type: ignore[dict-item]


def test_a_rank_that_does_not_come(opened):
    trainer = {"w": torch.zeros(4)}
    layout = Layout([Rule("w", [Part("w", split=[Split("tp", 0)])])], {"tp": (0, 2)})
    publisher = opened(Publisher("policy", trainer, layout=layout, rank=0, world=2))
    with pytest.raises(tm.DeadlineExceeded, match="rank 1 did not publish version 1"):
        publisher.publish(timeout=0.2)
    with pytest.raises(tm.DeadlineExceeded, match="at all"):
        opened(Subscriber("policy", {"w": torch.zeros(8)})).update(timeout=0.2)


def test_closing_gives_everything_back(opened):
    trainer = model(1)
    publisher = Publisher("policy", trainer)
    subscriber = Subscriber("policy", model(2))
    publisher.publish()
    subscriber.update(timeout=20)
    subscriber.close()
    subscriber.close()
    with pytest.raises(tm.Closed):
        subscriber.update(timeout=1)
    publisher.publish()  # for nobody
    assert publisher.delivered() == {}
    publisher.close()
    assert [key for key in tm.keys("weights.direct/") if "/member/" in key or "/target/" in key] == []
    assert not [thread for thread in threading.enumerate() if thread.name == "tm-weights"]


def test_a_name_that_everybody_has_left_begins_anew(opened):
    with Publisher("policy", model(1)) as publisher:
        publisher.publish()
    worker, trainer = model(2), model(3)
    subscriber = opened(Subscriber("policy", worker))
    with pytest.raises(tm.DeadlineExceeded, match="at all"):
        subscriber.update(timeout=0.2)
    publisher = opened(Publisher("policy", trainer))
    assert publisher.publish().serial == 2
    assert subscriber.update(timeout=20).serial == 2
    assert same(worker, trainer)


def test_both_ways_have_names_of_their_own():
    weights.publish({"w": torch.ones(3)}, "policy")
    mine = {"w": torch.zeros(3)}
    with Subscriber("policy", mine) as subscriber, pytest.raises(tm.DeadlineExceeded):
        subscriber.update(timeout=0.2)
