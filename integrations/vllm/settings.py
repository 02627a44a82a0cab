"""What both sides of a connector take from vLLM's configuration, which is read by its attributes."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch_mooncake as tm

logger = logging.getLogger("torch_mooncake.integrations")

# vLLM's classes of what is cached, by name: it is not imported here.
_WHOLE = {"FullAttentionSpec"}  # and MLA's, which is derived from it
_NOT_WHOLE = {"RSWASpec", "HiddenStateCacheSpec", "SinkFullAttentionSpec"}

# What says where a model lies, or who wrote its configuration, and not what it computes.
_NOT_THE_MODEL = ("_name_or_path", "name_or_path", "transformers_version", "torch_dtype", "dtype", "architectures")


@dataclass(frozen=True)
class Settings:
    """Whose blocks these are and how they are called. The rest is in ``kv_connector_extra_config`` (``extra``)."""

    model: str
    tenant: str
    block_size: int  # tokens
    tp_size: int
    mla: bool
    recompute: bool  # what vLLM does with a load that fails; else the request fails
    extra: Mapping[str, Any]

    @classmethod
    def of(cls, vllm_config: Any, kv_cache_config: Any) -> Settings:
        """Raises Unsupported for what the connectors cannot carry: several KV cache groups, sliding windows and states,
        layers or tokens divided between ranks, blocks whose hashes have another size."""
        parallel, cache = vllm_config.parallel_config, vllm_config.cache_config
        transfer = vllm_config.kv_transfer_config
        for name in ("pipeline_parallel_size", "prefill_context_parallel_size", "decode_context_parallel_size"):
            if (degree := int(getattr(parallel, name, 1) or 1)) > 1:
                raise tm.Unsupported(f"{name} is {degree}: every rank must have all layers and all tokens")
        specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
        if len(specs) != 1 or not _whole(specs[0]):
            kinds = ", ".join(type(spec).__name__ for spec in specs)
            raise tm.Unsupported(f"KV cache groups ({kinds}): only a single one is carried, of full attention or MLA")
        hashed = getattr(kv_cache_config, "hash_block_size", None) or cache.block_size
        if int(hashed) != int(cache.block_size):
            raise tm.Unsupported(f"blocks of {cache.block_size} tokens, hashes of {hashed}")
        extra = dict(getattr(transfer, "kv_connector_extra_config", None) or {})
        return cls(
            model=str(extra.get("model") or model_name(vllm_config.model_config)),
            tenant=str(extra.get("tenant", "default")),
            block_size=int(cache.block_size),
            tp_size=int(parallel.tensor_parallel_size),
            mla=bool(getattr(vllm_config.model_config, "use_mla", False)),
            recompute=getattr(transfer, "kv_load_failure_policy", "fail") == "recompute",
            extra=extra,
        )

    def seconds(self, name: str, default: float) -> float:
        """A number of seconds above 0; InvalidArgument for anything else."""
        return positive(self.extra, name, default)

    @property
    def namespace(self) -> str:
        """Of all ranks' pages; see ``rank_namespace``."""
        return f"vllm:{self.tenant}:{self.model}"

    def rank_namespace(self, rank: int) -> str:
        """Where a rank's pages are: an MLA cache is the same on all of them."""
        return f"{self.namespace}:all" if self.mla else f"{self.namespace}:{rank}of{self.tp_size}"


def _whole(spec: Any) -> bool:
    """Whether requests keep all of their blocks: those of windows and states go, or are none."""
    many = getattr(spec, "kv_cache_specs", None)
    if many is not None:
        return all(map(_whole, many.values()))
    names = {kind.__name__ for kind in type(spec).__mro__}
    return bool(names & _WHOLE) and not names & _NOT_WHOLE


def positive(extra: Mapping[str, Any], name: str, default: float) -> float:
    value = extra.get(name, default)
    try:
        seconds = float(value)
    except (TypeError, ValueError):
        seconds = 0.0
    if not 0 < seconds < 1e6:
        raise tm.InvalidArgument(f"kv_connector_extra_config: {name} is a number of seconds, not {value!r}")
    return seconds


def model_name(model_config: Any) -> str:
    """Model, revision, quantisation, and a digest of the configuration: what is computed differently has another name.
    Weights that change under one name and revision have to be told apart by ``extra["model"]`` or the tenant."""
    config = getattr(model_config, "hf_config", None)
    described = config.to_dict() if config is not None else {}
    kept = {name: value for name, value in described.items() if name not in _NOT_THE_MODEL}
    digest = hashlib.blake2b(json.dumps(kept, sort_keys=True, default=str).encode(), digest_size=6).hexdigest()
    name = str(model_config.model).rstrip("/").rpartition("/")[2]
    parts = [name, getattr(model_config, "revision", None), getattr(model_config, "quantization", None), digest]
    return ":".join(str(part) for part in parts if part)


def make_pool(extra: Mapping[str, Any]) -> tm.Pool:
    """``address`` of a node, or the name of this host's ``pool``; neither: as the environment says."""
    address, pool = extra.get("address"), extra.get("pool")
    return tm.Pool(str(address) if address else None, pool=str(pool) if pool else None)
