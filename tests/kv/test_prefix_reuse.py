"""Pages of any layout through a real pool; loads by layer and stores that go on while the caller computes."""

import os
import signal
import threading

import pytest
import torch
from caches import LAYERS, SIZE, decode_cache, prefill_cache
from kv_layout_cases import Sizes, attention_cases, mla_cases, plain, sglang, vllm
from processes import eventually, stopped

import torch_mooncake as tm
from torch_mooncake import _core
from torch_mooncake.kv import GroupTensors, KVReceiver, KVSender, PageAllocator, PagedKV, PlaneTensor, PoolKV

PROMPT = list(range(100, 100 + 5 * SIZE + 2))  # five full pages and two tokens
HASHES = [b"a", b"b", b"c", b"d", b"e"]
OURS, THEIRS = [9, 8, 7, 6, 5], [10, 2, 19, 4, 0]


@pytest.fixture
def sides(pool):
    """A cache with numbers, one without, both in the pool under one namespace."""
    writer, reader = prefill_cache(), decode_cache()
    return PoolKV(pool, writer, model="m"), PoolKV(pool, reader, model="m"), writer, reader


def same(source: PagedKV, ours: list[int], target: PagedKV, theirs: list[int]) -> bool:
    return all(torch.equal(b[theirs], a[ours]) for a, b in zip(source.layers, target.layers, strict=True))


def large_cache(first: float) -> PagedKV:
    """256 KiB a page: more than comes along when an object is located."""
    values = torch.arange(LAYERS * 20, dtype=torch.float32).view(LAYERS, 20, 1, 1, 1, 1) + first
    return PagedKV(list(values.expand(LAYERS, 20, 2, SIZE, 16, 128).contiguous().unbind(0)))


class Gate:
    """Stands before a native call: `before(n, real)` runs first, n counting from 0. The call itself is the real one."""

    def __init__(self, monkeypatch, name, before):
        real, self.calls = getattr(_core, name), 0

        def call(*args):
            n, self.calls = self.calls, self.calls + 1
            before(n)
            return real(*args)

        monkeypatch.setattr(_core, name, call)


# --- layouts ---


@pytest.mark.parametrize("make", [attention_cases, mla_cases], ids=["attention", "mla"])
def test_pages_of_every_layout_come_back(pool, make):
    sizes = Sizes(heads=1 if make is mla_cases else 2)
    for source, target in zip(make(sizes), make(sizes), strict=True):
        source.fill()
        store = PoolKV(pool, source.kv, model=source.name)
        load = PoolKV(pool, target.kv, model=source.name)
        assert store.put_pages([b"x", b"y"], [3, 0]) == 2
        assert load.get_pages([b"x"], [1]) == 1
        assert load.load([b"x", b"y"], [0, 2]).wait() == 2
        for layer, k, token, head, d in source.elements():
            values = [target.at(layer, k, page, token, head, d) for page in range(4)]
            first, second = (source.at(layer, k, page, token, head, d) for page in (3, 0))
            assert values == [first, first, second, 0], f"{source.name}: layer {layer}, {k}, {token}, {head}, {d}"


def test_caches_whose_pages_have_the_same_order_share_objects(pool):
    """Whatever their placement; and the object is a tensor of that order."""
    sizes = Sizes()
    cases = [plain("LPKNHD", sizes), plain("PLKNHD", sizes), sglang("page_head", sizes), sglang("layer_first", sizes)]
    cases[0].fill()
    PoolKV(pool, cases[0].kv, model="m").put_pages([b"x"], [2])
    key = PoolKV(pool, cases[0].kv, model="m").key(b"x")
    stored = pool.get(key)
    assert torch.equal(stored, torch.stack([layer[2] for layer in cases[0].kv.layers]))
    for case in (cases[1], cases[3]):
        assert PoolKV(pool, case.kv, model="m").get_pages([b"x"], [1]) == 1
        for layer, k, token, head, d in case.elements():
            assert case.at(layer, k, 1, token, head, d) == cases[0].at(layer, k, 2, token, head, d)
    assert PoolKV(pool, cases[2].kv, model="m").match_prefix([b"x"]) == 0  # HND: another order, another key


