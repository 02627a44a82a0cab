"""Other tensor-parallel degrees than the demo's own, each on a small cluster of random-weight Llamas (8 query, 4 KV
heads): pages change hands between ranks that hold different heads of them."""

from __future__ import annotations

import asyncio
import random

from checks import Checks, compare
from client import Answer, ask
from cluster import Cluster, Shape
from corruption import copy_pages

DEGREES = ((2, 1), (4, 2))
_PROMPTS = (5, 40, 150)  # tokens
_TOKENS = 16


def check_degrees(checks: Checks, prefill_tp: int, decode_tp: int) -> None:
    """Answers of a prefill worker of `prefill_tp` ranks and a decode worker of `decode_tp`."""
    with Cluster("random", Shape(prefill_tp=prefill_tp, decode_tp=decode_tp), memory="128MiB") as cluster:
        serial = cluster.start_all()["serial"]
        asyncio.run(_check(cluster, checks, serial, f"TP {prefill_tp} → {decode_tp}"))


async def _check(cluster: Cluster, checks: Checks, serial: int, name: str) -> None:
    await cluster.all_well()
    rng = random.Random(0)
    prompts = [rng.choices(range(256), k=tokens) for tokens in _PROMPTS]
    prompts.append(prompts[-1][:100] + prompts[0])  # begins as another one
    answers = await asyncio.gather(*(_ask(cluster, prompt) for prompt in prompts[:-1]))
    answers.append(await _ask(cluster, prompts[-1]))
    references = [cluster.ask_trainer(generate=prompt, max_tokens=_TOKENS, ignore_eos=True) for prompt in prompts]
    comparisons = [
        compare(answer.token_ids, reference["tokens"], reference["gaps"])
        for answer, reference in zip(answers, references, strict=True)
    ]
    checks.answers(f"{name}: answers are plain generation's", comparisons)
    reused = answers[-1].reused_tokens
    checks.claim(f"{name}: prefixes are found in the pool", reused == 96, f"{reused} of {len(prompts[-1])} tokens")
    parts = cluster.shape.pool_parts
    copied = copy_pages(prompts[2], "corrupted", serial=serial, parts=parts, zero=(4, [parts - 1]))
    answer = await _ask(cluster, prompts[2], cache_salt="corrupted")
    changed = answer.reused_tokens == copied and answer.token_ids != answers[2].token_ids
    checks.claim(f"{name}: zeroing one rank's heads of one page changes the answer", changed, f"1 part of {parts}")


async def _ask(cluster: Cluster, prompt: list[int], **more: str) -> Answer:
    body = {"prompt": prompt, "max_tokens": _TOKENS, "ignore_eos": True, **more}
    return await ask(cluster.front_url(), "/v1/completions", body)
