"""Sequences of calls of Mooncake's Python modules, and what came of each: run on the real wheel and on ours, compared.

    python mooncake_calls.py HOST:PORT

prints one JSON document: for every sequence a list of [call, outcome]. Values are codes, counts, booleans and digests
of bytes; nothing that differs from run to run (ports, addresses, times). Memory is ctypes': needs no torch, no numpy.
The address is that of ``mooncake_master`` (ours has a pool of this host for each such address).
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import sys
from collections.abc import Callable
from typing import Any

SEQUENCES: dict[str, Callable[[Log, str], None]] = {}
MiB = 1 << 20


def sequence(function: Callable[[Log, str], None]) -> Callable[[Log, str], None]:
    SEQUENCES[function.__name__] = function
    return function


class Log(list[list[Any]]):
    def __call__(self, name: str, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call, and write down what came of it; its value."""
        try:
            value = call(*args, **kwargs)
        except Exception as error:
            self.append([name, f"raised {type(error).__name__}"])
            return None
        self.append([name, plain(value)])
        return value

    def note(self, name: str, value: Any) -> None:
        self.append([name, plain(value)])


def plain(value: Any) -> Any:
    if isinstance(value, (bytes, bytearray, memoryview)):
        data = bytes(value)
        return f"{len(data)} bytes {hashlib.sha256(data).hexdigest()[:12]}" if data else "no bytes"
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    return type(value).__name__


class Memory:
    """``nbytes`` of this process's memory, at a page, with bytes that say where they are."""

    def __init__(self, nbytes: int, seed: int = 0) -> None:
        self.buffer = (ctypes.c_ubyte * (nbytes + 4096))()
        self.at = (ctypes.addressof(self.buffer) + 4095) & ~4095
        self.nbytes = nbytes
        if seed:
            self.fill(pattern(nbytes, seed))

    def fill(self, data: bytes, offset: int = 0) -> None:
        ctypes.memmove(self.at + offset, data, len(data))

    def read(self, offset: int, nbytes: int) -> bytes:
        return ctypes.string_at(self.at + offset, nbytes)


