"""MooncakePoolConnector between real vLLM engines that serve SmolLM2: one computes a prefix, others start from it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from engines import Engine, transfer
from lost import lose_node
from processes import PoolEnv

import torch_mooncake as tm

pytestmark = [pytest.mark.slow, pytest.mark.network, pytest.mark.timeout(1500)]
WHAT = "MooncakePoolConnector: a prefix of 512 tokens from another process's SmolLM2"
# 512 tokens that are shared, and a question each.
SHARED = [1 + (37 * i + 11 * i * i) % 40000 for i in range(512)]
QUESTIONS = [[504, 3575, 282, 4649, 314], [504, 5465, 282, 260, 905, 314]]
Start = Callable[..., Engine]


def test_second_process_starts_from_the_firsts_prefix(start: Start, pool_env: PoolEnv):
    first, second = start(transfer("MooncakePoolConnector")), start(transfer("MooncakePoolConnector"))
    strict = start(transfer("MooncakePoolConnector", policy="fail"))
    expected = [second("generate", prompt=[*SHARED, *question]) for question in QUESTIONS]
    assert expected[0]["cached"] == 0
    second("reset")
    with tm.Pool(linger_s=0) as pool:
        pool.delete(pool.keys("kv/"))
        told = first("generate", prompt=[*SHARED, *QUESTIONS[0]])
        assert (told["cached"], told["tokens"]) == (0, expected[0]["tokens"])
        first("settle")
        told = second("generate", prompt=[*SHARED, *QUESTIONS[1]])
        assert told["cached"] == 512
        assert told["tokens"] == expected[1]["tokens"]
        second("reset")
        # Another cache salt shares nothing.
        assert second("generate", prompt=[*SHARED, *QUESTIONS[1]], salt="other")["cached"] == 0
        second("reset")
        # The negative control: what is in the pool is what is used.
        keys = pool.keys("kv/")
        for key in keys:
            page = pool.get(key)
            meta = pool.info(key).meta
            pool.delete(key)
            pool.put(key, torch.zeros_like(page), meta=meta)
        told = second("generate", prompt=[*SHARED, *QUESTIONS[1]])
        assert told["cached"] == 512
        assert told["tokens"] != expected[1]["tokens"]
        second("reset")
        pool.delete(keys)
        # A page that goes between look-up and load is computed; with the other policy its request fails.
        assert first("reset")["reset"]
        first("generate", prompt=[*SHARED, *QUESTIONS[0]])
        first("settle")
        told = second("generate_without_pages", prompt=[*SHARED, *QUESTIONS[1]])
        assert told["tokens"] == expected[1]["tokens"]
        second("settle")
        first("reset")
        first("generate", prompt=[*SHARED, *QUESTIONS[0]])
        first("settle")
        told = strict("generate_without_pages", prompt=[*SHARED, *QUESTIONS[1]])
        assert (told["reason"], told["tokens"]) == ("error", [])
        assert strict("settle")["held"] == 0
        # The pool's node is killed: engines go on.
        second("reset")
        lose_node(pool_env, lambda: _there(pool))
        told = second("generate", prompt=[*SHARED, *QUESTIONS[1]])
        assert told["tokens"] == expected[1]["tokens"]
        settled = second("settle")
        assert settled["held"] == 0
        assert settled["free"] == settled["all"] - 1


def _there(pool: tm.Pool) -> bool:
    try:
        return bool(pool.keys("kv/", timeout=5))
    except tm.Error:
        return True
