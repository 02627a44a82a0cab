"""Hosts as network namespaces on a bridge, each with one NIC of a given rate (also for benchmarks/weights.py).
Needs root and tc."""

from __future__ import annotations

import os
import signal
import subprocess
from typing import Any

from processes import Child


def sh(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


class ShapedHosts:
    """``mbit``: of each NIC, each way. ``nics``: of each host; the first ones are tm0 and 10.82.0.1, .2, …, the second
    ones tm1 and 10.83.0.1, …: networks that know nothing of each other. MTU 9000. One child process in each host."""

    def __init__(self, count: int, mbit: int, env: dict[str, str], nics: int = 1) -> None:
        tag = f"tmw-{os.getpid()}"
        self.bridge, self.names = f"{tag}-br", [f"{tag}-{i}" for i in range(count)]
        self.addresses = [f"10.82.0.{i + 1}" for i in range(count)]
        self.programs: list[Child] = []
        try:
            for name in [self.bridge, *self.names]:
                sh("ip", "netns", "add", name)
                sh("ip", "-n", name, "link", "set", "lo", "up")
            for nic in range(nics):
                self._network(nic, mbit)
            for name in self.names:
                self.programs.append(Child(env, ["ip", "netns", "exec", name]))
        except BaseException:
            self.close()
            raise

    def _network(self, nic: int, mbit: int) -> None:
        bridge, device = f"br{nic}", f"tm{nic}"
        sh("ip", "-n", self.bridge, "link", "add", bridge, "type", "bridge")
        sh("ip", "-n", self.bridge, "link", "set", bridge, "mtu", "9000", "up")
        for i, name in enumerate(self.names):
            port = f"port{i}-{nic}"
            peer = ("type", "veth", "peer", "name", port, "netns", self.bridge)
            sh("ip", "link", "add", device, "netns", name, *peer)
            sh("ip", "-n", self.bridge, "link", "set", port, "mtu", "9000", "master", bridge, "up")
            sh("ip", "-n", name, "addr", "add", f"10.{82 + nic}.0.{i + 1}/24", "dev", device)
            sh("ip", "-n", name, "link", "set", device, "mtu", "9000", "up")
            self.shape(i, mbit, nic)

    def shape(self, i: int, mbit: int, nic: int = 0) -> None:
        """The rate of a NIC, both ways, from now on."""
        burst = max(64, 256 * mbit // 1000)  # KiB: 2 ms of the rate, where packets of 64 KiB fit
        shape = ("root", "tbf", "rate", f"{mbit}mbit", "burst", f"{burst}k", "latency", "50ms")
        sh("tc", "-n", self.names[i], "qdisc", "replace", "dev", f"tm{nic}", *shape)
        sh("tc", "-n", self.bridge, "qdisc", "replace", "dev", f"port{i}-{nic}", *shape)

    def start(self, i: int, code: str, **names: Any) -> None:
        self.programs[i].start(code, host=f"host{i}", address=self.addresses[i], **names)

    def run(self, code: str, hosts: range | None = None, **names: Any) -> list[Any]:
        """On all hosts (or these) at once; their results."""
        chosen = range(len(self.names)) if hosts is None else hosts
        for i in chosen:
            self.start(i, code, **names)
        return [self.programs[i].result() for i in chosen]

    def cut(self, i: int, nic: int = 0) -> None:
        sh("ip", "-n", self.names[i], "link", "set", f"tm{nic}", "down")

    def mend(self, i: int, nic: int = 0) -> None:
        sh("ip", "-n", self.names[i], "link", "set", f"tm{nic}", "up")

    def bytes_received(self, i: int) -> int:
        path = "/sys/class/net/tm0/statistics/rx_bytes"
        return int(sh("ip", "netns", "exec", self.names[i], "cat", path))

    def close(self) -> None:
        for program in self.programs:
            program.process.kill()
            program.process.communicate()
        for name in [*self.names, self.bridge]:
            found = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True, check=False).stdout
            for pid in found.split():
                os.kill(int(pid), signal.SIGKILL)
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
