"""Objects: metadata of the user's, time to live, taking (at most once), several writers of one key."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from processes import Child, eventually

import torch_mooncake as tm

ATTACH = "import os, numpy as np, torch_mooncake as tm; tm.init()"


def used_bytes() -> int:
    return sum(node["used_bytes"] for node in tm.stat()["nodes"])


# --- metadata ---


def test_info_tells_what_is_known_of_a_key(pool: tm.Pool) -> None:
    meta = {"step": 7, "loss": 0.5, "tags": ["a", b"\x00", None, True], "nested": {"x": {}}}
    result = tm.put("k", torch.zeros(100), version="v7", meta=meta)
    info = tm.info("k")
    assert info == tm.Info("k", result.version, "v7", 400, meta, False, 1, 1, True, None, ("dram",))
    tm.put("k", {f"layer{i}": torch.zeros(1) for i in range(20_000)}, meta={"long": "description"})
    assert tm.info("k").meta == {"long": "description"}
    tm.put("k", 1)
    assert tm.info("k").meta == {}
    with pytest.raises(tm.KeyNotFound):
        tm.info("none")


def test_metadata_is_small_and_plain(pool: tm.Pool) -> None:
    for wrong in ({"a": torch.zeros(1)}, {"a": {1: 2}}, {1: 2}, {"a": [object()]}, [1], "text"):
        with pytest.raises(TypeError, match="meta"):
            tm.put("k", 1, meta=wrong)  # type: ignore[arg-type]
    with pytest.raises(tm.InvalidArgument, match="65536"):
        tm.put("k", 1, meta={"a": "x" * 70_000})
    with pytest.raises(tm.InvalidArgument, match="64 bits"):
        tm.put("k", 1, meta={"a": 1 << 64})
    assert not tm.exists("k")


def test_tensors_are_aligned_in_memory(pool: tm.Pool) -> None:
    value = {"small": torch.arange(3), "page": torch.ones(1 << 16, dtype=torch.uint8), "odd": torch.ones(70_001)}
    tm.put("k", value)
    for readonly in (False, True):
        back = tm.get("k", readonly=readonly)
        assert back["small"].data_ptr() % 64 == 0
        assert back["page"].data_ptr() % 4096 == back["odd"].data_ptr() % 4096 == 0


# --- time to live ---


def test_what_has_expired_is_missing_everywhere_and_its_memory_comes_back(pool: tm.Pool, child: Any) -> None:
    other = child()
    other(ATTACH)
    before = used_bytes()
    tm.put("k", torch.zeros(1 << 20, dtype=torch.uint8), ttl_s=2.0)
    until = time.monotonic() + 2.0
    tm.put("stays", 1, ttl_s=1000)
    left = tm.info("k").expires_in_s
    assert left is not None
    assert 0 < left <= 2
    assert other("result = tm.exists('k')")
    mapped = tm.get("k")
    time.sleep(max(0.0, until - time.monotonic()))
    with pytest.raises(tm.KeyNotFound):  # at once: not when somebody comes by to sweep
        tm.get("k")
    assert not other("result = tm.exists('k')")
    assert tm.keys() == ["stays"]
    assert tm.delete("k") is False
    assert int(mapped.sum()) == 0  # what was got stays whole
    del mapped
    assert eventually(lambda: used_bytes() <= before + 8192, 5)
    assert tm.put("k", 2, if_exists="error").stored


def test_a_replacement_has_its_own_time(pool: tm.Pool) -> None:
    tm.put("k", 1, ttl_s=0.2)
    tm.put("k", 2)
    time.sleep(0.9)
    assert tm.get("k") == 2
    tm.put("k", 3, ttl_s=0.05)
    time.sleep(0.06)
    assert tm.put("k", 4, if_exists="keep").stored
    assert tm.get("k") == 4
    for wrong in (0, -1, 1e12, float("nan")):
        with pytest.raises(tm.InvalidArgument, match="ttl_s"):
            tm.put("k", 1, ttl_s=wrong)


def test_a_worker_that_starts_again_revives_nothing(pool: tm.Pool, pool_env: Any) -> None:
    tm.put("gone", 1, ttl_s=0.4)
    tm.put("later", torch.ones(100_000), ttl_s=60)
    os.kill(pool_env.worker(), signal.SIGKILL)
    end = time.monotonic() + 0.4
    assert tm.exists("later")
    left = tm.info("later").expires_in_s
    assert left is not None
    assert 50 < left < 60
    while time.monotonic() < end:
        time.sleep(0.01)
    assert not tm.exists("gone")
    os.kill(pool_env.worker(), signal.SIGKILL)
    assert tm.exists(["gone", "later"]) == [False, True]
    assert tm.keys() == ["later"]


def test_a_wait_goes_on_past_an_expiry(pool: tm.Pool) -> None:
    tm.put("k", 1, ttl_s=0.05)
    time.sleep(0.06)
    with pytest.raises(tm.DeadlineExceeded):
        tm.wait("k", timeout=0.5)


# --- taking ---


def test_consume_takes_the_value(pool: tm.Pool) -> None:
    for value in (b"small", torch.arange(1_000_000)):
        tm.put("k", value)
        taken = tm.get("k", consume=True)
        assert not tm.exists("k")
        assert torch.equal(taken, value) if isinstance(value, torch.Tensor) else taken == value
        with pytest.raises(tm.KeyNotFound):
            tm.get("k", consume=True)
        assert tm.get("k", consume=True, default=None) is None
    tm.put("k", torch.ones(10))
    out = torch.empty(10)
    assert tm.get("k", consume=True, out=out) is out
    tm.put("k", torch.ones(10))
    with pytest.raises(tm.LayoutMismatch):  # what was not returned was not taken
        tm.get("k", consume=True, out=torch.empty(11))
    assert tm.exists("k")


def test_of_racing_consumers_exactly_one_gets_it(pool: tm.Pool, child: Any) -> None:
    others = [child(), child()]
    for other in others:
        other(ATTACH)
    rounds = 40
    take = f"""
