"""The LMCache plug-ins, with LMCache's own factories, memory objects and backends."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lmcache.utils import CacheEngineKey
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.metadata import LMCacheMetadata
from lmcache.v1.storage_backend import CreateStorageBackends
from lmcache.v1.storage_backend.connector import CreateConnector
from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend
from lost import lose_node
from places import ROOT
from processes import PoolEnv

import torch_mooncake as tm

STACK = ("lmcache", "CreateConnector(plugin://tm), CreateStorageBackends, RemoteBackend, MemoryObj round trips")
MODULE = "torch_mooncake.integrations.lmcache"


def configured(plugin: str, class_name: str, **extra: Any) -> LMCacheEngineConfig:
    lists = {"remote_storage_plugin": "remote_storage_plugins", "storage_plugin": "storage_plugins"}
    return LMCacheEngineConfig.from_defaults(
        chunk_size=256,
        local_cpu=False,
        max_local_cpu_size=0.25,
        blocking_timeout_secs=20,
        **{lists[plugin]: ["tm"]},
        extra_config={f"{plugin}.tm.module_path": MODULE, f"{plugin}.tm.class_name": class_name, **extra},
    )


def metadata(model: str = "m", layers: int = 4) -> LMCacheMetadata:
    return LMCacheMetadata(
        model_name=model,
        world_size=1,
        local_world_size=1,
        worker_id=0,
        local_worker_id=0,
        kv_dtype=torch.float16,
        kv_shape=(layers, 2, 256, 2, 32),
    )


def key(chunk: int, **request: Any) -> CacheEngineKey:
    return CacheEngineKey("m", 1, 0, chunk, torch.float16, request)


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    made = asyncio.new_event_loop()
    thread = threading.Thread(target=made.run_forever, daemon=True)
    thread.start()
    yield made
    made.call_soon_threadsafe(made.stop)
    thread.join(10)
    made.close()


@pytest.fixture
def remote(loop: asyncio.AbstractEventLoop) -> Iterator[SimpleNamespace]:
    config = configured("remote_storage_plugin", "PoolConnector")
    cpu = LocalCPUBackend(config, metadata(), "cpu")
    cpu.metadata = metadata()
    made = CreateConnector("plugin://tm", loop, cpu, config, metadata(), "tm")

    def run(call: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(call, loop).result(30)

    yield SimpleNamespace(connector=made, cpu=cpu, run=run, inner=made._connector)
    run(made.close())


def chunk_of(cpu: Any, seed: int, tokens: int = 256, layers: int = 4) -> Any:
    made = cpu.allocate(torch.Size([2, layers, tokens, 64]), torch.float16)
    made.tensor.copy_(torch.randn(made.tensor.shape, generator=torch.Generator().manual_seed(seed)).half())
    return made


def same(a: Any, b: Any) -> bool:
    return a.meta.shape == b.meta.shape and a.meta.fmt == b.meta.fmt and torch.equal(a.tensor, b.tensor)


def test_a_chunk_comes_back_bit_for_bit(remote: SimpleNamespace):
    assert type(remote.inner).__name__ == "PoolConnector"
    chunk = chunk_of(remote.cpu, 1)
    assert not remote.connector.exists_sync(key(1))
    chunk.ref_count_up()
    remote.run(remote.connector.put(key(1), chunk))
    assert chunk.get_ref_count() == 1
    assert remote.connector.exists_sync(key(1))
    found = remote.run(remote.connector.get(key(1)))
    assert same(found, chunk)
    assert found.get_ref_count() == 1
    assert remote.run(remote.connector.get(key(2))) is None


@pytest.mark.parametrize("tokens", [1, 77, 255])
def test_a_partial_chunk_keeps_its_shape(remote: SimpleNamespace, tokens: int):
    chunk = chunk_of(remote.cpu, 2, tokens)
    chunk.ref_count_up()
    remote.run(remote.connector.put(key(3), chunk))
    found = remote.run(remote.connector.get(key(3)))
    assert same(found, chunk)


def test_batches_and_prefixes(remote: SimpleNamespace):
    keys = [key(10 + i) for i in range(6)]
    chunks = [chunk_of(remote.cpu, i) for i in range(6)]
    some = [0, 1, 2, 4]
    for i in some:
        chunks[i].ref_count_up()
    remote.run(remote.connector.batched_put([keys[i] for i in some], [chunks[i] for i in some]))
    assert remote.connector.batched_contains(keys) == 3
    assert remote.run(remote.connector.batched_async_contains("look", keys, True)) == 3
    found = remote.run(remote.connector.batched_get(keys))
    assert [each is not None for each in found] == [True, True, True, False, True, False]
    assert all(same(found[i], chunks[i]) for i in some)
    leading = remote.run(remote.connector.batched_get_non_blocking("look", keys))
    assert len(leading) == 3
    names = remote.run(remote.connector.list())
    assert sorted(names) == sorted(keys[i].to_string() for i in some)
    assert remote.inner.remove_sync(keys[0])
    assert remote.connector.batched_contains(keys) == 0


def test_full_and_partial_chunks_in_any_order(remote: SimpleNamespace):
    """What was read before says what is there, and is not believed where it differs."""
    sizes = [256, 256, 77, 256, 1, 256]
    keys, chunks = [key(30 + i) for i in range(6)], [chunk_of(remote.cpu, i, n) for i, n in enumerate(sizes)]
    for chunk in chunks:
        chunk.ref_count_up()
    remote.run(remote.connector.batched_put(keys, chunks))
    for order in ([0, 1, 2, 3, 4, 5], [2, 0], [4], [1, 4, 3], [5, 2]):
        asked = [keys[i] for i in order] + [key(99)]
        found = remote.run(remote.connector.batched_get(asked))
        assert found.pop() is None
        assert all(same(each, chunks[i]) for i, each in zip(order, found, strict=True))
        for each in found:
            assert each.get_ref_count() == 1
            each.ref_count_down()


def test_tags_of_a_request_are_part_of_the_key(remote: SimpleNamespace):
    """What must not be shared, a tenant's salt say, goes there."""
    salted = key(20, **{"lmcache.tag.cache_salt": "tenant-a"})
    chunk = chunk_of(remote.cpu, 5)
    chunk.ref_count_up()
    remote.run(remote.connector.put(salted, chunk))
    assert not remote.connector.exists_sync(key(20))
    assert not remote.connector.exists_sync(key(20, **{"lmcache.tag.cache_salt": "tenant-b"}))
    assert remote.connector.exists_sync(salted)


