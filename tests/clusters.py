"""A pool of nodes that elect their leader in a real etcd, each a "host" of its own, and programs that use it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from chaos_proxy import Proxy
from etcd_server import Etcd
from processes import PoolEnv, command_line, eventually, free_port, stop

import torch_mooncake as tm

NAMES = ("a", "b", "c")
TYPED = (tm.PoolUnavailable, tm.PeerLost, tm.DeadlineExceeded)


def value(number: int) -> np.ndarray[Any, Any]:
    return np.full(5000, number, np.int64)  # 40 kB: rides in no message


class Node:
    """One "host"'s node: a process of ``torch-mooncake node``, and clients of it."""

    def __init__(self, cluster: Cluster, name: str) -> None:
        self.cluster, self.name = cluster, name
        self.address = f"tcp://127.0.0.1:{free_port()}"
        self.way = Proxy(f"tcp://127.0.0.1:{cluster.etcd.port}")  # to etcd
        self.process: subprocess.Popen[bytes] | None = None
        self._pool: tm.Pool | None = None
        self.start()

    def start(self) -> None:
        args = ["--pool", self.name, "--host-id", self.name, "--listen", self.address, "--memory", "64MiB"]
        args += ["--discovery", self.way.address.replace("tcp:", "etcd:") + "/test", "--drain", "10"]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "torch_mooncake", "node", *args], stderr=subprocess.DEVNULL
        )

    @property
    def pool(self) -> tm.Pool:
        if self._pool is None:
            self._pool = tm.Pool(self.address)
        return self._pool

    def pids(self) -> list[int]:
        """Keeper and worker."""
        return [pid for pid in self.cluster.env.nodes() if f"--pool\0{self.name}\0" in command_line(pid)]

    def send(self, signum: int) -> None:
        for pid in self.pids():
            os.kill(pid, signum)
        if signum == signal.SIGKILL:
            assert self.process
            self.process.wait()
            assert eventually(lambda: not self.pids())

    def cut_from_etcd(self, yes: bool = True) -> None:
        self.way.refuse(yes)
        for link in self.way.links if yes else ():
            link.reset()

    def stop_worker(self) -> None:
        stop(self.pids()[-1])

    def kill_worker(self) -> None:
        os.kill(self.pids()[-1], signal.SIGKILL)

    def here(self) -> dict[str, Any]:
        """What this node says of itself."""
        try:
            with tm.Pool(self.address) as pool:
                return pool._client(time.monotonic_ns() + 2_000_000_000).stat(
                    time.monotonic_ns() + 2_000_000_000, here=True
                )["nodes"][0]
        except tm.Error:
            return {}  # it does not answer


class Cluster:
    def __init__(self, etcd: Etcd, env: PoolEnv, names: Sequence[str] = NAMES) -> None:
        self.etcd, self.env = etcd, env
        self.nodes = {name: Node(self, name) for name in names}

    def add(self, name: str) -> Node:
        self.nodes[name] = Node(self, name)
        return self.nodes[name]

    def becomes_whole(self, n: int = 3, timeout: float = 40) -> bool:
        """All ``n`` nodes serve, and know of each other."""

        def whole() -> bool:
            for node in self.living():
                try:
                    stat = node.pool.stat()
                except tm.Error:
                    return False
                if len(stat["nodes"]) != n or not all(each["ready"] for each in stat["nodes"]):
                    return False
            return len(self.living()) == n

        return eventually(whole, timeout)

    def living(self) -> list[Node]:
        return [node for node in self.nodes.values() if node.process and node.process.poll() is None]

    def leader(self) -> Node:
        leaders: list[Node] = []

        def one() -> bool:
            leaders[:] = [node for node in self.living() if node.here().get("is_home")]
            # One that has said so may have been replaced since. It has not if it says so after the other.
            assert len(leaders) < 2 or not leaders[0].here().get("is_home"), "two nodes lead at once"
            return len(leaders) == 1

        assert eventually(one, 30)
        return leaders[0]

    def others(self, node: Node) -> list[Node]:
        return [other for other in self.living() if other is not node]

    def close(self) -> None:
        for node in self.nodes.values():
            if node._pool:
                node._pool.close()
            for pid in node.pids():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)
        started = [node for node in self.nodes.values() if node.process]
        for node in started:
            node.process.terminate()
        late = []
        for node in started:
            try:
                node.process.wait(20)
            except subprocess.TimeoutExpired:
                late.append(node.name)
                for pid in node.pids():
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                node.process.kill()
        for node in self.nodes.values():
            node.way.close()
        assert not late, f"nodes that did not end: {late}"


class Writers:
    """One thread a node that puts and gets, for as long as the block lasts. A get returns the last value that was
    acknowledged (or one whose outcome is unknown, from then on); nothing fails but by a typed error."""

    def __init__(self, nodes: list[Node], replicas: int) -> None:
        self.replicas, self.over, self.wrong = replicas, threading.Event(), []  # type: ignore[var-annotated]
        self.done, self.errors = 0, []  # type: ignore[var-annotated]
        self.threads = [threading.Thread(target=self._run, args=(node,)) for node in nodes]

    def __enter__(self) -> Writers:
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self.over.set()
        for thread in self.threads:
            thread.join(60)
        assert not any(thread.is_alive() for thread in self.threads), "a call does not end"
        assert not self.wrong, self.wrong[:3]

    @property
    def failed(self) -> int:
        return len(self.errors)

    def _run(self, node: Node) -> None:
        possible, number = {0}, 0
        key = f"live/{node.name}"
        while not self.over.is_set():
            number += 1
            try:
                node.pool.put(key, value(number), replicas=self.replicas, timeout=20)
                possible = {number}
                self.done += 1
            except TYPED as error:
                self.errors.append(repr(error))
                if "outcome unknown" in str(error):
                    possible.add(number)
            except Exception as error:
                self.wrong.append(repr(error))
            try:
                got = int(node.pool.get(key, timeout=20)[0])
                if got in possible:
                    possible = {got}
                else:
                    self.wrong.append(f"{key}: {got}, not one of {possible}")
            except TYPED as error:
                self.errors.append(repr(error))
            except tm.KeyNotFound:
                if 0 not in possible:
                    self.wrong.append(f"{key} is missing")
            except Exception as error:
                self.wrong.append(repr(error))


def cluster_of(cluster: Cluster, *nodes: Node) -> bool:
    """Those nodes alone are a pool."""

    def whole() -> bool:
        try:
            return all(len(node.pool.stat()["nodes"]) == len(nodes) for node in nodes)
        except tm.Error:
            return False

    return eventually(whole, 40)


def replace_while_stopped(cluster: Cluster, leader: Node, key: str, new: Any) -> None:
    """The others elect one and put ``key`` anew; from the moment when it wakes, the old leader tells no older value."""
    one, two = cluster.others(leader)
    leader.stop_worker()
    try:
        assert cluster_of(cluster, one, two)
        one.pool.put(key, new, timeout=30)
    finally:
        leader.send(signal.SIGCONT)
    for _ in range(20):
        try:
            assert np.array_equal(leader.pool.get(key, timeout=2), new)
        except TYPED:
            pass
