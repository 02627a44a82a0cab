"""KV pages and events where the pages lie on one node and the directory is another."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import tempfile
from typing import Any

import pytest
import torch
from processes import PoolEnv, command_line, eventually, free_port, running, stopped
from services import ask, becomes_ready, cli, two_nodes

import torch_mooncake as tm
from torch_mooncake.kv import PagedKV

PAGES = 40


def cache(fill: int) -> PagedKV:
    return PagedKV([torch.full((PAGES, 2, 8, 4, 512), fill, dtype=torch.float32) for _ in range(4)])  # 512 KiB a page


def fill(pool: tm.Pool, name: str, mib: int) -> None:
    for i in range(mib // 4):
        pool.put(f"{name}/{i}", torch.zeros(4 << 20, dtype=torch.uint8))


@pytest.fixture
def pools(node: Any, pool_env: PoolEnv, monkeypatch: pytest.MonkeyPatch) -> Any:
    """(a client of the member, where its objects go; one of the leader; the member's address)."""
    _, member, leader = two_nodes(node, monkeypatch)
    with tm.Pool(member) as there, tm.Pool(leader) as here:
        yield there, here, member


def test_pages_of_another_node_are_matched_pinned_and_evicted_from_the_end(pools: Any) -> None:
    there, here, _ = pools
    hashes = [b"%d" % i for i in range(PAGES)]
    source, target = cache(7), cache(0)
    store, load = there.kv("m", source), here.kv("m", target)
    assert store.put_pages(hashes, range(PAGES)) == PAGES
    member = next(n for n in here.stat()["nodes"] if not n["is_home"])
    assert member["extents"] == PAGES
    assert load.match_prefix([*hashes, b"no"], pin_s=60) == PAGES
    fill(there, "a", 200)
    assert load.get_pages(hashes, range(PAGES)) == PAGES
    assert all(torch.equal(a, b) for a, b in zip(source.layers, target.layers, strict=True))
    load.release(hashes)

    rounds = itertools.count()

    def some_are_gone() -> bool:
        fill(there, f"b{next(rounds)}", 16)
        return load.match_prefix(hashes) < PAGES

    assert eventually(some_are_gone, 30)
    n = load.match_prefix(hashes)
    assert here.exists([load.key(h) for h in hashes]) == [i < n for i in range(PAGES)]
    assert load.get_pages(hashes, range(PAGES)) == n


def test_what_is_lost_with_its_node_is_told(pools: Any, pool_env: PoolEnv) -> None:
    there, here, _ = pools
    kv = there.kv("m", cache(1))
    hashes = [1, 2, 3]
    with here.subscribe("kv/") as subscription:
        kv.put_pages(hashes, [0, 1, 2])
        assert eventually(lambda: len(subscription.get()) and len(subscription.keys) == 3)
        assert here.kv("m", cache(0)).match_prefix(hashes, pin_s=5) == 3
        for pid in pool_env.nodes():
            if "--leader" in command_line(pid):
                os.kill(pid, signal.SIGKILL)
        assert eventually(lambda: len(subscription.get()) and not subscription.keys, 20)
        assert here.kv("m", cache(0)).match_prefix(hashes, pin_s=5) == 0


def test_looking_at_another_nodes_ssd_brings_nothing_back(
    node: Any, pool_env: PoolEnv, monkeypatch: pytest.MonkeyPatch
) -> None:
    def promotions() -> int:
        return sum(n["ssd"]["promotions"] for n in here.stat()["nodes"])

    with tempfile.TemporaryDirectory(prefix="tm-test-ssd-", dir="/var/tmp") as disk:
        _, member, leader = two_nodes(node, monkeypatch, "--ssd", f"{disk}/m:256MiB")
        with tm.Pool(member) as there, tm.Pool(leader) as here:
            for i in range(100):
                there.put(f"k{i}", torch.full((1 << 20,), i, dtype=torch.uint8), meta={"i": i}, sealed=True)
            seen = {key: here.info(key) for key in here.keys("k")}
            assert {info.tiers for info in seen.values()} == {("ssd",), ("dram",)}
            assert all(info.meta == {"i": int(key[1:])} and not info.local for key, info in seen.items())
            assert promotions() == 0
            key = next(key for key, info in seen.items() if info.tiers == ("ssd",))
            assert int(here.get(key)[-1]) == int(key[1:])
            assert promotions() == 1
        tm.close()


@pytest.mark.slow
def test_a_member_whose_leader_is_silent_is_alive_and_not_ready(
    node: Any, pool_env: PoolEnv, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = free_port()
    two_nodes(node, monkeypatch, "--http", f"127.0.0.1:{port}")
    assert becomes_ready(port)
    keeper, worker = [pid for pid in pool_env.nodes() if "--leader" not in command_line(pid)]
    with stopped(worker):
        assert eventually(lambda: "has not heard from its leader" in ask(port, "/readyz")[1], 15)
        assert ask(port, "/healthz")[0] == 200
    assert becomes_ready(port)
    assert keeper in pool_env.nodes()


@pytest.mark.slow
def test_a_draining_member_stays_one_until_its_writers_are_done(
    node: Any, pool_env: PoolEnv, monkeypatch: pytest.MonkeyPatch
) -> None:
    process, member, leader = two_nodes(node, monkeypatch)
    code = (
        f"import numpy as np, torch_mooncake as tm; tm.init('{member}'); tm.put('k', np.ones(1 << 20)); print('stored')"
    )
    slow = {**os.environ, "TM_FAILPOINTS": "client.written=sleep:8000"}  # longer than a lease
    command = [sys.executable, "-c", code]
    with running(command, env=slow, stdout=subprocess.PIPE) as writer, tm.Pool(leader) as pool:
        assert eventually(lambda: any(n["prepared_bytes"] for n in pool.stat()["nodes"]))
        process.send_signal(signal.SIGTERM)
        assert writer.communicate(timeout=30)[0] == b"stored\n"
        assert process.wait(20) == 0
        assert len(pool.stat()["nodes"]) == 1


def test_what_a_leaving_member_has_is_moved_to_the_leader(pools: Any) -> None:
    there, here, member = pools
    kv = there.kv("m", cache(1))
    kv.put_pages([1, 2, 3], [0, 1, 2])
    assert "3 objects" in cli("drain", "--address", member)
    target = cache(0)
    assert here.kv("m", target).get_pages([1, 2, 3], [0, 1, 2]) == 3
    assert all(torch.equal(layer[:3], torch.ones_like(layer[:3])) for layer in target.layers)
