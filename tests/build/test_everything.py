"""`make test-all` itself: a step that hangs, prints without end, or leaves processes behind has failed, in time."""

from __future__ import annotations

import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest
from processes import eventually, processes_with

TESTS = Path(__file__).resolve().parents[1]
# A shell that leaves a process in a session of its own, which holds the step's stdout open.
DETACH = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', {code!r}], start_new_session=True)"

STEPS = {
    "passes": ("print('well')", []),
    "fails": ("raise SystemExit(3)", ["exit status 3"]),
    "hangs silently": ("import time; time.sleep(600)", ["took longer than 0.03 minutes"]),
    "ignores SIGINT": (
        "import signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN); time.sleep(600)",
        ["took longer than 0.03 minutes"],
    ),
    "prints without end": ("while True: print('x' * 999)", ["took longer than 0.03 minutes"]),
    "leaves a process behind": (DETACH.format(code="import time; time.sleep(600) # {mark}"), ["left behind"]),
}


@pytest.mark.parametrize("name", STEPS)
def test_a_step_has_a_truthful_end_in_bounded_time(name: str) -> None:
    code, failures = STEPS[name]
    mark = uuid.uuid4().hex
    program = f"""
import sys
sys.path.insert(0, {str(TESTS)!r})
import everything
step = everything.Step("s", [sys.executable, "-c", {(code + " # {mark}").replace("{mark}", mark)!r}], minutes=0.03)
print(everything.run(step, grace_s=0.5).failures, file=sys.stderr)
"""
    start = time.monotonic()
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert time.monotonic() - start < 15
    said = eval(done.stderr.strip().splitlines()[-1])
    assert len(said) == len(failures)
    assert all(want in got for want, got in zip(failures, said, strict=True)), said
    assert eventually(lambda: not processes_with(mark), 2)


def test_the_steps_are_listed_and_unknown_ones_refused() -> None:
    listed = subprocess.run([sys.executable, TESTS / "everything.py", "--list"], capture_output=True, text=True)
    assert listed.returncode == 0
    assert "TSan" in listed.stdout
    refused = subprocess.run([sys.executable, TESTS / "everything.py", "--only", "nothing"], capture_output=True)
    assert refused.returncode == 2
