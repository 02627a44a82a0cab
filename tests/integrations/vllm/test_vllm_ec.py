"""MooncakeECConnector made by vLLM's own factory: an encoder output from one connector to another."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from places import ROOT
from processes import PoolEnv

pytestmark = [pytest.mark.slow, pytest.mark.network, pytest.mark.timeout(600)]
WHAT = "MooncakeECConnector: its factory and abstract class, no vision model"


def test_encoder_output_goes_from_producer_to_consumer(vllm: Path, pool_env: PoolEnv):
    script = Path(__file__).with_name("ec_process.py")
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([str(vllm), str(script)], env=env, capture_output=True, text=True, timeout=500)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULTS ")]
    assert lines, done.stderr[-6000:]
    found = json.loads(lines[0].removeprefix("RESULTS "))
    assert found == {"has": {"cat": True, "dog": False}, "same": True, "held": [False, None]}
