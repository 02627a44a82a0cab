"""Collectives between hosts: network namespaces on a bridge, every link shaped, both directions of it.

The part `--only hosts` of distributed.py. Needs root. The raw goodput of the links is that of one TCP connection, taken
in the same run; the bound of an all-reduce of S bytes over H hosts is that of a ring between them, 2(H-1)/H S over the
goodput, however many ranks a host has. All with the congestion control that the machine has.
"""

from __future__ import annotations

import datetime
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from harness import MiB, Row, Table

HOSTS = 4
RATE = "1gbit"
MTU = 9000
PORT = 29400
BACKENDS = ("mooncake", "gloo")


def address(host: int) -> str:
    return f"10.80.0.{host + 1}"


@contextmanager
def shaped_hosts(n: int = HOSTS) -> Iterator[list[str]]:
    """The names of n namespaces, each with one shaped link to a bridge."""
    tag = f"tm-bench-{os.getpid()}"
    names, bridge = [f"{tag}-{i}" for i in range(n)], f"{tag}-bridge"

    def sh(*command: str) -> None:
        subprocess.run(command, check=True, capture_output=True)

    shape = ("tbf", "rate", RATE, "burst", "256k", "latency", "50ms")
    try:
        for name in [bridge, *names]:
            sh("ip", "netns", "add", name)
        sh("ip", "-n", bridge, "link", "add", "br0", "type", "bridge")
        sh("ip", "-n", bridge, "link", "set", "br0", "mtu", str(MTU), "up")
        for i, name in enumerate(names):
            port = f"port{i}"
            sh("ip", "link", "add", "tm0", "netns", name, "type", "veth", "peer", "name", port, "netns", bridge)
            sh("ip", "-n", name, "addr", "add", f"{address(i)}/24", "dev", "tm0")
            sh("ip", "-n", name, "link", "set", "lo", "up")
            sh("ip", "-n", name, "link", "set", "tm0", "mtu", str(MTU), "up")
            sh("ip", "-n", bridge, "link", "set", port, "mtu", str(MTU), "master", "br0", "up")
            sh("tc", "-n", name, "qdisc", "add", "dev", "tm0", "root", *shape)
            sh("tc", "-n", bridge, "qdisc", "add", "dev", port, "root", *shape)
        yield names
    finally:
        for name in [*names, bridge]:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


