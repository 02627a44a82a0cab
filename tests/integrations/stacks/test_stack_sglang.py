"""The HiCache backend with SGLang's own ABC, factory and host pools; SGLang's Mooncake suite on mooncake_compat."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import sglang_here  # noqa: F401
import torch
from lost import lose_node
from places import ROOT
from processes import PoolEnv
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    HiCacheStorageConfig,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
)
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost
from sglang.srt.mem_cache.pool_host.page_unified import PageUnifiedLayout
from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory

import torch_mooncake as tm

STACK = (
    "sglang",
    "HiCacheStorage, dynamic factory, MHA and MLA host pools, EmbeddingStore; test_mooncake_store on mooncake_compat",
)
LAYERS, PAGE, PAGES, HEADS, DIM = 3, 2, 6, 4, 8
MHA = {
    "layer_first": (2, LAYERS, PAGES * PAGE, HEADS, DIM),
    "page_first": (2, PAGES * PAGE, LAYERS, HEADS, DIM),
    "page_first_direct": (2, PAGES, LAYERS, PAGE, HEADS, DIM),
    "page_head": (2, PAGES, HEADS, PAGE, LAYERS, DIM),
}
MLA = {
    "layer_first": (LAYERS, PAGES * PAGE, 1, 16),
    "page_first": (PAGES * PAGE, LAYERS, 1, 16),
    "page_first_direct": (PAGES, LAYERS, PAGE, 1, 16),
}


def host_pool(layout: str, heads: int = HEADS) -> Any:
    """SGLang's host pool, without its constructor (which looks for a device)."""
    made = object.__new__(MHATokenToKVPoolHost)
    shape = tuple(heads if size == HEADS and i else size for i, size in enumerate(MHA[layout]))
    made.layout, made.layer_num, made.page_size, made.page_num = layout, LAYERS, PAGE, PAGES
    made.size, made.head_num, made.head_dim, made.dtype = PAGES * PAGE, heads, DIM, torch.float16
    made.pin_memory, made.device = False, "cpu"
    made.kv_buffer = torch.randn(shape, generator=torch.Generator().manual_seed(3)).half()
    return made


def mla_pool(layout: str) -> Any:
    made = object.__new__(MLATokenToKVPoolHost)
    made.layout, made.layer_num, made.page_size, made.page_num = layout, LAYERS, PAGE, PAGES
    made.size, made.dtype, made.kv_cache_dim = PAGES * PAGE, torch.float16, 16
    made.kv_lora_rank, made.qk_rope_head_dim, made.dcp_size = 12, 4, 1
    made.pin_memory, made.device = False, "cpu"
    made.kv_buffer = torch.randn(MLA[layout], generator=torch.Generator().manual_seed(4)).half()
    return made


def unified_pool(groups: int, heads: int = HEADS, mla: bool = False) -> Any:
    """A host pool of the layout "page_unified", whose pages are one block each."""
    made = mla_pool("page_first") if mla else host_pool("page_first", heads)
    heads, dim = (1, 16) if mla else (heads, DIM)
    made.layout = "page_unified"
    made.page_unified_layout = PageUnifiedLayout(
        page_size=PAGE, layer_num=LAYERS, head_num=heads, head_group_num=groups, head_dim=dim, itemsize=2, is_mla=mla
    )
    shape = made.page_unified_layout.page_dims(PAGES)
    made.kv_buffer = torch.randn(shape, generator=torch.Generator().manual_seed(5)).half()
    return made


def config(**settings: Any) -> HiCacheStorageConfig:
    extra = {
        "backend_name": "torch_mooncake",
        "module_path": "torch_mooncake.integrations.sglang",
        "class_name": "PoolHiCache",
        "interface_v1": 1,
        **settings.pop("extra", {}),
    }
    fields: dict[str, Any] = {
        "tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1, "attn_cp_rank": 0, "attn_cp_size": 1,
        "is_mla_model": False, "enable_storage_metrics": False, "is_page_first_layout": True, "model_name": "org/m",
    }  # fmt: skip
    return HiCacheStorageConfig(**{**fields, **settings, "extra_config": extra})


@pytest.fixture
def backend() -> Any:
    made: list[Any] = []

    def create(pool: Any, **settings: Any) -> Any:
        made.append(StorageBackendFactory.create_backend("dynamic", config(**settings), pool))
        made[-1].register_mem_pool_host(pool)
        return made[-1]

    yield create
    for each in made:
        each.close()


