"""What disaggregation adds to a request when nothing else is asked of the workers: the demo's own processes, one
request at a time, alternately by one worker (colocated) and by two.

    python benchmarks/kv_demo.py [--json FILE] [--quick] [--model random|smollm2] [--prompt N]

Added latency: the difference of the two, prompt for prompt (other tokens, the same number of them), of the time to the
first token and of the whole answer. It is held against the transfer time of the same requests plus 5 ms: what the
prefill worker spent in `push_layer` and `finish`. (Transfer that ran beside computation is not in it, so the
target is the harder one.)
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from harness import Row, Table, main

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples" / "pd_disaggregation"))

from client import ask
from cluster import Cluster, Shape
from model import vocabulary_of

ALLOWED_MS = 5.0
TOKENS = 8


@dataclass
class Pair:
    """Both ways of one prompt length; milliseconds."""

    first_ms: tuple[float, float]  # colocated, disaggregated
    total_ms: tuple[float, float]
    transfer_ms: float


async def _timed(url: str, prompt: list[int], colocated: bool) -> tuple[float, float, float]:
    body = {"prompt": prompt, "max_tokens": TOKENS, "ignore_eos": True, "colocated": colocated}
    began = time.perf_counter()
    answer = await ask(url, "/v1/completions", body, on_text=lambda _: None)
    ended = time.perf_counter()
    assert len(answer.token_ids) == TOKENS
    assert answer.reused_tokens == 0
    transfer = answer.metrics["prefill"].get("push_exposed_s", 0.0)
    return (answer.token_times[0] - began) * 1e3, (ended - began) * 1e3, transfer * 1e3


async def _measure(cluster: Cluster, prompt_tokens: int, pairs: int) -> list[Pair]:
    await cluster.all_well()
    url, vocabulary, rng = cluster.front_url(), vocabulary_of(cluster.run_dir), random.Random(0)
    measured = []
    for number in range(pairs + 4):  # the first few warm up
        order = (True, False) if number % 2 else (False, True)
        found = {
            colocated: await _timed(url, rng.choices(vocabulary, k=prompt_tokens), colocated) for colocated in order
        }
        one, two = found[True], found[False]
        measured.append(Pair((one[0], two[0]), (one[1], two[1]), two[2]))
    return measured[4:]


def run(args: argparse.Namespace) -> list[Row]:
    table = Table(
        f"added latency of disaggregation, {args.model}, prompts of {args.prompt} tokens, {os.cpu_count()} cores"
    )
    with Cluster(args.model, Shape(chunk_size=args.prompt)) as cluster:
        cluster.start_all()
        pairs = asyncio.run(_measure(cluster, args.prompt, 8 if args.quick else 60))
    transfer = [pair.transfer_ms for pair in pairs]
    limit = statistics.median(transfer) + ALLOWED_MS
    for name, values in (
        ("time to the first token", [pair.first_ms for pair in pairs]),
        ("whole answer", [pair.total_ms for pair in pairs]),
    ):
        baseline = [one for one, _ in values]
        table.measured(f"{name}, colocated", baseline, "ms")
        table.measured(f"{name}, disaggregated", [two for _, two in values], "ms")
        table.measured(
            f"{name}, added (≤ transfer + {ALLOWED_MS:g} ms)",
            [two - one for one, two in values],
            "ms",
            limit=round(limit, 2),
            at_least=False,
        )
    table.measured("transfer on the way to the answer", transfer, "ms")
    return table.rows


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="random", help="random (default), smollm2 or a checkpoint's folder")
    parser.add_argument("--prompt", type=int, default=128, help="tokens of each prompt (default 128)")


if __name__ == "__main__":
    sys.exit(main(__doc__ or "", run, arguments))
