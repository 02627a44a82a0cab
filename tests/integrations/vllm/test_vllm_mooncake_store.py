"""vLLM's own MooncakeStoreConnector on mooncake_compat: real engines, SmolLM2, the same tokens from what one has
computed. In the environment of `make env-vllm` (3.5 GB)."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from places import ROOT
from processes import PoolEnv

import torch_mooncake as tm

pytestmark = [pytest.mark.slow, pytest.mark.network, pytest.mark.timeout(1500)]
WHAT = "its own MooncakeStoreConnector on mooncake_compat: four engines, SmolLM2"
PYTHON = ROOT / ".venv-vllm" / "bin" / "python"
TOKENS = [(7 * i * i + 3 * i) % 509 for i in range(150)]


def serve(env: dict[str, str], model: Path, rounds: int = 1) -> list[dict[str, Any]]:
    command = [str(PYTHON), str(Path(__file__).with_name("serve_once.py")), str(model), json.dumps(TOKENS), str(rounds)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=700)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULTS ")]
    assert lines, done.stdout[-3000:] + done.stderr[-6000:]
    found: list[dict[str, Any]] = json.loads(lines[0].removeprefix("RESULTS "))
    return found


def test_a_second_engine_starts_from_what_the_first_has_computed(smollm2: Path, pool_env: PoolEnv, tmp_path: Path):
    config = tmp_path / "mooncake.json"
    config.write_text(
        json.dumps(
            {
                "local_hostname": "127.0.0.1",
                "metadata_server": "P2PHANDSHAKE",
                "global_segment_size": "64MB",
                "local_buffer_size": "16MB",
                "protocol": "tcp",
                "device_name": "",
                "master_server_address": "127.0.0.1:50051",
            }
        )
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT), "MOONCAKE_CONFIG_PATH": str(config), "PYTHONHASHSEED": "0"}
    with tm.Pool(linger_s=0) as pool:  # the node stays between two engines
        first = serve(env, smollm2, rounds=2)
        assert first[0]["cached"] == 0
        assert first[1]["cached"] >= 96
        assert first[1]["tokens"] == first[0]["tokens"]
        stored = pool.keys("mooncake/")
        assert stored
        (second,) = serve(env, smollm2)
        assert second["cached"] >= 96
        assert second["tokens"] == first[0]["tokens"]
        for key in stored:  # the negative control: what is in the pool is what is used
            pool.put(key, bytes(pool.info(key).nbytes))
        (third,) = serve(env, smollm2)
        assert third["cached"] >= 96
        assert third["tokens"] != first[0]["tokens"]
        pool.delete(stored)
        (fourth,) = serve(env, smollm2)
        assert fourth == {"tokens": first[0]["tokens"], "cached": 0}
