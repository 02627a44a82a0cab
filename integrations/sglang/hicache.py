"""The third tier of SGLang's HiCache: pages of its host pools, in the pool of all hosts."""

from __future__ import annotations

import hashlib
import weakref
from typing import Any
from urllib.parse import quote

from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, PoolHitPolicy, PoolName, PoolTransferResult
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost

import torch_mooncake as tm
from torch_mooncake.integrations.sglang import host_pages
from torch_mooncake.integrations.sglang.objects import Objects, Piece


class PoolHiCache(HiCacheStorage):
    """Pages as sealed objects, one each with K and V of all layers, straight between SGLang's host memory and the
    pool's (``"interface_v1": 1``).

    Keys are ``sglang/<namespace>/<model>/<layout>/<rank>/<SGLang's page hash>``; SGLang's hash covers all tokens up to
    the page's end, ``extra_key`` (LoRA) and ``cache_salt``. The layout is a digest of what a page's bytes look like, so
    that engines whose pages differ do not meet. With ``should_split_heads`` a page is one object for each of the ranks
    of ``tp_lcm_size``, and engines of different TP share. All ranks of an MLA model have one page, but what they cut
    among them (mamba states, the cache of a draft model that is not MLA) is named by each rank.

    Extra config: ``namespace`` (the tenant; "default"), ``address`` ("host:7400"; the default is that of TM_*),
    ``replicas``, ``timeout_s`` (10). Every call ends in time; what fails is a miss, and logged.
    """

    def __init__(self, storage_config: Any, kwargs: Any = None) -> None:
        extra = storage_config.extra_config or {}
        timeout_s, replicas = float(extra.get("timeout_s", 10.0)), extra.get("replicas", 1)
        self._stored = Objects(tm.Pool(extra.get("address")), "SGLang HiCache", timeout_s, replicas)
        model = quote(storage_config.model_name or "model", safe="")
        self._base = f"sglang/{quote(str(extra.get('namespace', 'default')), safe='')}/{model}/"
        self._layouts: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
        self.registered_pools: dict[Any, Any] = {}
        self._ranks, self._own = _ranks(storage_config), _own(storage_config)
        self._replicated = bool(storage_config.is_mla_model)

    # --- pages, zero copy ---

    def batch_set_v1(self, keys: list[str], host_indices: Any, extra_info: Any = None) -> list[bool]:
        """Whether each page is there now."""
        return self._pages(PoolName.KV, keys, host_indices, self._stored.write)

    def batch_get_v1(self, keys: list[str], host_indices: Any, extra_info: Any = None) -> list[bool]:
        """Whether each page was read whole; the slots of one that was not have unspecified content."""
        return self._pages(PoolName.KV, keys, host_indices, self._stored.read)

    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        """How many pages, from the first on, are there with all that belongs to them."""
        names = self._stored.attempt("exists", lambda: self._names(PoolName.KV, keys), [])
        return self._stored.leading(names) // len(self._ranks) if names else 0

    def exists(self, key: str) -> bool:
        return self.batch_exists([key]) == 1

    # --- several host pools (hybrid models) ---

    def batch_set_v2(self, transfers: list[Any], extra_info: Any = None) -> dict[str, list[bool]]:
        return {each.name: self._transfer(each, self._stored.write) for each in transfers}

    def batch_get_v2(self, transfers: list[Any], extra_info: Any = None) -> dict[str, list[bool]]:
        return {each.name: self._transfer(each, self._stored.read) for each in transfers}

    def batch_exists_v2(self, keys: list[str], pool_transfers: Any = None, extra_info: Any = None) -> Any:
        """Every prefix that all pools can serve; the longest is the hit. Pools of BLOCK_GROUPS are a second form of the
        pages: what their whole groups cover, from the first on, is told beside it and does not shorten it. Nothing is
        there when one of the pools is not known, or its policy."""
        nothing = PoolTransferResult(0, {}, [])
        return self._stored.attempt("exists", lambda: self._exists(keys, pool_transfers or [], extra_info), nothing)

    def _exists(self, keys: list[str], transfers: list[Any], extra_info: Any) -> Any:
        logical = getattr(self.mem_pool_host, "kv_buffer", None) is None  # it only owns indices
        pages = len(keys) if logical else self.batch_exists(keys, extra_info)
        hits: dict[Any, int] = {"kv": pages} if pages else {}
        usable = set(range(1, pages + 1))
        for each in transfers:
            if each.hit_policy == PoolHitPolicy.BLOCK_GROUPS:
                if covered := self._covered(each, len(keys)):
                    hits[each.name] = covered
                continue
            there = self._stored.there(self._names(each.name, keys[:pages]))
            if each.hit_policy == PoolHitPolicy.ALL_PAGES:
                run = there.index(False) if False in there else pages
                good = set(range(1, run + 1))
            elif each.hit_policy == PoolHitPolicy.TRAILING_PAGES:
                window = max(1, len(each.keys or ()))
                good = {n for n in range(1, pages + 1) if all(there[max(0, n - window) : n])}
            else:
                raise tm.Unsupported(f"hit policy {each.hit_policy}")
            if good:
                hits[each.name] = max(good)
            usable &= good
        return PoolTransferResult(max(usable, default=0), hits, sorted(usable))

    def _covered(self, each: Any, pages: int) -> int:
        """Pages that the leading whole groups stand for: ``group_pages`` keys of the transfer for ``block_pages``."""
        if each.block_pages <= 0 or each.group_pages <= 0 or not each.keys:
            raise tm.InvalidArgument(f"{each.name}: block groups need block_pages, group_pages and keys")
        groups = self._stored.leading(self._names(each.name, each.keys)) // each.group_pages
        return int(min(groups * each.block_pages, pages))

    def _transfer(self, each: Any, call: Any) -> list[bool]:
        return self._pages(each.name, each.keys or [], each.host_indices, call)

    def _host_pool(self, name: Any) -> Any:
        if str(name) == "kv":
            return self.mem_pool_host
        if name not in self.registered_pools:
            raise tm.InvalidArgument(f"host pool {name} was not registered")
        return self.registered_pools[name]

    # --- values of SGLang's own (without interface_v1: flat copies of pages) ---

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> Any:
        return self.batch_get([key], None if target_location is None else [target_location])[0]

    def batch_get(self, keys: list[str], target_locations: Any = None, target_sizes: Any = None) -> Any:
        """Each target filled with its value, None for a miss. Without targets: uint8 tensors."""
        names = [self._flat(key) for key in keys]
        if target_locations is None:
            return [None if isinstance(each, Exception) else _as_tensor(each) for each in self._stored.values(names)]
        outcomes = self._stored.read(names, [[_piece(target)] for target in target_locations])
        return [target if done else None for target, done in zip(target_locations, outcomes, strict=True)]

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        return self.batch_set([key], [target_location if value is None else value])

    def batch_set(
        self, keys: list[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        dense = [value.contiguous() for value in (target_locations if values is None else values)]
        return all(self._stored.write([self._flat(key) for key in keys], [[_piece(value)] for value in dense]))

    def clear(self) -> None:
        """Remove all pages of this namespace and model, of every layout and rank."""
        self._stored.clear(self._base)

    def close(self) -> None:
        self._stored.close()

    # --- inside ---

    def _layout(self, host_pool: Any, parts: int) -> str:
        """A digest of what a page of the host pool looks like."""
        if host_pool not in self._layouts:
            import torch

            page = torch.arange(getattr(host_pool, "logical_page_size", host_pool.page_size))
            _, sizes = host_pages.spans(host_pool, page, parts)
            text = f"{host_pages.form(host_pool)} {sizes[: len(sizes) // parts]}"
            self._layouts[host_pool] = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
        return self._layouts[host_pool]

    def _ranks_of(self, pool: Any, host_pool: Any) -> list[str]:
        """Whose a page of the host pool is."""
        name = str(pool)
        if name == "kv":
            return self._ranks
        drafts = name in ("draft", "draft_swa") and isinstance(host_pool, MHATokenToKVPoolHost)
        return self._ranks[:1] if self._replicated and name != "mamba" and not drafts else [self._own]

    def _names(self, pool: Any, keys: list[str]) -> list[str]:
        """The objects of each page, those of one page together. InvalidArgument: the pool was not registered;
        Unsupported: its layout cannot be cut."""
        if not keys:
            return []
        host_pool = self._host_pool(pool)
        ranks = self._ranks_of(pool, host_pool)
        part = "" if str(pool) == "kv" else f"/{pool}"
        prefix = f"{self._base}{self._layout(host_pool, len(ranks))}{part}/"
        return [f"{prefix}{rank}/{key}" for key in keys for rank in ranks]

    def _objects(self, pool: Any, keys: list[str], indices: Any) -> tuple[list[str], list[list[Piece]]]:
        names, host_pool = self._names(pool, keys), self._host_pool(pool)
        addresses, sizes = host_pages.spans(host_pool, indices, len(names) // len(keys))
        if len(addresses) % len(names):
            raise tm.LayoutMismatch(f"{len(addresses)} pieces of memory do not make {len(names)} objects")
        each = len(addresses) // len(names)
        pieces = list(zip(addresses, sizes, strict=True))
        return names, [pieces[i * each : (i + 1) * each] for i in range(len(names))]

    def _pages(self, pool: Any, keys: list[str], indices: Any, call: Any) -> list[bool]:
        """Whether each was written, or read; none if it cannot be said where they lie."""
        if not keys:
            return []
        objects = self._stored.attempt(f"pages of {pool}", lambda: self._objects(pool, keys, indices), None)
        if objects is None:
            return [False] * len(keys)
        done = call(*objects)
        each = len(done) // len(keys)
        return [all(done[i * each : (i + 1) * each]) for i in range(len(keys))]

    def _flat(self, key: str) -> str:
        return f"{self._base}flat/{self._ranks[0]}/{key}"


def _ranks(config: Any) -> list[str]:
    """Whose page an object of the KV cache is: one name, or one for each part of the heads."""
    if config.is_mla_model:
        shard = f"dcp{config.dcp_rank}of{config.dcp_size}" if config.dcp_size > 1 else "mla"
        return [shard + _stage(config)]
    if config.should_split_heads:
        parts = config.tp_lcm_size // config.tp_size
        return [f"tp{config.tp_rank * parts + i}of{config.tp_lcm_size}{_stage(config)}" for i in range(parts)]
    return [_own(config)]


def _own(config: Any) -> str:
    """The name of what no other rank has."""
    return f"tp{config.tp_rank}of{config.tp_size}{_stage(config)}"


def _stage(config: Any) -> str:
    context = f"cp{config.attn_cp_rank}of{config.attn_cp_size}" if config.attn_cp_size > 1 else ""
    return context + (f"pp{config.pp_rank}of{config.pp_size}" if config.pp_size > 1 else "")


def _piece(tensor: Any) -> Piece:
    if not tensor.is_contiguous() or tensor.device.type != "cpu":
        raise tm.InvalidArgument(f"a page is a contiguous CPU tensor, not one on {tensor.device}")
    return tensor.data_ptr(), tensor.numel() * tensor.element_size()


def _as_tensor(value: Any) -> Any:
    import torch

    return value if isinstance(value, torch.Tensor) else torch.frombuffer(bytearray(value), dtype=torch.uint8)
