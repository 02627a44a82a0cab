"""vLLM engines in processes of their own, and what tests tell them."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

from places import ROOT

PYTHON = ROOT / ".venv-vllm" / "bin" / "python"
MODULE = "torch_mooncake.integrations.vllm"


def transfer(connector: str, role: str = "kv_both", policy: str = "recompute", **extra: Any) -> dict[str, Any]:
    """A KVTransferConfig."""
    return {
        "kv_connector": connector,
        "kv_connector_module_path": MODULE,
        "kv_role": role,
        "kv_load_failure_policy": policy,
        "kv_connector_extra_config": extra,
    }


class Engine:
    """One engine. `tell` and `answer` may be apart: the process works meanwhile."""

    def __init__(
        self, model: Path, log: Path, transfer: dict[str, Any] | None = None, options: dict[str, Any] | None = None
    ) -> None:
        told = {"model": str(model), "transfer": transfer, "options": options or {}}
        env = {**os.environ, "PYTHONPATH": str(ROOT), "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        self.log = log
        self.process = subprocess.Popen(
            [str(PYTHON), str(Path(__file__).with_name("engine_process.py")), json.dumps(told)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log.open("w"),
            env=env,
            text=True,
        )
        self._ready = False

    def tell(self, do: str, **what: Any) -> None:
        if not self._ready:
            self._ready = True
            assert self.answer() == {"ready": True}
        assert self.process.stdin
        self.process.stdin.write(json.dumps({"do": do, **what}) + "\n")
        self.process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        assert self.process.stdout
        for line in self.process.stdout:
            if line.startswith("REPLY "):
                found: dict[str, Any] = json.loads(line.removeprefix("REPLY "))
                assert "error" not in found, found
                return found
        raise AssertionError(f"the engine has ended: {self.log.read_text()[-6000:]}")

    def __call__(self, do: str, **what: Any) -> dict[str, Any]:
        self.tell(do, **what)
        return self.answer()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        """Its workers end with it."""
        if self.process.poll() is None:
            assert self.process.stdin
            self.process.stdin.close()
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                self.kill()
