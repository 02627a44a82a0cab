"""A host that does to the vLLM connectors what vLLM's scheduler and workers do, in their order, on small CPU caches.

It needs no vLLM. Its "model" fills each token's keys and values with numbers that depend on all tokens up to it, its
layer and its head, so that what is in a block says whether the right prompt's block is there.
"""

from __future__ import annotations

import hashlib
import itertools
import struct
import time
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch

from torch_mooncake.integrations.vllm.pd_scheduler import PDScheduler
from torch_mooncake.integrations.vllm.pd_worker import PDWorker
from torch_mooncake.integrations.vllm.pool_scheduler import PoolScheduler
from torch_mooncake.integrations.vllm.pool_worker import PoolWorker
from torch_mooncake.integrations.vllm.settings import Settings, make_pool

BLOCK, LAYERS, HEADS, CONTENT, BLOCKS = 4, 3, 6, 8, 40
NAMES = [f"model.layers.{layer}.self_attn.attn" for layer in range(LAYERS)]


class FullAttentionSpec:
    """Named as vLLM's."""


class SlidingWindowSpec:
    """Likewise."""


def config(
    *,
    tp: int = 1,
    role: str = "kv_both",
    policy: str = "recompute",
    groups: tuple[type, ...] = (FullAttentionSpec,),
    pp: int = 1,
    **extra: Any,
) -> tuple[Any, Any]:
    """(what the connectors read of a VllmConfig, of a KVCacheConfig)."""
    transfer = SimpleNamespace(
        kv_connector_extra_config={"model": "a-model"} | extra,
        kv_load_failure_policy=policy,
        is_kv_producer=role in ("kv_producer", "kv_both"),
        is_kv_consumer=role in ("kv_consumer", "kv_both"),
    )
    vllm_config = SimpleNamespace(
        model_config=SimpleNamespace(model="a/model", use_mla=False, hf_config=None),
        cache_config=SimpleNamespace(block_size=BLOCK),
        parallel_config=SimpleNamespace(tensor_parallel_size=tp, pipeline_parallel_size=pp),
        kv_transfer_config=transfer,
    )
    return vllm_config, SimpleNamespace(
        kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec()) for spec in groups], hash_block_size=BLOCK
    )


def content(tokens: list[int], layer: int) -> torch.Tensor:
    """[HEADS, CONTENT] of the last of ``tokens``."""
    seed = hashlib.sha256(struct.pack(f"<{len(tokens) + 1}q", layer, *tokens)).digest()
    return torch.randn(HEADS, CONTENT, generator=torch.Generator().manual_seed(int.from_bytes(seed[:6], "little")))


@dataclass
class Request:
    request_id: str
    prompt_token_ids: list[int] | None
    kv_transfer_params: dict[str, Any] | None = None
    cache_salt: str | None = None
    num_preemptions: int = 0
    lora_request: Any = None
    mm_features: list[Any] = field(default_factory=list)
    prompt_embeds: Any = None
    status: Any = field(default_factory=lambda: SimpleNamespace(name="FINISHED_LENGTH_CAPPED"))

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_token_ids or ())

    num_prompt_tokens = num_tokens

    @property
    def block_hashes(self) -> list[bytes]:
        """As vLLM's: each covers what is before it, and the salt."""
        hashes, last = [], repr(self.cache_salt).encode()
        tokens = self.prompt_token_ids or []
        for start in range(0, len(tokens) - BLOCK + 1, BLOCK):
            last = hashlib.sha256(last + repr(tokens[start : start + BLOCK]).encode()).digest()
            hashes.append(last)
        return hashes


def output(**what: Any) -> Any:
    """A SchedulerOutput in which nothing happens but ``what``."""
    cached = SimpleNamespace(req_ids=[], resumed_req_ids=set(), new_block_ids=[], num_computed_tokens=[])
    nothing = {
        "scheduled_new_reqs": [],
        "scheduled_cached_reqs": cached,
        "num_scheduled_tokens": {},
        "preempted_req_ids": set(),
        "finished_req_ids": set(),
    }
    return SimpleNamespace(**{**nothing, **what})


