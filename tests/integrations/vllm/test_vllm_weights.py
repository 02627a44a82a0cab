"""A real vLLM engine follows a trainer by torch_mooncake's weight transfer backend, and takes checkpoints' files in
checkpoint-engine's way. In the environment of `make env-vllm` (3.5 GB)."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import pytest
from places import ROOT
from processes import PoolEnv

import torch_mooncake as tm

pytestmark = [pytest.mark.slow, pytest.mark.network, pytest.mark.timeout(1500)]
WHAT = "its weight transfer, by our backend, and checkpoint-engine's WorkerExtension: a small Llama with random weights"
PYTHON = ROOT / ".venv-vllm" / "bin" / "python"


def installed(folder: Path) -> None:
    """What an installation of torch_mooncake tells vLLM's plug-in loader, as pyproject.toml has it."""
    project = (ROOT / "pyproject.toml").read_text()
    _, _, section = project.partition('[project.entry-points."vllm.general_plugins"]')
    entries = re.findall(r'^(\w+) = "([\w.:]+)"$', section.partition("\n[")[0], re.MULTILINE)
    assert entries
    info = folder / "torch_mooncake-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: torch_mooncake\nVersion: 0.1.0\n")
    lines = [f"{name} = {value}" for name, value in entries]
    (info / "entry_points.txt").write_text("\n".join(["[vllm.general_plugins]", *lines, ""]))


def test_an_engine_has_the_trainers_weights_after_each_step(pool_env: PoolEnv, tmp_path: Path):
    subprocess.run(["make", "env-vllm"], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    script = Path(__file__).with_name("transfer_weights.py")
    installed(tmp_path)
    env = {**os.environ, "PYTHONPATH": f"{ROOT}:{tmp_path}"}
    with tm.Pool(linger_s=0):  # the node stays between two trainers
        done = subprocess.run(
            [str(PYTHON), str(script), str(tmp_path)], env=env, capture_output=True, text=True, timeout=1200
        )
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULTS ")]
    assert lines, done.stdout[-3000:] + done.stderr[-6000:]
    found = json.loads(lines[0].removeprefix("RESULTS "))
    assert found["a"] != found["b"]
    for name in ("stream", "shards"):
        assert found[f"{name} before"] == found["a"]
        assert found[f"{name} sent"] == found["b"]
        assert found[f"{name} back"] == found["a"]
        assert f"no version of weights '{name}' newer than 2 was there" in found[f"{name} error"]
        assert found[f"{name} kept"] == found["a"]
        assert found[f"{name} on"] == found["a"]
    assert [found["files b"], found["files a"]] == [found["b"], found["a"]]