result = []
for i in range({rounds}):
    tm.wait(f"go{{i}}", 60)
    value = tm.get(f"job{{i}}", consume=True, default=None)
    if value is not None:
        assert int(value[0]) == i == int(value[-1])
        result.append(i)
"""
    for other in others:
        other.start(take)
    for i in range(rounds):
        tm.put(f"job{i}", np.full(10 if i % 2 else 100_000, i))
        tm.put(f"go{i}", 1)
    taken = sorted(i for other in others for i in other.result())
    assert taken == list(range(rounds))
    assert not tm.keys("job")


def test_a_replaced_value_is_not_taken_for_its_successor(pool: tm.Pool) -> None:
    """Producers replace, consumers take: every value is taken at most once, and what is left at the end is the last."""
    taken: list[int] = []
    done = threading.Event()

    def consume() -> None:
        while not done.is_set():
            value = tm.get("k", consume=True, default=None)
            if value is not None:
                taken.append(value)

    threads = [threading.Thread(target=consume) for _ in range(3)]
    for thread in threads:
        thread.start()
    for i in range(300):
        tm.put("k", i)
    assert eventually(lambda: not tm.exists("k"))
    done.set()
    for thread in threads:
        thread.join()
    assert len(taken) == len(set(taken))
    assert 299 in taken


@pytest.mark.parametrize("where", ["before", "after"])
def test_a_consumer_that_dies_leaves_it_whole_or_gone(pool: tm.Pool, child: Any, where: str) -> None:
    tm.put("k", np.arange(100_000))
    other = child()
    other(ATTACH)
    die = "os.kill(os.getpid(), 9)"
    other.start(
        f"""
client = tm.init()._client(1 << 62)
class Dying:
    alive = True
    def __getattr__(self, name): return getattr(client, name)
    def remove(self, *args):
        if {where == "after"}: client.remove(*args)
        {die}
tm.init()._core = Dying()
tm.get("k", consume=True)
"""
    )
    with pytest.raises(EOFError):
        other.result()
    if where == "before":
        assert np.array_equal(tm.get("k", consume=True), np.arange(100_000))
    with pytest.raises(tm.KeyNotFound):
        tm.get("k", consume=True)


def test_a_lost_answer_is_an_unknown_outcome_and_no_value(pool_env: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The node dies when it has removed the object and before it says so."""
    monkeypatch.setenv("TM_FAILPOINTS", "node.superseded=kill")
    tm.put("k", 5)
    tm.put("other", 6)
    with pytest.raises(tm.Error, match="outcome unknown"):
        tm.get("k", consume=True)
    assert tm.exists(["k", "other"]) == [False, True]


