"""The transfer engine between two processes, against a plain copy and a plain socket loop in the same run.

    python benchmarks/transfer.py [--json FILE] [--quick]

Blocks lie at random places on both sides, other places at each repetition; the time is the call and the wait.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import numpy as np
from harness import MiB, Raw, Row, Table, gbps, main, other_process, repeat

import torch_mooncake as tm
from torch_mooncake import _core

# name: (transports allowed, shared memory, host id of the other side; another host id forces TCP)
PATHS = {
    "shm": (("shm", "tcp"), True, ""),
    "process_vm": (("shm", "tcp"), False, ""),
    "unix": (("tcp",), False, ""),
    "tcp": (("tcp",), False, "another-host"),
}
BATCHES = ((64 * MiB, 1), (MiB, 256), (64 << 10, 1024), (16 << 10, 20_000), (4 << 10, 1024))


def memory(shared: bool, nbytes: int) -> Any:
    array = np.frombuffer(_core.SharedBuffer(nbytes), np.uint8) if shared else np.empty(nbytes, np.uint8)
    array.fill(1)
    return array


def other(pipe: Any) -> None:
    transports, shared, host_id, nbytes = pipe.recv()
    with tm.Engine(transports=transports, token="bench", host_id=host_id) as engine:
        region = engine.register(memory(shared, nbytes))
        pipe.send((engine.addresses[0], region.descriptor()))
        pipe.recv()


def random_places(rng: Any, size: int, block: int, count: int) -> dict[str, Any]:
    """Where the blocks lie on the two sides: each place once."""
    sides = ("local_offsets", "remote_offsets")
    return {side: rng.permutation(size // block)[:count] * block for side in sides}


def throughput(move: Any, region: tm.Region, remote: tm.RemoteRegion, block: int, count: int, n: int) -> list[float]:
    """GB/s of moving ``count`` blocks in one op."""
    rng = np.random.default_rng(0)
    seconds = []
    for _ in range(n + 1):
        places = random_places(rng, region.nbytes, block, count)
        start = time.perf_counter()
        move(region, remote, **places, nbytes=block).wait()
        seconds.append(time.perf_counter() - start)
    return gbps(block * count, seconds[1:])


def latency_us(move: Any, region: tm.Region, remote: tm.RemoteRegion, block: int, calls: int) -> list[float]:
    """Medians of five runs of small ops, one at a time."""
    local, there = region[:block], remote[:block]
    return [statistics.median(repeat(calls, lambda: move(local, there).wait())) * 1e6 for _ in range(5)]


def run(args: argparse.Namespace) -> list[Row]:
    n = 3 if args.quick else 9
    size = 128 * MiB if args.quick else 512 * MiB
    raw = Raw()
    table = Table("Transfer engine, two processes")
    copy = raw.copy_bound(64 * MiB, 2, n)
    table.measured("memory copy, 2 threads (copy bound)", copy, "GB/s")
    baselines = dict.fromkeys(PATHS, ("copy, 2 threads", copy))
    for path in ("unix", "tcp"):
        speeds = raw.socket_loop(256 * MiB, 2, n, unix=path == "unix")
        table.measured(f"raw {path} sockets, 2 connections", speeds, "GB/s")
        baselines[path] = (f"raw {path} sockets", speeds)

    for path, (transports, shared, host_id) in PATHS.items():
        against, baseline = baselines[path]
        with other_process(other) as pipe, tm.Engine(transports=transports, token="bench") as engine:
            pipe.send((transports, shared, host_id, size))
            address, descriptor = pipe.recv()
            region = engine.register(memory(shared, size))
            remote = engine.connect(address).open(descriptor)
            assert remote.transport == path, f"{path} was asked for, {remote.transport} would carry it"
            for kind, move in (("write", engine.write), ("read", engine.read)):
                for block, count in BATCHES:
                    if block * count <= size:
                        speeds = throughput(move, region, remote, block, count, n)
                        name = f"{path} {kind} {block >> 10} KiB x {count}"
                        table.measured(name, speeds, "GB/s", against=against, baseline=baseline)
                for block in (4 << 10, 64 << 10):
                    medians = latency_us(move, region, remote, block, 200 if args.quick else 1000)
                    table.measured(f"{path} {kind} latency p50, {block >> 10} KiB", medians, "us")
    return table.rows


if __name__ == "__main__":
    raise SystemExit(main(__doc__ or "", run))
