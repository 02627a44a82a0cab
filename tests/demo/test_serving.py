"""The demo's services on a random-weight Llama: real processes, real answers, and what happens when they die. Two
prefill workers of two tensor-parallel ranks each, two decode workers of one."""

import asyncio
import os
import signal
import time

import aiohttp
import model as models
import pytest
from client import RequestFailed, ask
from cluster import Cluster, Shape
from corruption import copy_pages
from paged_cache import PAGE_SIZE
from processes import eventually, stop

PAGES = 96
NEW = 20
SYSTEM = {"role": "system", "content": "One page of sixteen bytes follows another, and all of them are shared."}
SHAPE = Shape(
    prefill=2, decode=2, prefill_tp=2, pages=PAGES, chunk_size=32, max_running=6, max_waiting=4, recovery_s=20
)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with Cluster("random", SHAPE, run_dir=tmp_path_factory.mktemp("demo"), memory="128MiB") as cluster:
        cluster.start_all()
        asyncio.run(cluster.all_well())
        yield cluster


@pytest.fixture(scope="module")
def plain():
    return models.load("random")[0]


def workers(cluster: Cluster) -> dict[str, dict]:
    return asyncio.run(cluster.all_well(timeout_s=60))


async def rest(cluster: Cluster) -> dict[str, dict]:
    """The workers' states once nobody holds anything."""
    deadline = time.monotonic() + 20
    while True:
        states = await cluster.all_well(timeout_s=60)
        held = [state["pages_available"] != PAGES or state["sequences"] for state in states.values()]
        if not any(held) and (await cluster.health())["admission"]["running"] == 0:
            assert not any(state["pages_quarantined"] for state in states.values())
            return states
        assert time.monotonic() < deadline, states
        await asyncio.sleep(0.05)


def at_rest(cluster: Cluster) -> dict[str, dict]:
    return asyncio.run(rest(cluster))


async def acomplete(cluster: Cluster, prompt, on_text=None, **body):
    body = {"prompt": prompt, "max_tokens": NEW, **body}
    return await ask(cluster.front_url(), "/v1/completions", body, on_text=on_text)


def complete(cluster: Cluster, prompt, **body):
    return asyncio.run(acomplete(cluster, prompt, **body))


def chat(cluster: Cluster, *texts: str, on_text=None):
    roles = ("user", "assistant")
    messages = [SYSTEM, *({"role": roles[index % 2], "content": text} for index, text in enumerate(texts))]
    body = {"messages": messages, "max_tokens": NEW}
    return asyncio.run(ask(cluster.front_url(), "/v1/chat/completions", body, on_text=on_text))


def reference(plain, answer, tokens: int = NEW, **options) -> list[int]:
    return models.generate_reference(plain, answer.prompt_token_ids, tokens, **options)[0]


@pytest.mark.parametrize("colocated", [False, True], ids=["disaggregated", "colocated"])
def test_answers_are_plain_generations(cluster, plain, colocated):
    for prompt in ("The quick brown fox jumps over the lazy dog.", [7] * 33, [9], list(range(200))):
        answer = complete(cluster, prompt, colocated=colocated)
        assert answer.token_ids == reference(plain, answer)
        assert len(set(answer.metrics["workers"])) == 2 - colocated


def test_streams_are_plain_generations(cluster, plain):
    pieces: list[str] = []
    for answer in (chat(cluster, "hello there"), chat(cluster, "and a stream", on_text=pieces.append)):
        assert answer.token_ids == reference(plain, answer)
    assert "".join(pieces) == answer.text
    assert len(answer.token_times) == len(answer.token_ids)


