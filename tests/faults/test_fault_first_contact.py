"""First contact: both sides dial at once; a crowd meets while a silent connection is held open."""

from __future__ import annotations

import socket
import threading
import time
from typing import Any

import pytest

import torch_mooncake as tm

MANY = pytest.param(10_000, id="10000", marks=[pytest.mark.slow, pytest.mark.timeout(1800)])
CROWD = pytest.param(64, id="64", marks=[pytest.mark.slow, pytest.mark.timeout(900)])


def dial_each_other() -> list[str]:
    """Two new engines connect to each other in the same moment, and write: what came of it on either side."""
    engines = [tm.Engine(transports=("tcp",), host_id=h, token="t", lanes=1, io_threads=1) for h in ("a", "b")]
    regions = [engine.register(bytearray(64)) for engine in engines]
    meet = threading.Barrier(2)
    outcomes = ["", ""]

    def dial(i: int) -> None:
        ours, theirs = engines[i], engines[1 - i]
        meet.wait()
        try:
            remote = ours.connect(theirs.addresses[0], timeout=10).open(regions[1 - i].descriptor(), timeout=10)
            ours.write(regions[i][:8], remote[8:16], timeout=10).wait()
            outcomes[i] = "done"
        except Exception as error:
            outcomes[i] = f"{type(error).__name__}: {error}"

    threads = [threading.Thread(target=dial, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for engine in engines:
        engine.close()
    return outcomes


@pytest.mark.parametrize("rounds", [pytest.param(200, id="200"), MANY])
def test_two_engines_dial_each_other_at_once(rounds: int) -> None:
    """Every time both calls succeed, and both relations carry bytes."""
    for round_ in range(rounds):
        assert dial_each_other() == ["done", "done"], f"round {round_}"


MEMBER = """
import numpy as np, torch_mooncake as tm
engine = tm.Engine(transports=("tcp",), host_id=f"host-{rank}", token="t", name=f"rank {rank}", lanes=1, io_threads=1)
mine = np.full(4096, rank, np.uint8)
theirs = np.zeros((world, 4096), np.uint8)
source, target = engine.register(mine), engine.register(theirs.reshape(-1))
result = [engine.addresses[0], target.descriptor().hex()]
"""
MEET = """
for step in range(1, len(everybody)):
    address, descriptor = everybody[(rank + step) % len(everybody)]
    remote = engine.connect(address, timeout=60).open(bytes.fromhex(descriptor), timeout=60)
    engine.write(source, remote[4096 * rank : 4096 * (rank + 1)], timeout=60, notify=b"n").wait()
for _ in range(len(everybody) - 1):
    engine.next_notification(60)
result = [int(row.min()) * 1000 + int(row.max()) for row in theirs]
"""


@pytest.mark.parametrize("world", [pytest.param(12, id="12"), CROWD])
def test_everybody_meets_everybody_at_once(world: int, child: Any) -> None:
    """All in the same moment, with a connection that never says a word held open at every listener."""
    members = [child() for _ in range(world)]
    for rank, member in enumerate(members):
        member.start(MEMBER, rank=rank, world=world)
    everybody = [member.result() for member in members]
    silent = []
    for address, _ in everybody:
        host, _, port = address.removeprefix("tcp://").rpartition(":")
        silent.append(socket.create_connection((host, int(port))))
    start = time.monotonic()
    for member in members:
        member.start(MEET, everybody=everybody)
    for rank, member in enumerate(members):
        seen = member.result()
        want = [0 if other == rank else other * 1000 + other for other in range(world)]
        assert seen == want
    assert time.monotonic() - start < 60
    for s in silent:
        s.close()


def test_a_silent_listener_and_a_dead_one(make_two: Any) -> None:
    """A listener that never answers and a port without one: each call ends by its deadline, and nobody else waits."""
    two = make_two("tcp")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        errors: list[BaseException] = []

        def dial() -> None:
            try:
                two.engine.connect(f"tcp://127.0.0.1:{silent.getsockname()[1]}", timeout=3)
            except tm.Error as error:
                errors.append(error)

        threads = [threading.Thread(target=dial) for _ in range(8)]
        start = time.monotonic()
        for thread in threads:
            thread.start()
        for _ in range(20):
            two.engine.write(two.region, two.remote, timeout=10).wait()
        assert time.monotonic() - start < 2.5, "waited for somebody else's connection"
        with pytest.raises(tm.PeerLost):
            two.engine.connect("tcp://127.0.0.1:1", timeout=5)
        for thread in threads:
            thread.join(10)
        assert len(errors) == 8
        assert all(isinstance(error, tm.DeadlineExceeded | tm.PeerLost) for error in errors), errors
        assert time.monotonic() - start < 8
