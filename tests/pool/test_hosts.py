"""Three hosts, as network namespaces on a bridge: one is killed, or cut off, while the others read. Needs root."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
from processes import Child, PoolEnv

pytestmark = pytest.mark.netns

PORT = 7400
TOKEN = {"TM_TOKEN": "test"}
CONNECT = """
import time, threading
import numpy as np, torch_mooncake as tm
def value(number):
    return np.full(5000, number, np.int64)  # 40 kB: rides in no message
until = time.monotonic() + 60
while True:
    try:
        pool = tm.Pool(f"tcp://{host}:7400", host_id=host)
        if len(pool.stat()["nodes"]) == 3:
            break
        pool.close()
    except tm.Error:
        pass
    if time.monotonic() > until:
        raise RuntimeError("the three hosts did not become one pool")
    time.sleep(0.2)
"""
PUT = """
for i in range(n):
    pool.put(f"two/{host}/{i}", value(i), replicas=2)
    pool.put(f"one/{host}/{i}", value(i))
pool.put_many({f"two/{host}/many/{i}": value(i) for i in range(n)}, replicas=2)
pool.put_many({f"one/{host}/many/{i}": value(i) for i in range(n)})
"""
READ = """
keys = [(f"{copies}/{other}/{kind}{i}", i) for copies in ("two", "one") for other in others
        for kind in ("", "many/") for i in range(n)]
failures, misses, slowest, gets, stop = [], set(), 0.0, 0, False
def read():
    global slowest, gets
    while not stop:
        for key, number in keys:
            begin = time.monotonic()
            try:
                if not np.array_equal(pool.get(key, timeout=30), value(number)):
                    failures.append(key + ": another value")
            except tm.KeyNotFound:
                misses.add(key)
            except tm.Error as error:
                failures.append(f"{key}: {type(error).__name__}: {error}")
            slowest = max(slowest, time.monotonic() - begin)
            gets += 1
reader = threading.Thread(target=read)
reader.start()
"""
STOP = """
stop = True
reader.join()
result = [failures, sorted(misses), slowest, gets]
"""


def sh(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


class Hosts:
    """10.78.0.1, .2 and .3, each with a node (the first leads), and a program that uses it."""

    def __init__(self, env: PoolEnv) -> None:
        tag = f"tm-{os.getpid()}"
        self.bridge, self.names = f"{tag}-bridge", [f"{tag}-{i}" for i in range(3)]
        self.nodes: list[subprocess.Popen[bytes]] = []
        self.programs: list[Child] = []
        for name in [self.bridge, *self.names]:
            sh("ip", "netns", "add", name)
        sh("ip", "-n", self.bridge, "link", "add", "br0", "type", "bridge")
        sh("ip", "-n", self.bridge, "link", "set", "br0", "up")
        for i, name in enumerate(self.names):
            port = f"port{i}"
            sh("ip", "link", "add", "tm0", "netns", name, "type", "veth", "peer", "name", port, "netns", self.bridge)
            sh("ip", "-n", self.bridge, "link", "set", port, "master", "br0", "up")
            sh("ip", "-n", name, "addr", "add", f"{self.address(i)}/24", "dev", "tm0")
            for device in ("lo", "tm0"):
                sh("ip", "-n", name, "link", "set", device, "up")
        for i, name in enumerate(self.names):
            prefix = ["ip", "netns", "exec", name]
            command = [*prefix, sys.executable, "-m", "torch_mooncake", "node", "--pool", f"{env.pool}{i}"]
            command += [
                "--host-id",
                self.address(i),
                "--listen",
                f"tcp://{self.address(i)}:{PORT}",
                "--memory",
                "128MiB",
            ]
            command += ["--leader", f"tcp://{self.address(0)}:{PORT}"] if i else []
            self.nodes.append(subprocess.Popen(command, env={**os.environ, **TOKEN}, stderr=subprocess.DEVNULL))
            self.programs.append(Child(env=TOKEN, prefix=prefix))

    def meet(self) -> None:
        """Their programs see one pool of three nodes."""
        for i, program in enumerate(self.programs):
            program.start(CONNECT, host=self.address(i))
        for program in self.programs:
            program.result()

    @staticmethod
    def address(i: int) -> str:
        return f"10.78.0.{i + 1}"

    def kill(self, i: int) -> None:
        """Everything that runs there, at once."""
        pids = subprocess.run(["ip", "netns", "pids", self.names[i]], check=True, capture_output=True, text=True).stdout
        for pid in map(int, pids.split()):
            os.kill(pid, signal.SIGKILL)

    def cut(self, i: int) -> None:
        """It goes on, and nobody hears of it."""
        sh("ip", "-n", self.bridge, "link", "set", f"port{i}", "down")

    def close(self) -> None:
        for i in range(len(self.names)):
            self.kill(i)
        for process in [*self.nodes, *(program.process for program in self.programs)]:
            process.wait(20)
        for name in [self.bridge, *self.names]:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


@pytest.fixture
def hosts(pool_env: PoolEnv) -> Iterator[Hosts]:
    if os.geteuid() != 0:
        pytest.skip("needs root to make network namespaces")
    made = Hosts(pool_env)
    try:
        made.meet()
        yield made
    finally:
        made.close()


@pytest.mark.parametrize("how", ["killed", "cut off"])
def test_one_of_three_hosts_is_lost_under_reads(hosts: Hosts, how: str) -> None:
    n = 40
    for program in hosts.programs:
        program(PUT, n=n)
    readers = hosts.programs[:2]
    for program in readers:
        program(READ, others=[hosts.address(i) for i in range(3)], n=n)
    time.sleep(2)
    hosts.kill(2) if how == "killed" else hosts.cut(2)
    time.sleep(14)  # the leader counts it out after 5.5 s
    for program in readers:
        failures, misses, slowest, gets = program(STOP)
        assert gets > 2 * 2 * 2 * 3 * n  # each more than once
        assert failures == []
        # What had one copy, there, is missing; nothing else is.
        assert misses
        assert all(key.startswith(f"one/{hosts.address(2)}/") for key in misses)
        assert slowest < 15
