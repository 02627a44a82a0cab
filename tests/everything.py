"""`make test-all`: everything that can run here, one step after the other; what failed, and what was skipped and why.

    python tests/everything.py [--only STEP ...] [--list]

A step that fails does not keep the others from running. One that takes longer than its minutes has failed, whether it
prints or is silent, and is ended with all it started, in whatever session that is; so has one that leaves processes
behind. Exit status 1 if any failed.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PYTHON = sys.executable
PYTEST = [PYTHON, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
PR_SET_CHILD_SUBREAPER = 36


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
    return [
        Step(  # some take minutes, and a traceback of running threads may crash the process
            "slow tests",
            [*PYTEST, "-o", "faulthandler_timeout=0", "-m", "slow and not gpu and not netns and not network"],
            minutes=90,
        ),
        Step(
            "network namespaces",
            [*PYTEST, "-m", "netns and not gpu"],
            minutes=40,
            without="" if root else "needs root and iproute2",
        ),
        Step("ASan and UBSan", ["make", "sanitize", "SANITIZE=address,undefined"], minutes=120),
        Step("TSan", ["make", "sanitize", "SANITIZE=thread"], minutes=120),
        Step("fuzzers", ["make", "fuzz"], {"FUZZ_SECONDS": "60"}, without="" if clang else "needs clang-14"),
        Step("torch 2.11 to 2.15", ["make", "test-torch-versions"], minutes=40),
        Step("integrations", ["make", "test-integrations"], minutes=40),
        Step("soak, 5 minutes", [PYTHON, "tests/soak.py", "--minutes", "5"], minutes=10),
        Step("example: DDP", [PYTHON, "-m", "torch.distributed.run", "--nproc-per-node=2", "examples/ddp_train.py"]),
        Step("example: PD disaggregation", ["make", "demo"]),
        Step("GPU", ["make", "test-gpu"], without="" if shutil.which("nvidia-smi") else "no NVIDIA GPU here"),
        Step("RDMA", ["make", "test-rdma"], minutes=20, without=_no_machine()),
        Step(
            "peers",
            [PYTHON, "benchmarks/transfer.py", "--peers", "--quick", "--no-rails"],
            without="" if (ROOT / ".venv-peers" / "ready").exists() else "no .venv-peers: make peers",
        ),
    ]


def _no_machine() -> str:
    """Why `make test-rdma` would only say that it skips."""
    said = subprocess.run([PYTHON, "tests/rdma/vm/vm.py", "--check"], cwd=ROOT, capture_output=True, text=True)
    return "" if said.returncode == 0 else said.stderr.strip()


@dataclass
class Result:
    seconds: float
    failures: list[str]  # why it failed; empty: it passed
    skipped: list[str]  # pytest's lines about tests it skipped


def run(step: Step, grace_s: float = 10) -> Result:
    """Runs it to its end. ``grace_s``: the time to say where it hangs when interrupted, and for processes to end."""
    start = time.monotonic()
    print(f"\n==== {step.name}: {' '.join(step.command)}", flush=True)
    adopt_orphans()
    process = subprocess.Popen(
        step.command,
        cwd=ROOT,
        env={**os.environ, **step.env},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    result = Result(0, [], [])
    reader = threading.Thread(target=_pass_on, args=(process, result.skipped), daemon=True)
    reader.start()
    try:
        status = process.wait(60 * step.minutes)
        if status:
            result.failures.append(f"exit status {status}")
        if left := _left_behind(grace_s):
            result.failures.append(f"left behind: {'; '.join(left.values())}")
    except subprocess.TimeoutExpired:
        result.failures.append(f"took longer than {step.minutes:g} minutes")
        os.killpg(process.pid, signal.SIGINT)  # pytest says where it is
        _left_behind(grace_s, {process.pid})
    finally:  # also of Ctrl-C
        _end_all(process, time.monotonic() + grace_s)
        reader.join(grace_s)
    result.seconds = time.monotonic() - start
    return result


def _pass_on(process: subprocess.Popen[str], skipped: list[str]) -> None:
    assert process.stdout
    for line in process.stdout:
        sys.stdout.write(line)
        sys.stdout.flush()
        if line.startswith("SKIPPED"):
            skipped.append(line.strip())


def adopt_orphans() -> None:
    """From now on processes whose parent is gone are our children: nothing a step started can hide."""
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl")


def descendants() -> dict[int, str]:
    """All living processes below this one, and what they are."""
    parents, names = {}, {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
            words = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")
        except (FileNotFoundError, ProcessLookupError):
            continue
        if state != "Z":
            parents[int(entry.name)], names[int(entry.name)] = int(parent), " ".join(words)[:200]
    below = {os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in below} - below:
        below |= more
    return {pid: names[pid] for pid in below - {os.getpid()}}


def _left_behind(grace_s: float, only: set[int] | None = None) -> dict[int, str]:
    """What still lives after the grace: of ``only``, or of all there is."""
    end = time.monotonic() + grace_s
    while True:
        left = {pid: name for pid, name in descendants().items() if only is None or pid in only}
        if not left or time.monotonic() > end:
            return left
        time.sleep(0.1)


def _end_all(process: subprocess.Popen[str], deadline: float) -> None:
    """Kills all there is, also what is forked meanwhile, and collects the orphans; the step itself is its Popen's."""
    while (left := descendants()) and time.monotonic() < deadline:
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        process.poll()
        time.sleep(0.05)
    if process.poll() is not None:
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            pass


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="STEP", default=[])
    parser.add_argument("--list", action="store_true", help="print the steps, and the minutes each may take")
    args = parser.parse_args()
    if unknown := set(args.only) - {step.name for step in steps()}:
        parser.error(f"no such step: {', '.join(sorted(unknown))}")
    chosen = [step for step in steps() if not args.only or step.name in args.only]
    if args.list:
        for step in chosen:
            print(f"{step.name:<28}{step.minutes:4g}  {step.without or ' '.join(step.command)}")
        return 0
    summary: list[str] = []
    skipped: list[str] = []
    failed = False
    try:
        for step in chosen:
            if step.without:
                skipped.append(f"{step.name}: {step.without}")
                continue
            result = run(step)
            failed |= bool(result.failures)
            outcome = "FAILED" if result.failures else "passed"
            summary.append(f"{outcome:<8}{step.name:<28}{result.seconds / 60:6.1f} min  {'; '.join(result.failures)}")
            print(summary[-1], flush=True)
            skipped += [f"{step.name}: {line}" for line in result.skipped]
    finally:
        print("\n==== summary")
        print("\n".join(summary))
        print(f"\nskipped: {len(skipped) or 'nothing'}")
        for line in skipped:
            print(f"  {line}")
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
