"""Several NICs between two hosts: all carry one op, any may fail, and what comes back is used again."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from processes import eventually
from rail_hosts import Hosts

MiB = 1 << 20
FILL = "memory[:] = np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)"
DIGEST = "import hashlib; result = hashlib.sha256(memory).hexdigest()"
OP = """
op = getattr(engine, kind)(region, remote, timeout=60, notify=b"n" if kind == "write" else b"")
op.wait()
result = op.bytes_done
"""
NOTES = """
result = []
try:
    while True:
        result.append(engine.next_notification(timeout=0.3).data.decode())
except tm.DeadlineExceeded:
    pass
"""


@pytest.fixture
def make_hosts() -> Iterator[Callable[..., Hosts]]:
    if os.geteuid() != 0:
        pytest.skip("needs root to make network namespaces")
    made: list[Hosts] = []

    def make(*args: Any, **kwargs: Any) -> Hosts:
        made.append(Hosts(*args, **kwargs))
        return made[-1]

    yield make
    for hosts in made:
        hosts.close()


def transfer(hosts: Hosts, kind: str, nbytes: int, seed: int) -> dict[str, int]:
    """One op; what each link carried of it, on the side that sends."""
    source = hosts.a if kind == "write" else hosts.b
    source(FILL, nbytes=nbytes, seed=seed)
    before = source.bytes_sent()
    assert hosts.a(OP, kind=kind) == nbytes
    after = source.bytes_sent()
    assert hosts.a(DIGEST) == hosts.b(DIGEST)
    return {link: after[link] - before[link] for link in hosts.links}


def test_all_links_carry_one_op_and_one_may_go(make_hosts: Callable[..., Hosts]) -> None:
    """The fast one: no shaping, no waiting."""
    hosts = make_hosts(3)
    nbytes = 48 * MiB
    hosts.meet(nbytes)
    for kind in ("write", "read"):
        carried = transfer(hosts, kind, nbytes, seed=1)
        assert all(n > nbytes / 20 for n in carried.values()), carried
        assert sum(carried.values()) < 1.1 * nbytes
    hosts.link(1, "r1", "down")
    carried = transfer(hosts, "write", nbytes, seed=2)
    assert carried["r1"] < nbytes / 20
    assert hosts.b(NOTES) == ["n", "n"]
    hosts.link(1, "r1", "up")
    assert eventually(lambda: transfer(hosts, "write", nbytes, seed=3)["r1"] > nbytes / 20, 20)


@pytest.mark.netns
@pytest.mark.parametrize("kind", ["write", "read"])
@pytest.mark.parametrize("link", ["r0", "r2"])  # r0 carries control
@pytest.mark.parametrize("how", ["down here", "down there", "silent drop"])
def test_a_link_is_lost_inside_an_op(make_hosts: Callable[..., Hosts], how: str, link: str, kind: str) -> None:
    hosts = make_hosts(4, shape="rate 1gbit burst 256k latency 100ms")
    nbytes = 256 * MiB
    hosts.meet(nbytes)
    transfer(hosts, kind, nbytes, seed=1)
    source = hosts.a if kind == "write" else hosts.b
    source(FILL, nbytes=nbytes, seed=2)

    def cut(on: bool) -> None:
        if how == "silent drop":
            hosts.drop_silently(link, on)
        else:
            hosts.link(how == "down there", link, "down" if on else "up")

    hosts.a.start(OP, kind=kind)
    time.sleep(0.2)
    cut(True)
    assert hosts.a.result() == nbytes
    assert hosts.a(DIGEST) == hosts.b(DIGEST)
    assert hosts.stats()["failovers"] >= 1
    assert hosts.b(NOTES) == (["n", "n"] if kind == "write" else [])
    carried = transfer(hosts, kind, nbytes, seed=3)
    assert carried[link] < nbytes / 20, carried
    cut(False)
    assert eventually(lambda: transfer(hosts, kind, nbytes, seed=4)[link] > nbytes / 8, 20)


@pytest.mark.netns
def test_filters_and_links_that_appear(make_hosts: Callable[..., Hosts]) -> None:
    hosts = make_hosts(4)
    nbytes = 48 * MiB
    hosts.link(0, "r1", "down")
    hosts.meet(nbytes, nics=["r*", "!r3"])
    carried = transfer(hosts, "write", nbytes, seed=1)
    assert carried["r3"] == 0
    assert min(carried["r0"], carried["r2"]) > nbytes / 20
    hosts.link(0, "r1", "up")
    assert eventually(lambda: transfer(hosts, "write", nbytes, seed=2)["r1"] > nbytes / 20, 20)
    assert carried["r3"] == 0


@pytest.mark.netns
def test_an_idle_session_outlives_the_link_of_its_control_lane(make_hosts: Callable[..., Hosts]) -> None:
    hosts = make_hosts(2)
    nbytes = 4 * MiB
    hosts.meet(nbytes)
    hosts.drop_silently("r0", True)
    time.sleep(7)  # longer than a silent session may live
    hosts.a("again = peer.open(bytes.fromhex(descriptor))", descriptor=hosts.descriptor)
    transfer(hosts, "write", nbytes, seed=1)
    assert hosts.a("result = peer.alive")
