"""copy_pages against indexing: layouts, layers, one pool, ids, errors, opcheck, torch.compile."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torch_mooncake import ops

ORDERS = list(itertools.permutations(range(4)))


def pool_of(order: tuple[int, ...], shape: list[int], seed: int) -> torch.Tensor:
    """A tensor of `shape` whose dimensions lie in memory in `order`."""
    generator = torch.Generator().manual_seed(seed)
    physical = torch.randint(-(1 << 15), 1 << 15, [shape[d] for d in order], dtype=torch.int16, generator=generator)
    return physical.permute([order.index(d) for d in range(4)])


@st.composite
def transfers(draw: st.DrawFn):
    page = draw(st.lists(st.integers(1, 5), min_size=3, max_size=3))
    src_pages, dst_pages = draw(st.integers(1, 9)), draw(st.integers(1, 9))
    layers = draw(st.integers(1, 3))
    src = [pool_of(draw(st.sampled_from(ORDERS)), [src_pages, *page], layer) for layer in range(layers)]
    dst = [pool_of(draw(st.sampled_from(ORDERS)), [dst_pages, *page], 10 + layer) for layer in range(layers)]
    n = draw(st.integers(0, dst_pages))
    dst_ids = draw(st.permutations(range(dst_pages)))[:n]
    src_ids = draw(st.lists(st.integers(0, src_pages - 1), min_size=n, max_size=n))
    types = [draw(st.sampled_from([torch.int32, torch.int64])) for _ in range(2)]
    return src, torch.tensor(src_ids, dtype=types[0]), dst, torch.tensor(dst_ids, dtype=types[1])


@settings(max_examples=150, deadline=None)
@given(transfers())
def test_is_an_indexed_assignment(transfer):
    src, src_ids, dst, dst_ids = transfer
    expected = [d.clone() for d in dst]
    for layer, pool in enumerate(src):
        expected[layer][dst_ids.long()] = pool[src_ids.long()]
    ops.copy_pages(src, src_ids, dst, dst_ids)
    assert all(torch.equal(a, b) for a, b in zip(dst, expected, strict=True))


@pytest.mark.parametrize("layers", [1, 128])
@pytest.mark.parametrize("head_dim", [7, 64])
def test_many_layers_from_one_layout_to_the_other(layers, head_dim):
    """Layers that share a page (page-first) to layers of their own (layer-first), NHD to HND."""
    generator = torch.Generator().manual_seed(1)
    page_first = torch.randn(6, layers, 4, 3, head_dim, generator=generator)
    layer_first = torch.zeros(layers, 8, 3, 4, head_dim)
    src_ids, dst_ids = torch.tensor([5, 0, 3]), torch.tensor([7, 1, 2])
    ops.copy_pages(list(page_first.unbind(1)), src_ids, list(layer_first.transpose(2, 3)), dst_ids)
    assert torch.equal(layer_first[:, dst_ids], page_first[src_ids].permute(1, 0, 3, 2, 4))
    assert not layer_first[:, [0, 3, 4, 5, 6]].any()


def test_large_copies_stream():
    src = torch.randn(200, 16, 8, 2, 128).transpose(2, 3)
    dst = torch.zeros(300, 16, 2, 8, 128)
    ids = torch.randperm(200)
    ops.copy_pages([src], ids, [dst], torch.arange(99, 299))
    assert torch.equal(dst[99:299], src[ids])
    assert not dst[:99].any()


def test_inside_one_pool():
    pool = torch.arange(12.0).reshape(6, 2)
    expected = pool.clone()
    expected[[4, 5]] = pool[[1, 1]]
    ops.copy_pages([pool], torch.tensor([1, 1]), [pool], torch.tensor([4, 5]))  # a fork of a prompt
    assert torch.equal(pool, expected)
    with pytest.raises(ValueError, match=r"dst_ids\[1\] is 1, which is in src_ids too"):
        ops.copy_pages([pool], torch.tensor([1, 2]), [pool], torch.tensor([3, 1]))
    assert torch.equal(pool, expected)


def test_ids_are_checked_before_anything_is_written():
    src, dst = torch.ones(3, 2), torch.zeros(4, 2)

    def fails(kind: type[Exception], match: str, src_ids: list[int], dst_ids: list[int]) -> None:
        with pytest.raises(kind, match=match):
            ops.copy_pages([src], torch.tensor(src_ids), [dst], torch.tensor(dst_ids))
        assert not dst.any()

    fails(IndexError, r"src_ids\[1\] is 3, not in \[0, 3\)", [0, 3], [0, 1])
    fails(IndexError, r"dst_ids\[0\] is -1, not in \[0, 4\)", [0, 1], [-1, 1])
    fails(ValueError, "dst_ids has 2 twice, at positions 0 and 1", [0, 1], [2, 2])
    fails(ValueError, "src_ids has 1 ids, dst_ids 2", [0], [2, 3])


def test_what_does_not_fit_is_named():
    src, dst, ids = torch.ones(3, 2, 2), torch.zeros(4, 2, 2), torch.tensor([0])

    def refused(match: str, *args) -> None:
        with pytest.raises(ValueError, match=match):
            ops.copy_pages(*args)

    refused("src has 1 layers, dst 2", [src], ids, [dst, dst], ids)
    refused(r"dst\[0\] has shape \[4, 2, 3\], expected \[4, 2, 2\]", [src], ids, [torch.zeros(4, 2, 3)], ids)
    refused(r"src\[1\] has shape \[2, 2, 2\]", [src, src[:2]], ids, [dst, dst.clone()], ids)
    refused(r"dst\[0\] and src\[0\] differ in dtype", [src], ids, [dst.int()], ids)
    refused("src_ids has to be int32 or int64", [src], ids.float(), [dst], ids)
    refused("dst_ids has to be one-dimensional", [src], ids, [dst], ids[None])
    refused(r"dst\[0\] and dst\[1\] are the same memory", [src, src], ids, [dst, dst], ids)
    refused(r"src\[1\] and dst\[0\] share memory", [src, dst[:3]], ids, [dst, dst.clone()], ids)
    refused("overlap", [src], ids, [torch.zeros(1, 2, 2).expand(4, 2, 2)], ids)
    refused(r"src\[0\] has no dimension", [torch.tensor(1.0)], ids, [dst], ids)
    wide = torch.zeros([2] * 14).permute(12, *range(0, 12, 2), *range(1, 12, 2), 13)
    refused("dimensions that neither side has densely", [wide], ids, [torch.zeros([2] * 14)], ids)
    ops.copy_pages([], ids, [], ids)  # no layers, no work
    assert not dst.any()


def test_empty_and_strided_ids():
    src, dst = torch.ones(6, 2), torch.zeros(6, 2)
    none = torch.empty(0, dtype=torch.int32)
    ops.copy_pages([src], none, [dst], none)
    ops.copy_pages([src[:0]], none, [dst], none)
    assert not dst.any()
    with pytest.raises(IndexError, match=r"src_ids\[0\] is 0, not in \[0, 0\)"):
        ops.copy_pages([src[:0]], torch.tensor([0]), [dst], torch.tensor([0]))
    ops.copy_pages([src], torch.arange(6)[::3], [dst], torch.arange(6)[1::2][:2])
    assert dst[[1, 3]].all()
    assert not dst[[0, 2, 4, 5]].any()


def test_opcheck():
    args = ([torch.rand(5, 3)], torch.tensor([4, 0, 4]), [torch.rand(6, 3)], torch.tensor([1, 0, 5]))
    torch.library.opcheck(torch.ops.torch_mooncake.copy_pages.default, args)


def test_compiles_without_graph_break():
    def step(src: torch.Tensor, ids: torch.Tensor, dst: torch.Tensor) -> torch.Tensor:
        ops.copy_pages([src * 2], ids, [dst], ids.flip(0))
        return dst + 1

    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager", dynamic=True)
    for n in (2, 3):
        src, ids, dst = torch.rand(5, 4), torch.arange(n), torch.zeros(5, 4)
        expected = dst.clone()
        expected[ids.flip(0)] = src[ids] * 2
        assert torch.equal(compiled(src, ids, dst), expected + 1)
        assert torch.equal(dst, expected)