def test_each_group_has_its_own_pages(pool):
    def hybrid(fill):
        full = {0: [PlaneTensor(torch.full((4, 2, SIZE, 2, 8), fill))]}
        mamba = {1: [PlaneTensor(torch.full((3, 100), fill, dtype=torch.float64), "PD", "state")]}
        return PagedKV.from_groups([GroupTensors(full, "full"), GroupTensors(mamba, "mamba", "state")])

    source, target = hybrid(5.0), hybrid(0.0)
    for group in (0, 1):
        store, load = pool.kv("m", source, group=group), pool.kv("m", target, group=group)
        assert store.put_pages([b"x"], [group]) == 1
        assert load.load([b"x"], [2]).wait() == 1
    assert target.pools(0)[0][0][2].eq(5).all()
    assert target.pools(1)[0][0][2].eq(5).all()
    assert target.pools(0)[0][0][:2].eq(0).all()
    assert target.pools(1)[0][0][:2].eq(0).all()
    assert pool.kv("m", target, group=0).match_prefix([b"x"]) == 1
    with pytest.raises(tm.InvalidArgument, match=r"group 2 is not in 0\.\.1"):
        pool.kv("m", source, group=2)
    with pytest.raises(tm.Unsupported, match="on the CPU only"):
        pool.kv("m", PagedKV([torch.zeros(2, 2, 4, 2, 8, device="meta")]))


def test_one_layer_of_many_pages_in_scattered_pieces(pool):
    """128 layers, one head of an odd size, a page in 1280 pieces."""
    sizes = Sizes(layers=128, pages=3, tokens=5, heads=1, dim=7)
    source, target = sglang("page_head", sizes), sglang("page_head", sizes)
    source.kv.storages[0].copy_(torch.randint(0, 255, source.kv.storages[0].shape))
    store, load = (PoolKV(pool, case.kv, model="m") for case in (source, target))
    store.put_pages([b"x"], [2])
    with load.load([b"x"], [1]) as handle:
        handle.wait_layer(127)
    for (ours,), (theirs,) in zip(source.kv.pools(), target.kv.pools(), strict=True):
        assert torch.equal(theirs[1].view(torch.int32), ours[2].view(torch.int32))
        assert theirs[0].eq(0).all()


# --- load ---


def test_a_load_tells_its_length_first_and_then_each_layer(sides, monkeypatch):
    store, load, source, target = sides
    store.put_pages(HASHES[:3], OURS[:3])
    opened = [threading.Event() for _ in range(LAYERS)]
    Gate(monkeypatch, "read_page_layers", lambda n: opened[n].wait(20))
    handle = load.load(HASHES, THEIRS)
    assert (handle.hits, handle.pages, handle.state, handle.loaded) == (3, (10, 2, 19), "pending", 0)
    for layer in range(LAYERS):
        with pytest.raises(tm.DeadlineExceeded, match="still under way"):
            handle.wait_layer(layer, timeout=0)
        opened[layer].set()
        handle.wait_layer(layer)
        assert torch.equal(target.layers[layer][[10, 2, 19]], source.layers[layer][[9, 8, 7]])
        assert all(later[[10, 2, 19]].eq(-1).all() for later in target.layers[layer + 1 :])
    assert handle.wait() == 3
    assert (handle.state, handle.error, handle.loaded) == ("done", None, 3)
    assert all(layer[[4, 0, 1]].eq(-1).all() for layer in target.layers)
    assert (load.stats.pages_loaded, load.stats.bytes_loaded) == (3, 3 * load.page_nbytes)
    with pytest.raises(tm.InvalidArgument, match="layer 4 is none of"):
        handle.wait_layer(4)


