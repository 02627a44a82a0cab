"""LMDeploy's own CacheEngine and KV-connector worker, on CPU tensors, over our backend and mooncake_compat."""

from __future__ import annotations

import asyncio
import inspect
import queue
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from bare import bare
from lost import lose_node
from processes import PoolEnv

import torch_mooncake as tm

bare("lmdeploy", "lmdeploy", "lmdeploy.pytorch", "lmdeploy.pytorch.engine")

from lmdeploy.pytorch.disagg.backend.backend import MIGRATION_BACKENDS  # noqa: E402
from lmdeploy.pytorch.disagg.config import DistServeEngineConfig, MigrationBackend  # noqa: E402
from lmdeploy.pytorch.disagg.conn.protocol import (  # noqa: E402
    DistServeInitRequest,
    DistServeKVTransferEndpointInfo,
    MigrationProtocol,
)
from lmdeploy.pytorch.disagg.messages import MigrationExecutionBatch  # noqa: E402
from lmdeploy.pytorch.engine.cache_engine.engine import CacheEngine  # noqa: E402
from lmdeploy.pytorch.engine.cache_engine.layout import PackedBlockCacheLayout  # noqa: E402

from torch_mooncake.integrations import lmdeploy  # noqa: E402

STACK = ("lmdeploy", "CacheEngine p2p_initialize, p2p_connect, migrate; its KV store's threads on mooncake_compat")
LAYERS = 3


def cache_engine(blocks: int) -> Any:
    """A CacheEngine of LMDeploy's with its pools in host memory (its constructor needs CUDA streams)."""
    made = object.__new__(CacheEngine)
    made.rank = made.tp_rank = 0
    made.cache_config = SimpleNamespace(
        block_size=64, kernel_block_size=64, num_gpu_blocks=blocks, migration_backend=MigrationBackend.Mooncake
    )

    def spec(name: str) -> SimpleNamespace:
        described = SimpleNamespace(shape=[64, 2, 32], dtype=torch.float16, size=8192, aligned_size=8192)
        return SimpleNamespace(desc=described, name=name, consumer_rows=None)

    made.gpu_allocation = PackedBlockCacheLayout((spec("k"), spec("v")), num_layers=LAYERS).allocate(blocks, "cpu")
    made.gpu_allocation.pools[0].tensor.random_(0, 255)
    made.migration_backend_impl = None
    made._pd_cache_pool_infos = None
    made._remote_pd_cache_pool_infos = {}
    return made


def engine_config(blocks: int) -> DistServeEngineConfig:
    return DistServeEngineConfig(
        tp_size=1, ep_size=1, dp_size=1, pp_size=1, dp_rank=0, block_size=64, num_cpu_blocks=0, num_gpu_blocks=blocks
    )


def initialize(engine: Any, mine: str, blocks: int, other: str, others: int) -> DistServeKVTransferEndpointInfo:
    return engine.p2p_initialize(
        DistServeInitRequest(
            local_engine_id=mine,
            local_engine_config=engine_config(blocks),
            remote_engine_id=other,
            remote_engine_config=engine_config(others),
            protocol=MigrationProtocol.TCP,
        )
    )


@pytest.fixture
def pair() -> Any:
    lmdeploy.register()
    prefill, decode = cache_engine(8), cache_engine(16)
    from_prefill, from_decode = initialize(prefill, "P", 8, "D", 16), initialize(decode, "D", 16, "P", 8)
    prefill.p2p_connect("D", [from_decode])
    decode.p2p_connect("P", [from_prefill])
    yield SimpleNamespace(prefill=prefill, decode=decode)
    for engine in (prefill, decode):
        engine.migration_backend_impl.close()


def pool(engine: Any) -> torch.Tensor:
    return engine.gpu_allocation.pools[0].tensor