def slots(*pages: int) -> torch.Tensor:
    return torch.cat([torch.arange(page * PAGE, (page + 1) * PAGE) for page in pages])


def page_bytes(pool: Any, page: int) -> bytes:
    return b"".join(ctypes.string_at(at, n) for at, n in zip(*pool.get_page_buffer_meta(slots(page)), strict=True))


@pytest.mark.parametrize("make", [host_pool, mla_pool], ids=["mha", "mla"])
@pytest.mark.parametrize("layout", MHA)
def test_pages_come_back_in_every_host_layout(backend: Any, make: Any, layout: str):
    if make is mla_pool and layout not in MLA:
        layout = "page_first"
    pool = make(layout)
    store = backend(pool, is_mla_model=make is mla_pool)
    assert isinstance(store, HiCacheStorage)
    keys = ["aa", "bb", "cc"]
    assert store.batch_exists(keys) == 0
    assert store.batch_set_v1(keys[:2], slots(0, 2)) == [True, True]
    assert store.batch_set_v1(keys[:2], slots(0, 2)) == [True, True]
    assert store.batch_exists(keys) == 2
    assert store.exists("bb")
    wanted = [page_bytes(pool, 0), page_bytes(pool, 2)]
    untouched = page_bytes(pool, 5)
    assert store.batch_get_v1(keys, slots(3, 4, 5)) == [True, True, False]
    assert [page_bytes(pool, 3), page_bytes(pool, 4)] == wanted
    assert page_bytes(pool, 5) == untouched


def test_a_page_is_one_object(backend: Any, pool: tm.Pool):
    """K and V of all layers come and go together."""
    store = backend(host_pool("layer_first"))
    store.batch_set_v1(["aa"], slots(1))
    (key,) = pool.keys("sglang/")
    assert key.startswith("sglang/default/org%2Fm/")
    assert pool.info(key).nbytes == 2 * LAYERS * PAGE * HEADS * DIM * 2
    assert pool.info(key).sealed


