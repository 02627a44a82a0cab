"""What the demo does with the running cluster, and the evidence it collects on the way."""

from __future__ import annotations

import asyncio
import signal
import time
from dataclasses import dataclass

import aiohttp
import torch
from checks import Checks, Comparison, compare
from client import Answer, ask
from cluster import Cluster
from model import config_from_json
from paged_cache import make_cache
from rich.console import Console
from rich.markup import escape
from worker import CONFIG_KEY, PAGE_SIZE, WEIGHTS

import torch_mooncake as tm
from torch_mooncake.kv import PoolKV

SYSTEM = (
    "You are a patient travel guide who answers in one short sentence. You know the capitals of Europe and their "
    "rivers: Paris lies on the Seine, Rome on the Tiber, London on the Thames, Vienna and Budapest on the Danube, "
    "Prague on the Vltava, Warsaw on the Vistula, and Lisbon on the Tagus. You never invent a place, you say so when "
    "you do not know, and you never talk about the weather."
)
QUESTIONS_A = [
    "What is the capital of France?",
    "Which river flows through it?",
    "And what is the capital of Italy?",
    "Which river flows through that one?",
]
QUESTIONS_B = ["Name two capitals on the Danube.", "Which of them is in Hungary?"]
PLAIN_PROMPT = "Here is a list of the seven days of the week in order: Monday, Tuesday,"


@dataclass
class Turn:
    name: str
    answer: Answer
    step: int  # of the weights that answered
    max_tokens: int
    note: str = ""
    comparison: Comparison | None = None


