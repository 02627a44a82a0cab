"""gather_pages and scatter_pages against torch's own indexing: values, layouts, errors, opcheck, torch.compile."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torch_mooncake import ops

DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.uint8,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int64,
    torch.bool,
    torch.complex64,
]


def noise(shape: list[int], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Random bits, so that NaN payloads and denormals count too; compare with `same`."""
    itemsize = torch.empty(0, dtype=dtype).element_size()
    bits = torch.randint(0, 256, (math.prod(shape) * itemsize,), dtype=torch.uint8, generator=gen(seed))
    if dtype == torch.bool:
        bits &= 1
    return bits.view(dtype).reshape(shape)


def gen(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Bit for bit."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(flat_bytes(a), flat_bytes(b))


def flat_bytes(t: torch.Tensor) -> torch.Tensor:
    return t.clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)


def bits(t: torch.Tensor) -> torch.Tensor:
    """[pages, bytes of a page]: what index_select and index_copy_ understand for every dtype."""
    return flat_bytes(t).reshape(t.shape[0], -1)


@st.composite
def calls(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor, torch.dtype]:
    """A pool (perhaps a strided view), distinct ids of it."""
    dtype = draw(st.sampled_from(DTYPES))
    page = draw(st.lists(st.integers(1, 40), max_size=3))
    num_pages = draw(st.integers(1, 30))
    step = draw(st.sampled_from([1, 1, 2, 3]))
    offset = draw(st.integers(0, 3))
    pool = noise([offset + num_pages * step, *page], dtype, draw(st.integers(0, 1000)))[offset::step]
    assert pool.shape[0] == num_pages
    ids = draw(st.permutations(range(num_pages)))[: draw(st.integers(0, num_pages))]
    return pool, torch.tensor(ids, dtype=draw(st.sampled_from([torch.int32, torch.int64]))), dtype


@settings(max_examples=150, deadline=None)
@given(calls())
def test_gather_is_index_select(call):
    pool, ids, _ = call
    expected = bits(pool).index_select(0, ids)
    got = ops.gather_pages(pool, ids)
    assert got.dtype == pool.dtype
    assert got.shape == (len(ids), *pool.shape[1:])
    assert got.is_contiguous()
    if len(ids):
        assert torch.equal(bits(got), expected)

    wide = torch.zeros([2 * len(ids), *pool.shape[1:]], dtype=pool.dtype)
    out = wide[::2]  # strided places
    assert ops.gather_pages(pool, ids, out=out) is out
    assert same(out, got)
    assert not flat_bytes(wide[1::2]).any()


@settings(max_examples=150, deadline=None)
@given(calls())
def test_scatter_is_index_copy(call):
    pool, ids, dtype = call
    pages = noise([len(ids), *pool.shape[1:]], dtype, 7)
    expected = bits(pool)
    if len(ids):
        expected = expected.index_copy(0, ids.long(), bits(pages))
    assert ops.scatter_pages(pool, ids, pages) is None
    assert torch.equal(bits(pool), expected)


