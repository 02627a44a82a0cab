"""Locations that a client remembers: never an older value than one that was acknowledged, and no message for a hit."""

from __future__ import annotations

import mmap
import os
import signal
import struct
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import eventually, stopped

import torch_mooncake as tm

MiB = 1 << 20

# Puts (and now and then deletes) values that carry a growing number, and says in shared memory what was acknowledged:
# (number of the last put that has returned, number of the put under way, deleted up to this number).
WRITER = """
import ctypes, mmap, time, torch, torch_mooncake as tm
file = open(path, "r+b")
board = mmap.mmap(file.fileno(), 0)
acknowledged, begun = (ctypes.c_uint64.from_buffer(board, at) for at in (0, 8))  # struct would write zeros first
end = time.monotonic() + seconds
number = 0
while time.monotonic() < end:
    number += 1
    if number % 7 == 0:
        begun.value = number
        tm.delete("k")
        acknowledged.value = number
        continue
    value = torch.full((length,), number)
    begun.value = number
    tm.put("k", value)
    acknowledged.value = number
result = number
"""

# Reads as fast as it can, and says what it saw that cannot be.
READER = """
import mmap, struct, time, torch, torch_mooncake as tm
file = open(path, "r+b")
board = mmap.mmap(file.fileno(), 0)
end = time.monotonic() + seconds
result, gets = [], 0
out = torch.empty(length, dtype=torch.int64)
while time.monotonic() < end and len(result) < 5:
    gets += 1
    (acknowledged,) = struct.unpack_from("Q", board, 0)
    if gets % 3 == 0:
        value = tm.get_many(["k"], missing="mask")[0]
    elif gets % 3 == 1:
        value = tm.get("k", default=None)
    else:
        value = tm.get("k", default=None, readonly=True)
    (begun,) = struct.unpack_from("Q", board, 8)
    if value is None:
        # Missing: a delete that was acknowledged last, or one that was under way.
        if not any(n % 7 == 0 for n in range(max(acknowledged, 1), begun + 1)) and acknowledged:
            result.append(f"missing between {acknowledged} and {begun}")
        continue
    low, high = int(value.min()), int(value.max())
    del value
    if low != high:
        result.append(f"torn: {low} and {high}")
    if not acknowledged <= low <= begun:
        result.append(f"{low} after {acknowledged} was acknowledged, while {begun} was under way")
result = {"wrong": result, "gets": gets}
"""


@pytest.fixture
def board(tmp_path: Path) -> Path:
    path = tmp_path / "board"
    path.write_bytes(bytes(mmap.PAGESIZE))
    return path


@pytest.mark.parametrize("length", [512, 60_000])
def test_never_an_older_value_than_the_acknowledged_one(pool: tm.Pool, child: Any, board: Path, length: int) -> None:
    readers = [child(), child()]
    writer = child()
    names = {"path": str(board), "seconds": 1.0, "length": length}
    for other in [*readers, writer]:
        other("import torch, torch_mooncake as tm; tm.init()")
    writer.start(WRITER, **names)
    for reader in readers:
        reader.start(READER, **names)
    assert writer.result() > 0
    for reader in readers:
        found = reader.result()
        assert found["wrong"] == []
        assert found["gets"] > 0


def test_a_reader_that_was_stopped_sees_what_came_meanwhile(pool: tm.Pool, child: Any, board: Path) -> None:
    reader = child()
    reader("import torch, torch_mooncake as tm; tm.init()")
    tm.put("k", torch.full((512,), 0))
    reader.start(READER, path=str(board), seconds=2.0, length=512)
    with board.open("r+b") as file:
        words = mmap.mmap(file.fileno(), 0)
    for number in range(1, 13):
        if number % 7 == 0:
            continue
        reader.kill(signal.SIGSTOP)
        struct.pack_into("Q", words, 8, number)
        tm.put("k", torch.full((512,), number))
        struct.pack_into("Q", words, 0, number)
        os.kill(reader.pid, signal.SIGCONT)
        time.sleep(0.03)
    found = reader.result()
    assert found["wrong"] == []


