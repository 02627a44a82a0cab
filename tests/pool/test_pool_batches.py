"""Many keys in one call: an outcome for each, whatever happens in the middle."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any

import numpy as np
import pytest
import torch
from processes import eventually

import torch_mooncake as tm
from torch_mooncake import _core, batches
from torch_mooncake.clock import deadline_ns

MiB = 1 << 20
SIZES = (0, 1, *range(31, 66), 1000, 10_000)


def at_rest(pool: tm.Pool) -> bool:
    return all(node["prepared_bytes"] == node["limbo_bytes"] == 0 for node in pool.stat()["nodes"])


@pytest.mark.parametrize("n", SIZES)
def test_batches_of_any_size(pool: tm.Pool, n: int) -> None:
    values = {f"k{i}": torch.full((1 + i % 3,), i) for i in range(n)}
    results = tm.put_many(values)
    assert list(results) == list(values)
    assert all(result.stored for result in results.values())
    assert len({result.version for result in results.values()}) == n
    keys = list(values)
    for back in (tm.get_many(keys), tm.get_many(keys, readonly=True)):
        assert all(torch.equal(a, b) for a, b in zip(back, values.values(), strict=True))
    outs = [torch.empty_like(value) for value in values.values()]
    assert all(a is b for a, b in zip(tm.get_many(keys, out=outs), outs, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(outs, values.values(), strict=True))
    assert tm.exists(keys) == [True] * n
    assert tm.delete(keys[::2]) == [True] * len(keys[::2])
    assert tm.delete(keys) == [i % 2 == 1 for i in range(n)]
    assert tm.keys() == []


def test_values_of_all_kinds_and_sizes(pool: tm.Pool) -> None:
    values: dict[str, Any] = {
        "tensor": torch.arange(12.0).view(3, 4),
        "strided": torch.arange(12.0).view(3, 4).t(),
        "conjugated": torch.randn(5, dtype=torch.complex64).conj(),
        "parameter": torch.nn.Parameter(torch.ones(3)),
        "empty": torch.empty(0, 3),
        "number": torch.tensor(3),
        "big": torch.randn(3_000_000),
        "bytes": b"abc" * 10_000,
        "no bytes": b"",
        "array": np.arange(6, dtype=">i4").reshape(2, 3),
        "nest": {"a": [1, "x"], "b": torch.ones(70_000)},
        "none": None,
    }
    tm.put_many(values, version="v1", meta={"by": "me"})
    back = dict(zip(values, tm.get_many(list(values)), strict=True))
    for key in ("tensor", "strided", "conjugated", "parameter", "empty", "number", "big"):
        assert torch.equal(back[key], values[key].detach())
    assert back["bytes"] == values["bytes"]
    assert back["no bytes"] == b""
    assert np.array_equal(back["array"], values["array"])
    assert back["nest"]["a"] == [1, "x"]
    assert torch.equal(back["nest"]["b"], torch.ones(70_000))
    assert back["none"] is None
    assert tm.info("nest").meta == {"by": "me"}
    assert tm.info("tensor").label == "v1"
    # The same bytes as put() makes of each.
    for key, value in values.items():
        batch = tm.info(key)
        tm.put(key, value, meta={"by": "me"})
        assert tm.info(key).nbytes == batch.nbytes


def test_outputs_of_all_kinds(pool: tm.Pool) -> None:
    tm.put_many(
        {"t": torch.arange(6.0), "m": torch.arange(6.0).view(2, 3), "b": b"xyz", "a": np.arange(3), "n": [1, b"q"]}
    )
    wide = torch.zeros(2, 6)
    outs: list[Any] = [torch.empty(6), wide[:, ::2], bytearray(3), np.zeros(3, np.int64), [1, bytearray(1)]]
    tm.get_many(["t", "m", "b", "a", "n"], out=outs)
    assert torch.equal(outs[0], torch.arange(6.0))
    assert torch.equal(wide[:, ::2], torch.arange(6.0).view(2, 3))
    assert not wide[:, 1::2].any()
    assert outs[2] == b"xyz"
    assert outs[3].tolist() == [0, 1, 2]
    assert outs[4][1] == b"q"
    with pytest.raises(tm.LayoutMismatch):
        tm.get_many(["t", "m"], out=[torch.empty(6), torch.empty(6)])
    with pytest.raises(tm.LayoutMismatch):
        tm.get_many(["t"], out=[torch.empty(6, dtype=torch.float64)])
    with pytest.raises(tm.InvalidArgument):
        tm.get_many(["t", "m"], out=[torch.empty(6)])


def test_an_outcome_for_each_key(pool: tm.Pool) -> None:
    tm.put("there", 1)
    tm.put("sealed", 1, sealed=True)
    items = {f"k{i}": b"x" * (10 if i % 2 else 40_000) for i in range(600)}
    items["there"] = b"new"
    items["sealed"] = b"new"
    items["huge"] = torch.empty(300 * MiB, dtype=torch.uint8)
    items["odd"] = {1, 2}
    results = tm.put_many(items, if_exists="error", errors="return", timeout=20)
    failed = {key: type(result) for key, result in results.items() if isinstance(result, Exception)}
    assert failed == {"there": tm.KeyExists, "sealed": tm.InvalidArgument, "huge": tm.PoolFull, "odd": TypeError}
    assert tm.get("there") == 1
    assert tm.get_many([f"k{i}" for i in range(600)]) == [items[f"k{i}"] for i in range(600)]
    with pytest.raises(tm.KeyExists, match=r"'there'.*1 of 2 keys"):
        tm.put_many({"new": b"1", "there": b"2"}, if_exists="error")
    assert tm.get("new") == b"1"  # what failed was another key
    results = tm.put_many({"new": b"3", "newer": b"4"}, if_exists="keep")
    assert [result.stored for result in results.values()] == [False, True]
    assert tm.get_many(["new", "newer", "none"], missing="mask") == [b"1", b"4", None]
    with pytest.raises(tm.KeyNotFound):
        tm.get_many(["new", "none"])
    back = tm.get_many(["new", "none", "newer"], errors="return")
    assert (back[0], back[2]) == (b"1", b"4")
    assert isinstance(back[1], tm.KeyNotFound)
    with pytest.raises(tm.InvalidArgument):
        tm.put_many({"": b"1"})
    assert eventually(lambda: at_rest(pool))


def test_puts_of_one_key_take_effect_in_their_order(pool: tm.Pool) -> None:
    for nbytes in (10, 5000, 100_000):
        pairs = [(f"k{i % 3}", bytes([i]) * nbytes) for i in range(100)]
        results = tm.put_many(pairs)
        assert len(results) == 100
        for k in range(3):
            versions = [r.version for (key, _), r in zip(pairs, results, strict=True) if key == f"k{k}"]
            assert versions == sorted(versions)
            assert tm.get(f"k{k}") == max(value for key, value in pairs if key == f"k{k}")


def test_a_pool_that_is_full_in_the_middle(pool: tm.Pool, child: Any) -> None:
    tm.put_many({f"held{i}": torch.full((8 * MiB,), i, dtype=torch.uint8) for i in range(20)})
    held = [tm.get(f"held{i}", readonly=True) for i in range(15)]  # 120 MiB pinned, the budget of maps is half
    other = child()
    other("import torch, torch_mooncake as tm; h = [tm.get(f'held{i}', readonly=True) for i in range(15, 20)]")
    items = {f"k{i}": torch.full((8 * MiB,), i, dtype=torch.uint8) for i in range(30)}  # 240 MiB more
    results = tm.put_many(items, errors="return", timeout=2)
    failed = [key for key, result in results.items() if isinstance(result, Exception)]
    assert all(isinstance(results[key], (tm.PoolFull, tm.DeadlineExceeded)) for key in failed)
    for key, value in zip(items, tm.get_many(list(items), missing="mask"), strict=True):
        assert value is None or torch.equal(value, items[key])  # evicted again, or whole
    assert [int(t[0]) for t in held] == list(range(15))
    del held
    other("del h")
    assert eventually(lambda: at_rest(pool))
    assert all(r.stored for r in tm.put_many(items).values())  # room is made again


@pytest.mark.parametrize("point", ["client.reserved=kill@2", "client.written=kill@2", "client.committed=kill@2"])
def test_a_writer_killed_in_the_middle_of_a_batch_leaves_nothing_half(pool: tm.Pool, child: Any, point: str) -> None:
    n, nbytes = 1000, 5000
    keys = [f"k{i}" for i in range(n)]
    tm.put_many(dict.fromkeys(keys[::2], b"o" * nbytes))
    other = child({"TM_FAILPOINTS": point})
    with pytest.raises(Exception):  # noqa: B017  # it dies
        other(f"import torch_mooncake as tm; tm.put_many({{f'k{{i}}': b'n' * {nbytes} for i in range({n})}})")
    assert eventually(lambda: at_rest(pool))
    back = tm.get_many(keys, missing="mask")
    for i, value in enumerate(back):
        assert value in (b"n" * nbytes, b"o" * nbytes if i % 2 == 0 else None)
    # It died in its second chunk of 256 of four; the commits of the others were asked for by then, or were not.
    assert sum(value == b"n" * nbytes for value in back) in ((512, 768, n) if "committed" in point else (0, 256))


def test_the_worker_killed_under_batches(pool: tm.Pool, pool_env: Any) -> None:
    keys = [f"k{i}" for i in range(300)]
    for turn in range(6):
        if turn % 2:
            os.kill(pool_env.worker(), signal.SIGKILL)
        results = tm.put_many({key: bytes([turn]) * 3000 for key in keys}, errors="return")
        back = tm.get_many(keys, missing="mask")
        for key, value in zip(keys, back, strict=True):
            if isinstance(results[key], Exception):
                assert "outcome unknown" in str(results[key])
                assert value is None or value[0] in (turn - 1, turn)
            else:
                assert value == bytes([turn]) * 3000, key


def test_taking_many_at_most_once(pool: tm.Pool, child: Any) -> None:
    keys = [f"k{i}" for i in range(500)]
    tm.put_many({key: key.encode() for key in keys})
    others = [child() for _ in range(2)]
    for other in others:
        other.start(
            f"import torch_mooncake as tm; keys = {keys!r}; "
            "result = [k for k, v in zip(keys, tm.get_many(keys, consume=True, missing='mask')) if v == k.encode()]"
        )
    taken = [other.result() for other in others]
    assert sorted(taken[0] + taken[1]) == sorted(keys)
    assert tm.keys() == []


def test_await_forms(pool: tm.Pool) -> None:
    async def run() -> None:
        await tm.aput_many([("a", b"1"), ("b", torch.ones(3))])
        a, b = await tm.aget_many(["a", "b"])
        assert (a, b.tolist()) == (b"1", [1, 1, 1])
        assert await tm.adelete(["a", "b", "c"]) == [True, True, False]

    asyncio.run(run())


@pytest.mark.parametrize("odd", [object(), b"2"])
def test_a_batch_that_cannot_be_sent_is_told_for_each_of_its_keys(odd: Any) -> None:
    class Gone:
        def put_many(self, *_: Any) -> list[Any]:
            raise tm.PoolUnavailable("nobody there")

        put_plain = put_many

    client: Any = Gone()
    outcomes = batches.put(
        client, ["a", "b", "c"], [b"1", odd, b"3"], None, _core.PutOptions(), deadline_ns(5), lambda key, value: None
    )
    expected = [tm.PoolUnavailable, TypeError if type(odd) is object else tm.PoolUnavailable, tm.PoolUnavailable]
    assert [type(outcome) for outcome in outcomes] == expected


def test_bytes_are_no_place_to_read_into(pool: tm.Pool) -> None:
    pool.put_many({"bytes": b"stored", "tensor": torch.arange(3)})
    out = [b"------", torch.zeros(3, dtype=torch.int64)]
    results = pool.get_many(["bytes", "tensor"], out=out, errors="return")
    assert isinstance(results[0], Exception)
    assert out[0] == b"------"
    assert torch.equal(results[1], torch.arange(3))
