"""Values of no bytes and of more than 4 GiB, and as many keys as ten million."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from processes import Child, PoolEnv, eventually

import torch_mooncake as tm

GiB = 1 << 30
NOTHING: list[Any] = [b"", torch.empty(0), torch.empty(3, 0, 2, dtype=torch.int8), np.empty((0, 4), np.float16)]


def available_nbytes() -> int:
    with open("/proc/meminfo") as lines:
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable"))


def needs(nbytes: int) -> None:
    if available_nbytes() < nbytes:
        pytest.skip(f"needs {nbytes / GiB:.0f} GiB of memory, {available_nbytes() / GiB:.0f} are available")


def same(a: Any, b: Any) -> bool:
    if isinstance(b, bytes):
        return a == b
    return bool(type(a) is type(b) and a.shape == b.shape and a.dtype == b.dtype)


@pytest.mark.parametrize("sealed", [False, True], ids=["named", "sealed"])
@pytest.mark.parametrize("value", NOTHING, ids=["bytes", "tensor", "tensor of 3x0x2", "array"])
def test_a_value_of_no_bytes_is_a_value(pool: tm.Pool, child: Callable[..., Child], value: Any, sealed: bool) -> None:
    assert pool.get("k", default=None) is None
    pool.put("k", value, sealed=sealed)
    assert pool.exists("k")
    assert pool.info("k").nbytes == 0
    assert same(pool.get("k"), value)
    assert same(pool.get("k", readonly=True), value)
    pool.put_many({f"many/{i}": value for i in range(300)}, sealed=sealed)
    assert all(same(got, value) for got in pool.get_many([f"many/{i}" for i in range(300)]))
    other = child()
    assert other("import torch_mooncake as tm\nresult = [len(tm.get('k')), len(tm.keys('many/'))]") == [len(value), 300]
    assert pool.stat()["nodes"][0]["used_bytes"] == 0
    pool.delete("k")
    assert not pool.exists("k")


def test_no_bytes_and_some_replace_each_other(pool: tm.Pool) -> None:
    for i in range(20):
        pool.put("k", b"" if i % 2 else b"some")
        assert pool.get("k") == (b"" if i % 2 else b"some")
    assert pool.get("k", consume=True) == b""
    with pytest.raises(tm.KeyNotFound):
        pool.get("k")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("host_id", [None, "elsewhere"], ids=["same host", "another host"])
def test_more_than_4_gib(pool_env: PoolEnv, monkeypatch: pytest.MonkeyPatch, host_id: str | None) -> None:
    count = (4 * GiB >> 3) + 12_345
    needs(3 * 8 * count)
    monkeypatch.setenv("TM_MEMORY", "5GiB")
    value = torch.arange(count)
    with tm.Pool(), tm.Pool(host_id=host_id) as pool:
        pool.put("big", value, timeout=300)
        assert pool.info("big").nbytes == 8 * count
        value.zero_()
        pool.get("big", out=value, timeout=300)
        chunk = 1 << 24
        for at in range(0, count, chunk):
            assert torch.equal(value[at : at + chunk], torch.arange(at, min(at + chunk, count)))
        del value
        got = pool.get("big", readonly=True, timeout=300)
        for at in (0, (4 * GiB >> 3) - 1, 4 * GiB >> 3, count - 1):
            assert got[at] == at


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_ten_million_keys(pool_env: PoolEnv, monkeypatch: pytest.MonkeyPatch) -> None:
    """All are there, also after the node's worker was killed; when there is no room for more, others go."""
    count, batch = 10_000_000, 2000
    needs(12 * GiB)
    monkeypatch.setenv("TM_MEMORY", "10GiB")  # an extent for each KiB: 10 485 760

    def put(numbers: range) -> None:
        pool.put_many({f"cache/page/{i}": i.to_bytes(64, "little") for i in numbers}, timeout=60)

    def check(numbers: list[int]) -> None:
        got = pool.get_many([f"cache/page/{i}" for i in numbers], timeout=60)
        assert [int.from_bytes(value, "little") for value in got] == numbers

    some = random.Random(1).sample(range(count), 20_000)
    with tm.Pool(timeout=60) as pool:
        for at in range(0, count, batch):
            put(range(at, at + batch))
        stat = pool.stat()
        assert stat["keys"] == count
        assert stat["nodes"][0]["evictions"] == 0
        check(some)
        prefix = "cache/page/777"
        assert len(pool.keys(prefix, timeout=120)) == 1 + 10 + 100 + 1000 + 10_000

        os.kill(pool_env.worker(), signal.SIGKILL)

        def back() -> bool:
            try:
                return bool(pool.get("cache/page/0") is not None)
            except (tm.PoolUnavailable, tm.DeadlineExceeded):
                return False

        assert eventually(back, timeout=300)
        assert pool.stat()["keys"] == count
        check(some)

        for at in range(count, count + 1_000_000, batch):
            put(range(at, at + batch))
        stat = pool.stat()
        assert stat["nodes"][0]["evictions"] >= 500_000
        assert stat["keys"] == stat["nodes"][0]["extents"] <= 10_485_760
        check(list(range(count + 600_000, count + 1_000_000, 37)))