# --- several writers ---


def test_parts_of_several_writers_appear_together(pool: tm.Pool, child: Any) -> None:
    others = [child() for _ in range(2)]
    for i, other in enumerate(others):
        other(ATTACH)
        other.start(f"tm.put('k', {{'rank': {i + 1}, 't': np.full({i} * 50_000, {i})}}, part=({i + 1}, 3), group='g')")
    time.sleep(0.3)
    assert not tm.exists("k")
    tm.put("k", b"first" * 1000, part=(0, 3), group="g", version="all", meta={"of": "part 0"})
    for other in others:
        other.result()
    first, second, third = tm.get("k")
    assert first == b"first" * 1000
    assert (second["rank"], second["t"].size) == (1, 0)
    assert (third["rank"], third["t"].sum().item()) == (2, 50_000)
    assert third["t"].__array_interface__["data"][0] % 64 == 0
    info = tm.info("k")
    assert (info.parts, info.label, info.meta) == (3, "all", {"of": "part 0"})
    filled = np.empty(50_000, np.int64)
    tm.get("k", out=[bytearray(5000), {"rank": 1, "t": np.empty(0, np.int64)}, {"rank": 2, "t": filled}])
    assert (filled == 1).all()
    assert tm.delete("k")


def test_a_missing_writer_fails_all_the_others_and_leaves_nothing(pool: tm.Pool) -> None:
    before = used_bytes()
    tm.put("k", "old")
    errors = []

    def write(i: int) -> None:
        try:
            tm.put("k", torch.zeros(100_000), part=(i, 3), version="v", timeout=1)
        except tm.DeadlineExceeded as error:
            errors.append(str(error))

    threads = [threading.Thread(target=write, args=(i,)) for i in (0, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(errors) == 2
    assert all("2 of 3 parts" in error for error in errors), errors
    assert tm.get("k") == "old"
    assert eventually(lambda: used_bytes() <= before + 8192, 10)


def test_parts_that_do_not_fit_each_other_are_refused(pool: tm.Pool) -> None:
    with pytest.raises(tm.InvalidArgument, match="version= or group="):
        tm.put("k", 1, part=(0, 2))
    for wrong in ((2, 2), (-1, 2), (0, 0), (0, 1 << 20)):
        with pytest.raises(tm.InvalidArgument, match="part="):
            tm.put("k", 1, part=wrong, group="g")
    assert tm.put("k", 1, part=(0, 1)).stored
    assert tm.get("k") == 1


def test_await_forms(pool: tm.Pool) -> None:
    async def run() -> None:
        await tm.aput("k", {"w": torch.ones(3)}, meta={"a": 1}, ttl_s=100)
        assert (await tm.ainfo("k")).meta == {"a": 1}
        await tm.aput_state_dict("sd", {"w": torch.ones(3)})
        into = {"w": torch.empty(3)}
        await tm.aget_state_dict("sd", into)
        assert into["w"].eq(1).all()
        parts = [tm.aput("p", i, part=(i, 4), group="g") for i in range(4)]
        await asyncio.gather(*parts)
        assert await tm.aget("p", consume=True) == [0, 1, 2, 3]
        # Who waits keeps nobody else from running.
        waiting = [asyncio.create_task(tm.aget("late", wait=20)) for _ in range(20)]
        await asyncio.sleep(0.1)
        await tm.aput("late", 1)
        assert await asyncio.gather(*waiting) == [1] * 20

    asyncio.run(run())


@pytest.mark.parametrize("nth", range(3))
def test_a_cancelled_await_takes_nothing(pool: tm.Pool, nth: int) -> None:
    """Cancelled at any time, it leaves the value there or returns it: never neither, never both."""

    async def run() -> None:
        waiting = asyncio.create_task(tm.aget("k", consume=True, wait=60, timeout=60))
        await asyncio.sleep(0.1)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await tm.aput("k", 1)
        await asyncio.sleep(0.7)  # the abandoned wait is over by now
        assert await tm.aget("k", consume=True, default=None) == 1
        for i in range(100):
            key = f"race{i}"
            racing = asyncio.create_task(tm.aget(key, consume=True, wait=60))
            tm.put(key, i)
            await asyncio.sleep(i * nth * 5e-5)
            racing.cancel()
            try:
                taken = await racing
            except asyncio.CancelledError:
                taken = None
            assert (taken == i) != tm.exists(key)

    start = time.monotonic()
    asyncio.run(run())
    assert time.monotonic() - start < 30


def test_an_abandoned_wait_keeps_nobody_from_ending(pool: tm.Pool, child: Callable[..., Child]) -> None:
    other = child()
    other(
        f"""{ATTACH}
import asyncio
async def run():
    try:
        await asyncio.wait_for(tm.aget('none', consume=True, wait=600, timeout=600), 0.1)
    except TimeoutError:
        pass
    forgotten = [asyncio.create_task(tm.await_key('none', 600)) for _ in range(3)]
    await asyncio.sleep(0.1)
asyncio.run(run())
"""
    )
    start = time.monotonic()
    assert other.close() == 0
    assert time.monotonic() - start < 5


def test_waiting_for_what_another_takes_ends_in_time(pool: tm.Pool) -> None:
    """One wait, however often the key appears and is gone again."""
    done = threading.Event()

    def put_and_take() -> None:
        while not done.is_set():
            tm.put("k", 1)
            tm.get("k", consume=True, default=None)

    thread = threading.Thread(target=put_and_take)
    thread.start()
    try:
        start, taken = time.monotonic(), 0
        while time.monotonic() - start < 2:
            try:
                taken += tm.get("k", consume=True, wait=0.1, timeout=None)
            except tm.DeadlineExceeded:
                assert time.monotonic() - start < 8
    finally:
        done.set()
        thread.join()


# --- state dicts ---


def model_and_optimizer() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(3, 8)).sum().backward()
    optimizer.step()
    return model, optimizer


def test_a_state_dict_is_loaded_in_place(pool: tm.Pool) -> None:
    model, optimizer = model_and_optimizer()
    tm.put_state_dict("run", {"model": model, "optimizer": optimizer, "step": 3, "names": ["a", "b"]}, version=3)
    assert tm.get_state_dict("run")["names"] == ["a", "b"]

    torch.manual_seed(2)
    fresh = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16))
    weight = fresh[0].weight
    other = torch.optim.AdamW(fresh.parameters())
    fresh(torch.randn(3, 8)).sum().backward()
    other.step()
    into = {"model": fresh, "optimizer": other, "step": 0, "names": []}
    assert tm.get_state_dict("run", into) is into
    assert (into["step"], into["names"]) == (3, ["a", "b"])
    assert fresh[0].weight is weight
    for a, b in zip(model.state_dict().values(), fresh.state_dict().values(), strict=True):
        assert torch.equal(a, b)
    mine, theirs = optimizer.state_dict()["state"], other.state_dict()["state"]
    assert all(torch.equal(mine[i][n], theirs[i][n]) for i in mine for n in mine[i])

    plain = {"model": {k: torch.zeros_like(v) for k, v in model.state_dict().items()}}
    kept = plain["model"]["0.weight"]
    tm.get_state_dict("run", plain, strict=False)
    assert plain["model"]["0.weight"] is kept
    assert torch.equal(kept, model[0].weight)


