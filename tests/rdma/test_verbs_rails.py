"""Real verbs, two rails: both carry one op, and none of what may happen to a rail reaches the user."""

from __future__ import annotations

import subprocess
import time

import machine
import pytest
from machine import MiB, link_down, loss, sh, two
from processes import eventually

import torch_mooncake as tm

pytestmark = pytest.mark.rdma


def test_one_op_uses_both_rails_and_nothing_else() -> None:
    with two(16 * MiB) as pair:
        before = pair.sent()
        pair.write(1).wait()
        pair.check(1)
        sent = {rail: n - before[rail] for rail, n in pair.sent().items()}
        assert sum(sent.values()) == 16 * MiB
        assert min(sent.values()) >= 0.35 * 16 * MiB, sent
        stats = pair.here.stats()
        assert {name: n for name, n in stats["bytes_sent"].items() if n} == {"rdma": 16 * MiB}
        pair.local[:] = bytes(16 * MiB)
        op = pair.here.read(pair.region, pair.opened)
        op.wait()
        assert op.transport == "rdma"
        assert pair.local == machine.pattern(16 * MiB, 1)
        assert {name: n for name, n in pair.here.stats()["bytes_received"].items() if n} == {"rdma": 16 * MiB}


@pytest.mark.parametrize(("way", "end"), [("write", 0), ("write", 1), ("read", 0), ("read", 1)])
def test_a_rail_goes_down_in_the_middle_and_comes_back(way: str, end: int) -> None:
    with two(16 * MiB) as pair:
        op = pair.start(way, 2)
        assert eventually(lambda: pair.moved()["a"] > 0)
        with link_down(f"a{end}"):
            op.wait()
            pair.check(2)
            pair.wait_for_rails("b")
            pair.start(way, 3).wait()
            pair.check(3)
        pair.wait_for_rails("ab")
        before = pair.moved()
        pair.start(way, 4).wait()
        pair.check(4)
        assert all(n > before[rail] for rail, n in pair.moved().items())
        assert pair.here.stats()["failovers"] >= 1


def test_two_percent_of_the_packets_are_lost_and_no_byte() -> None:
    with two(2 * MiB) as pair, loss(2, "a0", "b0", "a1", "b1"):
        pair.write(5).wait()
        pair.check(5)
        pair.local[:] = bytes(len(pair.local))
        pair.here.read(pair.region, pair.opened, timeout=60).wait()
        assert pair.local == machine.pattern(2 * MiB, 5)


@pytest.mark.parametrize(("way", "end"), [("write", 0), ("read", 1)])
def test_one_rail_loses_everything_and_the_other_carries_it(way: str, end: int) -> None:
    with two(2 * MiB) as pair:
        with loss(100, f"b{end}"):
            pair.start(way, 6).wait()
            pair.check(6)
            pair.wait_for_rails("a")
        pair.wait_for_rails("ab")


@pytest.mark.parametrize(("way", "end"), [("write", 0), ("read", 1)])
def test_no_packet_arrives_anywhere_and_the_peer_is_lost_within_the_deadline(way: str, end: int) -> None:
    with two() as pair:
        with loss(100, f"a{end}", f"b{end}"):
            start = time.monotonic()
            op = pair.start(way, 7, timeout=30)
            with pytest.raises(tm.PeerLost, match="no RDMA rail"):
                op.wait()
            assert time.monotonic() - start < 30
            with pytest.raises(tm.PeerLost, match="no RDMA rail"):  # the next need not find out again
                pair.write(7, timeout=1).wait()
        pair.wait_for_rails("ab")
        pair.write(8).wait()
        pair.check(8)


def test_a_device_is_removed_and_the_engine_lives_on() -> None:
    removal = remove_under_way()
    assert removal.wait(60) == 0  # it waits until nobody has the devices open
    sh(f"/bin/bash {machine.NETWORK}")
    with two() as pair:
        pair.write(11).wait()
        pair.check(11)


def remove_under_way() -> subprocess.Popen[bytes]:
    with two(16 * MiB) as pair:
        op = pair.write(9)
        assert eventually(lambda: pair.sent()["b"] > 0)
        removal = subprocess.Popen(["ip", "link", "delete", "b0"])  # with it go b1, and the devices on both
        op.wait()
        pair.check(9)
        pair.wait_for_rails("a")
        pair.write(10).wait()
        pair.check(10)
        assert pair.peer.alive
        assert removal.poll() is None
        return removal