class Host:
    """An engine: a scheduler's half, and a worker's half a rank, each with its caches."""

    _numbers = itertools.count()

    def __init__(self, kind: str, *, tp: int = 1, order: str = "LBHNC", probe: str = "same", **options: Any) -> None:
        vllm_config, cache_config = config(tp=tp, **options)
        settings = Settings.of(vllm_config, cache_config)
        transfer = vllm_config.kv_transfer_config
        sends, receives = transfer.is_kv_producer, transfer.is_kv_consumer
        self.tp = tp
        self.kind = kind
        self.schedulers: Any
        self.workers: list[Any]
        if kind == "pd":
            self.scheduler: Any = PDScheduler(settings, sends=sends, receives=receives)
            self.workers = [PDWorker(settings, rank, sends=sends, receives=receives) for rank in range(tp)]
        else:
            pool = make_pool(settings.extra)
            self.scheduler = PoolScheduler(settings, pool, lambda: probe, loads=receives, saves=sends)
            self.workers = [PoolWorker(settings, rank, lambda: make_pool(settings.extra)) for rank in range(tp)]
        self.caches = [_cache(HEADS // tp, order) for _ in range(tp)]
        for worker, caches in zip(self.workers, self.caches, strict=True):
            worker.register(caches)
        places = {rank: worker.place() for rank, worker in enumerate(self.workers)}
        self.scheduler.places({rank: place for rank, place in places.items() if place is not None})
        self.free = list(range(1, BLOCKS))  # 0 is vLLM's null block
        self.held: dict[str, list[int]] = {}
        self.sent: dict[str, int] = {}
        self.received: dict[str, int] = {}
        self.failed: set[int] = set()
        self.finished_ids: set[str] = set()
        self.ended: set[str] = set()  # requests
        self.loads: list[str] = []  # requests whose blocks came from elsewhere

    # ---- a step

    def step(self, request: Request | None = None, computed: int = 0, count: int = 0, new: bool = True, **what: Any):
        """One step of scheduler and workers, which computes ``count`` tokens of the request behind ``computed``."""
        if request is not None and count:
            blocks = self.held[request.request_id]
            what["num_scheduled_tokens"] = {request.request_id: count}
            if new:
                described = SimpleNamespace(
                    req_id=request.request_id, block_ids=(blocks,), num_computed_tokens=computed
                )
                what["scheduled_new_reqs"] = [described]
            else:
                what["scheduled_cached_reqs"] = SimpleNamespace(
                    req_ids=[request.request_id],
                    resumed_req_ids=set(),
                    new_block_ids=[None],
                    num_computed_tokens=[computed],
                )
        finished, self.finished_ids = self.finished_ids, set()
        meta = self.scheduler.build(output(finished_req_ids=finished, **what))
        for worker in self.workers:
            worker.preempted(meta)
            if self.kind == "pd":
                worker.begin(meta)
        for layer, name in enumerate(NAMES if count else ()):
            for rank, worker in enumerate(self.workers):
                self._compute(rank, layer, request, computed, count)
                if self.kind == "pd":
                    worker.layer(name)
        for worker in self.workers:
            worker.load(meta)
            worker.end() if self.kind == "pd" else worker.save(meta)
        over, sent_now = set(), []
        for worker in self.workers:
            sent, received = worker.results(finished)
            self.failed |= worker.failed_blocks()
            for names, counts in ((sent, self.sent), (received, self.received)):
                for name in names:
                    counts[name] = counts.get(name, 0) + 1
                    assert counts[name] <= self.tp, f"{name} was reported twice"
            over |= {name for name in received if self.received[name] == self.tp}
            sent_now += [name for name in sent if self.sent[name] == self.tp]
        if over:
            self.scheduler.received(over)
        for name in [name for name in over if name in self.ended]:  # as vLLM does: at the first report, and only then
            self._give_back(name)
        for name in sent_now:
            self._give_back(name)

    def _compute(self, rank: int, layer: int, request: Any, computed: int, count: int) -> None:
        cache, blocks = self.caches[rank][NAMES[layer]], self.held[request.request_id]
        heads = slice(rank * HEADS // self.tp, (rank + 1) * HEADS // self.tp)
        for at in range(computed, computed + count):
            cache[blocks[at // BLOCK], :, at % BLOCK] = content(request.prompt_token_ids[: at + 1], layer)[heads]

    # ---- a request

    def ask(self, request: Request, computed: int = 0, within: float = 20) -> int:
        """Tokens that come from elsewhere; asks until the connector knows."""
        end = time.monotonic() + within
        while True:
            matched, asynchronous = self.scheduler.matched(request, computed)
            if matched is not None:
                assert asynchronous == (matched > 0)
                return matched
            assert time.monotonic() < end, "the connector never knew"
            self.step()
            time.sleep(0.005)

    def allocate(self, request: Request, external: int = 0) -> list[int]:
        count = -(-request.num_tokens // BLOCK)
        self.held[request.request_id] = [self.free.pop() for _ in range(count)]
        self.scheduler.allocated(request, list(self.held[request.request_id]), external)
        return self.held[request.request_id]

    def start(self, request: Request) -> int:
        """Up to where vLLM waits for the request's blocks, or schedules it: tokens that come from elsewhere."""
        external = self.ask(request)
        self.allocate(request, external)
        if external:
            self.step()
        return external

    def wait(self, request: Request, within: float = 20) -> int:
        """Steps until its blocks have come or failed: how many tokens are right, as vLLM counts them."""
        self.until(lambda: self.received.get(request.request_id) == self.tp, within)
        blocks = self.held[request.request_id]
        bad = [index for index, block in enumerate(blocks) if block in self.failed]
        return min(bad[0] * BLOCK if bad else request.num_tokens, request.num_tokens - 1)

    def compute(self, request: Request, computed: int = 0, chunk: int = 1000) -> None:
        """The prompt's tokens behind ``computed``, in steps of ``chunk``."""
        first = True
        while computed < request.num_tokens:
            count = min(chunk, request.num_tokens - computed)
            self.step(request, computed, count, new=first)
            computed, first = computed + count, False

    def finish(self, request: Request, how: str = "FINISHED_LENGTH_CAPPED") -> dict[str, Any] | None:
        request.status = SimpleNamespace(name=how)
        waiting = request.request_id in self.loads and self.received.get(request.request_id, 0) < self.tp
        ended = self.scheduler.finished(request)
        held, params = ended if isinstance(ended, tuple) else (ended, None)
        self.finished_ids.add(request.request_id)
        self.ended.add(request.request_id)
        if not held and not waiting:
            self._give_back(request.request_id)
        return params

    def serve(self, request: Request, chunk: int = 1000) -> tuple[int, dict[str, Any] | None]:
        """All of it: (tokens that were not computed, what the answer says)."""
        external = self.start(request)
        computed = 0
        if external:
            computed = min(self.wait(request), external)
        self.compute(request, computed, chunk)
        self.check(request)
        return computed, self.finish(request)

    def check(self, request: Request) -> None:
        """Its blocks hold what the model makes of its tokens."""
        wrong = self.wrong(request)
        assert not wrong, f"wrong tokens: {wrong}"

    def wrong(self, request: Request) -> list[int]:
        blocks, bad = self.held[request.request_id], set()
        for layer, name in enumerate(NAMES):
            for at in range(request.num_tokens):
                expected = content(request.prompt_token_ids[: at + 1], layer)  # type: ignore[index]
                found = torch.cat([caches[name][blocks[at // BLOCK], :, at % BLOCK] for caches in self.caches])
                if not torch.equal(found, expected):
                    bad.add(at)
        return sorted(bad)

    def until(self, reached: Any, within: float = 20) -> None:
        """Empty steps until ``reached()``."""
        end = time.monotonic() + within
        while not reached():
            assert time.monotonic() < end, "it never came"
            self.step()
            time.sleep(0.005)

    def _give_back(self, name: str) -> None:
        self.free += self.held.pop(name)

    @property
    def all_free(self) -> bool:
        return len(self.free) == BLOCKS - 1

    def close(self) -> None:
        for worker in self.workers:
            worker.close()
        if self.kind != "pd":
            self.scheduler.close()


def _cache(heads: int, order: str) -> dict[str, torch.Tensor]:
    """Views [B, H, N, C] a layer, of memory that lies as ``order`` says."""
    sizes = {"L": LAYERS, "B": BLOCKS, "H": heads, "N": BLOCK, "C": CONTENT}
    memory = torch.full([sizes[axis] for axis in order], float("nan"))
    logical = memory.permute([order.index(axis) for axis in "LBHNC"])
    return {name: logical[layer] for layer, name in enumerate(NAMES)}
