"""Paged KV cache: layouts, page hashing, prefix reuse through the pool, and prefill/decode sessions over the engine.

kv = PagedKV(layers, axes="PKNHD")                  # one tensor a layer, built by the engine that runs the model
pool_kv = PoolKV(pool, kv, model="smollm2")         # pages whose prefix somebody computed before
receiver = KVReceiver(engine, kv, PageAllocator(n)) # decode side: hands out tickets
sender = KVSender(engine, kv)                       # prefill side: takes them and pushes layer by layer
"""

from torch_mooncake.kv.events import KVCleared, KVEventPublisher, KVEvents, KVRemoved, KVStored
from torch_mooncake.kv.hashing import hash_name, hash_of_name, page_hashes, root_hash
from torch_mooncake.kv.layout import PagedKV, PagedKVLayout
from torch_mooncake.kv.pages import PageAllocator
from torch_mooncake.kv.pool_kv import PoolKV, PoolKVStats
from torch_mooncake.kv.receive import DecodeSession, KVReceiver
from torch_mooncake.kv.send import KVSender, PrefillSession, PushResult

__all__ = [
    "DecodeSession",
    "KVCleared",
    "KVEventPublisher",
    "KVEvents",
    "KVReceiver",
    "KVRemoved",
    "KVSender",
    "KVStored",
    "PageAllocator",
    "PagedKV",
    "PagedKVLayout",
    "PoolKV",
    "PoolKVStats",
    "PrefillSession",
    "PushResult",
    "hash_name",
    "hash_of_name",
    "page_hashes",
    "root_hash",
]
