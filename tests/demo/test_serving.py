"""The demo's services on a random-weight Llama: real processes, real answers, and what happens when they die."""

import asyncio
import signal
import time

import aiohttp
import model as models
import pytest
import torch
from client import RequestFailed, ask
from cluster import Cluster
from paged_cache import make_cache
from processes import stop
from worker import CONFIG_KEY, PAGE_SIZE, WEIGHTS

import torch_mooncake as tm
from torch_mooncake.kv import PoolKV

PAGES = 96
NEW = 20
SYSTEM = {"role": "system", "content": "One page of sixteen bytes follows another, and all of them are shared."}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("demo")
    with Cluster("random", run_dir=run_dir, memory="128MiB", pages=PAGES) as cluster:
        cluster.attach()
        for role in ("trainer", "prefill", "decode"):
            cluster.start(role)
        cluster.trainer_answer()
        cluster.start("front")
        cluster.ask_trainer(publish=0)
        cluster.front_url()
        healthy(cluster)
        yield cluster


@pytest.fixture(scope="module")
def plain():
    return models.load("random")[0]


async def get_json(url: str) -> tuple[int, dict]:
    async with aiohttp.ClientSession() as http, http.get(url) as response:
        return response.status, await response.json()


def health(cluster: Cluster) -> tuple[int, dict]:
    status, body = asyncio.run(get_json(f"{cluster.front_url()}/healthz"))
    return status, body["workers"]


def healthy(cluster: Cluster, check=lambda workers: True, timeout_s: float = 60) -> dict:
    """The workers' states once both answer and `check` says yes."""
    deadline = time.monotonic() + timeout_s
    while True:
        status, workers = health(cluster)
        if status == 200 and check(workers):
            return workers
        cluster.check()
        assert time.monotonic() < deadline, workers
        time.sleep(0.1)


def at_rest(cluster: Cluster) -> dict:
    return healthy(
        cluster, lambda workers: all(state["pages_available"] == PAGES for state in workers.values()), timeout_s=10
    )


def restart(cluster: Cluster, role: str, number: int) -> None:
    before = cluster.processes[role].pid
    cluster.end(role, number)
    cluster.start(role)
    healthy(cluster, lambda workers: workers[role]["pid"] != before)


def complete(cluster: Cluster, prompt, **body):
    return asyncio.run(ask(cluster.front_url(), "/v1/completions", {"prompt": prompt, "max_tokens": NEW, **body}))


def chat(cluster: Cluster, *texts: str, on_text=None):
    roles = ("user", "assistant")
    messages = [SYSTEM, *({"role": roles[index % 2], "content": text} for index, text in enumerate(texts))]
    body = {"messages": messages, "max_tokens": NEW}
    return asyncio.run(ask(cluster.front_url(), "/v1/chat/completions", body, on_text=on_text))


def reference(plain, answer) -> list[int]:
    return models.generate_reference(plain, answer.prompt_token_ids, NEW)[0]


