"""Prefill/decode-disaggregated serving of a real language model, end to end, checked token for token.

    python examples/pd_disaggregation/demo.py [--model smollm2|random] [--turns N] [--json FILE]

Starts a pool node, a trainer, an HTTP front, a prefill worker and a decode worker; holds two conversations that share
a system prompt; restarts the prefill worker in between; publishes new weights; and ends with a table and a list of
claims, each of which can fail. Exit status 0 when all hold, 1 when one does not, 2 when the model cannot be had.
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
from cluster import ChildFailed, Cluster
from model import MODELS, ModelUnavailable, find_smollm2
from report import Steps, show_checks, show_turns, show_weights
from rich.console import Console
from rich.markup import escape
from story import Story


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="smollm2", help="what to serve (default smollm2)")
    parser.add_argument("--turns", type=int, default=3, help="turns of the first conversation, at least 2 (default 3)")
    parser.add_argument("--max-tokens", type=int, default=32, help="longest answer (default 32)")
    parser.add_argument("--run-dir", type=Path, help="for sockets and logs (default: a temporary directory, removed)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write turns, weights and checks there")
    args = parser.parse_args()
    if args.turns < 2 or args.max_tokens < 1:
        parser.error("--turns must be at least 2 and --max-tokens at least 1")
    return args


def bring_up(cluster: Cluster, console: Console) -> list[dict]:
    """Everything up and the first weights in place. Returns the rows of the weights table."""
    with Steps(console, 5) as steps:
        with steps.step("pool node"):
            cluster.attach()
        with steps.step(f"trainer loads {cluster.model} (fp32)"):
            cluster.start("trainer")
            for role in ("prefill", "decode"):  # they import meanwhile
                cluster.start(role)
            cluster.trainer_answer()
        with steps.step("HTTP front"):
            cluster.start("front")
            cluster.front_url()
        with steps.step("trainer publishes the weights"):
            published = cluster.ask_trainer(publish=0)
        with steps.step("workers take them"):
            story = Story(cluster, console, Checks())
            states = asyncio.run(story.wait_until_healthy())
    return [{"step": 0, "who": "trainer", "verb": "publish", **published}] + [
        {"step": 0, "who": role, "verb": "update", **state["weights"]} for role, state in states.items()
    ]


def run(args: argparse.Namespace, console: Console) -> int:
    if args.model == "smollm2":
        find_smollm2()
    started = time.monotonic()
    checks = Checks()
    with Cluster(args.model, run_dir=args.run_dir) as cluster:
        weight_rows = bring_up(cluster, console)
        console.print(f"serving at [bold]{cluster.front_url()}[/] (OpenAI API), logs in {cluster.run_dir}\n")
        story = Story(cluster, console, checks, max_tokens=args.max_tokens)
        weight_rows += asyncio.run(story.tell(args.turns))
    show_weights(console, weight_rows)
    show_turns(console, story.turns)
    show_checks(console, checks)
    console.print(f"{time.monotonic() - started:.0f} s in all")
    if args.json:
        rows = {"model": args.model, "turns": story.turn_rows(), "weights": weight_rows, "checks": checks.rows}
        args.json.write_text(json.dumps(rows, indent=1))
    return 0 if checks.all_hold else 1


def main() -> int:
    args = parse_args()
    console = Console(highlight=False)
    console.width = max(console.width, 125)  # the tables are no use when they wrap
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
