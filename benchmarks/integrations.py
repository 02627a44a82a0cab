"""What programs gain from torch_mooncake: vLLM with a prefix that another process computed, LMCache with its chunks.

    python benchmarks/integrations.py [--only vllm|lmcache] [--quick] [--json FILE]

Needs the environments of `make env-vllm env-integrations peers`, and SmolLM2 (`make demo` installs it). vLLM runs on
the CPU. TTFT is the time from a request's arrival to its first token, in the engine's process. The prefix of a cold
request is nowhere, that of a warm one has been computed by another engine; both have 512 tokens of it and a question
of their own.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import harness

ROOT = Path(__file__).resolve().parents[1]
TESTS = ROOT / "tests" / "integrations"
sys.path[:0] = [str(ROOT / "tests"), str(TESTS), str(TESTS / "vllm")]

PREFIX, QUESTION = 512, 16
CHUNKS = {"SmolLM2-135M": (30, 192), "Llama-3.1-8B": (32, 1024)}  # layers, KV heads x head size


def prompt(number: int, question: int) -> list[int]:
    prefix = [1 + (7919 * number + 37 * i + 11 * i * i) % 40000 for i in range(PREFIX)]
    return prefix + [500 + question * QUESTION + i for i in range(QUESTION)]


def vllm(table: harness.Table, args: argparse.Namespace, folder: Path) -> None:
    from engines import Engine, transfer

    model = ROOT / "build" / "models" / "smollm2"
    model.parent.mkdir(parents=True, exist_ok=True)
    subprocess.run([sys.executable, str(ROOT / "examples" / "vllm" / "smollm2.py"), str(model)], check=True)
    how = transfer("MooncakePoolConnector")
    first = Engine(model, folder / "first.log", how)
    cold, warm, spent = [], [], []
    try:
        second = Engine(model, folder / "second.log", how)
        try:
            for engine in (first, second):
                engine("timed", prompt=prompt(0, 0), max_tokens=1)  # warm-up, of the look-up too
            for number in range(1, 3 if args.quick else 8):
                told = second("timed", prompt=prompt(100 + number, 1), max_tokens=1)
                assert told["cached"] == 0, told
                cold.append(1000 * told["ttft_s"])
                spent.append(100 * told["connector_s"] / told["ttft_s"])
                first("timed", prompt=prompt(number, 2), max_tokens=1)
                first("settle")
                told = second("timed", prompt=prompt(number, 3), max_tokens=1)
                assert told["cached"] == PREFIX, told
                warm.append(1000 * told["ttft_s"])
                second("settle")
        finally:
            second.close()
    finally:
        first.close()
    table.measured(
        f"vLLM, SmolLM2: TTFT, {PREFIX} tokens from another process",
        warm,
        "ms",
        against="cold",
        baseline=cold,
        ratio_limit=0.35,
        at_least=False,
    )
    table.measured("vLLM: time in connector calls with no hit, of TTFT", spent, "%", limit=1.0, at_least=False)


def lmcache(table: harness.Table, args: argparse.Namespace, folder: Path) -> None:
    count = 5 if args.quick else 21
    for name, (layers, hidden) in CHUNKS.items():
        with master(folder) as (address, env):  # one each: a client that has ended is in it for a while
            theirs = chunks(env, address, layers, hidden, count)
        ours = chunks({**os.environ, "PYTHONPATH": str(ROOT)}, "torch_mooncake", layers, hidden, count)
        mib = 2 * layers * 256 * hidden * 2 / harness.MiB
        for what in ours:
            table.measured(
                f"LMCache: {what}: a chunk of 256 tokens, {name} ({mib:.1f} MiB)",
                [mib / 1024 / seconds for seconds in ours[what]],
                "GiB/s",
                against="its Mooncake Store connector",
                baseline=[mib / 1024 / seconds for seconds in theirs[what]],
                ratio_limit=3.0,
            )


def chunks(env: dict[str, str], which: str, layers: int, hidden: int, count: int) -> dict[str, list[float]]:
    python = ROOT / ".venv-integrations" / "bin" / "python"
    command = [str(python), str(ROOT / "benchmarks" / "lmcache_chunks.py"), which, *map(str, (layers, hidden, count))]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULTS ")]
    if not lines:
        raise SystemExit(f"{which}: {done.stdout[-1500:]}{done.stderr[-3000:]}")
    found: dict[str, list[float]] = json.loads(lines[0].removeprefix("RESULTS "))
    return found


@contextmanager
def master(folder: Path) -> Iterator[tuple[str, dict[str, str]]]:
    """A mooncake_master of the wheel in the peers' environment, and the environment of processes that use the wheel."""
    from mooncake_real import _free_ports, _wait_for

    peers = ROOT / ".venv-peers"
    package = next(peers.rglob("mooncake/mooncake_master"), None)
    if package is None:
        raise SystemExit("`make peers` first: Mooncake's wheel is compared with")
    wheel = folder / "wheel"  # Mooncake alone, of what is installed there
    if not wheel.exists():
        wheel.mkdir()
        for each in package.parents[1].glob("mooncake*"):
            (wheel / each.name).symlink_to(each.resolve())
    libraries = sorted({str(path.parent) for path in (peers / "debian").resolve().rglob("*.so.*")})
    env = os.environ | {"MC_FORCE_TCP": "1", "MC_LOG_LEVEL": "ERROR", "GLOG_minloglevel": "2"}
    env |= {"MC_STORE_CLIENT_METRIC": "0", "LD_LIBRARY_PATH": ":".join(libraries), "PYTHONPATH": str(wheel)}
    port, metrics = _free_ports(2)
    command = [str(package), f"--rpc_port={port}", f"--metrics_port={metrics}", "--default_kv_lease_ttl=1000"]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    server: Any = subprocess.Popen(command, env=env, cwd=folder, **quiet)
    try:
        _wait_for(port, server)
        yield f"127.0.0.1:{port}", env
    finally:
        server.terminate()
        server.wait(10)


def run(args: argparse.Namespace) -> list[harness.Row]:
    table = harness.Table("integrations: vLLM and LMCache on torch_mooncake")
    with tempfile.TemporaryDirectory(prefix="tm-bench-") as folder:
        os.environ |= {"TM_RUNTIME_DIR": folder, "TM_POOL": "bench", "TM_LINGER_S": "0", "TM_MEMORY": "2GiB"}
        import torch_mooncake as tm

        with tm.Pool():
            for part in (vllm, lmcache):
                if args.only in (None, part.__name__):
                    part(table, args, Path(folder))
    return table.rows


if __name__ == "__main__":
    parts = ("vllm", "lmcache")
    sys.exit(harness.main(__doc__, run, lambda parser: parser.add_argument("--only", choices=parts)))
