"""The rows of the transfer engine's table: what is held against what, and how much is asked for."""

from __future__ import annotations

import statistics
from collections.abc import Callable

from contenders import THREADS, WAYS, Samples, What, names_of
from harness import Table
from raw import GiB, MiB

# Medians of 29 November 2026 on a quiet 2-core machine. A baseline below 0.7 of its own voids the row: run again.
RECORDED: dict[tuple[str, What], float] = {
    ("copy bound", ("copy", 64 * MiB)): 20.0,
    ("copy bound", ("copy", GiB)): 20.0,
    ("readv", ("readv", 64 * MiB, 1)): 9.0,
    ("readv", ("readv", 16 << 10, 20_000)): 6.8,
    ("stream", ("stream",)): 6.7,
    ("unix stream", ("unix stream",)): 6.0,
}
_BATCHES = ((4 << 10, 1024), (64 << 10, 1024), (MiB, 256), (64 * MiB, 1), (16 << 10, 20_000))
_PEERS = {  # in the order of _BATCHES
    ("Mooncake TE", "write"): (0.20, 1.45, 1.09, 1.27, 0.62),
    ("Mooncake TE", "read"): (0.19, 1.65, 1.07, 1.20, 0.64),
    ("NIXL tcp", "write"): (0.28, 1.00, 1.68, 1.40, 0.69),
    ("NIXL tcp", "read"): (0.28, 0.71, 0.79, 0.95, 0.68),
    ("NIXL shm/cma", "write"): (0.56, 1.95, 2.46, 2.90, 1.66),
    ("NIXL shm/cma", "read"): (0.57, 2.46, 2.83, 2.81, 1.46),
}
RECORDED.update(
    ((peer, (op, *batch)), speed)
    for (peer, op), speeds in _PEERS.items()
    for batch, speed in zip(_BATCHES, speeds, strict=True)
)
RECORDED_NIXL_TCP_US = {"write": 22.4, "read": 24.2}

LABELS = {
    (4 << 10, 1024): "4 KiB × 1024",
    (64 << 10, 1024): "64 KiB × 1024",
    (MiB, 256): "1 MiB × 256",
    (64 * MiB, 1): "64 MiB",
    (GiB, 1): "1 GiB",
    (16 << 10, 20_000): "16 KiB × 20 000",
}


def peer_names(peer: str) -> list[str]:
    return [peer] if peer == "NIXL shm/cma" else [f"{peer}, bbr", f"{peer}, cubic"]


def void(title: str, what: What, baseline: list[float]) -> str:
    """Why the row is void, or ""."""
    recorded = RECORDED.get((title, what))
    if recorded is None or not baseline or statistics.median(baseline) >= 0.7 * recorded:
        return ""
    return f"{title} came out at {statistics.median(baseline):.3g}, recorded are {recorded:.3g}"


