"""The pool with an SSD: more than the memory holds, restarts, disks that fail. Real nodes, files on a real disk."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import PoolEnv, eventually

import torch_mooncake as tm
from torch_mooncake.cli import checks
from torch_mooncake.kv import KVEvents, PagedKV

MiB = 1 << 20


@pytest.fixture
def disk() -> Iterator[Path]:
    folder = tempfile.mkdtemp(prefix="tm-test-ssd-", dir="/var/tmp")
    yield Path(folder)
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def ssd(pool_env: PoolEnv, disk: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A pool of 32 MiB of memory and 256 MiB of SSD, to be started by tm.init()."""
    monkeypatch.setenv("TM_MEMORY", "32MiB")
    monkeypatch.setenv("TM_SSD", f"{disk}/a:256MiB")
    return disk / "a"


def value(i: int, nbytes: int = MiB) -> torch.Tensor:
    return torch.arange(i, i + nbytes // 4, dtype=torch.int32)


def stats() -> dict[str, Any]:
    return tm.stat()["nodes"][0]["ssd"]


def cli(*args: str) -> str:
    done = subprocess.run([sys.executable, "-m", "torch_mooncake", *args], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def test_four_times_the_memory_is_all_served(ssd: Path, child: Any) -> None:
    tm.init()
    for i in range(128):
        tm.put(f"k{i}", value(i))
    assert stats()["records"] >= 96
    assert tm.info("k0").tiers == ("ssd",)
    for i in range(128):
        assert torch.equal(tm.get(f"k{i}"), value(i))
    assert child()("import torch_mooncake as tm; result = int(tm.get('k3').sum())") == int(value(3).sum())
    many = tm.get_many([f"k{i}" for i in range(128)])  # more than fits at once
    assert all(torch.equal(many[i], value(i)) for i in range(128))
    out = torch.empty(MiB // 4, dtype=torch.int32)
    assert torch.equal(tm.get("k77", out=out), value(77))
    assert sorted(tm.keys("k")) == sorted(f"k{i}" for i in range(128))
    found = stats()
    assert found["dropped"] == found["errors"] == found["corrupt"] == 0
    assert found["used_bytes"] <= 256 * MiB


def test_watching_brings_nothing_back(ssd: Path, pool_env: PoolEnv) -> None:
    pool = tm.init()
    size = 8  # tokens
    kv = pool.kv("m", PagedKV([torch.zeros(2, 2, size, 4, 1 << 12)]))
    kv.put_pages([b"first", b"second"], [0, 1], token_ids=list(range(2 * size)))
    big = {f"layer.{i}.weight": torch.zeros(2) for i in range(16_000)}
    pool.put("big", big, meta={"step": 1})
    pool.put("long", value(0), meta={"text": "x" * 50_000}, version="v9")
    for i in range(64):
        pool.put(f"k{i}", value(i), meta={"i": i}, version=f"v{i}")
    assert eventually(lambda: stats()["records"] >= 40)
    before = stats()["promotions"]

    info = pool.info("k0")
    assert (info.tiers, info.meta, info.label, info.nbytes) == (("ssd",), {"i": 0}, "v0", MiB)
    assert (pool.info("long").meta, pool.info("long").label) == ({"text": "x" * 50_000}, "v9")
    assert pool.info("big").tiers == ("ssd",)
    assert pool.info("big").meta == {}  # it lies in the bytes
    assert pool.info("k63").tiers == ("dram",)
    rows = {row["key"]: row for row in json.loads(cli("ls", "-l", "--json"))}
    assert rows["k1"]["value"] == "tensor int32 [262144]"
    assert "on an SSD" in rows["big"]["value"]
    assert len(rows) == 68
    assert json.loads(cli("info", "k0", "--json"))["tiers"] == ["ssd"]
    with KVEvents(pool) as events:
        told = {event.page_hash: event for event in events.get()}
    assert told[b"second"].parent_hash == b"first"
    assert told[b"second"].medium == "disk"
    assert told[b"first"].token_ids == list(range(size))
    assert pool.info(kv.key(b"first")).tiers == ("ssd",)
    assert stats()["promotions"] == before
    assert torch.equal(tm.get("k0"), value(0))
    assert stats()["promotions"] == before + 1
    assert pool.info("k0").tiers == ("dram",)


def test_a_subscriber_is_told_where_keys_are(ssd: Path) -> None:
    pool = tm.init()
    with pool.subscribe("k") as subscription, pool.subscribe("other") as deaf:
        for i in range(64):
            pool.put(f"k{i}", value(i))
        pool.put("other", b"1")
        assert eventually(lambda: stats()["records"] >= 30)
        tiers: dict[str, str] = {}

        def follow() -> None:
            try:
                while True:
                    for event in subscription.get(0.3):
                        assert event.kind in ("stored", "moved")
                        assert event.kind == "stored" or tiers[event.key] != event.tier
                        tiers[event.key] = event.tier
            except tm.DeadlineExceeded:
                pass

        def agree() -> bool:
            follow()
            return tiers == {f"k{i}": medium(f"k{i}") for i in range(64)}

        def medium(key: str) -> str:
            return {"dram": "cpu", "ssd": "disk"}[pool.info(key).tiers[0]]

        assert eventually(agree)
        assert tiers["k0"] == "disk"
        assert torch.equal(pool.get("k0"), value(0))
        assert eventually(agree)
        assert tiers["k0"] == "cpu"
        with pool.subscribe("k") as late:  # whoever comes later is told where they are
            assert {event.key: event.tier for event in late.get()} == tiers
        assert {event.key for event in deaf.get(0)} == {"other"}
        pool.delete("k1")
        gone: list[Any] = []
        while not gone:  # others may still be on their way to the disk
            gone = [event for event in subscription.get() if event.kind == "removed"]
        assert [(event.key, event.tier) for event in gone] == [("k1", "disk")]


def test_watching_is_no_use(pool: tm.Pool) -> None:
    for key in ("watched", "other"):
        pool.put(key, value(0))
    for _ in range(20):
        pool.info("watched")
    cli("ls", "-l", "watched")
    for i in range(400):
        pool.put(f"k{i}", value(i))
        if not all(pool.exists(["watched", "other"])):
            break
    assert pool.exists(["watched", "other"]) == [False, True]  # the older of two that nobody used


def test_replaced_deleted_and_consumed_ones_stay_so_over_a_crash_of_the_worker(ssd: Path, pool_env: PoolEnv) -> None:
    tm.init()
    for i in range(100):
        tm.put(f"k{i}", value(i))
    assert tm.info("k1").tiers == tm.info("k2").tiers == ("ssd",)
    tm.put("k0", value(1000))
    assert tm.delete("k1")
    assert torch.equal(tm.get("k2", consume=True), value(2))
    kill(pool_env.worker())
    assert torch.equal(tm.get("k0"), value(1000))
    assert tm.exists(["k1", "k2"]) == [False, False]
    for i in range(3, 100):
        assert torch.equal(tm.get(f"k{i}"), value(i)), i
    assert sorted(tm.keys("k")) == sorted(f"k{i}" for i in range(100) if i not in (1, 2))


def test_sealed_keys_are_there_again_after_the_whole_node_was_killed(ssd: Path, pool_env: PoolEnv) -> None:
    tm.init()
    for i in range(80):
        tm.put(f"s{i}", value(i), sealed=True)
        tm.put(f"n{i}", value(i))
    tm.put("gone", value(5), sealed=True, ttl_s=3600)
    assert torch.equal(tm.get("s0", consume=True), value(0))
    for pid in pool_env.nodes():
        kill(pid)
    assert eventually(lambda: not pool_env.nodes())
    tm.close()
    tm.init()
    keys = tm.keys("")
    assert len(keys) > 40
    assert all(k.startswith(("s", "gone")) for k in keys)
    assert "s0" not in keys  # taken at most once
    for key in keys:
        if key != "gone":
            assert torch.equal(tm.get(key), value(int(key[1:]))), key
    assert tm.get("n1", default=None) is None  # somebody else may have replaced it meanwhile
    tm.put("n1", value(7))
    assert torch.equal(tm.get("n1"), value(7))


def test_a_scan_does_not_flush_it(ssd: Path, pool_env: PoolEnv) -> None:
    tm.init()
    for i in range(60):
        tm.put(f"hot{i}", value(i), sealed=True)
        tm.get(f"hot{i}", readonly=True)
    for i in range(600):
        tm.put(f"scan{i}", value(i), sealed=True)
    assert sum(tm.exists([f"hot{i}" for i in range(60)])) == 60
    assert stats()["refused"] > 200
    assert stats()["used_bytes"] <= 256 * MiB


def test_what_is_broken_on_the_disk_is_missing_and_the_rest_is_served(ssd: Path, pool_env: PoolEnv) -> None:
    tm.init()
    for i in range(120):
        tm.put(f"k{i}", value(i), sealed=True)
    for segment in sorted(ssd.glob("segment-*"))[:2]:
        with open(segment, "r+b") as file:  # a flipped byte in every second record or so
            for at in range(3 * MiB // 2, 16 * MiB, 2 * MiB):
                file.seek(at)
                byte = file.read(1)
                file.seek(at)
                file.write(bytes([byte[0] ^ 1]))
    got = [tm.get(f"k{i}", default=None) for i in range(120)]
    assert all(g is None or torch.equal(g, value(i)) for i, g in enumerate(got))
    missing = sum(g is None for g in got)
    assert 0 < missing < 30
    assert eventually(lambda: stats()["corrupt"] == missing)
    assert len(tm.keys("k")) == 120 - missing
    kill(pool_env.worker())
    assert len(tm.keys("k")) == 120 - missing


@pytest.mark.parametrize("what", ["ssd.record.write=error", "ssd.record.read=error@5", "ssd.allocate=error@3"])
def test_a_failing_or_full_disk_costs_what_is_on_it(
    ssd: Path, pool_env: PoolEnv, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    tm.init()
    for i in range(40):
        tm.put(f"old{i}", value(i), sealed=True)
    kill_all = list(pool_env.nodes())
    for pid in kill_all:
        kill(pid)
    assert eventually(lambda: not pool_env.nodes())
    tm.close()
    monkeypatch.setenv("TM_FAILPOINTS", what)
    tm.init()
    monkeypatch.delenv("TM_FAILPOINTS")
    for i in range(80):
        tm.put(f"k{i}", value(i), sealed=True)
    got = [tm.get(f"k{i}", default=None) for i in range(80)]
    assert all(g is None or torch.equal(g, value(i)) for i, g in enumerate(got))
    assert sum(g is not None for g in got) >= 20
    found = stats()
    assert found["errors"] > 0
    assert found["out_of_service"] == (1 if "write" in what else 0)


def test_a_folder_that_cannot_be_used_is_told_at_once(
    pool_env: PoolEnv, disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (disk / "file").write_text("")
    monkeypatch.setenv("TM_SSD", f"{disk}/file/a:256MiB")
    with pytest.raises(tm.PoolUnavailable, match="making"):
        tm.init()
    monkeypatch.setenv("TM_SSD", f"{disk}/a:1MiB")
    with pytest.raises(tm.InvalidArgument, match="64 MiB"):
        tm.init()


def test_the_doctor_looks_at_the_folder(disk: Path) -> None:
    (fine,) = checks.ssds([f"{disk}/new:1MiB"])
    assert fine.ok
    assert "O_DIRECT" in fine.value
    assert not list(disk.iterdir())
    (small,) = checks.ssds([f"{disk}:1000T"])
    assert not small.ok
    assert "lower the size" in small.advice
    (absent,) = checks.ssds([f"{disk}/no/such:1G"])
    assert not absent.ok
