"""A worker's side of the pool connector: pages between its cache and the pool, while the model computes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch_mooncake as tm
from torch_mooncake.integrations.vllm.caches import paged
from torch_mooncake.integrations.vllm.pool_orders import Order, PoolMeta, PoolPlace
from torch_mooncake.integrations.vllm.settings import Settings, logger
from torch_mooncake.kv import PoolKV, PrefixLoad, PrefixStore

if TYPE_CHECKING:
    import torch


@dataclass
class _Load:
    order: Order
    begun: Future[PrefixLoad]
    cancelled: bool = False


class PoolWorker:
    """Used by the worker's thread, which waits for the pool only where a preempted request's blocks are being read.

    Loads and stores end by ``timeout_s``. A store that fails is a hit less for somebody later: it is counted, and
    logged. A load that fails names the blocks that are not whole.
    """

    def __init__(self, settings: Settings, rank: int, open_pool: Callable[[], tm.Pool]) -> None:
        self._settings, self._rank, self._open_pool = settings, rank, open_pool
        self._timeout_s = settings.seconds("timeout_s", 10)
        self._threads = ThreadPoolExecutor(4, "tm-vllm-load")
        self._pool: tm.Pool | None = None
        self._kv: PoolKV | None = None
        self._loads: dict[str, _Load] = {}
        self._stores: dict[str, list[PrefixStore]] = {}
        self._finished: set[str] = set()  # requests that are over, and whose blocks are not yet
        self._cancelled: set[str] = set()  # of those, or about to be: ones whose load gives the blocks back
        self._failed_blocks: set[int] = set()
        self.stores_failed = 0

    def register(self, caches: Mapping[str, torch.Tensor]) -> None:
        """vLLM's caches. Raises Unsupported if they are not on the CPU, or their blocks are not the scheduler's."""
        kv = paged(caches, self._settings)
        self._pool = self._open_pool()
        self._kv = self._pool.kv(self._settings.rank_namespace(self._rank), kv)

    def place(self) -> PoolPlace | None:
        """None before `register`."""
        return None if self._kv is None else PoolPlace(self._kv.key(b"\0").rpartition("/")[0] + "/")

    def preempted(self, meta: PoolMeta) -> None:
        """Before anybody writes into the blocks of preempted requests: nothing reads them any more."""
        for name in meta.preempted:
            for store in self._stores.get(name, ()):
                self._settle(store)

    def _settle(self, store: PrefixStore) -> None:
        """Returns when it reads no block any more. It ends by itself, shortly after its deadline at the latest."""
        while store.state == "pending":
            with contextlib.suppress(tm.Error):  # a failed one has been counted; a late one is waited for again
                store.wait(self._timeout_s)

    def load(self, meta: PoolMeta) -> None:
        """Begins this step's loads, and ends those of cancelled requests."""
        for order in meta.loads:
            self._loads[order.request_id] = _Load(order, self._threads.submit(self._begin, order))
        for name in meta.cancelled:
            if (load := self._loads.get(name)) is not None:
                load.cancelled = True
                self._threads.submit(_cancel, load.begun)
            self._cancelled.add(name)

    def _begin(self, order: Order) -> PrefixLoad:
        assert self._kv is not None
        return self._kv.load(order.hashes, order.blocks, timeout=self._timeout_s)

    def save(self, meta: PoolMeta) -> None:
        """After the step's last layer: begins to store what it has completed."""
        for order in meta.saves:
            assert self._kv is not None
            stores = self._stores.setdefault(order.request_id, [])
            stores[:] = [store for store in stores if store.state == "pending"]
            try:
                store = self._kv.store(
                    order.hashes, order.blocks, parent=order.parent, timeout=self._timeout_s, then=self._stored
                )
            except tm.Error as error:
                self._log_failed(error)
                continue
            stores.append(store)

    def _stored(self, store: PrefixStore) -> None:
        if store.error is not None:
            self._log_failed(store.error)

    def _log_failed(self, error: tm.Error) -> None:
        self.stores_failed += 1
        if self.stores_failed & (self.stores_failed - 1) == 0:  # the first, second, fourth, …
            logger.warning("%d stores of blocks failed; %s: %s", self.stores_failed, type(error).__name__, error)

    def results(self, finished: Iterable[str]) -> tuple[set[str], set[str]]:
        """(requests whose blocks are stored, of those that have ``finished``; requests whose loads have ended). Each
        once, and a request whose load was cancelled as received only: vLLM frees its blocks at the first of the two.
        So nothing that is received is still being stored."""
        self._finished.update(name for name in finished if name in self._stores or name in self._cancelled)
        received = {name for name, load in self._loads.items() if self._stored_all(name) and self._ended(load)}
        for name in received:
            del self._loads[name]
        over = {name for name in self._finished if name not in self._loads and self._stored_all(name)}
        for name in over:
            self._stores.pop(name, None)
        sent = over - self._cancelled
        self._finished -= over
        self._cancelled -= over
        return sent, received

    def _stored_all(self, name: str) -> bool:
        return all(store.state != "pending" for store in self._stores.get(name, ()))

    def _ended(self, load: _Load) -> bool:
        """Whether no byte of it lands any more; then its blocks that are not whole are known."""
        if not load.begun.done():
            return False
        blocks, error = load.order.blocks, load.begun.exception()
        if error is None:
            handle = load.begun.result()
            if handle.state == "pending":
                return False
            error, blocks = handle.error, blocks[handle.loaded :]
        if blocks and not load.cancelled:
            self._failed_blocks.update(blocks)
            what = "they are gone" if error is None else f"{type(error).__name__}: {error}"
            logger.warning(
                "%d of %d blocks of %s: not loaded: %s",
                len(blocks),
                len(load.order.blocks),
                load.order.request_id,
                what,
            )
        return True

    def failed_blocks(self) -> set[int]:
        """Blocks that were not loaded, since the last time."""
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def close(self) -> None:
        """Ends loads, and waits for stores to end."""
        try:
            for load in self._loads.values():
                _cancel(load.begun)
            self._threads.shutdown(wait=True, cancel_futures=True)
            for stores in self._stores.values():
                for store in stores:
                    self._settle(store)
        finally:
            if self._pool is not None:
                self._pool.close()


def _cancel(begun: Future[PrefixLoad]) -> None:
    """Ends a load; returns when no byte of it lands any more."""
    if begun.cancel():
        return
    if begun.exception() is None:
        begun.result().cancel()
