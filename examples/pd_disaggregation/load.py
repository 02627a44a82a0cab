"""A load generator: replays a trace against the demo's workers twice, disaggregated and colocated, in one run.

    python examples/pd_disaggregation/load.py --model random --requests 60 --plot latency.png
    python examples/pd_disaggregation/load.py --trace conversation_trace.jsonl --rate 4 --json rows.json

Colocated, every one of the same workers computes whole requests, prompts and answers in turn; disaggregated, some
compute prompts and push the pages to the others, which are never held up by a prompt. Prints percentiles of the time to
the first token (TTFT) and between tokens (TBT), compares every answer with plain single-process generation, and exits
with status 1 when one differs.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import secrets
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import request_trace
from checks import Checks, Comparison, compare
from client import Answer, RequestFailed, ask
from cluster import ChildFailed, Cluster, Shape, add_shape_arguments, shape_of
from model import ModelUnavailable, check, vocabulary_of
from plots import draw
from report import show_checks, show_load, wide_console
from request_trace import TimedRequest
from rich.console import Console
from rich.markup import escape

MODES = ("disaggregated", "colocated")
PERCENTILES = (50, 90, 99)


@dataclass
class Served:
    """One request of a replay, as its client saw it; seconds."""

    request: TimedRequest
    answer: Answer
    ttft_s: float
    gaps_s: list[float]  # between tokens
    total_s: float
    refusals: int  # 429s before it was taken


@dataclass
class Replay:
    mode: str
    served: list[Served] = field(default_factory=list)
    took_s: float = 0.0

    @property
    def ttft_s(self) -> list[float]:
        return [one.ttft_s for one in self.served]

    @property
    def gaps_s(self) -> list[float]:
        return [gap for one in self.served for gap in one.gaps_s]

    def to_dict(self) -> dict:
        tokens = sum(len(one.answer.token_ids) for one in self.served)
        prompts = sum(len(one.request.prompt) for one in self.served)
        return {
            "mode": self.mode,
            "requests": len(self.served),
            "prompt_tokens": prompts,
            "reused_tokens": sum(one.answer.reused_tokens for one in self.served),
            "answer_tokens": tokens,
            "tokens_per_s": tokens / self.took_s,
            "refusals": sum(one.refusals for one in self.served),
            "retries": sum(one.answer.metrics["retries"] for one in self.served),
            "ttft_ms": percentiles(self.ttft_s),
            "tbt_ms": percentiles(self.gaps_s),
            "total_ms": percentiles([one.total_s for one in self.served]),
        }


def percentiles(values_s: Sequence[float]) -> dict[str, float]:
    """In ms: p50, p90, p99 and max."""
    ordered = sorted(values_s)
    named = {f"p{p}": ordered[min(len(ordered) - 1, len(ordered) * p // 100)] * 1e3 for p in PERCENTILES}
    return named | {"max": ordered[-1] * 1e3}


async def replay(url: str, requests: list[TimedRequest], mode: str) -> Replay:
    """Sends each request at its time, whatever has become of those before. Every mode has its own salt: it finds no
    pages of the other's in the pool."""
    result, salt = Replay(mode), f"{mode}-{secrets.token_hex(4)}"
    began = time.perf_counter()
    result.served = list(
        await asyncio.gather(*(_one(url, request, began, mode == "colocated", salt) for request in requests))
    )
    result.took_s = time.perf_counter() - began
    return result


async def _one(url: str, request: TimedRequest, began: float, colocated: bool, salt: str) -> Served:
    await asyncio.sleep(max(0.0, began + request.at_s - time.perf_counter()))
    body = {
        "prompt": request.prompt,
        "max_tokens": request.max_tokens,
        "ignore_eos": True,
        "colocated": colocated,
        "cache_salt": salt,
    }
    start, refusals = time.perf_counter(), 0
    while True:
        try:
            answer = await ask(url, "/v1/completions", body, on_text=lambda _: None)
            break
        except RequestFailed as failed:
            if failed.status != 429:
                raise
            refusals += 1
            await asyncio.sleep(failed.retry_after_s or 1)
    at = answer.token_times
    gaps = [after - before for before, after in pairwise(at)]
    return Served(request, answer, at[0] - start, gaps, time.perf_counter() - start, refusals)


