"""examples/weight_broadcast does what its README says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import torch_mooncake as tm

ROOT = Path(tm.__file__).parents[1]
EXAMPLE = ROOT / "examples" / "weight_broadcast"


def run(script: str, *arguments: str, tmp_path: Path) -> str:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "TM_RUNTIME_DIR": str(tmp_path / "run")}
    command = [sys.executable, str(EXAMPLE / script), *arguments]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=170)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_the_loop_is_bit_equal(tmp_path: Path):
    said = run("rl_loop.py", "--steps", "3", tmp_path=tmp_path)
    assert said.count("bit-equal") == 3 * 3
    losses = re.findall(r"loss ([\d.]+)", said)
    assert len(set(losses)) == 3  # it trains: the versions differ


@pytest.mark.slow
def test_the_plan_of_kimi_k2(tmp_path: Path):
    picture = tmp_path / "nics.svg"
    said = run("kimi_k2_plan.py", "--tp", "16", "--plot", str(picture), tmp_path=tmp_path)
    assert float(re.search(r"predicted +([\d.]+) s", said)[1]) <= 1.5 * 1.29
    assert picture.read_text().startswith("<svg")
