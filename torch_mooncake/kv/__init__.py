"""Paged KV cache: layouts, page hashing, prefix reuse through the pool, and prefill/decode sessions over the engine.

kv = PagedKV(layers, axes="PKNHD")                  # one tensor a layer, built by the engine that runs the model
pool_kv = PoolKV(pool, kv, model="smollm2")         # pages whose prefix somebody computed before
receiver = KVReceiver(engine, kv, PageAllocator(n)) # decode side: hands out tickets
sender = KVSender(engine, kv)                       # prefill side: takes them and pushes layer by layer

Names are loaded on first use: what needs no torch (events, hashes) runs without it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch_mooncake.kv.cache import GroupTensors as GroupTensors
    from torch_mooncake.kv.cache import PagedKV as PagedKV
    from torch_mooncake.kv.cache import PlaneTensor as PlaneTensor
    from torch_mooncake.kv.events import KVCleared as KVCleared
    from torch_mooncake.kv.events import KVEventPublisher as KVEventPublisher
    from torch_mooncake.kv.events import KVEvents as KVEvents
    from torch_mooncake.kv.events import KVRemoved as KVRemoved
    from torch_mooncake.kv.events import KVStored as KVStored
    from torch_mooncake.kv.groups import Group as Group
    from torch_mooncake.kv.groups import Plane as Plane
    from torch_mooncake.kv.hashing import hash_name as hash_name
    from torch_mooncake.kv.hashing import hash_of_name as hash_of_name
    from torch_mooncake.kv.hashing import page_hashes as page_hashes
    from torch_mooncake.kv.hashing import root_hash as root_hash
    from torch_mooncake.kv.layout import PagedKVLayout as PagedKVLayout
    from torch_mooncake.kv.layout import Segments as Segments
    from torch_mooncake.kv.pages import PageAllocator as PageAllocator
    from torch_mooncake.kv.plan import Plan as Plan
    from torch_mooncake.kv.pool_kv import PoolKV as PoolKV
    from torch_mooncake.kv.pool_kv import PoolKVStats as PoolKVStats
    from torch_mooncake.kv.prefix_reuse import PrefixLoad as PrefixLoad
    from torch_mooncake.kv.prefix_reuse import PrefixStore as PrefixStore
    from torch_mooncake.kv.receive import DecodeSession as DecodeSession
    from torch_mooncake.kv.receive import KVReceiver as KVReceiver
    from torch_mooncake.kv.send import KVSender as KVSender
    from torch_mooncake.kv.send import PrefillSession as PrefillSession
    from torch_mooncake.kv.send import PushResult as PushResult

_EXPORTS = {
    "cache": ("GroupTensors", "PagedKV", "PlaneTensor"),
    "events": ("KVCleared", "KVEventPublisher", "KVEvents", "KVRemoved", "KVStored"),
    "hashing": ("hash_name", "hash_of_name", "page_hashes", "root_hash"),
    "groups": ("Group", "Plane"),
    "layout": ("PagedKVLayout", "Segments"),
    "pages": ("PageAllocator",),
    "plan": ("Plan",),
    "pool_kv": ("PoolKV", "PoolKVStats"),
    "prefix_reuse": ("PrefixLoad", "PrefixStore"),
    "receive": ("DecodeSession", "KVReceiver"),
    "send": ("KVSender", "PrefillSession", "PushResult"),
}
_HOME = {name: module for module, names in _EXPORTS.items() for name in names}

__all__ = [*_HOME]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'torch_mooncake.kv' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"torch_mooncake.kv.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
