"""The scheduler's side: which blocks are in the pool, and what the workers are to load and to save."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch_mooncake as tm
from torch_mooncake.integrations._hash_check import logger
from torch_mooncake.integrations.tensorrt_llm.settings import Settings, salt_of, tokens_of

_PIN_S = 60.0  # between the look-up and the load nothing is evicted
Slots = tuple[int, ...]  # a block's page in each layer group; -1: it has none


@dataclass
class Metadata:
    """Of one step, for the workers: (block's name, its pages). ``aside``: of requests that wait for them, by their id,
    and are not part of the step."""

    loads: list[tuple[str, Slots]] = field(default_factory=list)
    aside: list[tuple[int, list[tuple[str, Slots]]]] = field(default_factory=list)
    saves: list[tuple[str, Slots]] = field(default_factory=list)


@dataclass
class _Request:
    salt: str | None
    tokens: list[int] = field(default_factory=list)
    blocks: list[Slots] = field(default_factory=list)
    matched: list[str] = field(default_factory=list)  # names of the blocks to load
    first: int = 0  # which block the first of them is
    saved: int = 0  # blocks that need not be saved (any more)
    loaded: bool = False  # the workers have been told to load what was matched
    aside: bool = False  # while the request waits


class Scheduler:
    """Called by one thread, in the order of TensorRT-LLM's scheduler. A pool that does not answer is a miss, logged."""

    def __init__(self, llm_args: Any) -> None:
        super().__init__(llm_args)  # type: ignore[call-arg]  # the base class of TensorRT-LLM, or a host's
        self._settings = Settings.of(llm_args)
        self._pool = tm.Pool()
        self._requests: dict[int, _Request] = {}
        self._aside: list[int] = []  # requests whose blocks are to be loaded while others run

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        """(tokens of whole blocks behind the computed ones that the pool has; whether the request waits for them aside,
        or the step for it). At least one token is left to compute."""
        size = self._settings.tokens_per_block
        state = _Request(salt_of(request))
        self._requests[request.request_id] = state  # an id that comes again is a new request
        if state.salt is None or num_computed_tokens % size:
            return 0, False
        tokens = tokens_of(request)
        state.first = state.saved = num_computed_tokens // size
        names = self._settings.hashes(tokens, state.salt)[state.first : (len(tokens) - 1) // size]
        try:
            keys = self._settings.keys(names)
            there = self._pool.exists_prefix(keys, pin_s=_PIN_S, timeout=self._settings.timeout_s) if keys else 0
        except tm.Error as error:
            logger.warning("TensorRT-LLM look-up: %s: %s", type(error).__name__, error)
            there = 0
        state.matched = names[: there // self._settings.ranks]
        return len(state.matched) * size, self._settings.asynchronous and bool(state.matched)

    def update_state_after_alloc(self, request: Any, block_ids: Sequence[int]) -> None:
        self.update_state_after_alloc_by_layer_group(request, [block_ids])

    def update_state_after_alloc_by_layer_group(self, request: Any, block_ids: Sequence[Sequence[int]]) -> None:
        state = self._requests.setdefault(request.request_id, _Request(salt_of(request)))
        state.blocks = [tuple(int(page) for page in pages) for pages in zip(*block_ids, strict=True)]
        if self._settings.asynchronous and state.matched and not state.loaded:
            self._aside.append(request.request_id)

    def build_connector_meta(self, scheduler_output: Any) -> Metadata:
        """Loads of requests that start, and saves of all blocks that are full after this step."""
        for number in self._aside:
            self._requests[number].aside = True
        made = Metadata(aside=[(number, self._load(self._requests[number])) for number in self._aside])
        self._aside = []
        for data in scheduler_output.new_requests:
            state = self._requests.setdefault(data.request_id, _Request(None))
            state.tokens = list(data.new_tokens)
            given = self._new_blocks(data)
            if not state.blocks:
                state.blocks = given
            if not state.loaded:
                made.loads += self._load(state)
            state.saved = state.first + len(state.matched)
            self._save(made, state, data)
        for data in scheduler_output.cached_requests:
            state = self._requests.setdefault(data.request_id, _Request(None))
            state.tokens += data.new_tokens
            state.blocks += self._new_blocks(data)
            self._save(made, state, data)
        return made

    def _load(self, state: _Request) -> list[tuple[str, Slots]]:
        """What was matched, as far as blocks were given for it."""
        state.loaded = True
        return list(zip(state.matched, state.blocks[state.first :], strict=False))

    def _save(self, made: Metadata, state: _Request, data: Any) -> None:
        full = (data.computed_position + data.num_scheduled_tokens) // self._settings.tokens_per_block
        full = min(full, len(state.tokens) // self._settings.tokens_per_block, len(state.blocks))
        if state.salt is None or full <= state.saved:
            return
        names = self._settings.hashes(state.tokens[: full * self._settings.tokens_per_block], state.salt)
        for index in range(state.saved, full):
            if -1 not in state.blocks[index]:  # a block that has left a window has nothing to save there
                made.saves.append((names[index], state.blocks[index]))
        state.saved = full

    def _new_blocks(self, data: Any) -> list[Slots]:
        grouped = getattr(data, "new_block_ids_by_layer_group", None) or [data.new_block_ids]
        return [tuple(int(page) for page in pages) for pages in zip(*grouped, strict=True)]

    def request_finished(self, request: Any, cache_block_ids: Sequence[int]) -> bool:
        """Whether workers say when its blocks may go (``get_finished``): they were to load some of them aside, and may
        still do so. What was to be saved is."""
        state = self._requests.pop(request.request_id, None)
        self._aside = [number for number in self._aside if number != request.request_id]
        if state is not None and state.matched:
            try:
                self._pool.unpin(self._settings.keys(state.matched), timeout=self._settings.timeout_s)
            except tm.Error as error:
                logger.warning("TensorRT-LLM unpin: %s: %s", type(error).__name__, error)
        return state is not None and state.aside

    def request_finished_by_layer_group(self, request: Any, cache_block_ids: Sequence[Sequence[int]]) -> bool:
        return self.request_finished(request, cache_block_ids[0] if cache_block_ids else [])

    def close(self) -> None:
        self._pool.close()
