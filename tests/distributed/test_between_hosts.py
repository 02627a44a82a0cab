"""Several hosts with several ranks each: what a rank is told about them, and collectives over shaped links."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from worlds import run_world

import torch_mooncake.distributed as tm

HOSTS, EACH = 4, 2
WORLD = HOSTS * EACH
PORT = 29500

# --- one machine, as if it were several hosts ---


def as_hosts(rank: int, world: int, host_of: list[int], algorithms: dict[str, str], store: str) -> dict[str, object]:
    dist.destroy_process_group()  # and with it the process's engine, which is on one host
    options = tm.MooncakeBackendOptions(host_id=f"host{host_of[rank]}", algorithms=algorithms if rank == 0 else None)
    dist.init_process_group("mooncake", init_method=f"file://{store}", rank=rank, world_size=world, pg_options=options)
    group = None
    for n in (1, 1023, 600_001):
        t = torch.full((n,), rank + 1.0)
        dist.all_reduce(t, group=group)
        assert (t == world * (world + 1) / 2).all()
        t = torch.full((n,), float(rank))
        dist.broadcast(t, world - 1, group=group)
        assert (t == world - 1).all()
        out = torch.zeros(world * n)
        dist.all_gather_single(out, torch.full((n,), float(rank)), group=group)
        assert out.view(world, n).eq(torch.arange(float(world))[:, None]).all()
        part = torch.zeros(n)
        dist.reduce_scatter_single(part, torch.arange(float(world)).repeat_interleave(n) + rank, group=group)
        assert (part == world * rank + sum(range(world))).all()
    dist.barrier(group)
    return tm.explain(group)


def test_explain_tells_hosts_algorithms_and_traffic(tmp_path: Path) -> None:
    said = run_world(4, as_hosts, [0, 1, 0, 1], {"all_reduce": "halving"}, str(tmp_path / "store"))
    for rank, text in said.items():
        assert text["rank"] == rank
        assert text["ranks_of_hosts"] == [[0, 2], [1, 3]]
        assert text["asked_for"] == "all_reduce=halving"  # rank 0's
        (row,) = text["collectives"]["all_reduce"]
        assert row == {"up_to_bytes": None, "algorithm": "halving", "by_host": True, "why": "asked for"}
        assert [row["algorithm"] for row in text["collectives"]["broadcast"]] == ["tree", "chain"]
        assert text["within_host"] == "board"
        assert text["traffic"]["to_hosts"]["sent"] > 0


def refused(rank: int, world: int) -> None:
    with pytest.raises(ValueError, match='all_reduce has no "rings"; it has auto, direct, doubling'):
        dist.new_group(backend="mooncake", pg_options=tm.MooncakeBackendOptions(algorithms={"all_reduce": "rings"}))
    os.environ["TM_ALGORITHM"] = "allreduce=ring"
    with pytest.raises(ValueError, match="the collectives are barrier, broadcast, all_reduce"):
        dist.new_group(backend="mooncake")
    os.environ["TM_ALGORITHM"] = "all_reduce=flat/ring"
    group = dist.new_group(backend="mooncake")
    assert tm.explain(group)["asked_for"] == "all_reduce=flat/ring"
    other = dist.new_group(backend="gloo")
    with pytest.raises(TypeError, match="for groups of the backend 'mooncake'"):
        tm.explain(other)
    dist.barrier()  # gloo's ranks fail to connect to one that has gone already


def test_unknown_algorithms_are_refused_with_the_known_ones() -> None:
    run_world(2, refused)


# --- network namespaces ---

RANK = """
import datetime, itertools, json, os, sys
import torch, torch.distributed as dist
import torch_mooncake.distributed as tm
torch.set_num_threads(1)
rank, world, address, port = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4])
os.environ["MASTER_ADDR"] = address
store = dist.TCPStore(address, port, world, rank == 0, timeout=datetime.timedelta(seconds=60))
dist.init_process_group("mooncake", store=store, rank=rank, world_size=world, timeout=datetime.timedelta(seconds=60))
for n, dtype in itertools.product((1, 1023, 500_000), (torch.float32, torch.bfloat16, torch.int64)):
    ones = lambda value: torch.full((n,), value).to(dtype)
    t = ones(rank + 1)
    dist.all_reduce(t)
    assert (t == world * (world + 1) // 2).all(), "all_reduce"
    for root in (0, world - 1):
        t = ones(rank)
        dist.broadcast(t, root)
        assert (t == root).all(), "broadcast"
        t = ones(rank + 1)
        dist.reduce(t, root, dist.ReduceOp.MAX)
        assert (t == (world if rank == root else rank + 1)).all(), "reduce"
        out = [ones(0) for _ in range(world)] if rank == root else None
        dist.gather(ones(rank), out, root)
        assert rank != root or all((o == r).all() for r, o in enumerate(out)), "gather"
        t = ones(0)
        dist.scatter(t, [ones(r) for r in range(world)] if rank == root else None, root)
        assert (t == rank).all(), "scatter"
    out = [ones(0) for _ in range(world)]
    dist.all_gather(out, ones(rank))
    assert all((o == r).all() for r, o in enumerate(out)), "all_gather"
    t = ones(0)
    dist.reduce_scatter(t, [ones(rank + r) for r in range(world)])
    assert (t == sum(range(world)) + world * rank).all(), "reduce_scatter"
    out = [ones(0) for _ in range(world)]
    dist.all_to_all(out, [ones(rank + r) for r in range(world)])
    assert all((o == r + rank).all() for r, o in enumerate(out)), "all_to_all"
    dist.barrier()
before = tm.explain()["traffic"]["to_hosts"]
dist.all_reduce(torch.ones(4 << 20))
after = tm.explain()
print(json.dumps({"hosts": after["ranks_of_hosts"], "within": after["within_host"],
                  "sent": after["traffic"]["to_hosts"]["sent"] - before["sent"],
                  "received": after["traffic"]["to_hosts"]["received"] - before["received"]}), flush=True)
if sys.argv[5] == "die":
    try:
        while True:
            dist.all_reduce(torch.ones(4 << 20))
    except dist.DistBackendError as error:
        print(str(error).replace(chr(10), " "), flush=True)
        os._exit(0)  # the store may be gone
dist.destroy_process_group()
"""


def sh(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


class Hosts:
    """10.81.0.1 to .4 on a bridge, 1 Gbit/s each way, MTU 9000."""

    def __init__(self) -> None:
        tag = f"tm-{os.getpid()}"
        self.bridge, self.names = f"{tag}-bridge", [f"{tag}-{i}" for i in range(HOSTS)]
        for name in [self.bridge, *self.names]:
            sh("ip", "netns", "add", name)
        sh("ip", "-n", self.bridge, "link", "add", "br0", "type", "bridge")
        sh("ip", "-n", self.bridge, "link", "set", "br0", "mtu", "9000", "up")
        shape = ("tbf", "rate", "1gbit", "burst", "256k", "latency", "50ms")
        for i, name in enumerate(self.names):
            port = f"port{i}"
            sh("ip", "link", "add", "tm0", "netns", name, "type", "veth", "peer", "name", port, "netns", self.bridge)
            sh("ip", "-n", self.bridge, "link", "set", port, "mtu", "9000", "master", "br0", "up")
            sh("ip", "-n", name, "addr", "add", f"10.81.0.{i + 1}/24", "dev", "tm0")
            sh("ip", "-n", name, "link", "set", "lo", "up")
            sh("ip", "-n", name, "link", "set", "tm0", "mtu", "9000", "up")
            sh("tc", "-n", name, "qdisc", "add", "dev", "tm0", "root", *shape)
            sh("tc", "-n", self.bridge, "qdisc", "add", "dev", port, "root", *shape)

    def start(self, what: str) -> list[subprocess.Popen[str]]:
        ranks = []
        for rank in range(WORLD):
            command = ["ip", "netns", "exec", self.names[rank // EACH], sys.executable, "-c", RANK]
            command += [str(rank), str(WORLD), "10.81.0.1", str(PORT), what]
            env = {**os.environ, "TM_HOST_ID": f"host{rank // EACH}"}
            ranks.append(subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
        return ranks

    def kill(self, host: int) -> None:
        """Everything that runs there, at once."""
        for pid in map(int, sh("ip", "netns", "pids", self.names[host]).split()):
            os.kill(pid, signal.SIGKILL)

    def close(self) -> None:
        for name in [*self.names, self.bridge]:
            for pid in sh("ip", "netns", "pids", name).split():
                os.kill(int(pid), signal.SIGKILL)
            sh("ip", "netns", "del", name)


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    if os.geteuid() != 0:
        pytest.skip("needs root to make network namespaces")
    made = Hosts()
    try:
        yield made
    finally:
        made.close()


@pytest.mark.netns
def test_collectives_between_shaped_hosts(hosts: Hosts) -> None:
    sent = [0] * HOSTS
    for rank, process in enumerate(hosts.start("end")):
        out, err = process.communicate(timeout=200)
        assert process.returncode == 0, f"rank {rank}: {err}"
        said = json.loads(out)
        assert said["hosts"] == [[h * EACH + i for i in range(EACH)] for h in range(HOSTS)]
        assert said["within"] == "board"
        assert said["received"] == said["sent"]
        sent[rank // EACH] += said["sent"]
    assert sent == [2 * (HOSTS - 1) * (16 << 20) // HOSTS] * HOSTS  # as a ring of hosts, however many ranks each has


@pytest.mark.netns
def test_a_host_that_dies_is_reported_by_all_others(hosts: Hosts) -> None:
    ranks = hosts.start("die")
    for process in ranks:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("{"), process.communicate()[1]
    hosts.kill(2)
    for rank, process in enumerate(ranks):
        out, err = process.communicate(timeout=30)
        if rank // EACH == 2:
            assert process.returncode == -signal.SIGKILL
            continue
        assert process.returncode == 0, err
        assert re.search(r"failed: .*rank [45]\b", out), out
