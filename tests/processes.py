"""What tests need to deal with other processes and with a pool of their own."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

CHILD = Path(__file__).parent / "child.py"


def command_line(pid: int | str) -> str:
    """What a process was started with; empty when it is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return ""


def free_port() -> int:
    """A port of loopback that nobody has at this moment."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


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


def stop(pid: int) -> None:
    """SIGSTOP, and wait until it has taken hold of every thread: a process runs on for a moment after the signal."""
    os.kill(pid, signal.SIGSTOP)
    assert eventually(lambda: all(_state(task) in "TZ" for task in Path(f"/proc/{pid}/task").glob("*/stat")))


def _state(stat: Path) -> str:
    try:
        return stat.read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "Z"


@contextlib.contextmanager
def running(command: Sequence[str], **options: Any) -> Iterator[subprocess.Popen[Any]]:
    """A process for the time of the block: killed if it is still there at the end."""
    process = subprocess.Popen(command, **options)
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout, process.stderr):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()


@contextlib.contextmanager
def stopped(pid: int) -> Iterator[None]:
    """The process stands still for the time of the block."""
    try:
        stop(pid)
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


class PoolEnv:
    """A runtime folder and pool name of one test."""

    def __init__(self, runtime_dir: str, pool: str) -> None:
        self.runtime_dir, self.pool = runtime_dir, pool
        self.folder = Path(runtime_dir) / pool

    def nodes(self) -> list[int]:
        """Pids of this pool's node: keeper and worker, the keeper (the parent) first."""
        pids = processes_with(self.runtime_dir)
        pids = [pid for pid in pids if "torch-mooncake-node" in command_line(pid)]
        return sorted(pids, key=lambda pid: (_parent(pid) in pids, pid))

    def worker(self) -> int:
        """Of the node's two processes the child, once it is seen: one has no command line while it is replaced."""
        workers: list[int] = []

        def seen() -> bool:
            pids = self.nodes()
            workers[:] = [pid for pid in pids if _parent(pid) in pids]
            return bool(workers)

        assert eventually(seen)
        return workers[-1]

    def log(self) -> str:
        try:
            return (self.folder / "node.log").read_text()
        except FileNotFoundError:
            return ""


def _parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except (FileNotFoundError, ProcessLookupError):
        return 0


class Child:
    """Another Python process that runs what it is told: ``child("result = 1 + 1") == 2``. Names stay between calls."""

    def __init__(self, env: dict[str, str] | None = None, prefix: Sequence[str] = ()) -> None:
        self.process = subprocess.Popen(
            [*prefix, sys.executable, "-u", str(CHILD)],
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
        """Send a signal, and wait until it has taken hold: dead, or stopped."""
        self.process.send_signal(signum)
        if signum == signal.SIGKILL:
            self.process.wait()
        elif signum == signal.SIGSTOP:
            os.waitid(os.P_PID, self.process.pid, os.WSTOPPED | os.WNOWAIT)

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