@pytest.mark.parametrize("page_nbytes", [4096, 16384 + 48, 1 << 20, (3 << 20) + 5])
def test_large_copies_go_through_every_path(page_nbytes):
    """Above the non-temporal threshold, with pages that are cut up for the threads."""
    num_pages = max(8, (40 << 20) // page_nbytes)
    pool = noise([num_pages, page_nbytes], torch.uint8)
    ids = torch.randperm(num_pages, generator=gen(1))
    pages = ops.gather_pages(pool, ids)
    assert torch.equal(pages, pool[ids])
    other = torch.zeros_like(pool)
    ops.scatter_pages(other, ids, pages)
    assert torch.equal(other, pool)


def test_repeated_ids_may_be_gathered_but_not_scattered():
    pool = torch.arange(8.0).reshape(4, 2)
    ids = torch.tensor([2, 0, 2])
    assert torch.equal(ops.gather_pages(pool, ids), pool[ids])
    before = pool.clone()
    with pytest.raises(ValueError, match="2 twice, at positions 0 and 2"):
        ops.scatter_pages(pool, ids, torch.zeros(3, 2))
    assert torch.equal(pool, before)


def test_layers():
    # K and V of one allocation, interleaved: [layers, pages, 2, ...]
    cache = noise([3, 10, 2, 4, 8], torch.bfloat16)
    pools = [cache[layer, :, kv] for layer in range(3) for kv in range(2)]
    ids = torch.tensor([9, 1, 4], dtype=torch.int32)
    out = torch.empty(6, 3, 4, 8, dtype=torch.bfloat16)
    ops.gather_pages_layers(pools, ids, out)
    assert all(same(out[i], pool[ids]) for i, pool in enumerate(pools))

    other = noise([3, 10, 2, 4, 8], torch.bfloat16, 1)
    expected = other.clone()
    expected[:, ids] = cache[:, ids]
    ops.scatter_pages_layers([other[layer, :, kv] for layer in range(3) for kv in range(2)], ids, out)
    assert same(other, expected)
    ops.gather_pages_layers([], ids, torch.empty(0, 3))  # no layers, no work


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("bad", [5, -1, 2**31 - 1, -(2**31)])
def test_bad_id_is_named_and_nothing_is_written(bad, dtype):
    pool, out = torch.zeros(5, 3), torch.ones(3, 3)
    ids = torch.tensor([0, bad, 1], dtype=dtype)
    with pytest.raises(IndexError, match=rf"page_ids\[1\] is {bad}, not in \[0, 5\)"):
        ops.gather_pages(pool, ids, out=out)
    with pytest.raises(IndexError, match=rf"page_ids\[1\] is {bad}"):
        ops.scatter_pages(pool, ids, out)
    with pytest.raises(IndexError, match=rf"page_ids\[1\] is {bad}"):
        ops.scatter_pages_layers([pool, torch.zeros(5, 3)], ids, torch.ones(2, 3, 3))
    assert not pool.any()
    assert out.all()


def refused(match: str, call, *args, **kwargs) -> None:
    with pytest.raises(ValueError, match=match):
        call(*args, **kwargs)


def test_every_wrong_argument_is_named():
    pool, ids = torch.zeros(4, 6), torch.tensor([1, 2])
    refused("page_ids has to be int32 or int64", ops.gather_pages, pool, ids.float())
    refused("page_ids has to be one-dimensional", ops.gather_pages, pool, ids[None])
    refused("pool has no dimension", ops.gather_pages, torch.tensor(1.0), ids)
    refused(r"out has shape \[3, 6\], expected \[2, 6\]", ops.gather_pages, pool, ids, out=torch.zeros(3, 6))
    refused("out and pool differ in dtype", ops.gather_pages, pool, ids, out=torch.zeros(2, 6).half())
    refused(r"pages has shape \[2, 5\]", ops.scatter_pages, pool, ids, torch.zeros(2, 5))
    refused("pages: each page has to be contiguous", ops.scatter_pages, pool, ids, torch.zeros(6, 2).t())
    refused("overlap", ops.scatter_pages, torch.zeros(1, 6).expand(4, 6), ids, torch.zeros(2, 6))
    refused("overlap", ops.gather_pages, pool, ids, out=torch.zeros(1, 6).expand(2, 6))
    refused("out and pool share memory", ops.gather_pages, pool, ids, out=pool[1:3])
    refused("first size is the layers'", ops.gather_pages_layers, [pool], ids, torch.zeros(2, 2, 6))
    refused(r"pools\[1\] has shape \[5, 6\]", ops.gather_pages_layers, [pool, torch.zeros(5, 6)], ids, zeros(2, 2, 6))
    refused(
        r"pools\[1\] and pools\[0\] differ in dtype", ops.gather_pages_layers, [pool, pool.int()], ids, zeros(2, 2, 6)
    )
    refused(r"pools\[0\] and pools\[1\] are the same", ops.scatter_pages_layers, [pool, pool], ids, zeros(2, 2, 6))


def zeros(*shape: int) -> torch.Tensor:
    return torch.zeros(shape)


def test_empty_and_strided_ids():
    pool = torch.arange(12.0).reshape(6, 2)
    assert ops.gather_pages(pool, torch.empty(0, dtype=torch.int32)).shape == (0, 2)
    assert ops.gather_pages(pool[:0], torch.empty(0, dtype=torch.int64)).shape == (0, 2)
    assert ops.gather_pages(torch.empty(6, 0), torch.tensor([5, 5])).shape == (2, 0)
    with pytest.raises(IndexError, match=r"not in \[0, 0\)"):
        ops.gather_pages(pool[:0], torch.tensor([0]))
    assert torch.equal(ops.gather_pages(pool, torch.arange(6)[::2]), pool[::2])
    ops.scatter_pages(pool, torch.empty(0, dtype=torch.int64), torch.empty(0, 2))
    assert torch.equal(pool, torch.arange(12.0).reshape(6, 2))


OPCHECKS = {
    "gather_pages.default": lambda: ((torch.rand(5, 3, 2), torch.tensor([4, 0, 0])), {}),
    "gather_pages.out": lambda: ((torch.rand(5, 3, 2), torch.tensor([4, 0])), {"out": torch.empty(2, 3, 2)}),
    "scatter_pages.default": lambda: ((torch.rand(5, 3), torch.tensor([4, 0]), torch.rand(2, 3)), {}),
    "gather_pages_layers.default": lambda: (
        ([torch.rand(5, 3), torch.rand(5, 3)], torch.tensor([4, 0]), torch.empty(2, 2, 3)),
        {},
    ),
    "scatter_pages_layers.default": lambda: (
        ([torch.rand(5, 3), torch.rand(5, 3)], torch.tensor([4, 0]), torch.rand(2, 2, 3)),
        {},
    ),
}


@pytest.mark.parametrize("name", OPCHECKS)
def test_opcheck(name):
    packet, overload = name.split(".")
    args, kwargs = OPCHECKS[name]()
    torch.library.opcheck(getattr(getattr(torch.ops.torch_mooncake, packet), overload), args, kwargs)


def step(pool: torch.Tensor, ids: torch.Tensor, pages: torch.Tensor) -> torch.Tensor:
    ops.scatter_pages(pool, ids, pages * 2)
    return ops.gather_pages(pool, ids.flip(0)) + 1


def test_compiles_without_graph_break():
    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager", dynamic=True)
    for n in (2, 3):
        pool, ids, pages = torch.rand(5, 4), torch.arange(n), torch.rand(n, 4)
        eager = pool.clone()
        expected = step(eager, ids, pages)
        assert torch.equal(compiled(pool, ids, pages), expected)
        assert torch.equal(pool, eager)


def test_meta_tensors_give_shapes():
    pool = torch.empty(5, 3, 2, device="meta", dtype=torch.float16)
    got = ops.gather_pages(pool, torch.empty(7, dtype=torch.int64, device="meta"))
    assert (got.shape, got.dtype, got.device.type) == ((7, 3, 2), torch.float16, "meta")
