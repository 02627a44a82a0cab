"""Layouts are read off real tensors, and pages survive a gather and a scatter."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.msgpack import decode as unpack
from msgspec.msgpack import encode as pack

from torch_mooncake.errors import InvalidArgument, OutOfBounds, Unsupported
from torch_mooncake.kv import GroupTensors, PagedKV, PagedKVLayout, PlaneTensor

LAYERS, PAGES, SIZE, HEADS, DIM = 3, 10, 4, 2, 8


def layer_first() -> list[torch.Tensor]:
    return list(torch.zeros(LAYERS, PAGES, 2, SIZE, HEADS, DIM).unbind(0))


def page_first() -> list[torch.Tensor]:
    return list(torch.zeros(PAGES, LAYERS, 2, SIZE, HEADS, DIM).unbind(1))


def separate() -> list[torch.Tensor]:
    return [torch.zeros(PAGES, 2, SIZE, HEADS, DIM) for _ in range(LAYERS)]


@pytest.mark.parametrize("make", [layer_first, page_first, separate])
def test_offsets_name_the_bytes_of_each_page(make):
    layers = make()
    kv = PagedKV(layers)
    layout = kv.layout
    for layer in range(LAYERS):
        for page in range(PAGES):
            layers[layer][page] = 100 * layer + page
    for layer in range(LAYERS):
        (plane,) = layout.only.layers[layer][1]
        for page in range(PAGES):
            storage, offset, nbytes = (int(array[0]) for array in layout.segments([page], [layer]))
            assert (storage, offset) == (plane.storage, plane.offset + page * plane.page_stride)
            assert nbytes == layout.page_nbytes == plane.nbytes
            found = kv.storages[storage][offset : offset + nbytes].view(torch.float32)
            assert found.eq(100 * layer + page).all()


def test_placement_is_not_part_of_the_fingerprint():
    layouts = [PagedKV(make()).layout for make in (layer_first, page_first, separate)]
    assert len({layout.fingerprint() for layout in layouts}) == 1
    assert not layouts[0].differences(layouts[1])


@pytest.mark.parametrize(
    ("shape", "dtype", "axes", "named"),
    [
        ((PAGES, 2, SIZE * 2, HEADS, DIM), torch.float32, "PKNHD", ["page_size", "page_nbytes"]),
        ((PAGES, 2, SIZE, HEADS + 1, DIM), torch.float32, "PKNHD", ["kv_heads", "page_nbytes"]),
        ((PAGES, 2, SIZE, HEADS, DIM), torch.bfloat16, "PKNHD", ["dtype", "page_nbytes"]),
        ((PAGES, 2, HEADS, SIZE, DIM), torch.float32, "PKHND", ["page_axes"]),
    ],
)
def test_every_difference_is_named(shape, dtype, axes, named):
    ours = PagedKV(layer_first()).layout
    theirs = PagedKV([torch.zeros(shape, dtype=dtype)] * LAYERS, axes=axes).layout
    assert ours.fingerprint() != theirs.fingerprint()
    assert [text.split()[0] for text in ours.differences(theirs)] == named


def hybrid() -> PagedKV:
    """Two groups, two storages, planes with gaps, a window and boundaries."""
    keys, values = torch.zeros(PAGES, HEADS, SIZE, DIM), torch.zeros(PAGES, SIZE, HEADS, 2 * DIM)[..., :DIM]
    states = torch.zeros(3, 40, dtype=torch.bfloat16)[:, 4:]
    attention = {7: [PlaneTensor(keys, "PHND", "k"), PlaneTensor(values, "PNHD", "v")]}
    return PagedKV.from_groups(
        [
            GroupTensors(attention, "local", window=128),
            GroupTensors({9: [PlaneTensor(states, "PD", "conv")]}, "mamba", "state", replicated=True),
        ],
        boundaries={keys.untyped_storage().data_ptr(): (64, keys.data_ptr() + 8)},
    )


@pytest.mark.parametrize("through", [lambda d: d, lambda d: json.loads(json.dumps(d)), lambda d: unpack(pack(d))])
@pytest.mark.parametrize("make", [lambda: PagedKV(page_first()), hybrid])
def test_a_layout_travels_as_a_dict(make, through):
    layout = make().layout
    assert PagedKVLayout.from_dict(through(layout.to_dict())) == layout
    assert hash(PagedKVLayout.from_dict(through(layout.to_dict()))) == hash(layout)


def leaves(value, path=()):
    """Paths to every value in a dict of dicts and lists, containers too."""
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from leaves(item, (*path, key))


def replaced(value, path, new):
    if not path:
        return new
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[path[0]] = replaced(copy[path[0]], path[1:], new)
    return copy


JUNK = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-4, 70),
    st.sampled_from([2**31, 2**32 - 1, 2**61, 2**62, 2**63 - 1, 2**64 - 1, -(2**63)]),
    st.floats(),
    st.text(max_size=4),
    st.sampled_from(["D", "KNHD", "state", "mla", "float64", "int8", "x" * 1000]),
    st.binary(max_size=4),
    st.lists(st.integers(0, 9), max_size=5),
    st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
)


@settings(max_examples=400, deadline=None)
@given(st.data())
def test_no_dict_from_the_wire_gives_a_page_outside_its_storages(data):
    wire = json.loads(json.dumps(hybrid().layout.to_dict()))
    for _ in range(data.draw(st.integers(1, 3))):
        path = data.draw(st.sampled_from(list(leaves(wire))))
        wire = replaced(wire, path, data.draw(JUNK))
    try:
        layout = PagedKVLayout.from_dict(wire)
    except InvalidArgument:
        return
    for index, group in enumerate(layout.groups):
        pages = [0, group.num_pages - 1] if group.num_pages else []
        segments = layout.segments(pages, group=index)
        sizes = np.array(layout.storage_nbytes, dtype=np.int64)[segments.storage]
        assert (segments.offset >= 0).all()
        assert (segments.nbytes > 0).all()
        assert (segments.offset + segments.nbytes <= sizes).all()


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ((), {}, "not a PagedKVLayout"),
        ((), [], "not a PagedKVLayout"),
        (("groups",), [], "at least one group"),
        (("groups",), 3, "not a paged KV layout"),
        (("storage_nbytes", 0), 8, "ends at byte"),
        (("storage_nbytes", 0), -1, "a storage has -1 bytes"),
        (("storage_nbytes",), [], "storage 0 of 0|boundaries for 0 storages"),
        (("boundaries",), [[1, 2]], "1 boundaries for 3 storages"),
        (("boundaries", 0), [1], "is not"),
        (("groups", 0, "num_pages"), 11, "ends at byte"),
        (("groups", 0, "num_pages"), 2**62, "num_pages is 4611686018427387904"),
        (("groups", 0, "num_pages"), True, "num_pages is True"),
        (("groups", 0, "kind"), "attn", "kind 'attn' is none of"),
        (("groups", 0, "page_size"), 0, "page_size is 0"),
        (("groups", 0, "page_size"), 5, "axis N of plane 'k' has size 4, not 5"),
        (("groups", 0, "layers"), [], "at least one layer"),
        (("groups", 0, "layers", 0, 1), [], "has no planes"),
        (("groups", 0, "layers", 0, 1, 0, "offset"), -4, "offset is -4"),
        (("groups", 0, "layers", 0, 1, 0, "offset"), 2**61, "ends at byte"),
        (("groups", 0, "layers", 0, 1, 0, "storage"), 3, "storage 3 of 3"),
        (("groups", 0, "layers", 0, 1, 0, "page_stride"), 0, "elements overlap"),
        (("groups", 0, "layers", 0, 1, 0, "page_stride"), -256, "page_stride is -256"),
        (("groups", 0, "layers", 0, 1, 0, "strides"), [0, 32, 4], "elements overlap"),
        (("groups", 0, "layers", 0, 1, 0, "strides"), [4, 4], "does not have one number"),
        (("groups", 0, "layers", 0, 1, 0, "axes"), "DHN", "are not letters"),
        (("groups", 0, "layers", 0, 1, 0, "axes"), "HH", "are not letters"),
        (("groups", 0, "layers", 0, 1, 0, "dtype"), "object", "dtype 'object'"),
        (("groups", 0, "layers", 0, 1, 0, "dtype"), [], "not a paged KV layout"),
        (("groups", 0, "layers", 0, 1, 0, "role"), "v", "two of one role"),
        (("groups", 0, "layers", 0, 1, 0, "role"), "", "role is ''"),
        (("groups", 1, "replicated"), 1, "replicated is 1"),
        (("groups", 0, "window"), 0, "window is 0"),
    ],
)
def test_a_wrong_dict_says_what_is_wrong(path, value, message):
    wire = json.loads(json.dumps(hybrid().layout.to_dict()))
    with pytest.raises(InvalidArgument, match=message):
        PagedKVLayout.from_dict(replaced(wire, path, value))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({}, []),
        ({"num_pages": 4}, []),
        ({"name": "other", "window": None}, []),
        ({"kind": "state"}, ["kind"]),
        ({"layers": 8}, ["layer_ids"]),
        ({"head_dim": 9}, ["head_dim", "page_axes"]),
        ({"dtype": "float16"}, ["dtype", "page_axes"]),
    ],
)
def test_fingerprints_of_groups(change, named):
    """Content counts; names, windows and numbers of pages do not."""
    ours = hybrid().layout
    group = ours.groups[0]
    if "layers" in change:
        change = {"layers": ((change["layers"], group.layers[0][1]),)}
    theirs = replace(ours, groups=(replace(group, **change), ours.groups[1]))
    assert (ours.fingerprint() == theirs.fingerprint()) == (not named)
    differences = ours.differences(theirs)
    assert [text.split()[0] for text in differences] == named
    assert all("of group 0 (local)" in text for text in differences)
    assert ours.differences(replace(ours, groups=ours.groups[:1])) == ["groups 2 here, 1 there"]


def test_layers_that_share_their_pages_name_each_byte_once():
    """As layers do that reuse an earlier one's keys and values."""
    one, two = torch.zeros(PAGES, 2, SIZE, HEADS, DIM), torch.zeros(PAGES, 2, SIZE, HEADS, DIM)
    layout = PagedKV([one, two, one]).layout
    assert len(layout.storage_nbytes) == 2
    assert layout.segments([1, 2, 5]).nbytes.tolist() == 2 * [2 * layout.page_nbytes, layout.page_nbytes]
    assert layout.segments([3], layers=[0, 2]).nbytes.tolist() == [layout.page_nbytes]
    shifted = PagedKV([one[:6], one[1:7]]).layout  # page 0 of the second is page 1 of the first
    assert shifted.segments([0, 1]).nbytes.tolist() == [3 * layout.page_nbytes]


