"""What tests of real verbs share: two engines in the virtual machine of vm/, one at each end of two rails."""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch_mooncake as tm

NETWORK = Path(__file__).parent / "vm/network"
MiB = 1 << 20
RAILS = "ab"


def sh(command: str) -> str:
    """The output of a shell command that has to succeed."""
    done = subprocess.run(["/bin/bash", "-c", command], capture_output=True, text=True)
    assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
    return done.stdout


def engine(side: int, name: str = "", **settings: Any) -> tm.Engine:
    """With the two devices of that side, and with RDMA alone: nothing else can carry the bytes."""
    return tm.Engine(transports=("rdma",), nics=[f"rxe_?{side}"], name=name or f"side {side}", token="t", **settings)


def pattern(nbytes: int, seed: int) -> bytes:
    """Bytes of no period that sizes or rails have."""
    unit = bytes((i * i * 7 + i * seed + (i >> 8) * 31) % 251 for i in range(65521))
    return (unit * (nbytes // len(unit) + 1))[:nbytes]


class Two:
    """An engine at either end, ``local`` memory here and ``remote`` memory there, opened."""

    def __init__(self, nbytes: int = MiB, here: tm.Engine | None = None, **settings: Any) -> None:
        self.here = here or engine(0, **settings)
        self.there = engine(1, **settings)
        self.local, self.remote = bytearray(nbytes), bytearray(nbytes)
        self.region = self.here.register(self.local)
        self.target = self.there.register(self.remote)
        self.peer = self.here.connect(self.there.addresses[0])
        self.opened = self.peer.open(self.target.descriptor())

    def close(self) -> None:
        self.here.close()
        self.there.close()

    def write(self, seed: int, timeout: float = 60, **options: Any) -> Any:
        """Starts a write of a pattern into all of ``remote``."""
        self.local[:] = pattern(len(self.local), seed)
        return self.here.write(self.region, self.opened, timeout=timeout, **options)

    def read(self, seed: int, timeout: float = 60) -> Any:
        """Starts a read of a pattern out of all of ``remote``."""
        self.remote[:], self.local[:] = pattern(len(self.remote), seed), bytes(len(self.local))
        return self.here.read(self.region, self.opened, timeout=timeout)

    def start(self, way: str, seed: int, timeout: float = 60) -> Any:
        return self.read(seed, timeout) if way == "read" else self.write(seed, timeout)

    def check(self, seed: int) -> None:
        """Both sides have it, whichever way it went."""
        assert self.remote == self.local == pattern(len(self.remote), seed)

    def lanes(self) -> list[dict[str, Any]]:
        return [lane for lane in self.here.stats()["lanes"] if lane["transport"] == "rdma"]

    def sent(self) -> dict[str, int]:
        """Bytes by rail, "a" and "b"."""
        return {lane["rail"].split()[0][len("rxe_")]: lane["bytes_sent"] for lane in self.lanes()}

    def moved(self) -> dict[str, int]:
        """The same, both ways."""
        received = {lane["rail"].split()[0][len("rxe_")]: lane["bytes_received"] for lane in self.lanes()}
        return {rail: n + received[rail] for rail, n in self.sent().items()}

    def up(self) -> set[str]:
        return {lane["rail"].split()[0][len("rxe_")] for lane in self.lanes() if lane["alive"]}

    def wait_for_rails(self, names: str, timeout: float = 30) -> None:
        end = time.monotonic() + timeout
        while self.up() != set(names):
            assert time.monotonic() < end, f"rails {self.up()} are up, not {names}: {self.here.explain(self.peer)}"
            time.sleep(0.02)


def begun(op: Any) -> bool:
    """Whether some of its bytes are there, and not all: as soon as some are."""
    end = time.monotonic() + 10
    while op.bytes_done == 0 and time.monotonic() < end:
        time.sleep(0)
    return bool(0 < op.bytes_done < op.nbytes)


@contextlib.contextmanager
def two(nbytes: int = MiB, **settings: Any) -> Iterator[Two]:
    pair = Two(nbytes, **settings)
    try:
        pair.wait_for_rails(RAILS)
        yield pair
    finally:
        pair.close()


@contextlib.contextmanager
def loss(percent: int, *interfaces: str) -> Iterator[None]:
    """That share of the packets that these interfaces send is lost."""
    for name in interfaces:
        sh(f"tc qdisc add dev {name} root netem loss {percent}%")
    try:
        yield
    finally:
        for name in interfaces:
            sh(f"tc qdisc del dev {name} root")


@contextlib.contextmanager
def link_down(name: str) -> Iterator[None]:
    sh(f"ip link set {name} down")
    try:
        yield
    finally:
        sh(f"ip link set {name} up")
