"""torch's own DistributedTest suite (from the wheel, unedited) on the backend "mooncake", one spawn for all tests.

    WORLD_SIZE=2 python -m pytest tests/distributed/torch_suite.py

The suite's decorators compare the backend's name with lists of built-in ones, so it is imported as if for gloo and runs
on "mooncake". What cannot run on any plug-in backend is left out, by rule or by name with the reason; nothing else is.
"""

from __future__ import annotations

import ast
import os
import tempfile
from typing import Any

NAMES = {
    "test_ddp_logging_data_cpu": "expects the group to log its own name; torch logs 'custom' for every plug-in",
    "test_monitored_barrier_allreduce_hang": "torch allows monitored_barrier for the name gloo only",
    "test_monitored_barrier_allreduce_hang_wait_all_ranks": "as above",
    "test_monitored_barrier_failure_order": "as above",
    "test_monitored_barrier_gloo": "as above",
    "test_monitored_barrier_gloo_rank_0_timeout": "as above",
    "test_monitored_barrier_gloo_subgroup": "as above",
    "test_monitored_barrier_wait_all_ranks": "as above",
}
# Decorators of tests that need GPUs; without them some bodies choose their model by the name of a built-in backend.
GPU_DECORATORS = ("skip_if_no_gpu", "skip_if_lt_x_gpu", "require_n_gpus")

os.environ["BACKEND"] = "gloo"  # while the decorators are evaluated
os.environ.setdefault("WORLD_SIZE", "2")
if "TEMP_DIR" not in os.environ:
    os.environ["TEMP_DIR"] = tempfile.mkdtemp(prefix="tm-torch-suite-")
for folder in ("barrier", "test_dir", "init_dir"):
    os.makedirs(os.path.join(os.environ["TEMP_DIR"], folder), exist_ok=True)

import torch.distributed as dist  # noqa: E402
import torch.testing._internal.distributed.distributed_test as suite  # noqa: E402
from torch.testing._internal.common_distributed import DistTestCases, MultiProcContinuousTest  # noqa: E402

import torch_mooncake.distributed  # noqa: E402, F401

for feature in ("ddp", "subgroup", "gpu", "cuda"):
    DistTestCases.backend_feature[feature].add("gloo")
suite.BACKEND = "mooncake"  # type: ignore[attr-defined]


def _left_out() -> set[str]:
    with open(str(suite.__file__)) as file:
        tree = ast.parse(file.read())
    out = set(NAMES)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test"):
            decorators = " ".join(ast.unparse(d) for d in node.decorator_list)
            if any(name in decorators for name in GPU_DECORATORS):
                out.add(node.name)
    return out


class TestTorchSuite(suite.DistributedTest._DistTestBase, MultiProcContinuousTest):  # type: ignore[misc]
    world_size = int(os.environ["WORLD_SIZE"])

    @classmethod
    def backend_str(cls) -> str:
        return "mooncake"

    @classmethod
    def device_type(cls) -> str:
        return "cpu"

    @property
    def init_method(self) -> str:
        return "file://" + tempfile.mktemp()

    def _barrier(self, *_args: Any, **_kwargs: Any) -> None:
        dist.barrier()


# Removed, not skipped: what pytest counts is what ran, and tests that torch itself skips on this machine.
for _name in _left_out():
    if hasattr(TestTorchSuite, _name):
        setattr(TestTorchSuite, _name, None)
