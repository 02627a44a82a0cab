"""The table "tested with" of docs/integrations.md, written by the tests: one row for each program."""

from __future__ import annotations

import datetime
import os
from pathlib import Path

BEGIN, END = "<!-- tested with -->\n", "<!-- end -->"


def row(name: str, version: str, tests: int, what: str) -> str:
    return f"| {name} | {version} | {datetime.date.today()} | {tests} | {what} |"


def record(rows: dict[str, str]) -> None:
    """With TM_RECORD, the page: these rows take the place of their programs' in its table."""
    if (place := os.environ.get("TM_RECORD")) is None:
        return
    page = Path(place)
    head, _, rest = page.read_text().partition(BEGIN)
    table, _, tail = rest.partition(END)
    lines = table.splitlines()
    merged = {line.split("|")[1].strip(): line for line in lines[2:] if line.startswith("|")} | rows
    page.write_text(
        head + BEGIN + "\n".join([*lines[:2], *(merged[name] for name in sorted(merged))]) + "\n" + END + tail
    )
