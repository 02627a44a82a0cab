"""Loads and stores of several threads and processes in a pool that is too small for them: whatever a load says it has
brought is the page that was asked for."""

import collections
import random
import threading

import pytest
import torch

import torch_mooncake as tm
from torch_mooncake import _core
from torch_mooncake.kv import PagedKV

PAGES, DEPTH, LAYERS = 16, 12, 4
SHAPE = (PAGES, 2, 4, 4, 1024)  # 512 KiB a page of all layers: the pool has room for 128 of them

WORK = """
import sys
sys.path.insert(0, tests)
import torch_mooncake as tm
from test_prefix_churn import work
result = dict(work(tm.init(), seed, rounds))
"""


def value(chain: tuple[int, ...], layer: int) -> float:
    """What every element of a page's layer is: the page's name, as a number that floats hold exactly."""
    number = 1
    for step in chain:
        number = number * 3 + step
    return float(number * LAYERS + layer)


def is_page(kv: PagedKV, page: int, chain: tuple[int, ...]) -> bool:
    return all(bool(kv.layers[layer][page].eq(value(chain, layer)).all()) for layer in range(LAYERS))


def work(pool: tm.Pool, seed: int, rounds: int) -> collections.Counter:
    """Prompts that share prefixes: load what is known, check it, make the rest, store all, sometimes remove one."""
    rng, found = random.Random(seed), collections.Counter()
    kv = PagedKV([torch.zeros(SHAPE) for _ in range(LAYERS)])
    pool_kv = pool.kv("churn", kv)
    for _ in range(rounds):
        prompt = tuple(rng.randint(0, 1) for _ in range(rng.randint(2, DEPTH)))
        chains = [prompt[: i + 1] for i in range(len(prompt))]
        hashes = ["-".join(map(str, chain)) for chain in chains]
        pages = rng.sample(range(PAGES), len(prompt))
        failed: tuple[int, ...] = ()
        with pool_kv.load(hashes, pages, timeout=20) as load:
            try:
                whole = load.wait()
                found["loads"] += 1
            except tm.KeyNotFound as error:
                whole = load.loaded
                found["failed"] += 1
                failed = error.failed_pages
        assert failed == tuple(pages[whole : load.hits])
        found["pages"] += whole
        for chain, page in zip(chains[:whole], pages, strict=False):
            assert is_page(kv, page, chain), f"page {page} is not {chain}"
        for chain, page in zip(chains[whole:], pages[whole:], strict=True):
            for layer in range(LAYERS):
                kv.layers[layer][page] = value(chain, layer)
        store = pool_kv.store(hashes, pages, timeout=20)
        store.wait()
        if store.error is not None and not isinstance(store.error, tm.PoolFull):
            raise store.error
        found["stores"] += 1
        if rng.random() < 0.3:
            found["removed"] += pool.delete(pool_kv.key(rng.choice(hashes)))
    return found


def churn(pool, child, rounds, tests):
    others = [child() for _ in range(2)]
    for seed, other in enumerate(others):
        other.start(WORK, tests=tests, seed=seed, rounds=rounds)
    outcomes: list[object] = []

    def run(seed: int) -> None:
        try:
            outcomes.append(work(pool, seed, rounds))
        except BaseException as error:
            outcomes.append(error)

    threads = [threading.Thread(target=run, args=(seed,)) for seed in (2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    total = collections.Counter()
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome
        total += outcome
    for other in others:
        total += other.result()
    assert total["stores"] == 4 * rounds
    assert total["pages"] > rounds
    assert total["removed"] > 0
    assert pool.stat()["nodes"][0]["evictions"] > 0
    return total


def test_no_load_brings_another_page(pool, child, request):
    churn(pool, child, 30, str(request.path.parent))


@pytest.mark.slow
def test_no_load_brings_another_page_for_long(pool, child, request):
    churn(pool, child, 1500, str(request.path.parent))


def test_the_check_can_fail(pool, monkeypatch):
    """With the pages of a load exchanged, it does."""
    real = _core.read_page_layers

    def exchanged(client, objects, memory, first, count, pages, deadline):
        return real(client, objects, memory, first, count, pages[::-1], deadline)

    monkeypatch.setattr(_core, "read_page_layers", exchanged)
    with pytest.raises(AssertionError, match=r"page \d+ is not"):
        work(pool, 5, 40)