def test_a_state_dict_that_does_not_fit_changes_nothing(pool: tm.Pool) -> None:
    tm.put_state_dict("sd", {"a": torch.ones(3), "b": {"c": torch.ones(2)}, "n": 1})
    into: dict[str, Any] = {"a": torch.zeros(3), "x": torch.zeros(1), "n": 0}
    with pytest.raises(tm.LayoutMismatch, match=r"not in the pool: x; not wanted: b\.c"):
        tm.get_state_dict("sd", into)
    tm.get_state_dict("sd", {"a": into["a"]}, strict=False)
    into["a"].zero_()
    for wrong in (torch.zeros(4), torch.zeros(3, dtype=torch.float64), 3):
        target = {"b": {"c": torch.zeros(2)}, "a": wrong, "n": 0}
        with pytest.raises(tm.LayoutMismatch, match="a"):
            tm.get_state_dict("sd", target)
        assert target["b"]["c"].eq(0).all()  # type: ignore[index]
        assert target["n"] == 0
    tm.put("t", torch.ones(3))
    with pytest.raises(tm.LayoutMismatch, match="no state dict"):
        tm.get_state_dict("t")
    with pytest.raises(TypeError):
        tm.put_state_dict("sd", [torch.ones(1)])  # type: ignore[arg-type]