class Rows:
    """Adds the rows that the samples allow."""

    def __init__(self, table: Table, samples: Samples) -> None:
        self.table, self.samples = table, samples

    def beside(
        self, name: str, way: str, what: What, against: str, baseline: list[float], ratio: float, void: str = ""
    ) -> None:
        values = self.samples.get(way, what)
        if values and baseline:
            self.table.measured(name, values, "GB/s", against=against, baseline=baseline, ratio_limit=ratio, void=void)

    def copy_bound(self, nbytes: int) -> tuple[str, list[float], str]:
        modes = [f"{mode}, {THREADS} threads" for mode in ("memcpy", "non-temporal")]
        name, speeds = self.samples.best(modes, ("copy", nbytes))
        return f"copy bound ({name})", speeds, void("copy bound", ("copy", nbytes), speeds)

    def readv(self, block: int, count: int) -> tuple[str, list[float], str]:
        what = ("readv", block, count)
        name, speeds = self.samples.best(names_of(self.samples, "readv"), what)
        return name, speeds, void("readv", what, speeds)

    def stream(self, kind: str = "stream") -> tuple[str, list[float], str]:
        name, speeds = self.samples.best(names_of(self.samples, kind), (kind,))
        return f"raw sockets, {name}", speeds, void(kind, (kind,), speeds)

    def peer(self, name: str, way: str, what: What, peer: str, ratio: float) -> None:
        best, speeds = self.samples.best(peer_names(peer), what)
        self.beside(f"{name}: {peer}", way, what, best, speeds, ratio, void(peer, what, speeds))

    # ---- the parts of the table

    def machine(self) -> None:
        for threads in sorted({1, THREADS}):
            for nbytes in (64 * MiB, GiB):
                modes = [f"{mode}, {threads} threads" for mode in ("memcpy", "non-temporal")]
                name, speeds = self.samples.best(modes, ("copy", nbytes))
                label = f"copy bound, {threads} thread{'s' if threads > 1 else ''}, {LABELS[nbytes, 1]}"
                self.table.measured(label, speeds, "GB/s", note=name.partition(",")[0])
        for batch in ((64 * MiB, 1), (16 << 10, 20_000)):
            name, speeds, _ = self.readv(*batch)
            self.table.measured(f"bare process_vm_readv, {LABELS[batch]}", speeds, "GB/s", note=name)
        for kind in ("stream", "unix stream"):
            name, speeds, _ = self.stream(kind)
            self.table.measured(f"raw {'TCP' if kind == 'stream' else 'Unix'} loop", speeds, "GB/s", note=name)
        for idle in (0, 10_000):
            label = "after 10 ms of idling" if idle else "back to back"
            self.table.measured(f"blocking ping-pong, 4 KiB, {label}", self.samples.get("ping", ("ping", idle)), "us")

    def same_host(self) -> None:
        for op in ("write", "read"):
            for block in (64 * MiB, GiB):
                name = f"shm, {LABELS[block, 1]}, {op}"
                self.beside(name, "shm", (op, block, 1), *self.copy_bound(block)[:2], 0.90, self.copy_bound(block)[2])
                self.peer(name, "shm", (op, block, 1), "NIXL shm/cma", 3)
            pages = (op, 16 << 10, 20_000)
            name = f"shm, {LABELS[pages[1:]]}, one call, {op}"
            bound = self.copy_bound(64 * MiB)
            self.beside(name, "shm", pages, bound[0], bound[1], 0.75, bound[2])
            self.peer(name, "shm", pages, "NIXL shm/cma", 6)
        for op in ("write", "read"):
            for batch, ratio in (((64 * MiB, 1), 2), ((16 << 10, 20_000), 3)):
                what = (op, *batch)
                name = f"any memory (process_vm), {LABELS[batch]}, {op}"
                loop, speeds, why = self.readv(*batch)
                self.beside(name, "process_vm", what, loop, speeds, 0.90, why)
                self.peer(name, "process_vm", what, "NIXL shm/cma", ratio)
                best = [max(self.samples.get("NIXL shm/cma", what), default=0)]
                if batch[1] == 1 and best[0]:
                    self.beside(f"{name}: NIXL's best run", "process_vm", what, "NIXL shm/cma, best", best, 1.0)
        for op in ("write", "read"):
            for quantile, limit in (("p50", 3), ("p99", 20)):
                values = self.samples.get("shm", ("latency", op, 0, quantile))
                if values:
                    name = f"4 KiB single op from Python, shm, {op}, {quantile}"
                    self.table.measured(name, values, "us", limit=limit, at_least=False)

    def tcp(self) -> None:
        raw = self.stream()
        for op in ("write", "read"):
            for batch in ((64 << 10, 1024), (MiB, 256), (64 * MiB, 1)):
                name, what = f"TCP loopback, {LABELS[batch]}, {op}", (op, *batch)
                self.beside(name, "tcp", what, raw[0], raw[1], 0.85, raw[2])
                for peer in ("Mooncake TE", "NIXL tcp"):
                    self.peer(name, "tcp", what, peer, 2.5)
            for batch, ratio in (((4 << 10, 1024), 8), ((16 << 10, 20_000), 5)):
                name, what = f"TCP loopback, {LABELS[batch]}, one call, {op}", (op, *batch)
                self.peer(name, "tcp", what, "Mooncake TE", ratio)
                self.peer(name, "tcp", what, "NIXL tcp", 4)
        for op in ("write", "read"):
            values = self.samples.get("tcp", ("latency", op, 0, "p50"))
            best, nixl = self.samples.best(peer_names("NIXL tcp"), ("latency", op, 0, "p50"), lowest=True)
            if values and nixl:
                slow = statistics.median(nixl) > RECORDED_NIXL_TCP_US[op] / 0.7
                why = f"{best} took {statistics.median(nixl):.3g} us" if slow else ""
                name = f"TCP 4 KiB single {op}, p50, back to back"
                self.table.measured(
                    name, values, "us", against=best, baseline=nixl, ratio_limit=0.75, at_least=False, void=why
                )
        values, ping = (
            self.samples.get("tcp", ("latency", "write", 10_000, "p50")),
            self.samples.get("ping", ("ping", 10_000)),
        )
        if values and ping:
            name = "TCP 4 KiB single write, p50, after 10 ms of idling"
            self.table.measured(
                name,
                values,
                "us",
                against="blocking ping-pong, as idle",
                baseline=ping,
                ratio_limit=1.3,
                at_least=False,
            )
        if idle := self.samples.get("tcp", ("idle",)):
            name = "TCP: CPU of both sides in the second after an op"
            self.table.measured(name, idle, "ms", limit=5, at_least=False, note="one busy thread would show 1000")
        combination = raw[0].removeprefix("raw sockets, ")
        cpu = self.samples.get(combination, ("stream cpu",))
        for op in ("write", "read"):
            values = self.samples.get("tcp", ("cpu", op, 64 * MiB, 1))
            if values and cpu:
                name = f"CPU per GB over TCP, 64 MiB, {op}"
                self.table.measured(name, values, "s/GB", against=raw[0], baseline=cpu, ratio_limit=1.1, at_least=False)

    def all_ways(self) -> None:
        for way in WAYS:
            if calls := self.samples.get(way, ("submission",)):
                name = f"100 000 pages of 16 KiB, {way}: time in the call"
                self.table.measured(name, calls, "ms", limit=3, at_least=False)
        for way in WAYS:
            for batch in ((64 * MiB, 1), (16 << 10, 20_000)):
                write, read = (self.samples.get(way, (op, *batch)) for op in ("write", "read"))
                if write and read:
                    slow, fast = sorted((write, read), key=statistics.median)
                    name = f"READ against WRITE, {way}, {LABELS[batch]}: slower"
                    which = "write" if fast is write else "read"
                    self.table.measured(name, slow, "GB/s", against=f"the {which}", baseline=fast, ratio_limit=0.85)


def add_rows(table: Table, samples: Samples) -> None:
    rows = Rows(table, samples)
    parts: list[Callable[[], None]] = [rows.machine, rows.same_host, rows.tcp, rows.all_ways]
    for part in parts:
        part()


def print_as_tebench(samples: Samples) -> None:
    """The columns of Mooncake's tebench (GB = 1e9 bytes; a Tx is one call of a batch)."""
    print(f"\n{'':28}{'BlkSize (B)':>12} {'Batch':>7} {'BW (GB/s)':>10} {'Avg Lat (us)':>13} {'P99 Tx (us)':>12}")
    contenders = sorted({name for name, what in samples.values if what[0] == "write"}, key=str)
    for name in contenders:
        for op in ("write", "read"):
            for block, count in LABELS:
                speeds = samples.get(name, (op, block, count))
                if speeds:
                    took = sorted(block * count / speed / 1e3 for speed in speeds)  # microseconds
                    mean, p99 = statistics.mean(took), took[min(len(took) - 1, len(took) * 99 // 100)]
                    speed = block * count / mean / 1e3
                    label = f"{name} {op}"
                    print(f"{label:28}{block:>12} {count:>7} {speed:>10.3f} {mean:>13.1f} {p99:>12.1f}")
