"""Limits of what keys with a prefix may have in memory."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile

import pytest
import torch
from processes import PoolEnv, eventually

import torch_mooncake as tm

MiB = 1 << 20


def value(nbytes: int = MiB) -> torch.Tensor:
    return torch.zeros(nbytes, dtype=torch.uint8)


def used(prefix: str) -> int:
    return next(q["used_bytes"] for q in tm.stat()["quotas"] if q["prefix"] == prefix)


def test_over_a_quota_its_own_least_valuable_go_first(small: tm.Pool) -> None:
    small.set_quota("a/", 8 * MiB)
    for i in range(4):
        small.put(f"b/{i}", value())
    for i in range(20):
        small.put(f"a/{i}", value())
        if i < 3:
            small.get(f"a/{i}")
        assert used("a/") <= 8 * MiB
    assert set(small.keys("a/")) == {f"a/{i}" for i in (0, 1, 2, 15, 16, 17, 18, 19)}
    assert len(small.keys("b/")) == 4
    for i in range(60):  # nobody else is limited
        small.put(f"b/{i}", value())
    assert len(small.keys("b/")) > 20


def test_a_quota_that_cannot_be_met_is_named(small: tm.Pool) -> None:
    small.set_quota("a/", "2MiB")
    with pytest.raises(tm.PoolFull, match="the quota of 'a/' is 2097152 bytes"):
        small.put("a/big", value(3 * MiB), timeout=20)
    small.put("a/1", value(), pin="hard")
    small.put("a/2", value(), pin="hard")
    for timeout in (20, 0.5):
        with pytest.raises(tm.PoolFull, match="the quota of 'a/'"):
            small.put("a/3", value(), timeout=timeout)
        with pytest.raises(tm.PoolFull, match="the quota of 'a/'"):
            small.put("a/3", b"small", timeout=timeout)
    outcomes = small.put_many({"a/4": b"x", "b/4": b"x", "a/5": value(), "b/5": value()}, errors="return")
    assert [isinstance(outcome, tm.PoolFull) for outcome in outcomes.values()] == [True, False, True, False]
    small.set_quota("a/", None)
    small.put("a/3", value())
    assert small.stat()["quotas"] == []


def test_the_longest_prefix_counts_and_quotas_can_change(small: tm.Pool) -> None:
    for i in range(10):
        small.put(f"a/{i}", value())
        small.put(f"a/x/{i}", value())
    small.set_quota("a/", 6 * MiB)
    told = small.set_quota("a/x/", 4 * MiB)
    assert {q["prefix"]: (q["limit_bytes"], q["used_bytes"]) for q in told} == {
        "a/": (6 * MiB, 10 * MiB),
        "a/x/": (4 * MiB, 10 * MiB),
    }
    small.put("a/x/new", value())
    assert len(small.keys("a/x/")) == 4
    assert len(small.keys("a/")) == 14
    small.put("a/new", value())
    assert used("a/") == 6 * MiB
    for i in range(14):
        small.set_quota(f"p{i}/", MiB)
    with pytest.raises(tm.InvalidArgument, match="at most 16"):
        small.set_quota("one more", MiB)
    for prefix, nbytes in (("", MiB), ("x" * 257, MiB), ("a/", 0), ("a/", -1)):
        with pytest.raises(tm.InvalidArgument):
            small.set_quota(prefix, nbytes)


def test_quotas_outlive_a_worker(small: tm.Pool, pool_env: PoolEnv) -> None:
    small.set_quota("a/", 4 * MiB)
    for i in range(3):
        small.put(f"a/{i}", value())
    os.kill(pool_env.worker(), signal.SIGKILL)
    assert eventually(lambda: small.exists("a/0"), 20)
    assert used("a/") == 3 * MiB
    for i in range(20):
        small.put(f"a/{i}", value())
    assert len(small.keys("a/")) == 4


@pytest.mark.parametrize("seed", range(2))
def test_whatever_is_done_a_quota_holds(small: tm.Pool, seed: int) -> None:
    rng = random.Random(seed)
    limits = {"a/": 5 * MiB, "a/b/": 3 * MiB, "c": 2 * MiB}
    for prefix, limit in limits.items():
        small.set_quota(prefix, limit)
    for _ in range(400):
        key = rng.choice(["a/", "a/b/", "c", "d"]) + str(rng.randrange(30))
        roll = rng.random()
        if roll < 0.7:
            small.put(key, value(rng.choice([10, 3000, 50_000, 600_000, MiB])), sealed=False, parent=None)
        elif roll < 0.9:
            small.get(key, default=None)
        else:
            small.delete(key)
        assert all(q["used_bytes"] <= limits[q["prefix"]] for q in small.stat()["quotas"])
    small.delete(small.keys())
    assert eventually(lambda: all(q["used_bytes"] == 0 for q in small.stat()["quotas"]))


def test_over_a_quota_goes_to_the_ssd(pool_env: PoolEnv, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tempfile.mkdtemp(prefix="tm-test-ssd-", dir="/var/tmp")
    monkeypatch.setenv("TM_MEMORY", "32MiB")
    monkeypatch.setenv("TM_SSD", f"{folder}/a:256MiB")
    try:
        pool = tm.init()
        pool.set_quota("a/", 4 * MiB)
        for i in range(20):
            pool.put(f"a/{i}", torch.full((MiB,), i, dtype=torch.uint8))
            assert used("a/") <= 4 * MiB
        for i in range(20):
            assert int(pool.get(f"a/{i}")[-1]) == i
            assert used("a/") <= 4 * MiB
    finally:
        tm.close()
        assert eventually(lambda: not pool_env.nodes(), 15)
        shutil.rmtree(folder, ignore_errors=True)


def test_the_command_line_sets_and_shows(small: tm.Pool) -> None:
    def cli(*args: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "torch_mooncake", *args], capture_output=True, text=True, check=False
        )

    assert json.loads(cli("quota", "a/", "4MiB", "--json").stdout)[0]["limit_bytes"] == 4 * MiB
    small.put("a/1", value())
    assert "quota a/: 1.0 MiB of 4.0 MiB" in cli("quota").stdout
    assert "quota a/" in cli("top", "--once").stdout
    assert "quota a/" in cli("stat").stdout
    assert cli("quota", "a/").returncode == 2
    assert cli("quota", "a/", "none").stdout.strip() == ""
