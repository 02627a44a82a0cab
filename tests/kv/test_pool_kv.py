"""Prefix reuse: what is found is the longest leading run, and its bytes are those that were stored."""

import asyncio
import random

import pytest
import torch
from caches import LAYERS, SIZE, decode_cache, prefill_cache
from processes import eventually

import torch_mooncake as tm
from torch_mooncake import _core
from torch_mooncake.kv import PagedKV, PoolKV, hash_name
from torch_mooncake.kv.page_keys import PageKey, page_meta

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


def test_hashes_of_other_programs_are_taken_as_they_are(pool, sides):
    _, load, source, target = sides
    kv = pool.kv("m", source)
    hashes = [b"\x00" * 32, 17, -5, 1 << 255, "a/b ü", b"\xff"]
    assert kv.put_pages(hashes, [0, 1, 2, 3, 4, 5]) == 6
    assert load.match_prefix(hashes) == load.get_pages(hashes, [5, 4, 3, 2, 1, 0]) == 6
    assert torch.equal(target.layers[1][[5, 4, 3, 2, 1, 0]], source.layers[1][:6])
    assert {PageKey.parse(key).page_hash for key in pool.keys("kv/")} == set(hashes)
    assert {type(h) for h in hashes} == {bytes, int, str}
    assert len({kv.key(h) for h in (17, "17", b"17", b"\x17")}) == 4  # a hash's type is part of it
    for wrong in (True, 1.5, None, b"", "", b"x" * 129):
        with pytest.raises(tm.InvalidArgument):
            kv.key(wrong)


def test_pinned_pages_stay_while_the_pool_is_filled(pool, sides):
    store, load, _, _ = sides
    hashes = store.page_hashes(PROMPT)
    store.put_pages(hashes, [0, 1, 2, 3, 4])
    assert store.match_prefix([*hashes, b"no"], pin_s=60) == 5
    for i in range(80):
        pool.put(f"other/{i}", torch.zeros(4 << 20, dtype=torch.uint8))
    assert len(pool.keys("other/")) < 64
    assert load.get_pages(hashes, [0, 1, 2, 3, 4]) == 5
    store.release(hashes)
    for i in range(250):  # more turnovers than its few uses are worth
        pool.put(f"more/{i}", torch.zeros(4 << 20, dtype=torch.uint8))
    assert load.match_prefix(hashes) == 0
    with pytest.raises(tm.InvalidArgument, match="pin_s"):
        store.match_prefix(hashes, pin_s=1e9)


def test_pins_end_with_their_owner(pool, sides, child):
    store, _, _, _ = sides
    keys = store.page_keys(PROMPT)
    store.put_pages(keys, [0, 1, 2, 3, 4])
    other = child()
    code = "import time, torch_mooncake as tm; from torch_mooncake import _core\n"
    code += "result = _core.match_prefix(tm.init()._client(2**62), keys, 3_000_000, 2**62)"
    assert other(code, keys=keys) == 5
    other.kill()
    assert eventually(lambda: pool.stat()["nodes"][0]["clients"] == 1)
    for i in range(250):
        pool.put(f"more/{i}", torch.zeros(4 << 20, dtype=torch.uint8))
    assert store.match_prefix(keys) == 0


def test_a_page_that_follows_another_is_corrupt(pool, sides):
    store, load, _, _ = sides
    a, b, c = b"a", b"b", b"c"
    store.put_pages([a, b], [0, 1])
    store.put_pages([c], [2], parent=b)
    assert load.get_pages([a, b, c], [0, 1, 2]) == 3
    with pytest.raises(tm.Corrupt, match="follows page"):
        load.get_pages([a, c], [0, 1])


def test_tokens_are_kept_beside_a_page(pool, sides):
    store, _, _, _ = sides
    hashes = store.page_hashes(PROMPT)
    store.put_pages(hashes, [0, 1, 2, 3, 4], token_ids=PROMPT)
    meta = page_meta(pool.info(store.key(hashes[1])).meta)
    assert meta.token_ids() == PROMPT[SIZE : 2 * SIZE]
    assert (meta.block_size, meta.parent) == (SIZE, hash_name(hashes[0]))
    with pytest.raises(tm.InvalidArgument, match="tokens"):
        store.put_pages(hashes, [0, 1, 2, 3, 4], token_ids=PROMPT[:3])
    with pytest.raises(tm.OutOfBounds):
        store.put_pages([b"new"], [99])


