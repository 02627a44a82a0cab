"""Collectives of the backend "mooncake" beside gloo: the same processes run both in turn.

    python benchmarks/distributed.py [--only host hosts] [--world 2 4] [--json FILE] [--quick]

host: on one host. hosts: between four with shaped links (see distributed_hosts.py; root).

Small ones are timed as a train of operations, back to back, on rank 0: microseconds of each. Large ones one at a time,
behind a barrier; fp32 tensors. Ratios are of medians of one run: gloo's time over ours. A send of 64 MiB is also held
against the best copy of as much memory (raw.cpp) in the same run. The step of data-parallel training is that of a
transformer of 25 million parameters on 2 ranks, over so few tokens that computing takes at most twice as long as what
gloo adds to it.
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
from raw import Raw

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


def transformer() -> Any:
    """25 million parameters: tokens of [batch, 32, 512] to the same shape."""
    import torch

    layer = torch.nn.TransformerEncoderLayer(512, 16, 2048, dropout=0, batch_first=True, norm_first=True)
    model = torch.nn.TransformerEncoder(layer, 8, enable_nested_tensor=False)
    assert 24e6 < sum(p.numel() for p in model.parameters()) < 27e6
    return model


def training(rank: int, world: int, folder: str, n: int) -> None:
    """One rank: seconds of a step over each backend, and of computing alone; the tokens are halved until they fit."""
    import contextlib
    import copy
    import json

    import torch
    import torch.distributed as dist

    import torch_mooncake.distributed  # noqa: F401  (registers the backend)

    torch.set_num_threads(1)
    torch.manual_seed(0)
    store = dist.FileStore(f"{folder}/store", world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=datetime.timedelta(seconds=300))
    model = transformer()
    models = {
        backend: torch.nn.parallel.DistributedDataParallel(
            copy.deepcopy(model), process_group=dist.new_group(backend=backend)
        )
        for backend in BACKENDS
    }
    optimizers = {backend: torch.optim.SGD(models[backend].parameters(), lr=1e-3) for backend in BACKENDS}

    def step(backend: str, tokens: int, alone: bool = False) -> float:
        dist.barrier()
        start = time.perf_counter()
        with models[backend].no_sync() if alone else contextlib.nullcontext():
            models[backend](torch.ones(1, tokens, 512)).square().mean().backward()
        optimizers[backend].step()
        optimizers[backend].zero_grad()
        return time.perf_counter() - start

    tokens = 32
    while True:
        samples: Samples = {name: [] for name in (*BACKENDS, "alone")}
        for turn in range(n + 2):
            for name in samples:
                seconds = step(BACKENDS[0] if name == "alone" else name, tokens, name == "alone")
                if turn > 1:  # DDP orders its buckets anew after the first step
                    samples[name].append(seconds)
        middle = torch.tensor([statistics.median(values) for values in samples.values()])
        dist.broadcast(middle, 0)
        _, gloo, alone = middle.tolist()
        if alone <= 2 * (gloo - alone) or tokens == 1:
            break
        tokens //= 2
    if rank == 0:
        Path(folder, "seconds.json").write_text(json.dumps({"tokens": tokens, "samples": samples}))
    dist.destroy_process_group()


def spawned(target: Callable[..., None], world: int, *args: Any) -> Any:
    """What rank 0 of ``target(rank, world, folder, *args)`` has left."""
    import json
    import multiprocessing

    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="tm-bench-") as folder:
        ranks = [context.Process(target=target, args=(rank, world, folder, *args)) for rank in range(world)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
        if any(process.exitcode for process in ranks):
            raise RuntimeError(f"a rank ended with {[process.exitcode for process in ranks]}")
        return json.loads(Path(folder, "seconds.json").read_text())


def size_name(nbytes: int) -> str:
    return f"{nbytes >> 20} MiB" if nbytes >= MiB else f"{nbytes >> 10} KiB" if nbytes >= 1 << 10 else f"{nbytes} B"


def training_row(table: Table, n: int) -> None:
    result = spawned(training, 2, n)
    ours, gloo, alone = (statistics.median(result["samples"][name]) for name in (*BACKENDS, "alone"))
    note = (
        f"{result['tokens']} tokens a rank; computing {alone * 1e3:.0f} ms ({alone / ours:.0%} of the step, "
        f"{alone / gloo:.0%} of gloo's)"
    )
    rates = ([1 / s for s in result["samples"][backend]] for backend in BACKENDS)
    mine, theirs = rates
    name = "DDP step, 25 M parameters, world 2"
    table.measured(name, mine, "steps/s", against="gloo", baseline=theirs, ratio_limit=1.3, note=note)


def run(args: argparse.Namespace) -> list[Row]:
    rows = one_host(args) if "host" in args.only else []
    return rows + (distributed_hosts.run(args.quick) if "hosts" in args.only else [])


def one_host(args: argparse.Namespace) -> list[Row]:
    raw = Raw()
    large = LARGE[:2] if args.quick else LARGE
    n = 3 if args.quick else 7
    table = Table("torch.distributed on one host")
    bound = max((raw.copy_bound(64 * MiB, threads, n) for threads in (1, 2)), key=statistics.median)
    raw.release()
    for world in args.world:
        cases = [(op, nbytes) for nbytes in SMALL + large for op in OPS] + [("send_recv", 64 * MiB)]
        gains: list[float] = []
        for case in spawned(worker, world, cases, n):
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
            if op == "send_recv":
                table.measured(f"{name}, copied", ours, "GB/s", against="copy bound", baseline=bound, ratio_limit=0.8)
        mean = statistics.geometric_mean(gains)
        table.measured(f"geometric mean over gloo, large ones, world {world}", [mean], "×", limit=5.0)
    training_row(table, n)
    return table.rows


def arguments(parser: argparse.ArgumentParser) -> None:
    parts = ("host", "hosts")
    parser.add_argument("--only", nargs="+", choices=parts, default=parts, metavar="PART", help="host, hosts")
    parser.add_argument("--world", type=int, nargs="+", default=[2, 4], metavar="N", help="ranks (default: 2 4)")


if __name__ == "__main__":
    sys.exit(main(__doc__ or "", run, arguments))