def test_nothing_to_load_is_loaded_at_once(sides):
    store, load, _, target = sides
    for hashes in ([], [b"no", b"a"], load.page_hashes(PROMPT[: SIZE - 1])):
        with load.load(hashes, THEIRS) as handle:
            handle.wait_layer(0)
            assert (handle.wait(), handle.hits, handle.pages, handle.state) == (0, 0, (), "done")
    store.put_pages(HASHES[1:], OURS[1:])
    assert load.load(HASHES, THEIRS).wait() == 0  # the first is not there
    assert all(layer.eq(-1).all() for layer in target.layers)


def test_wrong_arguments_raise_before_a_byte_moves(sides, pool):
    store, load, _, target = sides
    store.put_pages(HASHES, OURS)
    with pytest.raises(tm.InvalidArgument, match="5 hashes, but 2 pages"):
        load.load(HASHES, [0, 1])
    with pytest.raises(tm.InvalidArgument, match="named twice"):
        load.load(HASHES, [0, 1, 2, 3, 0])
    with pytest.raises(tm.OutOfBounds, match=r"page 20 .* \(position 1 of 5\)"):
        load.load(HASHES, [0, 20, 2, 3, 4])
    pool.put(load.key(b"odd"), torch.zeros(3), sealed=True)
    with pytest.raises(tm.Corrupt, match="not a page of shape"):
        load.load([b"odd"], [0])
    assert all(layer.eq(-1).all() for layer in target.layers)


def test_what_is_being_loaded_is_not_evicted_and_afterwards_is(sides, pool, monkeypatch):
    store, load, source, target = sides
    store.put_pages(HASHES, OURS)

    def fill(n):
        if n == 2:
            for i in range(80):
                pool.put(f"other/{i}", torch.zeros(4 << 20, dtype=torch.uint8))

    Gate(monkeypatch, "read_page_layers", fill)
    assert load.load(HASHES, THEIRS).wait() == 5
    assert len(pool.keys("other/")) < 64
    assert same(source, OURS, target, THEIRS)
    for i in range(250):  # more turnovers than its few uses are worth
        pool.put(f"more/{i}", torch.zeros(4 << 20, dtype=torch.uint8))
    assert load.match_prefix(HASHES) == 0


def test_a_cancelled_load_is_quiet_when_cancel_returns(sides, monkeypatch):
    store, load, _, target = sides
    store.put_pages(HASHES, OURS)
    inside, go_on = threading.Event(), threading.Event()

    def hold(n):
        if n == 1:
            inside.set()
            go_on.wait(20)

    gate = Gate(monkeypatch, "read_page_layers", hold)
    handle = load.load(HASHES, THEIRS)
    assert inside.wait(20)
    returned = threading.Event()
    canceller = threading.Thread(target=lambda: (handle.cancel(), returned.set()))
    canceller.start()
    assert not returned.wait(0.2)  # a layer is being read
    assert handle.state == "pending"
    go_on.set()
    canceller.join(20)
    assert returned.is_set()
    assert (handle.state, handle.loaded, gate.calls) == ("cancelled", 0, 2)
    assert handle.error.failed_pages == tuple(THEIRS)
    handle.wait_layer(1)  # that much had come
    for layer in (2, 3):
        with pytest.raises(tm.Cancelled):
            handle.wait_layer(layer)
    for layer in target.layers:
        layer.fill_(-7)  # the pages are somebody else's now
    again = load.load(HASHES, THEIRS)
    again.cancel()
    again.cancel()
    with pytest.raises(RuntimeError, match="computed"), load.load(HASHES, THEIRS) as handle:
        raise RuntimeError("what is computed fails")
    assert handle.state in ("cancelled", "done")


