"""torch's own DistributedTest suite (from the wheel, unedited) on the backend "mooncake", one spawn for nearly all.

    WORLD_SIZE=2 python -m pytest tests/distributed/torch_suite.py

The suite's decorators compare the backend's name with lists of built-in ones when it is imported. It is imported twice,
as if for gloo and as if for mpi, and runs on "mooncake". What cannot run on any plug-in backend is left out, by rule or
by name with the reason; nothing else is.
"""

from __future__ import annotations

import ast
import importlib
import os
import sys
import tempfile
from typing import Any

LEFT_OUT = {
    "test_ddp_logging_data_cpu": "expects the group to log its own name; torch logs 'custom' for every plug-in",
    "test_monitored_barrier_failure_order": "torch allows monitored_barrier for the name gloo only",
    "test_monitored_barrier_gloo": "as above",
    "test_monitored_barrier_gloo_rank_0_timeout": "as above",
    "test_monitored_barrier_gloo_subgroup": "as above",
    "test_monitored_barrier_wait_all_ranks": "as above",
}
# Of a test that needs GPUs torch's own decorator or the name says so. The bodies of TOUCH_NO_GPU need none.
GPU_DECORATORS = {"skip_if_no_gpu", "skip_if_lt_x_gpu"}
GPU_NAMES = ("_cuda", "_nccl")
TOUCH_NO_GPU = {
    "test_new_subgroups_by_enumeration_input_rank_exceeds_world_size",
    "test_new_subgroups_by_enumeration_negative_input_rank",
    "test_new_subgroups_group_size_exceeds_world_size",
    "test_new_subgroups_overlap_not_allowed",
    "test_new_subgroups_world_size_not_divisible_by_group_size",
}
# Checks of arguments that stand behind the name nccl: one needs nothing, one a table of GPUs, one a group of NCCL's.
FOR_NCCL_ONLY = {
    "test_batch_isend_irecv_op_list_err": True,
    "test_batch_isend_irecv_op_err": False,
    "test_batch_isend_irecv_mixed_backend_err": False,
}
# Tests that mpi is let run and gloo is not, and those that choose a model for the CPU by the name gloo or mpi.
AS_MPI = ("test_all_to_all", "test_accumulate_gradients_no_sync", "test_get_future")
# They leave a default group behind that is of no more use, so they get processes of their own.
ALONE = {"test_barrier_timeout_global"}

SUITE = "torch.testing._internal.distributed.distributed_test"
os.environ.setdefault("WORLD_SIZE", "2")
if "TEMP_DIR" not in os.environ:
    os.environ["TEMP_DIR"] = tempfile.mkdtemp(prefix="tm-torch-suite-")
for folder in ("barrier", "test_dir", "init_dir"):
    os.makedirs(os.path.join(os.environ["TEMP_DIR"], folder), exist_ok=True)
os.environ["INIT_METHOD"] = "file://" + os.path.join(os.environ["TEMP_DIR"], "shared_init_file")

import torch.distributed as dist  # noqa: E402
from torch.testing._internal.common_distributed import (  # noqa: E402
    DistTestCases,
    MultiProcContinuousTest,
    MultiProcessTestCase,
    initialize_temp_directories,
)

import torch_mooncake.distributed  # noqa: E402, F401

for feature in ("ddp", "subgroup", "gpu", "cuda"):
    DistTestCases.backend_feature[feature].add("gloo")


def _suite_as(name: str) -> Any:
    os.environ["BACKEND"] = name
    sys.modules.pop(SUITE, None)
    return importlib.import_module(SUITE)


as_mpi = _suite_as("mpi")
suite = _suite_as("gloo")
suite.BACKEND = "mooncake"


def _tests() -> dict[str, Any]:
    """All tests by name; None for one that is left out."""
    base = suite.DistributedTest._DistTestBase
    with open(suite.__file__) as file:
        tree = ast.parse(file.read())
    tests: dict[str, Any] = {}
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef) or not node.name.startswith("test") or not hasattr(base, node.name):
            continue
        name = node.name
        decorators = [d.func if isinstance(d, ast.Call) else d for d in node.decorator_list]
        gpu = any(isinstance(d, ast.Name) and d.id in GPU_DECORATORS for d in decorators)
        test = getattr(base, name)
        if name in TOUCH_NO_GPU:
            too_few_ranks = getattr(test, "__unittest_skip__", False)
            test = test.__wrapped__
            test.__unittest_skip__ = too_few_ranks
            test.__unittest_skip_why__ = "too few ranks"
        elif name in FOR_NCCL_ONLY:
            test.__unittest_skip__ = False
            test = test if FOR_NCCL_ONLY[name] else None
        elif name in LEFT_OUT or gpu or any(part in name for part in GPU_NAMES):
            test = None
        elif name.startswith(AS_MPI):
            test = getattr(as_mpi.DistributedTest._DistTestBase, name)
        tests[name] = test
    return tests


class TestTorchSuite(suite.DistributedTest._DistTestBase, MultiProcContinuousTest):  # type: ignore[misc]
    world_size = int(os.environ["WORLD_SIZE"])
    _test_accumulate_gradients_no_sync = as_mpi.DistributedTest._DistTestBase._test_accumulate_gradients_no_sync
    device_type = "cpu"  # a string: were it a method, as it may be, assertRaisesRegex would accept every message

    @classmethod
    def backend_str(cls) -> str:
        return "mooncake"

    @property
    def init_method(self) -> str:
        return "file://" + tempfile.mktemp()

    def _barrier(self, *_args: Any, **_kwargs: Any) -> None:
        dist.barrier()


class TestTorchSuiteAlone(suite.TestDistBackend, suite.DistributedTest._DistTestBase):  # type: ignore[misc]
    def setUp(self) -> None:
        MultiProcessTestCase.setUp(self)  # TestDistBackend's asks for a test that needs GPUs
        initialize_temp_directories()
        suite.Barrier.init()
        self._spawn_processes()


# Removed, not skipped: what pytest counts is what ran, and tests that torch itself skips on this machine.
for _name, _test in _tests().items():
    setattr(TestTorchSuite, _name, None if _name in ALONE else _test)
    setattr(TestTorchSuiteAlone, _name, _test if _name in ALONE else None)
