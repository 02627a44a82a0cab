"""reshard_heads and strided gather/scatter against plain slicing: every pair of degrees, NHD and HND, errors."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torch_mooncake import ops


def bits(shape: list[int], seed: int, dtype: torch.dtype = torch.int16) -> torch.Tensor:
    info = torch.iinfo(dtype)
    return torch.randint(info.min, info.max, shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def heads_of(rank: int, tp: int, kv_heads: int) -> slice:
    if tp <= kv_heads:
        each = kv_heads // tp
        return slice(rank * each, (rank + 1) * each)
    head = rank // (tp // kv_heads)
    return slice(head, head + 1)


def degrees(kv_heads: int) -> list[int]:
    return [tp for tp in range(1, 2 * kv_heads + 1) if kv_heads % tp == 0 or tp % kv_heads == 0]


def shards(full: torch.Tensor, axis: int, tp: int) -> list[torch.Tensor]:
    kv_heads = full.shape[axis]
    index = [slice(None)] * full.dim()
    found = []
    for rank in range(tp):
        index[axis] = heads_of(rank, tp, kv_heads)
        found.append(full[tuple(index)].contiguous())
    return found


def check(full: torch.Tensor, a: int, b: int, source_axis: int, out_axis: int) -> None:
    """`full` holds all heads at source_axis."""
    kv_heads = full.shape[source_axis]
    expected = shards(full.movedim(source_axis, out_axis), out_axis, b)
    outs = [torch.zeros_like(t) for t in expected]
    sources = shards(full, source_axis, a)
    ops.reshard_heads(sources, outs, kv_heads=kv_heads, source_head_axis=source_axis, out_head_axis=out_axis)
    for out, right in zip(outs, expected, strict=True):
        assert torch.equal(out, right)


@pytest.mark.parametrize("kv_heads", [1, 2, 3, 4, 6, 8, 12])
def test_every_pair_of_degrees(kv_heads):
    full = bits([3, 2, 4, kv_heads, 5], kv_heads)  # [page, K/V, token, head, element]: an odd head dim
    for a, b in itertools.product(degrees(kv_heads), repeat=2):
        for out_axis in (3, 2):  # NHD, HND
            check(full, a, b, 3, out_axis)
        check(full.movedim(3, 2).contiguous(), a, b, 2, 3)


@st.composite
def cases(draw: st.DrawFn) -> tuple[torch.Tensor, int, int, int, int]:
    kv_heads = draw(st.integers(1, 64))
    tps = degrees(kv_heads)
    lead = draw(st.lists(st.integers(0, 3), max_size=3))
    tail = [draw(st.integers(1, 9)), draw(st.sampled_from([1, 3, 8, 17, 64]))]
    axis = draw(st.integers(0, len(lead) + 2))
    shape = [*lead, *tail]
    shape.insert(axis, kv_heads)
    dtype = draw(st.sampled_from([torch.uint8, torch.int16, torch.int32, torch.int64]))
    full = bits(shape, draw(st.integers(0, 99)), dtype)
    return full, draw(st.sampled_from(tps)), draw(st.sampled_from(tps)), axis, draw(st.integers(0, len(shape) - 1))


@settings(max_examples=80, deadline=None)
@given(cases())
def test_any_shape_and_axis(case):
    check(*case)


@pytest.mark.parametrize("layers", [1, 2, 128])
def test_layers_are_a_leading_dimension(layers):
    full = bits([layers, 2, 2, 4, 6, 3], layers)
    check(full, 2, 6, 4, 3)


@pytest.mark.parametrize(
    ("shape", "axis", "out_axis"),
    [
        ([520, 2, 16, 8, 128], 3, 2),
        ([430, 2, 8, 16, 160], 2, 3),
        ([1200, 2, 15, 8, 61], 3, 2),  # rows that are no whole lines
        ([2, 1 << 15, 8, 33], 2, 1),  # large pages
        ([8, 1 << 16, 40], 0, 1),
    ],
)
def test_large_copies_stream(shape, axis, out_axis):
    """Above the non-temporal threshold."""
    full = bits(shape, 1)
    check(full, 4, 2, axis, out_axis)
    check(full, 1, 8, axis, out_axis)


def test_some_ranks_of_strided_tensors():
    full = bits([5, 4, 8, 6], 3)  # [page, token, head, element]
    out_pool = torch.zeros(5, 8, 4, 2, 6, dtype=torch.int16)  # token and head swapped, K beside V
    sources = [full[:, :, 2:4], full[:, :, 4:6]]  # ranks 1 and 2 of 4, views
    outs = [out_pool[:, :4, :, 1][:, 2:4], out_pool[:, 4:, :, 1][:, :1]]
    ops.reshard_heads(
        sources,
        [outs[1]],
        kv_heads=8,
        source_head_axis=-2,
        out_head_axis=-3,
        source_ranks=[1, 2],
        source_tp=4,
        out_ranks=[4],
        out_tp=8,
    )
    assert torch.equal(outs[1], full[:, :, 4:5].movedim(2, 1))
    assert out_pool.count_nonzero() == outs[1].count_nonzero()
    ops.reshard_heads(
        sources, [outs[0]], kv_heads=8, source_head_axis=-2, out_head_axis=-3,
        source_ranks=[1, 2], source_tp=4, out_ranks=[1], out_tp=4,
    )  # fmt: skip
    assert torch.equal(outs[0], full[:, :, 2:4].movedim(2, 1))


def refused(match: str, *args, **kwargs) -> None:
    before = [t.clone() for t in args[1]]
    with pytest.raises(ValueError, match=match):
        ops.reshard_heads(*args, **kwargs)
    assert all(torch.equal(a, b) for a, b in zip(args[1], before, strict=True))


def test_what_does_not_fit_is_named():
    sources, out = [torch.ones(3, 2, 4), torch.ones(3, 2, 4)], torch.zeros(3, 4, 4)
    fit = {"kv_heads": 4, "source_head_axis": 1}
    ops.reshard_heads(sources, [torch.empty(3, 4, 4)], **fit)
    refused(r"outs\[0\] has shape \[3, 3, 4\], expected \[3, 4, 4\]", sources, [torch.zeros(3, 3, 4)], **fit)
    refused(r"sources\[1\] has shape \[3, 1, 4\]", [sources[0], torch.ones(3, 1, 4)], [out], **fit)
    refused(r"sources\[1\] and sources\[0\] differ in dtype", [sources[0], sources[1].half()], [out], **fit)
    refused("source_head_axis is 3", sources, [out], kv_heads=4, source_head_axis=3)
    refused("out_head_axis is -4", sources, [out], **fit, out_head_axis=-4)
    refused("kv_heads is 0", sources, [out], kv_heads=0, source_head_axis=1)
    refused("source_tp is 3, which neither divides the 4 heads", sources, [out], **fit, source_tp=3)
    refused("out_tp is 0", sources, [out], **fit, out_tp=0)
    refused(r"out_ranks has 2, not in \[0, 2\)", sources, [out], **fit, out_ranks=[2], out_tp=2)
    refused("source_ranks has 1 ranks for 2 sources", sources, [out], **fit, source_ranks=[0])
    refused("out_ranks has 2 ranks for 1 outs", sources, [out], **fit, out_ranks=[0, 1])
    refused("head 2 of out rank 0 is in none of the sources", sources[:1], [out], **fit, source_tp=2)
    refused(r"outs\[0\] is written, but its elements overlap", sources, [torch.zeros(1, 1, 4).expand(3, 4, 4)], **fit)
    both = torch.zeros(3, 4, 4)
    refused(r"outs\[0\] and outs\[1\] share memory", sources, [both, both], **fit, out_ranks=[0, 0], out_tp=1)
    refused("share memory", [both], [both], **fit)
    ops.reshard_heads(sources, [], **fit)  # nobody wants anything


def calls() -> tuple[list, list]:
    return [torch.rand(3, 4, 2, 5) for _ in range(2)], [torch.zeros(3, 1, 4, 5) for _ in range(4)]


def test_opcheck():
    sources, outs = calls()
    args = (sources, outs, 4, -2, -3, [0, 1], 2, [0, 1, 2, 3], 4)
    torch.library.opcheck(torch.ops.torch_mooncake.reshard_heads.default, args)


def test_compiles_without_graph_break():
    def step(sources: list[torch.Tensor], outs: list[torch.Tensor]) -> torch.Tensor:
        ops.reshard_heads([s * 2 for s in sources], outs, kv_heads=4, source_head_axis=-2, out_head_axis=-3)
        return torch.cat(outs, 1) + 1

    torch._dynamo.reset()
    sources, outs = calls()
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(sources, outs), torch.cat(sources, 2).movedim(2, 1) * 2 + 1)
    assert torch.equal(outs[3], sources[1][:, :, 1:].movedim(2, 1) * 2)


ORDERS = list(itertools.permutations(range(4)))


@settings(max_examples=120, deadline=None)
@given(
    st.sampled_from(ORDERS),
    st.lists(st.integers(1, 6), min_size=3, max_size=3),
    st.integers(1, 12),
    st.integers(0, 99),
    st.sampled_from([torch.int32, torch.int64]),
)
def test_pools_of_any_strides(order, page, num_pages, seed, id_dtype):
    """Gather and scatter through a permuted view of a pool, as its dimensions lie in any order: the pages' too."""
    physical = [[num_pages, *page][d] for d in order]
    inverse = [order.index(d) for d in range(4)]
    pool = bits(physical, seed).permute(inverse)
    assert list(pool.shape) == [num_pages, *page]
    ids = torch.randperm(num_pages, generator=torch.Generator().manual_seed(seed))[: (num_pages + 1) // 2]
    ids = ids.to(id_dtype)
    assert torch.equal(ops.gather_pages(pool, ids), pool[ids.long()])
    pages = bits([len(ids), *page], seed + 1)
    expected = pool.clone()
    expected[ids.long()] = pages
    ops.scatter_pages(pool, ids, pages)
    assert torch.equal(pool, expected)


def test_layers_of_different_strides():
    nhd, hnd = bits([6, 4, 3, 5], 1), bits([6, 3, 4, 5], 2).transpose(1, 2)
    ids = torch.tensor([5, 0, 2])
    out = torch.empty(2, 3, 4, 3, 5, dtype=torch.int16)
    ops.gather_pages_layers([nhd, hnd], ids, out)
    assert torch.equal(out[0], nhd[ids])
    assert torch.equal(out[1], hnd[ids])
    before = nhd.clone()
    with pytest.raises(IndexError, match=r"page_ids\[0\] is 6"):
        ops.scatter_pages_layers([nhd, hnd], torch.tensor([6, 0, 2]), out * 2)
    assert torch.equal(nhd, before)
