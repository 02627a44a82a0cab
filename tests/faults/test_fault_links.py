"""Broken connections, by a proxy between two engines: resets, half-open and half-closed sockets, corrupt frames, and a
lane that is cut after its slice was sent again. (Lost links between hosts: test_fault_namespaces.py.)"""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from chaos_proxy import DOWN, UP, Proxy
from fault_ways import MiB, Two, ends, random_bytes
from processes import eventually

import torch_mooncake as tm


class Proxied:
    def __init__(self, two: Two) -> None:
        self.two = two
        self.proxy = Proxy(two.address)
        two.connect(self.proxy.address)
        self.read_once()
        assert eventually(lambda: self.bulk)  # the lanes for bulk are there

    def read_once(self) -> None:
        self.two.engine.read(self.two.region, self.two.remote, timeout=20).wait()

    @property
    def control(self) -> Any:
        return self.proxy.links[0]

    @property
    def bulk(self) -> list[Any]:
        return self.proxy.links[1:]


@pytest.fixture
def proxied(make_two: Any) -> Iterator[Proxied]:
    made = Proxied(make_two("tcp", 16 * MiB, connect=False))
    yield made
    made.proxy.close()


@pytest.mark.parametrize("kind", ["write", "read"])
def test_lanes_are_reset_in_the_middle_and_every_byte_is_right(proxied: Proxied, kind: str) -> None:
    two = proxied.two
    rng = random.Random(3)
    for round_ in range(4):
        source = random_bytes(two.nbytes, round_)
        if kind == "write":
            two.local[:] = source
        else:
            two.fill_there(source)
        ops = [getattr(two.engine, kind)(two.region, two.remote, timeout=30, notify=b"n") for _ in range(3)]
        time.sleep(rng.uniform(0, 0.01))
        for link in rng.sample(proxied.bulk, min(1 + round_ % 2, len(proxied.bulk))):
            link.reset()
        for op in ops:
            assert ends(op, 30) is None
        assert np.array_equal(two.there() if kind == "write" else two.local, source)
    assert two.peer.alive
    notes = two.other("result = engine.stats()['notifications']")
    assert notes == 12, "each op is told once, however often its slices were sent"


def test_every_connection_is_reset(proxied: Proxied) -> None:
    two = proxied.two
    proxied.proxy.refuse()
    for link in proxied.proxy.links:
        link.freeze()  # so that the ops are under way
    ops = [two.engine.write(two.region, two.remote, timeout=30), two.engine.read(two.region, two.remote, timeout=30)]
    start = time.monotonic()
    for link in proxied.proxy.links:
        link.reset()
    for op in ops:
        assert isinstance(ends(op, 10), tm.PeerLost)
    assert time.monotonic() - start < 3  # promised: 1 s
    two.engine.deregister(two.region, timeout=5)
    two.region = two.engine.register(two.local)
    proxied.proxy.refuse(False)
    two.connect(proxied.proxy.address)  # and a new session works
    proxied.read_once()


def test_a_half_open_connection_is_noticed_by_its_silence(proxied: Proxied) -> None:
    """Nothing arrives any more, and no packet says so: ops end by their deadline, the session within its limit."""
    two = proxied.two
    proxied.proxy.refuse()
    for link in proxied.proxy.links:
        link.freeze()
    start = time.monotonic()
    op = two.engine.write(two.region, two.remote, timeout=0.6)
    long = two.engine.read(two.region, two.remote, timeout=60)
    assert isinstance(ends(op, 5), tm.DeadlineExceeded)
    assert time.monotonic() - start < 3
    error = ends(long, 15)
    assert isinstance(error, tm.PeerLost), error
    assert time.monotonic() - start < 10  # promised: 5 s of silence
    two.local[:] = 99  # ours again
    for link in proxied.proxy.links:
        link.thaw()
    time.sleep(0.3)
    assert (two.local == 99).all()


@pytest.mark.parametrize("direction", [UP, DOWN])
@pytest.mark.parametrize("which", ["control", "bulk"])
def test_half_closed_connections(proxied: Proxied, which: str, direction: str) -> None:
    """One side reads end of file: that connection is over. The session goes on without a lane, and ends without the
    first of them; every op has an outcome that is true."""
    two = proxied.two
    two.local[:] = random_bytes(two.nbytes, 9)
    links = [proxied.control] if which == "control" else proxied.bulk[:1]
    op = two.engine.write(two.region, two.remote, timeout=20)
    for link in links:
        link.half_close(direction)
    error = ends(op, 25)
    assert error is None or isinstance(error, tm.PeerLost), error
    if which == "bulk":
        assert error is None
        assert np.array_equal(two.there(), two.local)
    if error is None and two.peer.alive:
        proxied.read_once()


