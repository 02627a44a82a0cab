"""LMCache's chunks through a pool: one process stores what an engine has computed, another one finds it. Both have
LMCache's own connector and host memory, configured as lmcache.yaml would.

    make env-integrations
    PYTHONPATH=. .venv-integrations/bin/python examples/lmcache_chunks.py

Exit status 1 if a chunk came changed. With an engine: docs/integrations/lmcache.md.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import sys
import threading
from collections.abc import Callable
from typing import Any

import torch

CHUNKS, LAYERS, TOKENS, HIDDEN = 4, 8, 256, 512
SHAPE = torch.Size([2, LAYERS, TOKENS, HIDDEN])


def open_cache() -> tuple[Any, Any, Callable[[Any], Any]]:
    """(connector, LMCache's host memory, what runs a coroutine of the connector)."""
    from lmcache.v1.config import LMCacheEngineConfig
    from lmcache.v1.metadata import LMCacheMetadata
    from lmcache.v1.storage_backend.connector import CreateConnector
    from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend

    config = LMCacheEngineConfig.from_defaults(
        chunk_size=TOKENS,
        local_cpu=False,
        max_local_cpu_size=0.25,
        remote_storage_plugins=["tm"],
        pre_caching_hash_algorithm="sha256_cbor",
        extra_config={
            "remote_storage_plugin.tm.module_path": "torch_mooncake.integrations.lmcache",
            "remote_storage_plugin.tm.class_name": "PoolConnector",
        },
    )
    shape = (LAYERS, 2, TOKENS, HIDDEN // 64, 64)
    described = LMCacheMetadata(
        model_name="example", world_size=1, local_world_size=1, worker_id=0, local_worker_id=0,
        kv_dtype=torch.bfloat16, kv_shape=shape,
    )  # fmt: skip
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    memory = LocalCPUBackend(config, described, "cpu")
    memory.metadata = described
    connector = CreateConnector("plugin://tm", loop, memory, config, described, "tm")
    return connector, memory, lambda call: asyncio.run_coroutine_threadsafe(call, loop).result(60)


def keys() -> list[Any]:
    from lmcache.utils import CacheEngineKey

    return [CacheEngineKey("example", 1, 0, number, torch.bfloat16, {}) for number in range(CHUNKS)]


def computed(number: int) -> torch.Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(number)).bfloat16()


def store() -> None:
    connector, memory, run = open_cache()
    chunks = [memory.allocate(SHAPE, torch.bfloat16) for _ in range(CHUNKS)]
    for number, chunk in enumerate(chunks):
        chunk.tensor.copy_(computed(number))
        chunk.ref_count_up()  # LMCache's way: a put takes a reference
    run(connector.batched_put(keys(), chunks))
    print(f"stored {CHUNKS} chunks of {chunks[0].get_size() >> 20} MiB", flush=True)
    run(connector.close())
    os._exit(0)  # LMCache's own threads do not end


def load() -> None:
    connector, _, run = open_cache()
    there = connector.batched_contains(keys())
    found = run(connector.batched_get(keys()))
    same = [each is not None and torch.equal(each.tensor, computed(number)) for number, each in enumerate(found)]
    print(f"found {there}, {sum(same)} of them as they were stored", flush=True)
    run(connector.close())
    os._exit(0 if there == CHUNKS and all(same) else 1)


def main() -> int:
    os.environ.setdefault("PYTHONHASHSEED", "0")  # all processes of one cache need the same: their hashes start from it
    spawn = multiprocessing.get_context("spawn")
    for what in (store, load):
        process = spawn.Process(target=what)
        process.start()
        process.join()
        if process.exitcode != 0:
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
