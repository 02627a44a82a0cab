"""Keys that come after others: ``put(parent=)``. No parent is evicted before its children."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from processes import PoolEnv, eventually

import torch_mooncake as tm

MiB = 1 << 20


def value(nbytes: int = MiB) -> torch.Tensor:
    return torch.zeros(nbytes, dtype=torch.uint8)


@pytest.mark.parametrize("seed", range(3))
def test_parents_outlive_children(small: tm.Pool, pool_env: PoolEnv, seed: int) -> None:
    """Whatever is put, used, replaced, deleted and evicted, and over a restart of the worker: who is there was not left
    by what comes before it, unless that was deleted."""
    rng = random.Random(seed)
    parent_of: dict[str, str | None] = {}
    deleted: set[str] = set()
    refused = 0
    for step in range(600):
        if step == 300:
            os.kill(pool_env.worker(), signal.SIGKILL)
        there = small.keys()  # of the next worker: what is put while one dies has an outcome that nobody knows
        roll = rng.random()
        if roll < 0.75 or not there:
            key = rng.choice(there) if there and rng.random() < 0.1 else f"k{step}"
            parent = rng.choice(there) if there and rng.random() < 0.8 else None
            try:
                small.put(key, value(rng.choice([100, 5000, 40_000, 700_000, 3 * MiB])), parent=parent, timeout=2)
            except tm.PoolFull:  # all that is there comes before it
                refused += 1
                continue
            except tm.InvalidArgument:  # it comes before that parent
                continue
            parent_of[key] = parent
            deleted.discard(key)
        elif roll < 0.97:
            key = rng.choice(there)
            for _ in range(rng.randrange(5)):
                small.get(key)
        else:
            key = rng.choice(there)
            small.delete(key)
            deleted.add(key)
        now = set(small.keys())
        for key in now:
            parent = parent_of[key]
            assert parent is None or parent in now or parent in deleted, (step, key, parent)
    assert small.stat()["nodes"][0]["evictions"] > 50
    assert refused < 300


def test_a_chain_goes_from_its_end(small: tm.Pool) -> None:
    small.put("c0", value())
    for i in range(1, 16):
        small.put(f"c{i}", value(), parent=f"c{i - 1}")
        small.get(f"c{i}")  # the later ones are used more
    for i in range(15, 0, -1):
        small.get(f"c{i}")
    for i in range(24):
        small.put(f"x{i}", value())
        small.get(f"x{i}")
        small.get(f"x{i}")
        chain = small.keys("c")
        assert set(chain) == {f"c{k}" for k in range(len(chain))}
    assert 0 < len(chain) < 16


def test_a_chain_longer_than_the_pool_is_refused(small: tm.Pool) -> None:
    small.put("c0", value())

    def grow() -> None:
        for i in range(1, 40):
            small.put(f"c{i}", value(), parent=f"c{i - 1}", timeout=1)

    with pytest.raises(tm.PoolFull):
        grow()
    there = small.keys()
    assert len(there) > 24
    small.put("other", value(8 * MiB))  # the chain's end makes room
    left = small.keys("c")
    assert set(left) == {f"c{k}" for k in range(len(left))}


def test_who_can_be_a_parent(small: tm.Pool) -> None:
    with pytest.raises(tm.KeyNotFound, match="the parent 'nobody' is not there"):
        small.put("a", b"1", parent="nobody")
    assert not small.exists("a")
    small.put("a", b"1")
    with pytest.raises(tm.InvalidArgument, match="comes after"):
        small.put("a", b"1", parent="a")
    small.put("b", b"1", parent="a")
    small.put("c", value(), parent="b")
    for nbytes in (10, MiB):
        with pytest.raises(tm.InvalidArgument, match="'c' comes after 'a'"):
            small.put("a", value(nbytes), parent="c")
    small.put("b", b"2", parent="a")  # again
    small.delete("c")
    small.put("b", b"3")  # comes after nobody now
    small.put("a", b"4", parent="b")
    outcomes = small.put_many([("d", b"1"), ("e", b"1")], parent="a")
    assert all(outcome.stored for outcome in outcomes)
    with pytest.raises(tm.KeyNotFound, match="parent"):
        small.put_many({"f": b"1"}, parent="nobody")
    with pytest.raises(tm.InvalidArgument, match="1 to 1024"):
        small.put("g", b"1", parent="")


def test_the_command_line_puts_after(small: tm.Pool, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")
    command = [sys.executable, "-m", "torch_mooncake", "put", "b", str(tmp_path / "file"), "--parent", "a"]
    assert subprocess.run(command, capture_output=True, check=False).returncode == 3
    small.put("a", b"1")
    assert subprocess.run(command, capture_output=True, check=False).returncode == 0
    assert eventually(lambda: small.exists("b"))
