"""Bytes moved run by run between any two caches leave the same logical content, whatever their layout and degree."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from kv_layout_cases import Sizes, attention_cases, mla_cases, plain, sglang, trtllm_v2, vllm

from torch_mooncake.errors import InvalidArgument, LayoutMismatch, OutOfBounds
from torch_mooncake.kv import GroupTensors, PagedKV, PlaneTensor, exchange


def move(ours: PagedKV, theirs: PagedKV, runs: exchange.Runs) -> None:
    """What a transfer does: nothing but these bytes."""
    sources = [storage.numpy() for storage in ours.storages]
    targets = [storage.numpy() for storage in theirs.storages]
    for index in range(len(runs)):
        here, there, nbytes = runs.our_offset[index], runs.their_offset[index], runs.nbytes[index]
        source = sources[runs.our_storage[index]][here : here + nbytes]
        target = targets[runs.their_storage[index]][there : there + nbytes]
        assert len(source) == len(target) == nbytes
        target[:] = source


@pytest.mark.parametrize("make", [attention_cases, mla_cases], ids=["attention", "mla"])
def test_every_layout_reaches_every_other(make):
    sizes = Sizes(heads=1 if make is mla_cases else 2)
    sources, targets = make(sizes), make(sizes)
    our_ids, their_ids = [3, 0, 1], [1, 2, 0]
    for source in sources:
        source.fill()
    for source, target in itertools.product(sources, targets):
        for storage in target.kv.storages:
            storage.zero_()
        runs = exchange.runs(source.kv.layout, our_ids, target.kv.layout, their_ids)
        move(source.kv, target.kv, runs)
        assert runs.total_nbytes == 3 * sizes.layers * source.kv.layout.page_nbytes
        for layer, k, token, head, d in source.elements():
            where = f"{source.name} to {target.name}: layer {layer}, {k}, token {token}, head {head}, {d}"
            for ours, theirs in zip(our_ids, their_ids, strict=True):
                expected = source.at(layer, k, ours, token, head, d)
                assert target.at(layer, k, theirs, token, head, d) == expected, where
            assert target.at(layer, k, 3, token, head, d) == 0, where  # the page that nobody named


def byte_order(case) -> list[object]:
    """The order of the elements of a page in memory, by layer; keys and values apart unless they interleave."""
    orders: list[object] = []
    s = case.sizes
    for layer in range(s.layers):
        found = sorted(
            (case.at(layer, k, 1, token, head, d).data_ptr(), k, token, head, d)
            for at, k, token, head, d in case.elements()
            if at == layer
        )
        kinds = [k for _, k, *_ in found]
        if kinds in (sorted(kinds), sorted(kinds, reverse=True)):
            found.sort(key=lambda item: item[1])
        orders.append([item[1:] for item in found])
    return orders


@pytest.mark.parametrize("make", [attention_cases, mla_cases], ids=["attention", "mla"])
@pytest.mark.parametrize("heads", [1, 2])
def test_fingerprints_are_equal_exactly_when_the_bytes_of_a_page_are_in_the_same_order(make, heads):
    if make is mla_cases and heads == 2:
        heads = 1
    cases = make(Sizes(heads=heads))
    orders = {case.name: byte_order(case) for case in cases}
    for one, two in itertools.combinations(cases, 2):
        same = one.kv.layout.fingerprint() == two.kv.layout.fingerprint()
        assert same == (orders[one.name] == orders[two.name]), f"{one.name} and {two.name}"
        assert same == (not one.kv.layout.differences(two.kv.layout))
        assert not one.kv.layout.incompatibilities(two.kv.layout)


@st.composite
def strided(draw, sizes: dict[str, int], layers: int) -> PagedKV:
    """One tensor a layer with the axes in any order, gaps after any of them, layers inside or outside of pages."""
    order = draw(st.permutations([*sizes, "L"]))
    size = sizes | {"L": layers}
    strides, step = {}, 1
    for letter in reversed(order):
        step *= 1 if draw(st.booleans()) else draw(st.integers(1, 2))
        strides[letter] = step
        step *= size[letter] + draw(st.integers(0, 1))
    start = draw(st.integers(0, 3))
    flat = torch.zeros(start + step, dtype=torch.int16)
    axes = "".join(draw(st.permutations([*sizes])))
    tensors = [
        flat.as_strided([size[a] for a in axes], [strides[a] for a in axes], start + layer * strides["L"])
        for layer in range(layers)
    ]
    return PagedKV(tensors, axes=axes)


@st.composite
def two_caches(draw):
    layers = draw(st.sampled_from([1, 2, 3, 7, 128]))
    heads = draw(st.integers(1, 64))
    budget = max(1, 6000 // (layers * heads))
    dim = draw(st.integers(1, min(9, budget)))
    tokens = draw(st.integers(1, max(1, min(5, budget // dim))))
    pages = draw(st.integers(1, 6))
    sizes = {"K": 2, "N": tokens, "H": heads, "D": dim}
    ours = draw(strided(sizes | {"P": pages}, layers))
    theirs = draw(strided(sizes | {"P": pages}, layers))
    their_ids = draw(st.lists(st.integers(0, pages - 1), unique=True, max_size=pages))
    our_ids = draw(st.lists(st.integers(0, pages - 1), min_size=len(their_ids), max_size=len(their_ids)))
    return ours, theirs, our_ids, their_ids


@settings(max_examples=60, deadline=None)
@given(two_caches())
def test_any_strides_reach_any_others(case):
    ours, theirs, our_ids, their_ids = case
    for (pool,) in ours.pools():
        pool.copy_(torch.randint(1, 30000, pool.shape, dtype=torch.int16))
    runs = exchange.runs(ours.layout, our_ids, theirs.layout, their_ids)
    move(ours, theirs, runs)
    rest = [page for page in range(theirs.layout.num_pages) if page not in their_ids]
    for (source,), (target,) in zip(ours.pools(), theirs.pools(), strict=True):
        assert torch.equal(target[their_ids], source[our_ids])
        assert target[rest].eq(0).all()
    assert runs.total_nbytes == len(our_ids) * ours.layout.num_layers * ours.layout.page_nbytes


@settings(max_examples=60, deadline=None)
@given(two_caches())
def test_segments_of_any_strides_are_the_bytes_of_the_pages(case):
    kv, _, ids, _ = case
    segments = kv.layout.segments(ids)
    named = np.zeros(kv.storages[0].numel(), dtype=np.int64)
    for offset, nbytes in zip(segments.offset, segments.nbytes, strict=True):
        named[offset : offset + nbytes] += 1
    kv.storages[0].zero_()
    for (pool,) in kv.pools():
        pool[ids] = -1  # all bits of the elements of these pages
    assert np.array_equal(named, (kv.storages[0].numpy() == 255).astype(np.int64))
    assert (segments.offset[1:] > segments.offset[:-1] + segments.nbytes[:-1]).all(), "two segments touch"


def test_runs_are_as_long_as_both_sides_allow():
    sizes = Sizes(layers=3, pages=8, tokens=4, heads=2, dim=8)
    page, heads_page = 2 * 4 * 2 * 8 * 4, 4 * 8 * 4
    outer, inner = plain("LPKNHD", sizes).kv.layout, plain("PLKNHD", sizes).kv.layout
    assert exchange.runs(outer, range(8), outer, range(8)).nbytes.tolist() == [3 * 8 * page]
    assert exchange.runs(outer, [2, 3, 5], outer, [4, 5, 6]).nbytes.tolist() == 3 * [2 * page, page]
    assert exchange.runs(inner, [5, 2, 3], inner, [6, 4, 5]).nbytes.tolist() == [3 * 2 * page, 3 * page]
    assert exchange.runs(inner, [2, 3], outer, [4, 5]).nbytes.tolist() == [page] * 6
    assert exchange.runs(inner, [2, 3], outer, [4, 5], layers=[1]).nbytes.tolist() == [page] * 2
    token = plain("LPNHKD", sizes).kv.layout
    assert set(exchange.runs(outer, [0], token, [0]).nbytes.tolist()) == {8 * 4}  # a key or value of a head
    halves = sglang("layer_first", sizes).kv.layout
    assert exchange.runs(halves, [0, 1], outer, [0, 1]).nbytes.tolist() == [page // 2] * 12
    hnd = vllm("LBHNC", sizes).kv.layout
    one = exchange.runs(hnd, [0], hnd, [0], our_heads=range(1, 2), their_heads=range(1))
    assert one.nbytes.tolist() == [2 * heads_page] * 3


def test_a_layout_packs_into_objects():
    """`packed` holds pages without gaps in the same order: their bytes as objects."""
    for case in attention_cases(Sizes()):
        packed = case.kv.layout.packed(4)
        assert packed.fingerprint() == case.kv.layout.fingerprint()
        assert packed.storage_nbytes == (4 * 2 * case.kv.layout.page_nbytes,)
        assert packed.segments(range(4)).nbytes.tolist() == list(packed.storage_nbytes)


def test_runs_stay_within_both_sides_mappings():
    one, two = (trtllm_v2(Sizes(), mapping=mapping).kv for mapping in (100, 60))
    runs = exchange.runs(one.layout, [0, 1, 2], two.layout, [1, 2, 3])
    for offset, size in ((runs.our_offset, 100), (runs.their_offset, 60)):
        assert (offset // size == (offset + runs.nbytes - 1) // size).all()
    assert runs.total_nbytes == 3 * 2 * one.layout.page_nbytes


def test_zero_pages_and_zero_layers_are_zero_runs():
    layout = plain("LPKNHD", Sizes()).kv.layout
    assert len(exchange.runs(layout, [], layout, [])) == 0
    assert len(exchange.runs(layout, [1], layout, [1], layers=[])) == 0
    assert exchange.runs(layout, [], layout, []).total_nbytes == 0


def test_what_does_not_match_is_refused():
    layout = plain("LPKNHD", Sizes()).kv.layout
    with pytest.raises(OutOfBounds, match=r"page 4 is not in 0\.\.3 \(position 1 of 2\)"):
        exchange.runs(layout, [0, 4], layout, [0, 1])
    with pytest.raises(OutOfBounds, match="page -1"):
        exchange.runs(layout, [0], layout, [-1])
    with pytest.raises(InvalidArgument, match="2 of our pages, but 1 of theirs"):
        exchange.runs(layout, [0, 1], layout, [1])
    with pytest.raises(InvalidArgument, match=r"layer 2 is not in 0\.\.1"):
        exchange.runs(layout, [0], layout, [0], layers=[2])
    with pytest.raises(OutOfBounds, match=r"heads 1\.\.2 are not in 0\.\.1"):
        exchange.runs(layout, [0], layout, [0], our_heads=range(1, 3), their_heads=range(2))
    for other, message in (
        (plain("LPKNHD", Sizes(tokens=8)), "plane k: N 4 here, 8 there"),
        (plain("LPKNHD", Sizes(heads=3)), "plane k: H 2 here, 3 there"),
        (plain("LPKNHD", Sizes(dim=4)), "plane k: D 3 here, 4 there"),
        (plain("LPKNHD", Sizes(dtype=torch.int32)), "plane k: dtype float32 here, int32 there"),
        (vllm("LBHNC", Sizes(heads=1), mla=True), "planes k, v here, kv there"),
    ):
        with pytest.raises(LayoutMismatch, match=message):
            exchange.runs(layout, [0], other.kv.layout, [0])


@pytest.mark.parametrize(
    ("other", "tp", "texts"),
    [
        (Sizes(), (1, 1), []),
        (Sizes(pages=9), (1, 1), []),
        (Sizes(tokens=8), (1, 1), ["page_size 4 here, 8 there"]),
        (Sizes(dim=5), (1, 1), ["head_dim 3 here, 5 there"]),
        (Sizes(dtype=torch.float16), (1, 1), ["dtype float32 here, float16 there"]),
        (Sizes(layers=3), (1, 1), ["num_layers 2 here, 3 there"]),
        (Sizes(heads=3), (1, 1), ["kv_heads 2 here, 3 there"]),
        (Sizes(heads=1), (1, 1), ["kv_heads 2 here, 1 there"]),
        (Sizes(heads=1), (1, 2), []),
        (Sizes(heads=1), (1, 4), []),
        (Sizes(heads=1), (1, 3), ["kv_heads 2 on each of 1 ranks here, 1 on each of 3 ranks there"]),
        (Sizes(heads=4), (2, 1), []),
        (Sizes(heads=4), (4, 2), []),
        (Sizes(heads=4), (2, 2), ["kv_heads 2 on each of 2 ranks here, 4 on each of 2 ranks there"]),
        (Sizes(tokens=2, dim=5), (1, 1), ["page_size 4 here, 2 there", "head_dim 3 here, 5 there"]),
    ],
)
def test_incompatibilities_are_named(other, tp, texts):
    ours, theirs = plain("LPKNHD", Sizes()).kv.layout, vllm("BHLNC", other).kv.layout
    assert ours.incompatibilities(theirs, *tp) == texts


def test_an_mla_cache_is_no_attention_cache():
    sizes = Sizes(heads=1)
    ours, theirs = vllm("LBHNC", sizes).kv.layout, vllm("LBHNC", sizes, mla=True).kv.layout
    assert ours.incompatibilities(theirs) == ["kind attention here, mla there"]
    assert ours.fingerprint() != theirs.fingerprint()
    assert not theirs.incompatibilities(theirs, 4, 2)  # the same on every rank


def holders(tp: int, heads: int) -> dict[int, list[int]]:
    """Which ranks hold each head, from the definition: ranks in order, heads in order, evenly."""
    found: dict[int, list[int]] = {head: [] for head in range(heads)}
    for rank in range(tp):
        for head in range(heads):
            if tp <= heads:
                if head // (heads // tp) == rank:
                    found[head].append(rank)
            elif rank // (tp // heads) == head:
                found[head].append(rank)
    return found


def degrees(heads: int, most: int = 16) -> list[int]:
    return [tp for tp in range(1, most + 1) if heads % tp == 0 or tp % heads == 0]


@pytest.mark.parametrize("heads", [1, 2, 3, 4, 6, 8, 12])
def test_each_head_of_each_rank_comes_from_one_rank_that_holds_it(heads):
    for ours, theirs in itertools.product(degrees(heads), degrees(heads)):
        here, there = holders(ours, heads), holders(theirs, heads)
        local = {tp: {r: sorted(h for h, of in held.items() if r in of) for r in range(tp)} for tp, held in
                 ((ours, here), (theirs, there))}  # fmt: skip
        fed: dict[tuple[int, int], int] = {}
        used: dict[int, int] = {}
        for our_rank, our_heads, their_rank, their_heads in exchange.head_map(ours, theirs, heads):
            assert len(our_heads) == len(their_heads) > 0
            for a, b in zip(our_heads, their_heads, strict=True):
                head = local[theirs][their_rank][b]
                assert local[ours][our_rank][a] == head
                assert (their_rank, b) not in fed
                fed[their_rank, b] = our_rank
                used[our_rank] = used.get(our_rank, 0) + 1
        assert len(fed) == sum(len(of) for of in there.values())
        for head, sources in here.items():  # what several ranks hold, they send in equal parts
            loads = [used.get(rank, 0) for rank in sources]
            if ours > heads:
                assert max(loads) - min(loads) <= 1, f"{ours} to {theirs}, head {head}"


@pytest.mark.parametrize("heads", [1, 3, 4, 6])
def test_the_models_heads_follow_from_both_sides(heads):
    """Whatever is taken for the number of heads, ranks that hold one head under it do so in truth."""
    for ours, theirs in itertools.product(degrees(heads), degrees(heads)):
        local = max(1, heads // ours), max(1, heads // theirs)
        total = exchange.total_heads(local[0], ours, local[1], theirs)
        assert total
        assert total % heads == 0
        for our_rank, our_heads, their_rank, their_heads in exchange.head_map(ours, theirs, total):
            truth = [exchange.heads_of_rank(our_rank, ours, heads), exchange.heads_of_rank(their_rank, theirs, heads)]
            assert [truth[0][h] for h in our_heads] == [truth[1][h] for h in their_heads]


def test_degrees_that_do_not_fit_are_refused():
    for ours, theirs in ((3, 1), (1, 3), (5, 4)):
        with pytest.raises(InvalidArgument, match="4 KV heads cannot be divided"):
            exchange.head_map(ours, theirs, 4)
    layout = plain("LPKNHD", Sizes(heads=4)).kv.layout
    with pytest.raises(InvalidArgument, match="4 KV heads cannot be divided between, or repeated on, 3 ranks"):
        layout.head_slice(0, 3)
    with pytest.raises(InvalidArgument, match=r"rank 2 is not in 0\.\.1"):
        layout.head_slice(2, 2)
    with pytest.raises(InvalidArgument, match="kv_heads is 8, group 'kv' holds 4"):
        layout.head_slice(0, 2, kv_heads=8)


ORDERS = ("LPKNHD", "PLKNHD", "LPHNKD", "KLPNHD", "LHPNKD")


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_any_degree_reaches_any_other(data):
    heads = data.draw(st.integers(1, 12), "heads")
    ours, theirs = (data.draw(st.sampled_from(degrees(heads, 12)), name) for name in ("ours", "theirs"))
    orders = [data.draw(st.sampled_from(ORDERS), f"order {side}") for side in range(2)]
    assume(ours * theirs <= 64)
    whole = plain("LPKNHD", Sizes(heads=heads))
    full = [pool for (pool,) in whole.kv.pools()]  # [pages, K, N, H, D]
    for pool in full:
        pool.copy_(torch.randn(pool.shape))
    sources = [plain(orders[0], Sizes(heads=max(1, heads // ours))) for _ in range(ours)]
    targets = [plain(orders[1], Sizes(heads=max(1, heads // theirs))) for _ in range(theirs)]
    for rank, source in enumerate(sources):
        held = exchange.heads_of_rank(rank, ours, heads)
        for (pool,), everything in zip(source.kv.pools(), full, strict=True):
            pool.copy_(everything[:, :, :, held.start : held.stop])
    for our_rank, our_heads, their_rank, their_heads in exchange.head_map(ours, theirs, heads):
        a, b = sources[our_rank].kv, targets[their_rank].kv
        move(a, b, exchange.runs(a.layout, [0, 1, 3], b.layout, [2, 3, 1], None, our_heads, their_heads))
    for rank, target in enumerate(targets):
        held = exchange.heads_of_rank(rank, theirs, heads)
        for (pool,), everything in zip(target.kv.pools(), full, strict=True):
            assert torch.equal(pool[[2, 3, 1]], everything[[0, 1, 3]][:, :, :, held.start : held.stop])
            assert pool[0].eq(0).all()


@pytest.mark.parametrize("tp", degrees(6, 12))
@pytest.mark.parametrize("order", ORDERS)
def test_a_head_slice_names_the_ranks_heads(order, tp):
    whole = plain(order, Sizes(heads=6))
    whole.fill()
    for rank in range(tp):
        held = exchange.heads_of_rank(rank, tp, 6)
        layout = whole.kv.layout.head_slice(rank, tp, kv_heads=6)
        assert layout.only.kv_heads == len(held)
        part = plain(order, Sizes(heads=len(held)))
        assert layout.fingerprint() == part.kv.layout.fingerprint()
        move(whole.kv, part.kv, exchange.runs(layout, range(4), part.kv.layout, range(4)))
        for layer, k, token, head, d in part.elements():
            assert part.at(layer, k, 2, token, head, d) == whole.at(layer, k, 2, token, held[head], d)


def test_groups_go_one_by_one():
    state, other = torch.arange(6 * 10).view(6, 10).double(), torch.zeros(9, 10).double()
    attention = [plain(order, Sizes()).kv.layers for order in ("LPKNHD", "PLKNHD")]
    kvs = [
        PagedKV.from_groups(
            [
                GroupTensors({index: [PlaneTensor(layer)] for index, layer in enumerate(layers)}, "full"),
                GroupTensors({5: [PlaneTensor(states, "PD", "state")]}, "mamba", "state"),
            ]
        )
        for layers, states in zip(attention, (state, other), strict=True)
    ]
    runs = exchange.runs(kvs[0].layout, [5, 0], kvs[1].layout, [8, 3], group=1)
    move(*kvs, runs)
    assert torch.equal(other[[8, 3]], state[[5, 0]])
    assert other.count_nonzero() == state[[5, 0]].count_nonzero()
    assert kvs[0].layout.num_layers == 3


def test_a_large_exchange():
    """32 layers of 2048 pages: the count says that nothing was joined or lost at this size either."""
    sizes = {"L": 32, "P": 2048, "K": 2, "N": 16, "H": 8, "D": 1}
    layers = torch.zeros([sizes[a] for a in "LPKNHD"], dtype=torch.int8).unbind(0)
    other = torch.zeros([sizes[a] for a in "PLKNHD"], dtype=torch.int8).unbind(1)
    ids = np.random.default_rng(0).permutation(2048)
    runs = exchange.runs(PagedKV(layers).layout, ids, PagedKV(other).layout, ids[::-1])
    assert len(runs) == 32 * 2048
    assert math.prod(sizes.values()) == runs.total_nbytes
