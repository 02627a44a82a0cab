"""torch's own distributed suite passes, and no test gets lost (alone: `make test-torch-suite WORLD_SIZE=n`)."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

SLOW = [pytest.mark.slow, pytest.mark.timeout(1800)]
PASSED = [  # by world size
    pytest.param(2, 99),
    pytest.param(4, 105, marks=SLOW),
    pytest.param(8, 124, marks=SLOW),
]


@pytest.mark.parametrize(("world", "count"), PASSED)
def test_torch_suite(world: int, count: int) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(Path(__file__).parent / "torch_suite.py")],
        env={**os.environ, "WORLD_SIZE": str(world), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=1700 if world > 2 else 170,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    last = done.stdout.strip().splitlines()[-1]
    print(f"world size {world}: {last}")
    passed = re.search(r"(\d+) passed", last)
    assert passed is not None, last
    assert int(passed[1]) >= count, last
