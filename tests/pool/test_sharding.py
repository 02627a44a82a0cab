"""The arithmetic of sharding: against torch's own placements and against element-by-element copies."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from torch_mooncake.errors import InvalidArgument
from torch_mooncake.sharding import Box, box_of, contiguous_strides, overlap, whole

meshes = st.lists(st.integers(1, 4), min_size=1, max_size=3)
shapes = st.lists(st.integers(0, 9), min_size=1, max_size=3)


def placements_for(ndim: int) -> st.SearchStrategy:
    dims = st.integers(0, ndim - 1)
    return st.one_of(
        st.just(Replicate()),
        dims.map(Shard),
        st.builds(lambda dim, sf: _StridedShard(dim, split_factor=sf), dims, st.integers(2, 3)),
    )


def shards_by_torch(tensor: torch.Tensor, mesh: list[int], placements: list) -> dict[tuple[int, ...], torch.Tensor]:
    """What torch gives each process: one placement after the other, cut with torch.chunk."""
    local = {(): tensor}
    for size, placement in zip(mesh, placements, strict=True):
        split = {}
        for at, piece in local.items():
            if placement.is_replicate():
                cut = [piece] * size
            else:
                cut, _ = placement._split_tensor(piece, size, with_padding=False, contiguous=True)
            split.update({(*at, i): part for i, part in enumerate(cut)})
        local = split
    return local


def gather(box: Box, tensor: torch.Tensor) -> torch.Tensor:
    for dim, runs in enumerate(box.runs):
        index = [i for start, length in runs for i in range(start, start + length)]
        tensor = tensor.index_select(dim, torch.tensor(index, dtype=torch.int64))
    return tensor


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_boxes_are_what_torch_gives_each_process(data: st.DataObject) -> None:
    mesh, shape = data.draw(meshes), data.draw(shapes)
    placements = [data.draw(placements_for(len(shape))) for _ in mesh]
    tensor = torch.arange(math.prod(shape)).view(shape)
    for at, local in shards_by_torch(tensor, mesh, placements).items():
        box = box_of(tuple(shape), mesh, at, placements)
        assert box.shape == tuple(local.shape)
        assert torch.equal(gather(box, tensor), local)


def copied(ranges: np.ndarray, source: bytes, target: bytearray) -> int:
    for at, to, n in ranges.tolist():
        assert n > 0
        target[to : to + n] = source[at : at + n]
    return int(ranges[:, 2].sum())


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_the_overlaps_of_all_blocks_make_up_the_target_and_nothing_else(data: st.DataObject) -> None:
    shape = data.draw(shapes)
    tensor = torch.arange(math.prod(shape), dtype=torch.int32).view(shape)
    mesh_a, mesh_b = data.draw(meshes), data.draw(meshes)
    one_each = st.one_of(st.integers(0, len(shape) - 1).map(Shard), placements_for(len(shape)))
    placed_a, placed_b = [data.draw(one_each) for _ in mesh_a], [data.draw(one_each) for _ in mesh_b]
    boxes, stored, owned = [], b"\xee" * 16, set()
    for at in np.ndindex(*mesh_a):
        box = box_of(tuple(shape), mesh_a, at, placed_a)
        if any(c for c, p in zip(at, placed_a, strict=True) if p.is_replicate()) or box.numel == 0 or box in owned:
            continue
        owned.add(box)
        boxes.append((box, len(stored)))
        stored += gather(box, tensor).contiguous().numpy().tobytes()
    at_b = tuple(data.draw(st.integers(0, n - 1)) for n in mesh_b)
    box = box_of(tuple(shape), mesh_b, at_b, placed_b)
    pad = data.draw(st.integers(0, 3))  # the target is a slice of something wider
    wide = list(box.shape)
    wide[-1] += pad
    target = bytearray(b"\xaa" * (math.prod(wide) * 4))
    found = sum(copied(overlap(b, offset, box, contiguous_strides(wide), 4), stored, target) for b, offset in boxes)
    assert found == box.numel * 4
    view = np.frombuffer(target, np.int32).reshape(wide)
    assert np.array_equal(view[..., : box.shape[-1]], gather(box, tensor).numpy())
    assert (view[..., box.shape[-1] :] == np.int32(-1431655766)).all()


def test_equal_layouts_are_one_range_and_row_shards_are_one_range_a_block() -> None:
    box = whole((64, 128, 3))
    assert overlap(box, 7, box, contiguous_strides(box.shape), 2).tolist() == [[7, 0, 64 * 128 * 3 * 2]]
    halves = [box_of((64, 128, 3), [2], [i], [Shard(0)]) for i in (0, 1)]
    assert overlap(box, 0, halves[1], contiguous_strides((32, 128, 3)), 1).tolist() == [[32 * 384, 0, 32 * 384]]
    columns = box_of((64, 128, 3), [2], [1], [Shard(1)])
    ranges = overlap(box, 0, columns, contiguous_strides(columns.shape), 1)
    assert len(ranges) == 64
    assert ranges[1].tolist() == [384 + 192, 192, 192]


def test_a_scalar_has_one_element() -> None:
    assert whole(()).numel == 1
    assert overlap(whole(()), 12, whole(()), (), 8).tolist() == [[12, 0, 8]]


@pytest.mark.parametrize(
    ("placements", "says"),
    [
        ([Partial()], "not done yet"),
        ([Shard(2)], "2 dimensions"),
        ([Shard(0), Shard(0)], "2 placements for a mesh of 1"),
    ],
)
def test_placements_that_make_no_sense(placements: list, says: str) -> None:
    with pytest.raises(InvalidArgument, match=says):
        box_of((4, 4), [2], [0], placements)