def migrate(engine: Any, *pairs: tuple[int, int], remote: str = "P") -> None:
    batch = MigrationExecutionBatch(protocol=MigrationProtocol.TCP, requests=[(remote, list(pairs))])
    asyncio.run(asyncio.wait_for(engine.migrate(batch), 60))


def test_it_is_the_backend_of_the_name_that_lmdeploy_accepts(pair: SimpleNamespace):
    assert MIGRATION_BACKENDS.module_dict["Mooncake"] is lmdeploy.TorchMooncakeMigration
    assert type(pair.decode.migration_backend_impl) is lmdeploy.TorchMooncakeMigration


def test_blocks_go_from_prefill_to_decode(pair: SimpleNamespace):
    """Pairs are (prefill's block, decode's block); the others stay as they are."""
    source, before = pool(pair.prefill).clone(), pool(pair.decode).clone()
    migrate(pair.decode, (5, 9), (1, 2), (7, 15))
    here = pool(pair.decode)
    for theirs, mine in ((5, 9), (1, 2), (7, 15)):
        assert torch.equal(here[:, mine], source[:, theirs])
    others = [i for i in range(16) if i not in (9, 2, 15)]
    assert torch.equal(here[:, others], before[:, others])
    assert torch.equal(pool(pair.prefill), source)


def test_a_prefill_engine_that_is_gone_ends_the_migration(pair: SimpleNamespace):
    """The future is resolved, with an error that says what was lost; nothing hangs (lmdeploy #4971)."""
    pair.prefill.migration_backend_impl.close()
    started = time.monotonic()
    with pytest.raises(tm.Error):
        migrate(pair.decode, (5, 9))
    assert time.monotonic() - started < 40


def test_an_engine_of_the_same_id_that_comes_again_is_a_new_one(pair: SimpleNamespace):
    pair.prefill.migration_backend_impl.close()
    again = cache_engine(8)
    told = initialize(again, "P", 8, "D", 16)
    again.p2p_connect("D", [initialize(pair.decode, "D", 16, "P", 8)])
    pair.decode.p2p_connect("P", [told])
    migrate(pair.decode, (3, 4))
    assert torch.equal(pool(pair.decode)[:, 4], pool(again)[:, 3])
    again.migration_backend_impl.close()


def test_a_migration_that_is_cancelled_writes_nothing_afterwards(pair: SimpleNamespace):
    async def go() -> None:
        batch = MigrationExecutionBatch(protocol=MigrationProtocol.TCP, requests=[("P", [(i, i) for i in range(8)])])
        task = asyncio.ensure_future(pair.decode.migrate(batch))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task], timeout=60)
        assert task.done()

    asyncio.run(go())
    pool(pair.decode).fill_(7)
    pool(pair.prefill).fill_(9)
    time.sleep(0.2)  # a late write would show now
    assert (pool(pair.decode) == 7).all()
    migrate(pair.decode, (1, 1))
    assert (pool(pair.decode)[:, 1] == 9).all()


def test_what_was_not_set_up_is_said(pair: SimpleNamespace):
    backend = pair.decode.migration_backend_impl
    with pytest.raises(tm.InvalidArgument, match="no link to X"):
        backend.endpoint_info("X", MigrationProtocol.TCP)
    with pytest.raises(tm.Unsupported):
        backend.store(None)
    with pytest.raises(tm.Unsupported):
        backend.load(None)


def test_it_has_every_method_of_the_interface():
    from lmdeploy.pytorch.disagg.backend.base import MigrationBackendImpl

    for name, method in inspect.getmembers(MigrationBackendImpl, inspect.isfunction):
        mine = getattr(lmdeploy.TorchMooncakeMigration, name)
        assert mine is not method, name
        assert list(inspect.signature(mine).parameters) == list(inspect.signature(method).parameters), name


# --- the KV connector: LMDeploy's own worker on mooncake_compat ---


