"""The same operators on CUDA tensors (`make test-gpu`): equal to the CPU's, with ids on either device."""

from __future__ import annotations

import pytest
import torch

from torch_mooncake import ops

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _gpu() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")


@pytest.mark.parametrize("ids_device", ["cpu", "cuda"])
@pytest.mark.parametrize("id_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("page_nbytes", [1, 6, 20, 100, 4096, 16384 + 8, 1 << 20])
@pytest.mark.parametrize("skew", [0, 1, 16])
def test_equal_to_the_cpu(page_nbytes, skew, id_dtype, ids_device):
    generator = torch.Generator().manual_seed(page_nbytes + skew)
    layers, num_pages = 3, 40
    # Pages with a gap between them and an odd start: what decides the width of an access.
    shape = (layers, num_pages, page_nbytes + skew)
    host = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
    ids = torch.randperm(num_pages, generator=generator)[:25].to(id_dtype)
    device_pools = list(host.cuda()[:, :, skew:])
    out = torch.empty(layers, 25, page_nbytes, dtype=torch.uint8, device="cuda")
    ops.gather_pages_layers(device_pools, ids.to(ids_device), out)
    assert torch.equal(out.cpu(), host[:, ids.long(), skew:])
    assert torch.equal(ops.gather_pages(device_pools[1], ids.to(ids_device)).cpu(), host[1, ids.long(), skew:])

    target = torch.zeros(shape, dtype=torch.uint8, device="cuda")
    ops.scatter_pages_layers(list(target[:, :, skew:]), ids.to(ids_device), out)
    expected = torch.zeros(shape, dtype=torch.uint8)
    expected[:, ids.long(), skew:] = host[:, ids.long(), skew:]
    assert torch.equal(target.cpu(), expected)


@pytest.mark.parametrize("ids_device", ["cpu", "cuda"])
def test_bad_ids_change_nothing(ids_device):
    pool, pages = torch.zeros(5, 8, device="cuda"), torch.ones(3, 8, device="cuda")
    with pytest.raises(IndexError, match=r"page_ids\[1\] is 5, not in \[0, 5\)"):
        ops.scatter_pages(pool, torch.tensor([0, 5, 9], device=ids_device), pages)
    with pytest.raises(ValueError, match="page_ids has 3 twice"):
        ops.scatter_pages(pool, torch.tensor([3, 1, 3], device=ids_device), pages)
    with pytest.raises(ValueError, match="page_ids is on cuda:0 but pool on cpu"):
        ops.gather_pages(pool.cpu(), torch.tensor([0], device="cuda"))
    assert not pool.any()


def test_runs_on_the_current_stream():
    pool, ids = torch.zeros(64, 1 << 20, device="cuda"), torch.arange(64)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        pool.fill_(1)
        got = ops.gather_pages(pool, ids)
    stream.synchronize()
    assert bool((got == 1).all())
