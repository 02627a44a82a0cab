"""Weights from trainers to subscribers: on one host beside gloo, between shaped hosts beside what the bytes need, and
the plan of a model of a trillion parameters.

    python benchmarks/weights.py [--only host hosts delta plan] [--json FILE] [--quick]

host: one process to two; gloo broadcasts the same tensors, one by one and as one buffer, and its better median counts.
A time is from a barrier to the moment when all have the version in place; of views, from a version that is published.
"In place": the trainer's tensors are in shared memory, and nothing of them is copied before it is read. hosts: eight
network namespaces of 1 Gbit/s (root); ratios are to the time that the busiest NIC needs for its bytes. delta: what
has changed in the place of a version (weights_delta.py). plan: Kimi-K2 from 256 trainer ranks, in seconds of a core,
and the model's prediction over the bound.
"""

from __future__ import annotations

import argparse
import datetime
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import weights_delta
from harness import MiB, Row, Table, main

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "weights"), str(ROOT / "examples" / "weight_broadcast")]

PARTS = ("host", "hosts", "delta", "plan")
RATE = 1e9 / 8


# --- one host ---

# name: (the trainer publishes in place, what the receivers do)
WAYS = {
    "two copies": (False, "swap"),
    "in place": (True, "swap"),
    "in place, direct": (True, "direct"),
    "views": (False, "view"),
}


