"""Paged-KV operators on the CPU: beside a plain copy of as many bytes, and beside what torch offers for the same.

Every call works on other memory than the ones before it: 32 MiB would stay in the caches. Rounds are interleaved; a
round measures the copy bound (the better of memcpy and interleaved non-temporal stores, raw.py), the operator, and
torch's own, a call each. GB/s are of bytes copied, each read and written once; of the wide side where two sizes meet.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from harness import MiB, Row, Table, main, repeat
from raw import Raw
from torch import Tensor

from torch_mooncake import ops

NBYTES = 32 * MiB  # of a call: 2048 pages of 16 KiB
PAGE = (16, 4, 128)  # tokens, heads, elements of bf16: 16 KiB
SETS = 6  # of memory, taken in turn
RECORDED_BOUND = 20.0  # GB/s of two cores, quiet; a bound under 0.7 of it voids the rows
Work = Callable[[int], object]


@dataclass
class Job:
    """Something to measure: `work(i)` with the i-th set of memory."""

    name: str
    work: Work
    bound: float | None = None  # at least so much of the copy bound
    torch_name: str = ""
    torch_work: Work | None = None
    torch_ratio: float | None = None
    speeds: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))


def fresh(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype).random_(0, 8)


def copies(count: int) -> list[Job]:
    """Gather and scatter of `count` random pages, from and to a pool of four times as many."""
    pool = fresh(4 * count, *PAGE)
    lists = [fresh(count, *PAGE) for _ in range(SETS)]
    ids = [torch.randperm(4 * count)[:count] for _ in range(SETS)]
    return [
        Job(
            f"gather_pages, {count} random pages of 16 KiB",
            lambda i: ops.gather_pages(pool, ids[i], out=lists[i]),
            0.75,
            "torch.index_select(out=)",
            lambda i: torch.index_select(pool, 0, ids[i], out=lists[i]),
            1.5,
        ),
        Job(
            f"scatter_pages, {count} random pages of 16 KiB",
            lambda i: ops.scatter_pages(pool, ids[i], lists[i]),
            0.80,
            "torch.index_copy_",
            lambda i: pool.index_copy_(0, ids[i], lists[i]),
            2.3,
        ),
        Job(
            f"gather_pages, NHD to HND, {count} random pages of 16 KiB",
            lambda i: ops.gather_pages(pool.transpose(1, 2), ids[i], out=lists[i].view(count, 4, 16, 128)),
        ),
    ]


def reshards(pages: int) -> list[Job]:
    """`pages` pages of 16 tokens and 8 heads in all, K and V."""
    jobs = []
    kv_heads = 8
    for a, b in ((4, 2), (2, 4), (1, 2)):
        sources = [[fresh(pages, 2, 16, kv_heads // a, 128) for _ in range(a)] for _ in range(SETS)]
        for order, out_axis in (("NHD", -2), ("NHD to HND", -3)):
            each = (16, kv_heads // b) if out_axis == -2 else (kv_heads // b, 16)
            outs = [[fresh(pages, 2, *each, 128) for _ in range(b)] for _ in range(SETS)]

            def work(i: int, sources=sources, outs=outs, axis=out_axis) -> None:
                ops.reshard_heads(sources[i], outs[i], kv_heads=kv_heads, source_head_axis=-2, out_head_axis=axis)

            jobs.append(Job(f"reshard_heads, TP {a} to {b}, {order}, bf16", work, 0.6))
    return jobs


def scalings() -> list[Job]:
    """Pages of 16 tokens and 8 heads of 128 elements; a scale a page and head."""
    jobs = []
    for wide, narrow in (
        (torch.bfloat16, torch.float8_e4m3fn),
        (torch.float32, torch.float8_e4m3fn),
        (torch.bfloat16, torch.int8),
    ):
        shape = (NBYTES // (16 * 8 * 128 * wide.itemsize), 16, 8, 128)
        pages = [torch.empty(shape, dtype=wide).normal_() for _ in range(SETS)]
        outs = [ops.quantize_pages(page, (0, 2), narrow) for page in pages]
        names = f"{str(wide)[6:]}", f"{str(narrow)[6:]}"

        def quantize(i: int, pages=pages, outs=outs) -> None:
            ops.quantize_pages(pages[i], (0, 2), out=outs[i])

        def dequantize(i: int, pages=pages, outs=outs) -> None:
            ops.dequantize_pages(*outs[i], (0, 2), out=pages[i])

        fp8 = narrow == torch.float8_e4m3fn
        jobs.append(Job(f"quantize_pages, {names[0]} to {names[1]}", quantize, 0.5 if fp8 else None))
        jobs.append(Job(f"dequantize_pages, {names[1]} to {names[0]}", dequantize))
    return jobs


def measure(table: Table, raw: Raw, jobs: list[Job], rounds: int) -> None:
    """Adds the rows of jobs that share a bound."""
    bounds: dict[str, list[float]] = defaultdict(list)

    def timed(work: Work, i: int) -> float:
        start = time.perf_counter()
        work(i % SETS)
        return NBYTES / (time.perf_counter() - start) / 1e9

    for i in range(rounds + 1):
        for mode, speeds in raw.copies(NBYTES, torch.get_num_threads(), 3).items():
            bounds[mode].append(statistics.median(speeds))
        for job in jobs:
            job.speeds["ours"].append(timed(job.work, i))
            if job.torch_work is not None:
                job.speeds["torch"].append(timed(job.torch_work, i + SETS // 2))
    bound = max((speeds[1:] for speeds in bounds.values()), key=statistics.median)
    low = statistics.median(bound) < 0.7 * RECORDED_BOUND and torch.get_num_threads() == 2
    void = f"copy bound came out at {statistics.median(bound):.3g}, recorded are {RECORDED_BOUND}" if low else ""
    for job in jobs:
        ours = job.speeds["ours"][1:]
        beside = {"against": "copy bound", "baseline": bound, "void": void}
        table.measured(job.name, ours, "GB/s", ratio_limit=job.bound, **beside)
        if job.torch_work is not None:
            name = f"{job.name}, beside torch"
            theirs = job.speeds["torch"][1:]
            table.measured(name, ours, "GB/s", against=job.torch_name, baseline=theirs, ratio_limit=job.torch_ratio)


def hashing(table: Table, quick: bool) -> None:
    root = torch.zeros(16, dtype=torch.uint8)
    runs = 10 if quick else 50
    for dtype in (torch.int64, torch.int32):
        tokens = torch.randint(0, 150_000, (128 << 10,), dtype=dtype)
        took = [1e3 * s for s in repeat(runs, lambda tokens=tokens: ops.hash_pages(tokens, 16, root))]
        table.measured(f"hash_pages, 128 k tokens, page 16, {str(dtype)[6:]}", took, "ms", limit=0.8, at_least=False)
    offsets = torch.arange(0, (128 << 10) + 1, 2 << 10)
    took = [1e3 * s for s in repeat(runs, lambda: ops.hash_pages_batch(tokens, offsets, 16, root))]
    table.measured("hash_pages_batch, 64 prompts of 2 k tokens, page 16", took, "ms", note="on all threads")


def rows(table: Table, quick: bool = False) -> None:
    """Adds all rows."""
    rounds = 5 if quick else 25
    raw = Raw(8 * NBYTES)
    measure(table, raw, copies(NBYTES // (16 << 10)), rounds)
    pages = NBYTES // (2 * 16 * 8 * 128 * 2)
    measure(table, raw, reshards(pages), rounds)
    measure(table, raw, scalings(), rounds)
    raw.release()
    hashing(table, quick)


def run(args: argparse.Namespace) -> list[Row]:
    table = Table(f"Paged-KV operators on the CPU, {torch.get_num_threads()} threads")
    rows(table, args.quick)
    return table.rows


if __name__ == "__main__":
    sys.exit(main(__doc__ or "", run))
