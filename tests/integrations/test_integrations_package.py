"""The adapters as a package: what a wheel has of them, and that they import their programs only when they are used."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest
import recording
from places import ROOT
from setuptools import Distribution
from setuptools.config.pyprojecttoml import apply_configuration

import torch_mooncake

PROGRAMS = ("transformers", "lmcache", "lmdeploy", "ray", "sglang", "tensorrt_llm", "vllm")
ADAPTERS = ("lmcache", "lmdeploy", "ray", "sglang", "tensorrt_llm", "transformers", "vllm")


def test_a_wheel_has_them_and_not_the_compat_distribution(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(ROOT)
    packages = set(apply_configuration(Distribution(), ROOT / "pyproject.toml").packages)
    assert {f"torch_mooncake.integrations.{name}" for name in ADAPTERS if name != "transformers"} <= packages
    assert "torch_mooncake.integrations" in packages
    assert not {name for name in packages if "compat" in name or name.startswith(("integrations", "mooncake"))}


@pytest.mark.parametrize("name", ADAPTERS)
def test_importing_one_imports_neither_its_program_nor_torch(name: str):
    code = f"""
import sys, torch_mooncake.integrations.{name}
print(sorted(set(sys.modules) & {{"torch", *{PROGRAMS}}}))
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


@pytest.mark.parametrize("name", [*ADAPTERS, "checkpoint_engine"])
def test_they_stand_on_the_public_api(name: str):
    """What they import of the library its documents name; nothing of its native core."""
    place = ROOT / "integrations" / name
    files = sorted(place.rglob("*.py")) if place.is_dir() else [place.with_suffix(".py")]
    for file in files:
        text = file.read_text()
        assert not [what for what in imported(text) if not public(*what)], file
        assert "_core" not in text, file
        assert "._client(" not in text, file


def test_no_module_is_long():
    """The compat distribution's neither; docs/integrations.md says 400 lines."""
    lines = {
        file: len(file.read_text().splitlines())
        for file in (ROOT / "integrations").rglob("*.py")
        if "build" not in file.parts
    }
    assert any("mooncake_compat" in file.parts for file in lines)
    assert {file: n for file, n in lines.items() if n > 400} == {}


def imported(text: str) -> list[tuple[str, str]]:
    """(module, name) of what is imported from the library, but from its adapters."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom):
            found += [(node.module or "", alias.name) for alias in node.names]
        elif isinstance(node, ast.Import):
            found += [(alias.name, "") for alias in node.names]
    ours = [(module, name) for module, name in found if module.partition(".")[0] == "torch_mooncake"]
    return [each for each in ours if not f"{each[0]}.{each[1]}".startswith("torch_mooncake.integrations")]


def public(module: str, name: str) -> bool:
    """A module that `dir` of the package tells, and a name that it exports, if it says what it does."""
    inner = module.removeprefix("torch_mooncake").removeprefix(".")
    if name.startswith("_") or (inner and inner not in dir(torch_mooncake)):
        return False
    if not inner:
        return not name or name in dir(torch_mooncake)
    exported = getattr(importlib.import_module(module), "__all__", None)
    return not name or exported is None or name in exported


def test_what_is_private_is_seen():
    source = """
import torch_mooncake as tm
import torch_mooncake.weights.sources
from torch_mooncake import _core, Pool
from torch_mooncake.integrations import _memory
from torch_mooncake.weights import Publisher, arena
from torch_mooncake.weights.files import Share
"""
    private = [what for what in imported(source) if not public(*what)]
    assert sorted(private) == [
        ("torch_mooncake", "_core"),
        ("torch_mooncake.weights", "arena"),
        ("torch_mooncake.weights.files", "Share"),
        ("torch_mooncake.weights.sources", ""),
    ]


def test_a_row_of_the_table_is_replaced_and_the_others_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    page = tmp_path / "page.md"
    page.write_text(
        f"head\n{recording.BEGIN}| a |\n|---|\n| ray | 1 | x |\n| sglang | 2 | y |\n{recording.END}\ntail\n"
    )
    monkeypatch.setenv("TM_RECORD", str(page))
    recording.record({"ray": "| ray | 9 | z |", "lmcache": "| lmcache | 3 | w |"})
    rows = "| lmcache | 3 | w |\n| ray | 9 | z |\n| sglang | 2 | y |\n"
    assert page.read_text() == f"head\n{recording.BEGIN}| a |\n|---|\n{rows}{recording.END}\ntail\n"
