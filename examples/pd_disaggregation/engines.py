"""What the two kinds of worker do with a prompt, without the HTTP around it. Each is used by one thread."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import torch
from paged_cache import PagedSequence

from torch_mooncake.errors import PoolFull
from torch_mooncake.kv import KVSender, PageAllocator, PagedKV, PoolKV


@dataclass
class PrefillResult:
    first_token: int
    prompt_tokens: int
    reused_tokens: int
    compute_s: float
    pool_load_bytes: int
    pool_load_s: float
    push_bytes: int
    push_exposed_s: float
    push_transport: str


@dataclass
class PrefillEngine:
    """Computes prompts' KV pages, except those the pool has, and pushes them to the decode side."""

    model: Any
    kv: PagedKV
    pages: PageAllocator
    pool_kv: PoolKV
    sender: KVSender

    @torch.inference_mode()
    def prefill(self, prompt: list[int], ticket: bytes, cache_salt: str = "") -> PrefillResult:
        """Fills the ticket's pages with the prompt's keys and values. Full pages go to the pool afterwards."""
        page_size = self.kv.layout.page_size
        keys = self.pool_kv.page_keys(prompt, cache_salt=cache_salt)
        pages = self.pages.take(-(-len(prompt) // page_size))
        try:
            with self.sender.open(ticket) as session:
                loaded_before, load_s_before = self.pool_kv.stats.bytes_loaded, self.pool_kv.stats.load_s
                # The last token is always computed: its logits are the answer's first token.
                hits = self.pool_kv.get_pages(keys[: (len(prompt) - 1) // page_size], pages)
                reused = hits * page_size
                began = time.perf_counter()
                sequence = PagedSequence(
                    self.kv, pages, length=reused, on_layer=lambda layer: session.push_layer(layer, pages)
                )
                tail = torch.tensor([prompt[reused:]])
                logits = self.model(input_ids=tail, past_key_values=sequence, use_cache=True, logits_to_keep=1).logits
                first_token = int(logits[0, -1].argmax())
                compute_s = time.perf_counter() - began
                push = session.finish({"first_token": first_token, "prompt_tokens": len(prompt)})
            store_pages(self.pool_kv, keys[hits:], pages[hits : len(keys)])
        finally:
            self.pages.free(pages)
        return PrefillResult(
            first_token=first_token,
            prompt_tokens=len(prompt),
            reused_tokens=reused,
            compute_s=compute_s,
            pool_load_bytes=self.pool_kv.stats.bytes_loaded - loaded_before,
            pool_load_s=self.pool_kv.stats.load_s - load_s_before,
            push_bytes=push.nbytes,
            push_exposed_s=push.exposed_s,
            push_transport=push.transport,
        )


@dataclass
class DecodeEngine:
    """Continues sequences whose prompt somebody else has run."""

    model: Any
    kv: PagedKV
    pages: PageAllocator
    pool_kv: PoolKV
    prompt_tokens_run: int = field(default=0, init=False)  # stays 0: that is the point
    tokens_run: int = field(default=0, init=False)

    def start(self, pages: list[int], prompt: list[int], first_token: int, cache_salt: str = "") -> DecodeSequence:
        return DecodeSequence(self, pages, prompt, first_token, cache_salt)


class DecodeSequence:
    """One answer. The pages hold the prompt's keys and values; they are freed by `close`."""

    def __init__(
        self, engine: DecodeEngine, pages: list[int], prompt: list[int], first_token: int, cache_salt: str
    ) -> None:
        self._engine = engine
        self._pages = pages
        self._prompt = prompt
        self._cache_salt = cache_salt
        self._pool_kv = engine.pool_kv
        self._sequence = PagedSequence(engine.kv, pages, length=len(prompt))
        self.tokens = [first_token]

    @torch.inference_mode()
    def step(self) -> int:
        """Runs the newest token and returns the next."""
        engine, position = self._engine, self._sequence.get_seq_length()
        engine.tokens_run += 1
        engine.prompt_tokens_run += position < len(self._prompt)
        token = torch.tensor([[self.tokens[-1]]])
        logits = engine.model(input_ids=token, past_key_values=self._sequence, use_cache=True).logits
        self.tokens.append(int(logits[0, -1].argmax()))
        return self.tokens[-1]

    def close(self, *, store: bool = False) -> None:
        """Frees the pages; with `store`, the full ones that hold the answer go to the pool first, so that the next
        turn of the conversation finds them. The last token was never run and has no keys and values. An answer that
        new weights came into is not stored."""
        if not self._pages:
            return
        try:
            if store and self._pool_kv is self._engine.pool_kv:
                pool_kv, size = self._pool_kv, self._engine.kv.layout.page_size
                keys = pool_kv.page_keys(self._prompt + self.tokens[:-1], cache_salt=self._cache_salt)
                first = len(self._prompt) // size
                store_pages(pool_kv, keys[first:], self._pages[first : len(keys)])
        finally:
            pages, self._pages = self._pages, []
            self._engine.pages.free(pages)


def store_pages(pool_kv: PoolKV, keys: list[str], pages: list[int]) -> None:
    """A full pool costs later hits, not this answer: it is counted and the request goes on."""
    try:
        pool_kv.put_pages(keys, pages)
    except PoolFull as error:
        pool_kv.stats.stores_refused += 1
        print(f"pool full, {len(keys)} pages not stored: {error}", flush=True)