@pytest.fixture
def store(compat_env: dict[str, str]) -> Any:
    from mooncake.store import MooncakeDistributedStore

    made = MooncakeDistributedStore()
    assert made.setup("127.0.0.1", "P2PHANDSHAKE", 0, 0, "tcp", "", "") == 0
    yield made
    made.close()


def test_lmdeploy_s_store_factory_finds_the_compat_modules(compat_env: dict[str, str]):
    from lmdeploy.pytorch.kv_connector.mooncake.store import worker

    assert worker._load_mooncake_store_factory().__module__ == "mooncake.store"


class Threads:
    """LMDeploy's sender and receiver of a worker, over a cache of rows in host memory (its worker wants CUDA rows)."""

    def __init__(self, store: Any, seed: int) -> None:
        from lmdeploy.pytorch.kv_connector.mooncake.store import data, worker_threads

        self.data, blocks, block = data, 8, 4096
        self.rows = [torch.randint(0, 255, (blocks, block), dtype=torch.uint8) for _ in range(4)]
        self.rows = [(row + seed).contiguous() for row in self.rows]
        registrations = tuple(
            data.MooncakeStoreRegistration(f"row{i}", row.data_ptr(), row.nbytes) for i, row in enumerate(self.rows)
        )
        for each in registrations:
            assert store.register_buffer(each.address, each.size) == 0
        self.saved: queue.Queue[int] = queue.Queue()
        self.loaded: queue.Queue[tuple[int, set[int]]] = queue.Queue()
        common: dict[str, Any] = {
            "store": store,
            "registrations": registrations,
            "row_block_sizes": (block,) * 4,
            "num_gpu_blocks": blocks,
            "key_metadata": data.MooncakeStoreKeyMetadata("m", "", 1, 64),
            "global_rank": 0,
            "tp_rank": 0,
            "tp_size": 1,
        }
        self.sender = worker_threads.KVCacheStoreSendingThread(**common, completion_callback=self.saved.put)
        self.receiver = worker_threads.KVCacheStoreRecvingThread(
            **common, completion_callback=lambda request, failed: self.loaded.put((request, set(failed)))
        )
        self.sender.start()
        self.receiver.start()

    def save(self, blocks: tuple[int, ...], hashes: tuple[bytes, ...]) -> None:
        request = self.data.MooncakeStoreSaveRequest(5, 1, 0, blocks, blocks, hashes)
        self.sender.add_request(request, SimpleNamespace(synchronize=lambda: None))
        assert self.saved.get(timeout=30) == 5

    def load(self, blocks: tuple[int, ...], hashes: tuple[bytes, ...]) -> set[int]:
        """The blocks that LMDeploy will compute."""
        self.receiver.add_request(self.data.MooncakeStoreLoadRequest(9, blocks, hashes, len(hashes)))
        request, failed = self.loaded.get(timeout=60)
        assert request == 9
        return failed

    def close(self) -> None:
        self.sender.close()
        self.receiver.close()


def test_lmdeploy_s_own_threads_save_and_load_blocks(store: Any, pool_env: PoolEnv):
    from lmdeploy.pytorch.kv_connector.mooncake.store.data import build_prefix_block_hashes

    hashes = build_prefix_block_hashes(list(range(64 * 4)), 64)
    threads = Threads(store, 1)
    key = f"m@tp_rank:0@group:0@{hashes[0].hex()}"
    threads.save((0, 1, 2), hashes[:3])
    assert threads.load((5, 6, 7), hashes[:3]) == set()
    assert all(torch.equal(row[5:8], row[0:3]) for row in threads.rows)
    assert store.is_exist(key) == 1
    assert threads.load((4, 3), (hashes[0], hashes[3])) == {3}
    assert all(torch.equal(row[4], row[0]) for row in threads.rows)
    lose_node(pool_env, lambda: store.is_exist(key) == 1)
    assert threads.load((5, 6), hashes[:2]) == {5, 6}
    threads.save((0,), hashes[3:])  # terminal, whatever became of it
    threads.close()
