"""The demo's progress bar and tables."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

if TYPE_CHECKING:
    from checks import Checks
    from story import Turn


def wide_console() -> Console:
    """The tables are no use when they wrap."""
    console = Console(highlight=False)
    console.width = max(console.width, 125)
    return console


class Steps:
    """A progress bar over named steps; each leaves a line with its time."""

    def __init__(self, console: Console, count: int) -> None:
        self._console = console
        self._bar = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=console,
            transient=True,
        )
        self._task = self._bar.add_task("starting", total=count)

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        self._bar.update(self._task, description=name)
        started = time.perf_counter()
        yield
        self._bar.advance(self._task)
        self._console.print(f"[green]✓[/] {name} [dim]{time.perf_counter() - started:.1f} s[/]")

    def __enter__(self) -> Steps:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()


def show_weights(console: Console, rows: list[dict]) -> None:
    table = Table(title="weights: trainer → pool → workers", title_justify="left")
    for name in ("step", "who", "MB", "ms", "GB/s"):
        table.add_column(name, justify="left" if name == "who" else "right")
    for row in rows:
        nbytes, seconds = row["nbytes"], row["seconds"]
        table.add_row(
            str(row["step"]),
            f"{row['who']} {row['verb']}",
            f"{nbytes / 1e6:.0f}",
            f"{seconds * 1e3:.0f}",
            _rate(nbytes, seconds),
        )
    console.print(table)


def show_turns(console: Console, turns: list[Turn]) -> None:
    table = Table(title="turns", title_justify="left", caption=_CAPTION, caption_justify="left")
    columns = (
        "turn",
        "",
        "prompt",
        "reused",
        "TTFT ms",
        "loaded MB",
        "GB/s",
        "pushed MB",
        "GB/s",
        "over",
        "= plain",
    )
    for name in columns:
        table.add_column(name, justify="left" if name in ("turn", "", "over", "= plain") else "right", no_wrap=True)
    for turn in turns:
        prefill = turn.answer.metrics["prefill"]
        loaded, pushed = prefill["pool_load_bytes"], prefill["push_bytes"]
        table.add_row(
            turn.name,
            turn.note,
            str(prefill["prompt_tokens"]),
            str(prefill["reused_tokens"]),
            f"{turn.answer.metrics['ttft_s'] * 1e3:.0f}",
            f"{loaded / 1e6:.1f}",
            _rate(loaded, prefill["pool_load_s"]),
            f"{pushed / 1e6:.1f}",
            _rate(pushed, prefill["push_exposed_s"]),
            prefill["push_transport"],
            _verdict(turn),
        )
    console.print(table)


_CAPTION = (
    "loaded: from the pool, pushed: to the decode worker; GB/s are over the time the prefill worker waited for it: "
    "what ran beside its computation is free"
)


def _verdict(turn: Turn) -> str:
    comparison = turn.comparison
    if comparison is None:
        return "not compared"
    if comparison.same:
        return "[green]yes[/]"
    return f"tie at {comparison.tie_at}" if comparison.tie_at is not None else "[red]NO[/]"


def _rate(nbytes: int, seconds: float) -> str:
    return f"{nbytes / seconds / 1e9:.2f}" if nbytes and seconds else "-"


def show_load(console: Console, replays: list[dict]) -> None:
    """`replays` as `Replay.to_dict` gives them."""
    title = "the same requests, disaggregated and colocated (ms)"
    table = Table(title=title, title_justify="left")
    names = ("p50", "p90", "p99")
    for name in ("mode", *(f"TTFT {p}" for p in names), *(f"TBT {p}" for p in names), "max", "tokens/s", "reused"):
        table.add_column(name, justify="left" if name == "mode" else "right")
    for row in replays:
        cells = [row["ttft_ms"][p] for p in names] + [row["tbt_ms"][p] for p in (*names, "max")] + [row["tokens_per_s"]]
        reused = f"{row['reused_tokens']} of {row['prompt_tokens']}"
        table.add_row(row["mode"], *(f"{cell:.0f}" for cell in cells), reused)
    console.print(table)


def show_checks(console: Console, checks: Checks) -> None:
    table = Table(title="checks", title_justify="left", show_header=False)
    for row in checks.rows:
        mark = "[green]✓[/]" if row["holds"] else "[red]✗[/]"
        table.add_row(mark, row["name"], escape(row["evidence"]))
    console.print(table)
