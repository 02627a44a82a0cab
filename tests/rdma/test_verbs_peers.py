"""Real verbs, several processes and engines: killed, stopped, started again, many, and both sides at once."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import machine
import pytest
from machine import MiB, begun, engine
from processes import stopped

import torch_mooncake as tm

pytestmark = pytest.mark.rdma

SERVE = """
import sys
sys.path.insert(0, folder)
import machine
engine = machine.engine(1, name="server")
memory = bytearray(nbytes)
region = engine.register(memory)
result = [engine.addresses[0], region.descriptor().hex()]
"""


class Server:
    """Another process with memory at the far end of the rails."""

    def __init__(self, child: Callable[..., Any], nbytes: int) -> None:
        self.process = child()
        names = {"folder": str(machine.NETWORK.parents[1]), "nbytes": nbytes}
        self.address, descriptor = self.process(SERVE, **names)
        self.descriptor = bytes.fromhex(descriptor)

    def holds(self, nbytes: int, seed: int) -> bool:
        return bool(self.process(f"result = memory == machine.pattern({nbytes}, {seed})"))


@pytest.mark.parametrize("way", ["write", "read"])
def test_killed_in_the_middle_and_started_again_under_the_same_name(child: Callable[..., Any], way: str) -> None:
    nbytes = 64 * MiB
    with engine(0) as here:
        local = bytearray(machine.pattern(nbytes, 1))
        region = here.register(local)
        server = Server(child, nbytes)
        remote = here.connect(server.address).open(server.descriptor)
        op = getattr(here, way)(region, remote)
        assert begun(op)
        server.process.kill()
        with pytest.raises(tm.PeerLost, match="server"):
            op.wait()
        again = Server(child, nbytes)
        local[:] = machine.pattern(nbytes, 1)  # a read has left parts of the other's
        remote = here.connect(again.address).open(again.descriptor)
        here.write(region, remote).wait()
        assert again.holds(nbytes, 1)
        here.deregister(region)


def test_a_stopped_peer_is_read_and_written_all_the_same(child: Callable[..., Any]) -> None:
    nbytes = 4 * MiB
    with engine(0) as here:
        server = Server(child, nbytes)
        remote = here.connect(server.address).open(server.descriptor)
        local = bytearray(machine.pattern(nbytes, 2))
        region = here.register(local)
        with stopped(server.process.pid):
            here.write(region, remote).wait()
            local[:] = bytes(nbytes)
            here.read(region, remote).wait()
            assert local == machine.pattern(nbytes, 2)
            # A notification has to be delivered by somebody: it ends by its deadline.
            with pytest.raises(tm.DeadlineExceeded):
                here.write(region, remote, timeout=1, notify=b"there?").wait()
        assert server.holds(nbytes, 2)


def test_a_peer_stopped_in_the_middle_holds_up_no_byte(child: Callable[..., Any]) -> None:
    nbytes = 64 * MiB
    with engine(0) as here:
        server = Server(child, nbytes)
        remote = here.connect(server.address).open(server.descriptor)
        local = bytearray(machine.pattern(nbytes, 4))
        op = here.write(here.register(local), remote, timeout=60)
        assert begun(op)
        with stopped(server.process.pid):
            assert op.bytes_done < nbytes
            op.wait()
        assert op.bytes_done == nbytes
        assert server.holds(nbytes, 4)


def test_thirty_two_engines_in_one_process_write_to_one() -> None:
    count = 32
    with engine(1, name="target") as target:
        memory = bytearray(count << 16)
        region = target.register(memory)
        engines = [engine(0, name=f"source {i}") for i in range(count)]
        try:
            ops = []
            for i, source in enumerate(engines):
                local = source.register(bytearray(machine.pattern(1 << 16, i)))
                remote = source.connect(target.addresses[0]).open(region.descriptor())
                ops.append(source.write(local, remote[i << 16 : (i + 1) << 16], notify=b"%d" % i))
            for op in ops:
                op.wait()
            assert memory == b"".join(machine.pattern(1 << 16, i) for i in range(count))
            notes = {target.next_notification(10).data for _ in range(count)}
            assert notes == {b"%d" % i for i in range(count)}
        finally:
            for source in engines:
                source.close()


def test_few_queue_pairs_for_many_peers() -> None:
    # Each peer wants one on either NIC: of six peers two are connected at a time, and those that are idle make room.
    with engine(0, rdma="qps=2") as source:
        targets = [engine(1, name=f"target {i}") for i in range(6)]
        try:
            local = source.register(bytearray(machine.pattern(1 << 16, 3)))
            memories, remotes = [bytearray(1 << 16) for _ in targets], []
            for target, memory in zip(targets, memories, strict=True):
                remote = source.connect(target.addresses[0]).open(target.register(memory).descriptor())
                source.write(local, remote).wait()
                remotes.append(remote)
            for _ in range(2):
                for i, remote in enumerate(remotes):
                    memories[i][:] = bytes(1 << 16)
                    source.write(local, remote).wait()
                    assert memories[i] == machine.pattern(1 << 16, 3)
            lanes = [lane for lane in source.stats()["lanes"] if lane["transport"] == "rdma"]
            assert len(lanes) == 12
            assert sum(lane["alive"] for lane in lanes) <= 4
        finally:
            for target in targets:
                target.close()


def test_both_sides_connect_and_write_at_the_same_time() -> None:
    for seed in range(5):
        write_both_ways(seed)


def write_both_ways(seed: int) -> None:
    with engine(0) as a, engine(1) as b:
        memories = {e: (bytearray(machine.pattern(MiB, seed)), bytearray(MiB)) for e in (a, b)}
        regions = {e: tuple(map(e.register, both)) for e, both in memories.items()}
        barrier = threading.Barrier(2)
        failures: list[tm.Error] = []

        def one_way(source: tm.Engine, target: tm.Engine) -> None:
            try:
                barrier.wait()
                remote = source.connect(target.addresses[0]).open(regions[target][1].descriptor())
                source.write(regions[source][0], remote).wait()
            except tm.Error as error:
                failures.append(error)

        threads = [threading.Thread(target=one_way, args=pair) for pair in ((a, b), (b, a))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures
        for _, target in memories.values():
            assert target == machine.pattern(MiB, seed)
