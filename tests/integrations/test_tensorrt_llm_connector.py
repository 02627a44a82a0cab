"""The TensorRT-LLM connector under a host of our own that calls it in the documented order, with CPU tensors.

TensorRT-LLM itself cannot be installed here: this is the connector's logic, its keys and its failures, not a run of it.
"""

from __future__ import annotations

import abc
import hashlib
import importlib.util
import os
import threading
import time
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lost import lose_node
from processes import PoolEnv, eventually

import torch_mooncake as tm
from torch_mooncake.integrations.tensorrt_llm.connector import check_signatures
from torch_mooncake.integrations.tensorrt_llm.scheduler import Scheduler
from torch_mooncake.integrations.tensorrt_llm.settings import salt_of
from torch_mooncake.integrations.tensorrt_llm.worker import Worker

TOKENS, LAYERS, ELEMENTS = 4, 3, 24


class Base:
    """What the host's base classes do: keep the arguments, and a step's metadata."""

    def __init__(self, llm_args: Any) -> None:
        self._metadata: Any = None

    def bind_connector_meta(self, metadata: Any) -> None:
        self._metadata = metadata

    def get_connector_meta(self) -> Any:
        return self._metadata


class HostScheduler(Scheduler, Base):
    pass


class HostWorker(Worker, Base):
    pass


@dataclass
class RequestData:
    request_id: int
    new_tokens: list[int]
    new_block_ids: list[int]
    computed_position: int
    num_scheduled_tokens: int
    cache_salt: str | None = None
    new_block_ids_by_layer_group: list[list[int]] = field(default_factory=list)


@dataclass
class SchedulerOutput:
    new_requests: list[RequestData] = field(default_factory=list)
    cached_requests: list[RequestData] = field(default_factory=list)


class Request:
    def __init__(self, request_id: int, tokens: list[int], salt: str | None = None, lora: int | None = None) -> None:
        self.request_id, self._tokens, self.cache_salt, self.lora_task_id = request_id, tokens, salt, lora

    def get_tokens(self, beam: int) -> list[int]:
        return self._tokens


def content(tokens: list[int], rank: int) -> torch.Tensor:
    """What a "model" puts into the block that ends these tokens: it depends on all of them."""
    seed = int.from_bytes(hashlib.sha256(repr((tokens, rank)).encode()).digest()[:6], "little")
    return torch.randn(LAYERS, 2, ELEMENTS, generator=torch.Generator().manual_seed(seed))