@pytest.mark.parametrize("direction", [UP, DOWN])
def test_a_corrupt_frame_ends_its_connection_and_no_more(proxied: Proxied, direction: str, make_two: Any) -> None:
    """A header that makes no sense is never guessed at. Another peer of both engines notices nothing."""
    two = proxied.two
    bystander = make_two("tcp")
    remote = two.engine.connect(bystander.address).open(bystander.descriptor)
    nonsense = random_bytes(32, 5).tobytes()
    for link in proxied.proxy.links:
        link.hooks[direction] = lambda data: nonsense + data if data else data
    outcomes = [ends(lambda: two.engine.write(two.region, two.remote, timeout=5, notify=b"n"), 12) for _ in range(2)]
    fair = tm.PeerLost | tm.Corrupt | tm.DeadlineExceeded  # or it went over lanes that were dialled anew, and is right
    assert all(error is None or isinstance(error, fair) for error in outcomes), outcomes
    if outcomes[-1] is None:
        assert np.array_equal(two.there(), two.local)
    two.engine.write(two.region[: bystander.nbytes], remote, timeout=20).wait()
    assert two.other("result = 1 + 1") == 2  # it lives
    if not two.peer.alive:
        assert eventually(lambda: two.other("result = engine.stats()['sessions']") == 0)
    two.connect(two.address)
    proxied.read_once()


def test_a_lane_is_cut_after_its_slice_was_sent_again(proxied: Proxied) -> None:
    """What the network still holds of the first attempt arrives late, on a connection that the receiver takes for
    alive: it must not reach the destination, which is in use for something else."""
    two = proxied.two
    late = proxied.bulk[0]
    two.local[:] = 11
    late.freeze(UP)  # the proxy holds what it takes
    op = two.engine.write(two.region, two.remote, timeout=30, notify=b"n")
    assert eventually(lambda: late.taken[UP] > late.passed[UP])  # part of the op is inside the proxy now
    before = late.passed[UP]
    late.reset_client()  # the sender sees that lane die, and sends again
    assert ends(op, 20) is None
    assert (two.there() == 11).all()
    two.local[:] = 22
    two.engine.write(two.region, two.remote, timeout=20).wait()
    late.thaw()  # the old bytes come out
    assert eventually(lambda: late.passed[UP] > before)
    time.sleep(0.3)
    assert (two.there() == 22).all(), "bytes of a slice that had been sent again landed"
    assert two.other("result = engine.stats()['notifications']") == 1
    two.engine.write(two.region, two.remote, timeout=20).wait()


def test_a_peer_that_stops_reading_is_back_pressure(proxied: Proxied) -> None:
    """Hundreds of ops into a connection that takes nothing: no error, no memory, and all is well when it flows."""
    two = proxied.two
    two.local[:] = random_bytes(two.nbytes, 4)
    proxied.proxy.refuse()
    for link in proxied.bulk:
        link.freeze()
    ops = [two.engine.write(two.region, two.remote, timeout=60) for _ in range(40)]
    time.sleep(0.3)
    assert not any(op.done() for op in ops)
    for link in proxied.bulk:
        link.thaw()
    assert all(ends(op, 60) is None for op in ops)
    assert np.array_equal(two.there(), two.local)


def test_the_listener_refuses_for_a_while(proxied: Proxied) -> None:
    """Lanes that were lost are dialled again, with back-off, until it works."""
    two = proxied.two
    proxied.proxy.refuse()
    for link in proxied.bulk:
        link.reset()
    first = ends(two.engine.write(two.region, two.remote, timeout=20), 25)
    assert first is None, first  # over the lane that is left
    lanes = len(proxied.proxy.links)
    proxied.proxy.refuse(False)
    assert eventually(lambda: len(proxied.proxy.links) > lanes)
    proxied.read_once()


def test_a_peer_restarts_on_the_same_address(way: str, make_two: Any, child: Any) -> None:
    """The old relation is over, and says so; the new process is another peer, whose memory no old name reaches."""
    old = make_two(way)
    address = old.address
    old.engine.write(old.region, old.remote).wait()
    old_id = old.peer.id
    old.other.kill(signal.SIGKILL)
    new = make_two(way, listen=address, connect=False)
    assert new.address == address
    new.fill_there(3)
    for move in (old.engine.write, old.engine.read):
        with pytest.raises(tm.PeerLost):
            move(old.region, old.remote, timeout=5).wait()
    peer = old.engine.connect(address)
    assert peer.alive
    assert peer.id != old_id
    with pytest.raises((tm.InvalidArgument, tm.KeyNotFound)):
        peer.open(old.descriptor)
    old.engine.write(old.region, peer.open(new.descriptor)).wait()
    assert np.array_equal(new.there(), old.local)
