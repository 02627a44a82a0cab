"""Tests with the real classes of other programs, in an environment of their own: `make test-integrations`."""

from __future__ import annotations

import datetime
import os
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

_outcomes: dict[str, list[str]] = defaultdict(list)
_stacks: dict[str, tuple[str, str]] = {}


@pytest.fixture(autouse=True)
def _pool_of_its_own(pool_env: Any) -> None:
    """Every test here has one."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A module says in STACK = (distribution, what it runs) what it is a test with."""
    for item in items:
        if stack := getattr(getattr(item, "module", None), "STACK", None):
            _stacks[item.path.name] = stack


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" or report.outcome != "passed":
        _outcomes[Path(report.fspath).name].append(report.outcome)


def pytest_sessionfinish() -> None:
    """With TM_RECORD: the table "tested with" of docs/integrations.md gets a row for every module that passed whole."""
    page = os.environ.get("TM_RECORD")
    if not page:
        return
    from importlib.metadata import version

    rows = {}
    for module, outcomes in _outcomes.items():
        if module in _stacks and set(outcomes) == {"passed"}:
            name, what = _stacks[module]
            rows[name] = f"| {name} | {version(name)} | {datetime.date.today()} | {len(outcomes)} | {what} |"
    record(Path(page), rows)


def record(page: Path, rows: dict[str, str]) -> None:
    begin, end = "<!-- tested with -->\n", "<!-- end -->"
    text = page.read_text()
    head, _, rest = text.partition(begin)
    table, _, tail = rest.partition(end)
    lines = table.splitlines()
    kept = {line.split("|")[1].strip(): line for line in lines[2:] if line.startswith("|")}
    merged = {**kept, **rows}
    page.write_text(
        head + begin + "\n".join([*lines[:2], *(merged[name] for name in sorted(merged))]) + "\n" + end + tail
    )