class Story:
    def __init__(self, cluster: Cluster, console: Console, checks: Checks, *, max_tokens: int = 32) -> None:
        self.cluster = cluster
        self.console = console
        self.checks = checks
        self.max_tokens = max_tokens
        self.turns: list[Turn] = []
        self._step = 0

    @property
    def url(self) -> str:
        return self.cluster.front_url()

    # ---- asking -------------------------------------------------------------------------------------------------
    async def health(self) -> tuple[int, dict]:
        async with aiohttp.ClientSession() as http, http.get(f"{self.url}/healthz") as response:
            return response.status, (await response.json())["workers"]

    async def wait_until_healthy(self, timeout_s: float = 120) -> dict:
        """The workers' states once both answer; ChildFailed as soon as one has died instead."""
        deadline = time.monotonic() + timeout_s
        while True:
            status, workers = await self.health()
            if status == 200:
                return workers
            self.cluster.check()
            if time.monotonic() > deadline:
                raise TimeoutError(f"the workers are not up after {timeout_s} s: {workers}")
            await asyncio.sleep(0.1)

    async def say(self, name: str, messages: list[dict], question: str, note: str = "") -> Answer:
        """One streamed chat turn; question and answer are added to `messages`."""
        messages.append({"role": "user", "content": question})
        self.console.print(f"[bold cyan]{name}[/] {escape(question)}\n   ", end="")
        body = {"messages": messages, "max_tokens": self.max_tokens}
        answer = await ask(self.url, "/v1/chat/completions", body, on_text=self._print_piece)
        messages.append({"role": "assistant", "content": answer.text})
        return self._keep(name, answer, note)

    async def complete(self, name: str, prompt: str, note: str = "") -> Answer:
        """One plain completion, not streamed."""
        body = {"prompt": prompt, "max_tokens": self.max_tokens}
        answer = await ask(self.url, "/v1/completions", body)
        self.console.print(f"[bold cyan]{name}[/] {escape(prompt)}\n   ", end="")
        self._print_piece(answer.text)
        return self._keep(name, answer, note)

    def _print_piece(self, piece: str) -> None:
        shown = "".join(char if char.isprintable() or char == "\n" else "·" for char in piece)
        self.console.print(shown, end="", soft_wrap=True, markup=False)

    def _keep(self, name: str, answer: Answer, note: str) -> Answer:
        how = f"{answer.reused_tokens} of {len(answer.prompt_token_ids)} prompt tokens from the pool"
        self.console.print(f"\n   [dim]TTFT {answer.metrics['ttft_s'] * 1e3:.0f} ms, {how}[/]\n")
        self.turns.append(Turn(name, answer, self._step, self.max_tokens, note))
        return answer

    # ---- the story ----------------------------------------------------------------------------------------------
    async def tell(self, turns: int) -> list[dict]:
        """All of it; returns the rows of the weights table for the second publication."""
        first: list[dict] = [{"role": "system", "content": SYSTEM}]
        second: list[dict] = list(first)
        await self.say("A1", first, QUESTIONS_A[0], "cold")
        await self.say("B1", second, QUESTIONS_B[0], "A's system prompt")
        await self.say("A2", first, QUESTIONS_A[1], "own prefix")
        await self._restart_prefill()
        for turn in range(2, turns):
            note = "after the restart" if turn == 2 else "own prefix"
            await self.say(f"A{turn + 1}", first, QUESTIONS_A[turn % len(QUESTIONS_A)], note)
        await self.say("B2", second, QUESTIONS_B[1], "after the restart")
        await self.complete("C1", PLAIN_PROMPT, "cold, not a chat")
        self.check_answers()
        await self._corrupt_a_page()
        return await self._new_weights()

    async def _restart_prefill(self) -> None:
        before = (await self.health())[1]["prefill"]["pid"]
        self.cluster.end("prefill", signal.SIGTERM)
        self.cluster.start("prefill")
        after = (await self._wait_for_other_pid("prefill", before))["pid"]
        self._restarted_at = len(self.turns)
        self.console.print(f"[yellow]prefill worker restarted[/] (pid {before} → {after})\n")

    async def _wait_for_other_pid(self, role: str, before: int) -> dict:
        while True:
            state = (await self.wait_until_healthy())[role]
            if state["pid"] != before:
                return state
            await asyncio.sleep(0.1)

    async def _corrupt_a_page(self) -> None:
        """A1's pages again under another salt, one of them zeroed: if the pool's bytes are what the attention reads,
        the answer must change."""
        original = self.turns[0].answer
        prompt = original.prompt_token_ids
        pages = (len(prompt) - 1) // PAGE_SIZE
        states = (await self.health())[1]
        kv = make_cache(config_from_json(tm.get(CONFIG_KEY)), 1, PAGE_SIZE)
        pool_kv = PoolKV(tm, kv, model=f"{WEIGHTS}#{states['prefill']['weights']['serial']}")
        for salt, zeroed in (("copied", None), ("corrupted", 0)):
            for index, (source, target) in enumerate(
                zip(
                    pool_kv.page_keys(prompt)[:pages],
                    pool_kv.page_keys(prompt, cache_salt=salt)[:pages],
                    strict=True,
                )
            ):
                page = tm.get(source).clone()
                tm.put(target, torch.zeros_like(page) if index == zeroed else page, sealed=True)
            answer = await ask(
                self.url,
                "/v1/completions",
                {"prompt": prompt, "max_tokens": self.max_tokens, "cache_salt": salt},
            )
            read = answer.reused_tokens == pages * PAGE_SIZE
            same = answer.token_ids == original.token_ids
            if zeroed is None:
                self.checks.claim("a copy of A1's pages gives A1's answer", read and same, f"{pages} pages copied")
            else:
                self.checks.claim(
                    "zeroing one pool page changes the answer", read and not same, repr(answer.text.strip()[:60])
                )

    async def _new_weights(self) -> list[dict]:
        """A step of training, published and taken by both workers while they serve."""
        self.cluster.ask_trainer(train=1)
        rows = [{"step": 1, "who": "trainer", "verb": "publish", **self.cluster.ask_trainer(publish=1)}]
        self._step = 1
        states = (await self.health())[1]
        front_workers = {role: states[role]["url"] for role in ("prefill", "decode")}
        async with aiohttp.ClientSession() as http:
            for role, url in front_workers.items():
                async with http.post(f"{url}/weights", json={"timeout_s": 60}) as response:
                    rows.append({"who": role, "verb": "update", **(await response.json())})
        messages = [{"role": "system", "content": SYSTEM}]
        answer = await self.say("N1", messages, QUESTIONS_A[0], "new weights: cold again")
        self.checks.claim(
            "pages of the old weights are not used with the new",
            answer.reused_tokens == 0,
            f"{answer.reused_tokens} reused",
        )
        self._compare(self.turns[-1])
        self.checks.claim(
            "after the update the answer is the new weights'",
            self._passed(self.turns[-1]),
            self._detail([self.turns[-1]]),
        )
        status, states = await self.health()
        run = states["decode"]["prompt_tokens_run"]
        self.checks.claim(
            "the decode worker ran no prompt token",
            status == 200 and run == 0,
            f"{run} of {states['decode']['tokens_run']} run",
        )
        return rows

    # ---- the evidence -------------------------------------------------------------------------------------------
    def _compare(self, turn: Turn) -> None:
        reference = self.cluster.ask_trainer(generate=turn.answer.prompt_token_ids, max_tokens=turn.max_tokens)
        turn.comparison = compare(turn.answer.token_ids, reference["tokens"], reference["gaps"])
        if turn.comparison.tie_at is not None:
            self.console.print(f"tie in {turn.name}: {turn.comparison.detail}")

    @staticmethod
    def _passed(turn: Turn) -> bool:
        return turn.comparison is not None and turn.comparison.passed

    @staticmethod
    def _detail(turns: list[Turn]) -> str:
        wrong = [
            f"{turn.name}: {turn.comparison.detail}" for turn in turns if turn.comparison and turn.comparison.detail
        ]
        tokens = sum(len(turn.answer.token_ids) for turn in turns)
        return "; ".join(wrong) or f"{tokens} tokens of {len(turns)} answers"

    def check_answers(self) -> None:
        """Every answer so far against plain single-process generation by the trainer, and what moved."""
        for turn in self.turns:
            self._compare(turn)
        self.checks.claim(
            "every answer is plain generation's, token for token",
            all(map(self._passed, self.turns)),
            self._detail(self.turns),
        )
        hits = [turn.answer.reused_tokens for turn in self.turns]
        self.checks.claim("prefixes are found in the pool", sum(hits) > 0, f"{sum(hits)} prompt tokens reused")
        cold = [turn for turn in self.turns if turn.note.startswith("cold")]
        self.checks.claim(
            "cold prompts reuse nothing", all(turn.answer.reused_tokens == 0 for turn in cold), f"{len(cold)} prompts"
        )
        after = hits[self._restarted_at]
        self.checks.claim("a restarted prefill worker hits", after > 0, f"{after} tokens of its first prompt")
        moved = sum(turn.answer.metrics["prefill"]["push_bytes"] for turn in self.turns)
        self.checks.claim("the engine moved the pages", moved > 0, f"{moved / 1e6:.1f} MB pushed")

    def turn_rows(self) -> list[dict]:
        return [
            {
                "name": turn.name,
                "note": turn.note,
                "text": turn.answer.text,
                "prompt_tokens": len(turn.answer.prompt_token_ids),
                "tokens": len(turn.answer.token_ids),
                "reused_tokens": turn.answer.reused_tokens,
                "same": bool(turn.comparison and turn.comparison.same),
                "tie_at": turn.comparison.tie_at if turn.comparison else None,
                **turn.answer.metrics,
            }
            for turn in self.turns
        ]
