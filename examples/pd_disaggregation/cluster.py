"""Starts and ends the demo's processes, and leaves nothing behind.

Every child runs in a session of its own, so that Ctrl-C reaches only the process that owns the cluster, and is killed
by the kernel when that process dies. The pool's node is started by the first `tm.init()` (ours) and ends by itself
after its last client, because TM_LINGER_S is 0.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from process import read_json, wait_for

import torch_mooncake as tm

_HERE = Path(__file__).resolve().parent
_SCRIPTS = {
    "trainer": "trainer.py",
    "front": "front.py",
    "prefill": "prefill_worker.py",
    "decode": "decode_worker.py",
}


class ChildFailed(RuntimeError):
    """A process of the cluster ended when it should not have; the message has the end of its log."""


class Cluster:
    """The processes of one demo. Use as a context; `stop` (called by it) ends everything, also after errors.

    Must be made and used by the main thread: children die with the thread that started them.
    """

    def __init__(self, model: str, *, run_dir: Path | None = None, memory: str = "3GiB", pages: int = 256) -> None:
        self.model = model
        self.pages = pages
        self.run_dir = Path(tempfile.mkdtemp(prefix="tm-demo-")) if run_dir is None else run_dir
        self.run_dir.mkdir(parents=True, exist_ok=True)
        self.env = {
            "TM_RUNTIME_DIR": str(self.run_dir / "tm"),
            "TM_POOL": f"demo-{os.getpid()}",
            "TM_LINGER_S": "0",
            "TM_MEMORY": memory,
            "TM_TOKEN": secrets.token_hex(16),
        }
        self.processes: dict[str, subprocess.Popen] = {}
        self._attached = False
        self._environ_before: dict[str, str | None] = {}

    def attach(self) -> None:
        """This process becomes the pool's first client, which starts its node, and keeps it until `stop`."""
        self._environ_before = {name: os.environ.get(name) for name in self.env}
        os.environ.update(self.env)
        tm.init(name="demo")
        self._attached = True

    # ---- processes ----------------------------------------------------------------------------------------------
    def start(self, role: str) -> None:
        args = {
            "trainer": ["--model", self.model],
            "front": ["--model", self.model, "--max-model-tokens", str(self.pages * 16)],
        }.get(role, ["--pages", str(self.pages)])
        quiet = {
            "DEMO_PARENT_PID": str(os.getpid()),
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "TRANSFORMERS_VERBOSITY": "error",
            "PYTHONUNBUFFERED": "1",
        }
        pipe = subprocess.PIPE if role == "trainer" else subprocess.DEVNULL
        with open(self.log(role), "ab") as log:
            self.processes[role] = subprocess.Popen(
                [sys.executable, str(_HERE / _SCRIPTS[role]), "--run-dir", str(self.run_dir), *args],
                env=os.environ | self.env | quiet,
                stdin=pipe,
                stdout=pipe if role == "trainer" else log,
                stderr=log,
                start_new_session=True,
            )

    def log(self, role: str) -> Path:
        return self.run_dir / f"{role}.log"

    def check(self) -> bool:
        """True; ChildFailed if a child has ended by itself."""
        for role, process in self.processes.items():
            if process.poll() is not None:
                tail = self.log(role).read_text(errors="replace")[-3000:]
                raise ChildFailed(f"the {role} process ended with status {process.returncode}:\n{tail}")
        return True

    def end(self, role: str, number: int = signal.SIGTERM, timeout_s: float = 10) -> None:
        """Signals one child and reaps it; SIGKILL follows when it takes too long."""
        process = self.processes.pop(role)
        process.send_signal(number)
        try:
            process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()

    # ---- talking to them ----------------------------------------------------------------------------------------
    def ask_trainer(self, **command: Any) -> dict:
        trainer = self.processes["trainer"]
        assert trainer.stdin is not None
        try:
            trainer.stdin.write(json.dumps(command).encode() + b"\n")
            trainer.stdin.flush()
        except BrokenPipeError:
            trainer.wait()
            self.check()
        return self.trainer_answer()

    def trainer_answer(self) -> dict:
        trainer = self.processes["trainer"]
        assert trainer.stdout is not None
        line = trainer.stdout.readline()
        if not line:
            trainer.wait()
            self.check()
        return json.loads(line)

    def front_url(self, timeout_s: float = 60) -> str:
        """Of the front, once it serves; ChildFailed if a process dies before that."""
        path = self.run_dir / "front.json"
        return wait_for(lambda: read_json(path) or (self.check() and None), timeout_s, "the front's start")["url"]

    # ---- the end ------------------------------------------------------------------------------------------------
    def stop(self) -> None:
        """Ends all children, waits until the pool's node has gone, removes the run directory. A second Ctrl-C does
        not interrupt it: it takes seconds, and what it has not ended would be left to the kernel."""
        handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            self._stop()
        finally:
            signal.signal(signal.SIGINT, handler)

    def _stop(self) -> None:
        for process in self.processes.values():
            process.terminate()
        for role in list(self.processes):
            self.end(role)
        if self._attached:
            tm.close()
            self._attached = False
        for name, value in self._environ_before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        wait_for(lambda: not self.node_answers(), 10, "the end of the pool's node")
        shutil.rmtree(self.run_dir, ignore_errors=True)

    def node_answers(self) -> bool:
        path = self.run_dir / "tm" / self.env["TM_POOL"] / "node.sock"
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            try:
                probe.connect(str(path))
            except (FileNotFoundError, ConnectionRefusedError):
                return False
        return True

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