def test_a_load_ends_at_its_deadline_and_no_byte_lands_later(pool_env):
    """The pool's node is stopped in the middle, seen from another host."""
    with tm.Pool() as here, tm.Pool(host_id="elsewhere") as far:
        source, target = large_cache(1), large_cache(-1000)
        here.kv("m", source).put_pages(HASHES, OURS)
        load = far.kv("m", target)
        handle = load.load(HASHES, THEIRS)
        assert handle.wait() == 5
        assert same(source, OURS, target, THEIRS)
        with pytest.MonkeyPatch.context() as patch:
            inside, go_on = threading.Event(), threading.Event()
            Gate(patch, "read_page_layers", lambda n: n == 1 and (inside.set(), go_on.wait(20)))
            handle = load.load(HASHES, [1, 3, 5, 6, 7], timeout=3)
            assert inside.wait(20)
            with stopped(pool_env.worker()):
                go_on.set()
                with pytest.raises((tm.DeadlineExceeded, tm.PeerLost, tm.PoolUnavailable)) as raised:
                    handle.wait(timeout=20)
                assert raised.value.failed_pages == (1, 3, 5, 6, 7)
                assert handle.state in ("timeout", "failed")
                assert handle.loaded == 0
                for layer in target.layers:
                    layer.fill_(-7)
            assert eventually(lambda: load.get_pages(HASHES, [10, 11, 12, 13, 14]) == 5)  # the node is back
        assert all(layer[[1, 3, 5, 6, 7]].eq(-7).all() for layer in target.layers)


def test_a_node_that_is_killed_ends_the_load_with_what_did_not_come(pool_env):
    with tm.Pool() as here, tm.Pool(host_id="elsewhere") as far:
        source, target = large_cache(1), large_cache(-1000)
        here.kv("m", source).put_pages(HASHES, OURS)
        load = far.kv("m", target)
        with pytest.MonkeyPatch.context() as patch:

            def kill(n):
                if n == 2:
                    for pid in pool_env.nodes():
                        os.kill(pid, signal.SIGKILL)

            Gate(patch, "read_page_layers", kill)
            with pytest.raises((tm.PeerLost, tm.PoolUnavailable, tm.KeyNotFound, tm.DeadlineExceeded)) as raised:
                load.load(HASHES, THEIRS, timeout=5).wait(timeout=30)
        assert raised.value.failed_pages == tuple(THEIRS)
    with tm.Pool() as anew:  # computed again, and stored in a pool that knows nothing of them
        assert anew.kv("m", source).store(HASHES, OURS).result() == 5
        assert anew.kv("m", target).load(HASHES, THEIRS).wait() == 5
    assert same(source, OURS, target, THEIRS)


# --- stale references ---

REPLACE = """
import torch, torch_mooncake as tm
pool = tm.init()
for key in gone:
    assert pool.delete(key)
for i in range(n):
    pool.put(f"prompt-b/{i}", torch.full((nbytes // 4,), 1e6 + i))  # what takes the memory that the pages had
result = len(pool.keys("prompt-b/"))
"""


def test_a_stale_reference_fails_and_never_gives_what_lies_there_now(pool, child, monkeypatch):
    """Pages are found; then another process removes one and fills the pool with another prompt's bytes."""
    source, target = prefill_cache(), decode_cache()
    store, load = PoolKV(pool, source, model="m"), PoolKV(pool, target, model="m")
    other = child()
    store.put_pages(HASHES, OURS)

    def replace(n):
        if n == 1:
            assert other(REPLACE, gone=[store.key(HASHES[3])], n=600, nbytes=store.page_nbytes) > 500

    Gate(monkeypatch, "read_page_layers", replace)
    handle = load.load(HASHES, THEIRS)
    assert handle.hits == 5
    handle.wait_layer(0)
    with pytest.raises(tm.KeyNotFound) as raised:
        handle.wait()
    assert raised.value.failed_pages == (4, 0)  # of the page that went on
    assert (handle.state, handle.loaded) == ("failed", 3)
    assert same(source, OURS[:3], target, THEIRS[:3])  # and the first three are whole
    assert not any(layer[THEIRS[:3]].ge(1e6).any() for layer in target.layers)
    with pytest.raises(tm.KeyNotFound):
        handle.wait_layer(1)
    assert load.match_prefix(HASHES) == 3
    assert load.stats.pages_loaded == 3


