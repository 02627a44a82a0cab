"""vLLM's side of the PD connector: its abstract class, with a scheduler's or a worker's half behind it."""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)

import torch_mooncake as tm
from torch_mooncake.integrations.vllm.pd_scheduler import PDScheduler
from torch_mooncake.integrations.vllm.pd_worker import PDWorker
from torch_mooncake.integrations.vllm.settings import Settings


class MooncakePDConnector(KVConnectorBase_V1, SupportsHMA):
    """A prompt's keys and values from prefill engines to decode engines, pushed while they are computed.

    Both sides may have other tensor-parallel degrees, other physical layouts and other numbers of blocks. A decode
    engine asks prefill for a request by its transfer id; prefill may be told of it before or after. Blocks that do not
    come (refused, a dead engine, a deadline) are reported, and vLLM computes them (``kv_load_failure_policy:
    recompute``) or fails the request. ``kv_transfer_params`` of requests: see ``PDScheduler``.

    ``kv_connector_extra_config``: ``host`` ("127.0.0.1") to be reached at, ``port`` of rank 0's door (0: any; rank r
    adds r), ``timeout_s`` (120) from a decode request's blocks to their content, ``hold_s`` (120) that prefill keeps
    what nobody comes for, ``connect_timeout_s`` (5), ``wire`` ("auto"), ``transports`` of the engine. Beyond loopback
    all need one ``TM_TOKEN``.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        settings = Settings.of(vllm_config, kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        self._sched: PDScheduler | None = None
        self._work: PDWorker | None = None
        sides = {"sends": bool(transfer.is_kv_producer), "receives": bool(transfer.is_kv_consumer)}
        if role == KVConnectorRole.SCHEDULER:
            self._sched = PDScheduler(settings, **sides)
        else:
            from vllm.distributed.parallel_state import get_tensor_model_parallel_rank

            self._work = PDWorker(settings, get_tensor_model_parallel_rank(), **sides)

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        return True  # layers are pushed from Python

    # ---- scheduler

    @property
    def scheduler(self) -> PDScheduler:
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

    def update_connector_output(self, connector_output: Any) -> None:
        self.scheduler.received(connector_output.finished_recving or set())

    def has_pending_push_work(self) -> bool:
        return self.scheduler.pending

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self.scheduler.finished(request)

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.scheduler.finished(request)

    # ---- worker

    @property
    def worker(self) -> PDWorker:
        if self._work is None:
            raise tm.InvalidArgument("this is the scheduler's connector")
        return self._work

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        self.worker.register(kv_caches)

    def get_handshake_metadata(self) -> Any:
        return self.worker.place()

    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        self.worker.preempted(kv_connector_metadata)

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        super().bind_connector_metadata(connector_metadata)
        self.worker.begin(connector_metadata)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self.worker.load(self._get_connector_metadata())

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Blocks are whole before vLLM schedules the request."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        self.worker.layer(layer_name)

    def wait_for_save(self) -> None:
        self.worker.end()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        return self.worker.results(finished_req_ids)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        sent, received = self.worker.results(finished_req_ids)
        return KVConnectorTransferResults(finished_sending=sent, finished_recving=received)

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self.worker.failed_blocks()

    def shutdown(self) -> None:
        if self._work is not None:
            self._work.close()
        self._sched = self._work = None
