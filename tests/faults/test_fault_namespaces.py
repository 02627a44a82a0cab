"""Links between hosts, with network namespaces as hosts: black holes, links that go down and up, packets that are lost
for good. Needs root; every namespace is the test's own and goes with it."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator

import pytest
from fault_ways import MiB
from processes import Child

pytestmark = pytest.mark.netns

SETUP = """
import os, time
import numpy as np, torch_mooncake as tm
engine = tm.Engine(listen=listen, transports=("tcp",), token="t", host_id=host_id, name=host_id)
memory = np.zeros(nbytes, np.uint8)
region = engine.register(memory)
result = [engine.addresses[0], region.descriptor().hex()]
"""
CONNECT = """
peer = engine.connect(address)
remote = peer.open(bytes.fromhex(descriptor))
result = remote.transport
"""
OUTCOME = """
start = time.monotonic()
try:
    getattr(engine, kind)(region, remote, timeout=timeout, notify=b"n").wait()
    outcome = "done"
except tm.Error as error:
    outcome = type(error).__name__
result = [outcome, time.monotonic() - start]
"""


def sh(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


class Host(Child):
    """A child in a namespace of its own."""

    def __init__(self, name: str) -> None:
        self.name = name
        super().__init__(prefix=["ip", "netns", "exec", name])


class TwoHosts:
    """10.77.0.1 and 10.77.0.2 on a veth pair."""

    def __init__(self) -> None:
        names = [f"tm-{os.getpid()}-{side}" for side in "ab"]
        for name in names:
            sh("ip", "netns", "add", name)
        sh("ip", "link", "add", "tm0", "netns", names[0], "type", "veth", "peer", "name", "tm0", "netns", names[1])
        for i, name in enumerate(names):
            sh("ip", "-n", name, "addr", "add", f"10.77.0.{i + 1}/24", "dev", "tm0")
            for device in ("lo", "tm0"):
                sh("ip", "-n", name, "link", "set", device, "up")
        self.names = names
        self.a, self.b = (Host(name) for name in names)

    def meet(self, nbytes: int) -> None:
        """Both have engines; a has opened b's region."""
        sides = []
        for i, host in enumerate((self.a, self.b)):
            sides.append(host(SETUP, listen=f"tcp://10.77.0.{i + 1}:0", host_id=f"host-{i}", nbytes=nbytes))
        assert self.a(CONNECT, address=sides[1][0], descriptor=sides[1][1]) == "tcp"

    def link(self, state: str) -> None:
        sh("ip", "-n", self.names[0], "link", "set", "tm0", state)

    def drop_silently(self, on: bool) -> None:
        """Packets vanish; no device says so."""
        action = "-A" if on else "-D"
        for chain in ("INPUT", "OUTPUT"):
            sh("ip", "netns", "exec", self.names[0], "iptables", "-w", action, chain, "-p", "tcp", "-j", "DROP")

    def close(self) -> None:
        for host in (self.a, self.b):
            host.process.kill()
            host.process.wait()
            host.close()
        for name in self.names:
            sh("ip", "netns", "del", name)


@pytest.fixture
def hosts() -> Iterator[TwoHosts]:
    if os.geteuid() != 0:
        pytest.skip("needs root to make network namespaces")
    made = TwoHosts()
    yield made
    made.close()


@pytest.mark.parametrize("how", ["link down", "silent drop"])
def test_the_only_link_is_lost_and_comes_back(hosts: TwoHosts, how: str) -> None:
    """Ops end by their deadline; the session by its limit of silence; a new one works as soon as the link does."""
    hosts.meet(16 * MiB)
    assert hosts.a(OUTCOME, kind="write", timeout=20)[0] == "done"

    def cut(on: bool) -> None:
        if how == "link down":
            hosts.link("down" if on else "up")
        else:
            hosts.drop_silently(on)

    cut(True)
    outcome, took = hosts.a(OUTCOME, kind="read", timeout=1)
    assert outcome in ("DeadlineExceeded", "PeerLost")
    assert took < 3.3
    outcome, took = hosts.a(OUTCOME, kind="write", timeout=30)
    assert outcome == "PeerLost"
    assert took < 8  # promised: 5 s of silence
    cut(False)
    hosts.meet(16 * MiB)
    assert hosts.a(OUTCOME, kind="write", timeout=20)[0] == "done"


def test_a_short_outage_costs_time_and_nothing_else(hosts: TwoHosts) -> None:
    hosts.meet(64 * MiB)
    hosts.b("memory[:] = np.random.default_rng(1).integers(0, 256, nbytes, np.uint8)")
    hosts.a.start(OUTCOME, kind="read", timeout=30)
    time.sleep(0.01)
    hosts.drop_silently(True)
    time.sleep(1)
    hosts.drop_silently(False)
    assert hosts.a.result()[0] == "done"
    digest = "import hashlib; result = hashlib.sha256(memory).hexdigest()"
    assert hosts.a(digest) == hosts.b(digest)


def test_a_black_holed_address_delays_nobody(hosts: TwoHosts) -> None:
    """An address whose packets vanish (a removed pod): connect() ends by its deadline, also eight at a time, and ops
    with others go on at their pace."""
    hosts.meet(MiB)
    code = """
import threading
took, outcomes = [], []
def dial():
    start = time.monotonic()
    try:
        engine.connect("tcp://10.77.0.99:7000", timeout=1.5)
    except tm.Error as error:
        outcomes.append(type(error).__name__)
    took.append(time.monotonic() - start)
threads = [threading.Thread(target=dial) for _ in range(8)]
for thread in threads: thread.start()
start = time.monotonic()
for _ in range(50):
    engine.write(region, remote, timeout=20).wait()
meanwhile = time.monotonic() - start
for thread in threads: thread.join()
result = [meanwhile, max(took), outcomes]
"""
    sh("ip", "-n", hosts.names[0], "neigh", "add", "10.77.0.99", "lladdr", "02:00:00:00:00:99", "dev", "tm0")
    meanwhile, longest, outcomes = hosts.a(code)
    assert meanwhile < 1.4
    assert longest < 1.75 + 2
    assert len(outcomes) == 8
    assert set(outcomes) <= {"DeadlineExceeded", "PeerLost"}
