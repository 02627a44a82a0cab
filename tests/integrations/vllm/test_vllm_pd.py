"""MooncakePDConnector between real vLLM engines that serve SmolLM2: prefill in one process, decode in another."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any

import pytest
from engines import Engine, transfer

pytestmark = [pytest.mark.slow, pytest.mark.network, pytest.mark.timeout(1500)]
WHAT = "MooncakePDConnector: SmolLM2 from prefill engines of TP 1 and 3 to decode engines, layer by layer"
INTRO = "You are a helpful geography assistant. Answer in one short sentence. " * 12
PROMPTS = [INTRO + question for question in ("The capital of France is", "The largest ocean of the world is")]
Start = Callable[..., Engine]
CHUNK = {"max_num_batched_tokens": 64}  # several steps a prompt


def asks(name: str, remote: list[str]) -> dict[str, Any]:
    return {"do_remote_prefill": True, "transfer_id": name, "remote": remote}


def prefilled(prefill: Engine, prompt: str) -> dict[str, Any]:
    """What prefill's answer says for decode."""
    params = prefill("generate", prompt=prompt, max_tokens=1, params={"do_remote_decode": True})["params"]
    params.pop("remote_prefill_cached_tokens", None)  # vLLM would report prefill's hits as decode's
    return params  # type: ignore[no-any-return]


def test_decode_says_what_a_single_engine_says(start: Start):
    plain = start()
    decode = start(transfer("MooncakePDConnector", "kv_consumer"))
    prefill = start(transfer("MooncakePDConnector", "kv_producer"), **CHUNK)
    strict = start(transfer("MooncakePDConnector", "kv_consumer", policy="fail"))
    expected = [plain("generate", prompt=prompt) for prompt in PROMPTS]
    plain.close()
    assert expected[0]["text"].strip().startswith("Paris")
    assert expected[0]["cached"] == 0

    # Prefill first: its answer says where.
    params = prefilled(prefill, PROMPTS[0])
    remote = params["remote"]
    told = decode("generate", prompt=PROMPTS[0], params=params)
    assert told["text"] == expected[0]["text"]
    assert told["cached"] == told["prompt"] > 4 * 32
    settled = prefill("settle")
    assert settled["held"] == 0
    assert settled["free"] == settled["all"] - 1  # vLLM keeps one for nothing
    assert prefill("early")["layers"] == 0

    # Both at once: layers travel while the next are computed.
    prefill("reset")
    name = uuid.uuid4().hex
    decode.tell("generate", prompt=PROMPTS[1], params=asks(name, remote))
    assert prefill("opened", transfer=name)["open"]
    prefill("generate", prompt=PROMPTS[1], max_tokens=1, params={"do_remote_decode": True, "transfer_id": name})
    told = decode.answer()
    assert told["tokens"] == expected[1]["tokens"]
    assert told["cached"] >= told["prompt"] - 1
    assert prefill("early")["layers"] == 30 * -(-told["prompt"] // 64)

    # Decode has a part of the prompt already, and asks for the rest.
    longer = PROMPTS[1] + expected[1]["text"] + " The smallest one is"
    params = prefilled(prefill, longer)
    told = decode("generate", prompt=longer, params=params)
    decode("reset")
    assert decode("generate", prompt=longer)["tokens"] == told["tokens"]
    decode("reset")

    # The negative control: what arrives is what is used.
    prefill("reset")
    params = prefilled(prefill, PROMPTS[0])
    prefill("spoil", transfer=params["transfer_id"], position=2)
    assert decode("generate", prompt=PROMPTS[0], params=params)["tokens"] != expected[0]["tokens"]
    decode("reset")
    prefill("reset")

    # A request that is aborted while decode waits for it.
    name = uuid.uuid4().hex
    decode.tell("generate", prompt=PROMPTS[0], params=asks(name, remote))
    assert prefill("opened", transfer=name)["open"]
    begun = prefill("begin", prompt=PROMPTS[0], params={"do_remote_decode": True, "transfer_id": name}, steps=1)
    prefill("abort", name=begun["name"])
    assert prefill("settle")["held"] == 0
    assert decode.answer()["tokens"] == expected[0]["tokens"]
    decode("reset")

    # Decode's request ends before prefill has begun.
    name = uuid.uuid4().hex
    begun = decode("begin", prompt=PROMPTS[0], params=asks(name, remote), steps=3)
    decode("abort", name=begun["name"])
    settled = decode("settle")
    assert settled["held"] == 0
    assert settled["free"] == settled["all"] - 1

    # Prefill is killed in the middle of a prompt.
    prefill("reset")
    name = uuid.uuid4().hex
    decode.tell("generate", prompt=PROMPTS[0], params=asks(name, remote))
    assert prefill("opened", transfer=name)["open"]
    prefill("begin", prompt=PROMPTS[0], params={"do_remote_decode": True, "transfer_id": name}, steps=2)
    prefill.kill()
    assert decode.answer()["tokens"] == expected[0]["tokens"]
    decode("reset")
    told = decode("generate", prompt=PROMPTS[1], params=asks(name, remote))
    assert told["tokens"] == expected[1]["tokens"]
    # The other policy: the request fails, and the engine goes on.
    told = strict("generate", prompt=PROMPTS[1], params=asks(name, remote))
    assert (told["reason"], told["tokens"]) == ("error", [])
    assert strict("generate", prompt=PROMPTS[1])["tokens"] == expected[1]["tokens"]
    assert strict("settle")["held"] == 0


def test_three_prefill_ranks_feed_one_decode_rank(start: Start):
    prefill = start(
        transfer("MooncakePDConnector", "kv_producer"),
        tensor_parallel_size=3,
        distributed_executor_backend="mp",
    )
    decode = start(transfer("MooncakePDConnector", "kv_consumer"))
    expected = decode("generate", prompt=PROMPTS[0])
    decode("reset")
    params = prefilled(prefill, PROMPTS[0])
    assert len(params["remote"]) == 3
    told = decode("generate", prompt=PROMPTS[0], params=params)
    assert told["text"] == expected["text"]
    assert told["cached"] == told["prompt"]
    assert prefill("settle")["held"] == 0
