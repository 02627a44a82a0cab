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
    """Seven copies: the bytes once, and at each hop the time of a chunk and of what is queued."""
    made = plan([model(512)], [model(512)] * 7)
    said = simulate(made, Network(nic=125e6))
    chunk = made.chunk_nbytes.max()
    assert said.bound == pytest.approx(512 * MIB / 125e6)
    hop = chunk / 125e6 + 0.001
    assert said.bound + 6 * hop <= said.seconds <= said.bound + 6 * (2 * hop + 3 * (512 << 10) / 125e6)
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


def test_what_copies_of_a_host_share_is_their_limit():
    """Two copies from two nodes of a host to two others: 64 MiB each, over links of 64 MiB/s, and memory for half."""
    parts = [describe({name: torch.empty(64 * MIB, dtype=torch.uint8)}) for name in "ab"]
    made = plan(parts, parts, [Place("a", i) for i in range(4)], subset=True)
    assert simulate(made, Network(nic=1, local=64 * MIB)).seconds == pytest.approx(1, rel=0.01)
    said = simulate(made, Network(nic=1, local=64 * MIB, host=64 * MIB))
    assert said.seconds == pytest.approx(2, rel=0.01)
    elsewhere = plan(parts, parts, [Place("a"), Place("b"), Place("a", 1), Place("b", 1)], subset=True)
    assert simulate(elsewhere, Network(nic=1, local=64 * MIB, host=64 * MIB)).seconds == pytest.approx(1, rel=0.01)


def test_from_the_nic_of_one_node_to_its_neighbours_by_the_local_links():
    """64 MiB in 1 s over the NIC; the neighbours copy along, at half that rate each: 2 s, and a chunk later."""
    made = plan([model(64)], [model(64)] * 3, [Place("s"), *[Place("t")] * 3])
    said = simulate(made, Network(nic=64 * MIB, local=64 * MIB))
    assert said.bound == pytest.approx(1)
    assert sorted(said.finished[1:].tolist()) == pytest.approx([1, 2, 2], rel=0.03)
    fast = simulate(made, Network(nic=64 * MIB, local=64e9))
    assert max(fast.finished) == pytest.approx(1 + made.chunk_nbytes.max() / 64e9, rel=0.02)


def test_headers_and_the_start_take_their_part():
    made = plan([model(64)], [model(64)])
    assert simulate(made, Network(nic=64 * MIB, payload=0.5)).seconds == pytest.approx(2, rel=0.01)
    assert simulate(made, Network(nic=64 * MIB, start_s=1.0)).seconds == pytest.approx(2, rel=0.01)


def test_a_hop_costs_a_chunk_and_what_questions_take():
    """Two hops without queues: the second begins when the first has a chunk, and rests for a look and a question after
    each chunk (until it is a chunk behind)."""
    made = plan([model(64)], [model(64)] * 2)
    chunk, rate = made.chunk_nbytes.max(), 64 * MIB
    quick = simulate(made, Network(nic=rate, latency_s=1e-6, look_s=1e-4, queue=0, start_s=0), step=1e-4)
    assert quick.seconds - quick.finished[1:].min() == pytest.approx(chunk / rate, rel=0.1)
    slow = simulate(made, Network(nic=rate, latency_s=0.002, look_s=0.001, queue=0, start_s=0), step=1e-4)
    lag = slow.seconds - slow.finished[1:].min()
    assert chunk / rate + 0.002 <= lag <= 2 * (chunk / rate + 0.002 + 0.001 + 0.002)


def test_what_waits_before_a_nic_holds_up_the_questions_that_leave_by_it():
    """A relay's questions wait behind what it passes on: the last of a chain passes nothing on and asks at once."""
    made = plan([model(64)], [model(64)] * 3)
    lags = []
    for queue in (0, MIB):
        finished = np.sort(simulate(made, Network(nic=64 * MIB, queue=queue)).finished[1:])
        lags.append(finished[-1] - finished[0])
    assert lags[1] > lags[0] + 0.5 * MIB / (64 * MIB)


def test_connections_share_a_nic_evenly_however_many_routes_they_carry():
    """From one node to two: one takes one tensor, the other eight that differ in who else has them."""
    one = describe({"a": torch.empty(32 * MIB, dtype=torch.uint8)})
    many = describe({f"b{i}": torch.empty(4 * MIB, dtype=torch.uint8) for i in range(8)})
    both = describe(
        {"a": torch.empty(32 * MIB, dtype=torch.uint8)}
        | {f"b{i}": torch.empty(4 * MIB, dtype=torch.uint8) for i in range(8)}
    )
    made = plan([both], [one, many], partial=True)
    said = simulate(made, Network(nic=32 * MIB))
    assert said.finished[1:] == pytest.approx([2, 2], rel=0.01)


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


def test_a_share_of_the_bytes_moves():
    made = plan([model(64)], [model(64)] * 2)
    whole, delta = simulate(made, Network(nic=64 * MIB)), simulate(made, Network(nic=64 * MIB), share=0.25)
    assert delta.seconds == pytest.approx(whole.seconds / 4, rel=0.1)
    assert float(delta.received.sum()) == pytest.approx(32 * MIB)
    for share in (0, -1, 1.5):
        with pytest.raises(tm.InvalidArgument):
            simulate(made, Network(nic=1e9), share=share)


@pytest.mark.parametrize(
    "network",
    [
        Network(nic=0),
        Network(nic=1e9, local=-1),
        Network(nic=1e9, host=0),
        Network(nic=1e9, payload=0),
        Network(1e9, nics={Place("0"): 0}),
    ],
)
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
