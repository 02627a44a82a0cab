"""Weights between shaped hosts: as fast as the model of the network says, and no byte more. Needs root."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
from shaped_hosts import ShapedHosts

from torch_mooncake.weights import describe
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
mine = {f"w{i}": torch.zeros((mib << 18) // tensors) for i in range(tensors)}
place = weights.Place(host)
if host == "host0":
    publisher = weights.Publisher("policy", mine, engine=engine, place=place)
else:
    subscriber = weights.Subscriber("policy", mine, engine=engine, place=place, flip="swap", patience_s=patience_s)
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


def rounds(hosts: ShapedHosts, steps: range, receivers: range) -> list[float]:
    """Seconds from each publication until the last receiver has it."""
    took = []
    for step in steps:
        for i in receivers:
            hosts.start(i, UPDATE)
        hosts.start(0, PUBLISH, step=step)
        began = hosts.programs[0].result()
        results = [hosts.programs[i].result() for i in receivers]
        assert [got for got, _ in results] == [step] * len(receivers)
        took.append(max(ended for _, ended in results) - began)
    return took


@pytest.mark.parametrize(
    ("hosts", "mbit", "mib"),
    [pytest.param(200, 200, 32, id="200M"), pytest.param(1000, 1000, 128, id="1G")],
    indirect=["hosts"],
)
def test_one_trainer_to_seven_hosts(hosts: ShapedHosts, mbit: int, mib: int) -> None:
    """Relayed: the time of one copy, not of seven; each host receives one; predicted within 15 %. (At 1 Gbit/s this
    machine carries seven times that, and needs its cores for it.)"""
    hosts.run(SET_UP, mib=mib, tensors=TENSORS, patience_s=30)
    before = [hosts.bytes_received(i) for i in range(HOSTS)]
    took = rounds(hosts, range(1, 5), range(1, HOSTS))
    received = [hosts.bytes_received(i) - b for i, b in enumerate(before)]
    assert max(received[1:]) <= 4 * 1.03 * (mib << 20)
    model = describe({f"w{i}": torch.empty((mib << 18) // TENSORS) for i in range(TENSORS)})
    made = plan([model], [model] * (HOSTS - 1), [Place(f"host{i}") for i in range(HOSTS)])
    predicted = simulate(made, Network(nic=mbit * 125_000)).seconds
    bound = (mib << 20) / (mbit * 125_000)
    print(f"took {took}, predicted {predicted:.3f}, bound {bound:.3f}")
    assert min(took[1:]) >= 0.97 * bound
    assert min(took[1:]) == pytest.approx(predicted, rel=0.15)


@pytest.mark.parametrize("hosts", [1000], indirect=True)
def test_a_cut_nic_holds_nobody_else_up(hosts: ShapedHosts) -> None:
    """The first host of the chain is cut off while a version is on its way."""
    hosts.run(SET_UP, mib=64, tensors=TENSORS, patience_s=2)
    rounds(hosts, range(1, 2), range(1, HOSTS))
    hosts.programs[0](PUBLISH, step=2)
    hosts.programs[HOSTS - 1]("while not subscriber.progress or not subscriber.progress.bytes_done: time.sleep(0.001)")
    hosts.cut(1)
    results = hosts.run(UPDATE, hosts=range(2, HOSTS))
    assert [step for step, _ in results] == [2] * (HOSTS - 2)
