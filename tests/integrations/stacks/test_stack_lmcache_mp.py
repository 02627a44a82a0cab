"""LMCache's multiprocess mode: its own storage manager and controllers, with our second tier as a "plugin" adapter."""

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from lmcache.v1.distributed.api import GroupedObjectKeys, MemoryLayoutDesc, ObjectKey, PrefetchTaskSpec
from lmcache.v1.distributed.config import (
    EvictionConfig,
    L1ManagerConfig,
    L1MemoryManagerConfig,
    L2AdaptersConfig,
    StorageManagerConfig,
)
from lmcache.v1.distributed.l2_adapters import create_l2_adapter
from lmcache.v1.distributed.l2_adapters.plugin_l2_adapter import PluginL2AdapterConfig
from lmcache.v1.distributed.storage_manager import StorageManager
from lost import lose_node
from processes import PoolEnv, eventually

import torch_mooncake as tm

STACK = ("lmcache", "multiprocess mode: StorageManager, its store and prefetch controllers, the plugin L2 adapter")
LAYOUT = MemoryLayoutDesc([torch.Size([2, 4, 256, 64])], [torch.float16])


def plugin(**parameters: Any) -> PluginL2AdapterConfig:
    told = {
        "module_path": "torch_mooncake.integrations.lmcache",
        "class_name": "PoolL2Adapter",
        "adapter_params": parameters,
    }
    return PluginL2AdapterConfig.from_dict(told)


def key(chunk: int, **other: Any) -> ObjectKey:
    return ObjectKey(chunk.to_bytes(8, "big"), "org/m", ObjectKey.ComputeKVRank(1, 0, 1, 0), **other)


@pytest.fixture
def managers() -> Iterator[Callable[..., StorageManager]]:
    """LMCache's storage manager of one server, with these L2 adapters."""
    made: list[StorageManager] = []

    def make(*adapters: PluginL2AdapterConfig) -> StorageManager:
        memory = L1MemoryManagerConfig(size_in_bytes=16 << 20, use_lazy=False, shm_name="")
        made.append(
            StorageManager(
                StorageManagerConfig(
                    l1_manager_config=L1ManagerConfig(memory_config=memory),
                    eviction_config=EvictionConfig(eviction_policy="LRU"),
                    l2_adapter_config=L2AdaptersConfig(list(adapters)),
                )
            )
        )
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.fixture
def adapter() -> Iterator[Callable[..., Any]]:
    """Our adapter alone, by LMCache's factory."""
    made: list[Any] = []

    def make(**parameters: Any) -> Any:
        made.append(create_l2_adapter(plugin(**parameters)))
        return made[-1]

    yield make
    for each in made:
        each.close()


def objects(manager: StorageManager, keys: list[ObjectKey], layout: MemoryLayoutDesc = LAYOUT) -> list[Any]:
    """LMCache's memory for these keys, each of another content."""
    reserved = manager.reserve_write(keys, layout)
    for i, each in enumerate(keys):
        generator = torch.Generator().manual_seed(i + 1)
        reserved[each].tensor.copy_(torch.randn(reserved[each].tensor.shape, generator=generator))
    return [reserved[each] for each in keys]


def ended(fd: int) -> None:
    """Wait for an event of the adapter, as LMCache's controllers do."""
    assert select.select([fd], [], [], 60)[0], "no event"
    os.eventfd_read(fd)


def stored(made: Any, keys: list[ObjectKey], some: list[Any]) -> Any:
    task = made.submit_store_task(keys, some)
    ended(made.get_store_event_fd())
    return made.pop_completed_store_tasks()[task]


def looked(made: Any, keys: list[ObjectKey], layouts: dict[int, MemoryLayoutDesc] | None = None) -> list[int]:
    task = made.submit_lookup_and_lock_task(keys, {0: LAYOUT} if layouts is None else layouts)
    ended(made.get_lookup_and_lock_event_fd())
    found = made.query_lookup_and_lock_result(task).get_indices_list()
    assert made.query_lookup_and_lock_result(task) is None
    return list(found)


def loaded(made: Any, keys: list[ObjectKey], some: list[Any]) -> list[int]:
    task = made.submit_load_task(keys, some)
    ended(made.get_load_event_fd())
    return list(made.query_load_result(task).get_indices_list())


