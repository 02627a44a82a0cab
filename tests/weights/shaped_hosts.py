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
    """10.82.0.1, .2, … ``mbit``: of each host's NIC, each way. MTU 9000. One child process in each."""

    def __init__(self, count: int, mbit: int, env: dict[str, str]) -> None:
        tag = f"tmw-{os.getpid()}"
        self.bridge, self.names = f"{tag}-br", [f"{tag}-{i}" for i in range(count)]
        self.addresses = [f"10.82.0.{i + 1}" for i in range(count)]
        self.programs: list[Child] = []
        burst = max(64, 256 * mbit // 1000)  # KiB: 2 ms of the rate, where packets of 64 KiB fit
        shape = ("tbf", "rate", f"{mbit}mbit", "burst", f"{burst}k", "latency", "50ms")
        try:
            for name in [self.bridge, *self.names]:
                sh("ip", "netns", "add", name)
                sh("ip", "-n", name, "link", "set", "lo", "up")
            sh("ip", "-n", self.bridge, "link", "add", "br0", "type", "bridge")
            sh("ip", "-n", self.bridge, "link", "set", "br0", "mtu", "9000", "up")
            for i, name in enumerate(self.names):
                port = f"port{i}"
                sh(
                    "ip",
                    "link",
                    "add",
                    "tm0",
                    "netns",
                    name,
                    "type",
                    "veth",
                    "peer",
                    "name",
                    port,
                    "netns",
                    self.bridge,
                )
                sh("ip", "-n", self.bridge, "link", "set", port, "mtu", "9000", "master", "br0", "up")
                sh("ip", "-n", name, "addr", "add", f"{self.addresses[i]}/24", "dev", "tm0")
                sh("ip", "-n", name, "link", "set", "tm0", "mtu", "9000", "up")
                sh("tc", "-n", name, "qdisc", "add", "dev", "tm0", "root", *shape)
                sh("tc", "-n", self.bridge, "qdisc", "add", "dev", port, "root", *shape)
            for name in self.names:
                self.programs.append(Child(env, ["ip", "netns", "exec", name]))
        except BaseException:
            self.close()
            raise

    def start(self, i: int, code: str, **names: Any) -> None:
        self.programs[i].start(code, host=f"host{i}", address=self.addresses[i], **names)

    def run(self, code: str, hosts: range | None = None, **names: Any) -> list[Any]:
        """On all hosts (or these) at once; their results."""
        chosen = range(len(self.names)) if hosts is None else hosts
        for i in chosen:
            self.start(i, code, **names)
        return [self.programs[i].result() for i in chosen]

    def cut(self, i: int) -> None:
        sh("ip", "-n", self.names[i], "link", "set", "tm0", "down")

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