def pattern(nbytes: int, seed: int) -> bytes:
    block = b"".join(hashlib.sha256(f"{seed}/{i}".encode()).digest() for i in range(128))
    return (block * (nbytes // len(block) + 1))[:nbytes]


def store_of(master: str, *, segment: int = 64 * MiB, buffer: int = 16 * MiB) -> Any:
    from mooncake.store import MooncakeDistributedStore

    store = MooncakeDistributedStore()
    if (code := store.setup("127.0.0.1", "P2PHANDSHAKE", segment, buffer, "tcp", "", master)) != 0:
        raise RuntimeError(f"setup returned {code}")
    store.remove_all(True)
    return store


@sequence
def configuration(log: Log, master: str) -> None:
    from mooncake.store import ReplicateConfig

    config = ReplicateConfig()
    names = ("replica_num", "with_hard_pin", "preferred_segment", "preferred_segments", "prefer_alloc_in_same_node")
    for name in (*names, "group_ids", "soft_pin_ttl_ms"):
        log(f"default {name}", getattr, config, name)
    config.replica_num, config.with_hard_pin, config.preferred_segment = 2, True, "127.0.0.1"
    config.prefer_alloc_in_same_node = True
    log.note("set", [getattr(config, name) for name in names])
    log("unknown attribute", setattr, config, "no_such_setting", 1)
    log("a text for a number", setattr, config, "replica_num", "two")


@sequence
def before_setup(log: Log, master: str) -> None:
    from mooncake.engine import TransferEngine
    from mooncake.store import MooncakeDistributedStore

    store = MooncakeDistributedStore()
    log("get", store.get, "k")  # others end the process with the real one
    log("health_check", store.health_check)
    log("close", store.close)
    log("close again", store.close)
    log("get_engine", TransferEngine().get_engine)
    log("send_probe", TransferEngine().send_probe, "127.0.0.1:1")


@sequence
def setup_forms(log: Log, master: str) -> None:
    from mooncake.store import MooncakeDistributedStore

    names = ("local_hostname", "metadata_server", "global_segment_size", "local_buffer_size", "protocol")
    values = ("127.0.0.1", "P2PHANDSHAKE", 16 * MiB, 16 * MiB, "tcp")
    given = dict(zip((*names, "rdma_devices", "master_server_addr"), (*values, "", master), strict=True))
    store = MooncakeDistributedStore()
    log("keywords", store.setup, **given)
    log("close", store.close)
    store = MooncakeDistributedStore()
    log("dict", store.setup, {name: str(value) for name, value in given.items()})
    log("close", store.close)
    log("too few", MooncakeDistributedStore().setup, "127.0.0.1")
    log("unknown keyword", MooncakeDistributedStore().setup, **given, no_such=1)
    log("dict without hostname", MooncakeDistributedStore().setup, {"metadata_server": "P2PHANDSHAKE"})


@sequence
def values(log: Log, master: str) -> None:
    store = store_of(master)
    log("health_check", store.health_check)
    log("hostname", lambda: store.get_hostname().split(":")[0])
    log("is_exist missing", store.is_exist, "v/a")
    log("get missing", store.get, "v/a")
    log("get_size missing", store.get_size, "v/a")
    log("remove missing", store.remove, "v/a")
    log("put", store.put, "v/a", b"first value")
    log("is_exist", store.is_exist, "v/a")
    log("get", store.get, "v/a")
    log("get_size", store.get_size, "v/a")
    log("put again", store.put, "v/a", b"second value, longer")
    log("get keeps the first", store.get, "v/a")
    log("upsert", store.upsert, "v/a", b"third value")
    log("get the third", store.get, "v/a")
    log("put bytearray", store.put, "v/b", bytearray(pattern(5000, 2)))
    log("put memoryview", store.put, "v/c", memoryview(pattern(5000, 3)))
    log("put big", store.put, "v/d", pattern(3 * MiB, 4))
    log("get big", store.get, "v/d")
    log("put nothing", store.put, "v/e", b"")
    log("is_exist nothing", store.is_exist, "v/e")
    log("empty key", store.put, "", b"x")
    log("get empty key", store.get, "")
    log("put a str", store.put, "v/f", "text")
    log("put_parts", store.put_parts, "v/p", b"one", bytearray(b"two"), memoryview(b"three"))
    log("get parts", store.get, "v/p")
    log("put_parts of none", store.put_parts, "v/q")
    log("is_exist, none", store.is_exist, "v/q")
    log("a long key", store.put, "long/" * 400, b"long")
    log("get of it", store.get, "long/" * 400)
    log("put_batch of none", store.put_batch, [], [])
    memory = Memory(4096, 20)
    log("upsert_from", store.upsert_from, "v/u", memory.at, 100)
    log("batch_upsert_from", store.batch_upsert_from, ["v/u", "v/w"], [memory.at, memory.at], [50, 60])
    log("get_batch of them", store.get_batch, ["v/u", "v/w"])
    log("put_batch", store.put_batch, ["v/g", "v/h"], [b"g", b"hh"])
    log("get_batch", store.get_batch, ["v/g", "v/h", "v/missing"])
    log("batch_is_exist", store.batch_is_exist, ["v/g", "v/missing", "v/h"])
    log("batch_is_exist of none", store.batch_is_exist, [])
    log("put_batch that differs", store.put_batch, ["v/i", "v/j"], [b"i"])
    log("close", store.close)


@sequence
def handles(log: Log, master: str) -> None:
    store = store_of(master)
    store.put("h/a", pattern(100_000, 5))
    handle = log("get_buffer", store.get_buffer, "h/a")
    log("size", handle.size)
    log.note("bytes by pointer", ctypes.string_at(handle.ptr(), handle.size()))
    log.note("bytes by buffer", bytes(memoryview(handle)))
    log("missing", store.get_buffer, "h/missing")
    found = log("batch_get_buffer", store.batch_get_buffer, ["h/a", "h/missing"])
    log.note("of the first", bytes(memoryview(found[0])))
    log("batch of none", store.batch_get_buffer, [])
    log("close", store.close)


@sequence
def registered_buffers(log: Log, master: str) -> None:
    store = store_of(master)
    memory = Memory(256 << 10, 6)
    out = Memory(256 << 10)
    log("register", store.register_buffer, memory.at, memory.nbytes)
    log("register out", store.register_buffer, out.at, out.nbytes)
    log("register again", store.register_buffer, memory.at, memory.nbytes)
    log("register a part", store.register_buffer, memory.at + 4096, 4096)
    log("put_from", store.put_from, "r/a", memory.at + 100, 10_000)
    log("put_from again", store.put_from, "r/a", memory.at, 10_000)
    log("get_into", store.get_into, "r/a", out.at, 10_000)
    log.note("bytes", out.read(0, 10_000) == memory.read(100, 10_000))
    log("get_into larger", store.get_into, "r/a", out.at + 20_000, 50_000)
    log.note("no byte behind it", out.read(30_000, 1000) == bytes(1000))
    log("get_into short", store.get_into, "r/a", out.at, 9_999)
    log("get_into missing", store.get_into, "r/missing", out.at, 10_000)
    log("batch_put_from", store.batch_put_from, ["r/b", "r/c"], [memory.at, memory.at + 4096], [4096, 8192])
    log("batch_put_from, one is there", store.batch_put_from, ["r/b", "r/d"], [memory.at, memory.at], [64, 64])
    into = [out.at, out.at + 65536, out.at + 131072]
    log("batch_get_into", store.batch_get_into, ["r/b", "r/missing", "r/c"], into, [4096, 64, 8192])
    log.note("both", out.read(0, 4096) + out.read(131072, 8192) == memory.read(0, 4096) + memory.read(4096, 8192))
    log("batch_get_into short", store.batch_get_into, ["r/b", "r/c"], into[:2], [4095, 8192])
    log("batch_put_from of none", store.batch_put_from, [], [], [])
    log("batch_get_into of none", store.batch_get_into, [], [], [])
    log("batch_put_from that differs", store.batch_put_from, ["r/e", "r/f"], [memory.at], [64, 64])
    log("batch_get_into that differs", store.batch_get_into, ["r/b", "r/c"], into[:2], [4096])
    log("put_from of nothing", store.put_from, "r/z", memory.at, 0)
    log("is_exist of nothing", store.is_exist, "r/z")
    loose = Memory(8192, 7)
    log("batch_put_from of memory that is not registered", store.batch_put_from, ["r/l"], [loose.at], [8192])
    log("unregister", store.unregister_buffer, memory.at)
    log("unregister again", store.unregister_buffer, memory.at)
    log("register anew", store.register_buffer, memory.at, memory.nbytes)
    log("close", store.close)


@sequence
def many_buffers(log: Log, master: str) -> None:
    store = store_of(master)
    memory, out = Memory(128 << 10, 8), Memory(128 << 10)
    store.register_buffer(memory.at, memory.nbytes)
    store.register_buffer(out.at, out.nbytes)
    m, o = memory.at, out.at
    log(
        "put", store.batch_put_from_multi_buffers, ["m/a", "m/b"], [[m, m + 8192, m + 100], [m + 4096]],
        [[1000, 2000, 24], [4096]],
    )  # fmt: skip
    log("get_size", store.get_size, "m/a")
    log("get whole", store.get_into, "m/a", o, 3024)
    log.note("in order", out.read(0, 3024) == memory.read(0, 1000) + memory.read(8192, 2000) + memory.read(100, 24))
    log(
        "get", store.batch_get_into_multi_buffers, ["m/a", "m/missing", "m/b"],
        [[o + 8192, o + 16384], [o], [o + 32768, o + 65536]], [[24, 3000], [16], [4000, 96]],
    )  # fmt: skip
    whole = memory.read(0, 1000) + memory.read(8192, 2000) + memory.read(100, 24)
    log.note("cut anew", out.read(8192, 24) + out.read(16384, 3000) == whole)
    log.note("cut anew, b", out.read(32768, 4000) + out.read(65536, 96) == memory.read(4096, 4096))
    log("get short", store.batch_get_into_multi_buffers, ["m/a"], [[o, o + 4096]], [[1000, 1000]])
    log("get long", store.batch_get_into_multi_buffers, ["m/a"], [[o, o + 4096]], [[1000, 5000]])
    log("put again", store.batch_put_from_multi_buffers, ["m/a"], [[m]], [[10]])
    log("with a flag", store.batch_get_into_multi_buffers, ["m/b"], [[o]], [[4096]], True)
    log("of none", store.batch_put_from_multi_buffers, [], [], [])
    log("without buffers", store.batch_put_from_multi_buffers, ["m/z"], [[]], [[]])
    log("get without buffers", store.batch_get_into_multi_buffers, ["m/a"], [[]], [[]])
    log("fewer sizes", store.batch_put_from_multi_buffers, ["m/z"], [[m, m]], [[1]])
    log("differs", store.batch_put_from_multi_buffers, ["m/x", "m/y"], [[m]], [[10]])
    log("close", store.close)


@sequence
def with_config(log: Log, master: str) -> None:
    from mooncake.store import ReplicateConfig

    store = store_of(master)
    memory = Memory(8192, 9)
    store.register_buffer(memory.at, memory.nbytes)
    config = ReplicateConfig()
    config.with_hard_pin = True
    log("put", store.put, "c/a", b"pinned", config)
    log("put by keyword", store.put, key="c/b", value=b"pinned", config=config)
    log("batch_put_from", store.batch_put_from, ["c/c"], [memory.at], [4096], config)
    config.preferred_segment = store.get_hostname()
    log("preferred", store.batch_put_from, keys=["c/d"], buffer_ptrs=[memory.at], sizes=[4096], config=config)
    log("get", store.get, "c/a")
    two = ReplicateConfig()
    two.replica_num = 2
    log("two replicas, one segment", store.put, "c/e", b"twice", two)
    log("is_exist", store.is_exist, "c/e")
    log("no config", store.put, "c/f", b"x", None)
    log("close", store.close)


@sequence
def removal(log: Log, master: str) -> None:
    store = store_of(master)
    for i in range(6):
        store.put(f"d/{i}", b"x" * (i + 1))
    log("remove, read before", lambda: (store.get("d/0"), store.remove("d/0", True))[1])
    log("gone", store.is_exist, "d/0")
    log("remove never read", store.remove, "d/1")
    log("batch_remove", store.batch_remove, ["d/2", "d/missing"], True)
    log("batch_remove by keyword", store.batch_remove, keys=["d/3"], force=True)
    log("regex", store.remove_by_regex, "^d/[4]$", True)
    log("regex of nothing", store.remove_by_regex, "^none$", True)
    log("bad regex", store.remove_by_regex, "(", True)
    log("left", store.batch_is_exist, [f"d/{i}" for i in range(6)])
    log("put after remove", store.put, "d/0", b"again")
    log("get", store.get, "d/0")
    log("remove_all", store.remove_all, True)
    log("remove_all of none", store.remove_all, True)
    log("documented force", lambda: "force" in (store.batch_remove.__doc__ or ""))
    log("close", store.close)


@sequence
def replicas(log: Log, master: str) -> None:
    store = store_of(master)
    store.put("s/a", pattern(4096, 10))
    found = log("one", store.get_replica_desc, "s/a")
    log("is memory", lambda: [item.is_memory_replica() for item in found])
    log("is disk", lambda: [item.is_disk_replica() for item in found])
    log("bytes", lambda: [item.get_memory_descriptor().buffer_descriptor.size for item in found])
    log("missing", store.get_replica_desc, "s/missing")
    several = log("batch", lambda: sorted(store.batch_get_replica_desc(["s/a", "s/missing"])))
    log.note("keys", several)
    log("close", store.close)


@sequence
def full(log: Log, master: str) -> None:
    from mooncake.store import ReplicateConfig

    store = store_of(master)
    memory = Memory(8 * MiB, 17)
    store.register_buffer(memory.at, memory.nbytes)
    pinned = ReplicateConfig()
    pinned.with_hard_pin = True
    codes = [store.put_from(f"f/{i}", memory.at, memory.nbytes, pinned) for i in range(9)]
    log.note("the first that found no room", next(code for code in codes if code))
    log.note("those before it", set(codes[: codes.index(-200)]) == {0})
    log("in a batch", store.batch_put_from, ["f/x", "f/y"], [memory.at, memory.at], [8 * MiB, 8 * MiB], pinned)
    log("is_exist", store.batch_is_exist, ["f/0", "f/x"])
    log("remove_all", lambda: store.remove_all(True) > 0)
    log("room again", store.put_from, "f/z", memory.at, memory.nbytes)
    log("close", store.close)


@sequence
def closed(log: Log, master: str) -> None:
    store = store_of(master)
    store.put("x/a", b"x")
    log("close", store.close)
    log("close again", store.close)
    log("get", store.get, "x/a")
    log("health_check", store.health_check)
    log("setup again", store.setup, "127.0.0.1", "P2PHANDSHAKE", 16 * MiB, 16 * MiB, "tcp", "", master)
    log("put", store.put, "x/b", b"x")
    log("get", store.get, "x/b")
    log("close", store.close)


@sequence
def host_memory(log: Log, master: str) -> None:
    from mooncake.store import MooncakeHostMemAllocator

    allocator = MooncakeHostMemAllocator()
    at = allocator.alloc(MiB)
    log.note("allocated", at > 0)
    log.note("aligned", at % 4096)
    ctypes.memset(at, 7, MiB)
    store = store_of(master)
    log("register", store.register_buffer, at, MiB)
    log("put_from", store.put_from, "a/a", at, MiB)
    log("get", store.get, "a/a")
    log("unregister", store.unregister_buffer, at)
    log("free", allocator.free, at)
    log("close", store.close)


def two_engines() -> tuple[Any, Any, str]:
    from mooncake.engine import TransferEngine

    here, there = TransferEngine(), TransferEngine()
    for engine in (here, there):
        if (code := engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "")) != 0:
            raise RuntimeError(f"initialize returned {code}")
    return here, there, f"127.0.0.1:{there.get_rpc_port()}"


@sequence
def engine_memory(log: Log, master: str) -> None:
    here, _, _ = two_engines()
    memory = Memory(64 << 10)
    log.note("port", here.get_rpc_port() > 0)
    log("register", here.register_memory, memory.at, 32768)
    log("register again", here.register_memory, memory.at, 32768)
    log("register overlapping", here.register_memory, memory.at + 4096, 32768)
    log("unregister", here.unregister_memory, memory.at)
    log("unregister again", here.unregister_memory, memory.at)
    log("batch", here.batch_register_memory, [memory.at, memory.at + 32768], [32768, 32768])
    log("batch that overlaps itself", here.batch_register_memory, [memory.at + 49152] * 2, [4096, 4096])
    log("batch of none", here.batch_register_memory, [], [])
    log("nothing", here.register_memory, memory.at + 60000, 0)
    log("batch out", here.batch_unregister_memory, [memory.at, memory.at + 32768])
    log("with a location", here.register_memory, memory.at, 4096, "cpu:0")


@sequence
def engine_transfers(log: Log, master: str) -> None:
    here, there, session = two_engines()
    a, b = Memory(MiB, 11), Memory(MiB, 12)
    here.register_memory(a.at, a.nbytes)
    there.register_memory(b.at, b.nbytes)
    log("probe", here.send_probe, session)
    log("write", here.transfer_sync_write, session, a.at, b.at, 10_000)
    log.note("written", b.read(0, 10_000) == a.read(0, 10_000))
    log("read", here.transfer_sync_read, session, a.at + 65536, b.at + 65536, 4096)
    log.note("read bytes", a.read(65536, 4096) == b.read(65536, 4096))
    sides = [a.at + i * 8192 for i in range(8)], [b.at + 131072 + i * 16384 for i in range(8)], [8192] * 8
    log("batch write", here.batch_transfer_sync_write, session, *sides)
    log.note("all written", all(b.read(131072 + i * 16384, 8192) == a.read(i * 8192, 8192) for i in range(8)))
    log("batch read", here.batch_transfer_sync_read, session, [a.at + 524288], [b.at + 524288], [65536])
    log.note("all read", a.read(524288, 65536) == b.read(524288, 65536))
    log("batch of none", here.batch_transfer_sync_write, session, [], [], [])
    log("differs", here.batch_transfer_sync_write, session, [a.at], [b.at, b.at], [64])
    log("outside of the peer's memory", here.transfer_sync_write, session, a.at, b.at + b.nbytes, 64)
    log("nobody there", here.transfer_sync_write, "127.0.0.1:1", a.at, b.at, 64)
    log("probe of nobody", here.send_probe, "127.0.0.1:1")
    loose, late = Memory(4096, 18), Memory(4096)
    log("from memory that is not registered", here.transfer_sync_write, session, loose.at, b.at, 4096)
    log.note("written from it", b.read(0, 4096) == loose.read(0, 4096))
    log("to memory that is not registered", here.transfer_sync_write, session, a.at, late.at, 64)
    there.register_memory(late.at, late.nbytes)
    log("registered since", here.transfer_sync_write, session, a.at, late.at, 64)
    there.unregister_memory(late.at)
    log("and taken back", here.transfer_sync_write, session, a.at, late.at, 64)
    there.register_memory(late.at, late.nbytes)
    log("and registered anew", here.transfer_sync_write, session, a.at, late.at, 64)
    log("no bytes", here.transfer_sync_write, session, a.at, b.at, 0)
    log("still works", here.transfer_sync_write, session, a.at, b.at, 4096)


@sequence
def engine_async(log: Log, master: str) -> None:
    here, there, session = two_engines()
    a, b = Memory(MiB, 13), Memory(MiB, 14)
    here.register_memory(a.at, a.nbytes)
    there.register_memory(b.at, b.nbytes)
    batch = here.batch_transfer_async_write(session, [a.at, a.at + 8192], [b.at, b.at + 8192], [4096, 4096])
    log.note("a number that is not 0", batch != 0)
    log("status", here.get_batch_transfer_status, [batch])
    log.note("written", b.read(0, 4096) + b.read(8192, 4096) == a.read(0, 4096) + a.read(8192, 4096))
    batch = here.batch_transfer_async_read(session, [a.at + 65536], [b.at + 65536], [4096])
    log("status of a read", here.get_batch_transfer_status, [batch])
    log.note("read", a.read(65536, 4096) == b.read(65536, 4096))
    batch = here.transfer_submit_write(session, a.at, b.at + 131072, 4096)
    log.note("submitted", batch != 0)
    log("checked", until_over, here, batch)
    log.note("written, too", b.read(131072, 4096) == a.read(0, 4096))
    log("nobody there", lambda: here.batch_transfer_async_write("127.0.0.1:1", [a.at], [b.at], [64]))


def until_over(engine: Any, batch: int) -> int:
    for _ in range(1_000_000):
        if (code := engine.transfer_check_status(batch)) != 0:
            return int(code)
    raise RuntimeError("it never ended")


@sequence
def engine_managed(log: Log, master: str) -> None:
    here, there, session = two_engines()
    at, other = here.allocate_managed_buffer(8192), there.allocate_managed_buffer(8192)
    log.note("allocated", at > 0 and other > 0)
    log("write bytes", here.write_bytes_to_buffer, at, "managed memory", 14)
    log("read bytes", here.read_bytes_from_buffer, at, 14)
    log.note("first", there.get_first_buffer_address(session) > 0)
    log("write", here.transfer_sync_write, session, at, other, 14)
    log("arrived", there.read_bytes_from_buffer, other, 14)
    log("free", here.free_managed_buffer, at, 8192)
    log.note("topology", isinstance(json.loads(here.get_local_topology()), dict))


@sequence
def engine_notifies(log: Log, master: str) -> None:
    from mooncake.engine import TransferEngine, TransferNotify

    here, there, session = two_engines()
    a, b = Memory(8192, 15), Memory(8192, 16)
    here.register_memory(a.at, a.nbytes)
    there.register_memory(b.at, b.nbytes)
    opcode = TransferEngine.TransferOpcode.Write
    log("none yet", there.get_notifies)
    note = TransferNotify("request-7", "layers done")
    log("with a notify", here.transfer_sync, session, a.at, b.at, 4096, opcode, note)
    found = there.get_notifies()
    log.note("notifies", [[item.name, item.msg] for item in found])
    log("taken", there.get_notifies)
    log("batch", here.batch_transfer_sync, session, [a.at], [b.at], [64], TransferEngine.TransferOpcode.Read)


@sequence
def as_torchspec_calls(log: Log, master: str) -> None:
    """Samples of hidden states: a few keys each, put from registered memory, taken once, removed by force."""
    from mooncake.store import MooncakeDistributedStore, MooncakeHostMemAllocator, ReplicateConfig

    store, allocator = MooncakeDistributedStore(), MooncakeHostMemAllocator()
    code = store.setup(
        local_hostname="127.0.0.1",
        metadata_server="P2PHANDSHAKE",
        global_segment_size=64 * MiB,
        local_buffer_size=16 * MiB,
        protocol="tcp",
        rdma_devices="",
        master_server_addr=master,
    )
    log.note("setup", code)
    source, sink = allocator.alloc(MiB), allocator.alloc(MiB)
    log("register", store.register_buffer, source, MiB)
    log("register sink", store.register_buffer, sink, MiB)
    ctypes.memmove(source, pattern(MiB, 21), MiB)
    config = ReplicateConfig()
    config.with_hard_pin = True
    sizes = {"_hs": 512 << 10, "_ids": 4096, "_tgt": 128 << 10}
    offsets = {"_hs": 0, "_ids": 512 << 10, "_tgt": 640 << 10}
    keys = [f"sample-0{suffix}" for suffix in sizes]
    log("not yet", store.is_exist, "sample-0_hs")
    log("put", store.batch_put_from, keys, [source + offsets[x] for x in sizes], list(sizes.values()), config)
    log("there", store.batch_is_exist, keys)
    log("get", store.batch_get_into, keys, [sink + offsets[x] for x in sizes], list(sizes.values()))
    for suffix, size in sizes.items():
        same = ctypes.string_at(sink + offsets[suffix], size) == ctypes.string_at(source + offsets[suffix], size)
        log.note(f"bytes of {suffix}", same)
    handles = store.batch_get_buffer([*keys, "sample-1_hs"])
    log.note("handles", [None if handle is None else handle.size() for handle in handles])
    del handles
    log("knows force", lambda: "force" in store.batch_remove.__doc__)
    log("removed", store.batch_remove, keys, force=True)
    log("gone", store.batch_is_exist, keys)
    log("one that is not there", store.remove, "sample-1_hs", True)
    log("put anew", store.batch_put_from, keys[:1], [source + 4096], [8192], config)
    log("get anew", store.batch_get_into, keys[:1], [sink], [8192])
    log.note("the new bytes", ctypes.string_at(sink, 8192) == ctypes.string_at(source + 4096, 8192))
    log("unregister", store.unregister_buffer, source)
    log("close", store.close)


@sequence
def as_sglang_hicache_calls(log: Log, master: str) -> None:
    """The warm-up's assertions, a registered host pool, pages of K and V by zero copy, a prefix, and clear()."""
    from mooncake.store import MooncakeDistributedStore

    store = MooncakeDistributedStore()
    log("setup", store.setup, "127.0.0.1", "P2PHANDSHAKE", 64 * MiB, 16 * MiB, "tcp", "", master, None)
    log("warm-up put", store.put, "sglang_mooncake_store_warmup_key", bytes(4 << 10))
    log("warm-up exists", store.is_exist, "sglang_mooncake_store_warmup_key")
    log.note("warm-up get", store.get("sglang_mooncake_store_warmup_key") == bytes(4 << 10))
    host, page, half = Memory(2 * MiB, 22), 16 << 10, MiB
    log("register", store.register_buffer, host.at, host.nbytes)
    keys = [f"{page_hash}_0_{side}" for page_hash in ("aa", "bb", "cc") for side in "kv"]
    at = [host.at + i * page + side * half for i in range(3) for side in (0, 1)]
    log("exists", store.batch_is_exist, keys)
    log("set", store.batch_put_from, keys, at, [page] * 6)
    log("set again", store.batch_put_from, keys, at, [page] * 6)
    log("prefix", store.batch_is_exist, [*keys, "dd_0_k", "dd_0_v"])
    kept = [host.read(i * page + side * half, page) for i in range(3) for side in (0, 1)]
    back = [host.at + (10 + i) * page + side * half for i in range(3) for side in (0, 1)]
    log("get", store.batch_get_into, keys, back, [page] * 6)
    log.note("bytes", [host.read(x - host.at, page) for x in back] == kept)
    log("get with a miss", store.batch_get_into, [keys[0], "dd_0_k"], back[:2], [page] * 2)
    layers = [[host.at + j * half + i * page for j in (0, 1)] for i in range(2)]
    log("layer-first set", store.batch_put_from_multi_buffers, ["e", "f"], layers, [[page, page]] * 2)
    into = [[host.at + j * half + (20 + i) * page for j in (0, 1)] for i in range(2)]
    log("layer-first get", store.batch_get_into_multi_buffers, ["e", "f"], into, [[page, page]] * 2)
    there = [host.read(x - host.at, page) for of_key in into for x in of_key]
    log.note("layer-first bytes", there == [host.read(x - host.at, page) for of_key in layers for x in of_key])
    log("clear", lambda: store.remove_all() >= 0)  # the real one keeps what was read a moment ago
    log("clear by force", lambda: store.remove_all(True) >= 0)
    log("cleared", store.batch_is_exist, keys)
    log("close", store.close)


@sequence
def as_lmdeploy_and_vllm_call(log: Log, master: str) -> None:
    """Blocks of several layers each, saved and loaded whole; what is missing is found out first, and reported."""
    store = store_of(master)
    pool, block, layers = Memory(4 * MiB, 23), 8 << 10, 4
    log("register", store.register_buffer, pool.at, pool.nbytes)
    keys = [f"model@tp_rank:0@{i:02x}" for i in range(5)]

    def where(index: int) -> list[int]:
        return [pool.at + layer * MiB + index * block for layer in range(layers)]

    sizes = [[block] * layers for _ in keys]
    log("lookup", store.batch_is_exist, keys)
    log("save", store.batch_put_from_multi_buffers, keys[:4], [where(i) for i in range(4)], sizes[:4])
    log("lookup again", store.batch_is_exist, keys)
    log("load", store.batch_get_into_multi_buffers, keys, [where(40 + i) for i in range(5)], sizes)
    same = [
        pool.read(a - pool.at, block) == pool.read(b - pool.at, block)
        for i in range(4)
        for a, b in zip(where(i), where(40 + i), strict=True)
    ]
    log.note("bytes", same)
    log("described", lambda: sorted(store.batch_get_replica_desc(keys)) == keys[:4])
    log("remove_all", store.remove_all, True)
    log("close", store.close)


@sequence
def as_sglang_pd_calls(log: Log, master: str) -> None:
    """Prefill pushes layers and then a small message; a decode process that has gone fails the transfer."""
    here, there, session = two_engines()
    layers = [Memory(256 << 10, 24 + i) for i in range(4)]
    theirs = [Memory(256 << 10) for _ in range(4)]
    log("register", here.batch_register_memory, [x.at for x in layers], [x.nbytes for x in layers])
    log("register theirs", there.batch_register_memory, [x.at for x in theirs], [x.nbytes for x in theirs])
    for layer, (a, b) in enumerate(zip(layers, theirs, strict=True)):
        pages = [3, 4, 9]
        sides = [a.at + page * 4096 for page in pages], [b.at + (page + 20) * 4096 for page in pages], [4096] * 3
        log(f"layer {layer}", here.batch_transfer_sync_write, session, *sides)
        log.note(f"bytes {layer}", [b.read((p + 20) * 4096, 4096) == a.read(p * 4096, 4096) for p in pages])
    log("unregister theirs", there.batch_unregister_memory, [x.at for x in theirs])
    log("too late", here.batch_transfer_sync_write, session, [layers[0].at], [theirs[0].at], [4096])


def main() -> None:
    chosen = sys.argv[2:] or list(SEQUENCES)
    results: dict[str, Any] = {}
    for name in chosen:
        log = Log()
        SEQUENCES[name](log, sys.argv[1])
        results[name] = log
    print("RESULTS " + json.dumps(results))


if __name__ == "__main__":
    main()
