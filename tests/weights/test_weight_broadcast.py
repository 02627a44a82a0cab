"""examples/weight_broadcast does what its README says."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import torch_mooncake as tm
from torch_mooncake.weights import Layout, Manifest, describe

ROOT = Path(tm.__file__).parents[1]
EXAMPLE = ROOT / "examples" / "weight_broadcast"


def run(script: str, *arguments: str, tmp_path: Path) -> str:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "TM_RUNTIME_DIR": str(tmp_path / "run")}
    command = [sys.executable, str(EXAMPLE / script), *arguments]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_the_loop_is_bit_equal(tmp_path: Path):
    said = run("rl_loop.py", "--steps", "3", tmp_path=tmp_path)
    assert said.count("bit-equal") == 3 * 3
    losses = re.findall(r"loss ([\d.]+)", said)
    assert len(set(losses)) == 3  # it trains: the versions differ


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_run_of_a_trillion_at_small_size(tmp_path: Path):
    """256 trainer ranks, two engines of 16 ranks, three layers: every element and every byte."""
    arguments = ["--layers", "3", "--gib", "0.05", "--engines", "2", "--tp", "16", "--processes", "1", "--rounds", "2"]
    picture, found = tmp_path / "nics.svg", tmp_path / "found.json"
    said = run("one_trillion.py", *arguments, "--plot", str(picture), "--json", str(found), tmp_path=tmp_path)
    assert said.count("all equal") == 2
    assert "NCCL broadcast" in said
    result = json.loads(found.read_text())
    assert result["bound_ingress_s"] < result["predicted_s"] < 1.5 * result["bound_ingress_s"]
    assert picture.read_text().startswith("<svg")
    moved = result["moved"]
    assert moved["ranks"] == [256, 32]
    for each in moved["rounds"]:
        assert each["sent_by_trainers_planned"] == moved["nbytes"] <= each["sent_by_trainers"]
        assert each["received_planned"] <= each["received"] <= each["received_planned"] + each["looked"]


def test_its_layouts_say_what_its_manifests_say(monkeypatch: pytest.MonkeyPatch):
    """What a rank's tensors are by the rules, and what is planned with: the same pieces."""
    monkeypatch.syspath_prepend(str(EXAMPLE))
    kimi_k2 = __import__("kimi_k2")
    shapes = kimi_k2.Shapes(layers=3).scaled(64)

    def pieces(manifest: Manifest) -> list[tuple[object, ...]]:
        wholes, locals_ = manifest.wholes, manifest.locals
        return sorted((wholes[p.whole], locals_[p.local], *p[2:]) for p in manifest.pieces())

    def described(manifest: Manifest, layout: Layout) -> Manifest:
        return describe({t.name: torch.empty(t.shape, dtype=getattr(torch, t.dtype)) for t in manifest.locals}, layout)

    trainers, servers = kimi_k2.trainers(shapes), kimi_k2.servers(shapes, instances=1, tp=32)
    for rank in (0, 37, 255):
        assert pieces(described(trainers[rank], kimi_k2.trainer_layout(shapes, rank))) == pieces(trainers[rank])
    for rank in (0, 31):
        assert pieces(described(servers[rank], kimi_k2.server_layout(shapes, rank, tp=32))) == pieces(servers[rank])
    del sys.modules["kimi_k2"]


@pytest.mark.slow
def test_the_plan_of_kimi_k2(tmp_path: Path):
    picture = tmp_path / "nics.svg"
    said = run("kimi_k2_plan.py", "--tp", "16", "--plot", str(picture), tmp_path=tmp_path)
    assert float(re.search(r"predicted +([\d.]+) s", said)[1]) <= 1.5 * 1.29
    assert picture.read_text().startswith("<svg")
