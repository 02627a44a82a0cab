"""The transfer engine between two processes, beside the limits of the machine and its peers, in one run.

    make peers                                                   # once: the engines it is compared with
    python benchmarks/transfer.py --peers --json rows.json       # 10 to 20 minutes on an idle machine
    python benchmarks/transfer.py --quick                        # no numbers to quote

Rounds are interleaved: in each, the raw loops, this library over every way, and every peer are measured once, each in
processes of its own. A row compares medians over all rounds and says whether its target holds; a baseline under 0.7 of
what is recorded for it voids its row, and adds rounds while there is time. GB are 10⁹ bytes.

Peers run in network namespaces of their own, once with bbr and once with cubic, and the better of the two counts.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from contenders import HERE, Samples, run_round
from harness import Row, Table, main
from raw import MiB
from transfer_rows import add_rows, print_as_tebench

ROUNDS, MORE_ROUNDS = 5, 2
BUDGET_S = 16 * 60  # the rails want the rest of twenty minutes
BUFFER = 1600 * MiB  # of each process: above the caches, and room for 100 000 pages of 16 KiB


def arguments(parser: argparse.ArgumentParser) -> None:
    venv = HERE.parent / ".venv-peers"
    parser.add_argument("--peers", nargs="?", type=Path, const=venv, metavar="VENV", help="measure the peers too")
    parser.add_argument("--rounds", type=int, help=f"instead of {ROUNDS} (and {MORE_ROUNDS} more for void rows)")
    parser.add_argument("--no-rails", action="store_true", help="without the rows of rails.py")


def run(args: argparse.Namespace) -> list[Row]:
    if args.peers and not (args.peers / "bin" / "python").exists():
        raise SystemExit(f"{args.peers} is not there: make peers")
    samples = Samples()
    start = time.monotonic()
    rounds = args.rounds or (1 if args.quick else ROUNDS)
    done = 0
    while done < rounds or (done < rounds + MORE_ROUNDS and not args.quick and void_rows(samples)):
        before = time.monotonic()
        if done >= 2 and before - start + (before - start) / done > BUDGET_S:
            break
        done += 1
        run_round(samples, args.peers, BUFFER, args.quick, lambda who, n=done: _say(f"round {n}: {who}"))
        _say(f"round {done} took {time.monotonic() - before:.0f} s")
    _say("")
    table = Table(f"Transfer engine, two processes, {done} rounds")
    add_rows(table, samples)
    registrations(table)
    print_as_tebench(samples)
    for failure in sorted(set(samples.failures)):
        print(f"FAILED  {failure}")
    if not args.peers:
        print("without --peers: no row beside a peer was made")
    return table.rows if args.no_rails else table.rows + rails(args.quick)


def void_rows(samples: Samples) -> int:
    table = Table("", quiet=True)
    add_rows(table, samples)
    return sum(row.verdict == "void" for row in table.rows)


def registrations(table: Table) -> None:
    import torch

    import torch_mooncake as tm

    parts = torch.empty(10_000 * 64, dtype=torch.uint8).split(64)
    took = []
    for _ in range(5):
        with tm.Engine() as engine:
            start = time.perf_counter()
            for part in parts:
                engine.register(part)
            took.append(1e3 * (time.perf_counter() - start))
    table.measured("10 000 tensors registered", took, "ms", limit=100, at_least=False)


def rails(quick: bool) -> list[Row]:
    """The rows of four shaped links between namespaces (rails.py)."""
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        command = [sys.executable, str(HERE / "rails.py"), "--json", file.name, *(["--quick"] if quick else [])]
        if subprocess.run(command).returncode != 0:
            print("FAILED  rails.py: its rows are missing")
            return []
        rows = json.loads(Path(file.name).read_text())
    return [Row(**{**row, "spread": tuple(row["spread"])}) for row in rows]


def _say(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="" if text else "\r", file=sys.stderr, flush=True)


if __name__ == "__main__":
    raise SystemExit(main(__doc__ or "", run, arguments))
