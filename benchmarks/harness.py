"""What all benchmarks share: rows, tables, timing and other processes. (raw.py has the limits of the machine.)

A row holds a median and its spread beside what it is held against in the same run. ``holds`` says whether its target
is met; a baseline that comes out slower than 0.7 of what the docs record for this machine voids its row: run again.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

MiB, GiB = 1 << 20, 1 << 30


@dataclass
class Row:
    name: str
    value: float
    unit: str
    spread: tuple[float, float]
    against: str = ""
    against_value: float | None = None
    ratio: float | None = None
    target: str = ""
    holds: bool | None = None  # None: this row has no target
    note: str = ""

    @property
    def verdict(self) -> str:
        if self.note.startswith("void"):
            return "void"
        return {True: "holds", False: "falls short", None: ""}[self.holds]


class Table:
    """Collects rows, prints each as it comes, and writes them at the end."""

    def __init__(self, title: str, quiet: bool = False) -> None:
        self.rows: list[Row] = []
        self.quiet = quiet
        if quiet:
            return
        print(f"\n{title}\n{'':-<160}")
        print(f"{'':58}{'value':>10} {'':9}{'spread':>20}   {'against':<34}{'value':>9}{'ratio':>7}  target")

    def add(self, row: Row) -> None:
        self.rows.append(row)
        if self.quiet:
            return
        spread = f"({row.spread[0]:.3g} - {row.spread[1]:.3g})"
        against = "" if row.against_value is None else f"{row.against_value:>9.3g}"
        ratio = "" if row.ratio is None else f"{row.ratio:>7.2f}"
        print(
            f"{row.name:<58}{row.value:>10.4g} {row.unit:<9}{spread:>20}   {row.against:<34}{against:>9}{ratio:>7}  "
            f"{row.target} {row.verdict}{'  ' + row.note if row.note else ''}",
            flush=True,
        )

    def measured(
        self,
        name: str,
        values: list[float],
        unit: str,
        *,
        against: str = "",
        baseline: list[float] | None = None,
        limit: float | None = None,
        ratio_limit: float | None = None,
        at_least: bool = True,
        note: str = "",
        void: str = "",
    ) -> None:
        """A row of repeated values; ``limit`` bounds the value, ``ratio_limit`` its ratio to the baseline's median.
        ``void``: why the baseline cannot be trusted; such a row does not hold."""
        value = statistics.median(values)
        base = statistics.median(baseline) if baseline else None
        ratio = value / base if base else None
        sign = "≥" if at_least else "≤"
        checks = [(limit, value, f"{sign} {limit} {unit}"), (ratio_limit, ratio, f"{sign} {ratio_limit} ×")]
        bounds = [(bound, got, text) for bound, got, text in checks if bound is not None and got is not None]
        holds = all((got >= bound) if at_least else (got <= bound) for bound, got, _ in bounds) if bounds else None
        if void:
            holds, note = False, f"void: {void}; run again"
        target = ", ".join(text for _, _, text in bounds)
        spread = (min(values), max(values))
        self.add(Row(name, value, unit, spread, against, base, ratio, target, holds, note))


def main(
    description: str,
    run: Callable[[argparse.Namespace], list[Row]],
    more_arguments: Callable[[argparse.ArgumentParser], None] = lambda parser: None,
) -> int:
    """Parse ``--json FILE``, ``--quick`` and more; run; write the rows. Exit status 0 whatever holds."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    more_arguments(parser)
    parser.add_argument("--json", metavar="FILE", help="write the rows here")
    parser.add_argument("--quick", action="store_true", help="fewer repetitions and smaller sizes: no numbers to quote")
    args = parser.parse_args()
    rows = run(args)
    if args.json:
        Path(args.json).write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    counts = Counter(row.verdict for row in rows)
    print(
        f"\n{len(rows)} rows; {counts['holds']} targets hold, {counts['falls short']} fall short, {counts['void']} void"
    )
    for row in rows:
        if row.verdict in ("falls short", "void"):
            print(f"  {row.verdict}: {row.name}")
    return 0


def repeat(n: int, call: Callable[[], Any], before: Callable[[], Any] = lambda: None) -> list[float]:
    """Seconds of each of ``n`` calls, after one that is not counted."""
    seconds = []
    for _ in range(n + 1):
        before()
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return seconds[1:]


# --- other processes ---


@contextmanager
def other_process(target: Callable[[Any], None]) -> Iterator[Any]:
    """``target(pipe)`` in a fresh interpreter; yields our end of the pipe. It ends when it reads None."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=target, args=(theirs,), daemon=True)
    process.start()
    theirs.close()
    try:
        yield ours
    finally:
        try:
            ours.send(None)
        except (BrokenPipeError, OSError):
            pass
        process.join(20)
        if process.is_alive():
            process.kill()


def run_python(code: str, **env: str) -> str:
    """stdout of a fresh interpreter."""
    done = subprocess.run(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True, env={**os.environ, **env}
    )
    return done.stdout
