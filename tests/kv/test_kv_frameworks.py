"""What frameworks hand out becomes a layout that names exactly the bytes their tensors' indices name."""

from types import SimpleNamespace

import pytest
import torch
from kv_layout_cases import (
    SGLANG_ORDERS,
    VLLM_ORDERS,
    Sizes,
    attention_cases,
    mla_cases,
    sglang,
    trtllm_v2,
    vllm,
)

from torch_mooncake.errors import InvalidArgument, OutOfBounds, Unsupported
from torch_mooncake.kv import GroupTensors, PagedKV, PlaneTensor

ATTENTION = {case.name: case for case in attention_cases(Sizes())}
MLA = {case.name: case for case in mla_cases(Sizes(heads=1))}
CASES = ATTENTION | MLA


def addresses(kv: PagedKV, segments) -> list[range]:
    bases = [storage.data_ptr() for storage in kv.storages]
    return [
        range(bases[storage] + offset, bases[storage] + offset + nbytes)
        for storage, offset, nbytes in zip(*(array.tolist() for array in segments), strict=True)
    ]


def check_segments(case, pages, layers=None):
    found = addresses(case.kv, case.kv.layout.segments(pages, layers))
    named = [byte for span in found for byte in span]
    assert len(named) == len(set(named))
    assert set(named) == case.bytes_of(pages, layers)
    return found


@pytest.mark.parametrize("name", CASES)
def test_segments_are_the_bytes_that_the_tensors_indices_name(name):
    case = CASES[name]
    for pages in ([2], [3, 0], [0, 1, 2, 3], [1, 3, 1, 1], []):
        found = check_segments(case, pages)
        if "mapped" not in name:
            assert all(a.stop != b.start for a in found for b in found), "two segments touch"
    check_segments(case, [1, 2], layers=[1])
    check_segments(case, [1, 2], layers=[])


@pytest.mark.parametrize("name", CASES)
def test_views_by_page_are_the_same_elements(name):
    case = CASES[name]
    case.fill()
    (group,) = case.kv.layout.groups
    for (_layer, planes), pools in zip(group.layers, case.kv.pools(), strict=True):
        for plane, pool in zip(planes, pools, strict=True):
            assert pool.shape == (group.num_pages, *plane.shape)
    for layer, k, token, head, d in case.elements():
        planes, pools = group.layers[layer][1], case.kv.pools()[layer]
        index = {"K": k, "N": token, "H": head, "D": d}
        roles = [plane.role for plane in planes]
        which = roles.index("kv") if "kv" in roles else roles.index("kv"[k])
        place = tuple(index[letter] for letter in planes[which].axes)
        for page in range(group.num_pages):
            assert pools[which][(page, *place)] == case.at(layer, k, page, token, head, d)


@pytest.mark.parametrize("name", CASES)
def test_numbers_are_the_caches(name):
    layout, s = CASES[name].kv.layout, CASES[name].sizes
    group = layout.only
    assert (group.page_size, group.kv_heads, group.head_dim, group.num_pages) == (s.tokens, s.heads, s.dim, s.pages)
    assert group.kind == ("mla" if CASES[name].mla else "attention")
    assert group.replicated == CASES[name].mla
    assert layout.num_layers == s.layers
    assert layout.page_nbytes == (1 if CASES[name].mla else 2) * s.tokens * s.heads * s.dim * 4


@pytest.mark.parametrize("name", CASES)
def test_ids_that_are_no_page_are_refused(name):
    layout = CASES[name].kv.layout
    with pytest.raises(OutOfBounds, match=r"page -1 is not in 0\.\.3 \(position 1 of 3\)"):
        layout.segments([0, -1, 2])
    with pytest.raises(OutOfBounds, match=r"page 4 .* \(position 0 of 1\)"):
        layout.segments([4])
    with pytest.raises(OutOfBounds, match="page 9223372036854775807"):
        layout.segments([2**63 - 1])
    with pytest.raises(InvalidArgument, match=r"layer 2 is not in 0\.\.1"):
        layout.segments([0], layers=[2])


