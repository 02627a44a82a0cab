"""Tests with the real classes of other programs, in an environment of their own: `make test-integrations`."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import recording

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
    """Every program whose modules passed whole gets its row."""
    from importlib.metadata import version

    ran: dict[str, list[str]] = defaultdict(list)
    for module in _outcomes:
        if module in _stacks:
            ran[_stacks[module][0]].append(module)
    rows = {}
    for name, modules in ran.items():
        outcomes = [outcome for module in modules for outcome in _outcomes[module]]
        if set(outcomes) == {"passed"}:
            what = "; ".join(_stacks[module][1] for module in sorted(modules))
            rows[name] = recording.row(name, version(name), len(outcomes), what)
    recording.record(rows)
