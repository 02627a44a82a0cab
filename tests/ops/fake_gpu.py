"""Every call of twins.py with tensors of the fake CUDA device (csrc/tests/torch/fake_cuda.cpp); kernels run on the CPU
(csrc/tests/torch/cuda_on_cpu.cpp): a line for each that is not what the CPU's operators do, then how many.

    fake_gpu.py TESTS    what the build has put into its folder "tests"
"""

from __future__ import annotations

import ctypes
import importlib.util
import sys
from pathlib import Path

import torch
from torch import Tensor
from twins import CALLS, ids_of, noise, on_cpu, same

TESTS = Path(sys.argv[1])
ctypes.CDLL(str(TESTS / "on_cpu" / "libtorch_cuda.so"), ctypes.RTLD_GLOBAL)  # before the operators look for it
from torch_mooncake import ops  # noqa: E402


def refused(expected: str, call, *args) -> str | None:
    """None, or what came instead of the error `expected`."""
    try:
        call(*args)
    except (IndexError, ValueError) as error:
        return None if expected in str(error) else str(error)
    return f"no {expected!r}"


def main() -> int:
    spec = importlib.util.spec_from_file_location("fake_cuda", TESTS / "fake_cuda.so")
    assert spec is not None
    assert spec.loader is not None
    fake = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(fake)

    def put(t: Tensor) -> Tensor:
        on_device = fake.to_device(t)
        assert on_device.is_cuda
        return on_device

    wrong = [name for name, call in CALLS.items() if not same(call(ops, put), call(ops, on_cpu))]

    pool, pages, host_ids = put(noise([5, 40])), put(noise([3, 40], seed=1)), ids_of(3, 5)
    for ids in (host_ids, host_ids.int(), put(host_ids)):
        if not torch.equal(ops.gather_pages(pool, ids).cpu(), pool.cpu()[host_ids]):
            wrong.append(f"ids {ids.dtype} {ids.device}")
    before = pool.cpu()
    skipped = put(torch.tensor([4, 5, -1]))
    ops.scatter_pages(pool, skipped, pages)
    before[4] = pages.cpu()[0]
    if not torch.equal(pool.cpu(), before):
        wrong.append("ids out of range on the device")
    for found in (
        refused("page_ids[1] is 5, not in [0, 5)", ops.scatter_pages, pool, torch.tensor([0, 5, 9]), pages),
        refused("page_ids has 3 twice", ops.scatter_pages, pool, torch.tensor([3, 1, 3]), pages),
        refused("page_ids is on cuda:0 but pool on cpu", ops.gather_pages, pool.cpu(), skipped),
        refused("out is on cpu", lambda: ops.gather_pages(pool, host_ids, out=pages.cpu())),
    ):
        wrong += [found] if found else []
    if not torch.equal(pool.cpu(), before):
        wrong.append("a call that was refused wrote")
    print(*wrong, f"{len(CALLS)} calls, {len(wrong)} wrong", sep="\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
