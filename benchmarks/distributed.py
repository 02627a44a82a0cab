"""Collectives of the backend "mooncake" beside gloo: the same processes run both in turn.

    python benchmarks/distributed.py [--only host hosts] [--world 2 4] [--json FILE] [--quick]

host: on one host. hosts: between four with shaped links (see distributed_hosts.py; root).

Small ones are timed as a train of operations, back to back, on rank 0: microseconds of each. Large ones one at a time,
behind a barrier; fp32 tensors. Ratios are of medians of one run: gloo's time over ours.
"""

from __future__ import annotations

import argparse
import datetime
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import distributed_hosts
from harness import MiB, Row, Table, main

BACKENDS = ("mooncake", "gloo")
OPS = ("all_reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all")
SMALL = (8, 4 << 10)
LARGE = (MiB, 64 * MiB, 256 * MiB)
Samples = dict[str, list[float]]  # backend -> seconds of one operation


def operation(op: str, nbytes: int, rank: int, world: int, group: Any) -> Callable[[], Any]:
    """One ``op`` over ``nbytes`` a rank (all_gather and reduce_scatter: in the larger of the two tensors)."""
    import torch
    import torch.distributed as dist

    count = max(nbytes // 4, world) // world * world
    whole, part = torch.ones(count), torch.ones(count // world)
    other = torch.ones(count)
    if op == "all_reduce":
        return lambda: dist.all_reduce(whole, op=dist.ReduceOp.MAX, group=group)
    if op == "broadcast":
        return lambda: dist.broadcast(whole, 0, group=group)
    if op == "all_gather":
        return lambda: dist.all_gather_into_tensor(whole, part, group=group)
    if op == "reduce_scatter":
        return lambda: dist.reduce_scatter_tensor(part, whole, op=dist.ReduceOp.MAX, group=group)
    if op == "all_to_all":
        return lambda: dist.all_to_all_single(other, whole, group=group)
    if op == "send_recv":
        return lambda: dist.send(whole, 1, group=group) if rank == 0 else dist.recv(whole, 0, group=group)
    raise ValueError(op)


def worker(rank: int, world: int, folder: str, cases: list[tuple[str, int]], n: int) -> None:
    """One rank: every case with both backends, ``n`` rounds in turn; rank 0 leaves its seconds in ``folder``."""
    import json

    import torch
    import torch.distributed as dist

    import torch_mooncake.distributed  # noqa: F401  (registers the backend)

    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=datetime.timedelta(seconds=300))
    groups = {backend: dist.new_group(backend=backend) for backend in BACKENDS}
    results = []
    for op, nbytes in cases:
        if op == "send_recv" and rank > 1:
            dist.barrier()
            continue
        train = 200 if nbytes in SMALL else 1
        samples: Samples = {backend: [] for backend in BACKENDS}
        calls = {backend: operation(op, nbytes, rank, world, group) for backend, group in groups.items()}
        for turn in range(n + 1):
            for backend in BACKENDS:
                if op != "send_recv":
                    dist.barrier(groups[backend])
                start = time.perf_counter()
                for _ in range(train):
                    calls[backend]()
                seconds = (time.perf_counter() - start) / train
                if turn > 0:
                    samples[backend].append(seconds)
        dist.barrier()
        results.append({"op": op, "nbytes": nbytes, "samples": samples})
    if rank == 0:
        Path(folder, "seconds.json").write_text(json.dumps(results))
    dist.destroy_process_group()


def measure(world: int, cases: list[tuple[str, int]], n: int) -> list[dict[str, Any]]:
    import json
    import multiprocessing

    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="tm-bench-") as folder:
        ranks = [context.Process(target=worker, args=(rank, world, folder, cases, n)) for rank in range(world)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
        if any(process.exitcode for process in ranks):
            raise RuntimeError(f"a rank ended with {[process.exitcode for process in ranks]}")
        return json.loads(Path(folder, "seconds.json").read_text())


def size_name(nbytes: int) -> str:
    return f"{nbytes >> 20} MiB" if nbytes >= MiB else f"{nbytes >> 10} KiB" if nbytes >= 1 << 10 else f"{nbytes} B"


def run(args: argparse.Namespace) -> list[Row]:
    rows = one_host(args) if "host" in args.only else []
    return rows + (distributed_hosts.run(args.quick) if "hosts" in args.only else [])


def one_host(args: argparse.Namespace) -> list[Row]:
    large = LARGE[:2] if args.quick else LARGE
    table = Table("torch.distributed on one host")
    for world in args.world:
        cases = [(op, nbytes) for nbytes in SMALL + large for op in OPS] + [("send_recv", 64 * MiB)]
        gains: list[float] = []
        for case in measure(world, cases, 3 if args.quick else 7):
            op, nbytes, samples = case["op"], case["nbytes"], case["samples"]
            name = f"{op.replace('_recv', '/recv')}, {size_name(nbytes)}, world {world}"
            ours, gloo = ([s * 1e6 for s in samples[backend]] for backend in BACKENDS)
            if nbytes in SMALL:
                limit = round(1 / (20 if world == 2 else 4), 3)
                table.measured(name, ours, "µs", against="gloo", baseline=gloo, ratio_limit=limit, at_least=False)
                continue
            ours, gloo = ([nbytes / s / 1e3 for s in values] for values in (ours, gloo))  # MB/s per µs: GB/s
            gains.append(statistics.median(ours) / statistics.median(gloo))
            table.measured(name, ours, "GB/s", against="gloo", baseline=gloo, ratio_limit=3.0)
        mean = statistics.geometric_mean(gains)
        table.measured(f"geometric mean over gloo, large ones, world {world}", [mean], "×", limit=5.0)
    return table.rows


def arguments(parser: argparse.ArgumentParser) -> None:
    parts = ("host", "hosts")
    parser.add_argument("--only", nargs="+", choices=parts, default=parts, metavar="PART", help="host, hosts")
    parser.add_argument("--world", type=int, nargs="+", default=[2, 4], metavar="N", help="ranks (default: 2 4)")


if __name__ == "__main__":
    sys.exit(main(__doc__ or "", run, arguments))