def test_what_one_server_computes_another_finds(managers: Callable[..., StorageManager], pool: tm.Pool):
    """LMCache's controllers store what is written, and fetch it for a server that has none of it."""
    first, second = managers(plugin()), managers(plugin())
    keys = [key(i) for i in range(3)]
    written = objects(first, keys)
    wanted = [each.tensor.clone() for each in written]
    first.finish_write(keys)
    assert eventually(lambda: len(pool.keys("lmcache-l2/")) == 3, timeout=30)
    spec = PrefetchTaskSpec([GroupedObjectKeys([*keys, key(9)], 0, LAYOUT)], 1)
    handle = second.submit_prefetch_task(spec)
    assert second.wait_prefetch_status(handle, 30)
    result = second.query_prefetch_status(handle)
    assert (result.l1_hit_count, result.l2_hit_count) == (0, 3)
    with second.read_prefetched_results(keys) as found:
        assert all(torch.equal(each.tensor, other) for each, other in zip(found, wanted, strict=True))
    second.finish_read_prefetched(keys)


def test_tasks_of_the_adapter(managers: Callable[..., StorageManager], adapter: Callable[..., Any], pool: tm.Pool):
    manager, made = managers(), adapter()
    keys = [key(i) for i in range(4)]
    some = objects(manager, keys)
    result = stored(made, keys[:1] + keys[2:], some[:1] + some[2:])
    assert (result.is_successful(), result.bytes_transferred()) == (True, 3 * some[0].get_size())
    assert stored(made, keys[:1], some[:1]).bytes_transferred() == 0  # it is there
    assert made.get_usage().total_bytes_used == 3 * some[0].get_size()
    assert looked(made, keys) == [0, 2, 3]
    into = objects(manager, [key(i + 10) for i in range(4)])
    assert loaded(made, keys, into) == [0, 2, 3]
    assert all(torch.equal(into[i].tensor, some[i].tensor) for i in (0, 2, 3))
    made.submit_unlock(keys)
    made.delete(keys[:2])
    assert looked(made, keys) == [2, 3]
    assert made.get_usage().total_bytes_used == 2 * some[0].get_size()
    assert len({made.get_store_event_fd(), made.get_lookup_and_lock_event_fd(), made.get_load_event_fd()}) == 3
    assert made.report_status()["is_healthy"]
    assert all(name.startswith("lmcache-l2/default/org%2Fm/") for name in pool.keys("lmcache-l2/"))


def test_who_must_not_share_does_not(managers: Callable[..., StorageManager], adapter: Callable[..., Any]):
    manager, made = managers(), adapter()
    stored(made, [key(1, cache_salt="a")], objects(manager, [key(1)]))
    assert looked(made, [key(1, cache_salt="a")]) == [0]
    assert looked(adapter(), [key(1, cache_salt="a")]) == [0]
    for other in (key(1), key(1, cache_salt="b"), key(1, cache_salt="a", object_group_id=1)):
        assert looked(made, [other]) == []
    assert looked(adapter(namespace="tenant"), [key(1, cache_salt="a")]) == []
    halves = {0: MemoryLayoutDesc(LAYOUT.shapes, [torch.bfloat16])}
    assert looked(made, [key(1, cache_salt="a")], halves) == []
    small = objects(manager, [key(2)], MemoryLayoutDesc([torch.Size([2, 4, 128, 64])], [torch.float16]))
    assert loaded(made, [key(1, cache_salt="a")], small) == []


def test_a_task_that_is_given_what_it_cannot_use_ends(
    managers: Callable[..., StorageManager], adapter: Callable[..., Any], caplog: pytest.LogCaptureFixture
):
    """A mistake of the caller's: the task has failed, with its event, and the next one is served."""
    some, made = objects(managers(), [key(1)]), adapter()
    assert not stored(made, [key(1), object()], some).is_successful()  # type: ignore[list-item]
    assert looked(made, [object()]) == []  # type: ignore[list-item]
    assert loaded(made, [key(1)], [object()]) == []
    assert caplog.text.count("AttributeError") == 3
    assert stored(made, [key(1)], some).is_successful()
    assert looked(made, [key(1)]) == [0]


def test_a_lost_node_ends_every_task(
    managers: Callable[..., StorageManager], adapter: Callable[..., Any], pool_env: PoolEnv
):
    manager, made = managers(), adapter(timeout_s=2)
    keys = [key(i) for i in range(2)]
    some = objects(manager, keys)
    assert stored(made, keys[:1], some[:1]).is_successful()
    lose_node(pool_env, lambda: looked(made, keys[:1]))
    started = time.monotonic()
    assert loaded(made, keys, some) == []
    again = stored(made, keys[1:], some[1:])  # a node may have come in its place
    assert looked(made, keys) == ([1] if again.is_successful() else [])
    made.submit_unlock(keys)
    made.delete(keys)
    assert time.monotonic() - started < 60


def test_it_has_every_method_of_the_interface():
    from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface

    from torch_mooncake.integrations.lmcache import PoolL2Adapter

    assert not PoolL2Adapter.__abstractmethods__
    for name in (*L2AdapterInterface.__abstractmethods__, "delete", "report_status"):
        assert getattr(PoolL2Adapter, name) is not getattr(L2AdapterInterface, name)
