"""Keys that are pinned: soft ones are evicted last, hard ones never."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import PoolEnv, eventually

import torch_mooncake as tm

MiB = 1 << 20


def value(i: int, nbytes: int = MiB) -> torch.Tensor:
    return torch.arange(i, i + nbytes // 4, dtype=torch.int32)


@pytest.fixture
def with_ssd(pool_env: PoolEnv, monkeypatch: pytest.MonkeyPatch) -> Iterator[tm.Pool]:
    """32 MiB of memory and 256 MiB of SSD."""
    folder = tempfile.mkdtemp(prefix="tm-test-ssd-", dir="/var/tmp")
    monkeypatch.setenv("TM_MEMORY", "32MiB")
    monkeypatch.setenv("TM_SSD", f"{folder}/a:256MiB")
    yield tm.init()
    tm.close()
    assert eventually(lambda: not pool_env.nodes(), 15)
    shutil.rmtree(folder, ignore_errors=True)


def node() -> dict[str, Any]:
    return tm.stat()["nodes"][0]


def test_soft_pins_are_evicted_when_nothing_else_is_left(small: tm.Pool) -> None:
    for i in range(8):
        small.put(f"soft/{i}", value(i), pin="soft")
    small.put("late", value(0))
    assert small.pin("late", "soft")
    for i in range(100):
        small.put(f"k{i}", value(i))
        small.get(f"k{i}")  # used more often than those that are pinned
    assert all(small.exists([f"soft/{i}" for i in range(8)]))
    assert small.info("late").pin == "soft"
    assert node()["soft_pinned_bytes"] == 9 * MiB
    for i in range(64):  # more than there is memory: the least valuable of them go, nothing else is left
        small.put(f"more/{i}", value(i), pin="soft")
    there = small.keys()
    assert 24 <= len(there) <= 32
    assert all(small.info(key).pin == "soft" for key in there)


def test_hard_pins_are_never_evicted_and_a_full_pool_says_so(small: tm.Pool) -> None:
    for i in range(30):
        small.put(f"hard/{i}", value(i), pin="hard")
    for i in range(20):
        small.put(f"k{i}", value(i))
    assert all(small.exists([f"hard/{i}" for i in range(30)]))
    with pytest.raises(tm.PoolFull, match=f"{30 * MiB} bytes are pinned hard"):
        small.put("big", value(0, 8 * MiB), timeout=0.5)
    waiting = threading.Thread(target=lambda: small.put("big", value(0, 8 * MiB), timeout=30))
    waiting.start()
    assert eventually(lambda: node()["waiting"] == 1)
    assert small.pin([f"hard/{i}" for i in range(12)], None) == [True] * 12  # what waits for room is told
    waiting.join(20)
    assert not waiting.is_alive()
    assert torch.equal(small.get("big"), value(0, 8 * MiB))
    assert all(torch.equal(small.get(f"hard/{i}"), value(i)) for i in range(12, 30))
    assert node()["hard_pinned_bytes"] == 18 * MiB
    assert small.delete("hard/29")  # a pin is against eviction, not against its owner
    assert node()["hard_pinned_bytes"] == 17 * MiB


def test_a_pin_is_of_a_version(small: tm.Pool) -> None:
    assert small.pin("nobody", "hard") is False
    small.put("a", value(0), pin="hard")
    small.put("a", value(1))
    assert small.info("a").pin is None
    assert small.pin(["a", "nobody"], "soft") == [True, False]
    assert small.info("a").pin == "soft"
    assert small.pin("a", None)
    assert small.info("a").pin is None
    small.put_many({f"m/{i}": value(i, 64) for i in range(100)}, pin="hard")
    assert {small.info(key).pin for key in small.keys("m/")} == {"hard"}
    small.put("s", value(0), sealed=True)
    assert not small.put("s", value(0), sealed=True, pin="hard").stored
    assert small.info("s").pin is None  # what is kept is kept as it was
    with pytest.raises(tm.InvalidArgument, match="pin is"):
        small.pin("a", "medium")  # type: ignore[call-overload]
    with pytest.raises(tm.InvalidArgument, match="pin is"):
        small.put("a", value(0), pin="none")  # type: ignore[arg-type]


def test_pins_outlive_a_worker(small: tm.Pool, pool_env: PoolEnv) -> None:
    small.put("hard", value(1), pin="hard")
    small.put("soft", value(2), pin="soft")
    small.put("later", value(3))
    small.pin("later", "hard")
    os.kill(pool_env.worker(), signal.SIGKILL)
    assert eventually(lambda: small.exists("later"), 20)
    for i in range(100):
        small.put(f"k{i}", value(i))
    assert [small.info(key).pin for key in ("hard", "soft", "later")] == ["hard", "soft", "hard"]
    assert torch.equal(small.get("later"), value(3))


def test_parts_of_several_writers_are_pinned_alike(small: tm.Pool) -> None:
    other = threading.Thread(target=lambda: small.put("p", value(1), part=(1, 2), group="g", pin="hard"))
    other.start()
    small.put("p", value(0), part=(0, 2), group="g", pin="hard")
    other.join()
    for i in range(100):
        small.put(f"k{i}", value(i))
    assert [int(part[0]) for part in small.get("p")] == [0, 1]
    assert small.pin("p", "soft")
    assert (node()["hard_pinned_bytes"], node()["soft_pinned_bytes"]) == (0, 2 * MiB)


def test_what_is_pinned_stays_in_memory(with_ssd: tm.Pool) -> None:
    pool = with_ssd
    pool.put("hard", value(1), pin="hard")
    pool.put("soft", value(2), pin="soft")
    for i in range(100):
        pool.put(f"k{i}", value(i))
    assert pool.info("hard").tiers == pool.info("soft").tiers == ("dram",)
    assert eventually(lambda: pool.info("k0").tiers == ("ssd",))
    assert pool.pin("k0", "hard")
    assert (pool.info("k0").tiers, pool.info("k0").pin) == (("dram",), "hard")
    for i in range(100):
        pool.put(f"l{i}", value(i))
    assert pool.info("k0").tiers == ("dram",)
    assert pool.info("k1").tiers == ("ssd",)
    assert pool.pin("k1", "soft")  # where it is
    assert torch.equal(pool.get("k1"), value(1))
    for i in range(100):
        pool.put(f"n{i}", value(i))
    assert (pool.info("k1").tiers, pool.info("k1").pin) == (("dram",), "soft")
    assert all(torch.equal(pool.get(f"k{i}"), value(i)) for i in range(100))


def test_a_hard_pin_for_which_there_is_no_room(with_ssd: tm.Pool) -> None:
    pool = with_ssd
    pool.put("out", value(7, 4 * MiB))
    for i in range(60):
        pool.put(f"k{i}", value(i))
    assert eventually(lambda: pool.info("out").tiers == ("ssd",))
    for i in range(30):
        pool.put(f"hard/{i}", value(i), pin="hard")
    with pytest.raises(tm.PoolFull):
        pool.pin("out", "hard")
    assert pool.info("out").pin is None
    assert pool.pin([f"hard/{i}" for i in range(30)], None) == [True] * 30
    assert pool.pin("out", "hard")
    assert torch.equal(pool.get("out"), value(7, 4 * MiB))


def test_the_command_line_pins(small: tm.Pool, tmp_path: Path) -> None:
    def cli(*args: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "torch_mooncake", *args], capture_output=True, text=True, check=False
        )

    (tmp_path / "file").write_bytes(b"x" * 5000)
    assert cli("put", "a", str(tmp_path / "file"), "--pin", "soft").returncode == 0
    assert json.loads(cli("info", "a", "--json").stdout)["pin"] == "soft"
    assert cli("pin", "a").returncode == 0
    assert small.info("a").pin == "hard"
    assert "never evicted" in cli("stat").stdout
    assert cli("pin", "a", "nobody", "--as", "none").returncode == 3
    assert small.info("a").pin is None
