"""What the demo does with the running cluster, and the evidence it collects on the way."""

from __future__ import annotations

from dataclasses import dataclass

import aiohttp
from checks import Checks, Comparison, compare
from client import Answer, ask
from cluster import Cluster
from corruption import copy_pages
from rich.console import Console
from rich.markup import escape

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
    """`serial`: of the weights that the workers hold at its beginning."""

    def __init__(
        self, cluster: Cluster, console: Console, checks: Checks, *, serial: int, max_tokens: int = 32
    ) -> None:
        self.cluster = cluster
        self.console = console
        self.checks = checks
        self.max_tokens = max_tokens
        self.turns: list[Turn] = []
        self._step = 0
        self._serial = serial

    @property
    def url(self) -> str:
        return self.cluster.front_url()

    # ---- asking -------------------------------------------------------------------------------------------------
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
    async def converse(self, turns: int) -> None:
        """Two conversations and a plain completion, a prefill worker being replaced in between; then their checks."""
        first: list[dict] = [{"role": "system", "content": SYSTEM}]
        second: list[dict] = list(first)
        await self.say("A1", first, QUESTIONS_A[0], "cold")
        await self.say("B1", second, QUESTIONS_B[0], "A's system prompt")
        await self.say("A2", first, QUESTIONS_A[1], "own prefix")
        replaced = self._replace_prefill_worker()
        for turn in range(2, turns):
            note = f"without {replaced}" if turn == 2 else "own prefix"
            await self.say(f"A{turn + 1}", first, QUESTIONS_A[turn % len(QUESTIONS_A)], note)
        await self.say("B2", second, QUESTIONS_B[1], f"without {replaced}")
        await self.complete("C1", PLAIN_PROMPT, "cold, not a chat")
        self.check_answers()
        await self._corrupt_a_page()

    def _replace_prefill_worker(self) -> str:
        """The one that served last: another one, or its successor, has to find what it stored."""
        name = self.turns[-1].answer.metrics["workers"][0]
        before = self.cluster.processes[name].pid
        self.cluster.restart(name)
        self._replaced_at = len(self.turns)
        self.console.print(f"[yellow]{name} ended[/] (pid {before}), another is starting\n")
        return name

    async def _corrupt_a_page(self) -> None:
        original = self.turns[0].answer
        prompt, parts = original.prompt_token_ids, self.cluster.shape.pool_parts
        for salt, zero in (("copied", None), ("corrupted", (0, list(range(parts))))):
            tokens = copy_pages(prompt, salt, serial=self._serial, parts=parts, zero=zero)
            body = {"prompt": prompt, "max_tokens": self.max_tokens, "cache_salt": salt}
            answer = await ask(self.url, "/v1/completions", body)
            read = answer.reused_tokens == tokens
            same = answer.token_ids == original.token_ids
            if zero is None:
                self.checks.claim("a copy of A1's pages gives A1's answer", read and same, f"{tokens} tokens in them")
            else:
                evidence = repr(answer.text.strip()[:60])
                self.checks.claim("zeroing one pool page changes the answer", read and not same, evidence)

    async def new_weights(self) -> list[dict]:
        """A step of training, published and taken by all workers while they serve; rows of the weights table."""
        self.cluster.ask_trainer(train=1)
        rows = [{"step": 1, "who": "trainer", "verb": "publish", **self.cluster.ask_trainer(publish=1)}]
        self._step = 1
        async with aiohttp.ClientSession() as http:
            for name, state in (await self.cluster.all_well()).items():
                async with http.post(f"{state['url']}/weights", json={"timeout_s": 60}) as response:
                    rows.append({"who": name, "verb": "update", **(await response.json())})
        messages = [{"role": "system", "content": SYSTEM}]
        answer = await self.say("N1", messages, QUESTIONS_A[0], "new weights: cold again")
        reused = f"{answer.reused_tokens} reused"
        self.checks.claim("pages of the old weights are not used with the new", answer.reused_tokens == 0, reused)
        self._compare(self.turns[-1])
        self.checks.answers("after the update the answer is the new weights'", self._comparisons(self.turns[-1:]))
        return rows

    # ---- the evidence -------------------------------------------------------------------------------------------
    def _compare(self, turn: Turn) -> None:
        reference = self.cluster.ask_trainer(generate=turn.answer.prompt_token_ids, max_tokens=turn.max_tokens)
        turn.comparison = compare(turn.answer.token_ids, reference["tokens"], reference["gaps"])

    @staticmethod
    def _comparisons(turns: list[Turn]) -> list[Comparison]:
        return [turn.comparison for turn in turns if turn.comparison is not None]

    def check_answers(self) -> None:
        """Every answer so far against plain single-process generation by the trainer, and what moved."""
        for turn in self.turns:
            self._compare(turn)
        self.checks.answers("every answer is plain generation's, token for token", self._comparisons(self.turns))
        hits = [turn.answer.reused_tokens for turn in self.turns]
        self.checks.claim("prefixes are found in the pool", sum(hits) > 0, f"{sum(hits)} prompt tokens reused")
        cold = [turn for turn in self.turns if turn.note.startswith("cold")]
        self.checks.claim(
            "cold prompts reuse nothing", all(turn.answer.reused_tokens == 0 for turn in cold), f"{len(cold)} prompts"
        )
        after = hits[self._replaced_at]
        self.checks.claim("what a worker stored is found when it is gone", after > 0, f"{after} tokens of a prompt")
        moved = sum(turn.answer.metrics["prefill"]["push_bytes"] for turn in self.turns)
        self.checks.claim("the engine moved the pages", moved > 0, f"{moved / 1e6:.1f} MB pushed")

    async def check_division_of_labour(self) -> None:
        """Before anything is asked of workers in both roles."""
        workers = await self.cluster.all_well()
        ran = {name: state["prompt_tokens_run"] for name, state in workers.items() if state["role"] == "decode"}
        told = sum(state["tokens_run"] for state in workers.values() if state["role"] == "decode")
        self.checks.claim(
            "decode workers ran no prompt token", not any(ran.values()) and told > 0, f"{told} tokens of answers run"
        )

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
