"""A remote storage plug-in of LMCache (``remote_storage_plugins: [tm]``)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from lmcache.v1.storage_backend.connector.base_connector import RemoteConnector

from torch_mooncake.integrations.lmcache.chunks import Chunks

T = TypeVar("T")


class PoolConnector(RemoteConnector):
    """Chunks in a pool; batched, and zero-copy between LMCache's host memory and the pool's.

    Calls run on threads of this connector and end by ``timeout_s``. One that LMCache stops waiting for goes on until
    then: the memory it reads into is given back by the call itself, not before.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, local_cpu_backend: Any, config: Any) -> None:
        super().__init__(config, local_cpu_backend.metadata)
        self._allocator = local_cpu_backend
        self._chunks = Chunks(config, local_cpu_backend.metadata, "remote_storage_plugin.tm")
        self._threads = ThreadPoolExecutor(8, "tm-lmcache")

    async def exists(self, key: Any) -> bool:
        return await self._run(lambda: self._chunks.leading([key]) == 1)

    def exists_sync(self, key: Any) -> bool:
        return self._chunks.leading([key]) == 1

    def support_batched_contains(self) -> bool:
        return True

    def batched_contains(self, keys: list[Any]) -> int:
        return self._chunks.leading(keys)

    async def batched_async_contains(self, lookup_id: str, keys: list[Any], pin: bool = False) -> int:
        return await self._run(lambda: self._chunks.leading(keys, pin))

    async def get(self, key: Any) -> Any:
        return (await self.batched_get([key]))[0]

    def support_batched_get(self) -> bool:
        return True

    async def batched_get(self, keys: list[Any]) -> list[Any]:
        call = asyncio.get_running_loop().run_in_executor(self._threads, self._chunks.load, keys, self._allocator)
        try:
            return await asyncio.shield(call)
        except asyncio.CancelledError:
            call.add_done_callback(_give_back)
            raise

    async def batched_get_non_blocking(self, lookup_id: str, keys: list[Any]) -> list[Any]:
        """The leading ones that are there; what was read behind a miss is given back."""
        found = await self.batched_get(keys)
        count = next((i for i, each in enumerate(found) if each is None), len(found))
        for each in found[count:]:
            if each is not None:
                each.ref_count_down()
        return found[:count]

    async def put(self, key: Any, memory_obj: Any) -> None:
        await self.batched_put([key], [memory_obj])

    def support_batched_put(self) -> bool:
        return True

    async def batched_put(self, keys: list[Any], memory_objs: list[Any]) -> None:
        """RuntimeError if one could not be stored (the others are)."""
        for each in memory_objs:
            each.ref_count_up()  # ours, for as long as the bytes are read

        def store() -> list[bool]:
            try:
                return self._chunks.store(keys, memory_objs)
            finally:
                for each in memory_objs:
                    each.ref_count_down()

        stored = await self._run(store)
        if not all(stored):
            raise RuntimeError(f"{stored.count(False)} of {len(stored)} chunks were not stored; the log says why")

    def remove_sync(self, key: Any) -> bool:
        return self._chunks.remove([key])[0]

    def support_ping(self) -> bool:
        return True

    async def ping(self) -> int:
        await self._run(lambda: self._chunks.pool.stat(timeout=self._chunks.timeout_s))
        return 0

    async def list(self) -> Any:
        return await self._run(self._chunks.names)

    async def close(self) -> None:
        self._threads.shutdown(wait=True)
        self._chunks.close()

    async def _run(self, call: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, call)


def _give_back(call: asyncio.Future[Any]) -> None:
    """What was read for nobody."""
    if call.cancelled() or call.exception() is not None:
        return
    for each in call.result():
        if each is not None:
            each.ref_count_down()
