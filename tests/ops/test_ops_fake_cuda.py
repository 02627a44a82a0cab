"""The operators' way from CUDA tensors to the plug-in, on the fake device that ``make ctest`` builds: checks, strides,
workspaces, ids on either side. The kernels run what a thread on a GPU runs, on the CPU."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from twins import CALLS

import torch_mooncake

TESTS = Path(__file__).parents[2] / "build" / str(sys.implementation.cache_tag) / "tests"


def test_every_operator_on_the_fake_device(tmp_path):
    """In a package of its own: the plug-in is looked for beside the library."""
    assert torch_mooncake.__file__ is not None
    package = tmp_path / "torch_mooncake"
    package.mkdir()
    for entry in Path(torch_mooncake.__file__).parent.iterdir():
        if entry.name in ("_ops.so", "libtorch_mooncake.so"):  # whose real place torch.ops.load_library takes
            shutil.copy2(entry, package)
        else:
            (package / entry.name).symlink_to(entry)
    plugin = package / "libtorch_mooncake_cuda.so"
    plugin.unlink(missing_ok=True)
    plugin.symlink_to(TESTS / "on_cpu" / plugin.name)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    script = Path(__file__).with_name("fake_gpu.py")
    done = subprocess.run(
        [sys.executable, str(script), str(TESTS)], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.stdout.splitlines()[-1:] == [f"{len(CALLS)} calls, 0 wrong"], done.stdout + done.stderr