def test_the_number_of_segments_is_what_the_frameworks_promise():
    """A page of 2 layers: pieces as SGLang counts them, and blocks of vLLM's orders."""
    sizes = Sizes(pages=6)
    pieces = {order: len(sglang(order, sizes).kv.layout.segments([2, 4]).offset) for order in SGLANG_ORDERS}
    assert pieces == {"layer_first": 8, "page_first": 4, "page_first_direct": 4, "page_head": 4}
    blocks = {order: len(vllm(order, sizes).kv.layout.segments([2, 4]).offset) for order in VLLM_ORDERS}
    assert blocks == {"LBHNC": 4, "LBNHC": 4, "LHBNC": 8, "BLHNC": 2, "BLNHC": 2, "BHLNC": 2}
    assert len(vllm("LBHNC", sizes).kv.layout.segments(range(6)).offset) == 1  # all of it
    assert len(vllm("BLHNC", sizes).kv.layout.segments(range(6), layers=[1]).offset) == 6


def test_segments_stay_within_mappings():
    case = trtllm_v2(Sizes(), mapping=100)
    (start,) = (storage.data_ptr() for storage in case.kv.storages)
    for span in check_segments(case, [0, 1, 3]):
        assert (span.start - start) // 100 == (span.stop - 1 - start) // 100
    assert len(case.kv.layout.segments([0, 1, 2, 3]).offset) == -(-case.keep.numel() // 100)


def test_a_mapping_counts_from_its_reservations_start():
    case = trtllm_v2(Sizes(), mapping=100)
    block = 2 * 4 * 3 * 4
    layout = SimpleNamespace(
        tokens_per_block=4,
        dtype=torch.float32,
        gpu_pool_mapping_bytes=100,
        groups=(
            SimpleNamespace(
                layer_group_id=7,
                layer_ids=(5,),
                window_size=128,
                regions=(
                    SimpleNamespace(
                        base=case.keep.data_ptr() + block,
                        size=2 * block,
                        stride=4 * block,
                        num_slots=3,
                        buffers=(
                            SimpleNamespace(layer_id=5, role="key", expansion=1),
                            SimpleNamespace(layer_id=5, role="value", expansion=1),
                        ),
                    ),
                ),
                replicated_regions=(),
            ),
        ),
    )
    start = case.keep.data_ptr() - 30
    kv = PagedKV.from_trtllm_v2(layout, kv_heads=2, device="cpu", mapping_origin=lambda address: start)
    assert (kv.layout.only.window, kv.layout.only.layer_ids) == (128, (5,))
    spans = addresses(kv, kv.layout.segments([0, 2]))
    assert sum(map(len, spans)) == 4 * block
    for span in spans:
        assert (span.start - start) // 100 == (span.stop - 1 - start) // 100


def test_groups_of_a_hybrid_model_have_their_own_ids_and_share_storages():
    """Full attention, sliding window and Mamba layers whose pages lie in one buffer, as vLLM's hybrid models have."""
    raw = torch.zeros(2, 8, 1024, dtype=torch.uint8)  # two tensors of 8 blocks, each used by several layers
    attention = raw.view(torch.float32).view(2, 8, 2, 16, 8)  # [B, H, N, C]
    conv = raw[1][:, :256]
    ssm = raw[1][:, 256:768].view(torch.float32)
    caches = {
        "model.layers.0.attn": attention[0],
        "model.layers.1.attn": attention[1],
        "model.layers.2.mixer": (conv, ssm),
    }
    kv = PagedKV.from_vllm(
        caches,
        groups=[["model.layers.0.attn"], ["model.layers.1.attn"], ["model.layers.2.mixer"]],
        windows={"model.layers.1.attn": 64},
    )
    assert [(g.kind, g.window, g.page_size, g.layer_ids) for g in kv.layout.groups] == [
        ("attention", None, 16, (0,)),
        ("attention", 64, 16, (1,)),
        ("state", None, 0, (2,)),
    ]
    assert len(kv.storages) == 1
    assert kv.storages[0].data_ptr() == raw.data_ptr()
    (span,) = addresses(kv, kv.layout.segments([3], group=2))
    assert (span.start - raw.data_ptr(), len(span)) == (8192 + 3 * 1024, 768)
    assert addresses(kv, kv.layout.segments([1], group=1)) == [range(raw.data_ptr() + 9216, raw.data_ptr() + 10240)]
    with pytest.raises(Unsupported, match="3 groups"):
        _ = kv.layout.page_size
    with pytest.raises(InvalidArgument, match=r"group 3 is not in 0\.\.2"):
        kv.layout.segments([0], group=3)


def test_states_stay_whole_when_heads_are_sliced():
    attention, state = torch.zeros(4, 2, 8, 6, 4), torch.zeros(3, 5, 7)
    kv = PagedKV.from_groups(
        [
            GroupTensors({0: [PlaneTensor(attention)]}),
            GroupTensors({1: [PlaneTensor(state.flatten(1), "PD", "state")]}, "mamba", "state"),
        ]
    )
    narrow = kv.layout.head_slice(1, 3)
    assert narrow.groups[0].kv_heads == 2
    assert narrow.groups[1] == kv.layout.groups[1]
    assert narrow.storage_nbytes == kv.layout.storage_nbytes


def test_lmdeploys_quantised_pool():
    k, scale = ((4, 2, 6), torch.int8), ((4, 2, 2), torch.float16)
    pool = torch.arange(3 * 5 * 1024).to(torch.uint8).view(3, 5, 1024)
    kv = PagedKV.from_lmdeploy(pool, entries={"k": k, "v": k, "k_scale": scale, "v_scale": scale}, layer_ids=[4, 5, 6])
    assert kv.layout.only.dtype == "int8"
    assert kv.layout.page_axes == "k:NHD k_scale:NHD[2] float16 v:NHD v_scale:NHD[2] float16"
    for layer, pools in zip(range(3), kv.pools(), strict=True):
        for entry, view in enumerate(pools):
            nbytes = view[0].numel() * view.element_size()
            expected = pool[layer, :, 256 * entry : 256 * entry + nbytes].contiguous()
            assert torch.equal(view.contiguous().view(torch.uint8).flatten(1), expected)
    assert kv.layout.segments([1], layers=[5]).nbytes.tolist() == [48, 48, 32, 32]
    assert kv.layout.head_slice(0, 2).groups[0].kv_heads == 1
    with pytest.raises(InvalidArgument, match="blocks of 512 bytes, the pool's have 1024"):
        PagedKV.from_lmdeploy(pool, entries={"k": k, "v": k})
    with pytest.raises(InvalidArgument, match="ends at byte 1200"):
        PagedKV.from_lmdeploy(pool, entries={"k": ((4, 50, 6), torch.int8)})
    with pytest.raises(InvalidArgument, match="a packed pool is uint8"):
        PagedKV.from_lmdeploy(pool.view(torch.int8), entries={"k": k})


def test_trtllms_replicated_regions_and_other_roles():
    pool = torch.zeros(6, 4 * 96 + 32 + 64, dtype=torch.uint8)

    def region(offset, size, buffers):
        refs = tuple(SimpleNamespace(layer_id=layer, role=role, expansion=1) for layer, role in buffers)
        base, stride = pool.data_ptr() + offset, pool.shape[1]
        return SimpleNamespace(base=base, size=size, stride=stride, num_slots=6, buffers=refs)

    group = SimpleNamespace(
        layer_group_id=2,
        layer_ids=(0, 3),
        window_size=None,
        regions=(
            region(0, 4 * 96, [(0, "key"), (0, "value"), (3, "key"), (3, "value")]),
            region(384, 32, [(0, "key_block_scale"), (3, "key_block_scale")]),
        ),
        replicated_regions=(region(416, 64, [(0, "index_key"), (3, "index_key")]),),
    )
    layout = SimpleNamespace(tokens_per_block=4, groups=(group,), dtype=torch.float16)
    kv = PagedKV.from_trtllm_v2(layout, kv_heads=2, device="cpu")
    assert [(g.name, g.kind, g.replicated) for g in kv.layout.groups] == [
        ("group2", "attention", False),
        ("group2.replicated", "state", True),
    ]
    assert kv.layout.groups[0].page_order(0) == "k:HND key_block_scale:D[16] uint8 v:HND"
    assert kv.layout.segments([1], layers=[3]).nbytes.tolist() == [192, 16]
    assert kv.layout.segments([1], group=1).nbytes.tolist() == [64]
    with pytest.raises(Unsupported, match="'key_block_scale' has no head axis"):
        kv.layout.head_slice(0, 2)
    group.regions[0].buffers[0].expansion = 2
    with pytest.raises(Unsupported, match="page expansion"):
        PagedKV.from_trtllm_v2(layout, kv_heads=2, device="cpu")


def test_what_is_not_there_yet_says_so():
    with pytest.raises(Unsupported, match="page_unified"):
        PagedKV.from_sglang(torch.zeros(2, 1, 8, 1, 4), layout="page_unified", page_size=4)


def test_trtllm_memory_that_is_not_aligned_is_refused():
    case = trtllm_v2(Sizes())
    region = SimpleNamespace(
        base=case.keep.data_ptr() + 2,
        size=2 * 96,
        stride=200,
        num_slots=2,
        buffers=tuple(SimpleNamespace(layer_id=0, role=role, expansion=1) for role in ("key", "value")),
    )
    group = SimpleNamespace(layer_group_id=0, layer_ids=(0,), window_size=None, regions=(region,))
    layout = SimpleNamespace(tokens_per_block=4, groups=(group,), dtype=torch.float32)
    assert PagedKV.from_trtllm_v2(layout, kv_heads=2, device="cpu").layout.num_pages == 2  # its own storage: aligned
    region.stride = 202
    with pytest.raises(InvalidArgument, match="layer 0: key is not at multiples of 4 bytes"):
        PagedKV.from_trtllm_v2(layout, kv_heads=2, device="cpu")
    group.layer_ids = (0, 1)
    region.stride = 200
    with pytest.raises(InvalidArgument, match=r"regions have layers \[0\], the group \[0, 1\]"):
        PagedKV.from_trtllm_v2(layout, kv_heads=2, device="cpu")


def test_storages_within_each_other_are_one():
    whole = torch.zeros(4, 2, 2, 4, 2, 8)
    half = torch.from_numpy(whole.numpy()[:, 1])  # a storage of its own over the same memory
    kv = PagedKV([whole[:, 0], half])
    assert len(kv.storages) == 1
    assert [plane.storage for _, (plane,) in kv.layout.only.layers] == [0, 0]
    flat = torch.zeros(3000, dtype=torch.uint8).numpy()
    parts = [torch.from_numpy(flat[:2000]).view(2, 1000), torch.from_numpy(flat[1000:]).view(2, 1000)]
    with pytest.raises(Unsupported, match="storages overlap"):
        PagedKV.from_groups([GroupTensors({i: [PlaneTensor(p, "PD", "s")] for i, p in enumerate(parts)}, kind="state")])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: PagedKV.from_vllm({}), "at least one layer"),
        (lambda: PagedKV.from_vllm({"model.layers.0.attn": torch.zeros(2, 1, 4, 7)}), "not a key and a value"),
        (lambda: PagedKV.from_vllm({"a.0": torch.zeros(2, 2, 4, 6)}, mla=True), "one head, not 2"),
        (lambda: PagedKV.from_vllm({"attn": torch.zeros(2, 1, 4, 6)}), "does not have one number"),
        (lambda: PagedKV.from_vllm({"a.1": torch.zeros(2, 1, 4, 6), "b.1": torch.zeros(2, 1, 4, 6)}), "one number"),
        (lambda: PagedKV.from_vllm({"a.1": torch.zeros(2, 1, 4, 6)}, groups=[[]]), "do not name every layer"),
        (lambda: PagedKV.from_vllm({"a.1": torch.zeros(2, 8, 4).transpose(1, 2)}), "not contiguous"),
        (lambda: PagedKV.from_sglang(torch.zeros(2, 1, 8, 1, 4), layout="paged"), "is none of"),
        (lambda: PagedKV.from_sglang(torch.zeros(2, 1, 8, 1, 4)), "page_size None"),
        (lambda: PagedKV.from_sglang(torch.zeros(2, 1, 8, 1, 4), page_size=3), "does not divide the pool's 8"),
        (lambda: PagedKV.from_sglang(torch.zeros(1, 8, 1, 4), page_size=4), "5 dimensions, not 4"),
        (lambda: PagedKV.from_sglang([torch.zeros(8, 1, 4)], layout="page_first", page_size=4), "'layer_first'"),
        (lambda: PagedKV.from_sglang(torch.zeros(2, 2, 2, 4, 1, 3), layout="page_head", page_size=5), "page_size is 5"),
        (lambda: PagedKV.from_trtllm_v1(torch.zeros(2, 1, 3, 8), kv_heads=1, page_size=4), "1 or 2"),
        (lambda: PagedKV.from_trtllm_v1(torch.zeros(2, 1, 2, 8), kv_heads=3, page_size=4), "not 3 heads of 4"),
        (lambda: PagedKV.from_trtllm_v1(torch.zeros(2, 1, 2, 8), kv_heads=1, page_size=4, order="DHN"), "neither"),
        (lambda: PagedKV([torch.zeros(2, 2, 4, 1, 6).expand(2, 2, 4, 3, 6)]), "overlap"),
        (lambda: PagedKV([torch.zeros(1, 2, 4, 1, 6).expand(5, 2, 4, 1, 6)]), "overlap"),
    ],
)
def test_what_does_not_fit_is_refused(make, message):
    with pytest.raises(InvalidArgument, match=message):
        make()
