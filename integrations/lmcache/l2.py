"""LMCache's multiprocess mode: its server's second tier, as a "plugin" adapter."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import quote

from lmcache.lmcache_native import Bitmap
from lmcache.v1.distributed.internal_api import L2StoreResult
from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface
from lmcache.v1.platform.event_notifier import create_event_notifier

import torch_mooncake as tm
from torch_mooncake.integrations._hash_check import logger

_PIN_S = 60.0  # what a look-up locks, if it is not unlocked before


class PoolL2Adapter(L2AdapterInterface):
    """Chunks as sealed objects of the pool, which evicts by itself: LMCache needs no eviction policy for it.

    Keys are ``lmcache-l2/<namespace>/<model>/<rank>/<object group>/<cache salt>/<LMCache's hash>``. A chunk of other
    dtypes than a look-up expects, or of another size than a load's, is a miss. Every task ends by ``timeout_s`` (10)
    and a little; what fails is a miss, and logged. Parameters: ``namespace`` (the tenant; "default"), ``address``
    ("host:7400"; the default is that of TM_*), ``timeout_s``, ``replicas`` (1), ``threads`` (4).
    """

    def __init__(self, parameters: dict[str, Any], l1_memory_desc: Any = None) -> None:
        super().__init__()
        self._timeout_s = float(parameters.get("timeout_s", 10))
        self._replicas = parameters.get("replicas", 1)
        self._pool = tm.Pool(parameters.get("address"))
        self._blobs = tm.Blobs(self._pool)
        self._base = f"lmcache-l2/{quote(str(parameters.get('namespace', 'default')), safe='')}/"
        self._threads = ThreadPoolExecutor(int(parameters.get("threads", 4)), "tm-lmcache-l2")
        self._ids = itertools.count()
        self._lock = threading.Lock()
        self._events = {kind: create_event_notifier() for kind in ("store", "lookup", "load")}
        self._done: dict[str, dict[int, Any]] = {kind: {} for kind in self._events}

    def get_store_event_fd(self) -> int:
        return int(self._events["store"].fileno())

    def get_lookup_and_lock_event_fd(self) -> int:
        return int(self._events["lookup"].fileno())

    def get_load_event_fd(self) -> int:
        return int(self._events["load"].fileno())

    # --- tasks ---

    def submit_store_task(self, keys: list[Any], objects: list[Any]) -> int:
        return self._submit("store", lambda: self._store(keys, objects), L2StoreResult(False, 0))

    def pop_completed_store_tasks(self) -> dict[int, Any]:
        with self._lock:
            done, self._done["store"] = self._done["store"], {}
        return done

    def submit_lookup_and_lock_task(self, keys: list[Any], group_layout_descs: dict[int, Any]) -> int:
        return self._submit("lookup", lambda: self._look(keys, group_layout_descs or {}), Bitmap(len(keys)))

    def query_lookup_and_lock_result(self, task_id: int) -> Any:
        with self._lock:
            return self._done["lookup"].pop(task_id, None)

    def submit_unlock(self, keys: list[Any]) -> None:
        """What is not unlocked, because the pool does not answer, unlocks itself after a minute."""
        names = self._names(keys)
        self._threads.submit(self._attempt, "unlock", lambda: self._pool.unpin(names, timeout=self._timeout_s))

    def submit_load_task(self, keys: list[Any], objects: list[Any]) -> int:
        return self._submit("load", lambda: self._load(keys, objects), Bitmap(len(keys)))

    def query_load_result(self, task_id: int) -> Any:
        with self._lock:
            return self._done["load"].pop(task_id, None)

    def _submit(self, kind: str, call: Callable[[], Any], otherwise: Any) -> int:
        """Its result is there, and its event set, when it has ended, well or not."""
        task = next(self._ids)

        def run() -> None:
            found = None
            try:
                found = self._attempt(kind, call)
            except Exception:  # nobody else would hear of it
                logger.exception("LMCache L2 %s", kind)
            finally:
                with self._lock:
                    self._done[kind][task] = otherwise if found is None else found
                self._events[kind].notify()

        self._threads.submit(run)
        return task

    def _attempt(self, what: str, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except tm.Error as error:
            logger.warning("LMCache L2 %s: %s: %s", what, type(error).__name__, error)
            return None

    # --- what they do ---

    def _store(self, keys: list[Any], objects: list[Any]) -> Any:
        names, left = self._names(keys), self._countdown()
        there = self._pool.exists(names, timeout=left())
        new = [i for i, known in enumerate(there) if not known]
        outcomes = self._blobs.put_from(
            [names[i] for i in new],
            [[(objects[i].data_ptr, objects[i].get_size())] for i in new],
            metas=[{"dtypes": _dtypes(objects[i].get_dtypes())} for i in new],
            sealed=True,
            replicas=self._replicas,
            timeout=left(),
        )
        failed = self._failures("store", outcomes)
        stored = [i for i, outcome in zip(new, outcomes, strict=True) if not isinstance(outcome, Exception)]
        sizes = [objects[i].get_size() for i in stored]
        if stored:
            self._notify_keys_stored([keys[i] for i in stored], sizes)
        return L2StoreResult(not failed, sum(sizes))

    def _look(self, keys: list[Any], layouts: dict[int, Any]) -> Any:
        """Which are there, as expected; all of these are pinned."""
        left = self._countdown()
        found = self._blobs.look(self._names(keys), timeout=left())
        self._failures("lookup", found)
        good = [
            i
            for i, (key, each) in enumerate(zip(keys, found, strict=True))
            if not isinstance(each, Exception) and _fits(layouts.get(key.object_group_id), each[1])
        ]
        names = self._names([keys[i] for i in good])
        pinned = self._pool.exists_prefix(names, pin_s=_PIN_S, timeout=left()) if names else 0
        return _bitmap(len(keys), good[:pinned])

    def _load(self, keys: list[Any], objects: list[Any]) -> Any:
        sizes = [each.get_size() for each in objects]
        pieces = [[(each.data_ptr, nbytes)] for each, nbytes in zip(objects, sizes, strict=True)]
        outcomes = self._blobs.get_into(self._names(keys), pieces, timeout=self._timeout_s)
        self._failures("load", outcomes)
        good = [i for i, outcome in enumerate(outcomes) if outcome == sizes[i]]
        if good:
            self._notify_keys_accessed([keys[i] for i in good])
        return _bitmap(len(keys), good)

    def delete(self, keys: list[Any]) -> None:
        def go() -> None:
            names, left = self._names(keys), self._countdown()
            sizes = self._blobs.nbytes(names, timeout=left())
            gone = self._pool.delete(names, timeout=left())
            removed = [
                (key, nbytes)
                for key, nbytes, was in zip(keys, sizes, gone, strict=True)
                if was and not isinstance(nbytes, Exception)
            ]
            if removed:
                self._notify_keys_deleted([key for key, _ in removed], [nbytes for _, nbytes in removed])

        self._attempt("delete", go)

    def report_status(self) -> dict[str, Any]:
        answers = self._attempt("status", lambda: self._pool.stat(timeout=self._timeout_s)) is not None
        return {"is_healthy": answers, "type": type(self).__name__, "prefix": self._base}

    def close(self) -> None:
        """Tasks that were submitted end before."""
        self._threads.shutdown(wait=True)
        for each in self._events.values():
            each.close()
        self._pool.close()

    def _names(self, keys: Sequence[Any]) -> list[str]:
        return [
            f"{self._base}{quote(key.model_name, safe='')}/{key.kv_rank:x}/{key.object_group_id}/"
            f"{quote(key.cache_salt, safe='')}/{key.chunk_hash.hex()}"
            for key in keys
        ]

    def _countdown(self) -> Callable[[], float]:
        """What is left of the time of one task, whose calls share it: at least 10 ms."""
        end = time.monotonic() + self._timeout_s
        return lambda: max(0.01, end - time.monotonic())

    def _failures(self, what: str, outcomes: Sequence[Any]) -> int:
        failed = [each for each in outcomes if isinstance(each, Exception) and not isinstance(each, tm.KeyNotFound)]
        if failed:
            logger.warning("LMCache L2 %s: %d of %d failed: %s", what, len(failed), len(outcomes), failed[0])
        return len(failed)


def _dtypes(dtypes: Sequence[Any]) -> list[str]:
    return [str(each).removeprefix("torch.") for each in dtypes]


def _fits(layout: Any, meta: dict[str, Any]) -> bool:
    return layout is None or _dtypes(layout.dtypes) == meta.get("dtypes")


def _bitmap(size: int, good: Sequence[int]) -> Any:
    made = Bitmap(size)
    for i in good:
        made.set(i)
    return made