def rank_of_host(rank: int, folder: str, nbytes: int, count: int, n: int, queue: Any) -> None:
    import torch
    import torch.distributed as dist

    import torch_mooncake as tm
    from torch_mooncake import weights

    store = os.path.join(folder, f"store-{nbytes}")
    timeout = datetime.timedelta(seconds=300)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=3, timeout=timeout)
    samples: dict[str, list[float]] = {name: [] for name in ("one by one", "as one", *WAYS)}

    def timed(name: str, call: Any) -> None:
        dist.barrier()
        began = time.perf_counter()
        call()
        dist.barrier()
        samples[name].append(time.perf_counter() - began)

    def model() -> dict[str, torch.Tensor]:
        return {f"w{i}": t for i, t in enumerate(torch.full((nbytes // 4,), float(rank)).chunk(count))}

    def against_gloo() -> None:
        tensors = model()
        flat = torch.full((nbytes // 4,), float(rank))
        for _ in range(n + 1):
            timed("one by one", lambda: [dist.broadcast(tensor, 0) for tensor in tensors.values()])
            timed("as one", lambda: dist.broadcast(flat, 0))

    def trains(name: str, in_place: bool) -> None:
        tensors = model()
        if in_place:
            weights.share(tensors)
        with weights.Publisher(name.replace(" ", "-"), tensors, in_place=in_place) as publisher:
            dist.barrier()
            for step in range(n + 1):
                for tensor in tensors.values():
                    tensor.fill_(step)
                if WAYS[name][1] == "view":
                    publisher.publish(step=step)
                    timed(name, lambda: None)
                else:
                    timed(name, lambda step=step: publisher.publish(step=step))
                publisher.fence()
            dist.barrier()

    def receives(name: str, flip: Any) -> None:
        tensors = model()
        with weights.Subscriber(name.replace(" ", "-"), tensors, flip=flip) as subscriber:
            dist.barrier()
            for step in range(n + 1):
                timed(name, lambda: subscriber.update(timeout=120))
                assert all(bool(tensor.eq(step).all()) for tensor in tensors.values())
        dist.barrier()

    against_gloo()
    tm.init()
    for name, (in_place, flip) in WAYS.items():
        trains(name, in_place) if rank == 0 else receives(name, flip)
    if rank == 0:
        queue.put({name: values[1:] for name, values in samples.items()})
    dist.destroy_process_group()
    tm.close()


def pause(nbytes: int, n: int) -> list[float]:
    """Seconds that ``update`` takes when the version is there."""
    import torch

    from torch_mooncake.weights import Publisher, Subscriber

    trainer = {f"w{i}": t for i, t in enumerate(torch.ones(nbytes // 4).chunk(300))}
    worker = {name: torch.zeros_like(tensor) for name, tensor in trainer.items()}
    found = []
    with Publisher("pause", trainer) as publisher, Subscriber("pause", worker, flip="swap") as subscriber:
        for step in range(n + 1):
            publisher.publish(step=step)
            while not all(publisher.delivered().values()):
                time.sleep(0.01)
            time.sleep(0.05)
            began = time.perf_counter()
            subscriber.update(timeout=30)
            found.append(time.perf_counter() - began)
    return found[1:]


def one_host(quick: bool) -> list[Row]:
    import torch.multiprocessing as mp

    import torch_mooncake as tm

    table = Table("weights on one host: 1 process to 2")
    n = 2 if quick else 5
    with tempfile.TemporaryDirectory(prefix="tm-", dir="/tmp") as folder:
        os.environ.update(TM_RUNTIME_DIR=folder, TM_POOL="weights", TM_MEMORY="64MiB", TM_LINGER_S="0")
        tm.init()
        large = 256 * MiB if quick else 2048 * MiB
        for nbytes, count, limits in (
            (large, 300, {"in place": 1 / 7, "in place, direct": 1 / 7}),
            (20_000_000, 60, {"two copies": 1.0, "in place": 1.0, "in place, direct": 1.0}),
        ):
            queue = mp.get_context("spawn").SimpleQueue()
            mp.spawn(rank_of_host, (folder, nbytes, count, n, queue), nprocs=3)
            samples = queue.get()
            gloo = min((samples["one by one"], samples["as one"]), key=statistics.median)
            what = f"{nbytes >> 20} MiB, {count} tensors"
            for name in WAYS:
                if name == "views":
                    ms = [s * 1e3 for s in samples[name]]
                    table.measured(f"{what}, views", ms, "ms", limit=20.0, at_least=False)
                    continue
                limit = {"ratio_limit": round(limits[name], 3)} if name in limits else {}
                table.measured(
                    f"{what}, {name}", samples[name], "s", against="gloo", baseline=gloo, at_least=False, **limit
                )
        table.measured("pause of a flip", [s * 1e3 for s in pause(large, n)], "ms", limit=2.0, at_least=False)
        tm.close()
    return table.rows


# --- between hosts ---

SET_UP = """
import time, torch, torch_mooncake as tm
from torch_mooncake import weights
torch.set_num_threads(1)
tm.init()
engine = tm.Engine(f"tcp://{address}:0", token="t", transports=("tcp",), host_id=host, name=host)
number = int(host.removeprefix("host"))
at, ranks, kind = (number, trainers, "t") if number < trainers else ((number - trainers) % tp, tp, "s")
layout = weights.Layout(
    [weights.Rule("w{i}", [weights.Part("w{i}", split=[weights.Split("tp", 0)])])], {"tp": (at, ranks)})
mine = {f"w{i}": torch.zeros(1024 // ranks, (mib << 18) // 16 // 1024) for i in range(16)}
place = weights.Place(host)
if kind == "t":
    whole = weights.Publisher("p", mine, layout=layout, rank=at, world=trainers, engine=engine, place=place)
else:
    whole = weights.Subscriber("p", mine, layout=layout, engine=engine, place=place, flip="swap", patience_s=60)
"""
ROUND = """
if kind == "t":
    for tensor in mine.values():
        tensor.fill_(step)
    whole.publish(step=step)
    result = time.monotonic()
else:
    before = engine.stats()["bytes_received"].get("tcp", 0)
    whole.update(timeout=200)
    result = time.monotonic()
    assert all(bool(tensor.eq(step).all()) for tensor in mine.values())
"""
COUNTED = """
counters = engine.stats()
result = [counters["bytes_sent"].get("tcp", 0), counters["bytes_received"].get("tcp", 0),
          whole.progress.bytes_looked if kind == "s" and whole.progress else 0]
"""


def plan_of(trainers: int, tp: int, mib: int) -> Any:
    """What the hosts plan, from 8 of them."""
    import torch

    from torch_mooncake.weights import Layout, Part, Place, Rule, Split, describe
    from torch_mooncake.weights.plan import plan

    def held(at: int, ranks: int) -> Any:
        layout = Layout([Rule("w{i}", [Part("w{i}", split=[Split("tp", 0)])])], {"tp": (at, ranks)})
        return describe({f"w{i}": torch.empty(1024 // ranks, (mib << 18) // 16 // 1024) for i in range(16)}, layout)

    sides = [held(i, trainers) for i in range(trainers)], [held((i - trainers) % tp, tp) for i in range(trainers, 8)]
    return plan(*sides, [Place(f"host{i}") for i in range(8)], partial=True)


def counted(made: Any, before: list[Any], after: list[Any]) -> float:
    """How far the bytes that the engines counted are from the plan's, at the rank where they are farthest; boards are
    not counted, but for looks that were not answered."""
    sent, received = made.traffic()
    off = []
    looks = sum(look for _, _, look in after)
    for node, (a, b) in enumerate(zip(before, after, strict=True)):
        if node >= made.sources:
            off.append(abs(b[1] - a[1] - b[2] - int(received[node])) / int(received[node]))
    out = sum(b[0] - a[0] for a, b in zip(before[: made.sources], after, strict=False))
    unique = int(sent[: made.sources].sum())
    off.append(max(0, unique - out, out - unique - looks) / unique)
    return max(off)


def between_hosts(quick: bool) -> list[Row]:
    from shaped_hosts import ShapedHosts

    import torch_mooncake as tm
    from torch_mooncake.weights.simulate import Network, simulate

    table = Table("weights between hosts of 1 Gbit/s")
    network = Network(nic=RATE, payload=0.99)  # an MTU of 9000
    mib, n = (64, 2) if quick else (512, 3)
    for name, trainers, tp, each, limit in (
        ("1 trainer to 7 full copies", 1, 1, mib, 1.15),
        ("4 to 4, TP4 to 2 x TP2", 4, 2, mib // 2, 1.2),
    ):
        with tempfile.TemporaryDirectory(prefix="tm-", dir="/tmp") as folder:
            os.environ.update(TM_RUNTIME_DIR=folder, TM_POOL="weights", TM_MEMORY="64MiB", TM_LINGER_S="0")
            os.environ["PYTHONPATH"] = str(ROOT)
            tm.init()
            hosts = ShapedHosts(8, 1000, dict(os.environ))
            try:
                hosts.run(SET_UP, trainers=trainers, tp=tp, mib=mib)
                made, seconds, off = plan_of(trainers, tp, mib), [], []
                for step in range(n + 1):
                    before = hosts.run(COUNTED)
                    ended = hosts.run(ROUND, step=step)
                    seconds.append(max(ended[trainers:]) - max(ended[:trainers]))
                    off.append(counted(made, before, hosts.run(COUNTED)))
                bound = each * MiB / RATE
                table.measured(
                    f"{name}, {mib} MiB", seconds[1:], "s", against="bound", baseline=[bound], ratio_limit=limit,
                    at_least=False,
                )  # fmt: skip
                predicted = simulate(made, network).seconds
                table.measured("  predicted", [predicted], "s", against="bound", baseline=[bound])
                apart = [abs(s / predicted - 1) for s in seconds[1:]]
                table.measured("  measured, apart from that", apart, "", limit=0.15, at_least=False)
                table.measured("  at the engines, apart from the plan", off[1:], "", limit=0.001, at_least=False)
            finally:
                hosts.close()
                tm.close()
    weights_delta.between_hosts(table, quick)
    return table.rows


# --- the plan ---


def planned() -> list[Row]:
    import kimi_k2

    from torch_mooncake.weights.plan import plan
    from torch_mooncake.weights.simulate import Network, simulate

    table = Table("the plan of Kimi-K2, from 256 trainer ranks")
    shapes = kimi_k2.Shapes()
    sources = kimi_k2.trainers(shapes)
    for engines, tp in ((8, 32), (8, 16)):
        targets = kimi_k2.servers(shapes, instances=engines, tp=tp)
        places = [*kimi_k2.places(len(sources), "t"), *kimi_k2.places(len(targets), "s")]
        began = time.process_time()
        made = plan(sources, targets, places)
        took = time.process_time() - began
        table.measured(f"planned, {engines} engines of {tp}", [took], "s", limit=5.0, at_least=False)
        network = Network(nic=50e9, latency_s=3e-4)  # RDMA, asked for from Python
        said = simulate(made, network)
        bound = float(made.traffic()[1].max() / 50e9)
        table.measured(
            f"predicted, {engines} engines of {tp}, 400 Gbit/s", [said.seconds], "s", against="ingress bound",
            baseline=[bound], ratio_limit=1.5, at_least=False,
        )  # fmt: skip
        said = simulate(made, network, share=0.031)
        table.measured("  2 % changed, its bytes alone", [said.seconds], "s", limit=0.1, at_least=False)
    return table.rows


def run(args: argparse.Namespace) -> list[Row]:
    rows = one_host(args.quick) if "host" in args.only else []
    rows += between_hosts(args.quick) if "hosts" in args.only else []
    rows += weights_delta.deltas(args.quick) if "delta" in args.only else []
    return rows + (planned() if "plan" in args.only else [])


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, metavar="PART", help=", ".join(PARTS))


if __name__ == "__main__":
    sys.exit(main(__doc__ or "", run, arguments))