def test_a_layout_with_no_pages_is_a_layout():
    layout = PagedKV([torch.zeros(0, 2, SIZE, HEADS, DIM)] * 2).layout
    assert PagedKVLayout.from_dict(layout.to_dict()) == layout
    assert len(layout.segments([]).offset) == 0
    with pytest.raises(OutOfBounds, match="page 0 is not in"):
        layout.segments([0])
    assert layout.fingerprint() == PagedKV([torch.zeros(3, 2, SIZE, HEADS, DIM)] * 2).layout.fingerprint()


@pytest.mark.parametrize("ids", [[1, 2], (1, 2), range(1, 3), np.array([1, 2], np.uint8), torch.tensor([1, 2])])
def test_ids_come_in_any_form(ids):
    layout = PagedKV(layer_first()).layout
    assert layout.page_ids(ids).tolist() == [1, 2]
    assert layout.segments(ids).nbytes.tolist() == [2 * layout.page_nbytes] * LAYERS


@pytest.mark.parametrize("ids", [3, [[1]], ["1"], [1.0], [None], np.array([1.5])])
def test_what_is_no_list_of_ids_is_refused(ids):
    with pytest.raises(InvalidArgument, match="page ids are"):
        PagedKV(layer_first()).layout.segments(ids)


@pytest.mark.parametrize("make", [layer_first, page_first, separate])
def test_gather_then_scatter_elsewhere_moves_whole_pages(make):
    source, target = PagedKV(layer_first()), PagedKV(make())
    for layer in source.layers:
        layer.copy_(torch.randn_like(layer))
    before = [layer.clone() for layer in target.layers]
    pages = source.gather([7, 0, 3])
    assert pages.shape == (3, LAYERS, 2, SIZE, HEADS, DIM)
    target.scatter([1, 9, 4], list(pages))
    for layer in range(LAYERS):
        assert torch.equal(target.layers[layer][[1, 9, 4]], source.layers[layer][[7, 0, 3]])
        rest = [page for page in range(PAGES) if page not in (1, 9, 4)]
        assert torch.equal(target.layers[layer][rest], before[layer][rest])


