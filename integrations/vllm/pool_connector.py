"""vLLM's side of the pool connector: its abstract class, with a scheduler's or a worker's half behind it."""

from __future__ import annotations

import hashlib
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)

import torch_mooncake as tm
from torch_mooncake.integrations.vllm.pool_scheduler import PoolScheduler
from torch_mooncake.integrations.vllm.pool_worker import PoolWorker
from torch_mooncake.integrations.vllm.settings import Settings, make_pool


def hash_probe(vllm_config: Any) -> str:
    """What this process's hash makes of a known block: algorithm, seed and block size are in it."""
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core import kv_cache_utils

    algorithm = vllm_config.cache_config.prefix_caching_hash_algo
    tokens = list(range(int(vllm_config.cache_config.block_size)))
    made = kv_cache_utils.hash_block_tokens(get_hash_fn_by_name(algorithm), None, tokens)
    return f"{algorithm}:{hashlib.blake2b(bytes(made), digest_size=8).hexdigest()}"


class MooncakePoolConnector(KVConnectorBase_V1, SupportsHMA):
    """A prefix cache that engines share, in a pool.

    A block of one rank is a sealed object ``kv/vllm:<tenant>:<model>:<rank>of<tp>/<layout>/<vLLM's hash>``. vLLM's hash
    covers all tokens up to the block's end, LoRA (name and path), cache salt, and what multi-modal inputs are called;
    <model> has revision, quantisation and a digest of the configuration. Loads and stores run while the engine goes on.
    ``kv_producer`` only stores, ``kv_consumer`` only loads.

    ``kv_connector_extra_config``: ``tenant`` ("default"), ``model`` (its name in keys), ``address`` of a node or name
    of this host's ``pool``; ``timeout_s`` (10) of a load or store, ``lookup_timeout_s`` (2), ``patience_ms`` (20): what
    the scheduler waits for an answer before it goes on with other requests.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        settings = Settings.of(vllm_config, kv_cache_config)
        self._sched: PoolScheduler | None = None
        self._work: PoolWorker | None = None
        transfer = vllm_config.kv_transfer_config
        if role == KVConnectorRole.SCHEDULER:
            self._sched = PoolScheduler(
                settings,
                make_pool(settings.extra),
                lambda: hash_probe(vllm_config),
                loads=transfer.is_kv_consumer,
                saves=transfer.is_kv_producer,
            )
        else:
            from vllm.distributed.parallel_state import get_tensor_model_parallel_rank

            self._work = PoolWorker(settings, get_tensor_model_parallel_rank(), lambda: make_pool(settings.extra))

    @property
    def requires_kv_delivery(self) -> bool:
        return False  # a store that does not come about is a miss for somebody later

    # ---- scheduler

    @property
    def scheduler(self) -> PoolScheduler:
        if self._sched is None:
            raise tm.InvalidArgument("this is a worker's connector")
        return self._sched

    def set_xfer_handshake_metadata(self, metadata: Any) -> None:
        self.scheduler.places(metadata)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        return self.scheduler.matched(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self.scheduler.allocated(request, blocks.get_block_ids()[0], num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        return self.scheduler.build(scheduler_output)

    def reset_cache(self) -> bool | None:
        """At ``reset_prefix_cache(reset_connector=True)``; see `PoolScheduler.reset`."""
        return self.scheduler.reset()

    def update_connector_output(self, connector_output: Any) -> None:
        self.scheduler.received(connector_output.finished_recving or ())

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self.scheduler.finished(request), None

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.scheduler.finished(request), None

    # ---- worker

    @property
    def worker(self) -> PoolWorker:
        if self._work is None:
            raise tm.InvalidArgument("this is the scheduler's connector")
        return self._work

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        self.worker.register(kv_caches)

    def get_handshake_metadata(self) -> Any:
        return self.worker.place()

    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        self.worker.preempted(kv_connector_metadata)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self.worker.load(self._get_connector_metadata())

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads are whole before vLLM schedules the request."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """A page of all layers is one object: see ``wait_for_save``."""

    def wait_for_save(self) -> None:
        self.worker.save(self._get_connector_metadata())

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        return self.worker.results(finished_req_ids)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        sent, received = self.worker.results(finished_req_ids)
        return KVConnectorTransferResults(finished_sending=sent, finished_recving=received)

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self.worker.failed_blocks()

    def shutdown(self) -> None:
        for half in (self._sched, self._work):
            if half is not None:
                half.close()
        self._sched = self._work = None
