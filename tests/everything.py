"""`make test-all`: everything that can run here, one step after the other; what failed, and what was skipped and why.

    python tests/everything.py [--only STEP ...] [--list]

A step that fails does not keep the others from running. Exit status 1 if any failed.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PYTHON = sys.executable
PYTEST = [PYTHON, "-m", "pytest", "-q", "-p", "no:cacheprovider"]


@dataclass
class Step:
    name: str
    command: list[str]
    env: dict[str, str] = field(default_factory=dict)
    minutes: float = 30  # a step that takes longer has failed
    without: str = ""  # why it cannot run here


def steps() -> list[Step]:
    root = os.geteuid() == 0 and shutil.which("ip") is not None
    clang = shutil.which("clang++-14") is not None
    worlds = [
        Step(f"torch suite, world {n}", ["make", "test-torch-suite", f"WORLD_SIZE={n}"], minutes=40) for n in (2, 4, 8)
    ]
    return [
        Step("slow tests", [*PYTEST, "-m", "slow and not gpu and not netns and not network"], minutes=150),
        Step(
            "network namespaces",
            [*PYTEST, "-m", "netns and not gpu"],
            minutes=40,
            without="" if root else "needs root and iproute2",
        ),
        Step("ASan and UBSan", ["make", "sanitize", "SANITIZE=address,undefined"], minutes=60),
        Step("TSan", ["make", "sanitize", "SANITIZE=thread"], minutes=60),
        Step("fuzzers", ["make", "fuzz"], {"FUZZ_SECONDS": "60"}, without="" if clang else "needs clang-14"),
        *worlds,
        Step("soak, 5 minutes", [PYTHON, "tests/soak.py", "--minutes", "5"], minutes=10),
        Step("example: DDP", [PYTHON, "-m", "torch.distributed.run", "--nproc-per-node=2", "examples/ddp_train.py"]),
        Step("example: PD disaggregation", ["make", "demo"]),
        Step("GPU", ["make", "test-gpu"], without="" if shutil.which("nvidia-smi") else "no NVIDIA GPU here"),
        Step("RDMA device", ["make", "test-rdma"], without=_no_rdma()),
        Step(
            "peers",
            [PYTHON, "benchmarks/transfer.py", "--peers", "--quick", "--no-rails"],
            without="" if (ROOT / ".venv-peers" / "ready").exists() else "no .venv-peers: make peers",
        ),
    ]


def _no_rdma() -> str:
    if "test-rdma:" not in (ROOT / "Makefile").read_text():
        return "the Makefile has no test-rdma"
    devices = Path("/sys/class/infiniband")
    return "" if devices.is_dir() and any(devices.iterdir()) else "no RDMA device here"


def run(step: Step) -> tuple[bool, float, list[str]]:
    """Whether it passed, its seconds, and the tests it skipped."""
    start = time.monotonic()
    print(f"\n==== {step.name}: {' '.join(step.command)}", flush=True)
    process = subprocess.Popen(
        step.command,
        cwd=ROOT,
        env={**os.environ, **step.env},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    skipped = []
    deadline = start + 60 * step.minutes
    assert process.stdout
    for line in process.stdout:
        sys.stdout.write(line)
        if line.startswith("SKIPPED"):
            skipped.append(line.strip())
        if time.monotonic() > deadline:
            print(f"{step.name} takes longer than {step.minutes} minutes", flush=True)
            os.killpg(process.pid, 9)
            break
    return process.wait() == 0, time.monotonic() - start, skipped


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="STEP", default=[])
    parser.add_argument("--list", action="store_true", help="print the steps")
    args = parser.parse_args()
    chosen = [step for step in steps() if not args.only or step.name in args.only]
    if args.list:
        for step in chosen:
            print(f"{step.name:<28}{step.without or ' '.join(step.command)}")
        return 0
    summary, skipped = [], []
    failed = False
    for step in chosen:
        if step.without:
            skipped.append(f"{step.name}: {step.without}")
            continue
        passed, seconds, tests = run(step)
        failed |= not passed
        summary.append(f"{'passed' if passed else 'FAILED':<8}{step.name:<32}{seconds / 60:6.1f} min")
        skipped += [f"{step.name}: {line}" for line in tests]
    print("\n==== summary")
    print("\n".join(summary))
    print(f"\nskipped: {len(skipped) or 'nothing'}")
    for line in skipped:
        print(f"  {line}")
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