def test_zero_pages():
    kv = PagedKV(layer_first())
    assert kv.gather([]).shape == (0, *kv.page_shape)
    kv.scatter([], [])


def test_pages_that_do_not_exist_are_refused():
    kv = PagedKV(layer_first())
    with pytest.raises(OutOfBounds, match=r"page 10 is not in 0\.\.9"):
        kv.gather([0, PAGES])
    with pytest.raises(OutOfBounds, match="page -1"):
        kv.gather([-1])


def test_what_is_not_a_paged_cache_is_refused():
    with pytest.raises(InvalidArgument, match="at least one layer"):
        PagedKV([])
    with pytest.raises(InvalidArgument, match="axes must name"):
        PagedKV(layer_first(), axes="PKNH")
    with pytest.raises(InvalidArgument, match="size 3, not 2"):
        PagedKV([torch.zeros(PAGES, 3, SIZE, HEADS, DIM)])
    with pytest.raises(InvalidArgument, match="layer 1 is"):
        PagedKV([layer_first()[0], torch.zeros(PAGES, 2, SIZE, HEADS, DIM + 1)])


def test_pages_of_other_shapes_are_not_gathered_as_one_tensor():
    with pytest.raises(Unsupported, match=r"use pools\(\)"):
        hybrid().gather([0])
    halves = PagedKV.from_groups(
        [GroupTensors({0: [PlaneTensor(torch.zeros(PAGES, SIZE, HEADS, DIM), "PNHD", role) for role in "kv"]})]
    )
    for kv in (halves, PagedKV([torch.zeros(2, PAGES, SIZE, HEADS, DIM)], axes="KPNHD")):
        with pytest.raises(Unsupported, match=r"use pools\(\)"):
            kv.gather([0])
        with pytest.raises(Unsupported, match=r"use pools\(\)"):
            kv.scatter([0], [torch.zeros(1)])