def test_a_hit_asks_nobody_and_only_while_the_node_counts(pool_env: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TM_VIEW_TTL_S", "4")
    monkeypatch.setenv("TM_LINGER_S", "5")  # it is stopped for so long that it may lose its client
    tm.init()
    tm.put_many({"small": torch.arange(100), "big": torch.arange(MiB)})

    def asks_nobody() -> bool:
        before = tm.stat()["nodes"][0]["lookups"]
        for key in ("small", "big"):
            tm.get(key)
        return bool(tm.stat()["nodes"][0]["lookups"] == before)

    assert eventually(asks_nobody)  # the node has said that it counts
    with stopped(pool_env.worker()):
        assert torch.equal(tm.get("small", timeout=5), torch.arange(100))
        assert torch.equal(tm.get("big", timeout=5), torch.arange(MiB))
        assert torch.equal(tm.get("big", readonly=True, timeout=5), torch.arange(MiB))
        assert tm.exists("small", timeout=5)
        assert torch.equal(tm.get_many(["small", "big"], timeout=5)[0], torch.arange(100))
        with pytest.raises(tm.Error):
            tm.get("missing", timeout=0.2)  # what is not there is asked for

        def unknown() -> bool:
            try:
                tm.get("small", timeout=0.5)
            except (tm.DeadlineExceeded, tm.PoolUnavailable):
                return True
            return False

        assert eventually(unknown)  # a node that has been silent for so long may have been expelled
    assert torch.equal(tm.get("small"), torch.arange(100))


def test_what_is_gone_is_not_found(pool: tm.Pool, child: Any) -> None:
    other = child()
    other("import torch, torch_mooncake as tm; tm.init()")
    for nbytes in (100, 100_000):
        value = torch.ones(nbytes, dtype=torch.uint8)
        tm.put("k", value)
        tm.get("k")
        first = tm.info("k").version
        other(f"tm.put('k', torch.zeros({nbytes}, dtype=torch.uint8))")
        assert tm.info("k").version > first
        assert not tm.get("k").any()
        assert tm.get("k", version=tm.info("k").version) is not None
        with pytest.raises(tm.KeyNotFound):
            tm.get("k", version="label")
        assert tm.exists("k")
        other("tm.delete('k')")
        assert not tm.exists("k")
        assert tm.get("k", default=None) is None
        with pytest.raises(tm.KeyNotFound):
            tm.info("k")
        tm.put("k", value, ttl_s=0.3)
        assert torch.equal(tm.get("k"), value)
        time.sleep(0.35)
        assert tm.get("k", default=None) is None
        tm.put("k", value)
        tm.get("k")
        assert torch.equal(tm.get("k", consume=True), value)
        assert tm.get("k", default=None) is None


def test_what_is_read_from_the_cache_counts_as_used(pool: tm.Pool) -> None:
    tm.put("hot", torch.arange(1000))
    for i in range(600):  # 600 MiB through a pool of 256 MiB
        tm.put(f"cold{i}", torch.empty(MiB, dtype=torch.uint8))
        for _ in range(5):
            assert torch.equal(tm.get("hot", default=torch.empty(0)), torch.arange(1000)), i
        time.sleep(0.001)


def test_a_worker_that_starts_again(pool: tm.Pool, pool_env: Any) -> None:
    tm.put("k", torch.arange(100))
    for _ in range(3):
        assert torch.equal(tm.get("k"), torch.arange(100))
        assert eventually(lambda: len(pool_env.nodes()) == 2)  # the next worker runs, whether or not it serves yet
        os.kill(pool_env.worker(), signal.SIGKILL)
        assert torch.equal(tm.get("k"), torch.arange(100))

    def put() -> bool:
        try:
            tm.put("k", torch.arange(50), timeout=5)
        except (tm.PeerLost, tm.PoolUnavailable):  # it met the dying worker, and says that nobody can say
            return False
        return True

    assert eventually(put, timeout=20)
    assert torch.equal(tm.get("k"), torch.arange(50))