def start(name: str, what: str, arguments: dict[str, Any]) -> subprocess.Popen[bytes]:
    """`what` of this file, in that namespace."""
    command = ["ip", "netns", "exec", name, sys.executable, __file__, what, json.dumps(arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE)


def ended(processes: list[subprocess.Popen[bytes]]) -> list[Any]:
    """What they print, as JSON."""
    outs = [process.communicate()[0] for process in processes]
    if any(process.returncode for process in processes):
        raise RuntimeError(f"a process ended with {[process.returncode for process in processes]}")
    return [json.loads(out) if out else None for out in outs]


# --- what runs inside ---


def sink(port: int) -> None:
    """Reads one connection to its end; prints its goodput in bytes/s, without the first fifth."""
    with socket.create_server(("0.0.0.0", port)) as server:
        connection, _ = server.accept()
        buffer = bytearray(MiB)
        total, marks = 0, [(0, time.perf_counter())]
        while n := connection.recv_into(buffer):
            total += n
            marks.append((total, time.perf_counter()))
    begin = next(mark for mark in marks if mark[0] >= total / 5)
    print(json.dumps((total - begin[0]) / (marks[-1][1] - begin[1])))


def source(host: str, port: int, nbytes: int) -> None:
    for _ in range(200):
        try:
            connection = socket.create_connection((host, port))
            break
        except ConnectionRefusedError:
            time.sleep(0.02)
    with connection:
        for _ in range(nbytes // MiB):
            connection.sendall(bytes(MiB))


def rank_main(rank: int, world: int, host: int, nbytes: int, rounds: int, algorithms: str) -> None:
    """All-reduces with both backends in turn; rank 0 prints the seconds of each, and every rank the bytes it sent."""
    os.environ.update(MASTER_ADDR=address(0), TM_HOST_ID=address(host), GLOO_SOCKET_IFNAME="tm0")
    os.environ["TM_ALGORITHM"] = algorithms
    import torch
    import torch.distributed as dist

    import torch_mooncake.distributed as tm

    torch.set_num_threads(1)
    timeout = datetime.timedelta(seconds=120)
    store = dist.TCPStore(address(0), PORT, world, rank == 0, timeout=timeout)
    dist.init_process_group("mooncake", store=store, rank=rank, world_size=world, timeout=timeout)
    groups = {"mooncake": None, "gloo": dist.new_group(backend="gloo")}
    data = torch.ones(nbytes // 4)
    seconds: dict[str, list[float]] = {backend: [] for backend in BACKENDS}
    sent = 0
    for turn in range(rounds + 1):
        for backend, group in groups.items():
            dist.barrier(group)
            before = tm.explain()["traffic"]["to_hosts"]["sent"]
            begin = time.perf_counter()
            dist.all_reduce(data, op=dist.ReduceOp.MAX, group=group)
            if turn > 0:
                seconds[backend].append(time.perf_counter() - begin)
            if backend == "mooncake":
                sent = tm.explain()["traffic"]["to_hosts"]["sent"] - before
    dist.barrier()
    dist.destroy_process_group()
    print(json.dumps({"seconds": seconds, "sent": sent}))


# --- what runs outside ---


def goodput(names: list[str], nbytes: int = 96 * MiB) -> float:
    reader = start(names[1], "sink", {"port": PORT})
    writer = start(names[0], "source", {"host": address(1), "port": PORT, "nbytes": nbytes})
    return float(ended([reader, writer])[0])


def measure(names: list[str], each: int, nbytes: int, rounds: int, algorithms: str = "") -> dict[str, Any]:
    world = len(names) * each
    common = {"world": world, "nbytes": nbytes, "rounds": rounds, "algorithms": algorithms}
    ranks = [start(names[r // each], "rank_main", {**common, "rank": r, "host": r // each}) for r in range(world)]
    results = ended(ranks)
    return {**results[0], "sent": [result["sent"] for result in results]}


def run(quick: bool) -> list[Row]:
    if os.geteuid() != 0:
        print("no rows between hosts: they need root")
        return []
    table = Table(f"torch.distributed between {HOSTS} hosts, links of {RATE}, MTU {MTU}")
    nbytes, rounds = 64 * MiB, 3 if quick else 7
    with shaped_hosts() as names:
        raw = [goodput(names) for _ in range(3)]
        table.measured("raw goodput of a link, one TCP connection", [rate / 1e6 for rate in raw], "MB/s")
        bound = 2 * (HOSTS - 1) / HOSTS * nbytes / statistics.median(raw)
        for each in (1, 2):
            got = measure(names, each, nbytes, rounds)
            name = f"all_reduce, 64 MiB, {HOSTS} hosts x {each}"
            ours, gloo = got["seconds"]["mooncake"], got["seconds"]["gloo"]
            table.measured(
                f"{name}: part of the ring's bound",
                [bound / s for s in ours],
                "×",
                against="gloo",
                baseline=[bound / s for s in gloo],
                limit=0.9,
            )
            least = 2 * (HOSTS - 1) / HOSTS * nbytes
            by_host = [sum(got["sent"][h * each : (h + 1) * each]) / MiB for h in range(HOSTS)]
            table.measured(f"{name}: bytes that a host sends", by_host, "MiB", limit=least / MiB, at_least=False)
    return table.rows


if __name__ == "__main__":
    what, arguments = sys.argv[1:]
    {"sink": sink, "source": source, "rank_main": rank_main}[what](**json.loads(arguments))
