"""Prefix reuse: KV pages in the pool, under sealed keys named by their content."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import msgspec
import numpy as np

from torch_mooncake import aio, context
from torch_mooncake.clock import deadline_ns, seconds_left
from torch_mooncake.errors import Corrupt, Error, InvalidArgument, KeyNotFound
from torch_mooncake.kv.cache import PagedKV
from torch_mooncake.kv.hashing import Algorithm, PageHash, hash_name, page_hashes, root_hash
from torch_mooncake.kv.page_keys import PREFIX, PageMeta, page_meta
from torch_mooncake.kv.page_objects import PageObjects
from torch_mooncake.kv.prefix_reuse import PrefixLoad, PrefixStore
from torch_mooncake.kv.runs import checked_ids
from torch_mooncake.tensors import Decoded, Tensor, describe_tensor

if TYPE_CHECKING:
    from torch_mooncake.pool import Pool

_PIN_S = 10.0  # what a put holds its prefix with, at most
_PIN_MOST_S = 3600.0  # what a load holds its pages with, at most
_page_meta = msgspec.msgpack.Decoder(PageMeta)
_BOOKKEEPING_S = 2.0  # how long the outcome waits for what only concerns eviction


@dataclass
class PoolKVStats:
    """Counts since the start; seconds are time spent inside the calls."""

    pages_loaded: int = 0
    bytes_loaded: int = 0
    load_s: float = 0.0
    pages_stored: int = 0
    bytes_stored: int = 0
    store_s: float = 0.0
    stores_refused: int = 0  # counted by callers that go on without storing
    refreshes_failed: int = 0  # calls that ended well and left the order of eviction as it was


class PoolKV:
    """Pages of one model and one cache layout in the pool: ``pool.kv("llama", kv)``.

    A page of all layers of a group is one object. Its hash names its content, so a key is written once, never replaced,
    and the same page computed by two workers is stored once. Bytes go straight between the cache and the pool's memory,
    all layers of all pages in one call, whatever the cache's strides. A namespace should name everything that decides a
    page's content and is not in the hashes: the model and its weights, and the tensor-parallel rank and degree where
    ranks hold different heads; pages of another layout cannot be met (its fingerprint is in the key). A cache of
    several groups has a ``PoolKV`` for each, ``group`` being its index.

    *Hashes*: bytes (ours from ``page_hashes``, vLLM's), int or str (SGLang's), each naming all tokens up to its page's
    end; a list of them is a prompt, from its first page on. Keys (``page_keys``) are taken as well.

    *Eviction* takes a chain from its end: a parent stays at least as long as its children, if all users go through this
    class and pages have 32 KiB or more.

    ``pool`` is a ``Pool`` or the module itself (its default pool). Thread safety: calls may run in parallel as long as
    their pages differ; `stats` are counted without a lock. Errors: those of the pool's verbs; on an error during a load
    the pages' content is unspecified. Caches are on the CPU; Unsupported otherwise.
    """

    def __init__(self, pool: Any, kv: PagedKV, *, model: str, group: int = 0) -> None:
        self._given = pool
        self._objects = PageObjects(kv, group)
        self.namespace = model
        self._fingerprint = self._objects.fingerprint
        self._prefix = f"{PREFIX}{quote(model, safe='')}/{self._fingerprint}/"
        self._leaf = describe_tensor(self._objects.dtype, self._objects.shape)
        ours = self._leaf({})  # every page's is the same, but for what is between these two
        self._head, self._foot = ours[:-2], ours[-1:]
        self._page_size = self._objects.group.page_size
        self.stats = PoolKVStats()

    # --- names ---

    def page_hashes(
        self, token_ids: Sequence[int], *, cache_salt: str = "", algorithm: Algorithm = "blake2b"
    ) -> list[bytes]:
        """Hashes of the full pages of ``token_ids``, in order."""
        root = root_hash(model=self.namespace, fingerprint=self._fingerprint, cache_salt=cache_salt)
        return page_hashes(root, token_ids, self._page_size, algorithm)

    def page_keys(self, token_ids: Sequence[int], *, cache_salt: str = "") -> list[str]:
        """Keys of the full pages of ``token_ids``, in order."""
        return [self.key(digest) for digest in self.page_hashes(token_ids, cache_salt=cache_salt)]

    def key(self, page_hash: PageHash) -> str:
        """The pool's key of a page; a key of this namespace and layout is returned as it is."""
        if isinstance(page_hash, str) and page_hash.startswith(self._prefix):
            return page_hash
        return self._prefix + hash_name(page_hash)

    # --- pages ---

    def match_prefix(self, hashes: Sequence[PageHash], *, pin_s: float = 0, timeout: float | None = 30) -> int:
        """How many of ``hashes``, from the first on, are in the pool now: one question that ends at the first miss.

        With ``pin_s`` (at most an hour) those are not evicted for so long: until ``release``, or the pool is closed.
        Without, a page may be gone before it is read. Not a use: only ``get_pages`` is.
        """
        return self._pool().exists_prefix(self._keys(hashes), pin_s=pin_s, timeout=timeout)

    def release(self, hashes: Sequence[PageHash], *, timeout: float | None = 30) -> None:
        """End what ``match_prefix(pin_s=)`` of this pool's client has pinned of ``hashes``."""
        self._pool().unpin(self._keys(hashes), timeout=timeout)

    def get_pages(self, hashes: Sequence[PageHash], pages: Sequence[int], *, timeout: float | None = 30) -> int:
        """Loads the longest leading run of ``hashes`` that the pool has into the cache's ``pages``; returns its length.

        Counts as a use of each page, last page first. Corrupt: what lies under a key is not such a page, or says that
        another page comes before it; then nothing of the cache was written.
        """
        from torch_mooncake import _core

        keys, ids = self._keys(hashes), self._ids(hashes, pages)
        if not hashes:
            return 0
        started = time.perf_counter()
        deadline = deadline_ns(timeout)
        client = self._pool()._client(deadline)
        objects: list[Any] = []
        for _ in range(2):  # what was evicted since it was located may be there again
            found = self._locate(client, keys, len(objects), deadline)
            here = ids[len(objects) : len(objects) + len(found)]
            count = _core.read_pages(client, found, self._objects.memory, here, deadline) if found else 0
            objects += found[:count]
            if count == len(found):
                break
        count = len(objects)
        if count:
            self._refresh(_core.refresh_objects, client, objects, False, min(deadline, deadline_ns(_BOOKKEEPING_S)))
        self.stats.load_s += time.perf_counter() - started
        self.stats.pages_loaded += count
        self.stats.bytes_loaded += count * self.page_nbytes
        return count

    def load(self, hashes: Sequence[PageHash], pages: Sequence[int], *, timeout: float | None = 30) -> PrefixLoad:
        """Begins to load the longest leading run of ``hashes`` that the pool has into the cache's ``pages``. Returns
        when its length (``hits``) is known; layers come in their order while the caller computes.

            with pool_kv.load(hashes, pages) as load:
                for layer in range(layers):
                    load.wait_layer(layer)
                    …compute the tokens behind the load.hits pages…

        What is loaded is not evicted until the load has ended; pins of these keys (``match_prefix``) end then too. Of
        ``pages`` those beyond ``hits`` are not touched. Raises what ``get_pages`` does before a byte moves, and
        InvalidArgument when a page is named twice.
        """
        from torch_mooncake import _core

        keys, ids = self._keys(hashes), self._ids(hashes, pages)
        if len(set(ids)) != len(ids):
            raise InvalidArgument(f"a page is named twice: {ids}")
        deadline = deadline_ns(timeout)
        client = self._pool()._client(deadline)
        pin_s = min(_PIN_MOST_S, _PIN_MOST_S if timeout is None else timeout)
        keys = keys[: _core.match_prefix(client, keys, int(1000 * pin_s), deadline)] if keys else []
        try:
            objects = self._locate(client, keys, 0, deadline) if keys else []
        except Error:
            self._refresh(_core.refresh_keys, client, keys, True, deadline_ns(_BOOKKEEPING_S))
            raise
        return PrefixLoad(self, client, keys, objects, ids, deadline)

    def store(
        self,
        hashes: Sequence[PageHash],
        pages: Sequence[int],
        *,
        parent: PageHash | None = None,
        token_ids: Sequence[int] | None = None,
        timeout: float | None = 30,
        then: Callable[[PrefixStore], object] | None = None,
    ) -> PrefixStore:
        """``put_pages`` that returns at once. The pages are read until it has ended: their content has to stay, and
        they must not be given away before. ``then`` is called with the handle when it has, however it ended, on a
        thread of the library: the place to free them. Wrong arguments raise here."""
        self._check_put(hashes, pages, token_ids)
        deadline = deadline_ns(timeout)

        def put() -> int:
            left = None if timeout is None else seconds_left(deadline)
            return self.put_pages(hashes, pages, parent=parent, token_ids=token_ids, timeout=left)

        return PrefixStore(put, pages[: len(hashes)], deadline, then)

    def put_pages(
        self,
        hashes: Sequence[PageHash],
        pages: Sequence[int],
        *,
        parent: PageHash | None = None,
        token_ids: Sequence[int] | None = None,
        timeout: float | None = 30,
    ) -> int:
        """Stores the cache's ``pages`` under ``hashes``, those that are not there yet; returns how many were new.

        ``hashes`` are consecutive pages of one prompt; ``parent`` is the hash of the page before the first, None if the
        prompt begins with it. ``token_ids``: all tokens of these pages, kept beside them for KV events.
        A full pool raises PoolFull: what was stored before stays, and is of no use without the pages before it.
        """
        from torch_mooncake import _core

        ids = self._check_put(hashes, pages, token_ids)
        if not hashes:
            return 0
        started = time.perf_counter()
        deadline = deadline_ns(timeout)
        client, keys = self._pool()._client(deadline), self._keys(hashes)
        chain = keys if parent is None else [self.key(parent), *keys]
        # What comes before must not go while this is written.
        pin_ms = int(1000 * min(_PIN_S, _PIN_S if timeout is None else timeout))
        there = max(0, _core.match_prefix(client, chain, pin_ms, deadline) - (len(chain) - len(keys)))
        try:
            present = [True] * there + client.exists(keys[there:], deadline)
            absent = [index for index, found in enumerate(present) if not found]
            metas = self._metas(chain, len(chain) - len(keys), absent, token_ids)
            absent.reverse()  # the last page first: should room run out, the first ones push it out, not the other way
            metas.reverse()
            outcomes = _core.put_pages(
                client,
                [keys[index] for index in absent],
                metas,
                self._objects.memory,
                [ids[index] for index in absent],
                deadline,
            )
        finally:
            self._refresh(_core.refresh_keys, client, chain, True, deadline_ns(_BOOKKEEPING_S))
        stored = sum(outcome is True for outcome in outcomes)
        self.stats.store_s += time.perf_counter() - started
        self.stats.pages_stored += stored
        self.stats.bytes_stored += stored * self.page_nbytes
        for outcome in outcomes:
            if isinstance(outcome, Exception):
                raise outcome
        return stored

    async def amatch_prefix(self, hashes: Sequence[PageHash], **options: Any) -> int:
        """``match_prefix``, on the library's threads."""
        return await aio.in_thread(lambda: self.match_prefix(hashes, **options))

    async def aget_pages(self, hashes: Sequence[PageHash], pages: Sequence[int], **options: Any) -> int:
        """``get_pages``, on the library's threads. When it is cancelled the pages' content is unspecified, and they may
        still be written until the call has ended by its timeout."""
        return await aio.in_thread(lambda: self.get_pages(hashes, pages, **options))

    async def aput_pages(self, hashes: Sequence[PageHash], pages: Sequence[int], **options: Any) -> int:
        """``put_pages``, on the library's threads. When it is cancelled the pages may still be read until the call has
        ended by its timeout."""
        return await aio.in_thread(lambda: self.put_pages(hashes, pages, **options))

    @property
    def page_nbytes(self) -> int:
        """Of one page, all layers."""
        return self._objects.nbytes

    # --- inside ---

    def _refresh(self, refresh: Callable[..., None], *args: Any) -> None:
        """Tells the pool which pages to keep longest. The outcome of the call does not hang on it."""
        try:
            refresh(*args)
        except Error:
            self.stats.refreshes_failed += 1

    def _pool(self) -> Pool:
        return context.default() if isinstance(self._given, ModuleType) else self._given

    def _ids(self, hashes: Sequence[PageHash], pages: Sequence[int]) -> list[int]:
        """The pages of ``hashes``; OutOfBounds names one that does not exist."""
        if len(pages) < len(hashes):
            raise InvalidArgument(f"{len(hashes)} hashes, but {len(pages)} pages")
        return checked_ids(pages[: len(hashes)], self._objects.group.num_pages).tolist()

    def _check_put(
        self, hashes: Sequence[PageHash], pages: Sequence[int], token_ids: Sequence[int] | None
    ) -> list[int]:
        size = self._page_size
        if token_ids is not None and len(token_ids) < len(hashes) * size:
            raise InvalidArgument(f"{len(hashes)} pages of {size} tokens, but {len(token_ids)} tokens")
        return self._ids(hashes, pages)

    def _keys(self, hashes: Sequence[PageHash]) -> list[str]:
        return [self.key(page_hash) for page_hash in hashes]

    def _metas(self, chain: list[str], first: int, absent: list[int], token_ids: Sequence[int] | None) -> list[bytes]:
        size = self._page_size
        tokens = None if token_ids is None else np.asarray(token_ids, dtype="<i8")
        out = []
        for index in absent:
            before = chain[first + index - 1] if first + index else None
            user: dict[str, Any] = {"block_size": size}
            if before is not None:
                user["parent"] = before.rpartition("/")[2]
            if tokens is not None:
                user["tokens"] = tokens[index * size : (index + 1) * size].tobytes()
            out.append(self._leaf(user))
        return out

    def _locate(self, client: Any, keys: list[str], first: int, deadline: int) -> list[Any]:
        """The objects of keys[first:], up to the first that is not there."""
        found: list[Any] = []
        for index, item in enumerate(client.locate_many(keys[first:], deadline), first):
            if isinstance(item, KeyNotFound):
                break
            if isinstance(item, Exception):
                raise item
            self._check(keys[index], item, keys[index - 1] if index else None)
            found.append(item)
        return found

    def _locate_again(self, client: Any, keys: list[str], deadline: int) -> list[Any]:
        """The objects of keys, or why not, one by one."""
        out = client.locate_many(keys, deadline)
        for key, item in zip(keys, out, strict=True):
            if not isinstance(item, Exception):
                self._check(key, item, None)
        return out

    def _check(self, key: str, found: Any, before: str | None) -> None:
        """That the object is a page of this layout, and follows ``before``."""
        page = self._quick_meta(found.meta) or self._checked_meta(key, found)
        if before is not None and page is not None and page.parent not in (None, before.rpartition("/")[2]):
            raise Corrupt(f"{key} says that it follows page {page.parent}, not {before}")

    def _quick_meta(self, meta: bytes) -> PageMeta | None:
        """What an object says of its page, if it is described as ours are; None: look closer."""
        if not meta.startswith(self._head) or not meta.endswith(self._foot):
            return None
        try:
            return _page_meta.decode(meta[len(self._head) : -1])
        except msgspec.MsgspecError:
            return None

    def _checked_meta(self, key: str, found: Any) -> PageMeta | None:
        described = Decoded(found.meta, found.nbytes, lambda offset, nbytes: b"")
        root = described.root
        shape, dtype = self._objects.shape, str(self._objects.dtype).removeprefix("torch.")
        if not isinstance(root, Tensor) or root.shape != shape or root.dtype != dtype or root.offset != 0:
            raise Corrupt(f"{key} holds {root}, not a page of shape {shape} and dtype {dtype}")
        return page_meta(described.user)