def test_another_layout_or_namespace_is_not_met(remote: SimpleNamespace, loop: asyncio.AbstractEventLoop):
    chunk = chunk_of(remote.cpu, 6)
    chunk.ref_count_up()
    remote.run(remote.connector.put(key(30), chunk))
    for config, described in (
        (configured("remote_storage_plugin", "PoolConnector"), metadata(layers=6)),
        (configured("remote_storage_plugin", "PoolConnector", **{"torch_mooncake.namespace": "other"}), metadata()),
    ):
        cpu = LocalCPUBackend(config, described, "cpu")
        cpu.metadata = described
        other = CreateConnector("plugin://tm", loop, cpu, config, described, "tm")
        assert not other.exists_sync(key(30))
        remote.run(other.close())


def test_another_hash_is_said(
    remote: SimpleNamespace, loop: asyncio.AbstractEventLoop, caplog: pytest.LogCaptureFixture, pool_env: PoolEnv
):
    keys = [name for name in tm.init().keys("lmcache/") if name.endswith("hash-probe")]
    assert len(keys) == 1
    tm.put(keys[0], b"builtin:of another process")
    config = configured("remote_storage_plugin", "PoolConnector")
    other = CreateConnector("plugin://tm", loop, remote.cpu, config, metadata(), "tm")
    remote.run(other.close())
    assert "Set PYTHONHASHSEED" in caplog.text
    tm.close()