def test_prefixes_are_reused_and_change_nothing(cluster, plain):
    first = chat(cluster, "question one")
    second = chat(cluster, "question one")
    third = chat(cluster, "question one", first.text, "question two")
    other = chat(cluster, "another conversation")
    for answer in (first, second, third, other):
        assert answer.token_ids == reference(plain, answer)
    prompt = len(first.prompt_token_ids)
    assert second.reused_tokens == (prompt - 1) // PAGE_SIZE * PAGE_SIZE > 0
    assert third.reused_tokens >= prompt // PAGE_SIZE * PAGE_SIZE
    assert other.reused_tokens > 0
    page_nbytes = 4 * 4 * 2 * PAGE_SIZE * 16 * 4  # layers, heads, k and v, tokens, dim, float32
    assert second.metrics["prefill"]["pool_load_bytes"] == second.reused_tokens // PAGE_SIZE * page_nbytes
    assert second.metrics["prefill"]["push_bytes"] == -(-prompt // PAGE_SIZE) * page_nbytes


def test_salts_do_not_share(cluster):
    prompt = list(range(50, 100))
    assert complete(cluster, prompt).reused_tokens == 0
    assert complete(cluster, prompt, cache_salt="tenant").reused_tokens == 0
    assert complete(cluster, prompt, cache_salt="tenant").reused_tokens == 48


def test_what_either_kind_of_worker_stores_the_other_finds(cluster, plain):
    """Prefill workers have the heads on two ranks, decode workers on one."""
    prompt = list(range(130, 200))
    first = complete(cluster, prompt, max_tokens=60, ignore_eos=True)
    at_rest(cluster)
    again = prompt + first.token_ids
    answer = complete(cluster, again)
    assert answer.reused_tokens == (len(again) - 1) // PAGE_SIZE * PAGE_SIZE  # half of it by a decode worker
    assert answer.token_ids == reference(plain, answer)


def test_requests_at_the_same_time_share_forward_passes(cluster, plain):
    async def all_of_them():
        lengths = (20, 33, 5, 60, 17, 41)
        return await asyncio.gather(
            *(
                acomplete(cluster, [11, 12, 13 + index] * length, ignore_eos=True)
                for index, length in enumerate(lengths)
            )
        )

    for answer in asyncio.run(all_of_them()):
        assert answer.token_ids == reference(plain, answer, ignore_eos=True)
    states = at_rest(cluster)
    assert max(state["largest_batch"] for name, state in states.items() if name.startswith("decode")) > 1


def test_too_many_requests_are_refused_and_told_when_to_come_again(cluster, plain):
    async def burst():
        asking = (acomplete(cluster, [90 + index] * 24, ignore_eos=True) for index in range(14))
        return await asyncio.gather(*asking, return_exceptions=True)

    outcomes = asyncio.run(burst())
    refused = [outcome for outcome in outcomes if isinstance(outcome, RequestFailed)]
    assert [failed.status for failed in refused] == [429] * 4
    assert all(failed.retry_after_s >= 1 and failed.error["type"] == "overloaded" for failed in refused)
    for answer in outcomes:
        if answer not in refused:
            assert answer.token_ids == reference(plain, answer, ignore_eos=True)
    at_rest(cluster)


@pytest.mark.parametrize("parts", [[0], [1], [0, 1]], ids=["first rank's", "second rank's", "both"])
def test_a_corrupted_pool_page_changes_the_answer(cluster, parts):
    prompt = list(range(120, 180))
    good = complete(cluster, prompt)
    serial = workers(cluster)["prefill-0"]["weights"]["serial"]
    name = "".join(map(str, parts))
    for salt, zero in ((f"copied{name}", None), (f"corrupted{name}", (1, parts))):
        assert copy_pages(prompt, salt, serial=serial, parts=2, zero=zero) == 48
        answer = complete(cluster, prompt, cache_salt=salt)
        assert answer.reused_tokens == 48
        assert (answer.token_ids == good.token_ids) == (zero is None)


def test_a_client_that_goes_away_takes_its_jobs_along(cluster):
    async def leave():
        body = {"prompt": [77] * 40, "max_tokens": 1200, "ignore_eos": True, "stream": True}
        async with aiohttp.ClientSession() as http:
            async with http.post(f"{cluster.front_url()}/v1/completions", json=body) as response:
                await response.content.readline()

    asyncio.run(leave())
    run = {name: state["tokens_run"] for name, state in at_rest(cluster).items()}
    time.sleep(0.5)
    assert {name: state["tokens_run"] for name, state in workers(cluster).items()} == run
    assert all(tokens < 1200 for tokens in run.values())


def test_bad_requests(cluster):
    async def post(data):
        async with aiohttp.ClientSession() as http:
            async with http.post(f"{cluster.front_url()}/v1/completions", data=data) as response:
                return response.status, (await response.json())["error"]

    assert asyncio.run(post(b"{"))[0] == 400
    status, error = asyncio.run(post(b'{"prompt": "x", "temperature": 1}'))
    assert (status, error["param"], error["type"]) == (400, "temperature", "invalid_request_error")
    status, error = asyncio.run(post(b'{"prompt": "x", "max_tokens": 100000}'))
    assert (status, error["param"]) == (400, "max_tokens")


def test_decode_workers_run_no_prompt(cluster):
    before = {name: state["prompt_tokens_run"] for name, state in at_rest(cluster).items()}
    complete(cluster, [3] * 50)
    after = {name: state["prompt_tokens_run"] for name, state in at_rest(cluster).items()}
    assert sum(after.values()) - sum(before.values()) == 50
    assert all(after[name] == before[name] for name in after if name.startswith("decode"))


async def under_way(cluster: Cluster, prompts: list[list[int]], **body):
    """Streams, each of which has had a token."""
    started = [asyncio.Event() for _ in prompts]
    asking = [
        asyncio.create_task(acomplete(cluster, prompt, lambda _, event=event: event.set(), ignore_eos=True, **body))
        for prompt, event in zip(prompts, started, strict=True)
    ]
    await asyncio.gather(*(event.wait() for event in started))
    return asking


def test_a_killed_decode_worker_is_done_without(cluster, plain):
    """The answers that it had go on elsewhere."""
    pid = cluster.processes["decode-0"].pid

    async def kill_it():
        asking = await under_way(cluster, [[120, 30 + index] * 16 for index in range(2)], max_tokens=200)
        cluster.restart("decode-0", signal.SIGKILL)
        return await asyncio.gather(*asking)

    answers = asyncio.run(kill_it())
    assert sorted(answer.metrics["retries"] for answer in answers) == [0, 1]
    for answer in answers:
        assert answer.token_ids == reference(plain, answer, 200, ignore_eos=True)
    asyncio.run(cluster.all_well(unlike={"decode-0": pid}))
    at_rest(cluster)


def test_a_killed_prefill_worker_is_done_without(cluster, plain):
    """The prompts that it had are run elsewhere; the decode workers that wait for them give up what they reserved."""
    states = at_rest(cluster)

    async def reserved(name: str) -> int:
        async with aiohttp.ClientSession() as http, http.get(f"{states[name]['url']}/health") as response:
            return (await response.json())["sequences"]

    async def kill_it():
        for name in ("prefill-0", "prefill-1"):
            stop(states[name]["pid"])  # holds the requests in the middle
        asking = [asyncio.create_task(acomplete(cluster, [130 + index] * 60)) for index in range(2)]
        deadline = time.monotonic() + 10
        while await reserved("decode-0") + await reserved("decode-1") < 2:
            assert time.monotonic() < deadline
        cluster.restart("prefill-0", signal.SIGKILL)
        os.kill(states["prefill-1"]["pid"], signal.SIGCONT)
        return await asyncio.gather(*asking)

    answers = asyncio.run(kill_it())
    assert sum(answer.metrics["retries"] for answer in answers) >= 1
    for answer in answers:
        assert answer.token_ids == reference(plain, answer)
    asyncio.run(cluster.all_well(unlike={"prefill-0": states["prefill-0"]["pid"]}))
    at_rest(cluster)


def test_a_rank_that_dies_takes_its_worker_along(cluster, plain):
    before = workers(cluster)["prefill-1"]
    os.kill(before["ranks"][1]["pid"], signal.SIGKILL)
    assert eventually(lambda: cluster.processes["prefill-1"].poll() == 1)
    cluster.restart("prefill-1")
    answer = complete(cluster, [140] * 40)  # by the other one, or its successor
    assert answer.token_ids == reference(plain, answer)
    asyncio.run(cluster.all_well(unlike={"prefill-1": before["pid"]}))


def test_a_stopped_worker_is_done_without(cluster, plain):
    """Killed workers are seen at once; this one still holds its connections."""
    victim = cluster.processes["decode-1"].pid

    async def stop_it():
        answers = await under_way(cluster, [[150 + index] * 16 for index in range(2)], max_tokens=200)
        stop(victim)
        return await asyncio.gather(*answers)

    answers = asyncio.run(stop_it())
    assert sorted(answer.metrics["retries"] for answer in answers) == [0, 1]
    for answer in answers:
        assert answer.token_ids == reference(plain, answer, 200, ignore_eos=True)
    os.kill(victim, signal.SIGCONT)  # it comes back, cancels what it had and serves again
    at_rest(cluster)


def test_without_any_decode_worker_requests_wait_and_are_served_when_one_is_back(cluster, plain):
    async def lose_both():
        asking = (await under_way(cluster, [[160] * 20], max_tokens=200))[0]
        for name in ("decode-0", "decode-1"):
            cluster.end(name, signal.SIGKILL)
        late = asyncio.create_task(acomplete(cluster, [161] * 20))
        health = await cluster.health()
        for name in ("decode-0", "decode-1"):
            cluster.start(name)
        return health, await asking, await late

    health, answer, late = asyncio.run(lose_both())
    assert health["status"] == "unavailable"
    assert answer.token_ids == reference(plain, answer, 200, ignore_eos=True)
    assert answer.metrics["retries"] >= 1
    assert late.token_ids == reference(plain, late)
    at_rest(cluster)


def test_new_weights_reach_every_rank(cluster, plain):
    prompt = list(range(30, 70))
    before = complete(cluster, prompt)
    assert complete(cluster, prompt).reused_tokens == 32
    cluster.ask_trainer(train=1)
    cluster.ask_trainer(publish=1)

    async def take():
        async with aiohttp.ClientSession() as http:
            for state in (await cluster.all_well()).values():
                async with http.post(f"{state['url']}/weights", json={"timeout_s": 20}) as response:
                    assert (await response.json())["step"] == 1

    asyncio.run(take())
    for colocated in (False, True):
        after = complete(cluster, prompt, colocated=colocated, cache_salt=f"colocated: {colocated}")
        assert after.reused_tokens == 0  # other weights, other pages
        expected = cluster.ask_trainer(generate=prompt, max_tokens=NEW)["tokens"]
        assert after.token_ids == expected != before.token_ids
