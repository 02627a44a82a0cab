"""torch's own distributed suite at world size 2 (`make test-torch-suite WORLD_SIZE=n` for others)."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path


def test_torch_suite_with_two_ranks() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(Path(__file__).parent / "torch_suite.py")],
        env={**os.environ, "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    last = done.stdout.strip().splitlines()[-1] if done.stdout.strip() else ""
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    passed = re.search(r"(\d+) passed", last)
    assert passed is not None, last
    assert int(passed[1]) >= 79, last
