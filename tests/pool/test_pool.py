"""The verbs, over a real node."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import numpy as np
import pytest
import torch

import torch_mooncake as tm


def test_put_and_get_of_values(pool: tm.Pool) -> None:
    values: dict[str, Any] = {
        "tensor": torch.arange(12).view(3, 4),
        "big": torch.randn(300, 1000),
        "empty": torch.empty(0, 3),
        "scalar tensor": torch.tensor(3.5),
        "bytes": b"abc" * 100_000,
        "no bytes": b"",
        "none": None,
        "number": 10**30,
        "text": "π" * 1000,
        "state": {"a": torch.ones(2, dtype=torch.bfloat16), "b": [1, (2.5, True)], 3: {}},
        "array": np.arange(6, dtype=">i4").reshape(2, 3),
    }
    results = tm.put_many(values)
    assert all(r.stored for r in results.values())
    for key, value in values.items():
        back = tm.get(key)
        if isinstance(value, torch.Tensor):
            assert back.dtype is value.dtype
            assert torch.equal(back, value)
        elif isinstance(value, np.ndarray):
            assert back.dtype == value.dtype
            assert np.array_equal(back, value)
        elif key == "state":
            assert torch.equal(back.pop("a"), value.pop("a"))
            assert back == value
        else:
            assert type(back) is type(value)
            assert back == value
    assert tm.keys() == sorted(values)


def test_missing_is_KeyNotFound_and_waiting_for_it_DeadlineExceeded(pool: tm.Pool) -> None:
    with pytest.raises(tm.KeyNotFound, match="nobody"):
        tm.get("nobody")
    with pytest.raises(KeyError):
        tm.get("nobody")
    assert tm.get("nobody", default=7) == 7
    start = time.monotonic()
    with pytest.raises(tm.DeadlineExceeded):
        tm.get("nobody", wait=0.3)
    with pytest.raises(tm.DeadlineExceeded):
        tm.wait("nobody", timeout=0.3)
    assert 0.6 <= time.monotonic() - start < 5
    assert not tm.exists("nobody")
    assert tm.delete("nobody") is False


def test_wait_ends_when_the_key_appears(pool: tm.Pool, child: Any) -> None:
    other = child()
    other("import torch, time, torch_mooncake as tm; tm.init()")
    other.start("time.sleep(0.5); tm.put('late', torch.ones(3))")
    assert torch.equal(tm.get("late", wait=20), torch.ones(3))
    assert isinstance(tm.wait("late"), tm.Version)
    other.result()


def test_exists_delete_and_keys(pool: tm.Pool) -> None:
    for key in ("a/1", "a/2", "b/1"):
        tm.put(key, key)
    assert tm.exists(["a/1", "c", "b/1"]) == [True, False, True]
    assert tm.keys("a/") == ["a/1", "a/2"]
    assert tm.delete("a/1") is True
    assert tm.delete(["a/1", "a/2"]) == [False, True]
    assert tm.keys() == ["b/1"]
    with pytest.raises(tm.KeyNotFound):
        tm.get("a/1")


def test_if_exists(pool: tm.Pool) -> None:
    first = tm.put("k", 1)
    assert tm.put("k", 2).version > first.version
    assert tm.get("k") == 2
    kept = tm.put("k", 3, if_exists="keep")
    assert not kept.stored
    assert tm.get("k") == 2
    with pytest.raises(tm.KeyExists, match="k"):
        tm.put("k", 4, if_exists="error")
    assert tm.put("new", 1, if_exists="keep").stored
    with pytest.raises(ValueError, match="if_exists"):
        tm.put("k", 4, if_exists="maybe")  # type: ignore[arg-type]


def test_version_labels_and_versions(pool: tm.Pool) -> None:
    result = tm.put("k", "old", version=7)
    assert tm.get("k", version=7) == "old"
    assert tm.get("k", version=result.version) == "old"
    with pytest.raises(tm.KeyNotFound):
        tm.get("k", version=8)
    tm.put("k", "new", version="v8")
    assert tm.get("k", version="v8") == "new"
    assert tm.get("k", version=result.version) == "new"


def test_sealed_keys_keep_their_first_content(pool: tm.Pool) -> None:
    assert tm.put("hash", b"page" * 100, sealed=True).stored
    again = tm.put("hash", b"page" * 100, sealed=True)
    assert not again.stored
    assert tm.get("hash") == b"page" * 100


def test_larger_than_the_pool_is_PoolFull_with_sizes(pool: tm.Pool) -> None:
    with pytest.raises(tm.PoolFull, match=str(300 << 20)) as caught:
        tm.put("huge", torch.empty(300 << 20, dtype=torch.uint8), timeout=5)
    assert str(256 << 20) in str(caught.value)
    assert caught.value.retryable
    tm.put("small", 1)
    assert tm.keys() == ["small"]


def test_bad_arguments(pool: tm.Pool) -> None:
    with pytest.raises(TypeError, match="key is a str"):
        tm.get(3)  # type: ignore[arg-type]
    for key in ("", "x" * 1025):
        with pytest.raises(tm.InvalidArgument, match="1 to 1024"):
            tm.put(key, 1)
    with pytest.raises(tm.InvalidArgument, match="replicas"):
        tm.put("k", 1, replicas="many")
    with pytest.raises(tm.Error):  # there is one host
        tm.put("k", 1, replicas=2, timeout=2)
    assert tm.put("k", 1, replicas="≤2").stored
    with pytest.raises(tm.KeyNotFound, match="parent"):
        tm.put("k", 1, parent="p")
    with pytest.raises(TypeError, match="cannot be put"):
        tm.put("k", object())


def test_out_copies_in_place(pool: tm.Pool) -> None:
    value = {"w": torch.randn(64, 1000), "b": torch.randn(7), "n": np.arange(5), "raw": b"12345", "step": 3}
    tm.put("k", value)
    out = {
        "w": torch.empty(1000, 64).t(),  # strided
        "b": torch.empty(7),
        "n": np.empty(5, np.int64),
        "raw": bytearray(5),
        "step": 3,
    }
    assert tm.get("k", out=out) is out
    assert torch.equal(out["w"], value["w"])
    assert torch.equal(out["b"], value["b"])
    assert np.array_equal(out["n"], value["n"])
    assert out["raw"] == b"12345"
    tm.put("t", torch.arange(10.0))
    for wrong in (torch.empty(11), torch.empty(10, dtype=torch.float64), np.empty(10), torch.empty(2, 5)):
        with pytest.raises(tm.LayoutMismatch):
            tm.get("t", out=wrong)
    with pytest.raises(tm.LayoutMismatch, match=r"\['b'\]"):
        tm.get("k", out={**out, "b": torch.empty(8)})
    with pytest.raises(tm.LayoutMismatch, match="dict"):
        tm.get("k", out={"w": out["w"]})
    with pytest.raises(tm.InvalidArgument, match="out="):
        tm.get("t", out=torch.empty(10), dtype=torch.float64)


def test_dtype_and_device_convert(pool: tm.Pool) -> None:
    tm.put("k", {"w": torch.arange(100_000.0), "n": np.arange(3)})
    back = tm.get("k", dtype=torch.bfloat16, device="cpu")
    assert back["w"].dtype is torch.bfloat16
    back["w"].zero_()
    back["n"][0] = 9
    assert tm.get("k")["w"][-1] == 99_999.0
    assert tm.get("k")["n"][0] == 0
    assert tm.get("k", device="meta")["w"].shape == (100_000,)


def test_get_many(pool: tm.Pool) -> None:
    tm.put_many({f"k{i}": torch.full((1000,), i) for i in range(20)})
    keys = [f"k{i}" for i in range(22)]
    back = tm.get_many(keys, missing="mask", readonly=True)
    assert [None if b is None else int(b[0]) for b in back] == [*range(20), None, None]
    with pytest.raises(tm.KeyNotFound, match="k20"):
        tm.get_many(keys)
    out = [torch.empty(1000, dtype=torch.int64) for _ in range(2)]
    tm.get_many(["k3", "k4"], out=out)
    assert [int(o[0]) for o in out] == [3, 4]


def test_await_forms(pool: tm.Pool) -> None:
    async def run() -> None:
        assert (await tm.aput("k", torch.ones(4))).stored
        assert torch.equal(await tm.aget("k"), torch.ones(4))
        waiting = asyncio.ensure_future(tm.await_key("later"))
        await tm.aput_many({"later": 1, "other": 2})
        await asyncio.wait_for(waiting, 20)
        assert await tm.aexists(["k", "x"]) == [True, False]
        assert await tm.akeys() == ["k", "later", "other"]
        assert await tm.adelete("k")
        with pytest.raises(tm.KeyNotFound):
            await tm.aget("k")
        assert await pool.aget_many(["later", "other"]) == [1, 2]
        assert (await tm.astat())["keys"] == 2

    asyncio.run(run())


def test_stat_counts(pool: tm.Pool) -> None:
    tm.put("k", torch.zeros(1 << 20, dtype=torch.uint8))
    stat = tm.stat()
    assert stat["keys"] == 1
    (node,) = stat["nodes"]
    assert node["limit_bytes"] == 256 << 20
    assert 1 << 20 <= node["used_bytes"] < 2 << 20
    assert node["is_home"]


def test_init_is_idempotent_and_close_ends_it(pool: tm.Pool) -> None:
    assert tm.init() is pool
    with pytest.raises(tm.InvalidArgument, match="pool"):
        tm.init(pool="other")
    tm.put("k", torch.arange(100_000))
    kept = tm.get("k")
    tm.close()
    with pytest.raises(tm.Closed):
        pool.get("k")
    assert kept[99_999] == 99_999  # tensors outlive the pool
    kept.zero_()


def test_default_pool_is_made_on_first_use(pool_env: Any) -> None:
    tm.put("k", 1)
    assert tm.init().get("k") == 1
    assert (pool_env.folder.stat().st_mode & 0o777) == 0o700


def test_explicit_pools_live_beside_the_default_one(pool: tm.Pool) -> None:
    with tm.Pool(pool=pool.config.pool + "-b") as other:
        other.put("k", "theirs")
        pool.put("k", "ours")
        assert (pool.get("k"), other.get("k")) == ("ours", "theirs")
