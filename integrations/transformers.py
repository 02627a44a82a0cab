"""Hugging Face transformers: ``generate()`` that starts from the prefix somebody else has computed.

    prefixes = PrefixCache(tm, model, "smollm2-135m")
    out = prefixes.generate(model, ids, max_new_tokens=32)      # as model.generate(ids, …), token for token

The keys and values of the prompt's full chunks are taken from the pool as far as they are there; the rest is computed,
and put there. Prompts are single sequences (batch 1, no padding), models have full attention in all layers.
"""

from __future__ import annotations

import hashlib
import json
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch_mooncake as tm
from torch_mooncake.kv import page_hashes, root_hash

if TYPE_CHECKING:
    import torch

logger = logging.getLogger("torch_mooncake.integrations")


@dataclass
class PrefixStats:
    """Tokens of prompts so far, and how many of them came from the pool; chunks stored, and stores that failed."""

    prompt_tokens: int = 0
    reused_tokens: int = 0
    chunks_stored: int = 0
    stores_failed: int = 0


class PrefixCache:
    """Prefixes of one model in a pool.

    A chunk of ``chunk_tokens`` tokens is one sealed object, a tensor [layers, 2, kv_heads, chunk_tokens, head_dim]. Its
    name is a hash of all tokens up to its end, of ``name`` (the model and its weights: whatever else changes what a
    chunk holds, an adapter say, belongs there), of the cache's layout and dtype, and of ``cache_salt``: prompts with
    another salt share nothing. A pool that fails costs the reuse, not the answer; that is logged.
    """

    def __init__(
        self, pool: Any, model: Any, name: str, *, cache_salt: str = "", chunk_tokens: int = 32, timeout_s: float = 10
    ) -> None:
        config = model.config.get_text_config()
        if any(kind != "full_attention" for kind in getattr(config, "layer_types", None) or []):
            raise tm.Unsupported("only models whose layers all attend to everything can start from a prefix")
        self._pool, self._timeout_s, self.chunk_tokens = pool, timeout_s, chunk_tokens
        self._dtype, self._device = model.dtype, model.device
        heads = config.num_key_value_heads
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self._shape = (config.num_hidden_layers, 2, heads, chunk_tokens, size)
        rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None)
        layout = json.dumps([self._shape, str(self._dtype), rope], sort_keys=True, default=str)
        fingerprint = hashlib.blake2b(layout.encode(), digest_size=8).hexdigest()
        self._root = root_hash(model=name, fingerprint=fingerprint, cache_salt=cache_salt)
        self._prefix = f"transformers/{name}/{fingerprint}/"
        self.stats = PrefixStats()

    def keys(self, token_ids: list[int]) -> list[str]:
        """The pool's keys of the full chunks of a prompt, in order."""
        return [self._prefix + digest.hex() for digest in page_hashes(self._root, token_ids, self.chunk_tokens)]

    def load(self, token_ids: list[int]) -> tuple[Any, int]:
        """(a DynamicCache, how many tokens it holds): the longest prefix in whole chunks that the pool has, and that
        leaves a token to compute."""
        from transformers import DynamicCache

        cache = DynamicCache()
        usable = self.keys(token_ids)[: (len(token_ids) - 1) // self.chunk_tokens]
        try:
            chunks = self._read(usable)
        except tm.Error as error:
            logger.warning("no prefix: %s: %s", type(error).__name__, error)
            chunks = []
        if chunks:
            import torch

            joined = torch.cat(chunks, dim=3).to(self._device)
            for layer in range(self._shape[0]):
                cache.update(joined[layer, 0].unsqueeze(0), joined[layer, 1].unsqueeze(0), layer)
        return cache, len(chunks) * self.chunk_tokens

    def _read(self, keys: list[str]) -> list[torch.Tensor]:
        there = self._pool.exists_prefix(keys, timeout=self._timeout_s) if keys else 0
        found = self._pool.get_many(keys[:there], errors="return", readonly=True, timeout=self._timeout_s)
        good: list[torch.Tensor] = []
        for key, chunk in zip(keys, found, strict=False):
            if isinstance(chunk, tm.KeyNotFound):  # evicted since
                break
            if isinstance(chunk, Exception):
                raise chunk
            if tuple(getattr(chunk, "shape", ())) != self._shape or chunk.dtype != self._dtype:
                raise tm.Corrupt(f"{key} holds no chunk of shape {self._shape} and {self._dtype}")
            good.append(chunk)
        return good

    def store(self, token_ids: list[int], cache: Any, skip_tokens: int = 0) -> int:
        """Put the full chunks of ``token_ids`` behind the first ``skip_tokens``, out of a cache that holds them all.
        How many were new; 0, and a line in the log, if the pool does not take them."""
        import torch

        keys = self.keys(token_ids)
        first = skip_tokens // self.chunk_tokens
        items: list[tuple[str, torch.Tensor]] = []
        for index in range(len(keys) - 1, first - 1, -1):  # the last first: should room run out, prefixes stay
            at = slice(index * self.chunk_tokens, (index + 1) * self.chunk_tokens)
            sides = [torch.stack((each.keys[0, :, at], each.values[0, :, at])) for each in cache.layers]
            items.append((keys[index], torch.stack(sides).cpu()))
        outcomes = []
        try:
            outcomes = self._pool.put_many(items, sealed=True, errors="return", timeout=self._timeout_s)
        except tm.Error as error:
            outcomes = [error] * len(items)
        failed = [each for each in outcomes if isinstance(each, Exception)]
        if failed:
            logger.warning("%d of %d chunks were not stored: %s", len(failed), len(items), failed[0])
        self.stats.stores_failed += len(failed)
        stored = sum(each.stored for each in outcomes if not isinstance(each, Exception))
        self.stats.chunks_stored += stored
        return stored

    def generate(self, model: Any, input_ids: torch.Tensor, **options: Any) -> torch.Tensor:
        """``model.generate(input_ids, **options)`` from the longest known prefix on; what it had to compute of the
        prompt is stored. ``input_ids``: int64 [1, n]. Returns what ``generate`` does without ``return_dict``."""
        if input_ids.ndim != 2 or input_ids.shape[0] != 1:
            raise tm.InvalidArgument(f"one sequence at a time: input_ids is [1, n], not {list(input_ids.shape)}")
        tokens = input_ids[0].tolist()
        cache, reused = self.load(tokens)
        out = model.generate(input_ids, past_key_values=cache, return_dict_in_generate=True, **options)
        self.stats.prompt_tokens += len(tokens)
        self.stats.reused_tokens += reused
        self.store(tokens, out.past_key_values, skip_tokens=reused)
        sequences: torch.Tensor = out.sequences
        return sequences