def test_answers_are_plain_generations(cluster, plain):
    pieces: list[str] = []
    for answer in (
        complete(cluster, "The quick brown fox jumps over the lazy dog."),
        complete(cluster, [7] * 33),
        complete(cluster, [9]),
        chat(cluster, "hello there"),
        chat(cluster, "and a stream", on_text=pieces.append),
    ):
        assert answer.token_ids == reference(plain, answer)
    assert "".join(pieces) == answer.text


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
    assert second.metrics["prefill"]["pool_load_bytes"] > 0
    page_nbytes = 4 * 2 * PAGE_SIZE * 2 * 32 * 4  # layers, k and v, tokens, heads, dim, float32
    assert second.metrics["prefill"]["push_bytes"] == -(-prompt // PAGE_SIZE) * page_nbytes


def test_salts_do_not_share(cluster):
    prompt = list(range(50, 100))
    assert complete(cluster, prompt).reused_tokens == 0
    assert complete(cluster, prompt, cache_salt="tenant").reused_tokens == 0
    assert complete(cluster, prompt, cache_salt="tenant").reused_tokens == 48


def test_requests_at_the_same_time(cluster, plain):
    async def all_of_them():
        url = cluster.front_url()
        prompts = [[11, 12, 13 + index] * 8 for index in range(6)]
        return await asyncio.gather(
            *(ask(url, "/v1/completions", {"prompt": prompt, "max_tokens": NEW}) for prompt in prompts)
        )

    for answer in asyncio.run(all_of_them()):
        assert answer.token_ids == reference(plain, answer)
    at_rest(cluster)


def test_a_corrupted_pool_page_changes_the_answer(cluster):
    prompt = list(range(120, 180))
    good = complete(cluster, prompt)
    serial = health(cluster)[1]["prefill"]["weights"]["serial"]
    kv = make_cache(models.config_from_json(tm.get(CONFIG_KEY)), 1, PAGE_SIZE)
    pool_kv = PoolKV(tm, kv, model=f"{WEIGHTS}#{serial}")
    for salt, zeroed in (("copied", None), ("corrupted", 1)):
        keys, copies = pool_kv.page_keys(prompt), pool_kv.page_keys(prompt, cache_salt=salt)
        for index, (key, copy) in enumerate(zip(keys, copies, strict=True)):
            page = tm.get(key).clone()
            tm.put(copy, torch.zeros_like(page) if index == zeroed else page, sealed=True)
        answer = complete(cluster, prompt, cache_salt=salt)
        assert answer.reused_tokens == 48
        assert (answer.token_ids == good.token_ids) == (zeroed is None)


def test_a_restarted_prefill_worker_still_hits(cluster, plain):
    prompt = list(range(90, 150))
    complete(cluster, prompt)
    restart(cluster, "prefill", signal.SIGTERM)
    answer = complete(cluster, prompt)
    assert answer.reused_tokens == 48
    assert answer.token_ids == reference(plain, answer)


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_worker_killed_during_a_request(cluster, plain, role):
    prompt = [ord(role[0])] * 40

    async def ask_and_kill():
        url = cluster.front_url()
        stop(cluster.processes["prefill"].pid)  # holds the request in the middle
        request = asyncio.create_task(ask(url, "/v1/completions", {"prompt": prompt, "max_tokens": NEW}))
        deadline = time.monotonic() + 10
        while (await get_json((await workers_of(url))["decode"]["url"] + "/health"))[1]["pages_available"] == PAGES:
            assert time.monotonic() < deadline
        cluster.processes[role].kill()
        killed = time.monotonic()
        with pytest.raises(RequestFailed) as caught:
            await request
        return caught.value, time.monotonic() - killed

    async def workers_of(url):
        return (await get_json(f"{url}/healthz"))[1]["workers"]

    at_rest(cluster)
    failure, took_s = asyncio.run(ask_and_kill())
    assert failure.status == 503
    assert failure.error["type"] == "worker_unavailable"
    assert failure.error["code"] == role
    assert took_s < 3
    cluster.processes["prefill"].send_signal(signal.SIGCONT)
    status, workers = health(cluster)
    assert status == 503
    assert "error" in workers[role]
    with pytest.raises(RequestFailed) as caught:
        complete(cluster, prompt)
    assert (caught.value.status, caught.value.error["code"]) == (503, role)
    restart(cluster, role, signal.SIGKILL)
    answer = complete(cluster, prompt)
    assert answer.token_ids == reference(plain, answer)
    at_rest(cluster)


def test_decode_killed_in_the_middle_of_a_stream(cluster):
    async def stream_and_kill():
        texts: list[str] = []

        def on_text(piece: str) -> None:
            if not texts:
                cluster.processes["decode"].kill()
            texts.append(piece)

        body = {"prompt": [88] * 20, "max_tokens": 1000}
        with pytest.raises(RequestFailed) as caught:
            await ask(cluster.front_url(), "/v1/completions", body, on_text=on_text)
        return caught.value

    failure = asyncio.run(stream_and_kill())
    assert failure.status == 0
    assert failure.error["type"] == "worker_unavailable"
    restart(cluster, "decode", signal.SIGKILL)
    complete(cluster, [88] * 20)


def test_a_client_that_goes_away_takes_its_session_along(cluster):
    async def leave():
        body = {"prompt": [77] * 40, "max_tokens": 1200, "stream": True}
        async with aiohttp.ClientSession() as http:
            async with http.post(f"{cluster.front_url()}/v1/completions", json=body) as response:
                await response.content.readline()

    asyncio.run(leave())
    before = at_rest(cluster)["decode"]["tokens_run"]
    time.sleep(0.5)
    assert health(cluster)[1]["decode"]["tokens_run"] == before < 1200


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


def test_new_weights_reach_both_workers(cluster, plain):
    prompt = list(range(30, 70))
    before = complete(cluster, prompt)
    assert complete(cluster, prompt).reused_tokens == 32
    cluster.ask_trainer(train=1)
    cluster.ask_trainer(publish=1)

    async def take():
        states = (await get_json(f"{cluster.front_url()}/healthz"))[1]["workers"]
        async with aiohttp.ClientSession() as http:
            for state in states.values():
                async with http.post(f"{state['url']}/weights", json={"timeout_s": 20}) as response:
                    assert (await response.json())["step"] == 1

    asyncio.run(take())
    after = complete(cluster, prompt)
    assert after.reused_tokens == 0  # other weights, other pages
    expected = cluster.ask_trainer(generate=prompt, max_tokens=NEW)["tokens"]
    assert after.token_ids == expected != before.token_ids


def test_the_decode_worker_ran_no_prompt_token(cluster):
    complete(cluster, [3] * 50)
    decode = at_rest(cluster)["decode"]
    assert decode["tokens_run"] > 0
    assert decode["prompt_tokens_run"] == 0
