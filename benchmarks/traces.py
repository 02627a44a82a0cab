"""Hit rates of the pool's eviction on recorded requests, through the real path: pages put and got with ``pool.kv`` over
a node with room for a number of pages. Beside it LRU, ARC and S3-FIFO in a simulator.

    python benchmarks/traces.py --traces DIR [--json FILE] [--quick] [--capacity N ...]

The traces are those published with the Mooncake paper (kvcache-ai/Mooncake, FAST25-release/traces): a request a line,
``hash_ids`` names its blocks. A request hits the longest run of its blocks, from the first on, that are there; then all
of them are used, the last first. Without the files (``../shared/traces`` of the checkout) there are no rows.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from harness import Row, Table, main
from policies import ARC, LRU, S3FIFO
from scale import nodes

TRACES = Path(__file__).resolve().parents[2] / "shared" / "traces"
CAPACITIES = (1_000, 3_000, 6_000, 10_000, 20_000, 30_000, 50_000)
# Of the turnover policy as it was chosen; the pool may lose this much to what its calls cannot tell.
TURNOVER = {
    "conversation": (0.048, 0.091, 0.164, 0.233, 0.301, 0.331, 0.356),
    "synthetic": (0.087, 0.203, 0.329, 0.442, 0.589, 0.626, 0.640),
}
SLACK = 0.003
PAGE_NBYTES = 32 << 10  # the least that has pages of memory of its own


def requests(path: Path) -> list[list[int]]:
    with path.open() as lines:
        return [json.loads(line)["hash_ids"] for line in lines]


def simulated(policy: Any, trace: list[list[int]]) -> float:
    hits = 0
    for blocks in trace:
        hits += next((n for n, block in enumerate(blocks) if block not in policy), len(blocks))
        for block in reversed(blocks):
            policy.use(block)
    return hits / sum(map(len, trace))


def pooled(trace: list[list[int]], capacity: int) -> float:
    """The hit rate of a node that holds ``capacity`` pages."""
    import torch

    from torch_mooncake.kv import PagedKV, PoolKV

    longest = max(map(len, trace))
    cache = PagedKV([torch.zeros((longest, 2, 16, 8, 32))])
    pages = list(range(longest))
    hits = 0
    with nodes(capacity * PAGE_NBYTES) as (_, pool):
        kv = PoolKV(pool, cache, model="trace")
        assert kv.page_nbytes == PAGE_NBYTES
        for blocks in trace:
            found = kv.get_pages(blocks, pages)
            hits += found
            if found < len(blocks):
                kv.put_pages(blocks[found:], pages, parent=blocks[found - 1] if found else None)
    return hits / sum(map(len, trace))


def trace_rows(table: Table, folder: Path, every: bool, capacities: tuple[int, ...] = ()) -> None:
    """Of these capacities; of none given all, or with not ``every`` one."""
    capacities = capacities or (CAPACITIES if every else (10_000,))
    for name, expected in TURNOVER.items():
        path = folder / f"{name}_trace.jsonl"
        if not path.exists():
            print(f"no rows of the {name} trace: {path} is not there")
            continue
        trace = requests(path)
        for capacity, least in zip(CAPACITIES, expected, strict=True):
            if capacity not in capacities:
                continue
            others = {"LRU": LRU(capacity), "ARC": ARC(capacity), "S3-FIFO": S3FIFO(capacity)}
            rates = {other: simulated(policy, trace) for other, policy in others.items()}
            table.measured(
                f"hit rate, {name} trace, {capacity} blocks",
                [pooled(trace, capacity)],
                "",
                limit=round(least - SLACK, 3),
                note=", ".join(f"{other} {rate:.3f}" for other, rate in rates.items()),
            )


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--traces", type=Path, default=TRACES, metavar="DIR", help="where the traces are")


def own_arguments(parser: argparse.ArgumentParser) -> None:
    arguments(parser)
    parser.add_argument("--capacity", type=int, nargs="+", choices=CAPACITIES, default=[], help="these only")


def run(args: argparse.Namespace) -> list[Row]:
    table = Table("Hit rates on traces")
    trace_rows(table, args.traces, not args.quick, tuple(args.capacity))
    return table.rows


if __name__ == "__main__":
    sys.exit(main(__doc__ or "", run, own_arguments))
