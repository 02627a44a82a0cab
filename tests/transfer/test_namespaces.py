"""Processes of one host in namespaces of their own (containers): what still goes by memory, and what says why not."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from processes import Child, eventually

pytestmark = pytest.mark.netns

OWNER = """
import numpy as np, torch_mooncake as tm
from torch_mooncake._core import SharedBuffer
engine = tm.Engine(listen, token="t", name="owner", transports=("shm", "tcp"), host_id=host_id)
shared = np.frombuffer(SharedBuffer(1 << 20), np.uint8)
private = np.zeros(1 << 20, np.uint8)
regions = [engine.register(shared), engine.register(private)]
result = [engine.addresses[0], *(region.descriptor().hex() for region in regions)]
"""
USER = """
import numpy as np, torch_mooncake as tm
engine = tm.Engine((), token="t", name="user", transports=("shm", "tcp"), host_id=host_id)
peer = engine.connect(address)
remotes = [peer.open(bytes.fromhex(d)) for d in descriptors]
mine = np.random.default_rng(1).integers(0, 256, 1 << 20, np.uint8)
local = engine.register(mine)
result = []
for remote in remotes:
    write = engine.write(local, remote)
    write.wait()
    back = np.zeros(1 << 20, np.uint8)
    region = engine.register(back)
    read = engine.read(region, remote)
    read.wait()
    assert (back == mine).all()
    engine.deregister(region)
    result.append([write.transport, read.transport])
result = {"same_host": peer.same_host, "carried": result, "why": str(engine.explain(peer))}
"""


def run(*command: str) -> None:
    subprocess.run(command, check=True)


def meet(owner: Child, user: Child, listen: str, host_ids: Sequence[str | None] = (None, None)) -> dict[str, Any]:
    """``user`` writes and reads a shared and a private region of ``owner``; how they went."""
    address, *descriptors = owner(OWNER, listen=listen, host_id=host_ids[0])
    return user(USER, address=address, descriptors=descriptors, host_id=host_ids[1])


@pytest.fixture
def nets() -> Iterator[list[str]]:
    """Two network namespaces joined by a veth pair, 10.77.0.1 and 10.77.0.2."""
    names = [f"tm{os.getpid()}{side}" for side in "ab"]
    try:
        for name in names:
            run("ip", "netns", "add", name)
        run("ip", "link", "add", "e0", "netns", names[0], "type", "veth", "peer", "name", "e0", "netns", names[1])
        for i, name in enumerate(names):
            run("ip", "-n", name, "addr", "add", f"10.77.0.{i + 1}/24", "dev", "e0")
            for link in ("e0", "lo"):
                run("ip", "-n", name, "link", "set", link, "up")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False)


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="tm-test-", dir="/tmp") as name:  # short: Unix socket paths are
        yield Path(name)


def inside(net: str) -> list[str]:
    return ["ip", "netns", "exec", net]


def crossed(net: str) -> int:
    """Bytes that the namespace's veth has sent and received."""
    command = [*inside(net), "cat", "/sys/class/net/e0/statistics/tx_bytes", "/sys/class/net/e0/statistics/rx_bytes"]
    return sum(int(n) for n in subprocess.run(command, check=True, capture_output=True, text=True).stdout.split())


def test_network_namespaces_with_a_common_folder_share_memory(
    nets: list[str], child: Callable[..., Child], folder: Path
) -> None:
    env = {"TM_RUNTIME_DIR": str(folder)}
    owner, user = (child(env, inside(net)) for net in nets)
    said = meet(owner, user, "tcp://10.77.0.1:0")
    assert said["same_host"], said["why"]
    assert said["carried"] == [["shm", "shm"], ["process_vm", "process_vm"]], said["why"]
    assert crossed(nets[0]) < 200_000  # the handshake and heartbeats; the payload is 4 MiB
    assert len(list(folder.iterdir())) == 1
    # A killed engine leaves its socket file; the next one in that folder removes it.
    os.kill(owner("import os; result = os.getpid()"), signal.SIGKILL)
    [dead] = folder.iterdir()
    os.utime(dead, (1, 1))
    heir = child(env, inside(nets[0]))
    heir(OWNER, listen="tcp://10.77.0.1:0", host_id=None)
    assert not dead.exists()
    heir("engine.close()")
    assert list(folder.iterdir()) == []


def test_network_namespaces_without_a_common_folder_say_so(
    nets: list[str], child: Callable[..., Child], folder: Path
) -> None:
    owner = child({"TM_RUNTIME_DIR": str(folder / "run")}, inside(nets[0]))
    # The user cannot see the owner's folder.
    hide = ["sh", "-c", f'mount -t tmpfs none "{folder}" && exec "$@"', "sh"]
    user = child({"TM_RUNTIME_DIR": str(folder / nets[1])}, [*inside(nets[1]), "unshare", "--mount", *hide])
    said = meet(owner, user, "tcp://10.77.0.1:0")
    assert not said["same_host"]
    assert said["carried"] == [["tcp", "tcp"]] * 2
    assert "no Unix socket connects it to us" in said["why"]


def test_hosts_played_by_namespaces_use_the_wire(nets: list[str], child: Callable[..., Child], folder: Path) -> None:
    env = {"TM_RUNTIME_DIR": str(folder)}
    owner, user = (child(env, inside(net)) for net in nets)
    said = meet(owner, user, "tcp://10.77.0.1:0", ["one", "two"])
    assert said["carried"] == [["tcp", "tcp"]] * 2
    assert 4 << 20 <= crossed(nets[0]) <= (4 << 20) * 1.1


def test_mount_namespaces_share_memory(child: Callable[..., Child]) -> None:
    owner = child(None, ["unshare", "--mount"])
    said = meet(owner, child(), "tcp://127.0.0.1:0")
    assert said["carried"] == [["shm", "shm"], ["process_vm", "process_vm"]], said["why"]


PID_NAMESPACE = ["unshare", "--pid", "--fork", "--kill-child"]


def test_pid_namespaces_share_segments_and_read_only_downwards(child: Callable[..., Child]) -> None:
    """A process sees those of namespaces below its own, not those above: a read by process_vm_readv needs that the
    reader sees the owner of the source."""
    said = meet(child(None, PID_NAMESPACE), child(), "tcp://127.0.0.1:0")
    assert said["carried"] == [["shm", "shm"], ["unix", "process_vm"]], said["why"]
    assert "the peer may not read our memory" in said["why"]
    said = meet(child(), child(None, PID_NAMESPACE), "tcp://127.0.0.1:0")
    assert said["carried"] == [["shm", "shm"], ["process_vm", "unix"]], said["why"]
    assert "pid namespace" in said["why"]


def test_the_death_of_an_invisible_holder_frees_its_segments(child: Callable[..., Child]) -> None:
    """The holder of a mapped grant has no pid in the owner's namespace; a pidfd from its socket tells its death."""
    owner, user = child(None, PID_NAMESPACE), child()
    meet(owner, user, "tcp://127.0.0.1:0")
    user.kill(signal.SIGSTOP)
    busy = owner(
        "try:\n engine.deregister(regions[0], 0.2); result = ''\nexcept tm.errors.Busy as error: result = str(error)"
    )
    assert "user" in busy
    assert owner("result = engine.stats()['quarantined_regions']") == 1
    user.kill()
    assert eventually(lambda: owner("result = engine.stats()['quarantined_regions']") == 0, 10)