def churn(pool, seed):
    """Prompts that share prefixes, stored and loaded at random in a pool that holds a fraction of them: whatever page
    is there, the page before it is."""
    rng = random.Random(seed)
    layers = [torch.zeros(64, 2, SIZE, 4, 1 << 14, dtype=torch.float16)]  # 1 MiB a page
    kv = pool.kv("m", PagedKV(layers))
    assert kv.page_nbytes == 1 << 20
    prompts = set()
    for _ in range(250):
        path = ()
        for _ in range(rng.randint(1, 24)):
            path += (rng.randint(0, 2),)
        prompts.add(path)
    prompts = sorted(prompts)
    nodes = sorted({p[: i + 1] for p in prompts for i in range(len(p))})
    assert len(nodes) > 4 * 256
    names = {node: b"%d" % i for i, node in enumerate(nodes)}
    for step in range(120):
        prompt = prompts[min(len(prompts) - 1, int(rng.expovariate(0.03)))]
        chain = [names[prompt[: i + 1]] for i in range(len(prompt))]
        n = kv.get_pages(chain, list(range(len(chain))))
        if n < len(chain):
            kv.put_pages(chain[n:], list(range(len(chain) - n)), parent=chain[n - 1] if n else None)
        if step % 20 == 19:
            here = dict(zip(nodes, pool.exists([kv.key(names[node]) for node in nodes]), strict=True))
            orphans = [node for node in nodes if here[node] and len(node) > 1 and not here[node[:-1]]]
            assert not orphans, "orphans"
    assert pool.stat()["nodes"][0]["evictions"] > 200


@pytest.mark.parametrize("seed", range(3))
def test_parents_outlive_children(pool, seed):
    churn(pool, seed)


def test_without_the_refresh_children_would_stay_behind(pool, monkeypatch):
    """That the property above can fail: with what keeps it left out, it does."""
    for name in ("refresh_objects", "refresh_keys"):
        monkeypatch.setattr(_core, name, lambda *args: None)

    def runs():
        for seed in range(3):
            churn(pool, seed)

    with pytest.raises(AssertionError, match="orphans"):
        runs()


def test_a_call_that_ended_well_does_not_fail_by_its_bookkeeping(sides, monkeypatch):
    store, load, source, target = sides
    keys = store.page_keys(PROMPT)

    def lost(*args):
        raise tm.PeerLost("the node that keeps the order of eviction")

    for name in ("refresh_objects", "refresh_keys"):
        monkeypatch.setattr(_core, name, lost)
    assert store.put_pages(keys, [0, 1, 2, 3, 4]) == 5
    assert load.get_pages(keys, [0, 1, 2, 3, 4]) == 5
    assert torch.equal(target.layers[0][:5], source.layers[0][:5])
    assert (store.stats.refreshes_failed, load.stats.refreshes_failed) == (1, 1)
    with pytest.raises(tm.InvalidArgument):  # and a failure stays what it is
        store.put_pages([b""], [0])
    with pytest.raises(tm.OutOfBounds):
        store.put_pages([b"new"], [99])


def test_the_await_forms(pool, sides):
    store, load, source, target = sides
    hashes = store.page_hashes(PROMPT)

    async def run():
        assert await store.aput_pages(hashes, [0, 1, 2, 3, 4]) == 5
        assert await load.amatch_prefix(hashes, pin_s=1) == 5
        return await load.aget_pages(hashes, [4, 3, 2, 1, 0])

    assert asyncio.run(run()) == 5
    assert torch.equal(target.layers[0][[4, 3, 2, 1, 0]], source.layers[0][:5])


def test_prefixes_of_any_keys(pool):
    pool.put_many({f"k{i}": b"x" for i in range(3)})
    assert pool.exists_prefix([f"k{i}" for i in range(5)], pin_s=0.5) == 3
    assert pool.exists_prefix(["no", "k0"]) == pool.exists_prefix([]) == 0
    pool.unpin(["k0", "k1", "k2"])
    with pytest.raises(tm.InvalidArgument):
        pool.exists_prefix([""])


def test_what_a_page_says_of_itself_is_read_the_same_both_ways(pool, sides):
    store, _, _, _ = sides
    hashes = store.page_hashes(PROMPT)
    store.put_pages(hashes[:2], [0, 1])
    store.put_pages(hashes[2:], [2, 3, 4], parent=hashes[1], token_ids=PROMPT[2 * SIZE :])
    keys = [store.key(page) for page in hashes]
    for key, found in zip(keys, pool._client(2**62).locate_many(keys, 2**62), strict=True):
        quick = store._quick_meta(found.meta)
        assert quick is not None
        assert quick == store._checked_meta(key, found)
    assert store._quick_meta(b"") is store._quick_meta(found.meta[:-1]) is store._quick_meta(found.meta[:-9]) is None
