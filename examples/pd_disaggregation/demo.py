"""Prefill/decode-disaggregated serving of a real language model, end to end, checked token for token.

    python examples/pd_disaggregation/demo.py [--model smollm2|random|FOLDER] [--prefill N] [--decode M] …

Starts a pool node, a trainer, an HTTP front, N prefill and M decode workers; holds two conversations that share a
system prompt, replacing a prefill worker in between; spoils a page of the pool; kills workers under way; asks for too
much; replays a trace disaggregated and colocated; publishes new weights; and runs other tensor-parallel degrees. Ends
with tables and a list of claims, each of which can fail. Exit status 0 when all hold, 1 when one does not, 2 when the
model cannot be had.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import sys
import time
from pathlib import Path

from checks import Checks
from cluster import ChildFailed, Cluster, Shape, add_shape_arguments, shape_of
from degrees import DEGREES, check_degrees
from faults import Faults
from load import Replay, add_load_arguments, both, compare_all, requests_for
from model import ModelUnavailable, check, vocabulary_of
from plots import draw
from report import Steps, show_checks, show_load, show_turns, show_weights, wide_console
from rich.console import Console
from rich.markup import escape
from story import Story

# Few places, so that there can be too many requests.
_ROOM = {"max_running": 8, "max_waiting": 8}


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="smollm2 (default), random or a checkpoint's folder")
    add_shape_arguments(parser, Shape(prefill=2, decode=2, prefill_tp=3, decode_tp=1))
    parser.add_argument("--turns", type=int, default=3, help="turns of the first conversation, at least 2 (default 3)")
    parser.add_argument("--max-tokens", type=int, default=32, help="longest answer (default 32)")
    add_load_arguments(parser, requests=10, rate=0.7)
    parser.add_argument("--no-degrees", action="store_true", help="leave out the other tensor-parallel degrees")
    parser.add_argument("--run-dir", type=Path, help="for sockets and logs (default: a temporary directory, removed)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write turns, weights, latencies and checks there")
    args = parser.parse_args()
    if args.turns < 2 or args.max_tokens < 1:
        parser.error("--turns must be at least 2 and --max-tokens at least 1")
    if min(args.prefill, args.decode) < 1:
        parser.error("--prefill and --decode must be at least 1")
    return args


def bring_up(cluster: Cluster, console: Console) -> list[dict]:
    """Everything up and the first weights in place. Returns the rows of the weights table."""
    with Steps(console, 5) as steps:
        with steps.step("pool node"):
            cluster.attach()
        with steps.step(f"trainer loads {cluster.model} (fp32)"):
            for name in ("trainer", *cluster.shape.workers):  # the workers import meanwhile
                cluster.start(name)
            cluster.trainer_answer()
        with steps.step("HTTP front"):
            cluster.start("front")
            cluster.front_url()
        with steps.step("trainer publishes the weights"):
            published = cluster.ask_trainer(publish=0)
        with steps.step(f"{cluster.shape}: workers take them"):
            states = asyncio.run(cluster.all_well())
    return [{"step": 0, "who": "trainer", "verb": "publish", **published}] + [
        {"step": 0, "who": name, "verb": "update", **state["weights"]} for name, state in states.items()
    ]


async def serve(cluster: Cluster, story: Story, faults: Faults, args: argparse.Namespace) -> list[Replay]:
    """All that is asked of the cluster with its first weights; the replays of the trace."""
    await story.converse(args.turns)
    await faults.decode_worker_dies()
    await faults.prefill_rank_dies()
    await faults.client_goes_away()
    await faults.too_many_requests()
    await story.check_division_of_labour()
    requests = requests_for(args, vocabulary_of(cluster.run_dir))
    story.console.print(f"\nreplaying {len(requests)} requests of a trace, disaggregated and colocated")
    replays = await both(cluster.front_url(), requests)
    name = "under load, either way, answers are plain generation's"
    story.checks.answers(name, compare_all(cluster, replays))
    await faults.at_rest()
    return replays


def run(args: argparse.Namespace, console: Console) -> int:
    check(args.model)
    started = time.monotonic()
    checks = Checks()
    with Cluster(args.model, shape_of(args, **_ROOM), run_dir=args.run_dir) as cluster:
        weight_rows = bring_up(cluster, console)
        console.print(f"serving at [bold]{cluster.front_url()}[/] (OpenAI API), logs in {cluster.run_dir}\n")
        story = Story(cluster, console, checks, serial=weight_rows[0]["serial"], max_tokens=args.max_tokens)
        faults = Faults(cluster, console, checks, vocabulary_of(cluster.run_dir))
        replays = asyncio.run(serve(cluster, story, faults, args))
        weight_rows += asyncio.run(story.new_weights())
    for degrees in () if args.no_degrees else DEGREES:
        console.print("random-weight Llama, prefill TP {} → decode TP {}".format(*degrees))
        check_degrees(checks, *degrees)
    show_weights(console, weight_rows)
    show_turns(console, story.turns)
    show_load(console, [each.to_dict() for each in replays])
    show_checks(console, checks)
    console.print(f"{time.monotonic() - started:.0f} s in all")
    if args.plot:
        draw(replays, f"{args.model}, {cluster.shape}: {args.requests} requests, {args.rate:g}/s", args.plot)
        console.print(f"plots: {args.plot}")
    if args.json:
        rows = {
            "model": args.model,
            "turns": story.turn_rows(),
            "weights": weight_rows,
            "replays": [each.to_dict() for each in replays],
            "checks": checks.rows,
        }
        args.json.write_text(json.dumps(rows, indent=1))
    return 0 if checks.all_hold else 1


def main() -> int:
    args = parse_args()
    console = wide_console()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends like Ctrl-C: everything is taken down
    try:
        return run(args, console)
    except ModelUnavailable as error:
        console.print(f"[red]{escape(str(error))}[/]")
        return 2
    except ChildFailed as error:
        console.print(f"[red]{escape(str(error))}[/]")
        return 1
    except KeyboardInterrupt:
        console.print("\nstopped; nothing is left running")
        return 130


if __name__ == "__main__":
    sys.exit(main())
