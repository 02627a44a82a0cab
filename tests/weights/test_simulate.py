"""The network model: times that can be worked out by hand, and nothing that a NIC could not carry."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import torch_mooncake as tm
from torch_mooncake.weights import Manifest, describe
from torch_mooncake.weights.plan import Place, plan
from torch_mooncake.weights.simulate import Network, simulate

MIB = 1 << 20


def model(mib: int) -> Manifest:
    return describe({"w": torch.empty(mib * MIB, dtype=torch.uint8)})


def test_one_to_one_takes_bytes_by_rate():
    made = plan([model(64)], [model(64)])
    said = simulate(made, Network(nic=64 * MIB))
    assert said.seconds == pytest.approx(1, rel=0.01)
    assert said.bound == pytest.approx(1)
    assert said.finished[0] == 0
    assert said.finished[1] == pytest.approx(1, rel=0.01)


def test_a_chain_takes_little_longer_than_one_hop():
    """Seven copies: the bytes once, and the time in which the first chunk gets to the last node: at each hop, that of
    a chunk and of the one that is on the way when it is heard of."""
    made = plan([model(512)], [model(512)] * 7)
    said = simulate(made, Network(nic=125e6))
    chunk = made.chunk_nbytes.max()
    assert said.bound == pytest.approx(512 * MIB / 125e6)
    fill = 6 * 2 * chunk / 125e6
    assert said.bound + 0.9 * fill <= said.seconds <= said.bound + 1.2 * fill
    assert said.seconds <= 1.15 * said.bound
    assert sorted(said.finished[1:].tolist()) == said.finished[[*range(1, 8)]].tolist()


def test_a_slow_nic_holds_up_those_behind_it_only():
    made = plan([model(64)], [model(64)] * 3)
    order = [edge.dst for edge in made.routes[0].edges]
    slow = Place(str(order[1]))
    said = simulate(made, Network(nic=64e6, nics={slow: 16e6}))
    took = said.finished[order]
    assert took[0] < 1.1 * 64 * MIB / 64e6
    assert took[1] >= 64 * MIB / 16e6
    assert took[2] >= took[1]


def test_two_that_share_a_nic_get_half_each():
    parts = [describe({name: torch.empty(32 * MIB, dtype=torch.uint8)}) for name in "ab"]
    made = plan(parts, parts, [Place("s"), Place("s"), Place("x"), Place("y")], subset=True)
    said = simulate(made, Network(nic=32 * MIB))
    assert said.bound == pytest.approx(2)
    assert said.finished[2:] == pytest.approx([2, 2], rel=0.01)


def test_copies_within_a_host_take_the_local_rate():
    made = plan([model(64)], [model(64)] * 2, [Place("a")] * 3)
    said = simulate(made, Network(nic=1, local=64 * MIB))
    assert said.bound == 0
    assert said.seconds == pytest.approx(2, rel=0.01)  # both from one node's link
    assert said.received.sum() == 0


def test_every_byte_is_on_the_timeline_and_no_nic_exceeds_its_rate():
    parts = [describe({f"w{i}": torch.empty(8 * MIB, dtype=torch.uint8) for i in range(6)})] * 2
    places = [Place("s0"), Place("s1"), *(Place(f"t{i // 2}", i % 2) for i in range(8))]
    made = plan(parts, parts[:1] * 8, places)
    said = simulate(made, Network(nic=100e6))
    sent, received = made.traffic()
    nic_of = [said.nics.index(place) for place in places]
    assert said.sent.sum(axis=0)[nic_of] == pytest.approx(sent)
    assert said.received.sum(axis=0)[nic_of] == pytest.approx(received)
    spans = np.diff(said.times, prepend=0)
    assert (said.received <= 100e6 * spans[:, None] * 1.001 + 1).all()
    assert (said.sent <= 100e6 * spans[:, None] * 1.001 + 1).all()
    assert said.seconds >= said.bound


def test_nothing_to_do():
    empty = describe({"w": torch.empty(0)})
    assert simulate(plan([empty], [empty]), Network(nic=1)).seconds == 0


@pytest.mark.parametrize("network", [Network(nic=0), Network(nic=1e9, local=-1), Network(1e9, nics={Place("0"): 0})])
def test_rates_are_positive(network):
    with pytest.raises(tm.InvalidArgument):
        simulate(plan([model(1)], [model(1)]), network)


def test_kimi_k2_is_near_its_bound(monkeypatch):
    """256 trainer ranks, 8 engines of 32 ranks, a 400 Gbit/s NIC each: within 1.5 of what the bytes need."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "examples" / "weight_broadcast"))
    kimi_k2 = __import__("kimi_k2")
    shapes = kimi_k2.Shapes()
    sources, targets = kimi_k2.trainers(shapes), kimi_k2.servers(shapes, instances=8, tp=32)
    made = plan(sources, targets, [*kimi_k2.places(256, "t"), *kimi_k2.places(256, "s")])
    said = simulate(made, Network(nic=50e9))
    ingress = max(target.nbytes for target in targets) / 50e9
    assert ingress == pytest.approx(0.65, abs=0.02)
    assert said.seconds <= 1.5 * 0.64
    del sys.modules["kimi_k2"]
