"""Weights between shaped hosts: as fast as the model of the network says, and no byte more. Needs root."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
from shaped_hosts import ShapedHosts

from torch_mooncake.weights import Layout, Manifest, Part, Rule, Split, describe
from torch_mooncake.weights.plan import Place, plan
from torch_mooncake.weights.simulate import Network, simulate

pytestmark = [pytest.mark.netns, pytest.mark.slow]

HOSTS, TENSORS = 8, 16

SET_UP = """
import time, torch, torch_mooncake as tm
from torch_mooncake import weights
torch.set_num_threads(1)
tm.init()
engine = tm.Engine(f"tcp://{address}:0", token="t", transports=("tcp",), host_id=host, name=host)
number = int(host.removeprefix("host"))
at, ranks = (number, trainers) if number < trainers else ((number - trainers) % tp, tp)
layout = weights.Layout(
    [weights.Rule("w{i}", [weights.Part("w{i}", split=[weights.Split("tp", 0)])])], {"tp": (at, ranks)})
mine = {f"w{i}": torch.zeros(1024 // ranks, (mib << 8) // tensors) for i in range(tensors)}
options = {"layout": layout, "engine": engine, "place": weights.Place(host)}
if number < trainers:
    publisher = weights.Publisher("policy", mine, rank=at, world=trainers, **options)
else:
    subscriber = weights.Subscriber("policy", mine, flip="swap", patience_s=patience_s, **options)
"""
UPDATE = """
update = subscriber.update(timeout=60)
ended = time.monotonic()
assert all(bool(tensor.eq(update.step).all()) for tensor in mine.values())
result = [update.step, ended]
"""
PUBLISH = """
for tensor in mine.values():
    tensor.fill_(step)
publisher.publish(step=step)
result = time.monotonic()
"""


@pytest.fixture
def hosts(request: pytest.FixtureRequest) -> Iterator[ShapedHosts]:
    made = ShapedHosts(HOSTS, request.param, dict(os.environ))
    try:
        yield made
    finally:
        made.close()


def rounds(hosts: ShapedHosts, steps: range, trainers: int, receivers: range) -> list[float]:
    """Seconds from each publication until the last receiver has it."""
    took = []
    for step in steps:
        for i in receivers:
            hosts.start(i, UPDATE)
        began = max(hosts.run(PUBLISH, hosts=range(trainers), step=step))
        results = [hosts.programs[i].result() for i in receivers]
        assert [got for got, _ in results] == [step] * len(receivers)
        took.append(max(ended for _, ended in results) - began)
    return took


def manifest(mib: int, at: int = 0, ranks: int = 1) -> Manifest:
    return describe(
        {f"w{i}": torch.empty(1024 // ranks, (mib << 8) // TENSORS) for i in range(TENSORS)}, split(at, ranks)
    )


def split(at: int, ranks: int) -> Layout:
    return Layout([Rule("w{i}", [Part("w{i}", split=[Split("tp", 0)])])], {"tp": (at, ranks)})


@pytest.mark.parametrize(
    ("hosts", "mbit", "trainers", "tp", "mib"),
    [pytest.param(200, 200, 1, 1, 32, id="1-to-7"), pytest.param(100, 100, 4, 2, 32, id="TP4-to-TP2")],
    indirect=["hosts"],
)
def test_as_fast_as_predicted(hosts: ShapedHosts, mbit: int, trainers: int, tp: int, mib: int) -> None:
    """One trainer to seven full copies, relayed: the time of one copy, not of seven; four to four, from TP4 to TP2.
    Each host receives its part once; predicted within 15 %. (At rates that this machine carries while it has other
    work; benchmarks/weights.py does it at 1 Gbit/s.)"""
    hosts.run(SET_UP, mib=mib, tensors=TENSORS, patience_s=30, trainers=trainers, tp=tp)
    receivers = range(trainers, HOSTS)
    before = [hosts.bytes_received(i) for i in range(HOSTS)]
    took = rounds(hosts, range(1, 5), trainers, receivers)
    received = [hosts.bytes_received(i) - b for i, b in enumerate(before)]
    part = (mib << 20) // tp
    assert max(received[trainers:]) <= 4 * 1.04 * part
    sources, targets = (
        [manifest(mib, i, trainers) for i in range(trainers)],
        [manifest(mib, i % tp, tp) for i in receivers],
    )
    made = plan(sources, targets, [Place(f"host{i}") for i in range(HOSTS)], partial=True)
    predicted = simulate(made, Network(nic=mbit * 125_000, payload=0.99)).seconds
    bound = part / (mbit * 125_000)
    print(f"took {took}, predicted {predicted:.3f}, bound {bound:.3f}")
    assert min(took[1:]) >= 0.97 * bound
    assert min(took[1:]) == pytest.approx(predicted, rel=0.15)


@pytest.mark.parametrize("hosts", [1000], indirect=True)
def test_a_cut_nic_holds_nobody_else_up(hosts: ShapedHosts) -> None:
    """The first host of the chain is cut off while a version is on its way."""
    hosts.run(SET_UP, mib=64, tensors=TENSORS, patience_s=2, trainers=1, tp=1)
    rounds(hosts, range(1, 2), 1, range(1, HOSTS))
    hosts.programs[0](PUBLISH, step=2)
    hosts.programs[HOSTS - 1]("while not subscriber.progress or not subscriber.progress.bytes_done: time.sleep(0.001)")
    hosts.cut(1)
    results = hosts.run(UPDATE, hosts=range(2, HOSTS))
    assert [step for step, _ in results] == [2] * (HOSTS - 2)
