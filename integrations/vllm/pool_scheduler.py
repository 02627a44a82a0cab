"""The scheduler's side of the pool connector: what of a prompt the pool has, and which blocks go there."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotYet
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

import torch_mooncake as tm
from torch_mooncake.integrations._hash_check import same_hashes
from torch_mooncake.integrations.vllm.pool_orders import Order, PoolMeta, PoolPlace
from torch_mooncake.integrations.vllm.settings import Settings, logger
from torch_mooncake.integrations.vllm.steps import Steps
from torch_mooncake.kv import hash_name

_REST_S = 5.0  # how long a pool that has not answered is not asked
_ADVICE = "Give all engines the same PYTHONHASHSEED and --prefix-caching-hash-algo."


@dataclass
class _Asked:
    """A question about blocks ``first`` to ``last`` of a request's prompt."""

    first: int
    last: int
    hits: Future[int]
    until: float  # when pins of the answer are gone, or an answer is not waited for any longer


@dataclass
class _Known:
    """A request that has blocks."""

    request: Any
    saved: int = 0  # blocks, from the first on, that workers were told to store
    told: bool = False  # of any
    loading: list[bytes] = field(default_factory=list)  # hashes
    stale: bool = False  # what its blocks hold was computed before `reset`


class PoolScheduler:
    """Used by the scheduler's thread; nothing here waits for the pool longer than ``patience_ms``.

    The pool is asked on another thread. A request whose answer is not there in time is asked about again at the next
    step, until ``lookup_timeout_s``; then, and when the pool cannot be asked, nothing of it is there. Hits are whole
    blocks that all ranks' pages are there for; they leave a token to compute, and are pinned until they are loaded.

    After `reset` blocks go by other names, which only this scheduler knows.
    """

    def __init__(
        self, settings: Settings, pool: tm.Pool, probe: Callable[[], str], *, loads: bool, saves: bool
    ) -> None:
        self._settings, self._pool, self._probe = settings, pool, probe
        self._loads, self._saves = loads, saves
        self._patience_s = settings.seconds("patience_ms", 20) / 1000
        self._lookup_s = settings.seconds("lookup_timeout_s", 2)
        self._pin_s = settings.seconds("timeout_s", 10) + self._lookup_s
        self._prefixes: list[str] = []
        self._generation = b""  # in the names of blocks, after a reset
        self._threads = ThreadPoolExecutor(4, "tm-vllm-lookup")
        self._asked: dict[str, _Asked] = {}
        self._tried: dict[str, int] = {}  # loads that were ordered, by the request's preemptions
        self._known: dict[str, _Known] = {}
        self._steps = Steps()
        self._meta = PoolMeta()
        self._rest_until = 0.0
        self._checked: Future[bool] | None = None
        if loads and not settings.recompute:
            logger.warning(
                "kv_load_failure_policy is not 'recompute': a request whose blocks are lost before it has them fails"
            )

    def places(self, places: Mapping[int, PoolPlace]) -> None:
        """Of all ranks, when their caches are known."""
        self._prefixes = sorted({place.prefix for place in places.values()})

    def _check_hashes(self) -> bool:
        """Whether this engine's hashes are those of whoever came first; says so if not."""
        key = f"vllm/{quote(self._settings.namespace, safe='')}/{self._settings.block_size}/"
        try:
            return same_hashes(self._pool, key, self._probe(), _ADVICE, self._lookup_s)
        except tm.Error as error:
            logger.warning("hashes were not compared: %s: %s", type(error).__name__, error)
            return False

    # ---- what the scheduler asks

    def matched(self, request: Any, computed: int) -> tuple[int | None, bool]:
        """(tokens behind ``computed`` that the pool has, whether they are loaded meanwhile); None: ask again."""
        name = request.request_id
        if self._checked is None:  # at the first request: by then vLLM has chosen its hash's seed
            self._checked = self._threads.submit(self._check_hashes)
        if not self._loads or self._tried.get(name) == request.num_preemptions:
            return 0, False
        first = computed // self._settings.block_size
        last = min((request.num_tokens - 1) // self._settings.block_size, len(request.block_hashes))
        if first >= last or getattr(request, "skip_reading_prefix_cache", False):
            return 0, False
        now = time.monotonic()
        asked = self._asked.get(name)
        if asked is None or (asked.first, asked.last) != (first, last) or (asked.hits.done() and now >= asked.until):
            if now < self._rest_until:
                return 0, False
            hashes = self._names(request, first, last)
            until = now + self._lookup_s
            asked = self._asked[name] = _Asked(first, last, self._threads.submit(self._look, hashes), until)
            try:
                asked.hits.result(self._patience_s)
            except NotYet:
                return None, False
            except Exception:
                pass  # `_answer` says so
        if not asked.hits.done() and now < asked.until:
            return None, False
        hits = self._answer(asked)
        return hits * self._settings.block_size, hits > 0

    def _look(self, hashes: list[bytes]) -> int:
        keys = [prefix + hash_name(each) for each in hashes for prefix in self._prefixes]
        if not keys:
            return 0
        return self._pool.exists_prefix(keys, pin_s=self._pin_s, timeout=self._lookup_s) // len(self._prefixes)

    def _answer(self, asked: _Asked) -> int:
        try:
            return asked.hits.result(0)
        except NotYet:
            why = f"no answer within {self._lookup_s} s"
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
        logger.warning("the pool cannot be asked for prefixes (not for %.0f s either): %s", _REST_S, why)
        self._rest_until = time.monotonic() + _REST_S
        asked.hits = Future()
        asked.hits.set_result(0)
        return 0

    def allocated(self, request: Any, blocks: list[int], external: int) -> None:
        """The request has ``blocks``; ``external`` tokens of them are to be loaded."""
        name = request.request_id
        asked = self._asked.pop(name, None)
        known = self._known.setdefault(name, _Known(request))
        if self._saves:
            self._steps.follow(name)
        if not external or asked is None:
            return
        end = asked.first + external // self._settings.block_size
        known.loading = self._names(request, asked.first, end)
        self._tried[name] = request.num_preemptions
        self._meta.loads.append(Order(name, known.loading, blocks[asked.first : end]))

    def build(self, output: Any) -> PoolMeta:
        """What the workers are told with this step."""
        meta, self._meta = self._meta, PoolMeta()
        meta.preempted = [name for name in output.preempted_req_ids or () if name in self._known]
        for name in meta.preempted:
            self._known[name].saved, self._known[name].stale = 0, False
        for name, progress in self._steps.scheduled(output):
            known = self._known[name]
            count = len(known.request.block_hashes)
            end = min(progress.computed // self._settings.block_size, count, len(progress.blocks))
            if end > known.saved and not known.stale:
                start, known.saved, known.told = known.saved, end, True
                parent = self._names(known.request, start - 1, start)[0] if start else None
                fresh = self._names(known.request, start, end)
                meta.saves.append(Order(name, fresh, progress.blocks[start:end], parent))
        return meta

    def _names(self, request: Any, first: int, last: int) -> list[bytes]:
        """What blocks ``first`` to ``last`` go by: vLLM's hashes and, after a reset, its generation."""
        hashes = [bytes(each) for each in request.block_hashes[first:last]]
        if not self._generation:
            return hashes
        return [hashlib.blake2b(each, digest_size=32, key=self._generation).digest() for each in hashes]

    def reset(self) -> bool:
        """The model has other weights, say: nothing that is in the pool by now is taken any more, and nothing that was
        computed before goes there. Other engines keep what they have; from here on nothing is shared with them.
        False, and nothing is done, while blocks are being loaded."""
        if any(known.loading for known in self._known.values()):
            return False
        self._generation = os.urandom(16)
        self._asked.clear()
        for known in self._known.values():
            known.stale = True
        return True

    def received(self, names: Iterable[str]) -> None:
        """These loads have ended on all ranks."""
        for name in names:
            if (known := self._known.get(name)) is not None:
                self._release(known)

    def _release(self, known: _Known) -> None:
        hashes, known.loading = known.loading, []
        if hashes:
            self._threads.submit(self._unpin, hashes)

    def _unpin(self, hashes: list[bytes]) -> None:
        keys = [prefix + hash_name(each) for each in hashes for prefix in self._prefixes]
        try:
            self._pool.unpin(keys, timeout=self._lookup_s)
        except tm.Error as error:  # they end by themselves
            logger.debug("unpin: %s", error)

    def finished(self, request: Any) -> bool:
        """Whether its blocks are being stored: then workers say when they are free. They do not of a request that is
        being loaded: vLLM keeps its blocks until the load has ended, and workers say only that."""
        name = request.request_id
        self._asked.pop(name, None)
        self._tried.pop(name, None)
        self._steps.forget(name)
        known = self._known.pop(name, None)
        if known is None:
            return False
        if known.loading:
            self._meta.cancelled.append(name)
            self._release(known)
            return False
        return known.told

    def close(self) -> None:
        self._threads.shutdown(wait=True, cancel_futures=True)
        self._pool.close()
