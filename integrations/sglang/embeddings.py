"""SGLang's global cache of image and audio embeddings (encoder disaggregation), in the pool of all hosts."""

from __future__ import annotations

import os
from typing import Any
from urllib.parse import quote

from sglang.srt.mem_cache.embedding_store import EmbeddingStore
from sglang.srt.runtime_context import get_model

import torch_mooncake as tm
from torch_mooncake.integrations.sglang.objects import Objects


class PoolEmbeddings(EmbeddingStore):
    """Embeddings as sealed objects, straight between SGLang's host memory and the pool's; any number of pieces each.

    Keys are ``sglang/<namespace>/<model>/embeddings/<dtype>/<SGLang's content hash>``. SGLang's own keys have the hash
    alone, so that two models of one store read each other's. ``TM_SGLANG_NAMESPACE`` (the tenant; "default"),
    ``TM_SGLANG_TIMEOUT_S`` (30), ``TM_SGLANG_REPLICAS`` (1). Every call ends in time; what fails is a miss, and logged.
    """

    def __init__(self, storage_config: Any = None) -> None:
        model, namespace = get_model(), os.environ.get("TM_SGLANG_NAMESPACE", "default")
        timeout_s, replicas = (os.environ.get(f"TM_SGLANG_{name}") for name in ("TIMEOUT_S", "REPLICAS"))
        self._objects = Objects(tm.Pool(), "SGLang embeddings", float(timeout_s or 30), int(replicas or 1))
        parts = (namespace, model.model_path, "embeddings", str(model.dtype))
        self._base = "sglang/" + "".join(f"{quote(part, safe='')}/" for part in parts)

    def get_key(self, mm_hash: str) -> str:
        return f"{self._base}{mm_hash}"

    def batch_get(self, hashes: list[str], ptrs: list[int], sizes: list[int]) -> list[bool]:
        return self.batch_get_into_multi_buffers(hashes, [[at] for at in ptrs], [[nbytes] for nbytes in sizes])

    def batch_put(self, hashes: list[str], ptrs: list[int], sizes: list[int]) -> list[bool]:
        return self.batch_put_from_multi_buffers(hashes, [[at] for at in ptrs], [[nbytes] for nbytes in sizes])

    def batch_get_into_multi_buffers(
        self, hashes: list[str], ptrs: list[list[int]], sizes: list[list[int]]
    ) -> list[bool]:
        """Whether each was there, with as many bytes as its buffers have together."""
        return self._objects.read([self.get_key(each) for each in hashes], _pieces(ptrs, sizes))

    def batch_put_from_multi_buffers(
        self, hashes: list[str], ptrs: list[list[int]], sizes: list[list[int]]
    ) -> list[bool]:
        """Whether each is there now, whoever stored it."""
        return self._objects.write([self.get_key(each) for each in hashes], _pieces(ptrs, sizes))

    def batch_is_exist(self, hashes: list[str]) -> list[bool]:
        return self._objects.there([self.get_key(each) for each in hashes])

    def close(self) -> None:
        self._objects.close()


def _pieces(ptrs: list[list[int]], sizes: list[list[int]]) -> list[list[tuple[int, int]]]:
    return [list(zip(some, lengths, strict=True)) for some, lengths in zip(ptrs, sizes, strict=True)]
