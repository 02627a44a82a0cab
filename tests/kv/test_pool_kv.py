"""Prefix reuse: what is found is the longest leading run, and its bytes are those that were stored."""

import pytest
import torch
from caches import LAYERS, SIZE, decode_cache, prefill_cache

import torch_mooncake as tm
from torch_mooncake.kv import PoolKV

PROMPT = list(range(100, 100 + 5 * SIZE + 2))  # five full pages and two tokens


@pytest.fixture
def sides(pool):
    writer, reader = prefill_cache(), decode_cache()
    return PoolKV(pool, writer, model="m"), PoolKV(pool, reader, model="m"), writer, reader


def test_pages_come_back_in_another_cache(sides):
    store, load, source, target = sides
    keys = store.page_keys(PROMPT)
    assert keys == load.page_keys(PROMPT)
    assert len(keys) == 5
    assert load.match_prefix(keys) == 0
    assert load.get_pages(keys, [0, 1, 2, 3, 4]) == 0
    assert store.put_pages(keys, [9, 8, 7, 6, 5]) == 5
    assert load.match_prefix(keys) == 5
    assert load.get_pages(keys, [10, 2, 19, 4, 0]) == 5
    for layer in range(LAYERS):
        assert torch.equal(target.layers[layer][[10, 2, 19, 4, 0]], source.layers[layer][[9, 8, 7, 6, 5]])
        assert target.layers[layer][[1, 3, 5]].eq(-1).all()
    page_nbytes = LAYERS * source.layout.page_nbytes
    assert (load.stats.pages_loaded, load.stats.bytes_loaded) == (5, 5 * page_nbytes)
    assert (store.stats.pages_stored, store.stats.bytes_stored) == (5, 5 * page_nbytes)


def test_a_page_is_stored_once_and_never_replaced(sides):
    store, load, source, target = sides
    keys = store.page_keys(PROMPT)
    assert store.put_pages(keys[:2], [0, 1]) == 2
    assert store.put_pages(keys, [5, 6, 7, 8, 9]) == 3
    assert load.get_pages(keys, [0, 1, 2, 3, 4]) == 5
    assert torch.equal(target.layers[0][[0, 1, 2]], source.layers[0][[0, 1, 7]])


def test_a_hole_ends_the_prefix(sides):
    store, load, _, target = sides
    keys = store.page_keys(PROMPT)
    store.put_pages(keys[:2] + keys[3:], [0, 1, 3, 4])
    assert load.match_prefix(keys) == 2
    assert load.get_pages(keys, [0, 1, 2, 3, 4]) == 2
    assert target.layers[0][[2, 3, 4]].eq(-1).all()


def test_another_model_layout_or_salt_finds_nothing(sides, pool):
    store, load, source, _ = sides
    store.put_pages(store.page_keys(PROMPT), [0, 1, 2, 3, 4])
    assert load.match_prefix(load.page_keys(PROMPT, cache_salt="tenant")) == 0
    other_model = PoolKV(pool, source, model="n")
    assert other_model.match_prefix(other_model.page_keys(PROMPT)) == 0
    other_layout = PoolKV(pool, decode_cache(heads=3), model="m")
    assert other_layout.match_prefix(other_layout.page_keys(PROMPT)) == 0


def test_a_prompt_below_a_page_has_no_keys(sides):
    store, load, _, _ = sides
    assert store.page_keys(PROMPT[: SIZE - 1]) == []
    assert load.match_prefix([]) == load.get_pages([], []) == store.put_pages([], []) == 0


def test_what_is_no_page_is_corrupt(sides, pool):
    _, load, _, target = sides
    keys = load.page_keys(PROMPT)
    pool.put(keys[0], torch.zeros(3), sealed=True)
    with pytest.raises(tm.Corrupt, match="not a page of shape"):
        load.get_pages(keys, [0, 1, 2, 3, 4])
    assert target.layers[0].eq(-1).all()
