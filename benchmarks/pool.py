"""The pool on one host: what another process put, read zero-copy; puts against a plain copy; small values in batches
beside Mooncake Store and Redis; the directory by itself; what idling costs; ten million keys; restarts; the SSD tier;
recorded requests.

    make peers                                                # once: the stores it is compared with
    python benchmarks/pool.py --peers [--json FILE] [--quick] [--only PART ...]

Uses nodes of its own (in folders of their own), which are gone afterwards. ``--only traces`` takes every capacity, all
parts together one of them.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import scale
import store_rows
import traces
from harness import GiB, MiB, Row, Table, main, other_process, repeat, run_python
from raw import Raw, gbps
from ssd import ssd_rows

PUT_SIZES = ((4 << 10, 1000), (64 << 10, 500), (MiB, 200), (16 * MiB, 20))


def writer(pipe: Any) -> None:
    """Puts what it is asked for: (key, number of bytes)."""
    import torch

    import torch_mooncake as tm

    while (order := pipe.recv()) is not None:
        key, nbytes = order
        tm.put(key, torch.full((nbytes // 4,), 1.0), timeout=120)
        pipe.send(True)
    tm.close()


def zero_copy(table: Table, pipe: Any, n: int, nbytes: int) -> None:
    """A tensor that another process put: how long the get takes, and a full read of it."""
    import torch

    import torch_mooncake as tm

    torch.set_num_threads(1)
    local = torch.full((nbytes // 4,), 1.0)
    size = f"{nbytes >> 20} MiB"
    gets: dict[bool, list[float]] = {False: [], True: []}
    known: dict[bool, list[float]] = {False: [], True: []}
    sums: dict[bool, list[float]] = {False: [], True: []}
    warm: list[float] = []
    again: list[float] = []
    tm.get("big")  # the segment is mapped once
    for i in range(n):
        pipe.send((f"fresh{i % 2}", nbytes))
        pipe.recv()
        warm += [1e3 * s for s in repeat(1, local.sum)]
        for readonly in (True, False):
            start = time.perf_counter()
            tensor = tm.get(f"fresh{i % 2}", readonly=readonly)
            got = time.perf_counter()
            total = float(tensor.sum())
            summed = time.perf_counter()
            assert total == nbytes // 4
            gets[readonly].append((got - start) * 1e3)
            sums[readonly].append((summed - got) * 1e3)
            if readonly:
                again += [1e3 * s for s in repeat(1, tensor.sum)]
            del tensor
            for _ in range(20):
                start = time.perf_counter()
                tensor = tm.get(f"fresh{i % 2}", readonly=readonly)
                known[readonly].append((time.perf_counter() - start) * 1e6)
                del tensor
    for readonly, limit in ((False, 50.0), (True, 10.0)):
        name = f"get {size}{', readonly' if readonly else ''}, put by another process"
        table.measured(name, known[readonly], "us", limit=limit, at_least=False, note="located before")
        table.measured(f"{name}, the first", [ms * 1e3 for ms in gets[readonly]], "us")
    huge = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled").read_text()
    allowed = not any(f"[{word}]" in huge for word in ("never", "deny"))
    for readonly, name in ((False, "sum over it"), (True, "sum over it, readonly")):
        table.measured(
            f"{name} ({size})",
            sums[readonly],
            "ms",
            against="sum of a warm local tensor",
            baseline=warm,
            ratio_limit=1.1 if readonly or allowed else 1.6,
            at_least=False,
            note="first touch of these pages; shared huge pages " + ("allowed" if allowed else "not allowed"),
        )
    table.measured(
        f"sum over it, readonly, again ({size})",
        again,
        "ms",
        against="sum of a warm local tensor",
        baseline=warm,
        ratio_limit=1.1,
        at_least=False,
        note="pages that this process has touched before",
    )


def puts_and_gets(table: Table, raw: Raw, n: int, quick: bool) -> None:
    import torch

    import torch_mooncake as tm

    for nbytes, count in PUT_SIZES:
        count = max(1, count // 5) if quick else count
        bound = raw.copy_bound(max(nbytes, MiB), 2, n) if nbytes >= 16 * MiB else None
        against = "copy bound, 2 threads" if bound else ""
        sources = [torch.full((nbytes,), i % 251, dtype=torch.uint8) for i in range(min(count, max(1, GiB // nbytes)))]
        keys = [f"put/{nbytes}/{i}" for i in range(count)]
        out = torch.empty(nbytes, dtype=torch.uint8)

        def put_all(keys: list[str] = keys, sources: list[torch.Tensor] = sources) -> None:
            for i, key in enumerate(keys):
                tm.put(key, sources[i % len(sources)])

        def get_all(keys: list[str] = keys, out: torch.Tensor = out) -> None:
            for key in keys:
                tm.get(key, out=out)

        def map_all(keys: list[str] = keys) -> None:
            tm.get_many(keys, readonly=True)

        size = f"{nbytes >> 20} MiB" if nbytes >= MiB else f"{nbytes >> 10} KiB"
        speeds = gbps(nbytes * count, repeat(n, put_all))
        table.measured(f"put {size} x {count}", speeds, "GB/s", against=against, baseline=bound)
        speeds = gbps(nbytes * count, repeat(n, get_all))
        table.measured(f"get {size} x {count}, out=", speeds, "GB/s", against=against, baseline=bound)
        per_key = [s / count * 1e6 for s in repeat(n, map_all)]
        table.measured(f"get_many {size} x {count}, readonly", per_key, "us/key")
        tm.delete(keys)


def latencies(table: Table, n: int) -> None:
    import torch

    import torch_mooncake as tm

    small = torch.zeros(1024)
    calls: dict[str, tuple[Callable[[], Any], float | None]] = {
        "4 KiB, one key per call: put": (lambda: tm.put("small", small), 15.0),
        "4 KiB, one key per call: get": (lambda: tm.get("small"), 6.0),
        "exists, one key per call": (lambda: tm.exists("small"), None),
    }
    for name, (call, limit) in calls.items():
        medians = [statistics.median(repeat(n * 40, call)) * 1e6 for _ in range(5)]
        table.measured(f"{name}, p50", medians, "us", limit=limit, at_least=False)
    keys = [f"missing{i}" for i in range(1000)]
    table.measured("exists of 1000 keys", [s * 1e3 for s in repeat(n, lambda: tm.exists(keys))], "ms")


def state_dicts(table: Table, raw: Raw, n: int, quick: bool) -> None:
    import torch

    import torch_mooncake as tm

    nbytes = (GiB if quick else 2 * GiB) // 300 // 4096 * 4096
    state = {f"layer{i}.weight": torch.full((nbytes // 4,), 1.0) for i in range(300)}
    into = {name: torch.empty_like(tensor) for name, tensor in state.items()}
    bound = raw.copy_bound(256 * MiB, 2, n)

    def put() -> None:
        tm.put_state_dict("state", state, timeout=120)

    fresh = repeat(2, put)  # a put that replaces keeps the old value until the new one is there: two places
    name = f"state dict of 300 tensors, {300 * nbytes >> 20} MiB"
    table.measured(f"{name}: put, into memory new to the node", gbps(300 * nbytes, fresh), "GB/s")
    speeds = gbps(300 * nbytes, repeat(max(3, n // 3), put))
    table.measured(f"{name}: put", speeds, "GB/s", against="copy bound, 2 threads", baseline=bound, ratio_limit=0.8)
    speeds = gbps(300 * nbytes, repeat(max(3, n // 3), lambda: tm.get_state_dict("state", into, timeout=120)))
    table.measured(f"{name}: get", speeds, "GB/s", against="copy bound, 2 threads", baseline=bound, ratio_limit=0.8)
    tm.delete("state")


def idle(table: Table, runtime_dir: str, seconds: float) -> None:
    """Memory and CPU of the node while nobody talks to it."""
    pids = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and runtime_dir in (entry / "cmdline").read_text(errors="replace"):
                pids.append(int(entry.name))
        except OSError:
            continue

    def cpu() -> float:
        ticks = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13] for pid in pids]
        return sum(int(t) for pair in ticks for t in pair) / os.sysconf("SC_CLK_TCK")

    def anonymous() -> float:
        lines = [line for pid in pids for line in Path(f"/proc/{pid}/status").read_text().splitlines()]
        return sum(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) / 1024

    before = cpu()
    time.sleep(seconds)
    used = (cpu() - before) / seconds * 100
    memory = anonymous()
    table.measured("idle node, anonymous memory", [memory], "MiB", limit=20.0, at_least=False, note="keeper + worker")
    table.measured("idle node, CPU", [used], "%", limit=0.5, at_least=False)


def imports(table: Table, n: int) -> None:
    code = "import time, sys; {before}t = time.perf_counter(); import {what}; print(time.perf_counter() - t)"

    def seconds(what: str, before: str = "") -> list[float]:
        return [float(run_python(code.format(what=what, before=before))) for _ in range(n)]

    table.measured("import torch_mooncake", seconds("torch_mooncake"), "s", limit=0.3, at_least=False)
    table.measured(
        "import torch_mooncake.verbs after torch",
        seconds("torch_mooncake.verbs", "import torch; "),
        "s",
        limit=0.3,
        at_least=False,
        note="with the native core",
    )


@contextmanager
def own_pool() -> Iterator[str]:
    """The default pool of this process and those it starts; the folder of its node."""
    runtime_dir = tempfile.mkdtemp(prefix="tm-bench-", dir="/tmp")
    os.environ.update(TM_RUNTIME_DIR=runtime_dir, TM_POOL="bench", TM_LINGER_S="0", TM_MEMORY="4GiB")
    import torch_mooncake as tm

    try:
        tm.init()
        yield runtime_dir
    finally:
        tm.close()
        shutil.rmtree(runtime_dir, ignore_errors=True)


@dataclass
class Bench:
    """What the parts share. Each part makes its rows by itself."""

    args: argparse.Namespace
    table: Table
    n: int
    raw: Raw

    def imports(self) -> None:
        imports(self.table, self.n)

    def zero_copy(self) -> None:
        import torch_mooncake as tm

        with own_pool(), other_process(writer) as pipe:
            big = 256 * MiB if self.args.quick else GiB
            pipe.send(("big", big))
            pipe.recv()
            zero_copy(self.table, pipe, self.n, big)
            tm.delete(["big", "fresh0", "fresh1"])

    def sizes(self) -> None:
        with own_pool():
            puts_and_gets(self.table, self.raw, self.n, self.args.quick)

    def latency(self) -> None:
        with own_pool():
            latencies(self.table, self.n)

    def state_dict(self) -> None:
        with own_pool():
            state_dicts(self.table, self.raw, self.n, self.args.quick)

    def idle(self) -> None:
        with own_pool() as runtime_dir:
            idle(self.table, runtime_dir, 3 if self.args.quick else 20)

    def batches(self) -> None:
        store_rows.batches(self.table, self.args.peers, self.n)

    def namespaces(self) -> None:
        store_rows.between_hosts(self.table, self.args.peers, self.n)

    def big(self) -> None:
        bounds = {nbytes: self.raw.copy_bound(min(nbytes, 256 * MiB), 2, self.n) for nbytes, _ in store_rows.BIG}
        store_rows.big_values(self.table, self.args.peers, bounds, 3 if self.args.quick else 5)

    def directory(self) -> None:
        store_rows.directory(self.table, self.args.quick)

    def many(self) -> None:
        scale.many_keys(self.table, self.args.quick)

    def rebuild(self) -> None:
        scale.rebuild(self.table, self.args.quick)

    def restart(self) -> None:
        scale.restart(self.table, self.args.quick)

    def ssd(self) -> None:
        ssd_rows(self.table, "/var/tmp", self.args.quick)

    def traces(self) -> None:
        every = bool(self.args.only) and not self.args.quick
        traces.trace_rows(self.table, self.args.traces, every)


PARTS = [name for name, part in vars(Bench).items() if callable(part) and not name.startswith("_")]


def arguments(parser: argparse.ArgumentParser) -> None:
    venv = Path(__file__).parent.parent / ".venv-peers"
    parser.add_argument("--peers", nargs="?", type=Path, const=venv, metavar="VENV", help="measure the peers too")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=[], metavar="PART", help=", ".join(PARTS))
    traces.arguments(parser)


def run(args: argparse.Namespace) -> list[Row]:
    if args.peers and not (args.peers / "bin" / "python").exists():
        raise SystemExit(f"{args.peers} is not there: make peers")
    for name in ("TM_TOKEN", "TM_ADDRESS", "TM_HOST_ID"):
        os.environ.pop(name, None)
    bench = Bench(args, Table("Pool, one host"), 3 if args.quick else 9, Raw())
    for part in args.only or PARTS:
        getattr(bench, part)()
    if not args.peers:
        print("without --peers: no row beside a peer was made")
    return bench.table.rows


if __name__ == "__main__":
    raise SystemExit(main(__doc__ or "", run, arguments))
