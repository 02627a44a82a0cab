"""Real verbs below all that stands on the transport: pool, weights, KV sessions, the backend, on two "hosts"."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch_ranks
from processes import PoolEnv, eventually, free_port, running

from torch_mooncake import node

pytestmark = pytest.mark.rdma

VALUE_NBYTES = 4 << 18
TOKEN = "0123456789abcdef"
DONE = [f"done: {step}" for step in ("pool", "weights", "kv", "collectives")]


def start(env: PoolEnv, rank: int, ports: tuple[int, int]) -> tuple[list[str], dict[str, Any]]:
    """The command of that rank's node, with RDMA and shared memory and no TCP, and how to start it."""
    command = [str(node.EXECUTABLE), "--pool", f"{env.pool}{rank}", "--host-id", f"host-{rank}", "--memory", "64MiB"]
    command += ["--listen", f"tcp://127.0.0.1:{ports[rank]}", "--linger", "-1"]
    command += ["--transports", "local,shm,rdma", "--nics", f"rxe_?{rank}"]
    command += ["--leader", f"tcp://127.0.0.1:{ports[0]}"] if rank else []
    return command, {"env": {**os.environ, "TM_TOKEN": TOKEN}, "stdout": subprocess.PIPE, "text": True}


def wait(pid: int, timeout: float) -> int | None:
    """The exit status of a child of ours; None: it is still there."""
    done: list[int] = []

    def ended() -> bool:
        found, status = os.waitpid(pid, os.WNOHANG)
        done.extend([os.waitstatus_to_exitcode(status)] if found else [])
        return bool(done)

    return done[0] if eventually(ended, timeout) else None


def payload_on_the_rails() -> int:
    return sum(int(path.read_text()) for path in Path("/sys/class/net").glob("[ab][01]/statistics/tx_bytes"))


@pytest.mark.timeout(240)
def test_pool_weights_kv_session_and_collectives_over_rdma(
    pool_env: PoolEnv, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ports = (free_port(), free_port())
    (first, options), (second, _) = (start(pool_env, rank, ports) for rank in (0, 1))
    ready = ["--ready-fd", "1"]
    with running(first + ready, **options) as leader:
        assert leader.stdout.readline().startswith("ready")
        with running(second + ready, **options) as member:
            assert member.stdout.readline().startswith("ready")
            monkeypatch.setenv("TM_TOKEN", TOKEN)
            monkeypatch.setenv("TM_TRANSPORTS", "local,shm,rdma")
            before = payload_on_the_rails()
            ranks = [torch_ranks.start(rank, tmp_path, pool_env.pool) for rank in range(torch_ranks.WORLD)]
            statuses = []
            for pid in ranks:
                statuses.append(wait(pid, timeout=100))
                if statuses[-1] is None:
                    os.kill(pid, signal.SIGABRT)  # it writes where it is into its log
                    wait(pid, timeout=10)
            said = [(tmp_path / f"{rank}.log").read_text() for rank in range(torch_ranks.WORLD)]
            assert statuses == [0, 0], "\n".join(said)
            for log in said:
                assert [line for line in log.splitlines() if line.startswith("done: ")] == DONE
            # Both ranks' value that the other has got, the weights, the broadcast: nothing else could carry them.
            assert payload_on_the_rails() - before >= 5 * VALUE_NBYTES
            for process in (member, leader):
                process.terminate()
                assert process.wait(30) == 0
