"""Starts and ends the demo's processes, and leaves nothing behind.

Every child runs in a session of its own, so that Ctrl-C reaches only the process that owns the cluster, and is killed
by the kernel when that process dies. The pool's node is started by the first `tm.init()` (ours) and ends by itself
after its last client, because TM_LINGER_S is 0.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
from process import read_json, wait_for

import torch_mooncake as tm

_HERE = Path(__file__).resolve().parent
_PAGE_TOKENS = 16


@dataclass(frozen=True)
class Shape:
    """How many workers of each role, of how many tensor-parallel ranks, and what limits them."""

    prefill: int = 1
    decode: int = 1
    prefill_tp: int = 1
    decode_tp: int = 1
    pages: int = 256  # of each worker's KV cache
    chunk_size: int = 64
    max_running: int = 32
    max_waiting: int = 64
    recovery_s: float = 30

    @property
    def workers(self) -> list[str]:
        return [f"prefill-{index}" for index in range(self.prefill)] + [
            f"decode-{index}" for index in range(self.decode)
        ]

    @property
    def pool_parts(self) -> int:
        """Into how many objects the pool cuts the heads of a page: what the finest cut needs."""
        return math.lcm(self.prefill_tp, self.decode_tp)

    def __str__(self) -> str:
        return f"{self.prefill} × prefill TP {self.prefill_tp}, {self.decode} × decode TP {self.decode_tp}"

    def arguments(self, process: str) -> list[str]:
        """Of a worker's or the front's command line."""
        if process == "front":
            longest = self.pages * _PAGE_TOKENS
            return [
                f"--max-model-tokens={longest}", f"--max-running={self.max_running}",
                f"--max-waiting={self.max_waiting}", f"--recovery-s={self.recovery_s}",
            ]  # fmt: skip
        role = process.partition("-")[0]
        tp = self.prefill_tp if role == "prefill" else self.decode_tp
        return [
            f"--name={process}", f"--role={role}", f"--tp={tp}", f"--pages={self.pages}",
            f"--pool-parts={self.pool_parts}", f"--chunk-size={self.chunk_size}",
        ]  # fmt: skip


def add_shape_arguments(parser: argparse.ArgumentParser, default: Shape) -> None:
    """--prefill, --decode and so on; `shape_of` reads them."""
    for name, what in {
        "prefill": "prefill workers",
        "decode": "decode workers",
        "prefill_tp": "tensor-parallel ranks of each prefill worker",
        "decode_tp": "tensor-parallel ranks of each decode worker",
        "pages": "KV pages of 16 tokens of each worker",
        "chunk_size": "prompt tokens a forward pass",
    }.items():
        value = getattr(default, name)
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=value, help=f"{what} (default {value})")


def shape_of(args: argparse.Namespace, **more: Any) -> Shape:
    names = ("prefill", "decode", "prefill_tp", "decode_tp", "pages", "chunk_size")
    return Shape(**{name: getattr(args, name) for name in names}, **more)


class ChildFailed(RuntimeError):
    """A process of the cluster ended when it should not have; the message has the end of its log."""


class Cluster:
    """The processes of one demo. Use as a context; `stop` (called by it) ends everything, also after errors.

    Must be made and used by the main thread: children die with the thread that started them.
    """

    def __init__(
        self, model: str, shape: Shape = Shape(), *, run_dir: Path | None = None, memory: str = "3GiB"
    ) -> None:
        self.model = model
        self.shape = shape
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
    def start(self, name: str) -> None:
        """ "trainer", "front" or one of `shape.workers`."""
        if name == "trainer":
            script, args = "trainer.py", ["--model", self.model]
        else:
            script, args = "front.py" if name == "front" else "worker.py", self.shape.arguments(name)
        quiet = {
            "DEMO_PARENT_PID": str(os.getpid()),
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "TRANSFORMERS_VERBOSITY": "error",
            "PYTHONUNBUFFERED": "1",
            "OMP_NUM_THREADS": "1",
        }
        pipe = subprocess.PIPE if name == "trainer" else subprocess.DEVNULL
        with open(self.log(name), "ab") as log:
            self.processes[name] = subprocess.Popen(
                [sys.executable, str(_HERE / script), "--run-dir", str(self.run_dir), *args],
                env=os.environ | self.env | quiet,
                stdin=pipe,
                stdout=pipe if name == "trainer" else log,
                stderr=log,
                start_new_session=True,
            )

    def start_all(self) -> dict:
        """Everything, and the first weights published. Returns what the trainer says of that."""
        self.attach()
        for name in ("trainer", *self.shape.workers):  # the workers import while the trainer loads
            self.start(name)
        self.trainer_answer()
        self.start("front")
        return self.ask_trainer(publish=0)

    def restart(self, name: str, number: int = signal.SIGTERM) -> None:
        """Ends a worker by that signal and starts another in its place; does not wait for it."""
        self.end(name, number)
        self.start(name)

    def log(self, name: str) -> Path:
        return self.run_dir / f"{name}.log"

    def check(self) -> bool:
        """True; ChildFailed if a child has ended by itself."""
        for name, process in self.processes.items():
            if process.poll() is not None:
                tail = self.log(name).read_text(errors="replace")[-3000:]
                raise ChildFailed(f"the {name} process ended with status {process.returncode}:\n{tail}")
        return True

    def end(self, name: str, number: int = signal.SIGTERM, timeout_s: float = 10) -> None:
        """Signals one child and reaps it; SIGKILL follows when it takes too long."""
        process = self.processes.pop(name)
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

    async def health(self) -> dict:
        """What the front says of everybody: "status", "workers" by name, "admission"."""
        async with aiohttp.ClientSession() as http, http.get(f"{self.front_url()}/healthz") as response:
            return await response.json()

    async def all_well(self, timeout_s: float = 120, *, unlike: Mapping[str, int] = {}) -> dict[str, dict]:
        """The workers' states once all of `shape` answer, those in `unlike` with another pid than there; ChildFailed as
        soon as one has died instead."""
        deadline = time.monotonic() + timeout_s
        while True:
            workers = (await self.health())["workers"]
            if all(
                "error" not in workers.get(name, {"error": ""}) and workers[name]["pid"] != unlike.get(name)
                for name in self.shape.workers
            ):
                return workers
            self.check()
            if time.monotonic() > deadline:
                raise TimeoutError(f"the workers are not up after {timeout_s} s: {workers}")
            await asyncio.sleep(0.1)

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
        for name in list(self.processes):
            self.end(name)
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
