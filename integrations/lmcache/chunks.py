"""LMCache's chunks in the pool: one sealed object each, with its shapes, dtypes and format beside it."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Sequence
from typing import Any

import torch
from lmcache.v1.memory_management import MemoryFormat
from lmcache.v1.token_database import ChunkedTokenDatabase

import torch_mooncake as tm
from torch_mooncake.integrations._hash_check import logger, same_hashes

_PIN_S = 30.0  # what a look-up that asks for it holds chunks with


class Chunks:
    """Chunks of one model and layout. Any thread.

    Keys are ``lmcache/<namespace>/<layout>/<LMCache's key>``: LMCache's has model, world size, rank, the hash of all
    tokens up to the chunk's end (with LoRA and multi-modal extras) and the request's tags; the namespace is the tenant,
    the layout a digest of shapes, dtypes and format, so that what another layout stored cannot be met. Every call ends
    by ``timeout_s``; what goes wrong is a miss, and logged.
    """

    def __init__(self, config: Any, metadata: Any, plugin: str) -> None:
        extra = config.extra_config or {}

        def setting(name: str, default: Any) -> Any:
            return extra.get(f"{plugin}.{name}", extra.get(f"torch_mooncake.{name}", default))

        self.timeout_s = float(setting("timeout_s", 10.0))
        self._replicas = setting("replicas", 1)
        address = setting("address", None)
        self.pool = (
            tm.Pool(address) if address or setting("pool", None) is None else tm.Pool(pool=setting("pool", None))
        )
        self._blobs = tm.Blobs(self.pool)
        self._usual: tuple[int, dict[str, Any]] | None = None  # bytes and meta of the largest chunk that was there
        layout = repr(
            (list(map(tuple, metadata.get_shapes())), list(map(str, metadata.get_dtypes())), metadata.use_mla)
        )
        digest = hashlib.blake2b(layout.encode(), digest_size=8).hexdigest()
        self._prefix = f"lmcache/{setting('namespace', 'default')}/{digest}/"
        self._check_hashes(config, metadata)

    def _check_hashes(self, config: Any, metadata: Any) -> None:
        algorithm = config.pre_caching_hash_algorithm
        database = ChunkedTokenDatabase(config, metadata)
        tokens = list(range(1, config.chunk_size + 1))
        found = [str(value) for _, _, value in database.process_tokens(tokens=tokens, make_key=False)]
        seed = os.environ.get("PYTHONHASHSEED", "random") if database.hash_func is hash else "-"
        probe = f"{algorithm}:{','.join(found)}:{hash('torch_mooncake') if database.hash_func is hash else seed}"
        advice = "Set PYTHONHASHSEED and pre_caching_hash_algorithm alike for all of them."
        same_hashes(self.pool, self._prefix, probe, advice)

    def key(self, key: Any) -> str:
        name: str = key.to_string()
        full = self._prefix + name
        return full if len(full.encode()) <= 1024 else f"{self._prefix}#{hashlib.blake2b(name.encode()).hexdigest()}"

    def leading(self, keys: Sequence[Any], pin: bool = False) -> int:
        """How many, from the first on, are there. Not a use."""
        return self.pool.exists_prefix(
            [self.key(key) for key in keys], pin_s=_PIN_S if pin else 0, timeout=self.timeout_s
        )

    def unpin(self, key: Any) -> None:
        self.pool.unpin([self.key(key)], timeout=self.timeout_s)

    def store(self, keys: Sequence[Any], objects: Sequence[Any]) -> list[bool]:
        """Put MemoryObjs, whose references are the caller's business; whether each is there now. Logs failures."""
        pieces = [[(each.data_ptr, each.get_size())] for each in objects]
        metas = [_describe(each) for each in objects]
        outcomes = self._blobs.put_from(
            [self.key(key) for key in keys],
            pieces,
            metas=metas,
            sealed=True,
            replicas=self._replicas,
            timeout=self.timeout_s,
        )
        stored = []
        for key, outcome in zip(keys, outcomes, strict=True):
            stored.append(not isinstance(outcome, Exception))
            if isinstance(outcome, Exception):
                logger.warning("LMCache put of %s: %s: %s", key, type(outcome).__name__, outcome)
        return stored

    def load(self, keys: Sequence[Any], allocator: Any) -> list[Any]:
        """A MemoryObj of ``allocator`` for each key, with one reference; None for a miss, a failure (logged), or where
        the allocator has no room."""
        results: list[Any] = [None] * len(keys)
        until = time.monotonic() + self.timeout_s
        try:
            # Chunks of a layout are alike, but for the last of a request: without a question first, unless it differs.
            usual = self._usual
            left = list(range(len(keys)))
            if usual is not None:
                left = self._read(keys, [(i, usual) for i in left], results, allocator, until, known=False)
            if left:
                found = self._blobs.look([self.key(keys[i]) for i in left], timeout=max(0.0, until - time.monotonic()))
                described = []
                for i, each in zip(left, found, strict=True):
                    if isinstance(each, Exception):
                        _log_failure(keys[i], each)
                    else:
                        described.append((i, each))
                self._read(keys, described, results, allocator, until, known=True)
        except BaseException:
            for each in results:
                if each is not None:
                    each.ref_count_down()
            raise
        return results

    def _read(
        self,
        keys: Sequence[Any],
        described: Sequence[tuple[int, tuple[int, dict[str, Any]]]],
        results: list[Any],
        allocator: Any,
        until: float,
        known: bool,
    ) -> list[int]:
        """Of those that are as described (bytes, meta), the MemoryObjs. The others: there, but not known to be so."""
        for i, (nbytes, meta) in described:
            results[i] = _allocate(allocator, nbytes, meta)
        wanted = [(i, each) for i, each in described if results[i] is not None]
        pieces = [[(results[i].data_ptr, results[i].get_size())] for i, _ in wanted]
        left = max(0.0, until - time.monotonic())
        read = self._blobs.get_into([self.key(keys[i]) for i, _ in wanted], pieces, timeout=left)
        others = []
        for (i, each), outcome in zip(wanted, read, strict=True):
            if outcome == each[0]:
                if self._usual is None or self._usual[0] < each[0]:
                    self._usual = each
                continue
            results[i].ref_count_down()
            results[i] = None
            if not known and isinstance(outcome, int | tm.LayoutMismatch):
                others.append(i)
            else:
                _log_failure(keys[i], outcome)
        return others

    def remove(self, keys: Sequence[Any]) -> list[bool]:
        return self.pool.delete([self.key(key) for key in keys], timeout=self.timeout_s)

    def names(self) -> list[str]:
        """LMCache's names of all chunks of this namespace and layout."""
        found = self.pool.keys(self._prefix, timeout=self.timeout_s)
        return [name.removeprefix(self._prefix) for name in found if not name.endswith("/hash-probe")]

    def close(self) -> None:
        self.pool.close()


def _describe(each: Any) -> dict[str, Any]:
    return {
        "shapes": [list(shape) for shape in each.get_shapes()],
        "dtypes": [str(dtype).removeprefix("torch.") for dtype in each.get_dtypes()],
        "fmt": int(each.get_memory_format().value),
    }


def _allocate(allocator: Any, nbytes: int, meta: dict[str, Any]) -> Any:
    """Room for what ``meta`` describes; None if there is none, or it makes no sense."""
    try:
        shapes = [torch.Size(shape) for shape in meta["shapes"]]
        dtypes = [getattr(torch, name) for name in meta["dtypes"]]
        fmt = MemoryFormat(meta["fmt"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        logger.warning("an object under an LMCache key is not described as one: %s", error)
        return None
    made = allocator.allocate(shapes, dtypes, fmt)
    if made is not None and made.get_size() != nbytes:
        logger.warning("a chunk of %d bytes says that it has %d", nbytes, made.get_size())
        made.ref_count_down()
        return None
    return made


def _log_failure(key: Any, outcome: Any) -> None:
    if not isinstance(outcome, tm.KeyNotFound):
        logger.warning("LMCache get of %s: %s", key, outcome)
