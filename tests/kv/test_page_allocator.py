"""The free list never hands a page out twice."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torch_mooncake.errors import InvalidArgument, PoolFull
from torch_mooncake.kv import PageAllocator


@given(st.lists(st.tuples(st.sampled_from(["take", "free", "quarantine"]), st.integers(0, 6)), max_size=40))
def test_pages_are_free_taken_or_quarantined(steps):
    allocator = PageAllocator(12)
    held: list[list[int]] = []
    lost = 0
    for verb, count in steps:
        if verb == "take":
            if count > allocator.available:
                with pytest.raises(PoolFull):
                    allocator.take(count)
            else:
                held.append(allocator.take(count))
        elif held:
            pages = held.pop(count % len(held))
            getattr(allocator, verb)(pages)
            lost += len(pages) * (verb == "quarantine")
        taken = [page for pages in held for page in pages]
        assert len(set(taken)) == len(taken)
        assert allocator.available + len(taken) + lost == 12
        assert allocator.quarantined == lost


def test_a_double_free_is_refused_whole():
    allocator = PageAllocator(4)
    first, second = allocator.take(2)
    allocator.free([first])
    for wrong in ([second, first], [second, second], [99]):
        with pytest.raises(InvalidArgument):
            allocator.free(wrong)
    assert allocator.available == 3


def test_too_many_takes_none():
    allocator = PageAllocator(4)
    allocator.take(1)
    with pytest.raises(PoolFull, match="4 KV pages asked for, 3 of 4 are free"):
        allocator.take(4)
    assert allocator.available == 3
    with pytest.raises(InvalidArgument):
        allocator.take(-1)
