"""vLLM's side of the encoder-cache connector: its abstract class, with `encoder_cache` behind it."""

from __future__ import annotations

from typing import Any

import torch
from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorBase, ECConnectorRole

import torch_mooncake as tm
from torch_mooncake.integrations.vllm.encoder_cache import ECMeta, EncoderOutputs, Fetcher, take
from torch_mooncake.integrations.vllm.settings import make_pool, model_name, positive


class MooncakeECConnector(ECConnectorBase):
    """Outputs of vision (or other) encoders in a pool, by the hash of what they were made from.

    A producer stores an output before its request ends, a consumer fetches it while its request waits to be scheduled,
    for ``timeout_s`` at most; what is not there, or cannot be had, the consumer encodes itself.

    ``ec_connector_extra_config``: ``tenant`` ("default"), ``model`` (its name in keys), ``address`` of a node or name
    of this host's ``pool``, ``timeout_s`` (5). Unsupported with ``weight_transfer_config``: nothing would say which
    weights made an output.
    """

    def __init__(self, vllm_config: Any, role: ECConnectorRole) -> None:
        super().__init__(vllm_config=vllm_config, role=role)
        if getattr(vllm_config, "weight_transfer_config", None) is not None:
            raise tm.Unsupported("weight_transfer_config: outputs in the pool would be those of other weights")
        extra = dict(getattr(vllm_config.ec_transfer_config, "ec_connector_extra_config", None) or {})
        model = str(extra.get("model") or model_name(vllm_config.model_config))
        tenant, timeout_s = str(extra.get("tenant", "default")), positive(extra, "timeout_s", 5)
        dtype = str(getattr(vllm_config.model_config, "dtype", "any")).removeprefix("torch.")
        outputs = EncoderOutputs(make_pool(extra), model, tenant, timeout_s, dtype)
        self._outputs: EncoderOutputs | None = outputs
        self._fetcher = Fetcher(outputs) if role == ECConnectorRole.SCHEDULER and self.is_consumer else None
        self._rank = 0
        if role == ECConnectorRole.WORKER:
            from vllm.distributed.parallel_state import get_tensor_model_parallel_rank, model_parallel_is_initialized

            self._rank = get_tensor_model_parallel_rank() if model_parallel_is_initialized() else 0

    # ---- worker

    def start_load_caches(self, encoder_cache: dict[str, torch.Tensor], **kwargs: Any) -> None:
        metadata = self._get_connector_metadata()
        if isinstance(metadata, ECMeta) and metadata.loads:
            take(metadata.loads, encoder_cache, _device())

    def save_caches(self, encoder_cache: dict[str, torch.Tensor], mm_hash: str, **kwargs: Any) -> None:
        if self.is_producer and self._rank == 0 and self._outputs is not None:  # all ranks have the same
            self._outputs.put(mm_hash, encoder_cache[mm_hash])

    # ---- scheduler

    @property
    def fetcher(self) -> Fetcher:
        if self._fetcher is None:
            raise tm.InvalidArgument("this is no consumer's scheduler")
        return self._fetcher

    def ensure_cache_available(self, request: Any, num_computed_tokens: int) -> bool:
        return self._fetcher is None or self._fetcher.available(request, num_computed_tokens)

    def has_cache_item(self, identifier: str) -> bool:
        return self._fetcher is not None and self._fetcher.has(identifier)

    def update_state_after_alloc(self, request: Any, index: int) -> None:
        if self._fetcher is not None:
            self._fetcher.allocated(request, index)

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        return ECMeta() if self._fetcher is None else self._fetcher.build()

    def request_finished(self, request: Any) -> tuple[bool, dict[str, Any] | None]:
        if self._fetcher is not None:
            self._fetcher.finished(request)
        return False, None

    def shutdown(self) -> None:
        if self._fetcher is not None:
            self._fetcher.close()
        elif self._outputs is not None:
            self._outputs.close()
        self._fetcher = self._outputs = None


def _device() -> torch.device:
    from vllm.platforms import current_platform

    if current_platform.is_cuda_alike():
        return torch.device(current_platform.device_type, current_platform.current_device())
    return torch.device(current_platform.device_type)
