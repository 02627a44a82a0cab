"""Rows of the pool with many keys: ten million small values, get while others are evicted, and what a restart takes.

Values are 64 bytes. A restart is the SIGKILL of a node's worker; its keeper starts another one, which attaches to the
same memory. benchmarks/pool.py runs these (``--only many``, ``rebuild``, ``restart``).
"""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from harness import GiB, MiB, Table, other_process
from stores import HERE, TOKEN, free_port

VALUE = bytes(range(64))
BATCH = 1000
LOAD_S = 0.05  # a batch so often: 20 000 keys/s
HEALTHY_S = 10.5  # a keeper restarts at once what has lived for so long


class Node:
    """A node in a folder of its own."""

    def __init__(self, memory_nbytes: int, leader: str = "") -> None:
        self.folder = tempfile.TemporaryDirectory(prefix="tm-bench-", dir="/tmp")
        self.address = f"127.0.0.1:{free_port()}"
        self.local = f"unix://{self.folder.name}/default/node.sock"
        env = {**os.environ, "TM_RUNTIME_DIR": self.folder.name, "PYTHONPATH": str(HERE.parent), "TM_TOKEN": TOKEN}
        command = [sys.executable, "-m", "torch_mooncake", "node", "--listen", f"tcp://{self.address}"]
        command += ["--memory", str(memory_nbytes)] + (["--leader", f"tcp://{leader}"] if leader else [])
        self.process = subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self.started = time.monotonic()

    def listens(self) -> bool:
        host, _, port = self.address.rpartition(":")
        socket.create_connection((host, int(port)), 1).close()
        return True

    def worker(self) -> int:
        return int(Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()[0])

    def kill_worker(self) -> None:
        time.sleep(max(0.0, self.started + HEALTHY_S - time.monotonic()))
        os.kill(self.worker(), signal.SIGKILL)
        self.started = time.monotonic()

    def memory_mib(self, what: str) -> float:
        status = Path(f"/proc/{self.worker()}/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in status if line.startswith(what)) / 1024

    def close(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.folder.cleanup()


@contextmanager
def nodes(*memory_nbytes: int) -> Iterator[tuple[list[Node], Any]]:
    """The first one leads; a client of the last."""
    import torch_mooncake as tm

    made: list[Node] = []
    try:
        for nbytes in memory_nbytes:
            made.append(Node(nbytes, made[0].address if made else ""))
            until_true(made[-1].listens)
        until_true(lambda: tm.Pool(made[-1].local, token=TOKEN).close() is None)  # it has joined
        with tm.Pool(made[-1].local, token=TOKEN) as pool:
            yield made, pool
    finally:
        for node in reversed(made):
            node.close()


def until_true(condition: Any, timeout: float = 60) -> float:
    """Seconds until ``condition()`` holds; what the pool says meanwhile does not count."""
    import torch_mooncake as tm

    start = time.perf_counter()
    while time.perf_counter() < start + timeout:
        try:
            if condition():
                return time.perf_counter() - start
        except (tm.Error, OSError):
            pass
        time.sleep(0.002)
    raise TimeoutError("it did not come true")


def key_of(i: int) -> str:
    return f"cache/page/{i}"


def fill(pool: Any, first: int, last: int, value: bytes = VALUE, batch: int = BATCH) -> list[float]:
    """Seconds of each batch."""
    seconds = []
    for at in range(first, last, batch):
        values = {key_of(i): value for i in range(at, min(at + batch, last))}
        start = time.perf_counter()
        pool.put_many(values, timeout=60)
        seconds.append(time.perf_counter() - start)
    return seconds


def loader(pipe: Any) -> None:
    """In a process of its own. ("fill", address, first, last): the seconds of each batch. ("load", first): from there
    on a batch of fresh keys every LOAD_S, until told to stop; the number of the last and the batches that were late."""
    import torch_mooncake as tm

    pool = None
    while (order := pipe.recv()) is not None:
        what, address, first, *last = order
        pool = pool or tm.Pool(address, token=TOKEN)
        if what == "fill":
            pipe.send(fill(pool, first, last[0]))
            continue
        due, late = time.monotonic(), 0
        while not pipe.poll(max(0.0, due - time.monotonic())):
            late += time.monotonic() > due + LOAD_S
            fill(pool, first, first + BATCH)
            first, due = first + BATCH, due + LOAD_S
        pipe.recv()
        pipe.send((first, late))
    if pool:
        pool.close()


def latencies(pool: Any, first: int, last: int, seconds: float) -> tuple[float, float, int]:
    """(p50, p99) in µs of gets of random keys between, one after the other, and how many were missing."""
    import torch_mooncake as tm

    took, missing, chance = [], 0, random.Random(1)
    end = time.perf_counter() + seconds
    while (start := time.perf_counter()) < end:
        try:
            pool.get(key_of(chance.randrange(first, last)))
            took.append(time.perf_counter() - start)
        except tm.KeyNotFound:
            missing += 1
    return float(np.percentile(took, 50)) * 1e6, float(np.percentile(took, 99)) * 1e6, missing


def many_keys(table: Table, quick: bool) -> None:
    """Fill; then gets beside a load of puts, while there is room and while each put pushes another key out."""
    seconds, rounds = (4.0, 2) if quick else (10.0, 3)
    start = 1_000_000 if quick else 10_000_000
    room = int(1.2 * seconds / LOAD_S) * BATCH
    limit = max(1 << 20, start + 4 * room) << 10  # a node has an extent for each KiB, 2^20 at least
    size = f"{start // 1_000_000} M keys"
    with nodes(limit) as ((node,), pool), other_process(loader) as pipe:

        def ask(*order: Any) -> Any:
            pipe.send(order)
            return pipe.recv()

        batches = ask("fill", node.local, 0, start)
        table.measured(f"{size} of 64 B, batches of {BATCH}: put", [start / sum(batches)], "keys/s")
        table.measured(f"{size}: slowest batch of {BATCH}", [1e3 * max(batches)], "ms", note="of all that were put")
        own = node.memory_mib("RssAnon") * MiB / start
        table.measured(f"{size}: memory of the worker's own, a key", [own], "B", note="directory and donor together")
        shared = node.memory_mib("RssShmem") * MiB / start
        table.measured(f"{size}: shared memory, a key", [shared], "B", note="the value's 64 B, its extent and record")
        p50: dict[bool, list[float]] = {False: [], True: []}
        p99: dict[bool, list[float]] = {False: [], True: []}
        late = missing = 0
        end, full = start, limit >> 10
        latencies(pool, start // 2, start, seconds)  # the first touch of these pages
        for _ in range(rounds):
            for evicting in (False, True):
                there = pool.stat()["keys"]
                if evicting:
                    more = full - there + 2 * BATCH
                    ask("fill", node.local, end, end + more)
                    end += more
                    before = pool.stat()["nodes"][0]["evictions"]
                elif there > full - room:  # the youngest that were not read
                    pool.delete([key_of(i) for i in range(end - room, end)])
                pipe.send(("load", node.local, end))
                median, slow, gone = latencies(pool, start // 2, start, seconds)
                end, behind = ask("stop")
                late, missing = late + behind, missing + gone
                p50[evicting].append(median)
                p99[evicting].append(slow)
                if evicting and pool.stat()["nodes"][0]["evictions"] - before < seconds / LOAD_S * BATCH / 2:
                    raise RuntimeError("nothing was evicted")
        note = f"{BATCH / LOAD_S:.0f} puts/s in both, {late} batches late, {missing} gets missed"
        for name, values, ratio in (("p50", p50, None), ("p99", p99, 2.0)):
            table.measured(
                f"get during continuous eviction at {size}, {name}",
                values[True],
                "us",
                against="without eviction, same put load",
                baseline=values[False],
                ratio_limit=ratio,
                at_least=False,
                note=note if ratio else "",
            )


def serving(pool: Any, count: int, value: bytes) -> bool:
    """A key that was put is found, and the directory knows of one that was not that it is not there."""
    import torch_mooncake as tm

    if bytes(pool.get(key_of(random.randrange(count)), timeout=10)) != value:
        raise RuntimeError("what came back is not what was put")
    try:
        pool.get("never put", timeout=10)
    except tm.KeyNotFound:
        return True
    return False


def rebuild(table: Table, quick: bool) -> None:
    """The leader's worker is killed; the objects are on another node, which announces them anew."""
    count, rounds = (100_000, 1) if quick else (1_000_000, 3)
    with nodes(64 * MiB, 2 * GiB) as ((leader, _), pool):
        fill(pool, 0, count)
        took = []
        for _ in range(rounds):
            leader.kill_worker()
            took.append(until_true(lambda: serving(pool, count, VALUE)))
    table.measured(
        f"directory lost, {count / 1e6:g} M objects on another node: complete again",
        took,
        "s",
        limit=1.5,
        at_least=False,
        note="with the leader's restart, and until the other node has noticed",
    )


def restart(table: Table, quick: bool) -> None:
    """A node's worker is killed: alone, with the directory, and as a member of another's."""
    count, nbytes = (100_000, 8 << 10) if quick else (1_000_000, 8590)  # 8 GiB
    rounds = 1 if quick else 3
    value = random.Random(2).randbytes(nbytes)
    memory = count * 12 << 10
    for name, sizes in (("with the directory", (memory,)), ("a member", (64 * MiB, memory))):
        with nodes(*sizes) as (made, pool):
            fill(pool, 0, count, value)
            took = []
            for _ in range(rounds):
                made[-1].kill_worker()
                took.append(until_true(lambda: serving(pool, count, value)))
        table.measured(
            f"donor worker restart, {count / 1e6:g} M objects, {count * nbytes / GiB:.1f} GiB, {name}: serving",
            took,
            "s",
            limit=3.0,
            at_least=False,
        )
