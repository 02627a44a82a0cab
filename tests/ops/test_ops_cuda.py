"""The operators on CUDA tensors (``make test-gpu``): the CPU's results bit for bit, one launch whatever the number of
layers, nothing waited for, CUDA graphs, streams, ids that are no good."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from twins import CALLS, ids_of, noise, on_cpu, on_gpu, same

from torch_mooncake import ops

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _gpu() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")


@pytest.mark.parametrize("name", CALLS)
def test_equal_to_the_cpu(name):
    assert same(CALLS[name](ops, on_gpu), CALLS[name](ops, on_cpu))


def test_triton_is_equal_to_the_cpu():
    """In a process of its own: in this one Triton may be set to interpret (test_triton_twins.py)."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    script = Path(__file__).with_name("triton_on_gpu.py")
    done = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == f"{len(CALLS)} equal, 0 different"


@pytest.mark.parametrize("id_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("page_nbytes", [6, 4096, 16384 + 8, 1 << 20])
def test_ids_on_the_cpu(page_nbytes, id_dtype):
    host, ids = noise([30, page_nbytes]), ids_of(20, 30, id_dtype)
    pool, target = host.cuda(), torch.zeros(30, page_nbytes, dtype=torch.uint8, device="cuda")
    pages = ops.gather_pages(pool, ids)
    assert torch.equal(pages.cpu(), host[ids.long()])
    ops.scatter_pages(target, ids, pages)
    assert torch.equal(target.cpu()[ids.long()], host[ids.long()])
    ops.copy_pages([pool], ids, [target], ids.flip(0).cuda())
    assert torch.equal(target.cpu()[ids.flip(0).long()], host[ids.long()])


def test_places_beyond_32_bits():
    if torch.cuda.mem_get_info()[0] < 16 << 30:
        pytest.skip("needs 16 GiB of device memory")
    pool = torch.zeros(5, 1 << 30, dtype=torch.uint8, device="cuda")
    pool[4, -4096:] = noise([4096]).cuda()
    pages = ops.gather_pages(pool, torch.tensor([4, 0], device="cuda"))
    assert torch.equal(pages[0], pool[4])
    pool.zero_()
    ops.scatter_pages(pool, torch.tensor([3, 4], device="cuda"), pages)
    assert torch.equal(pool[3], pages[0])
    assert int(pool[4].count_nonzero()) == 0


def kernels_of(work: Callable[[], object]) -> list[str]:
    """What ran on the device: kernels, copies, fills."""
    work()  # what is allocated or loaded at first use
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        work()
        torch.cuda.synchronize()
    return [e.name for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]


@pytest.mark.parametrize("layers", [1, 64, 65, 128, 256, 1000])
def test_one_launch_for_all_layers(layers):
    pools = list(noise([layers, 16, 512]).cuda())
    others = list(torch.zeros(layers, 16, 512, dtype=torch.uint8, device="cuda"))
    ids, out = ids_of(9, 16).cuda(), torch.empty(layers, 9, 512, dtype=torch.uint8, device="cuda")
    for work in (
        lambda: ops.gather_pages_layers(pools, ids, out),
        lambda: ops.scatter_pages_layers(others, ids, out),
        lambda: ops.copy_pages(pools, ids, others, ids.flip(0)),
    ):
        ran = [name for name in kernels_of(work) if "torch_mooncake" in name or "Mem" in name]
        assert len(ran) == 1, ran
        assert "copy_kernel" in ran[0]


def test_one_launch_for_the_others():
    sources = [torch.randn(64, 16, 2, 128, device="cuda", dtype=torch.bfloat16) for _ in range(4)]
    outs = [torch.empty(64, 4, 16, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
    narrow = (torch.empty_like(sources[0], dtype=torch.float8_e4m3fn), torch.empty(64, 2, device="cuda"))
    for work in (
        lambda: ops.reshard_heads(sources, outs, kv_heads=8, source_head_axis=-2, out_head_axis=-3),
        lambda: ops.quantize_pages(sources[0], (0, 2), out=narrow),
        lambda: ops.dequantize_pages(*narrow, (0, 2), out=sources[1]),
    ):
        assert len(kernels_of(work)) == 1


def test_nothing_is_waited_for():
    """All of them return while the stream is still busy with what was queued before."""
    pool, ids = torch.randn(64, 16, 2, 128, device="cuda"), ids_of(32, 64)
    tokens, root = torch.arange(4096, device="cuda"), torch.zeros(16, dtype=torch.uint8, device="cuda")
    device_ids = ids.cuda()

    def work() -> None:
        pages = ops.gather_pages(pool, device_ids)
        ops.scatter_pages(pool, device_ids, pages)
        ops.scatter_pages(pool, ids, pages)
        ops.dequantize_pages(*ops.quantize_pages(pages, (0, 2)), (0, 2))
        ops.reshard_heads(
            [pages], [torch.empty(32, 16, 1, 128, device="cuda")], kv_heads=2, source_head_axis=2, out_tp=2
        )
        ops.hash_pages(tokens, 16, root)

    work()
    torch.cuda.synchronize()
    before = torch.cuda.Event()
    torch.cuda._sleep(4_000_000_000)  # seconds
    before.record()
    work()
    assert not before.query()
    torch.cuda.synchronize()


def test_the_current_stream():
    pool, ids = torch.zeros(64, 1 << 20, device="cuda"), torch.arange(64)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        pool.fill_(1)
        got = [ops.gather_pages(pool, ids), ops.gather_pages(pool, ids.cuda())]
    stream.synchronize()
    assert all(bool((pages == 1).all()) for pages in got)


def test_in_a_cuda_graph():
    """Captured once; replayed over other contents and other ids."""
    pools = list(noise([40, 16, 16, 2, 64], torch.bfloat16).cuda())
    ids, out = ids_of(8, 16).cuda(), torch.empty(40, 8, 16, 2, 64, dtype=torch.bfloat16, device="cuda")
    heads = [torch.empty(8, 1, 16, 64, dtype=torch.bfloat16, device="cuda") for _ in range(2)]
    q, scales = torch.empty(8, 16, 2, 64, dtype=torch.int8, device="cuda"), torch.empty(8, 2, device="cuda")

    def work() -> None:
        ops.gather_pages_layers(pools, ids, out)
        ops.reshard_heads([out[0]], heads, kv_heads=2, source_head_axis=-2, out_head_axis=-3)
        ops.quantize_pages(out[1].nan_to_num(), (0, 2), torch.int8, out=(q, scales))
        ops.scatter_pages(pools[2], ids, out[0])

    work()  # kernels are loaded at their first launch
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    for pool, fresh in zip(pools, noise([40, 16, 16, 2, 64], torch.bfloat16, 1), strict=True):
        pool.copy_(fresh)
    ids.copy_(ids_of(8, 16, seed=2))
    expected = [pool[ids].view(torch.int16).cpu() for pool in pools]
    graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(out[l].view(torch.int16).cpu(), expected[l]) for l in range(40))
    for rank in range(2):
        assert torch.equal(heads[rank][:, 0].view(torch.int16).cpu(), expected[0][:, :, rank])
    host = ops.quantize_pages(out[1].nan_to_num().cpu(), (0, 2), torch.int8)
    assert torch.equal(q.cpu(), host[0])
    assert torch.equal(scales.cpu(), host[1])
    assert torch.equal(pools[2][ids].view(torch.int16).cpu(), expected[0])


def test_host_ids_are_refused_in_a_cuda_graph():
    pool = torch.zeros(4, 8, device="cuda")
    ops.gather_pages(pool, torch.tensor([1]))
    with pytest.raises(RuntimeError, match="page_ids lie on the host while a CUDA graph is captured"):
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            ops.gather_pages(pool, torch.tensor([1]))


@pytest.mark.parametrize("bad", [-1, 5, 2**31 - 1, -(2**31)])
def test_device_ids_out_of_range_are_skipped(bad):
    pool = torch.arange(10.0, device="cuda").reshape(5, 2)
    ids = torch.tensor([3, bad, 0], device="cuda", dtype=torch.int32)
    out = torch.full((3, 2), -1.0, device="cuda")
    ops.gather_pages(pool, ids, out=out)
    assert out.tolist() == [[6.0, 7.0], [-1.0, -1.0], [0.0, 1.0]]
    ops.scatter_pages(pool, ids, torch.full((3, 2), 9.0, device="cuda"))
    assert pool.tolist() == [[9.0, 9.0], [2.0, 3.0], [4.0, 5.0], [9.0, 9.0], [8.0, 9.0]]


def test_bad_ids_on_the_cpu_change_nothing():
    pool, pages = torch.zeros(5, 8, device="cuda"), torch.ones(3, 8, device="cuda")
    with pytest.raises(IndexError, match=r"page_ids\[1\] is 5, not in \[0, 5\)"):
        ops.scatter_pages(pool, torch.tensor([0, 5, 9]), pages)
    with pytest.raises(ValueError, match="page_ids has 3 twice"):
        ops.scatter_pages(pool, torch.tensor([3, 1, 3]), pages)
    with pytest.raises(ValueError, match="page_ids is on cuda:0 but pool on cpu"):
        ops.gather_pages(pool.cpu(), torch.tensor([0], device="cuda"))
    assert not pool.any()


CHECKED = """
import torch
from torch_mooncake import ops
pool, pages = torch.zeros(5, 8, device="cuda"), torch.ones(3, 8, device="cuda")
calls = [
    lambda: ops.scatter_pages(pool, torch.tensor([0, 5, 9], device="cuda"), pages),
    lambda: ops.gather_pages(pool, torch.tensor([0, 1, -1], device="cuda")),
    lambda: ops.scatter_pages(pool, torch.tensor([3, 1, 3], device="cuda"), pages),
    lambda: ops.copy_pages([pool], torch.tensor([1], device="cuda"), [pool], torch.tensor([1], device="cuda")),
]
for call in calls:
    try:
        call()
        print("done")
    except (IndexError, ValueError) as error:
        print(type(error).__name__, str(error).splitlines()[0])
assert not pool.any()
ops.scatter_pages(pool, torch.tensor([0, 2, 4], device="cuda"), pages)
print(pool[:, 0].tolist())
"""


def test_ids_are_checked_when_asked_for():
    environment = {**os.environ, "TM_CHECK_IDS": "1"}
    done = subprocess.run([sys.executable, "-c", CHECKED], env=environment, capture_output=True, text=True, timeout=120)
    lines = done.stdout.splitlines()
    assert lines[:2] == ["IndexError page_ids[1] is 5, not in [0, 5)", "IndexError page_ids[2] is -1, not in [0, 5)"], (
        done.stderr
    )
    assert re.fullmatch("ValueError page_ids has 3 twice, once at position [02]: a page can be written once", lines[2])
    assert lines[3].startswith("ValueError src_ids[0] is 1, which is written too")
    assert lines[4:] == ["[1.0, 0.0, 1.0, 0.0, 1.0]"]
