"""Pages pushed from a prefill process to a decode process: rows for kv.py, and a program of its own.

    python benchmarks/kv_push.py [--quick] [--peers .venv-peers] [--json FILE]

* 32 layers × 256 random pages × 16 KiB, layer by layer, against the engine's own rate for large blocks between the same
  two processes, and (``--peers``) against NIXL and Mooncake's transfer engine moving a descriptor a page.
* How much of a layer-wise push is exposed when each layer is computed for longer than it travels.
* Where packing begins to pay: NHD to HND, whose runs are as long as a head of a token, directly and packed.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from contenders import Contender, Pair
from harness import MiB, Row, Table, main, other_process

import torch_mooncake as tm
from torch_mooncake.kv import KVReceiver, KVSender, PageAllocator, PagedKV

LAYERS, PAGES, PAGE = 32, 256, (2, 16, 4, 64)  # K, N, H, D of bfloat16: 16 KiB
POOL = 2 * PAGES
PAGE_NBYTES = 16 << 10
WAYS = {"shm": ("shm", None), "tcp": ("tcp", "another-host")}  # transports, host id of the decode side
PEERS = {  # who, and how many times faster than it we have to be
    "shm": [(Contender("NIXL shm/cma", "nixl", "shm"), 5)],
    "tcp": [(Contender("NIXL tcp", "nixl", "tcp"), 4), (Contender("Mooncake TE", "mooncake", "tcp"), 5)],
}
CROSSOVER = [(16, 16), (8, 32), (4, 64), (2, 128), (2, 256), (2, 512), (2, 1024), (2, 2048)]  # heads, head_dim


class Pushed(NamedTuple):
    total_s: float  # from the first push to the end
    open_s: float
    calls_s: float  # inside push_layer
    tail_s: float  # from the last layer's compute to the end


class Cache(NamedTuple):
    """What both processes make: one tensor a layer. `order`: of the page's axes in memory."""

    layers: int
    pages: int
    page: tuple[int, int, int, int]
    order: str = "NHD"

    def make(self) -> PagedKV:
        k, n, h, d = self.page
        inner = (n, h, d) if self.order == "NHD" else (h, n, d)
        shape = (self.pages, k, *inner)
        layers = [tm.empty(shape, dtype=torch.bfloat16, shared=True).zero_() for _ in range(self.layers)]
        return PagedKV([layer if self.order == "NHD" else layer.transpose(2, 3) for layer in layers])


def decode_process(pipe: Any) -> None:
    """Asked by a tuple each; None ends it."""
    engine: Any = None
    while (request := pipe.recv()) is not None:
        what, *arguments = request
        if what == "cache":
            way, cache = arguments
            transports, host_id = WAYS[way]
            engine = tm.Engine(transports=(transports, "tcp"), token="benchmark", host_id=host_id, name="decode")
            kv = Cache(*cache).make()
            receiver = KVReceiver(engine, kv, PageAllocator(kv.layout.num_pages))
            block = tm.empty(128 * MiB, dtype=torch.uint8, shared=True).zero_()
            region = engine.register(block)
            pipe.send((engine.addresses[0], region.descriptor()))
        elif what == "open":
            count, wire = arguments
            session = receiver.open(count, prompt_pages=count, timeout=60, wire=wire)
            pipe.send(session.ticket())
        elif what == "wait":
            session.wait()
            pages = session.pages
            receiver.allocator.free(pages)
            sums = [float(layer[pages].float().sum()) for layer in (kv.layers[0], kv.layers[-1])]
            pipe.send(sums)
        elif what == "close":
            receiver.close()
            engine.close()
            pipe.send(True)


class Prefill:
    """This side, and the pipe to the other."""

    def __init__(self, pipe: Any, way: str, ours: Cache, theirs: Cache) -> None:
        self.pipe = pipe
        pipe.send(("cache", way, tuple(theirs)))
        address, descriptor = pipe.recv()
        self.engine = tm.Engine(transports=(WAYS[way][0], "tcp"), token="benchmark", name="prefill")
        self.kv = ours.make()
        for number, layer in enumerate(self.kv.layers):
            layer.copy_(torch.arange(layer.shape[0]).view(-1, 1, 1, 1, 1).expand_as(layer).remainder(13) + number % 7)
        self.sender = KVSender(self.engine, self.kv)
        self.remote = self.engine.connect(address).open(descriptor)
        self.block = tm.empty(128 * MiB, dtype=torch.uint8, shared=True).zero_()
        self.region = self.engine.register(self.block)
        self.random = random.Random(1)

    def large(self) -> float:
        """Seconds of 128 MiB in blocks of 64 MiB, one call."""
        half = 64 * MiB
        began = time.perf_counter()
        pairs = [(self.region[at : at + half], self.remote[at : at + half]) for at in (0, half)]
        self.engine.write(pairs).wait()
        return time.perf_counter() - began

    def push(self, count: int, wire: str = "auto", compute_s: float = 0.0) -> Pushed:
        """One session of random pages, its data checked. Before each layer it sleeps for ``compute_s``."""
        pages = self.random.sample(range(self.kv.layout.num_pages), count)
        self.pipe.send(("open", count, wire))
        ticket = self.pipe.recv()
        began = time.perf_counter()
        push = self.sender.open(ticket)
        opened = time.perf_counter()
        in_calls = 0.0
        for layer in range(self.kv.layout.num_layers):
            if compute_s:
                time.sleep(compute_s)
            computed = time.perf_counter()
            push.push_layer(layer, pages)
            in_calls += time.perf_counter() - computed
        result = push.finish()
        end = time.perf_counter()
        self.pipe.send(("wait",))
        sums = self.pipe.recv()
        wanted = [float(layer[pages].float().sum()) for layer in (self.kv.layers[0], self.kv.layers[-1])]
        if sums != wanted:
            raise RuntimeError("the pages that arrived are not those that were pushed")
        if wire != "auto" and result.wire != wire:
            raise RuntimeError(f"{wire} was asked for, {result.wire} carried it")
        return Pushed(end - opened, opened - began, in_calls, end - computed)

    def close(self) -> None:
        self.sender.close()
        self.pipe.send(("close",))
        self.pipe.recv()
        self.engine.close()


