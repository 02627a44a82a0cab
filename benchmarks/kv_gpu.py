"""Paged-KV operators on a GPU: the CUDA kernels beside the device's own copy of as many bytes, the Triton twins beside
the CUDA kernels. Without a GPU the rows are there, and say so.

Beside a run of its own (``benchmarks/kv_gpu.py``) these are the last rows of ``benchmarks/kv.py``.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from itertools import pairwise
from types import ModuleType

import torch
from harness import MiB, Row, Table, main
from torch import Tensor

from torch_mooncake import ops

Work = Callable[[ModuleType], object]
NAMES = (
    "gather_pages_layers",
    "scatter_pages_layers",
    "copy_pages NHD to HND",
    "reshard_heads TP 4 to 2, NHD",
    "reshard_heads TP 4 to 2, NHD to HND",
)
SCALED = ("quantize_pages bf16 to fp8", "dequantize_pages fp8 to bf16")
CUDA_TARGET, TRITON_TARGET = 0.90, 0.85


def seconds(work: Callable[[], object], repeats: int) -> list[float]:
    """Of each of `repeats` replays of `work` as a CUDA graph: what the device does, without the host's part."""
    for _ in range(2):
        work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    for _ in range(3):
        graph.replay()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    events[0].record()
    for event in events[1:]:
        graph.replay()
        event.record()
    torch.cuda.synchronize()
    return [a.elapsed_time(b) / 1e3 for a, b in pairwise(events)]


class Problem:
    """`layers` layers of 2048 pages of 16 KiB (16 tokens, 4 heads of 128, bf16), in random order; and of ranks."""

    def __init__(self, layers: int) -> None:
        shape = (2048, 16, 4, 128)

        def fresh(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
            return torch.empty(shape, dtype=dtype, device="cuda").random_(0, 8)

        self.pools = [fresh(*shape) for _ in range(layers)]
        self.listed = fresh(layers, *shape)
        self.ids = torch.randperm(2048, device="cuda")
        self.others = [torch.empty(2048, 4, 16, 128, dtype=torch.bfloat16, device="cuda") for _ in range(layers)]
        pages = 2048 * layers // 4
        self.sources = [fresh(pages, 16, 4, 128) for _ in range(4)]
        self.outs = [torch.empty(pages, 16, 8, 128, dtype=torch.bfloat16, device="cuda") for _ in range(2)]
        self.flat = self.listed.view(-1)
        self.copy = torch.empty_like(self.flat)
        self.q = torch.empty_like(self.listed, dtype=torch.float8_e4m3fn)
        self.scales = torch.empty(layers, 2048, 4, device="cuda")
        self.nbytes = self.flat.nbytes

    def works(self) -> dict[str, Work]:
        hnd = [t.view(-1, 8, 16, 128) for t in self.outs]
        transposed = [pool.transpose(1, 2) for pool in self.pools]
        heads = {"kv_heads": 16, "source_head_axis": -2}
        return {
            NAMES[0]: lambda o: o.gather_pages_layers(self.pools, self.ids, self.listed),
            NAMES[1]: lambda o: o.scatter_pages_layers(self.pools, self.ids, self.listed),
            NAMES[2]: lambda o: o.copy_pages(transposed, self.ids, self.others, self.ids),
            NAMES[3]: lambda o: o.reshard_heads(self.sources, self.outs, **heads),
            NAMES[4]: lambda o: o.reshard_heads(self.sources, hnd, out_head_axis=-3, **heads),
            SCALED[0]: lambda o: o.quantize_pages(self.listed, (0, 1, 3), out=(self.q, self.scales)),
            SCALED[1]: lambda o: o.dequantize_pages(self.q, self.scales, (0, 1, 3), out=self.listed),
        }


def absent(table: Table, why: str) -> None:
    """The rows, without numbers."""
    for name in NAMES:
        table.add(Row(f"CUDA {name}", 0.0, "GB/s", (0.0, 0.0), "device copy", target=f"≥ {CUDA_TARGET} ×", note=why))
    for name in SCALED:
        table.add(Row(f"CUDA {name}", 0.0, "GB/s", (0.0, 0.0), "device copy", note=why))
    for name in NAMES + SCALED:
        table.add(Row(f"Triton {name}", 0.0, "GB/s", (0.0, 0.0), "CUDA", target=f"≥ {TRITON_TARGET} ×", note=why))


def rows(table: Table, quick: bool = False) -> None:
    """Adds the rows. GB/s are of bytes copied (of the bf16 side where two sizes meet), each read and written once."""
    if not torch.cuda.is_available():
        absent(table, "no GPU")
        return
    try:
        ops.gather_pages(torch.zeros(1, 1, device="cuda"), torch.zeros(1, dtype=torch.int64, device="cuda"))
    except RuntimeError as error:
        absent(table, str(error).splitlines()[0])
        return
    from torch_mooncake import triton_ops

    problem, repeats = Problem(8 if quick else 32), 5 if quick else 30
    name = torch.cuda.get_device_name()

    def rates(work: Callable[[], object]) -> list[float]:
        return [problem.nbytes / 1e9 / s for s in seconds(work, repeats)]

    device = rates(lambda: problem.copy.copy_(problem.flat))
    table.measured(f"device copy of {problem.nbytes // MiB} MiB", device, "GB/s", note=name)
    measured: dict[str, list[float]] = {}
    for what, work in problem.works().items():
        measured[what] = rates(lambda work=work: work(ops))
        limit = CUDA_TARGET if what in NAMES else None
        table.measured(
            f"CUDA {what}", measured[what], "GB/s", against="device copy", baseline=device, ratio_limit=limit
        )
    for what, work in problem.works().items():
        twin = rates(lambda work=work: work(triton_ops))
        table.measured(
            f"Triton {what}", twin, "GB/s", against="CUDA", baseline=measured[what], ratio_limit=TRITON_TARGET
        )
    again = rates(lambda: problem.copy.copy_(problem.flat))
    if statistics.median(again) < 0.95 * statistics.median(device):
        table.measured("device copy, once more at the end", again, "GB/s", note="the device slowed down: run again")


def run(args: argparse.Namespace) -> list[Row]:
    table = Table("Paged-KV operators on a GPU")
    rows(table, args.quick)
    return table.rows


if __name__ == "__main__":
    sys.exit(main(__doc__, run))
