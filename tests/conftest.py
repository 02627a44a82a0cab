"""Fixtures for all tests: a pool of one's own, other processes, and the check that nothing is left behind."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

CHILD = Path(__file__).parent / "child.py"


def eventually(condition: Callable[[], Any], timeout: float = 10.0) -> bool:
    """True as soon as ``condition()`` is; False after ``timeout`` seconds."""
    end = time.monotonic() + timeout
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.02)
    return bool(condition())


def processes_with(text: str) -> list[int]:
    """Processes (zombies not counted) whose command line or environment contains ``text``, except ourselves."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            if (entry / "stat").read_text().rpartition(")")[2].split()[0] == "Z":
                continue
            if text in (entry / "cmdline").read_bytes().decode(errors="replace"):
                found.append(int(entry.name))
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
    return found


class PoolEnv:
    """A runtime folder and pool name of one test."""

    def __init__(self, runtime_dir: str, pool: str) -> None:
        self.runtime_dir, self.pool = runtime_dir, pool
        self.folder = Path(runtime_dir) / pool

    def nodes(self) -> list[int]:
        """Pids of this pool's node: keeper and worker, the keeper (the parent) first."""
        pids = processes_with(self.runtime_dir)
        pids = [pid for pid in pids if "torch-mooncake-node" in Path(f"/proc/{pid}/cmdline").read_text()]
        return sorted(pids, key=lambda pid: (_parent(pid) in pids, pid))

    def worker(self) -> int:
        return self.nodes()[-1]

    def log(self) -> str:
        try:
            return (self.folder / "node.log").read_text()
        except FileNotFoundError:
            return ""


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


@pytest.fixture
def pool_env(monkeypatch: pytest.MonkeyPatch) -> Iterator[PoolEnv]:
    """TM_* set to a pool of this test's own. At the end: no node runs on, nothing lies in /dev/shm."""
    runtime_dir = tempfile.mkdtemp(prefix="tm-test-", dir="/tmp")  # short: Unix socket paths are
    env = PoolEnv(runtime_dir, f"t-{uuid.uuid4().hex[:8]}")
    for name, value in {
        "TM_RUNTIME_DIR": env.runtime_dir,
        "TM_POOL": env.pool,
        "TM_LINGER_S": "0",
        "TM_MEMORY": "256MiB",
    }.items():
        monkeypatch.setenv(name, value)
    for name in ("TM_TOKEN", "TM_ADDRESS", "TM_HOST_ID", "TORCHELASTIC_RUN_ID", "TM_FAILPOINTS"):
        monkeypatch.delenv(name, raising=False)
    shm_before = set(os.listdir("/dev/shm"))
    yield env
    import torch_mooncake as tm

    tm.close()
    left = not eventually(lambda: not env.nodes(), timeout=15)
    survivors = env.nodes()
    for pid in survivors:
        os.kill(pid, signal.SIGKILL)
    shm_left = {
        name for name in set(os.listdir("/dev/shm")) - shm_before if "mooncake" in name or name.startswith("tm")
    }
    log = env.log()
    shutil.rmtree(runtime_dir, ignore_errors=True)
    assert not left, f"the node did not exit after its last client: {survivors}\n{log}"
    assert not shm_left, f"left in /dev/shm: {shm_left}"


@pytest.fixture
def pool(pool_env: PoolEnv) -> Iterator[Any]:
    """The default pool, on a node of this test's own."""
    import torch_mooncake as tm

    yield tm.init()
    tm.close()


class Child:
    """Another Python process that runs what it is told: ``child("result = 1 + 1") == 2``. Names stay between calls."""

    def __init__(self, env: dict[str, str] | None = None) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-u", str(CHILD)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **(env or {})},
            text=True,
        )
        self.pid = self.process.pid

    def start(self, code: str, **names: Any) -> None:
        """Run ``code`` without waiting for it."""
        assert self.process.stdin
        self.process.stdin.write(json.dumps({"code": code, "names": names}) + "\n")
        self.process.stdin.flush()

    def result(self) -> Any:
        """What the code left in ``result``, or its exception as RuntimeError("TypeName: message")."""
        assert self.process.stdout
        line = self.process.stdout.readline()
        if not line:
            raise EOFError(f"the child ended with {self.process.wait()}")
        answer = json.loads(line)
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer["result"]

    def __call__(self, code: str, **names: Any) -> Any:
        self.start(code, **names)
        return self.result()

    def kill(self, signum: int = signal.SIGKILL) -> None:
        self.process.send_signal(signum)
        if signum == signal.SIGKILL:
            self.process.wait()

    def close(self) -> int:
        """End it in an orderly way; its exit status."""
        assert self.process.stdin
        try:
            self.process.stdin.close()
        except BrokenPipeError:
            pass
        try:
            return self.process.wait(15)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise
        finally:
            if self.process.stdout:
                self.process.stdout.close()


@pytest.fixture
def child() -> Iterator[Callable[..., Child]]:
    """Starts other processes: ``other = child()``. All are ended after the test, also stopped ones."""
    children: list[Child] = []

    def make(env: dict[str, str] | None = None) -> Child:
        children.append(Child(env))
        return children[-1]

    yield make
    for c in children:
        if c.process.poll() is None:
            c.process.send_signal(signal.SIGCONT)
        c.close()