def test_names_are_those_of_the_distributed_checkpoint() -> None:
    from torch.distributed.checkpoint._nested_dict import flatten_state_dict

    from torch_mooncake.state_dicts import _named, _node_leaves, _value_leaves
    from torch_mooncake.tensors import Decoded, encode

    nested = {
        "a": {"b": [torch.zeros(1), 2], "c": [1, 2], "d": (torch.zeros(1), 3), "e": {}},
        "f": [[{"g": 1}], "x"],
        "h": [[torch.ones(2)], [3]],
        7: None,
        "s": "text" * 100,
        "n": np.arange(3),
    }
    flat, paths = flatten_state_dict(nested)
    ours = _named(_value_leaves(nested))
    assert ours.keys() == flat.keys()
    assert all(ours[name].value is flat[name] for name in flat)
    encoded = encode(nested)
    nodes = _named(_node_leaves(Decoded(encoded.meta, encoded.nbytes, lambda o, n: b"").root))
    assert nodes.keys() == flat.keys() == paths.keys()


def test_reading_a_few_tensors_of_many_reads_no_others(pool: tm.Pool) -> None:
    tm.put_state_dict("sd", {f"t{i}": torch.full((100_000,), float(i)) for i in range(20)})
    into = {"t3": torch.empty(100_000), "t17": torch.empty(2, 50_000).t().contiguous().t().reshape(100_000)}
    before = tm.stat()["client_read_bytes"]
    tm.get_state_dict("sd", into, strict=False)
    assert tm.stat()["client_read_bytes"] - before == 800_000
    assert into["t3"].eq(3).all()
    assert into["t17"].eq(17).all()


def test_strided_out_is_read_in_place(pool: tm.Pool) -> None:
    value = torch.randn(300, 200)
    tm.put("k", value)
    big = torch.zeros(300, 500)
    before = tm.stat()["client_read_bytes"]
    tm.get("k", out=big[:, 100:300])
    assert tm.stat()["client_read_bytes"] - before == value.nbytes
    assert torch.equal(big[:, 100:300], value)
    assert big[:, :100].eq(0).all()
    assert big[:, 300:].eq(0).all()
    for out in (torch.empty(200, 300).t(), torch.empty(600, 400)[::2, ::2], torch.empty(2, 300, 200)[1]):
        assert torch.equal(tm.get("k", out=out), value)


# --- the same from another host ---


def test_from_another_host_the_same_bytes_and_no_others(pool: tm.Pool) -> None:
    value = {"w": torch.randn(300, 200), "small": torch.arange(3), "text": "x" * 1000}
    tm.put("k", value, ttl_s=600, meta={"a": 1})
    with tm.Pool(host_id="elsewhere") as other:
        info = other.info("k")
        assert (info.local, info.meta) == (False, {"a": 1})
        assert torch.equal(other.get("k")["w"], value["w"])
        big = torch.zeros(300, 500)
        before = other.stat()["client_read_bytes"]
        other.get_state_dict("k", {"w": big[:, 100:300]}, strict=False)
        assert other.stat()["client_read_bytes"] - before == value["w"].nbytes  # type: ignore[attr-defined]
        assert torch.equal(big[:, 100:300], value["w"])
        assert big[:, :100].eq(0).all()
        assert big[:, 300:].eq(0).all()
        errors: list[BaseException] = []

        def write() -> None:
            try:
                other.put("p", torch.ones(5000), part=(1, 2), group="g")
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=write)
        thread.start()
        tm.put("p", torch.zeros(5000), part=(0, 2), group="g")
        thread.join()
        assert errors == []
        first, second = other.get("p", consume=True)
        assert first.eq(0).all()
        assert second.eq(1).all()
        assert not tm.exists("p")
        tm.put("short", 1, ttl_s=0.05)
        time.sleep(0.06)
        assert not other.exists("short")