def test_located_pages_are_validated_after_their_bytes(pool, child):
    """The same under the load: references kept by hand, used after their memory is another's."""
    source, target = prefill_cache(), decode_cache()
    store, load = PoolKV(pool, source, model="m"), PoolKV(pool, target, model="m")
    store.put_pages(HASHES, OURS)
    client = pool._client(2**62)
    keys = [store.key(page) for page in HASHES]
    objects = client.locate_many(keys, 2**62)
    child()(REPLACE, gone=keys, n=900, nbytes=store.page_nbytes)
    memory = load._objects.memory
    outcomes = _core.read_page_layers(client, objects, memory, 0, LAYERS, THEIRS, 2**62)
    assert [type(outcome) for outcome in outcomes] == [tm.KeyNotFound] * 5
    assert _core.read_pages(client, objects, memory, THEIRS, 2**62) == 0
    assert load.get_pages(HASHES, THEIRS) == 0
    # Under the same key there is only ever the same page: one that is stored again is the one that was asked for.
    store.put_pages(HASHES, OURS)
    assert load.get_pages(HASHES, THEIRS) == 5
    assert same(source, OURS, target, THEIRS)


def test_a_page_that_went_and_came_back_is_loaded_all_the_same(sides, pool, monkeypatch):
    store, load, source, target = sides
    store.put_pages(HASHES, OURS)

    def again(n):
        if n == 2:
            for page in (HASHES[1], HASHES[4]):
                assert pool.delete(store.key(page))
            store.put_pages([HASHES[1]], [OURS[1]], parent=HASHES[0])
            store.put_pages([HASHES[4]], [OURS[4]], parent=HASHES[3])

    Gate(monkeypatch, "read_page_layers", again)
    assert load.load(HASHES, THEIRS).wait() == 5
    assert same(source, OURS, target, THEIRS)


# --- store ---


def test_a_store_reads_its_pages_until_it_has_ended(sides, monkeypatch):
    store, load, source, target = sides
    allocator = PageAllocator(12)
    pages = allocator.take(5)
    go_on = threading.Event()
    Gate(monkeypatch, "put_pages", lambda n: go_on.wait(20))
    handle = store.store(HASHES, pages, then=lambda ended: allocator.free(ended.pages))
    with pytest.raises(tm.DeadlineExceeded, match="still under way"):
        handle.result(timeout=0.1)
    assert (handle.state, allocator.available) == ("pending", 7)
    with pytest.raises(tm.PoolFull):
        allocator.take(8)  # nobody gets a page that is being read
    go_on.set()
    assert handle.result() == 5
    assert eventually(lambda: allocator.available == 12)
    for layer in source.layers:
        layer[pages] += 0.5  # they may be written now; what was stored is what was there
    assert load.get_pages(HASHES, THEIRS) == 5
    assert not same(source, pages, target, THEIRS)
    for layer in source.layers:
        layer[pages] -= 0.5
    assert same(source, pages, target, THEIRS)
    assert store.store(HASHES, pages).result() == 0  # nothing new
    assert store.store([], []).result() == 0


def test_what_the_callers_part_raises_is_told(sides, monkeypatch):
    store, _, _, _ = sides
    told = []
    monkeypatch.setattr(threading, "excepthook", told.append)

    def fail(ended):
        raise ZeroDivisionError(str(ended.pages))

    assert store.store(HASHES[:1], [3], then=fail).result() == 1
    assert eventually(lambda: told)
    assert (told[0].exc_type, str(told[0].exc_value)) == (ZeroDivisionError, "(3,)")