@contextmanager
def sides(way: str, ours: Cache, theirs: Cache) -> Iterator[Prefill]:
    with other_process(decode_process) as pipe:
        prefill = Prefill(pipe, way, ours, theirs)
        try:
            yield prefill
        finally:
            prefill.close()


def rates(nbytes: int, seconds: list[float]) -> list[float]:
    return [nbytes / s / 1e9 for s in seconds]


def push_rows(table: Table, way: str, quick: bool, peers: Path | None) -> None:
    cache = Cache(LAYERS, POOL, PAGE)
    total = LAYERS * PAGES * PAGE_NBYTES
    n = 3 if quick else 9
    with sides(way, cache, cache) as prefill:
        prefill.large()
        prefill.push(PAGES)
        large, pushed = [], []
        for _ in range(n):  # in turn: the machine's moods are shared
            large.append(prefill.large())
            pushed.append(prefill.push(PAGES))
        speeds = rates(total, [each.total_s for each in pushed])
        name = f"{way}, push of {LAYERS} layers × {PAGES} pages × 16 KiB"
        table.measured(
            name, speeds, "GB/s", against="engine, 64 MiB blocks", baseline=rates(128 * MiB, large),
            ratio_limit=0.9 if way == "shm" else 0.85,
        )  # fmt: skip
        table.measured(f"{way}, taking the ticket", [each.open_s * 1e3 for each in pushed], "ms")
        one_layer = [each.total_s / LAYERS * 1e3 for each in pushed]
        computed = [prefill.push(PAGES, compute_s=1.5e-3 * statistics.median(one_layer)) for _ in range(n)]
        table.measured(
            f"{way}, push by layer, after the last layer's compute", [each.tail_s * 1e3 for each in computed], "ms",
            against="one layer's transfer", baseline=one_layer, ratio_limit=1.2, at_least=False,
        )  # fmt: skip
        table.measured(f"{way}, push by layer, inside {LAYERS} calls", [each.calls_s * 1e3 for each in computed], "ms")
    for contender, ratio in PEERS[way] if peers else []:
        assert peers
        pair = Pair(contender, peers, 256 * MiB)
        try:
            got = pair.ask("throughput", op="write", block=PAGE_NBYTES, count=LAYERS * PAGES, n=3 if quick else 5)
            theirs = rates(total, got["seconds"])
            table.measured(f"{name}", speeds, "GB/s", against=contender.name, baseline=theirs, ratio_limit=ratio)
        except RuntimeError as error:
            table.add(Row(f"{name}: {contender.name}", 0, "GB/s", (0, 0), note=f"void: {error}"))
        finally:
            pair.close()


def crossover_rows(table: Table, way: str, quick: bool) -> None:
    """The same pages with short runs, directly and packed. What a session chooses by itself is said."""
    for heads, dim in CROSSOVER[1::3] if quick else CROSSOVER:
        page = (2, 16, heads, dim)
        nbytes = 4 * 16 * heads * dim
        count = max(8, 4 * MiB // nbytes)
        layers = 4
        ours, theirs = Cache(layers, count + 8, page), Cache(layers, count + 8, page, "HND")
        with sides(way, ours, theirs) as prefill:
            took: dict[str, list[float]] = {"direct": [], "packed": []}
            for _ in range(4 if quick else 8):  # in turn; the first ones make what is made on first use
                for wire, seconds in took.items():
                    seconds.append(prefill.push(count, wire).total_s)
            speeds = {wire: rates(layers * count * nbytes, seconds[1:]) for wire, seconds in took.items()}
            prefill.pipe.send(("open", 1, "auto"))
            plan = prefill.sender.open(prefill.pipe.recv()).plan
            table.measured(
                f"{way}, NHD to HND in runs of {2 * dim} bytes, packed", speeds["packed"], "GB/s",
                against="directly", baseline=speeds["direct"], note=f"chosen: {plan.wire}",
            )  # fmt: skip


def rows(table: Table, quick: bool, peers: Path | None) -> None:
    for way in WAYS:
        push_rows(table, way, quick, peers)
    for way in WAYS:
        crossover_rows(table, way, quick)


def run(args: argparse.Namespace) -> list[Row]:
    table = Table("Pages from a prefill process to a decode process")
    rows(table, args.quick, Path(args.peers) if args.peers else None)
    return table.rows


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--peers", metavar="FOLDER", help="the virtual environment with NIXL and Mooncake (make peers)")


if __name__ == "__main__":
    raise SystemExit(main(__doc__ or "", run, arguments))
