"""Seconds that an LMCache connector takes for a chunk of 256 tokens; a process of integrations.py.

    python lmcache_chunks.py torch_mooncake|HOST:PORT LAYERS HIDDEN REPETITIONS

HOST:PORT is a mooncake_master: then LMCache's own Mooncake Store connector is used, in its zero-copy mode. Prints
"RESULTS {put: […], get: […], "put, again": […], "get, again": […]}". Every chunk has a key of its own; "again": into
the store's memory that others were in before. A chunk that comes back changed is an error.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
import time
from typing import Any

import torch
from lmcache.utils import CacheEngineKey
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.metadata import LMCacheMetadata
from lmcache.v1.storage_backend.connector import CreateConnector
from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend

TOKENS = 256


def connect(which: str, loop: Any, layers: int, hidden: int) -> tuple[Any, Any]:
    """(LMCache's connector, its host memory)."""
    described = LMCacheMetadata(
        model_name="m",
        world_size=1,
        local_world_size=1,
        worker_id=0,
        local_worker_id=0,
        kv_dtype=torch.bfloat16,
        kv_shape=(layers, 2, TOKENS, hidden // 64, 64),
    )
    common: dict[str, Any] = {"chunk_size": TOKENS, "local_cpu": False, "max_local_cpu_size": 0.5}
    if which == "torch_mooncake":
        extra: dict[str, Any] = {
            "remote_storage_plugin.tm.module_path": "torch_mooncake.integrations.lmcache",
            "remote_storage_plugin.tm.class_name": "PoolConnector",
        }
        config = LMCacheEngineConfig.from_defaults(**common, remote_storage_plugins=["tm"], extra_config=extra)
        url, name = "plugin://tm", "tm"
    else:
        extra = {
            "save_chunk_meta": False,
            "transfer_timeout": 20,
            "local_hostname": "127.0.0.1",
            "metadata_server": "P2PHANDSHAKE",
            "global_segment_size": str(1 << 30),
            "local_buffer_size": str(256 << 20),
            "protocol": "tcp",
            "device_name": "",
            "mooncake_master_server_addr": which,  # as this wheel calls it: LMCache hands it on
        }
        url, name = f"mooncakestore://{which}/", None
        config = LMCacheEngineConfig.from_defaults(**common, remote_url=url, extra_config=extra)
    cpu = LocalCPUBackend(config, described, "cpu")
    cpu.metadata = described
    return CreateConnector(url, loop, cpu, config, described, name), cpu


def measure(
    connector: Any, cpu: Any, loop: Any, layers: int, hidden: int, count: int, first: int
) -> dict[str, list[float]]:
    def run(call: Any) -> tuple[float, Any]:
        began = time.perf_counter()
        found = asyncio.run_coroutine_threadsafe(call, loop).result(60)
        return time.perf_counter() - began, found

    seconds: dict[str, list[float]] = {"put": [], "get": []}
    for index in range(count + 1):
        key = CacheEngineKey("m", 1, 0, first + index, torch.bfloat16, {})
        chunk = cpu.allocate(torch.Size([2, layers, TOKENS, hidden]), torch.bfloat16)
        chunk.tensor.fill_(index + 1)
        chunk.ref_count_up()
        put, _ = run(connector.batched_put([key], [chunk]))
        get, (found,) = run(connector.batched_get([key]))
        if found is None or not torch.equal(found.tensor, chunk.tensor):
            raise SystemExit("a chunk came back changed")
        found.ref_count_down()
        chunk.ref_count_down()
        if index:
            seconds["put"].append(put)
            seconds["get"].append(get)
    return seconds


def empty(connector: Any, first: int, count: int) -> None:
    """The store has none of these chunks any more, and their memory."""
    store = getattr(connector.getWrappedConnector(), "store", None)
    if store is None:
        keys = [CacheEngineKey("m", 1, 0, first + i, torch.bfloat16, {}) for i in range(count)]
        assert all(connector.remove_sync(key) for key in keys)
        return
    time.sleep(1.5)  # its leases of what was read, a second
    assert store.remove_all() == count


def main() -> None:
    which, layers, hidden, count = sys.argv[1], *map(int, sys.argv[2:5])
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    connector, cpu = connect(which, loop, layers, hidden)
    found = measure(connector, cpu, loop, layers, hidden, count, 1000)
    empty(connector, 1000, count + 1)
    again = measure(connector, cpu, loop, layers, hidden, count, 2000)
    found |= {f"{what}, again": seconds for what, seconds in again.items()}
    print("RESULTS " + json.dumps(found), flush=True)
    os._exit(0)  # what LMCache and Mooncake leave running does not end by itself


if __name__ == "__main__":
    main()
