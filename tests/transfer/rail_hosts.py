"""Two hosts as network namespaces with several links between them (also for benchmarks/rails.py). Needs root."""

from __future__ import annotations

import os
import subprocess
from typing import Any

from processes import Child

ENGINE = """
import numpy as np, torch_mooncake as tm
engine = tm.Engine(listen="tcp://0.0.0.0:0", transports=("tcp",), token="t", host_id=host, name=host, nics=nics)
memory = np.zeros(nbytes, np.uint8)
region = engine.register(memory)
result = [engine.listening, region.descriptor().hex()]
"""
CONNECT = """
peer = engine.connect(address)
remote = peer.open(bytes.fromhex(descriptor))
result = remote.transport
"""


def sh(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


class Host(Child):
    """A child in a namespace of its own."""

    def __init__(self, name: str) -> None:
        self.name = name
        super().__init__(prefix=["ip", "netns", "exec", name])

    def sh(self, *command: str) -> str:
        return sh("ip", "netns", "exec", self.name, *command)

    def bytes_sent(self) -> dict[str, int]:
        """By link."""
        code = (
            "import pathlib\nresult = {p.name: int((p / 'statistics/tx_bytes').read_text()) "
            "for p in pathlib.Path('/sys/class/net').glob('r*')}"
        )
        return self(code)


class Hosts:
    """``a`` and ``b`` with links r0, r1, …: 10.78.<i>.1 and 10.78.<i>.2. ``shape``: arguments of tc's tbf."""

    def __init__(self, links: int = 4, shape: str = "") -> None:
        self.names = [f"tm-{os.getpid()}-{side}" for side in "ab"]
        self.links = [f"r{i}" for i in range(links)]
        self.made: list[Host] = []
        try:
            for name in self.names:
                sh("ip", "netns", "add", name)
                sh("ip", "-n", name, "link", "set", "lo", "up")
            for i, link in enumerate(self.links):
                a, b = self.names
                sh("ip", "link", "add", link, "netns", a, "type", "veth", "peer", "name", link, "netns", b)
                for side, name in enumerate(self.names):
                    sh("ip", "-n", name, "link", "set", link, "mtu", "9000", "up")
                    sh("ip", "-n", name, "addr", "add", f"10.78.{i}.{side + 1}/24", "dev", link)
                    if shape:
                        sh("tc", "-n", name, "qdisc", "add", "dev", link, "root", "tbf", *shape.split())
            for name in self.names:
                self.made.append(Host(name))
        except BaseException:
            self.close()
            raise
        self.a, self.b = self.made

    def meet(self, nbytes: int, nics: list[str] | None = None) -> None:
        """Both have engines and memory; a has opened b's region."""
        for host in self.made:
            listening, self.descriptor = host(ENGINE, host=host.name, nbytes=nbytes, nics=nics)
        port = next(a for a in listening if a.startswith("tcp://")).rpartition(":")[2]
        assert self.a(CONNECT, address=f"tcp://10.78.0.2:{port}", descriptor=self.descriptor) == "tcp"

    def link(self, side: int, link: str, state: str) -> None:
        sh("ip", "-n", self.names[side], "link", "set", link, state)

    def drop_silently(self, link: str, on: bool) -> None:
        """Packets that arrive over this link vanish; no device says so."""
        for host in self.made:
            host.sh("iptables", "-w", "-A" if on else "-D", "INPUT", "-i", link, "-j", "DROP")

    def stats(self) -> dict[str, Any]:
        return self.a("result = engine.stats()")

    def close(self) -> None:
        for host in self.made:
            host.process.kill()
            host.process.wait()
            host.close()
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)