def test_a_store_fails_by_type(pool_env, monkeypatch):
    monkeypatch.setenv("TM_MEMORY", "8MiB")
    with tm.Pool() as pool:
        kv = pool.kv("m", PagedKV([torch.zeros(4, 2, 16, 4, 1 << 12)]))  # pages of 2 MiB
        pool.put("taken", torch.zeros(7 << 20, dtype=torch.uint8), pin="hard")
        ended = []
        handle = kv.store([b"a", b"b"], [0, 1], timeout=2, then=ended.append)
        with pytest.raises((tm.PoolFull, tm.DeadlineExceeded)) as raised:
            handle.result(timeout=20)
        assert handle.error is raised.value
        assert eventually(lambda: ended == [handle])
        assert handle.state in ("failed", "timeout")
        with pytest.raises(tm.InvalidArgument, match="2 pages of 16 tokens, but 3 tokens"):
            kv.store([b"a", b"b"], [0, 1], token_ids=[1, 2, 3])
        with pytest.raises(tm.OutOfBounds, match="page 4"):
            kv.store([b"a"], [4])
        with pytest.raises(tm.InvalidArgument):
            kv.store([b"a"], [])
        pool.delete("taken")
        assert kv.store([b"a", b"b"], [0, 1]).result() == 2


def test_a_pool_that_is_closed_ends_what_is_under_way(pool_env):
    pool = tm.Pool()
    source = prefill_cache()
    kv = pool.kv("m", source)
    kv.put_pages(HASHES, OURS)
    with pytest.MonkeyPatch.context() as patch:
        Gate(patch, "read_page_layers", lambda n: n == 1 and pool.close())
        handle = kv.load(HASHES, [0, 1, 2, 3, 4])
        with pytest.raises(tm.Closed) as raised:
            handle.wait(timeout=20)
        assert raised.value.failed_pages == (0, 1, 2, 3, 4)


# --- sessions and pool together ---


def test_a_prompt_is_matched_loaded_computed_pushed_and_stored(pool, monkeypatch):
    """The prefill flow, a call a step; what the decode side gets is what one worker would have computed."""
    source, first, decode = prefill_cache(), prefill_cache(), decode_cache()
    tail = 2  # pages that nobody computed before
    hashes = PoolKV(pool, source, model="m").page_hashes(PROMPT)
    PoolKV(pool, source, model="m").put_pages(hashes[:-tail], [1, 2, 3])
    for layer in first.layers:
        layer.zero_()
    pool_kv = PoolKV(pool, first, model="m")
    allocator = PageAllocator(decode.layout.num_pages)
    mine = PageAllocator(first.layout.num_pages)
    with (
        tm.Engine(listen=["tcp://127.0.0.1:0"], token="t") as one,
        tm.Engine(listen=["tcp://127.0.0.1:0"], token="t") as two,
    ):
        receiver, sender = KVReceiver(two, decode, allocator), KVSender(one, first)
        pages = mine.take(5)
        with receiver.open(num_pages=5) as session, pool_kv.load(hashes, pages) as load:
            push = sender.open(session.ticket())
            for layer in range(LAYERS):
                first.layers[layer][pages[load.hits :]] = source.layers[layer][[4, 5]]  # the tail is computed
                load.wait_layer(layer)
                push.push_layer(layer, pages)
            push.finish({"first_token": 7})
            stored = pool_kv.store(hashes, pages, token_ids=PROMPT, then=lambda ended: mine.free(ended.pages))
            assert session.wait()["first_token"] == 7
            assert same(source, [1, 2, 3, 4, 5], decode, session.pages)
        assert stored.result() == tail
        assert eventually(lambda: mine.available == first.layout.num_pages)
        sender.close()
        receiver.close()
    assert pool_kv.match_prefix(hashes) == 5


def test_vllm_blocks_of_one_worker_are_loaded_into_pages_of_another_order(pool):
    """Two workers of one physical order share through the pool; a third of another order finds nothing, and no bytes
    in the wrong order."""
    sizes = Sizes(tokens=SIZE)
    one, two, three = vllm("LBHNC", sizes), vllm("BLHNC", sizes), vllm("LBNHC", sizes)
    one.fill()
    PoolKV(pool, one.kv, model="m").store([b"x"], [1]).result()
    assert PoolKV(pool, two.kv, model="m").load([b"x"], [3]).wait() == 1
    assert PoolKV(pool, three.kv, model="m").load([b"x"], [3]).hits == 0
    for layer, k, token, head, d in one.elements():
        assert two.at(layer, k, 3, token, head, d) == one.at(layer, k, 1, token, head, d)