def test_engines_of_different_tp_share_pages_cut_by_heads(backend: Any):
    """TP 1 writes, both ranks of TP 2 read their half of the heads."""
    whole = host_pool("page_head")
    writer = backend(whole, should_split_heads=True, tp_lcm_size=2)
    assert writer.batch_set_v1(["aa", "bb"], slots(0, 1)) == [True, True]
    assert writer.batch_exists(["aa", "bb", "cc"]) == 2
    for rank in (0, 1):
        half = host_pool("page_head", heads=HEADS // 2)
        reader = backend(half, should_split_heads=True, tp_lcm_size=2, tp_rank=rank, tp_size=2)
        assert reader.batch_exists(["aa", "bb", "cc"]) == 2
        assert reader.batch_get_v1(["aa", "bb"], slots(4, 5)) == [True, True]
        part = slice(rank * HEADS // 2, (rank + 1) * HEADS // 2)
        assert torch.equal(half.kv_buffer[:, 4:6], whole.kv_buffer[:, 0:2, part])
    assert writer.batch_get_v1(["aa"], slots(3)) == [True]
    assert torch.equal(whole.kv_buffer[:, 3], whole.kv_buffer[:, 0])


def test_pages_of_one_block(backend: Any, caplog: pytest.LogCaptureFixture):
    """The layout "page_unified": a page is one piece, and a rank's groups of heads are one piece of that."""
    whole, mla = unified_pool(4), unified_pool(1, mla=True)
    for pool in (whole, mla):
        store = backend(pool, is_mla_model=pool is mla)
        assert store.batch_set_v1(["aa", "bb"], slots(0, 2)) == [True, True]
        assert store.batch_get_v1(["aa", "bb", "cc"], slots(3, 4, 5)) == [True, True, False]
        assert torch.equal(pool.kv_buffer[[3, 4]], pool.kv_buffer[[0, 2]])
        assert not torch.equal(pool.kv_buffer[5], pool.kv_buffer[0])
    assert backend(whole, should_split_heads=True, tp_lcm_size=2).batch_set_v1(["aa"], slots(1)) == [True]
    for rank in (0, 1):
        half = unified_pool(2, heads=HEADS // 2)
        reader = backend(half, should_split_heads=True, tp_lcm_size=2, tp_rank=rank, tp_size=2)
        assert reader.batch_get_v1(["aa"], slots(5)) == [True]
        assert torch.equal(half.kv_buffer[5], whole.kv_buffer[1, rank * 2 : rank * 2 + 2])
        other = backend(unified_pool(1, heads=HEADS // 2), should_split_heads=True, tp_lcm_size=2, tp_size=2)
        assert not other.exists("aa")  # the same bytes in another order
    uncut = backend(unified_pool(1), should_split_heads=True, tp_lcm_size=2)
    assert not uncut.exists("aa")
    assert (uncut.batch_set_v1(["aa"], slots(0)), uncut.batch_get_v1(["aa"], slots(0))) == ([False], [False])
    assert "Unsupported: 1 groups of heads in 2 parts" in caplog.text


def test_who_must_not_share_does_not(backend: Any):
    pool = host_pool("page_first")
    backend(pool).batch_set_v1(["aa"], slots(0))
    assert backend(pool).exists("aa")
    assert not backend(pool, tp_rank=1, tp_size=2).exists("aa")
    assert not backend(pool, attn_cp_rank=1, attn_cp_size=2).exists("aa")
    assert not backend(pool, model_name="other").exists("aa")
    assert not backend(pool, extra={"namespace": "tenant"}).exists("aa")
    assert not backend(host_pool("page_first_direct")).exists("aa")
    assert not backend(host_pool("page_first", heads=2)).exists("aa")


def test_hybrid_pools(backend: Any):
    kv, indexer, mamba = host_pool("page_first"), mla_pool("page_first"), mla_pool("page_first_direct")
    store = backend(kv)
    store.register_mem_host_pool_v2(indexer, PoolName.INDEXER)
    store.register_mem_host_pool_v2(mamba, PoolName.MAMBA)
    store.on_host_pools_registered()
    keys = ["a", "b", "c", "d"]

    def transfer(name: Any, some: list[str], pages: list[int], policy: Any = PoolHitPolicy.ALL_PAGES) -> PoolTransfer:
        return PoolTransfer(name=name, keys=some, host_indices=slots(*pages), hit_policy=policy)

    done = store.batch_set_v2(
        [transfer(PoolName.KV, keys, [0, 1, 2, 3]), transfer(PoolName.INDEXER, keys[:3], [0, 1, 2])]
    )
    assert done == {PoolName.KV: [True] * 4, PoolName.INDEXER: [True] * 3}
    store.batch_set_v2([transfer(PoolName.MAMBA, ["b"], [1])])
    found = store.batch_exists_v2(keys, [transfer(PoolName.INDEXER, keys, [0, 1, 2, 3])])
    assert (found.kv_hit_pages, found.restorable_prefix_pages) == (3, [1, 2, 3])
    trailing = transfer(PoolName.MAMBA, ["x"], [0], PoolHitPolicy.TRAILING_PAGES)
    found = store.batch_exists_v2(keys, [transfer(PoolName.INDEXER, keys, [0, 1, 2, 3]), trailing])
    assert (found.kv_hit_pages, found.restorable_prefix_pages) == (2, [2])
    assert store.batch_exists_v2(["z"], []).kv_hit_pages == 0
    wanted = page_bytes(indexer, 1)
    assert store.batch_get_v2([transfer(PoolName.INDEXER, ["b", "d"], [4, 5])]) == {PoolName.INDEXER: [True, False]}
    assert page_bytes(indexer, 4) == wanted


def test_what_an_mla_model_cuts_among_its_ranks_is_each_rank_s_own(backend: Any):
    """Mamba states, and a draft model's heads, are not the other rank's; pages of KV and of its indexer are."""
    ranks = []
    for rank in (0, 1):
        kv, mamba, draft = mla_pool("page_first"), mla_pool("page_first_direct"), host_pool("page_first", heads=2)
        for pool in (mamba, draft):
            pool.kv_buffer += rank
        store = backend(kv, is_mla_model=True, tp_rank=rank, tp_size=2)
        sides = {PoolName.MAMBA: mamba, PoolName.DRAFT: draft, PoolName.INDEXER: kv, PoolName.DRAFT_SWA: kv}
        for name, pool in sides.items():
            store.register_mem_host_pool_v2(pool, name)
        ranks.append((store, sides))

    def side(name: Any, page: int) -> list[PoolTransfer]:
        return [PoolTransfer(name, slots(page), keys=["aa"])]

    (first, first_sides), (second, second_sides) = ranks
    for name in (PoolName.MAMBA, PoolName.DRAFT):
        assert first.batch_set_v2(side(name, 0)) == {name: [True]}
        assert second.batch_get_v2(side(name, 5)) == {name: [False]}
        assert second.batch_set_v2(side(name, 0)) == {name: [True]}
        for store, sides in ranks:
            assert store.batch_get_v2(side(name, 5)) == {name: [True]}
            assert page_bytes(sides[name], 5) == page_bytes(sides[name], 0)
        assert page_bytes(first_sides[name], 5) != page_bytes(second_sides[name], 5)
    for name in (PoolName.INDEXER, PoolName.DRAFT_SWA):
        assert first.batch_set_v2(side(name, 1)) == {name: [True]}
        assert second.batch_get_v2(side(name, 4)) == {name: [True]}


def test_a_host_pool_that_is_not_known_is_a_miss(backend: Any, caplog: pytest.LogCaptureFixture):
    """SGLang asks on threads of its own, which an exception would end."""
    store = backend(host_pool("page_first"))
    assert store.batch_set_v1(["aa"], slots(0)) == [True]
    wanted = [PoolTransfer(PoolName.MAMBA, slots(0), keys=["aa"])]
    assert store.batch_set_v2(wanted) == store.batch_get_v2(wanted) == {PoolName.MAMBA: [False]}
    assert store.batch_exists_v2(["aa"], wanted).kv_hit_pages == 0
    assert store.batch_set_v1(["b", "c", "d", "e"], slots(0, 1, 2)) == [False] * 4
    assert caplog.text.count("host pool mamba was not registered") == 3
    assert "LayoutMismatch: 6 pieces of memory do not make 4 objects" in caplog.text


def test_block_groups_are_told_beside_the_hit(backend: Any, caplog: pytest.LogCaptureFixture):
    """Two keys for every three pages; one group that lacks a key ends what they cover, and not the hit."""
    kv, blocks = host_pool("page_first"), mla_pool("page_first")
    store = backend(kv)
    store.register_mem_host_pool_v2(blocks, PoolName.INDEXER)
    keys, groups = [f"p{i}" for i in range(6)], ["g0a", "g0b", "g1a", "g1b"]
    geometry = {"name": PoolName.INDEXER, "hit_policy": PoolHitPolicy.BLOCK_GROUPS, "keys": groups}

    def look(**other: Any) -> Any:
        return store.batch_exists_v2(keys, [PoolTransfer(**{**geometry, "block_pages": 3, "group_pages": 2, **other})])

    store.batch_set_v1(keys[:5], slots(0, 1, 2, 3, 4))
    assert look().extra_pool_hit_pages == {"kv": 5}
    assert store.batch_set_v2([PoolTransfer(PoolName.INDEXER, slots(0, 1, 2), keys=groups[:3])])[PoolName.INDEXER] == [
        True,
        True,
        True,
    ]
    assert look().extra_pool_hit_pages == {"kv": 5, PoolName.INDEXER: 3}
    store.batch_set_v2([PoolTransfer(PoolName.INDEXER, slots(3), keys=groups[3:])])
    found = look()
    assert (found.kv_hit_pages, found.extra_pool_hit_pages[PoolName.INDEXER]) == (5, 6)
    assert found.restorable_prefix_pages == [1, 2, 3, 4, 5]
    found = look(group_pages=0)
    assert (found.kv_hit_pages, found.extra_pool_hit_pages) == (0, {})
    assert "InvalidArgument: indexer: block groups need" in caplog.text


def test_values_without_the_page_interface(backend: Any):
    store = backend(host_pool("page_first"))
    value = torch.arange(100, dtype=torch.float32)
    assert store.set("k", value)
    assert store.batch_set(["k", "l"], [value, value + 1])
    assert torch.equal(store.get("k").view(torch.float32), value)
    target = torch.zeros(100)
    assert store.get("l", target) is target
    assert torch.equal(target, value + 1)
    assert store.batch_get(["k", "missing"], [torch.zeros(100), torch.zeros(100)])[1] is None
    assert store.get("missing") is None


def test_clear_removes_what_is_its_own(backend: Any, pool: tm.Pool):
    store = backend(host_pool("page_first"))
    pool.put("somebody/else", 1)
    store.batch_set_v1(["aa", "bb"], slots(0, 1))
    store.clear()
    assert store.batch_exists(["aa"]) == 0
    assert pool.keys() == ["somebody/else"]


def test_a_node_that_is_killed_is_a_miss_in_bounded_time(backend: Any, pool_env: PoolEnv):
    store = backend(host_pool("page_first"), extra={"timeout_s": 2})
    assert store.batch_set_v1(["aa"], slots(0)) == [True]
    lose_node(pool_env, lambda: store.exists("aa"))
    started = time.monotonic()
    assert store.batch_get_v1(["aa"], slots(1)) == [False]
    assert store.batch_exists(["aa"]) == 0
    assert time.monotonic() - started < 30


def test_it_has_every_method_of_the_interface():
    from torch_mooncake.integrations.sglang import PoolHiCache

    for name in HiCacheStorage.__abstractmethods__ | {"batch_get_v1", "batch_set_v1", "batch_exists", "clear"}:
        assert getattr(PoolHiCache, name) is not getattr(HiCacheStorage, name)


# --- embeddings ---


@pytest.fixture
def embeddings(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A store by SGLang's factory, as its encoder server makes one."""
    from sglang.srt.mem_cache.embedding_store import EmbeddingStore, EmbeddingStoreFactory
    from sglang_pd import published

    published()
    made: list[Any] = []

    def create(**environment: str) -> Any:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        made.append(EmbeddingStoreFactory.create_backend("torch_mooncake"))
        assert isinstance(made[-1], EmbeddingStore)
        return made[-1]

    yield create
    for each in made:
        each.close()


def test_embeddings_come_back(embeddings: Any, pool: tm.Pool):
    store = embeddings()
    source, target = torch.randn(40, 16), torch.zeros(40, 16)
    store.register_buffer(source)
    row = source[0].nbytes
    assert store.batch_is_exist(["a", "b"]) == [False, False]
    assert store.batch_put(["a", "b"], [source[0].data_ptr(), source[8].data_ptr()], [8 * row, 4 * row]) == [True, True]
    assert store.batch_put(["a"], [source[0].data_ptr()], [8 * row]) == [True]
    assert store.batch_is_exist(["a", "b", "c"]) == [True, True, False]
    at, sizes = [target[i].data_ptr() for i in (0, 8, 12)], [8 * row, 4 * row, row]
    assert store.batch_get(["a", "b", "c"], at, sizes) == [True, True, False]
    assert torch.equal(target[:12], source[:12])
    assert store.batch_get(["a"], [target[20].data_ptr()], [4 * row]) == [False]  # it has another size
    assert all(key.startswith("sglang/default/dummy/embeddings/auto/") for key in pool.keys(""))
    assert not embeddings(TM_SGLANG_NAMESPACE="tenant").batch_is_exist(["a"])[0]


def test_embeddings_in_pieces(embeddings: Any):
    """As its controller keeps them: runs of pages, the last one not full."""
    store, pages = embeddings(), torch.randn(6, 8, 16)
    before = pages.clone()

    def of(*runs: int) -> tuple[list[list[int]], list[list[int]]]:
        return [[pages[run].data_ptr() for run in runs]], [[pages[0].nbytes] * (len(runs) - 1) + [pages[0, :5].nbytes]]

    assert store.batch_put_from_multi_buffers(["h"], *of(2, 0)) == [True]
    assert store.batch_get_into_multi_buffers(["h"], *of(5, 1)) == [True]
    assert torch.equal(pages[5], before[2])
    assert torch.equal(pages[1, :5], before[0, :5])
    assert torch.equal(pages[1, 5:], before[1, 5:])
    assert store.batch_get_into_multi_buffers(["h", "i"], *(side * 2 for side in of(3, 4, 1))) == [False, False]


def test_embeddings_of_a_lost_node_are_misses(embeddings: Any, pool_env: PoolEnv):
    store = embeddings(TM_SGLANG_TIMEOUT_S="2")
    value = torch.randn(16)
    assert store.batch_put(["a"], [value.data_ptr()], [64]) == [True]
    lose_node(pool_env, lambda: store.batch_is_exist(["a"])[0])
    assert store.batch_get(["a"], [value.data_ptr()], [64]) == [False]


# --- how SGLang finds the plug-in ---


def test_sglang_loads_the_plug_in_by_its_entry_point(tmp_path: Path):
    """A process that has nothing but the entry point of our distribution: SGLang's own loader and command line."""
    import tomllib

    points = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["sglang.srt.plugins"]
    info = tmp_path / "torch_mooncake-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: torch_mooncake\nVersion: 0\n")
    lines = "".join(f"{name} = {value}\n" for name, value in points.items())
    (info / "entry_points.txt").write_text(f"[sglang.srt.plugins]\n{lines}")
    code = f"""
import sys, argparse
sys.path[:0] = {[str(tmp_path), *filter(None, sys.path)]!r}
import sglang_here
from sglang.srt import plugins
from sglang.srt.managers import disagg_service
plugins.load_plugins()
from sglang.srt.server_args import ServerArgs
parser = argparse.ArgumentParser()
ServerArgs.add_cli_args(parser)
backend, store = "--disaggregation-transfer-backend", "--mm-global-cache-backend"
told = parser.parse_args(["--model-path", "m", backend, "torch_mooncake", store, "torch_mooncake"])
assert told.mm_global_cache_backend == "torch_mooncake"
backend = disagg_service.TransferBackend(told.disaggregation_transfer_backend)
for kind in disagg_service.KVClassType:
    print(disagg_service.get_kv_class(backend, kind).__name__)
print(disagg_service.get_kv_class(disagg_service.TransferBackend.FAKE, disagg_service.KVClassType.SENDER).__name__)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    names = [f"TorchMooncakeKV{each}" for each in ("Manager", "Sender", "Receiver", "BootstrapServer")]
    assert done.stdout.split() == ["KVArgs", *names, "FakeKVSender"], done.stderr


def test_sglang_s_own_mooncake_suite_on_the_compat_modules(compat_env: dict[str, str], monkeypatch: pytest.MonkeyPatch):
    for name, value in {
        "MOONCAKE_MASTER": "127.0.0.1:50051",
        "MOONCAKE_PROTOCOL": "tcp",
        "MOONCAKE_TE_META_DATA_SERVER": "P2PHANDSHAKE",
        "MOONCAKE_LOCAL_HOSTNAME": "127.0.0.1",
        "MOONCAKE_GLOBAL_SEGMENT_SIZE": str(64 << 20),
    }.items():
        monkeypatch.setenv(name, value)
    from sglang.srt.mem_cache.storage.mooncake_store import test_mooncake_store as suite

    stores: list[Any] = []
    original = suite.MooncakeStore

    def kept(*args: Any, **kwargs: Any) -> Any:
        stores.append(original(*args, **kwargs))
        return stores[-1]

    monkeypatch.setattr(suite, "MooncakeStore", kept)
    suite.test_single_operation()
    for mla, rank, size in ((False, 0, 1), (True, 0, 1), (False, 1, 4), (True, 3, 8)):
        suite.test_batch_operation(suite.make_hicache_storage_config(is_mla_model=mla, tp_rank=rank, tp_size=size))
    assert len(stores) == 5
    for each in stores:
        assert each.store.close() == 0


def test_sglang_s_transfer_engine_wrapper_on_the_compat_modules(compat_env: dict[str, str]):
    from sglang.srt.distributed.device_communicators import mooncake_transfer_engine as wrapped

    os.environ["MOONCAKE_PROTOCOL"], os.environ["MC_FORCE_TCP"] = "tcp", "1"
    try:
        ends = [wrapped.MooncakeTransferEngine("127.0.0.1", 0, None) for _ in range(2)]
        memory = SimpleNamespace(a=torch.arange(4096, dtype=torch.uint8), b=torch.zeros(4096, dtype=torch.uint8))
        ends[0].register(memory.a.data_ptr(), 4096)
        ends[1].batch_register([memory.b.data_ptr()], [4096])
        session = ends[1].get_session_id()
        assert ends[0].transfer_sync(session, memory.a.data_ptr(), memory.b.data_ptr() + 96, 4000) == 0
        assert torch.equal(memory.b[96:], memory.a[:4000])
        sides = (
            [memory.a.data_ptr(), memory.a.data_ptr() + 64],
            [memory.b.data_ptr() + 64, memory.b.data_ptr()],
            [64, 64],
        )
        assert ends[0].batch_transfer_sync(session, *sides) == 0
        assert torch.equal(memory.b[:64], memory.a[64:128])
        assert ends[0].transfer_sync("127.0.0.1:1", memory.a.data_ptr(), memory.b.data_ptr(), 64) < 0
    finally:
        del os.environ["MOONCAKE_PROTOCOL"], os.environ["MC_FORCE_TCP"]
