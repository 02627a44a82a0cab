"""What scheduler and workers have to agree on: whose blocks these are, and how they are called."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

import torch_mooncake as tm
from torch_mooncake.kv import page_hashes, root_hash


@dataclass(frozen=True)
class Settings:
    """Taken from the server's arguments and, where those do not say, from the environment: ``TM_TRTLLM_NAMESPACE`` (the
    tenant; "default"), ``TM_TRTLLM_TIMEOUT_S`` (10), ``TM_TRTLLM_REPLICAS`` (1), ``TM_TRTLLM_ASYNC`` (0; 1: requests
    wait for their blocks aside, while others run)."""

    model: str
    namespace: str
    tokens_per_block: int
    ranks: int  # of tensor and pipeline parallelism: each has a part of every block
    timeout_s: float
    replicas: int
    asynchronous: bool

    @classmethod
    def of(cls, llm_args: Any) -> Settings:
        cache = getattr(llm_args, "kv_cache_config", None)
        tokens = getattr(cache, "tokens_per_block", None) or getattr(llm_args, "tokens_per_block", None)
        if not tokens:
            raise tm.InvalidArgument("the server's arguments do not say tokens_per_block")
        return cls(
            model=str(getattr(llm_args, "model", "model")),
            namespace=os.environ.get("TM_TRTLLM_NAMESPACE", "default"),
            tokens_per_block=int(tokens),
            ranks=int(getattr(llm_args, "tensor_parallel_size", 1) or 1)
            * int(getattr(llm_args, "pipeline_parallel_size", 1) or 1),
            timeout_s=float(os.environ.get("TM_TRTLLM_TIMEOUT_S", 10)),
            replicas=int(os.environ.get("TM_TRTLLM_REPLICAS", 1)),
            asynchronous=os.environ.get("TM_TRTLLM_ASYNC", "0") == "1",
        )

    @property
    def name(self) -> str:
        """Of the model, wherever a server has it."""
        return os.path.basename(self.model.rstrip("/"))

    @property
    def prefix(self) -> str:
        model = quote(self.name, safe="")
        return f"tensorrt_llm/{quote(self.namespace, safe='')}/{model}/{self.tokens_per_block}x{self.ranks}/"

    def hashes(self, tokens: Sequence[int], salt: str) -> list[str]:
        """Names of the full blocks of ``tokens``; each covers all tokens up to its end, and ``salt``."""
        root = root_hash(model=self.name, fingerprint=self.prefix, cache_salt=salt)
        return [digest.hex() for digest in page_hashes(root, tokens, self.tokens_per_block)]

    def key(self, block: str, rank: int) -> str:
        return f"{self.prefix}rank{rank}/{block}"

    def keys(self, blocks: Sequence[str]) -> list[str]:
        """Of all ranks, those of one block together."""
        return [self.key(block, rank) for block in blocks for rank in range(self.ranks)]


def salt_of(request: Any) -> str | None:
    """What tells requests apart that have the same tokens and share nothing: cache salt and LoRA. None: they cannot be
    told apart (it has images, say, or its salt cannot be seen), so nothing of it is taken or stored."""
    if not hasattr(request, "cache_salt") and not hasattr(request, "cache_salt_id"):
        return None
    if getattr(request, "multimodal_hashes", None) or getattr(request, "multimodal_embedding", None) is not None:
        return None
    salt = getattr(request, "cache_salt", None)
    number = getattr(request, "cache_salt_id", None)
    lora = getattr(request, "lora_task_id", None)
    return json.dumps([salt, None if salt is not None else number, lora])


def tokens_of(request: Any) -> list[int]:
    """Of beam 0."""
    return [int(token) for token in request.get_tokens(0)]
