"""The whole of the direct way's interface: jobs, models, adapters, odd shapes and cuts, a hundred thousand tensors."""

from __future__ import annotations

import json
import math
import os
import resource
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from processes import Child, PoolEnv, eventually, running
from torch import nn
from worlds import torchrun

import torch_mooncake as tm
from torch_mooncake.tensors import DTYPES
from torch_mooncake.weights import Layout, Part, Publisher, Rule, Split, Subscriber, describe
from torch_mooncake.weights import plan as planning
from torch_mooncake.weights.plan import plan


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_trainers_and_subscribers_of_one_torchrun():
    out = torchrun(Path(__file__).with_name("torchrun_weights.py"), world=4)
    assert sorted(line for line in out.splitlines() if line.startswith("OK")) == [f"OK {rank}" for rank in range(4)]


SUBSCRIBE = """
import torch, torch_mooncake as tm
from torch_mooncake.weights import Subscriber
pool = tm.Pool(address, token=token)
mine = {"w": torch.zeros(1000), "b": torch.zeros(3)}
with Subscriber("policy", mine, pool=pool) as subscriber:
    step = subscriber.update(timeout=60).step
    result = [step, mine["w"].tolist() == list(range(1000)), mine["b"].tolist()]
    late = {"w": torch.zeros(1000), "b": torch.zeros(3)}
pool.close()
"""


def test_unrelated_jobs_meet_at_the_pools_address(child: Callable[..., Child], pool_env: PoolEnv, tmp_path: Path):
    """The other job has its own runtime folder and pool: all it knows is "host:port" and the token."""
    command = [sys.executable, "-m", "torch_mooncake", "node", "--pool", "served", "--listen", "tcp://127.0.0.1:0"]
    with running(command, env={**os.environ, "TM_TOKEN": "secret"}) as node:
        assert eventually(lambda: (Path(pool_env.runtime_dir) / "served" / "node.sock").exists(), timeout=20)
        trainer = {"w": torch.arange(1000.0), "b": torch.ones(3)}
        with tm.Pool(pool="served", token="secret") as pool, Publisher("policy", trainer, pool=pool) as publisher:
            (address,) = (n["address"] for n in pool.stat()["nodes"])
            publisher.publish(step=12)
            other = child({"TM_RUNTIME_DIR": str(tmp_path / "elsewhere"), "TM_POOL": "elsewhere"})
            assert other(SUBSCRIBE, address=address, token="secret") == [12, True, [1.0, 1.0, 1.0]]
        node.terminate()
        assert node.wait(20) == 0


