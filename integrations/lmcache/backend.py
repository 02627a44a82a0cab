"""A storage backend plug-in of LMCache (``storage_plugins: [tm]``): no RemoteBackend, serializer or event loop between
LMCache's storage manager and the pool."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from lmcache.v1.storage_backend.abstract_backend import StoragePluginInterface

import torch_mooncake as tm
from torch_mooncake.integrations._hash_check import logger
from torch_mooncake.integrations.lmcache.chunks import Chunks


class PoolBackend(StoragePluginInterface):
    """Chunks in a pool. Puts run on threads of this backend, and ``exists_in_put_tasks`` knows them until they end."""

    def __init__(self, config: Any, dst_device: str, metadata: Any, local_cpu_backend: Any, loop: Any) -> None:
        super().__init__(dst_device, config, metadata, local_cpu_backend, loop)
        self._chunks = Chunks(config, metadata, "storage_plugin.tm")
        self._threads = ThreadPoolExecutor(4, "tm-lmcache")
        self._lock = threading.Lock()
        self._storing: dict[Any, int] = {}
        self._closed = False

    def __str__(self) -> str:
        return "TorchMooncakeBackend"

    def contains(self, key: Any, pin: bool = False) -> bool:
        return self.batched_contains([key], pin) == 1

    def batched_contains(self, keys: list[Any], pin: bool = False) -> int:
        """How many, from the first on. 0, and a line in the log, if the pool does not answer."""
        try:
            return self._chunks.leading(keys, pin)
        except tm.Error as error:
            logger.warning("LMCache look-up: %s: %s", type(error).__name__, error)
            return 0

    async def batched_async_contains(self, lookup_id: str, keys: list[Any], pin: bool = False) -> int:
        return await tm_thread(self._threads, lambda: self.batched_contains(keys, pin))

    def exists_in_put_tasks(self, key: Any) -> bool:
        with self._lock:
            return key in self._storing

    def batched_submit_put_task(
        self,
        keys: Sequence[Any],
        objs: list[Any],
        transfer_spec: Any = None,
        on_complete_callback: Callable[[Any], None] | None = None,
    ) -> list[Future[Any]] | None:
        """Futures, one for all of them: how many are stored. ``on_complete_callback`` is for those."""
        if self._closed:
            return None
        with self._lock:
            new = [(key, each) for key, each in zip(keys, objs, strict=True) if key not in self._storing]
            for key, _ in new:
                self._storing[key] = 1
        if not new:
            return None
        for _, each in new:
            each.ref_count_up()
        try:
            return [self._threads.submit(self._store, new, on_complete_callback)]
        except RuntimeError:  # closed meanwhile
            self._forget(new)
            return None

    def _store(self, new: list[tuple[Any, Any]], on_complete: Callable[[Any], None] | None) -> int:
        try:
            stored = self._chunks.store([key for key, _ in new], [each for _, each in new])
        except tm.Error as error:
            logger.warning("LMCache put of %d chunks: %s: %s", len(new), type(error).__name__, error)
            stored = [False] * len(new)
        finally:
            self._forget(new)
        for (key, _), done in zip(new, stored, strict=True):
            if done and on_complete is not None:
                try:
                    on_complete(key)
                except Exception:
                    logger.exception("LMCache's callback for %s", key)
        return sum(stored)

    def _forget(self, new: list[tuple[Any, Any]]) -> None:
        with self._lock:
            for key, _ in new:
                self._storing.pop(key, None)
        for _, each in new:
            each.ref_count_down()

    def get_blocking(self, key: Any) -> Any:
        return self.batched_get_blocking([key])[0]

    def batched_get_blocking(self, keys: list[Any]) -> list[Any]:
        """None for each that is missing or could not be read (which is logged)."""
        try:
            return self._chunks.load(keys, self.local_cpu_backend)
        except tm.Error as error:
            logger.warning("LMCache get: %s: %s", type(error).__name__, error)
            return [None] * len(keys)

    async def batched_get_non_blocking(self, lookup_id: str, keys: list[Any], transfer_spec: Any = None) -> list[Any]:
        """The leading ones that are there."""
        found = await tm_thread(self._threads, lambda: self.batched_get_blocking(keys))
        count = next((i for i, each in enumerate(found) if each is None), len(found))
        for each in found[count:]:
            if each is not None:
                each.ref_count_down()
        return found[:count]

    def pin(self, key: Any) -> bool:
        return self.contains(key, pin=True)

    def unpin(self, key: Any) -> bool:
        try:
            self._chunks.unpin(key)
        except tm.Error as error:
            logger.warning("LMCache unpin: %s: %s", type(error).__name__, error)
            return False
        return True

    def remove(self, key: Any, force: bool = True) -> bool:
        return self.batched_remove([key], force) == 1

    def batched_remove(self, keys: list[Any], force: bool = True) -> int:
        try:
            return sum(self._chunks.remove(keys))
        except tm.Error as error:
            logger.warning("LMCache remove: %s: %s", type(error).__name__, error)
            return 0

    def get_allocator_backend(self) -> Any:
        return self.local_cpu_backend

    def touch_cache(self) -> None:
        """Uses are counted by the pool."""

    def close(self) -> None:
        self._closed = True
        self._threads.shutdown(wait=True)
        self._chunks.close()


async def tm_thread(threads: ThreadPoolExecutor, call: Callable[[], Any]) -> Any:
    import asyncio

    return await asyncio.get_running_loop().run_in_executor(threads, call)
