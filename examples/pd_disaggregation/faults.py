"""What goes wrong while the demo serves: a decode worker is killed in the middle of answers, a rank of a prefill worker
in the middle of a prompt, a client goes away, and more requests come than there is room for."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time

import aiohttp
from checks import Checks, Comparison, compare
from client import Answer, RequestFailed, ask
from cluster import Cluster
from rich.console import Console


class Faults:
    """Each method does its damage, waits until all is well again, and makes its claims. `vocabulary`: token ids that
    prompts are drawn from."""

    def __init__(self, cluster: Cluster, console: Console, checks: Checks, vocabulary: range) -> None:
        self.cluster, self.console, self.checks = cluster, console, checks
        self._vocabulary = vocabulary
        self._random = random.Random(0)

    # ---- asking -------------------------------------------------------------------------------------------------
    def prompt(self, tokens: int) -> list[int]:
        return self._random.choices(self._vocabulary, k=tokens)

    async def ask(self, prompt: list[int], tokens: int, on_text=None) -> Answer:
        body = {"prompt": prompt, "max_tokens": tokens, "ignore_eos": True}
        return await ask(self.cluster.front_url(), "/v1/completions", body, on_text=on_text)

    def compared(self, answers: list[Answer]) -> list[Comparison]:
        comparisons = []
        for answer in answers:
            tokens = len(answer.token_ids)
            reference = self.cluster.ask_trainer(generate=answer.prompt_token_ids, max_tokens=tokens, ignore_eos=True)
            comparisons.append(compare(answer.token_ids, reference["tokens"], reference["gaps"]))
        return comparisons

    async def at_rest(self, timeout_s: float = 20) -> dict[str, dict]:
        """The workers' states once none holds a page; TimeoutError if one keeps some."""
        deadline = time.monotonic() + timeout_s
        while True:
            workers = await self.cluster.all_well()
            if all(state["pages_available"] == self.cluster.shape.pages for state in workers.values()):
                return workers
            if time.monotonic() > deadline:
                held = {name: state["pages_available"] for name, state in workers.items()}
                raise TimeoutError(f"pages are held {timeout_s} s after the last request: {held}")
            await asyncio.sleep(0.05)

    # ---- what goes wrong ----------------------------------------------------------------------------------------
    async def decode_worker_dies(self, requests: int = 4, tokens: int = 16) -> None:
        victim, pieces = "decode-0", asyncio.Event()
        seen = [0] * requests

        def count(index: int) -> None:
            seen[index] += 1
            if min(seen) >= 3:  # everybody has had some
                pieces.set()

        asking = [
            asyncio.create_task(self.ask(self.prompt(40), tokens, lambda _, index=index: count(index)))  # type: ignore[misc]
            for index in range(requests)
        ]
        await asyncio.wait([asyncio.create_task(pieces.wait()), *asking], return_when=asyncio.FIRST_COMPLETED)
        pid = self.cluster.processes[victim].pid
        self.cluster.restart(victim, signal.SIGKILL)
        self.console.print(f"[yellow]{victim} killed[/] (pid {pid}) with {requests} answers under way")
        answers = await asyncio.gather(*asking)
        moved = sum(answer.metrics["retries"] > 0 for answer in answers)
        self.checks.claim(
            "answers of a killed decode worker go on elsewhere", moved > 0, f"{moved} of {requests} moved"
        )
        self.checks.answers("they are plain generation's", self.compared(answers))
        await self.cluster.all_well(unlike={victim: pid})
        await self.at_rest()

    async def prefill_rank_dies(self, tokens: int = 8) -> None:
        """Its last rank: the others of its worker end with it."""
        victim = "prefill-0"
        before = (await self.cluster.all_well())[victim]
        asking = [asyncio.create_task(self.ask(self.prompt(200), tokens)) for _ in range(4)]
        while not (await self.cluster.all_well())[victim]["sequences"]:
            await asyncio.sleep(0.01)
        rank = before["ranks"][-1]["pid"]
        os.kill(rank, signal.SIGKILL)
        self.console.print(f"[yellow]a rank of {victim} killed[/] (pid {rank}) in the middle of a prompt")
        self.cluster.processes[victim].wait(20)
        self.cluster.restart(victim)
        answers = await asyncio.gather(*asking)
        moved = sum(answer.metrics["retries"] > 0 for answer in answers)
        self.checks.claim("prompts of a prefill worker that lost a rank are run elsewhere", moved > 0, f"{moved} moved")
        self.checks.answers("their answers are plain generation's", self.compared(answers))
        await self.cluster.all_well(unlike={victim: before["pid"]})
        await self.at_rest()

    async def client_goes_away(self) -> None:
        before = sum(state["tokens_run"] for state in (await self.at_rest()).values())
        body = {"prompt": self.prompt(40), "max_tokens": 1000, "ignore_eos": True, "stream": True}
        async with aiohttp.ClientSession() as http:
            async with http.post(f"{self.cluster.front_url()}/v1/completions", json=body) as response:
                await response.content.readline()
        workers = await self.at_rest()
        ran = sum(state["tokens_run"] for state in workers.values()) - before
        quarantined = sum(state["pages_quarantined"] for state in workers.values())
        evidence = f"{ran} of 1000 tokens run, no page held"
        self.checks.claim("a client that goes away frees everything", ran < 900 and not quarantined, evidence)

    async def too_many_requests(self, tokens: int = 4) -> None:
        shape = self.cluster.shape
        room = shape.max_running + shape.max_waiting
        asking = [self.ask(self.prompt(24), tokens) for _ in range(room + 8)]
        outcomes = await asyncio.gather(*asking, return_exceptions=True)
        answers = [outcome for outcome in outcomes if isinstance(outcome, Answer)]
        refused = [outcome for outcome in outcomes if isinstance(outcome, RequestFailed) and outcome.status == 429]
        self.checks.claim(
            "beyond what may run and wait, 429 with Retry-After",
            len(refused) == 8 and len(answers) == room and all(each.retry_after_s for each in refused),
            f"{len(refused)} of {len(outcomes)} refused",
        )
        self.checks.answers("those that waited have plain generation's answer", self.compared(answers))
        workers = await self.at_rest()
        batch = max(state["largest_batch"] for name, state in workers.items() if name.startswith("decode"))
        self.checks.claim("answers are decoded in batches", batch > 1, f"up to {batch} in one forward pass")