def test_what_is_no_chunk_is_a_miss(remote: SimpleNamespace):
    name = remote.inner._chunks.key(key(40))
    tm.init().put(name, b"something else")
    assert remote.run(remote.connector.get(key(40))) is None
    remote.inner._chunks.pool.put(name, b"x" * 100, meta={"shapes": [[2, 4, 256, 64]], "dtypes": ["float16"], "fmt": 1})
    before = remote.cpu.memory_allocator
    assert remote.run(remote.connector.get(key(40))) is None
    assert before is remote.cpu.memory_allocator
    tm.close()


def backends(loop: asyncio.AbstractEventLoop, plugin: str, class_name: str) -> Any:
    config = configured(plugin, class_name)
    return CreateStorageBackends(config, metadata(), loop, "cpu")


def test_the_storage_backend_plug_in(loop: asyncio.AbstractEventLoop):
    made = backends(loop, "storage_plugin", "PoolBackend")
    assert type(made["tm"]).__name__ == "PoolBackend"
    backend, cpu = made["tm"], made["LocalCPUBackend"]
    keys, chunks = [key(50 + i) for i in range(3)], [chunk_of(cpu, 60 + i) for i in range(3)]
    stored: list[Any] = []
    futures = backend.batched_submit_put_task(keys, chunks, on_complete_callback=stored.append)
    assert [future.result(20) for future in futures] == [3]
    assert stored == keys
    assert not any(backend.exists_in_put_tasks(each) for each in keys)
    assert [each.get_ref_count() for each in chunks] == [1, 1, 1]
    assert backend.contains(keys[0])
    assert backend.batched_contains([*keys, key(99)]) == 3
    found = backend.batched_get_blocking([keys[0], key(99), keys[2]])
    assert found[1] is None
    assert same(found[0], chunks[0])
    assert same(found[2], chunks[2])
    assert same(backend.get_blocking(keys[1]), chunks[1])
    assert backend.pin(keys[0])
    assert backend.unpin(keys[0])
    later = asyncio.run_coroutine_threadsafe(backend.batched_get_non_blocking("x", [*keys, key(99)]), loop).result(20)
    assert len(later) == 3
    assert backend.remove(keys[0])
    assert not backend.remove(keys[0])
    assert backend.get_allocator_backend() is cpu
    backend.close()
    assert backend.batched_submit_put_task(keys, chunks) is None


def test_the_remote_backend_of_lmcache(loop: asyncio.AbstractEventLoop):
    made = backends(loop, "remote_storage_plugin", "PoolConnector")
    backend, cpu = made["RemoteBackend-tm"], made["LocalCPUBackend"]
    keys, chunks = [key(70 + i) for i in range(3)], [chunk_of(cpu, 70 + i) for i in range(3)]
    done = threading.Event()
    backend.batched_submit_put_task(keys, chunks, on_complete_callback=lambda each: each == keys[-1] and done.set())
    assert done.wait(20)
    assert backend.batched_contains([*keys, key(98)]) == 3
    assert all(same(a, b) for a, b in zip(backend.batched_get_blocking(keys), chunks, strict=True))
    assert [each.get_ref_count() for each in chunks] == [1, 1, 1]
    backend.close()


def test_the_example_holds_its_claims(pool: tm.Pool):  # the node stays between the two processes
    command = [sys.executable, str(ROOT / "examples" / "lmcache_chunks.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "found 4, 4 of them as they were stored" in done.stdout
    assert "hashes of this process differ" not in done.stderr


def test_a_node_that_is_killed_is_a_miss_in_bounded_time(loop: asyncio.AbstractEventLoop, pool_env: PoolEnv):
    made = backends(loop, "storage_plugin", "PoolBackend")
    backend, cpu = made["tm"], made["LocalCPUBackend"]
    chunk = chunk_of(cpu, 80)
    assert backend.batched_submit_put_task([key(80)], [chunk])[0].result(20) == 1
    lose_node(pool_env, lambda: backend.contains(key(80)))
    started = time.monotonic()
    assert backend.get_blocking(key(80)) is None
    assert backend.batched_contains([key(80)]) == 0
    assert time.monotonic() - started < 45
    assert chunk.get_ref_count() == 1
    backend.close()
