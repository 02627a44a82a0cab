"""The vLLM connectors under a host that calls them as vLLM does, with CPU tensors. For vLLM itself: see vllm/."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lost import lose_node
from processes import Child, PoolEnv, eventually, stop
from vllm_host import BLOCK, HEADS, LAYERS, FullAttentionSpec, Host, Request, SlidingWindowSpec, config

import torch_mooncake as tm
from torch_mooncake.integrations.vllm.door import Door, Line, call, split_address
from torch_mooncake.integrations.vllm.encoder_cache import EncoderOutputs, Fetcher, take
from torch_mooncake.integrations.vllm.pd_decode import HostPages
from torch_mooncake.integrations.vllm.pd_orders import prompt_digest
from torch_mooncake.integrations.vllm.pd_transfer import Ask
from torch_mooncake.integrations.vllm.pool_orders import PoolMeta
from torch_mooncake.integrations.vllm.settings import Settings
from torch_mooncake.kv import PrefixStore

PROMPT = [(7 * i * i + 3 * i) % 509 for i in range(22)]  # five full blocks and a half one
Make = Callable[..., Host]


@pytest.fixture
def make(pool_env: PoolEnv) -> Iterator[Make]:
    """Hosts that are closed before the test's pool is."""
    made: list[Host] = []

    def host(*args: Any, **options: Any) -> Host:
        made.append(Host(*args, **options))
        return made[-1]

    yield host
    for each in made:
        each.close()


def to_decode(params: dict[str, Any] | None) -> dict[str, Any]:
    assert params is not None
    return params


def asks(host: Host, transfer: str) -> dict[str, Any]:
    """What a proxy tells a decode engine before prefill has answered."""
    return {
        "do_remote_prefill": True,
        "transfer_id": transfer,
        "remote": [worker.prefill.place.address for worker in host.workers],
    }


def sends(transfer: str | None = None) -> dict[str, Any]:
    return {"do_remote_decode": True, **({"transfer_id": transfer} if transfer else {})}


def early(host: Host) -> int:
    return sum(worker.prefill.pushed_early for worker in host.workers)


def opened(host: Host, transfer: str) -> bool:
    """Whether all ranks' sessions are open."""
    found = [worker.prefill._transfers.get(transfer) for worker in host.workers]
    return all(each is not None and each.session is not None for each in found)


# ---- prefill and decode


@pytest.mark.parametrize(
    ("prefill_tp", "decode_tp", "order"), [(1, 1, "LBHNC"), (3, 1, "BLNHC"), (1, 3, "LBNHC"), (2, 2, "LHBNC")]
)
def test_prompt_is_pushed_after_prefill(make: Make, prefill_tp: int, decode_tp: int, order: str):
    prefill = make("pd", tp=prefill_tp, role="kv_producer")
    decode = make("pd", tp=decode_tp, role="kv_consumer", order=order)
    computed, params = prefill.serve(Request("p", PROMPT, sends()))
    assert computed == 0
    assert not prefill.all_free  # held until it is sent
    request = Request("d", PROMPT, to_decode(params))
    assert decode.start(request) == len(PROMPT)
    assert decode.wait(request) == len(PROMPT) - 1
    decode.check(request)
    decode.finish(request)
    prefill.until(lambda: prefill.all_free)
    assert decode.all_free
    assert prefill.sent == {"p": prefill_tp}
    assert early(prefill) == 0


