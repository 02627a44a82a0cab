"""Real verbs below everything above the transport: the "mooncake" backend, and the pool over two "hosts"."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from processes import PoolEnv, free_port, running

from torch_mooncake import node

pytestmark = pytest.mark.rdma

VALUE_NBYTES = 4 << 18
TOKEN = "0123456789abcdef"


def start(env: PoolEnv, rank: int, ports: tuple[int, int]) -> tuple[list[str], dict[str, Any]]:
    """The command of that rank's node, with RDMA and shared memory and no TCP, and how to start it."""
    command = [str(node.EXECUTABLE), "--pool", f"{env.pool}{rank}", "--host-id", f"host-{rank}", "--memory", "64MiB"]
    command += ["--listen", f"tcp://127.0.0.1:{ports[rank]}", "--linger", "-1"]
    command += ["--transports", "local,shm,rdma", "--nics", f"rxe_?{rank}"]
    command += ["--leader", f"tcp://127.0.0.1:{ports[0]}"] if rank else []
    return command, {"env": {**os.environ, "TM_TOKEN": TOKEN}, "stdout": subprocess.PIPE, "text": True}


def payload_on_the_rails() -> int:
    return sum(int(path.read_text()) for path in Path("/sys/class/net").glob("[ab][01]/statistics/tx_bytes"))


@pytest.mark.timeout(240)
def test_broadcast_all_reduce_and_pool_over_rdma(pool_env: PoolEnv, tmp_path: Path) -> None:
    ports = (free_port(), free_port())
    (first, options), (second, _) = (start(pool_env, rank, ports) for rank in (0, 1))
    ready = ["--ready-fd", "1"]
    with running(first + ready, **options) as leader:
        assert leader.stdout.readline().startswith("ready")
        with running(second + ready, **options) as member:
            assert member.stdout.readline().startswith("ready")
            program = [sys.executable, str(Path(__file__).parent / "torch_ranks.py"), str(tmp_path), pool_env.pool]
            env = {**os.environ, "TM_TOKEN": TOKEN, "TM_TRANSPORTS": "local,shm,rdma"}
            before = payload_on_the_rails()
            done = subprocess.run(program, env=env, capture_output=True, text=True, timeout=220)
            assert done.returncode == 0, done.stdout + done.stderr
            assert len([json.loads(line) for line in done.stdout.splitlines()]) == 4
            # A broadcast, and both ranks' value that the other has got; nothing else could carry them.
            assert payload_on_the_rails() - before >= 3 * VALUE_NBYTES
            for process in (member, leader):
                process.terminate()
                assert process.wait(30) == 0
