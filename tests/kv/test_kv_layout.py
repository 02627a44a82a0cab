"""Layouts are read off real tensors, and pages survive a gather and a scatter."""

import pytest
import torch

from torch_mooncake.errors import InvalidArgument, OutOfBounds
from torch_mooncake.kv import PagedKV, PagedKVLayout

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
        storage = kv.storages[layout.storage_index[layer]]
        for page, offset in enumerate(layout.offsets(layer, torch.arange(PAGES)).tolist()):
            found = storage[offset : offset + layout.page_nbytes].view(torch.float32)
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


def test_a_layout_travels_as_a_dict():
    layout = PagedKV(page_first()).layout
    fields = {name: list(value) if isinstance(value, tuple) else value for name, value in layout.to_dict().items()}
    assert PagedKVLayout.from_dict(fields) == layout


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