@pytest.mark.parametrize("chunk", [1000, 9])
def test_layers_are_pushed_while_the_next_are_computed(make: Make, chunk: int):
    prefill, decode = make("pd", tp=3, role="kv_producer"), make("pd", role="kv_consumer")
    wanted = Request("d", PROMPT, asks(prefill, "t"))
    decode.start(wanted)
    assert eventually(lambda: opened(prefill, "t"))
    prefill.serve(Request("p", PROMPT, sends("t")), chunk)
    decode.wait(wanted)
    decode.check(wanted)
    assert early(prefill) == 3 * LAYERS * -(-len(PROMPT) // min(chunk, len(PROMPT)))
    prefill.until(lambda: prefill.all_free)


def test_session_that_opens_within_a_step_gets_all_of_it(make: Make):
    prefill, decode = make("pd", role="kv_producer"), make("pd", role="kv_consumer")
    request, wanted = Request("p", PROMPT, sends("t")), Request("d", PROMPT, asks(prefill, "t"))
    layer = prefill.workers[0].layer

    def in_the_middle(name: str) -> None:
        if ".1." in name:
            decode.start(wanted)
            assert eventually(lambda: opened(prefill, "t"))
        layer(name)

    prefill.workers[0].layer = in_the_middle
    prefill.serve(request)
    decode.wait(wanted)
    decode.check(wanted)
    assert early(prefill) == LAYERS


def test_decode_rank_may_be_done_before_a_rank_that_does_not_feed_it_begins(make: Make):
    prefill, decode = make("pd", tp=2, role="kv_producer"), make("pd", tp=2, role="kv_consumer")
    late = prefill.workers[1].prefill
    advance, waiting = late._advance, []
    late._advance = waiting.append  # that rank's threads do nothing yet
    _, params = prefill.serve(Request("p", PROMPT, sends()))
    request = Request("d", PROMPT, to_decode(params))
    decode.start(request)
    decode.until(lambda: decode.received == {"d": 1})  # rank 0 has all it gets
    late._advance = advance
    assert eventually(lambda: len(waiting) >= 2)
    advance(waiting[-1])
    assert decode.wait(request) == len(PROMPT) - 1
    decode.check(request)
    prefill.until(lambda: prefill.all_free)


def test_decode_gets_what_it_does_not_have(make: Make):
    prefill, decode = make("pd", role="kv_producer"), make("pd", role="kv_consumer")
    _, params = prefill.serve(Request("p", PROMPT, sends()))
    request = Request("d", PROMPT, to_decode(params))
    assert decode.ask(request, 2 * BLOCK) == len(PROMPT) - 2 * BLOCK  # as with two blocks of its own
    decode.allocate(request, len(PROMPT) - 2 * BLOCK)
    decode.step()
    decode.wait(request)
    assert decode.wrong(request) == list(range(2 * BLOCK))
    prefill.until(lambda: prefill.all_free)


def test_many_requests_at_once(make: Make):
    prefill, decode = make("pd", role="kv_producer"), make("pd", role="kv_consumer")
    prompts = {f"{i}": [1000 + i, *PROMPT] for i in range(4)}
    wanted = {name: Request(f"d{name}", prompt, asks(prefill, name)) for name, prompt in prompts.items()}
    for request in wanted.values():
        decode.start(request)
    for name, prompt in prompts.items():
        prefill.serve(Request(f"p{name}", prompt, sends(name)))
    for request in wanted.values():
        decode.wait(request)
        decode.check(request)
        decode.finish(request)
    prefill.until(lambda: prefill.all_free)
    assert decode.all_free


def failed(decode: Host, request: Request, most: int = 0) -> None:
    """Its blocks are reported, but for those of the first ``most`` tokens that had come already, and computing them
    makes them right; it does not ask again."""
    right = decode.wait(request)
    assert right <= most
    assert decode.failed >= set(decode.held[request.request_id][most // BLOCK :])
    assert decode.ask(request) == 0
    decode.compute(request, right)
    decode.check(request)
    decode.finish(request)
    assert decode.all_free


def test_transfer_that_is_over_or_unknown(make: Make):
    prefill, decode = make("pd", role="kv_producer"), make("pd", role="kv_consumer", timeout_s=0.5)
    _, params = prefill.serve(Request("p", PROMPT, sends()))
    for name in ("d1", "d2"):  # the second time it is over
        request = Request(name, PROMPT, to_decode(params))
        decode.start(request)
        if name == "d1":
            decode.wait(request)
            decode.check(request)
            decode.finish(request)
        else:
            failed(decode, request)
    never = Request("d3", PROMPT, asks(prefill, "nobody's"))  # ends by its own deadline
    decode.start(never)
    failed(decode, never)


def test_other_prompt_other_life_and_nobody(make: Make, caplog: pytest.LogCaptureFixture):
    prefill, decode = make("pd", role="kv_producer"), make("pd", role="kv_consumer")
    _, params = prefill.serve(Request("p", PROMPT, sends()))
    other = Request("d1", [*PROMPT[:-1], 7], to_decode(params))
    decode.start(other)
    failed(decode, other)
    assert "another prompt" in caplog.text
    prefill.until(lambda: prefill.all_free)
    _, params = prefill.serve(Request("p2", PROMPT, sends()))
    restarted = Request("d2", PROMPT, {**to_decode(params), "incarnations": ["0" * 16]})
    decode.start(restarted)
    failed(decode, restarted)
    assert "restarted" in caplog.text
    with socket.create_server(("127.0.0.1", 0)) as listening:
        address = f"127.0.0.1:{listening.getsockname()[1]}"
        silent = Request("d3", PROMPT, {**asks(prefill, "t"), "remote": [address]})
        decode.start(silent)
        taken, _ = listening.accept()
        taken.close()  # it hangs up
        failed(decode, silent)
    nobody = Request("d4", PROMPT, {**asks(prefill, "t"), "remote": [address]})
    decode.start(nobody)
    failed(decode, nobody)
    assert "no prefill engine answers" in caplog.text
    wrong = Request("d5", PROMPT, {"do_remote_prefill": True, "transfer_id": "t"})
    assert decode.serve(wrong)[0] == 0


def test_prefill_of_another_model_is_refused(make: Make, caplog: pytest.LogCaptureFixture):
    """Of the same shape: its keys and values would fit."""
    prefill, decode = make("pd", role="kv_producer", model="one"), make("pd", role="kv_consumer", model="two")
    _, params = prefill.serve(Request("p", PROMPT, sends()))
    request = Request("d", PROMPT, to_decode(params))
    decode.start(request)
    failed(decode, request)
    assert "another prompt, or another model" in caplog.text


def test_prefill_is_aborted(make: Make):
    prefill, decode = make("pd", role="kv_producer"), make("pd", role="kv_consumer")
    request, wanted = Request("p", PROMPT, sends("t")), Request("d", PROMPT, asks(prefill, "t"))
    decode.start(wanted)
    assert eventually(lambda: opened(prefill, "t"))
    prefill.start(request)
    prefill.step(request, 0, 9)  # two blocks are on their way
    assert prefill.finish(request, "FINISHED_ABORTED") is None
    prefill.until(lambda: prefill.all_free)
    failed(decode, wanted, 2 * BLOCK)
    late = Request("d2", PROMPT, asks(prefill, "t"))
    decode.start(late)
    failed(decode, late)


def test_prefill_is_preempted(make: Make):
    prefill, decode = make("pd", role="kv_producer"), make("pd", role="kv_consumer")
    request, wanted = Request("p", PROMPT, sends("t")), Request("d", PROMPT, asks(prefill, "t"))
    decode.start(wanted)
    assert eventually(lambda: opened(prefill, "t"))
    prefill.start(request)
    prefill.step(request, 0, 9)
    prefill.step(preempted_req_ids={"p"})
    failed(decode, wanted, 2 * BLOCK)
    prefill.compute(request)
    assert prefill.finish(request) is None  # it has nothing to hand over any more
    prefill.until(lambda: prefill.all_free)


def test_decode_is_aborted_while_it_waits(make: Make):
    prefill, decode = make("pd", role="kv_producer"), make("pd", role="kv_consumer")
    wanted = Request("d", PROMPT, asks(prefill, "t"))
    decode.start(wanted)
    assert eventually(lambda: opened(prefill, "t"))
    decode.loads.append("d")
    decode.finish(wanted, "FINISHED_ABORTED")
    decode.until(lambda: decode.received == {"d": 1})
    assert not decode.failed  # nobody computes them
    prefill.serve(Request("p", PROMPT, sends("t")))
    prefill.until(lambda: prefill.all_free)


def test_decode_that_ends_before_it_has_blocks_lets_prefill_go(make: Make):
    prefill, decode = make("pd", role="kv_producer"), make("pd", role="kv_consumer")
    _, params = prefill.serve(Request("p", PROMPT, sends()))
    request = Request("d", PROMPT, to_decode(params))
    assert decode.ask(request) == len(PROMPT)
    decode.held["d"] = []
    decode.finish(request, "FINISHED_ABORTED")
    assert decode.scheduler.pending
    decode.step()
    assert not decode.scheduler.pending
    prefill.until(lambda: prefill.all_free)


def test_prefill_does_not_keep_what_nobody_fetches(make: Make):
    prefill = make("pd", role="kv_producer", hold_s=0.2)
    _, params = prefill.serve(Request("p", PROMPT, sends()))
    prefill.until(lambda: prefill.all_free)
    decode = make("pd", role="kv_consumer")
    late = Request("d", PROMPT, to_decode(params))
    decode.start(late)
    failed(decode, late)


def test_two_requests_of_one_transfer(make: Make, caplog: pytest.LogCaptureFixture):
    prefill, decode = make("pd", role="kv_producer"), make("pd", role="kv_consumer")
    prefill.serve(Request("p", PROMPT, sends("t")))
    prefill.serve(Request("p2", [5, *PROMPT], sends("t")))
    assert "another request's" in caplog.text
    request = Request("d", PROMPT, asks(prefill, "t"))
    decode.start(request)
    decode.wait(request)
    decode.check(request)
    prefill.until(lambda: prefill.all_free)


PREFILL = """
import sys; sys.path[:0] = paths
from vllm_host import Host, Request
host = Host("pd", role="kv_producer")
request = Request("p", prompt, {"do_remote_decode": True, "transfer_id": "t"})
host.start(request)
result = host.workers[0].prefill.place.address
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_prefill_dies_or_stands_still_in_the_middle(make: Make, how: signal.Signals):
    child = Child()
    try:
        paths = [str(Path(__file__).parent), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
        address = child(PREFILL, paths=paths, prompt=PROMPT)
        decode = make("pd", role="kv_consumer", timeout_s=30 if how == signal.SIGKILL else 3)
        request = Request("d", PROMPT, {"do_remote_prefill": True, "transfer_id": "t", "remote": [address]})
        decode.start(request)
        is_open = """
mine = host.workers[0].prefill._transfers.get("t")
result = mine is not None and mine.session is not None
"""
        assert eventually(lambda: child(is_open))
        child("host.step(request, 0, 9)")  # some of it is there
        if how == signal.SIGSTOP:
            stop(child.process.pid)
        else:
            child.process.kill()
        failed(decode, request, 2 * BLOCK)
    finally:
        child.process.kill()
        child.process.wait()


def test_settings_that_cannot_be_carried():
    two, window = (FullAttentionSpec, FullAttentionSpec), (SlidingWindowSpec,)
    for options in ({"groups": two}, {"groups": window}, {"pp": 2}):
        with pytest.raises(tm.Unsupported):
            Settings.of(*config(**options))
    vllm_config, cache_config = config()
    cache_config.hash_block_size = 2
    with pytest.raises(tm.Unsupported):
        Settings.of(vllm_config, cache_config)
    for wrong in (0, -1, "soon"):
        with pytest.raises(tm.InvalidArgument):
            Host("pd", timeout_s=wrong)


def test_digest_of_a_prompt():
    same = prompt_digest(Request("a", PROMPT), "m")
    assert same == prompt_digest(Request("b", list(PROMPT)), "m")
    others = [Request("c", PROMPT[:-1]), Request("d", PROMPT, cache_salt="x")]
    others.append(Request("e", PROMPT, lora_request=type("L", (), {"lora_name": "l"})))
    others.append(Request("f", PROMPT, mm_features=[type("F", (), {"identifier": "i"})]))
    assert len({same, prompt_digest(others[0], "m2"), *(prompt_digest(each, "m") for each in others)}) == 6
    assert prompt_digest(Request("g", None), "m") is None


def test_pages_of_the_host():
    pages = HostPages(8)
    with pytest.raises(tm.InvalidArgument):
        pages.take(1)
    pages.offer([3, 5])
    assert pages.take(2) == [3, 5]
    pages.quarantine([3])
    assert not pages.quiet([3, 5])
    assert pages.quiet([5])
    assert pages.quarantined == 1
    pages.release([3])
    assert pages.quiet([3, 5])


def test_door_takes_calls_of_its_token_only():
    heard: list[dict[str, Any]] = []
    gone = threading.Event()
    door = Door("127.0.0.1", 0, "secret", lambda line, message: heard.append(message), lambda line: gone.set())
    try:
        stranger = call(door.address, "other", {"kind": "ask"}, 5)
        assert gone.wait(5)
        assert eventually(lambda: stranger.heard() == [] and stranger.ended)
        friend = call(door.address, "secret", {"kind": "ask", "big": bytes(3 << 20)}, 5)
        assert eventually(lambda: heard)
        assert [message["kind"] for message in heard] == ["ask"]
        raw = socket.create_connection(split_address(door.address))
        raw.sendall((1 << 31).to_bytes(4, "little"))
        assert raw.recv(1) == b""  # hung up
        raw.close()
        for line in (stranger, friend):
            line.close()
        with pytest.raises(tm.InvalidArgument):
            Door("0.0.0.0", 0, "", lambda line, message: None, lambda line: None)
        for wrong in ("nowhere", "host:", "host:70000", ":80"):
            with pytest.raises(tm.InvalidArgument):
                split_address(wrong)
    finally:
        door.close()


def test_call_that_makes_an_error_ends_and_the_door_stays(caplog: pytest.LogCaptureFixture):
    heard: list[dict[str, Any]] = []

    def hear(line: Line, message: dict[str, Any]) -> None:
        heard.append({"odd": message["odd"]})

    door = Door("127.0.0.1", 0, "", hear, lambda line: None)
    odd = call(door.address, "", {"kind": "ask"}, 5)
    assert eventually(lambda: odd.heard() == [] and odd.ended)
    assert "a call made an error" in caplog.text
    friend = call(door.address, "", {"odd": 1}, 5)
    assert eventually(lambda: heard == [{"odd": 1}])
    for line in (odd, friend):
        line.close()
    door.close()


def test_call_for_a_prompt_is_taken_apart():
    said = {"rank": 0, "size": 1, "skip": 0, "ticket": b"t", "digest": b"d"}
    line: Any = object()
    assert Ask.of(line, said) == (0, Ask(line, b"t", 1, 0, b"d"))
    wrong: list[dict[str, Any]] = [{"ticket": 1 << 40}, {"digest": 7}, {"ticket": [1]}, {"rank": 1}, {"size": "two"}]
    for other in [{**said, **each} for each in wrong] + [{"rank": 0, "size": 1}, {**said, "skip": float("inf")}]:
        with pytest.raises(tm.InvalidArgument):
            Ask.of(line, other)


def test_line_hears_what_the_door_says_and_its_end():
    lines: list[Line] = []
    door = Door("127.0.0.1", 0, "", lambda line, message: lines.append(line), lambda line: None)
    caller = call(door.address, "", {"kind": "ask"}, 5)
    assert eventually(lambda: lines)
    lines[0].send({"kind": "failed", "why": "because"})
    assert eventually(lambda: caller.heard() == [{"kind": "failed", "why": "because"}])
    door.close()
    assert eventually(lambda: caller.heard() == [] and caller.ended)
    caller.close()
    with pytest.raises(tm.PeerLost):
        call(door.address, "", {"kind": "ask"}, 5)


# ---- the pool


def stored(host: Host, request: Request) -> tuple[int, Any]:
    """Served, and all of it stored."""
    done = host.serve(request)
    host.until(lambda: host.all_free)
    return done


@pytest.mark.parametrize("tp", [1, 3])
def test_second_engine_starts_from_what_the_first_computed(make: Make, pool_env: PoolEnv, tp: int):
    first, second = make("pool", tp=tp), make("pool", tp=tp, order="BLHNC" if tp == 1 else "LBHNC")
    assert stored(first, Request("a", PROMPT)) == (0, None)
    assert stored(second, Request("b", PROMPT))[0] == 5 * BLOCK
    assert stored(second, Request("c", [*PROMPT[:13], 1, 2, 3, 4, 5]))[0] == 3 * BLOCK
    assert stored(second, Request("d", PROMPT[: 5 * BLOCK]))[0] == 4 * BLOCK  # a token is left to compute
    assert stored(second, Request("e", PROMPT, cache_salt="other"))[0] == 0
    assert stored(make("pool", tp=tp, tenant="other"), Request("f", PROMPT))[0] == 0
    assert stored(make("pool", tp=tp, role="kv_producer"), Request("g", PROMPT))[0] == 0
    with tm.Pool() as pool:
        keys = [key for key in pool.keys("kv/") if f"{tp - 1}of{tp}" in key and "default" in key]
        assert len(keys) == 5 + 5 + 1  # with the salted ones, and what follows the 13 tokens
        pool.delete(keys)
    assert stored(second, Request("h", PROMPT))[0] == 0  # of every block all ranks' pages are needed
    reader = make("pool", tp=tp, role="kv_consumer", tenant="reader")
    assert stored(reader, Request("i", PROMPT))[0] == 0
    assert stored(reader, Request("j", PROMPT))[0] == 0  # it stores nothing


def test_zeroed_page_is_seen(make: Make, pool_env: PoolEnv):
    """The negative control: what is in the pool is what is used."""
    first, second = make("pool"), make("pool")
    stored(first, Request("a", PROMPT))
    with tm.Pool() as pool:
        (key,) = [k for k in pool.keys("kv/") if k.endswith(Request("a", PROMPT).block_hashes[1].hex())]
        info = pool.info(key)
        pool.delete(key)
        pool.put(key, torch.zeros(info.nbytes // 4).reshape(pool_shape(first)), meta=info.meta)
    request = Request("b", PROMPT)
    assert second.start(request) == 5 * BLOCK
    second.wait(request)
    assert second.wrong(request)[:BLOCK] == list(range(BLOCK, 2 * BLOCK))


def pool_shape(host: Host) -> tuple[int, ...]:
    return tuple(host.workers[0]._kv._objects.shape)


def test_blocks_that_go_before_they_are_loaded_are_computed(make: Make, pool_env: PoolEnv):
    first, second = make("pool"), make("pool")
    stored(first, Request("a", PROMPT))
    request = Request("b", PROMPT)
    assert second.ask(request) == 5 * BLOCK
    with tm.Pool() as pool:
        pool.delete([k for k in pool.keys("kv/") if k.endswith(request.block_hashes[2].hex())])
    second.allocate(request, 5 * BLOCK)
    second.step()
    assert second.wait(request) == 2 * BLOCK
    assert second.failed == set(second.held["b"][2:5])
    assert second.ask(request) == 0  # it is not tried again
    second.compute(request, 2 * BLOCK)
    second.check(request)
    second.finish(request)
    second.until(lambda: second.all_free)
    assert stored(first, Request("c", PROMPT))[0] == 5 * BLOCK  # the gap is closed


def test_preempted_request_is_loaded_again(make: Make, pool_env: PoolEnv):
    first, second = make("pool"), make("pool")
    stored(first, Request("a", PROMPT))
    request = Request("b", PROMPT)
    second.start(request)
    second.wait(request)
    second.step(preempted_req_ids={"b"})
    second.free += second.held.pop("b")
    second.received.clear()
    request.num_preemptions = 1
    assert second.start(request) == 5 * BLOCK
    second.wait(request)
    second.compute(request, 5 * BLOCK)
    second.check(request)


def test_preempted_request_that_is_aborted_is_reported_as_promised(make: Make, pool_env: PoolEnv):
    host = make("pool")
    request = Request("a", PROMPT)
    host.start(request)
    host.step(request, 0, 9)  # two blocks are stored
    host.step(preempted_req_ids={"a"})
    assert all(store.state != "pending" for store in host.workers[0]._stores["a"])  # nobody reads them any more
    host.finish(request, "FINISHED_ABORTED")
    assert "a" in host.held
    host.until(lambda: host.sent == {"a": 1})


def test_store_that_outlives_its_deadline_is_waited_for(make: Make, pool_env: PoolEnv):
    worker = make("pool", timeout_s=0.2).workers[0]
    gate = threading.Event()

    def slow() -> int:
        assert gate.wait(20)
        raise tm.DeadlineExceeded("late")

    worker._stores["a"] = [PrefixStore(slow, [1], 0, worker._stored)]
    waiting = threading.Thread(target=worker.preempted, args=(PoolMeta(preempted=["a"]),))
    waiting.start()
    waiting.join(1.5)  # several times the deadline
    assert waiting.is_alive()
    gate.set()
    waiting.join(10)
    assert not waiting.is_alive()
    assert worker._stores["a"][0].state == "timeout"


def test_load_of_an_aborted_request_is_reported_once(make: Make, pool_env: PoolEnv):
    first, second = make("pool"), make("pool")
    stored(first, Request("a", PROMPT))
    request = Request("b", PROMPT)
    second.start(request)
    second.loads.append("b")
    second.finish(request, "FINISHED_ABORTED")
    second.until(lambda: second.received == {"b": 1})
    assert not second.failed


def test_request_that_was_stored_and_is_loaded_when_it_ends_is_reported_once(make: Make, pool_env: PoolEnv):
    """As received, and not before no byte lands in its blocks any more."""
    host = make("pool", tp=2)
    request = Request("a", PROMPT)
    host.start(request)
    host.step(request, 0, 9)
    host.step(preempted_req_ids={"a"})
    host.free += host.held.pop("a")
    request.num_preemptions = 1
    gate = threading.Event()
    held_up = host.workers[1]
    begin = held_up._begin

    def later(order: Any) -> Any:
        assert gate.wait(20)
        return begin(order)

    held_up._begin = later
    assert host.start(request) == 2 * BLOCK
    host.loads.append("a")
    host.until(lambda: host.received == {"a": 1})  # of the rank that is not held up
    host.finish(request, "FINISHED_ABORTED")
    for _ in range(3):
        host.step()
    assert "a" in host.held
    gate.set()
    host.until(lambda: host.received == {"a": 2})
    host.step()
    assert host.all_free
    assert host.sent == {}
    assert not host.workers[0]._stores


def test_after_a_reset_nothing_from_before_is_taken_or_stored(make: Make, pool_env: PoolEnv):
    """As when the weights have changed."""
    host, other = make("pool"), make("pool")
    stored(host, Request("a", PROMPT))
    running = Request("b", [1, *PROMPT])
    host.start(running)
    host.step(running, 0, 9)
    assert host.scheduler.reset()
    host.step(running, 9, len(running.prompt_token_ids or ()) - 9, new=False)  # behind blocks of the old weights
    host.finish(running)
    host.until(lambda: host.all_free)
    assert stored(host, Request("c", PROMPT))[0] == 0
    assert stored(host, Request("d", [1, *PROMPT]))[0] == 0
    assert stored(host, Request("e", PROMPT))[0] == 5 * BLOCK  # its own
    assert stored(other, Request("f", PROMPT))[0] == 5 * BLOCK  # of those weights
    assert stored(other, Request("g", [1, *PROMPT]))[0] == 2 * BLOCK


def test_reset_while_blocks_are_loaded_is_refused(make: Make, pool_env: PoolEnv):
    first, second = make("pool"), make("pool")
    stored(first, Request("a", PROMPT))
    request = Request("b", PROMPT)
    external = second.ask(request)
    second.allocate(request, external)
    assert not second.scheduler.reset()
    second.step()
    second.wait(request)
    assert second.scheduler.reset()


def test_pool_that_does_not_answer_costs_the_reuse(make: Make, pool_env: PoolEnv, caplog: pytest.LogCaptureFixture):
    host = make("pool", timeout_s=1, lookup_timeout_s=0.5, patience_ms=1)
    stored(host, Request("a", PROMPT))
    stopped = pool_env.worker()
    stop(stopped)
    try:
        request = Request("b", [1, *PROMPT])
        assert host.scheduler.matched(request, 0) == (None, False)  # the scheduler goes on
        assert host.ask(request) == 0
        assert "cannot be asked" in caplog.text
        host.allocate(request)
        host.compute(request)
        host.check(request)
        host.finish(request)
        host.until(lambda: host.all_free)
        assert host.workers[0].stores_failed
    finally:
        os.kill(stopped, signal.SIGCONT)


def test_lost_node_is_a_miss(make: Make, pool_env: PoolEnv):
    host = make("pool", lookup_timeout_s=5)
    stored(host, Request("a", PROMPT))
    with tm.Pool() as pool:
        lose_node(pool_env, lambda: _exists(pool))
        assert stored(host, Request("b", PROMPT))[0] == 0


def _exists(pool: tm.Pool) -> bool:
    try:
        return bool(pool.keys("kv/", timeout=5))
    except tm.Error:
        return True


def fill(pool: tm.Pool, nbytes: int) -> None:
    """With objects of that size which nothing pushes out."""
    for index in range(1 << 16):
        try:
            pool.put(f"fill/{nbytes}/{index}", bytes(nbytes), pin="hard", timeout=0.2)
        except (tm.PoolFull, tm.DeadlineExceeded):
            return


def test_full_pool_stores_no_more(make: Make, pool_env: PoolEnv, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TM_MEMORY", "2MiB")
    with tm.Pool() as pool:
        for nbytes in (1 << 20, 1 << 16, 1 << 12, 64):
            fill(pool, nbytes)
        host = make("pool", timeout_s=0.5, lookup_timeout_s=0.5)
        assert stored(host, Request("a", PROMPT))[0] == 0
        assert host.workers[0].stores_failed == 1


def test_other_hashes_are_said(make: Make, pool_env: PoolEnv, caplog: pytest.LogCaptureFixture):
    for seed in ("one", "one", "two"):
        host = make("pool", probe=seed)
        host.ask(Request("a", PROMPT))
        assert host.scheduler._checked.result(10) is (seed == "one")
        assert ("PYTHONHASHSEED" in caplog.text) is (seed == "two")


def test_policy_that_fails_requests_is_said(make: Make, pool_env: PoolEnv, caplog: pytest.LogCaptureFixture):
    make("pool", policy="fail")
    make("pd", policy="fail")
    assert caplog.text.count("kv_load_failure_policy") == 2


# ---- encoder outputs


class Feature:
    def __init__(self, identifier: str, offset: int, length: int) -> None:
        self.identifier = identifier
        self.mm_position = type("P", (), {"offset": offset, "length": length})


class WithImages:
    def __init__(self, request_id: str, *features: Feature) -> None:
        self.request_id, self.mm_features = request_id, list(features)

    def get_num_encoder_embeds(self, index: int) -> int:
        return self.mm_features[index].mm_position.length


@pytest.fixture
def outputs(pool_env: PoolEnv) -> Iterator[EncoderOutputs]:
    outputs = EncoderOutputs(tm.Pool(), "a/model", "tenant", 5)
    yield outputs
    outputs.close()


def test_encoder_output_is_made_once(outputs: EncoderOutputs):
    made = torch.randn(6, HEADS)
    assert outputs.put("cat", made)
    assert outputs.put("cat", torch.zeros(6, HEADS))  # sealed: the first stays
    for how in (("another", 5), ("tenant", 5, "bfloat16")):
        other = EncoderOutputs(tm.Pool(), "a/model", *how)
        assert other.get("cat") is None
        other.close()
    fetcher = Fetcher(EncoderOutputs(tm.Pool(), "a/model", "tenant", 5))
    request = WithImages("r", Feature("cat", 2, 6), Feature("dog", 9, 4))
    assert eventually(lambda: fetcher.available(request, 0))
    assert fetcher.has("cat")
    assert not fetcher.has("dog")
    fetcher.allocated(request, 0)
    fetcher.allocated(request, 1)
    meta = fetcher.build()
    assert list(meta.loads) == ["cat"]
    assert fetcher.build().loads == {}
    cache: dict[str, torch.Tensor] = {}
    assert list(take(meta.loads, cache, torch.device("cpu"))) == ["cat"]
    assert torch.equal(cache["cat"], made)
    fetcher.finished(request)
    assert not fetcher.has("cat")
    assert fetcher.available(WithImages("s", Feature("cat", 2, 6)), 8)  # its tokens are computed
    assert not fetcher.has("cat")
    fetcher.close()


def test_encoder_output_of_another_size_or_kind_is_made_again(outputs: EncoderOutputs, caplog: Any):
    outputs.put("cat", torch.randn(5, HEADS))
    with tm.Pool() as pool:
        pool.put(outputs.key("dog"), b"woof")
    fetcher = Fetcher(outputs)
    request = WithImages("r", Feature("cat", 2, 6), Feature("dog", 9, 4))
    assert eventually(lambda: fetcher.available(request, 0))
    assert not fetcher.has("cat")
    assert not fetcher.has("dog")
    assert "not used" in caplog.text
    assert "no encoder output" in caplog.text
    fetcher._threads.shutdown()


def test_encoder_output_that_cannot_be_read_at_all(outputs: EncoderOutputs, caplog: pytest.LogCaptureFixture):
    fetcher = Fetcher(outputs)
    request = WithImages("r", Feature("", 2, 6))
    outputs.key = lambda identifier: 7  # type: ignore[assignment,method-assign,return-value]  # not a key: TypeError
    assert eventually(lambda: fetcher.available(request, 0))
    assert not fetcher.has("")
    assert "an encoder output was not loaded" in caplog.text
    fetcher._threads.shutdown()


def test_encoder_output_that_does_not_come_is_not_waited_for(pool_env: PoolEnv):
    outputs = EncoderOutputs(tm.Pool(), "m", "t", 0.5)
    outputs.put("cat", torch.randn(5, HEADS))
    fetcher = Fetcher(outputs)
    stopped = pool_env.worker()
    stop(stopped)
    try:
        began = time.monotonic()
        request = WithImages("r", Feature("bird", 0, 5))
        assert not fetcher.available(request, 0)
        assert eventually(lambda: fetcher.available(request, 0))
        assert not fetcher.has("bird")
        assert time.monotonic() - began < 10
        assert not outputs.put("bird", torch.zeros(1, 1))
    finally:
        os.kill(stopped, signal.SIGCONT)
    fetcher.close()