def test_many_models_at_once_in_one_process(opened):
    """Each with its own trainer thread and its own pace; nobody gets anybody else's."""
    count, steps = 6, 4
    trainers = [{"w": torch.full((5000 + i,), -1.0), "b": torch.zeros(i)} for i in range(count)]
    workers = [{name: torch.zeros_like(t) for name, t in trainer.items()} for trainer in trainers]
    publishers = [opened(Publisher(f"model-{i}", trainers[i])) for i in range(count)]
    subscribers = [opened(Subscriber(f"model-{i}", workers[i])) for i in range(count)]
    wrong: list[Any] = []

    def run(i: int) -> None:
        for step in range(steps):
            trainers[i]["w"].fill_(100 * i + step)
            publishers[i].publish(step=step)
            update = subscribers[i].update(timeout=30)
            if update.step != step or not same(workers[i], trainers[i]):
                wrong.append((i, step, update))

    threads = [threading.Thread(target=run, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong
    assert [subscriber.version for subscriber in subscribers] == [steps] * count


class Lora(nn.Module):
    def __init__(self, seed: int, rank: int = 2) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.base = nn.Linear(12, 8)
        self.a, self.b = nn.Parameter(torch.randn(rank, 12)), nn.Parameter(torch.randn(8, rank))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + x @ self.a.t() @ self.b.t()


def test_a_base_model_and_adapters_that_follow_it(opened):
    """The base once, then adapters each step, as a subset of the same model, to a whole and to a parallel worker."""
    trainer, worker = Lora(1), Lora(2)
    adapters = {name: p for name, p in trainer.named_parameters() if not name.startswith("base")}
    base = opened(Publisher("policy", trainer))
    lora = opened(Publisher("policy.lora", adapters, subset=True))
    halves = [{"b": torch.zeros(4, 2), "base.bias": torch.full((4,), 5.0)} for _ in range(2)]
    rows = [Rule(name, [Part(name, split=[Split("tp", 0)])]) for name in ("b", "base.bias")]
    followers = [
        opened(Subscriber("policy.lora", half, layout=Layout(rows, {"tp": (at, 2)}))) for at, half in enumerate(halves)
    ]
    whole = opened(Subscriber("policy", worker))
    adapter = opened(Subscriber("policy.lora", worker))
    base.publish()
    assert whole.update(timeout=20).nbytes == sum(p.nbytes for p in trainer.parameters())
    x = torch.randn(5, 12)
    with torch.no_grad():
        for step in range(3):
            for parameter in adapters.values():
                parameter.add_(torch.randn_like(parameter))
            trainer.base.weight.add_(1)  # what is not published stays
            frozen = worker.base.weight.clone()
            lora.publish(step=step)
            update = adapter.update(timeout=20)
            assert update.nbytes == sum(p.nbytes for p in adapters.values())
            assert torch.equal(worker.base.weight, frozen)
            expected = torch.nn.functional.linear(x, frozen, trainer.base.bias) + x @ trainer.a.t() @ trainer.b.t()
            assert torch.equal(worker(x), expected)
            for at, (half, follower) in enumerate(zip(halves, followers, strict=True)):
                follower.update(timeout=20)
                assert torch.equal(half["b"], trainer.b.chunk(2)[at])
                assert half["base.bias"].tolist() == [5.0] * 4
    opened(Publisher("other", {"c": torch.ones(1)}, subset=True)).publish()
    stranger = opened(Subscriber("other", worker))
    with pytest.raises(tm.LayoutMismatch, match=r"c: published as float32\[1\], not in the model"):
        stranger.update(timeout=20)


def test_shards_of_every_uneven_kind(opened):
    """5 rows over 4 ranks (2, 2, 1, 0), scalars and empty tensors on the way to 3 ranks and to one."""
    values = {"w": torch.randn(5, 3), "v": torch.randn(2, 7), "scalar": torch.tensor(2.5), "none": torch.zeros(0, 9)}

    def part(at: int, ranks: int) -> tuple[dict[str, torch.Tensor], Layout]:
        def rows(t: torch.Tensor, dim: int) -> torch.Tensor:
            chunks = t.chunk(ranks, dim)
            return chunks[at].clone() if at < len(chunks) else t.narrow(dim, 0, 0).clone()

        rules = [
            Rule("w", [Part("w", (5, -1), [Split("tp", 0)])]),
            Rule("v", [Part("v", (-1, 7), [Split("tp", 1)])], dim=1),
        ]
        return values | {"w": rows(values["w"], 0), "v": rows(values["v"], 1)}, Layout(rules, {"tp": (at, ranks)})

    publishers = []
    for at in range(4):
        held, layout = part(at, 4)
        publishers.append(opened(Publisher("policy", held, layout=layout, rank=at, world=4)))
    whole = {name: torch.full_like(t, 9) for name, t in values.items()}
    workers = [(opened(Subscriber("policy", whole)), whole, values)]
    for at in range(3):
        expected, layout = part(at, 3)
        own = {name: torch.full_like(t, 9) for name, t in expected.items()}
        workers.append((opened(Subscriber("policy", own, layout=layout)), own, expected))
    threads = [threading.Thread(target=publisher.publish) for publisher in publishers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for subscriber, own, expected in workers:
        subscriber.update(timeout=20)
        assert same(own, expected)


ODD = {
    "double": torch.float64, "single": torch.float32, "half": torch.bfloat16, "eighth": torch.float8_e4m3fn,
    "byte": torch.uint8, "complex": torch.complex64,
}  # fmt: skip


@pytest.mark.parametrize("least", [1000, 2730])  # a 24th of 65 520: no element's size divides every multiple
def test_no_cut_goes_through_an_element(opened, monkeypatch: pytest.MonkeyPatch, least: int):
    """Buckets whose size is no multiple of an element's (verl #7262)."""
    monkeypatch.setattr(planning, "MIN_CHUNK", least)
    monkeypatch.setattr(planning, "MAX_CHUNK", 16 * least)
    monkeypatch.setattr(planning, "_MAX_PIECE", 15 * least + 1)
    generator = torch.Generator().manual_seed(1)
    trainer = {
        name: torch.randint(0, 100, (20_011 + 2 * i,), generator=generator).to(dtype)
        for i, (name, dtype) in enumerate(ODD.items())
    }
    trainer |= {f"{name}.matrix": t[:9999].reshape(303, 33).clone() for name, t in list(trainer.items())}
    made = plan([describe(trainer)], [describe(trainer)])
    itemsize = np.array([DTYPES[whole.dtype] for whole in made.wholes])[made.piece_whole]
    assert (made.piece_nbytes == made.piece_size.prod(axis=1) * itemsize).all()
    assert (made.piece_nbytes % itemsize == 0).all()
    assert len(made.chunk_nbytes) > 20
    worker = {name: torch.zeros_like(t) for name, t in trainer.items()}
    subscriber = opened(Subscriber("policy", worker))
    opened(Publisher("policy", trainer)).publish()
    subscriber.update(timeout=20)
    raw = [{n: t.reshape(-1).view(torch.uint8) for n, t in side.items()} for side in (trainer, worker)]
    assert same(*raw)


def test_ten_differences_and_how_many_more(opened):
    publisher = opened(Publisher("policy", {f"w{i:02}": torch.zeros(i + 1) for i in range(30)}))
    wrong = {f"w{i:02}": torch.zeros(i + 1, dtype=torch.float64 if i % 2 else torch.float32) for i in range(28)}
    subscriber = opened(Subscriber("policy", wrong | {"extra": torch.zeros(2)}))
    publisher.publish()
    with pytest.raises(tm.LayoutMismatch) as caught:
        subscriber.update(timeout=20)
    lines = str(caught.value).splitlines()[1:]
    assert lines[0].strip() == "extra: float32[2] in the model, not published"
    assert lines[1].strip() == "w01: published as float32[2], float64[2] in the model"
    assert len(lines) == 11
    assert lines[-1].strip() == "and 7 more"


def many(count: int, value: float) -> dict[str, torch.Tensor]:
    flat = torch.full((count * 16,), value)
    return {f"model.layers.{i // 128}.experts.{i % 128}.weight": flat[16 * i : 16 * i + 16] for i in range(count)}


@pytest.mark.parametrize("count", [5000, pytest.param(100_000, marks=[pytest.mark.slow, pytest.mark.timeout(600)])])
def test_a_great_many_small_tensors(opened, count: int):
    """One trainer, a subscriber of the same layout and two that have half of each tensor."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    trainer, worker = many(count, 1.0), many(count, 0.0)
    publisher = opened(Publisher("policy", trainer))
    subscriber = opened(Subscriber("policy", worker))
    layout = Layout(
        [
            Rule(
                "model.layers.{i}.experts.{e}.weight",
                [Part("model.layers.{i}.experts.{e}.weight", (16,), [Split("tp", 0)])],
            )
        ],
        {"tp": (1, 2)},
    )
    half = {name: t[:8].clone() for name, t in worker.items()}
    second = opened(Subscriber("policy", half, layout=layout))
    for step, value in enumerate((1.0, 3.0)):
        for tensor in trainer.values():
            tensor.fill_(value)
        publisher.publish(step=step)
        assert subscriber.update(timeout=300).step == step
        assert second.update(timeout=300).nbytes == count * 32
        for held in (worker, half):
            assert all(bool((t == value).all()) for t in held.values())
    grown_mib = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    assert grown_mib < 200 + count / 1000 * 25  # 2.5 GiB for three sides of 100 000


def test_manifests_of_a_hundred_thousand_tensors_are_small():
    data = describe(many(2000, 0.0)).to_json()
    assert len(data) < 2000 * 150
    assert json.loads(data)["format"] == 1
    assert math.isclose(describe(many(2000, 0.0)).nbytes, 2000 * 64)


def test_delivery_is_told_for_each_target(opened):
    publisher = opened(Publisher("policy", {"w": torch.ones(10)}))
    subscribers = [opened(Subscriber("policy", {"w": torch.zeros(10)})) for _ in range(3)]
    publisher.publish()
    assert eventually(lambda: list(publisher.delivered().values()) == [True] * len(subscribers))
