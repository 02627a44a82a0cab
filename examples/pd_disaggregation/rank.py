"""What one rank of a worker does with sequences: its model, its heads of every page, its part of each transfer.

Every rank of a worker is told the same calls in the same order (by `Ranks`) and keeps page tables of its own. What may
fail on one rank alone is agreed upon by all. Pages on their way to a decode worker or into the pool are looked after by
threads of the rank, beside the computation.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import torch
from head_pool import HeadLoad, HeadPool
from paged_cache import PagedCache, forward, pages_for
from shard_weights import ShardWeights
from tensor_parallel import Group

import torch_mooncake as tm
from torch_mooncake.kv import DecodeSession, KVReceiver, KVSender, PageAllocator, PagedKV, PrefillSession

_THREADS = 64  # sequences whose pages are waited for, or stored, at the same time


@dataclass
class KVSequence:
    """One sequence on this rank."""

    prompt: list[int]
    cache_salt: str
    pool: HeadPool  # of the weights it began with
    pages: list[int]
    length: int = 0  # tokens whose keys and values are in the pages
    load: HeadLoad | None = None  # pages of them that come from the pool
    reused: int = 0  # how many
    push: PrefillSession | None = None
    pushed: list[int] = field(default_factory=list)  # pages handed to it, of each layer
    receive: DecodeSession | None = None
    moving: Future | None = None  # the thread that looks after push or receive
    outcome: dict | None = None  # its result, with "error" if it failed


@dataclass
class Counters:
    prompt_tokens_run: int = 0
    tokens_run: int = 0
    steps: int = 0
    largest_batch: int = 0


class Rank:
    """The public methods are the calls; all ranks of a worker make each of them, from one thread. `moved` is called, on
    some other thread, when pages have come, gone or become free."""

    def __init__(
        self, group: Group, weights: ShardWeights, kv: PagedKV, engine: tm.Engine, parts: int, moved: Callable[[], None]
    ) -> None:
        self.group, self.weights, self.kv, self.engine = group, weights, kv, engine
        self.model = weights.model
        self.allocator = PageAllocator(kv.layout.num_pages)
        self.counters = Counters()
        self.pool = self._head_pool(parts)
        self._parts = parts
        self._sender = KVSender(engine, kv, tp_rank=group.rank, tp_size=group.size)
        self._receiver = KVReceiver(engine, kv, self.allocator, tp_rank=group.rank, tp_size=group.size)
        self._moved = moved
        self._sequences: dict[str, KVSequence] = {}
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="pages")

    def _head_pool(self, parts: int) -> HeadPool:
        return HeadPool(self.kv, self.weights.namespace, parts, rank=self.group.rank, size=self.group.size)

    def update_weights(self, timeout_s: float) -> dict:
        """Takes the next published version, or returns {"error": …}. Its keys and values are other pages."""
        outcome = self.weights.update(timeout_s)
        if "error" not in outcome:
            self.pool = self._head_pool(self._parts)
        return outcome

    # ---- a prompt -----------------------------------------------------------------------------------------------
    def begin(self, name: str, prompt: list[int], cache_salt: str, tokens: int) -> dict:
        """Takes pages for `tokens` tokens and begins to fill them with what the pool has of the prompt. Returns
        {"reused": tokens}, or {"error": …} with nothing held."""
        outcomes = self.group.gather(_attempt(partial(self._begin, name, prompt, cache_salt, tokens)))
        if failed := _first_error(outcomes):
            self.release(name)
            return failed
        sequence = self._sequences[name]
        assert sequence.load is not None
        sequence.reused = min(outcome["hits"] for outcome in outcomes)
        sequence.load.settle(sequence.reused)
        sequence.length = sequence.reused * self.kv.layout.page_size
        return {"reused": sequence.length}

    def _begin(self, name: str, prompt: list[int], cache_salt: str, tokens: int) -> dict:
        pages = self.allocator.take(pages_for(tokens, self.kv.layout.page_size))
        sequence = self._sequences[name] = KVSequence(prompt, cache_salt, self.pool, pages)
        sequence.pushed = [0] * len(self.kv.layers)
        sequence.load = self.pool.load(prompt, pages, cache_salt)
        return {"hits": sequence.load.hits}

    def open(self, name: str, tickets: list[bytes]) -> None:
        """A thread opens the way to the decode ranks that gave these tickets, while the prompt is computed: a decode
        worker that does not answer holds up nobody else. What is done by then is pushed later."""
        sequence = self._sequences[name]
        sequence.moving = self._beside(self._open, sequence, tickets)

    def _open(self, sequence: KVSequence, tickets: list[bytes]) -> None:
        try:
            sequence.push = self._sender.open(tickets)
        except tm.Error as error:
            sequence.outcome = failure(error)

    @torch.inference_mode()
    def chunk(self, name: str, count: int) -> dict:
        """Runs the prompt's next `count` tokens. Each layer waits for its pages from the pool; when it is done, pages
        that are full now go on their way to the decode worker, with the prompt's last token all. Returns {}, with the
        last token {"token": the answer's first (of rank 0), "load_bytes": …, "load_wait_s": …}, or {"error": …}."""
        sequence = self._sequences[name]
        start, end = sequence.length, sequence.length + count
        last, size = end == len(sequence.prompt), self.kv.layout.page_size
        ready = pages_for(end, size) if last else end // size
        load = sequence.load
        assert load is not None
        hidden = forward(
            self.model,
            PagedCache(
                self.kv,
                [sequence.pages],
                [start],
                count,
                before_layer=load.wait_layer,
                after_layer=partial(self._push, sequence, ready),
            ),
            [sequence.prompt[start:end]],
        )
        first = start == sequence.reused * size
        sequence.length = end
        self.counters.prompt_tokens_run += count
        if first and start:  # only then has anything been loaded
            loaded = self.group.gather(failure(load.error) if load.error is not None else {})
            if failed := _first_error(loaded):
                return failed
        if not last:
            return {}
        token = int(self.model.lm_head(hidden)[0].argmax()) if self.group.rank == 0 else 0
        return {"token": token, "load_bytes": load.nbytes * self.group.size, "load_wait_s": load.waited_s}

    def _push(self, sequence: KVSequence, ready: int, layer: int) -> None:
        """Up to page `ready` of a layer. A rank whose transfer has failed goes on computing, or the other ranks would
        wait for it; the decode side learns of it from the session, and so does `finish`."""
        push, first = sequence.push, sequence.pushed[layer]
        if push is None or push.ended or ready == first:
            return
        try:
            push.push_layer(layer, sequence.pages[first:ready], start=first)
            sequence.pushed[layer] = ready
        except tm.Error as error:
            push.abort(error)

    def finish(self, name: str, first_token: int) -> None:
        """The prompt is done, and `open` has been called: a thread pushes what is left, waits for the rest of the
        transfer and stores the new pages in the pool."""
        sequence = self._sequences[name]
        sequence.moving = self._beside(self._finish, sequence, first_token, sequence.moving)

    def _finish(self, sequence: KVSequence, first_token: int, opening: Future) -> None:
        opening.result()
        if sequence.push is None:
            return  # and the outcome says why
        try:
            for layer in range(len(self.kv.layers)):
                self._push(sequence, len(sequence.pages), layer)
            push = sequence.push.finish({"first_token": first_token})
            sequence.pool.store(sequence.prompt, sequence.pages, sequence.cache_salt, sequence.reused)
            sequence.outcome = {
                "push_bytes": push.nbytes,
                "push_exposed_s": push.exposed_s,
                "push_transport": push.transport,
                "push_wire": push.wire,
            }
        except tm.Error as error:
            sequence.outcome = failure(error)

    # ---- an answer ----------------------------------------------------------------------------------------------
    def receive(self, name: str, prompt: list[int], cache_salt: str, tokens: int, timeout_s: float) -> dict:
        """Takes pages for `tokens` tokens and opens them to whoever has the tickets. Returns {"tickets": […]}, one of
        each rank, or {"error": …} with nothing held; `settled` says when the prompt's pages are there."""
        outcomes = self.group.gather(_attempt(partial(self._receive, name, prompt, cache_salt, tokens, timeout_s)))
        if failed := _first_error(outcomes):
            self.release(name)
            return failed
        return {"tickets": [outcome["ticket"] for outcome in outcomes]}

    def _receive(self, name: str, prompt: list[int], cache_salt: str, tokens: int, timeout_s: float) -> dict:
        size = self.kv.layout.page_size
        session = self._receiver.open(
            pages_for(tokens, size), prompt_pages=pages_for(len(prompt), size), timeout=timeout_s
        )
        sequence = KVSequence(prompt, cache_salt, self.pool, session.pages, length=len(prompt), receive=session)
        self._sequences[name] = sequence
        sequence.moving = self._beside(self._wait, sequence)
        return {"ticket": session.ticket()}

    def _wait(self, sequence: KVSequence) -> None:
        assert sequence.receive is not None
        try:
            sequence.outcome = {"meta": sequence.receive.wait()}
        except tm.Error as error:
            sequence.outcome = failure(error)

    # ---- both ---------------------------------------------------------------------------------------------------
    def settled(self, name: str) -> list[dict] | None:
        """What came of `finish` or `receive`: one outcome a rank when all are done, or the first that says
        "error" as soon as there is one; None before."""
        outcomes = self.group.gather(self._sequences[name].outcome)
        if failed := _first_error(outcomes):
            return [failed]
        return None if None in outcomes else outcomes

    def here(self, name: str) -> dict | None:
        """Not a call: this rank's own outcome, so that the others need not be asked before there is one."""
        sequence = self._sequences[name]
        if sequence.outcome is None and sequence.push is not None and sequence.push.error is not None:
            sequence.outcome = failure(sequence.push.error)
        return sequence.outcome

    @torch.inference_mode()
    def decode(self, names: list[str], tokens: list[int]) -> list[int]:
        """Runs the newest token of each of some sequences in one batch; rank 0 returns their next tokens."""
        sequences = [self._sequences[name] for name in names]
        lengths = [sequence.length for sequence in sequences]
        cache = PagedCache(self.kv, [sequence.pages for sequence in sequences], lengths, 1)
        hidden = forward(self.model, cache, [[token] for token in tokens])
        for sequence in sequences:
            sequence.length += 1
        self.counters.tokens_run += len(names)
        self.counters.steps += 1
        self.counters.largest_batch = max(self.counters.largest_batch, len(names))
        return self.model.lm_head(hidden).argmax(-1).tolist() if self.group.rank == 0 else []

    def release(self, name: str, answer: list[int] | None = None) -> None:
        """The sequence is over, wherever it stands. With its `answer`, the full pages that hold it (and what of the
        prompt is new) go to the pool, so that the next turn of the conversation finds them. A thread does that, waits
        until nobody else reads or writes the pages, and frees them."""
        sequence = self._sequences.pop(name, None)
        if sequence is not None:
            self._beside(self._release, sequence, answer)

    def _release(self, sequence: KVSequence, answer: list[int] | None) -> None:
        if sequence.push is not None and sequence.outcome is None:
            sequence.push.cancel()
        if sequence.receive is not None:
            sequence.receive.cancel()
        if sequence.load is not None:
            sequence.load.end()
        if sequence.moving is not None:
            sequence.moving.result()
        if sequence.push is not None and sequence.push.state == "pending":  # opened since, or never finished
            sequence.push.cancel()
        if sequence.receive is not None and sequence.receive.state != "done":
            return  # the session has given the pages back
        if answer is not None and sequence.pool is self.pool:  # an answer that new weights came into is not stored
            tokens = (sequence.prompt + answer)[: sequence.length]
            first = sequence.reused if sequence.receive is None else len(sequence.prompt) // self.kv.layout.page_size
            sequence.pool.store(tokens, sequence.pages, sequence.cache_salt, first)
        self.allocator.free(sequence.pages)

    def _beside(self, work: Callable[..., None], *args: Any) -> Future:
        """On a thread. An error that is not the library's is a bug: this process ends of it, and is replaced."""

        def run() -> None:
            try:
                work(*args)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            self._moved()

        return self._threads.submit(run)

    def stats(self) -> list[dict]:
        """Of every rank."""
        return self.group.gather(
            {
                "pid": os.getpid(),
                "pages_available": self.allocator.available,
                "pages_quarantined": self.allocator.quarantined,
                "sequences": len(self._sequences),
                "counters": asdict(self.counters),
                "stores_refused": sum(part.stats.stores_refused for part in self.pool.parts),
                "loads_failed": self.pool.loads_failed,
                "engine_stats": self.engine.stats(),
            }
        )

    def close(self) -> None:
        for name in list(self._sequences):
            self.release(name)
        self._threads.shutdown()
        self._sender.close()
        self._receiver.close()


class Ranks:
    """Rank 0's hold on all of them: a call is broadcast, and made here as well. A rank that has died shows as
    torch.distributed's DistBackendError. Used by one thread."""

    def __init__(self, rank: Rank) -> None:
        self.first = rank

    def call(self, name: str, *args: Any) -> Any:
        """Returns what rank 0's call does."""
        self.first.group.broadcast([name, args])
        return getattr(self.first, name)(*args)


def follow(rank: Rank) -> None:
    """What the other ranks do until they are told to close."""
    name = ""
    while name != "close":
        name, args = rank.group.broadcast()
        getattr(rank, name)(*args)


def failure(error: tm.Error) -> dict:
    return {"error": {"type": type(error).__name__, "message": str(error)}}


def _attempt(call: Callable[[], dict]) -> dict:
    try:
        return call()
    except tm.Error as error:
        return failure(error)


def _first_error(outcomes: Iterable[dict | None]) -> dict | None:
    return next((outcome for outcome in outcomes if outcome is not None and "error" in outcome), None)
