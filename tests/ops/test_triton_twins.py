"""The Triton twins in Triton's interpreter: the CPU operators' results bit for bit, and their errors. And compiled, as
far as that goes without a GPU: to machine code, without spills, in 16-byte accesses."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from twins import CALLS, SLOW, on_cpu, same

from torch_mooncake import ops

os.environ["TRITON_INTERPRET"] = "1"  # looked at when kernels are defined, Triton's own among them: set for good
from torch_mooncake import triton_ops


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # numpy multiplies NaN
@pytest.mark.parametrize("name", [name for name in CALLS if name not in SLOW])
def test_equal_to_the_cpu(name):
    call = CALLS[name]
    assert same(call(triton_ops, on_cpu), call(ops, on_cpu))


def errors():
    pool, big, ids = torch.zeros(4, 6), torch.zeros(8, 6), torch.tensor([1, 2])
    zeros = torch.zeros
    heads = {"kv_heads": 4, "source_head_axis": 1}
    yield "range", "scatter_pages", (pool, torch.tensor([1, 4]), torch.ones(2, 6)), {}
    yield "negative", "gather_pages", (pool, torch.tensor([-1])), {}
    yield "twice", "scatter_pages", (pool, torch.tensor([3, 1, 3]), torch.ones(3, 6)), {}
    yield "id dtype", "gather_pages", (pool, ids.float()), {}
    yield "id shape", "gather_pages", (pool, ids[None]), {}
    yield "scalar", "gather_pages", (torch.tensor(1.0), ids), {}
    yield "out", "gather_pages", (pool, ids), {"out": torch.zeros(3, 6)}
    yield "out dtype", "gather_pages", (pool, ids), {"out": torch.zeros(2, 6).half()}
    yield "out apart", "gather_pages", (pool, ids), {"out": torch.zeros(6, 2).t()}
    yield "shared", "gather_pages", (pool, ids), {"out": pool[1:3]}
    yield "layers", "gather_pages_layers", ([pool], ids, torch.zeros(2, 2, 6)), {}
    yield "pool shape", "gather_pages_layers", ([pool, torch.zeros(5, 6)], ids, torch.zeros(2, 2, 6)), {}
    yield "same pool", "scatter_pages_layers", ([pool, pool], ids, torch.zeros(2, 2, 6)), {}
    yield "counts", "copy_pages", ([pool], ids, [torch.zeros(4, 6)], ids[:1]), {}
    yield "both", "copy_pages", ([pool], ids, [pool], ids.flip(0)), {}
    yield "dst twice", "copy_pages", ([pool], ids, [torch.zeros(4, 6)], torch.tensor([0, 0])), {}
    yield "dst shared", "copy_pages", ([zeros(4, 6)] * 2, ids, [pool, pool], ids), {}
    yield "dst within", "copy_pages", ([zeros(4, 6)] * 2, ids, [big[:4], big[2:6]], ids), {}
    yield "src in dst", "copy_pages", ([big[:4], zeros(4, 6)], ids, [zeros(4, 6), big[2:6]], ids), {}
    yield "pools within", "scatter_pages_layers", ([big[:4], big[:4]], ids, zeros(2, 2, 6)), {}
    yield (
        "outs shared",
        "reshard_heads",
        ([zeros(2, 4, 3)], [big[:4].view(2, 4, 3)] * 2),
        {**heads, "out_tp": 1, "out_ranks": [0, 0]},
    )
    yield "outs in sources", "reshard_heads", ([big[:4].view(2, 4, 3)], [big[2:6].view(2, 4, 3)]), heads
    yield "copy layers", "copy_pages", ([pool], ids, [], ids), {}
    yield "degree", "reshard_heads", ([torch.zeros(2, 4, 3)] * 3, [torch.zeros(2, 4, 3)]), heads
    yield "heads", "reshard_heads", ([torch.zeros(2, 3, 3)], [torch.zeros(2, 4, 3)]), heads
    yield "axis", "reshard_heads", ([torch.zeros(2, 4, 3)], [torch.zeros(2, 4, 3)]), {**heads, "source_head_axis": 3}
    yield "missing", "reshard_heads", ([torch.zeros(2, 2, 3)], [torch.zeros(2, 4, 3)]), {**heads, "source_tp": 2}
    yield "wide", "quantize_pages", (pool.int(), (0,)), {}
    yield "narrow", "quantize_pages", (pool, (0,), torch.uint8), {}
    yield "axes", "quantize_pages", (pool, (1,)), {}
    yield "axes order", "quantize_pages", (pool, (0, 0)), {}
    yield "scales", "dequantize_pages", (pool.to(torch.int8), torch.ones(3), (0,)), {}
    big_blob = ops.delta_encode(torch.zeros(9), torch.ones(9))
    yield "no matrix", "quantize_blocks", (torch.ones(3),), {}
    yield "scalar", "quantize_blocks", (torch.tensor(1.0),), {}
    yield "block", "quantize_blocks", (pool, (0, 2)), {}
    yield "block columns", "quantize_blocks", (pool, (1, -2)), {}
    yield "blocks of int", "quantize_blocks", (pool.int(),), {}
    yield "narrow blocks", "quantize_blocks", (pool, (2, 2), torch.uint8), {}
    yield "fresh dtype", "delta_encode", (pool, pool.half()), {}
    yield "fresh shape", "delta_encode", (pool, pool[:2]), {}
    yield "base apart", "delta_encode", (pool.t(), pool.t()), {}
    yield "complex", "delta_encode", (pool.cdouble(), pool.cdouble()), {}
    yield "no delta", "delta_apply", (torch.zeros(50, dtype=torch.uint8), pool), {}
    yield "delta of others", "delta_apply", (big_blob, pool), {}
    yield "delta of halves", "delta_apply", (big_blob, torch.zeros(9).half()), {}
    yield "page size", "hash_pages", (ids, 0, torch.zeros(16, dtype=torch.uint8)), {}
    yield "root", "hash_pages", (ids, 1, torch.zeros(8, dtype=torch.uint8)), {}
    yield "offsets", "hash_pages_batch", (ids, torch.tensor([0, 2, 1, 2]), 1, torch.zeros(16, dtype=torch.uint8)), {}


@pytest.mark.parametrize(("function", "args", "kwargs"), [e[1:] for e in errors()], ids=[e[0] for e in errors()])
def test_the_same_errors(function, args, kwargs):
    with pytest.raises((ValueError, IndexError)) as expected:
        getattr(ops, function)(*args, **kwargs)
    with pytest.raises(type(expected.value)) as raised:
        getattr(triton_ops, function)(*args, **kwargs)
    assert str(raised.value).split("\n")[0] == str(expected.value).split("\n")[0]


def test_schemas_are_the_same():
    for name in triton_ops.__all__:
        original, twin = getattr(torch.ops.torch_mooncake, name), getattr(torch.ops.torch_mooncake_triton, name)
        assert original.overloads() == twin.overloads()
        for overload in original.overloads():
            schemas = [str(getattr(packet, overload)._schema).split("::")[1] for packet in (original, twin)]
            assert schemas[0] == schemas[1]


def test_opcheck():
    pool, ids = torch.rand(5, 3, 2), torch.tensor([4, 0])
    namespace = torch.ops.torch_mooncake_triton
    torch.library.opcheck(namespace.gather_pages.default, (pool, ids))
    torch.library.opcheck(namespace.scatter_pages.default, (pool, ids, torch.rand(2, 3, 2)))
    torch.library.opcheck(namespace.quantize_pages.default, (pool, [0], torch.int8))


def test_without_the_interpreter(tmp_path):
    """In a process of its own: kernels compile for sm_80, sm_90 and sm_100, and CPU tensors are refused."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"TRITON_CACHE_DIR": str(tmp_path)}
    script = Path(__file__).with_name("compile_twins.py")
    done = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    refusal, *lines = done.stdout.splitlines()
    assert refusal.startswith("ValueError: pool is on cpu: Triton needs CUDA tensors")
    rows = [line.split() for line in lines]
    assert {row[1] for row in rows} == {"80", "90", "100"}
    for kernel, _, spilled, accesses in rows:
        assert spilled == "0", rows
        if kernel in ("_copy_kernel", "_quantize_kernel", "_dequantize_kernel"):
            assert re.search(r"ld\.global\.v(2\.b64|4\.b32)|st\.global\.v(2\.b64|4\.b32)", accesses), rows