class Host:
    """One server: a scheduler, and a worker for each rank with a cache of its own."""

    def __init__(self, blocks: int = 32, ranks: int = 1, model: str = "org/m", group_pages: bool = False) -> None:
        args = SimpleNamespace(
            model=model, tensor_parallel_size=ranks, kv_cache_config=SimpleNamespace(tokens_per_block=TOKENS)
        )
        self.scheduler = HostScheduler(args)
        self.workers = [HostWorker(args, rank) for rank in range(ranks)]
        self.caches = [torch.zeros(blocks, LAYERS, 2, ELEMENTS) for _ in range(ranks)]
        self.grouped, self.asynchronous = group_pages, os.environ.get("TM_TRTLLM_ASYNC") == "1"
        for worker, cache in zip(self.workers, self.caches, strict=True):
            if group_pages:  # two layer groups over the same pool: layer 0, and the others
                page, item = LAYERS * 2 * ELEMENTS * 4, 2 * ELEMENTS * 4
                regions = [
                    SimpleNamespace(base=cache.data_ptr(), stride=page, size=item, buffers=[(0, "kv")]),
                    SimpleNamespace(base=cache.data_ptr() + item, stride=page, size=page - item, buffers=[(1, "kv")]),
                ]
                groups = [SimpleNamespace(regions=[region]) for region in regions]
                worker.register_kv_cache_layout(SimpleNamespace(groups=groups, tokens_per_block=TOKENS))
            else:
                worker.register_kv_caches(cache)
        self.free = list(range(blocks))
        self.computed: list[int] = []  # tokens that had to be computed, of each request

    def run(self, request: Request, chunk: int | None = None) -> list[int]:
        """Prefill one request in steps of ``chunk`` tokens; the blocks it has afterwards."""
        tokens = request.get_tokens(0)
        matched, later = self.scheduler.get_num_new_matched_tokens(request, 0)
        assert later is (self.asynchronous and matched > 0)
        assert matched % TOKENS == 0
        assert matched < len(tokens)
        blocks = [self.free.pop() for _ in range(-(-len(tokens) // TOKENS))]
        pages = [blocks, blocks] if self.grouped else [blocks]
        if self.grouped:
            self.scheduler.update_state_after_alloc_by_layer_group(request, pages)
        else:
            self.scheduler.update_state_after_alloc(request, blocks)
        self.computed.append(len(tokens) - matched)
        if later:
            self.park(request.request_id)
        position, first = matched, True
        while position < len(tokens):
            count = min(chunk or len(tokens), len(tokens) - position)
            data = RequestData(request.request_id, tokens if first else [], blocks if first else [], position, count)
            if self.grouped:
                data.new_block_ids_by_layer_group = pages if first else [[], []]
            output = SchedulerOutput([data], []) if first else SchedulerOutput([], [data])
            self.step(self.scheduler.build_connector_meta(output), tokens, blocks, position, count)
            position, first = position + count, False
        return blocks

    def park(self, number: int) -> None:
        """The request waits aside: it is in no step until all workers have said that its blocks are there."""
        metadata = self.scheduler.build_connector_meta(SchedulerOutput())
        for worker in self.workers:
            worker.bind_connector_meta(metadata)
            worker.start_load_kv(None)
        done: list[list[int]] = [worker.get_finished([], [number])[1] for worker in self.workers]
        for some, worker in zip(done, self.workers, strict=True):
            assert eventually(lambda some=some, worker=worker: some or some.extend(worker.get_finished([], [])[1]))
        assert done == [[number]] * len(self.workers)

    def step(self, metadata: Any, tokens: list[int], blocks: list[int], position: int, count: int) -> None:
        for rank, worker in enumerate(self.workers):
            worker.bind_connector_meta(metadata)
            worker.start_load_kv(None)
            for layer in range(LAYERS):
                worker.wait_for_layer_load(layer, None)
                for index in range(position // TOKENS, (position + count) // TOKENS):
                    self.caches[rank][blocks[index], layer] = content(tokens[: (index + 1) * TOKENS], rank)[layer]
                worker.save_kv_layer(layer, None)
            worker.wait_for_save(None)
            assert worker.get_finished([], []) == ([], [])

    def holds(self, request: Request, blocks: list[int]) -> bool:
        tokens = request.get_tokens(0)
        return all(
            torch.equal(cache[blocks[i]], content(tokens[: (i + 1) * TOKENS], rank))
            for rank, cache in enumerate(self.caches)
            for i in range(len(tokens) // TOKENS)
        )

    def finish(self, request: Request, blocks: list[int]) -> None:
        if self.scheduler.request_finished(request, blocks):
            for worker in self.workers:
                assert worker.get_finished([request.request_id], []) == ([request.request_id], [])
        self.free += blocks

    def close(self) -> None:
        self.scheduler.close()
        for worker in self.workers:
            worker.close()


@pytest.fixture
def host(pool_env: PoolEnv) -> Any:
    made: list[Host] = []

    def create(**options: Any) -> Host:
        made.append(Host(**options))
        return made[-1]

    yield create
    for each in made:
        each.close()


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("aside", ["0", "1"])
def test_another_server_starts_from_what_one_has_computed(
    host: Any, ranks: int, grouped: bool, aside: str, monkeypatch: pytest.MonkeyPatch
):
    """V1 and V2, loaded before the step or aside."""
    monkeypatch.setenv("TM_TRTLLM_ASYNC", aside)
    prefill, decode = (host(ranks=ranks, group_pages=grouped) for _ in range(2))
    tokens = list(range(100, 122))
    prefill.finish(first := Request(1, tokens), prefill.run(first))
    request = Request(7, tokens)
    blocks = decode.run(request)
    assert decode.holds(request, blocks)
    assert decode.computed == [len(tokens) - 20]
    longer = Request(8, [*tokens[:18], *range(10)])
    blocks = decode.run(longer)
    assert decode.holds(longer, blocks)
    assert decode.computed[-1] == 28 - 16


def test_chunks_of_a_prefill_are_saved_as_they_fill(host: Any):
    server, other = host(), host()
    request = Request(1, list(range(30)))
    assert server.holds(request, server.run(request, chunk=7))
    again = Request(2, list(range(30)))
    assert other.holds(again, other.run(again))
    assert other.computed == [30 - 28]


def test_the_last_token_is_always_computed(host: Any):
    server = host()
    for number in (1, 2):
        request = Request(number, list(range(16)))
        assert server.holds(request, server.run(request))
    assert server.computed == [16, 4]


def test_salt_and_lora_and_tenant_are_kept_apart(host: Any, monkeypatch: pytest.MonkeyPatch):
    server, tokens = host(blocks=64), list(range(20))
    for number, options in enumerate(({}, {"salt": "a"}, {"salt": "b"}, {"lora": 3}, {"salt": "a", "lora": 3})):
        request = Request(number, tokens, **options)
        server.run(request)
        assert server.computed[-1] == 20, options
        server.run(Request(100 + number, tokens, **options))
        assert server.computed[-1] == 4, options
    monkeypatch.setenv("TM_TRTLLM_NAMESPACE", "tenant")
    tenant = host()
    tenant.run(Request(1, tokens))
    assert tenant.computed == [20]


def test_a_request_whose_salt_cannot_be_seen_shares_nothing(host: Any):
    server = host()
    for number in (1, 2):
        request = Request(number, list(range(20)))
        del request.cache_salt
        server.run(request)
    assert server.computed == [20, 20]
    assert all(key.endswith("/layout") for key in tm.init().keys("tensorrt_llm/"))
    tm.close()


def test_an_id_that_comes_again_is_a_new_request(host: Any):
    server = host()
    first = Request(5, list(range(20)))
    server.finish(first, server.run(first))
    second = Request(5, list(range(50, 70)))
    assert server.holds(second, server.run(second))
    third = Request(5, list(range(20)))  # the one before was never finished: preempted, say
    assert server.holds(third, server.run(third))


def test_a_corrupted_block_is_loaded_as_it_is(host: Any):
    """The negative control: what is in the pool is what is used."""
    server, other = host(), host()
    request = Request(1, list(range(20)))
    server.run(request)
    pool = tm.init()
    settings = server.scheduler._settings
    (key,) = settings.keys(settings.hashes(list(range(20)), salt_of(request) or "")[:1])
    size = pool.info(key).nbytes
    pool.delete(key)
    pool.put(key, bytes(size))
    again = Request(2, list(range(20)))
    assert not other.holds(again, other.run(again))
    tm.close()


def test_another_layout_is_said_at_registration(host: Any):
    host()
    with pytest.raises(tm.LayoutMismatch, match="TM_TRTLLM_NAMESPACE"):
        host(group_pages=True)


def test_a_lost_block_fails_the_load_and_a_lost_pool_is_a_miss(host: Any, pool_env: PoolEnv, monkeypatch: Any):
    monkeypatch.setenv("TM_TRTLLM_TIMEOUT_S", "2")
    server, other = host(), host()
    server.run(Request(1, list(range(20))))
    request = Request(2, list(range(20)))
    assert other.scheduler.get_num_new_matched_tokens(request, 0) == (16, False)
    other.scheduler.update_state_after_alloc(request, [0, 1, 2, 3, 4])
    made = other.scheduler.build_connector_meta(
        SchedulerOutput([RequestData(2, list(range(20)), [0, 1, 2, 3, 4], 16, 4)])
    )
    pool = tm.init()
    pool.delete(pool.keys("tensorrt_llm/"))
    other.workers[0].bind_connector_meta(made)
    with pytest.raises(tm.KeyNotFound):
        other.workers[0].start_load_kv(None)
    tm.close()
    lose_node(pool_env, lambda: server.scheduler.get_num_new_matched_tokens(Request(8, list(range(20))), 0)[0])
    started = time.monotonic()
    assert server.scheduler.get_num_new_matched_tokens(Request(9, list(range(20))), 0) == (0, False)
    assert time.monotonic() - started < 20


def test_a_load_aside_that_fails_is_raised_when_it_is_asked_for(host: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TM_TRTLLM_ASYNC", "1")
    server, other = host(), host()
    server.run(Request(1, list(range(20))))
    request, later = Request(2, list(range(20))), Request(3, list(range(20)))
    for number, each in enumerate((request, later)):
        assert other.scheduler.get_num_new_matched_tokens(each, 0) == (16, True)
        other.scheduler.update_state_after_alloc(each, [5 * number + i for i in range(3)])  # fewer than were offered
    other.scheduler.request_finished(later, [])  # cancelled before it was begun
    made = other.scheduler.build_connector_meta(SchedulerOutput())
    assert [(number, len(loads)) for number, loads in made.aside] == [(2, 3)]
    pool = tm.init()
    pool.delete(pool.keys("tensorrt_llm/"))
    worker = other.workers[0]
    worker.bind_connector_meta(made)
    worker.start_load_kv(None)
    asked = iter([[2]])
    with pytest.raises(tm.KeyNotFound):
        eventually(lambda: worker.get_finished([], next(asked, []))[1])
    assert worker.get_finished([7], []) == ([7], [])
    tm.close()


def test_blocks_of_a_request_that_ends_during_its_load_are_kept_until_it_is_over(
    host: Any, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("TM_TRTLLM_ASYNC", "1")
    server, other = host(), host()
    server.run(Request(1, list(range(20))))
    request = Request(2, list(range(20)))
    assert other.scheduler.get_num_new_matched_tokens(request, 0) == (16, True)
    other.scheduler.update_state_after_alloc(request, [0, 1, 2, 3, 4])
    worker, gate = other.workers[0], threading.Event()
    load = worker._load

    def later(loads: Any, before: Any = None) -> None:
        if loads:
            assert gate.wait(20)
        load(loads, before)

    worker._load = later
    worker.bind_connector_meta(other.scheduler.build_connector_meta(SchedulerOutput()))
    worker.start_load_kv(None)
    assert worker.get_finished([], [2]) == ([], [])
    assert other.scheduler.request_finished(request, [0, 1, 2, 3, 4])
    assert worker.get_finished([2, 9], []) == ([9], [])
    gate.set()
    said: list[Any] = []
    assert eventually(lambda: said.append(worker.get_finished([], [])) or said[-1][0])
    assert said[-1] == ([2], [2])
    assert worker.get_finished([], []) == ([], [])


def test_a_model_has_one_name_wherever_it_lies(host: Any):
    server, other = host(model="/here/m"), host(model="/there/m/")
    server.run(Request(1, list(range(20))))
    request = Request(2, list(range(20)))
    assert other.holds(request, other.run(request))
    assert other.computed == [4]


class Theirs(abc.ABC):
    @abc.abstractmethod
    def one(self, a: int, b: int) -> None: ...

    @abc.abstractmethod
    def two(self, stream: Any) -> None: ...


def test_another_interface_is_said():
    class Fits:
        def one(self, a: int, b: int) -> None: ...

        def two(self, stream: Any) -> None: ...

    class Differs:
        def one(self, a: int) -> None: ...

    check_signatures(Theirs, Fits)
    with pytest.raises(tm.Unsupported, match=r"one\(a, b\) is one\(a\) here; two is missing"):
        check_signatures(Theirs, Differs)


def test_the_classes_are_there_with_tensorrt_llm_and_say_that_it_is_not():
    from torch_mooncake.integrations import tensorrt_llm

    if importlib.util.find_spec("tensorrt_llm") is not None:  # the signature check runs with the import
        assert issubclass(tensorrt_llm.PoolConnectorWorker, Worker)
        assert issubclass(tensorrt_llm.PoolConnectorScheduler, Scheduler)
    else:
        with pytest.raises(ModuleNotFoundError, match="tensorrt_llm"):
            _ = tensorrt_llm.PoolConnectorWorker