def compare_all(cluster: Cluster, replays: list[Replay]) -> list[Comparison]:
    """Every answer with plain generation of the same prompt; equal prompts are generated once."""
    references: dict[tuple, dict] = {}
    found = []
    for one in (one for each in replays for one in each.served):
        key = (*one.request.prompt, -one.request.max_tokens)
        if key not in references:
            references[key] = cluster.ask_trainer(
                generate=one.request.prompt, max_tokens=one.request.max_tokens, ignore_eos=True
            )
        found.append(compare(one.answer.token_ids, references[key]["tokens"], references[key]["gaps"]))
    return found


async def both(url: str, requests: list[TimedRequest]) -> list[Replay]:
    """The replay in either mode, each after a few requests that are not counted."""
    replays = []
    for mode in MODES:
        await replay(url, [TimedRequest(0, request.prompt[:32], 2) for request in requests[:4]], mode)
        replays.append(await replay(url, requests, mode))
    return replays


def requests_for(args: argparse.Namespace, vocabulary: range) -> list[TimedRequest]:
    rows = request_trace.read(args.trace, args.requests) if args.trace else request_trace.synthetic(args.requests)
    return request_trace.scaled(
        rows,
        rate=args.rate,
        shrink=args.shrink,
        max_prompt=args.max_prompt,
        max_tokens=args.max_tokens,
        tokens=vocabulary,
    )


def add_load_arguments(parser: argparse.ArgumentParser, *, requests: int, rate: float) -> None:
    parser.add_argument("--trace", type=Path, metavar="FILE", help="replay this trace (default: a made-up one)")
    parser.add_argument("--requests", type=int, default=requests, help=f"how many of it (default {requests})")
    parser.add_argument("--rate", type=float, default=rate, help=f"requests a second (default {rate})")
    parser.add_argument("--shrink", type=int, default=32, help="divide its token counts by this (default 32)")
    parser.add_argument("--max-prompt", type=int, default=256, help="longest prompt, tokens (default 256)")
    parser.add_argument("--plot", type=Path, metavar="PNG", help="draw TTFT and TBT there")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="random", help="smollm2, random or a checkpoint's folder (default random)")
    add_shape_arguments(parser, Shape(prefill=1, decode=1))
    add_load_arguments(parser, requests=60, rate=8)
    parser.add_argument("--max-tokens", type=int, default=24, help="longest answer (default 24)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers there")
    return parser.parse_args()


def run(args: argparse.Namespace, console: Console) -> int:
    check(args.model)
    checks = Checks()
    with Cluster(args.model, shape_of(args)) as cluster:
        cluster.start_all()
        asyncio.run(cluster.all_well())
        console.print(f"{cluster.model}: {cluster.shape}; OpenAI API at {cluster.front_url()}")
        requests = requests_for(args, vocabulary_of(cluster.run_dir))
        replays = asyncio.run(both(cluster.front_url(), requests))
        checks.answers("every answer is plain generation's, token for token", compare_all(cluster, replays))
        title = f"{args.model}, {cluster.shape}: {len(requests)} requests, {args.rate:g}/s"
    show_load(console, [each.to_dict() for each in replays])
    show_checks(console, checks)
    if args.plot:
        draw(replays, title, args.plot)
        console.print(f"plots: {args.plot}")
    if args.json:
        rows = {"model": args.model, "replays": [each.to_dict() for each in replays], "checks": checks.rows}
        args.json.write_text(json.dumps(rows, indent=1))
    return 0 if checks.all_hold else 1


def main() -> int:
    args = parse_args()
    console = wide_console()
    try:
        return run(args, console)
    except ModelUnavailable as error:
        console.print(f"[red]{escape(str(error))}[/]")
        return 2
    except ChildFailed as error:
        console.print(f"[red]{escape(str(error))}[/]")
        return 1


if __name__ == "__main__":
    sys.exit(main())
