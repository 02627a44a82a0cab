"""Decides what a worker computes next: chunks of prompts, and one token for each answer under way.

Rank 0's compute thread goes round and round: take new jobs in, run one chunk of the oldest prompt, run one decode step
of all answers. An answer joins the batch when its pages are there and leaves it with its last token. A worker that is
given prompts only is a prefill worker; one that is given answers only is a decode worker; given whole requests it is
both, and what it computes does not change with it.
"""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field

from rank import Ranks

_LAGGING_S = 0.002  # how long to wait before other ranks are asked again
_FULL_S = 0.05  # the same for pages, when nothing is heard of any


@dataclass
class Job:
    """One request, or the half of one that this worker has. `emit` is called on the compute thread, last with "done" or
    "error"."""

    name: str
    kind: str  # "prefill": the prompt only. "decode": the answer only. "both"
    prompt: list[int]
    emit: Callable[[dict], None]
    max_tokens: int = 1
    eos: frozenset[int] = frozenset()
    cache_salt: str = ""
    opened: bool = False  # a prefill job's tickets have come
    first_token: int | None = None  # of a prefill job that is computed
    timeout_s: float = 120
    tokens: list[int] = field(default_factory=list)  # the answer
    computed: int = 0  # prompt tokens whose keys and values are there
    began: float = field(default_factory=time.perf_counter)
    result: dict = field(default_factory=dict)


class Scheduler:
    """`submit` and `cancel` may be called from any thread; `run` is the compute thread's."""

    def __init__(self, ranks: Ranks, *, chunk_size: int, max_batch: int) -> None:
        self.ranks = ranks
        self.chunk_size, self.max_batch = chunk_size, max_batch
        self._changed = threading.Condition()
        self._awake = False
        self._arrivals: list[Job] = []
        self._cancelled: set[str] = set()
        self._tickets: list[tuple[Job, list[bytes]]] = []
        self._given: list[tuple[Job, list[bytes]]] = []  # the same, the compute thread's
        self._calls: list[Callable[[], None]] = []
        self._stopping = False
        # In the order of their coming, each job in one of them:
        self.waiting: list[Job] = []  # for pages
        self.prompts: list[Job] = []  # being computed
        self.computed: list[Job] = []  # and the tickets for their pages have not come yet
        self.leaving: list[Job] = []  # their pages under way to the decode worker
        self.coming: list[Job] = []  # their pages under way to us
        self.answers: list[Job] = []

    # ---- from other threads -------------------------------------------------------------------------------------
    def submit(self, job: Job) -> None:
        with self._changed:
            self._arrivals.append(job)
        self.wake()

    def cancel(self, job: Job) -> None:
        """Whatever it holds becomes free; no more of it is emitted. Nothing happens if it is over."""
        with self._changed:
            self._cancelled.add(job.name)
        self.wake()

    def tickets(self, job: Job, tickets: list[bytes]) -> None:
        """Of the decode worker, for the pages of a prefill job. They may come while it is computed."""
        with self._changed:
            self._tickets.append((job, tickets))
        self.wake()

    def between_steps(self, call: Callable[[], None]) -> None:
        """Runs `call` on the compute thread."""
        with self._changed:
            self._calls.append(call)
        self.wake()

    def stop(self) -> None:
        self._stopping = True
        self.wake()

    def wake(self) -> None:
        """Something has changed: look again."""
        with self._changed:
            self._awake = True
            self._changed.notify()

    # ---- the compute thread -------------------------------------------------------------------------------------
    def run(self, on_end: Callable[[], None]) -> None:
        """Until `stop`. `on_end` is called when it ends by itself, because a rank has died or of a bug."""
        try:
            while not self._stopping:
                self._take_changes()
                self._admit()
                self._open()
                self._settle(self.leaving, self._left)
                self._settle(self.coming, self._came)
                self._chunk()
                self._step()
                self._wait()
            self.ranks.call("close")
        except BaseException:
            traceback.print_exc()
            on_end()

    def _take_changes(self) -> None:
        with self._changed:
            self._awake = False
            arrivals, self._arrivals = self._arrivals, []
            cancelled, self._cancelled = self._cancelled, set()
            calls, self._calls = self._calls, []
            self._given += self._tickets
            self._tickets = []
        self.waiting += [job for job in arrivals if job.name not in cancelled]
        for jobs in (self.waiting, self.prompts, self.computed, self.leaving, self.coming, self.answers):
            for job in [job for job in jobs if job.name in cancelled]:
                jobs.remove(job)
                if jobs is not self.waiting:
                    self.ranks.call("release", job.name)
        for call in calls:
            call()

    def _wait(self) -> None:
        """Sleeps while there is nothing to compute."""
        if self.prompts or self.answers:
            return
        lagging = any(self.ranks.first.here(job.name) is not None for job in self.leaving + self.coming)
        timeout = _LAGGING_S if lagging else _FULL_S if self.waiting else None
        with self._changed:
            self._changed.wait_for(lambda: self._awake, timeout)

    def _admit(self) -> None:
        """Gives waiting jobs their pages, first come first served. One for which there are none waits until there are,
        and those behind it, too."""
        while self.waiting:
            job = self.waiting[0]
            outcome = self._begin(job)
            full = outcome.get("error", {}).get("type") == "PoolFull"
            if full and time.perf_counter() - job.began < job.timeout_s:
                return
            self.waiting.pop(0)
            if "error" in outcome:
                job.emit(outcome)

    def _begin(self, job: Job) -> dict:
        left = job.timeout_s - (time.perf_counter() - job.began)
        everything = len(job.prompt) + job.max_tokens
        if job.kind == "decode":
            outcome = self.ranks.call("receive", job.name, job.prompt, job.cache_salt, everything, max(left, 0))
            if "error" not in outcome:
                self.coming.append(job)
                job.emit(outcome)
            return outcome
        tokens = everything if job.kind == "both" else len(job.prompt)
        queue_s = time.perf_counter() - job.began
        outcome = self.ranks.call("begin", job.name, job.prompt, job.cache_salt, tokens)
        if "error" not in outcome:
            self.prompts.append(job)
            job.computed = outcome["reused"]
            job.result = {"prompt_tokens": len(job.prompt), "reused_tokens": job.computed, "queue_s": queue_s}
            job.result["compute_s"] = 0.0
        return outcome

    def _open(self) -> None:
        """Uses tickets that have come for jobs that have their pages."""
        given, self._given = self._given, []
        for job, tickets in given:
            if job in self.waiting:
                self._given.append((job, tickets))
            elif job in self.prompts or job in self.computed:
                self.ranks.call("open", job.name, tickets)
                job.opened = True
        for job in [job for job in self.computed if job.opened]:
            self.computed.remove(job)
            self._leave(job)

    def _leave(self, job: Job) -> None:
        self.ranks.call("finish", job.name, job.first_token)
        self.leaving.append(job)

    def _chunk(self) -> None:
        if not self.prompts:
            return
        job = self.prompts[0]
        if failed := self.ranks.first.here(job.name):  # the decode worker cancelled, or is gone
            self._end(self.prompts, job, failed)
            return
        began = time.perf_counter()
        count = min(self.chunk_size, len(job.prompt) - job.computed)
        outcome = self.ranks.call("chunk", job.name, count)
        job.computed += count
        job.result["compute_s"] += time.perf_counter() - began
        if "error" in outcome:
            self._end(self.prompts, job, outcome)
        elif "token" in outcome:
            self.prompts.remove(job)
            job.result |= {"pool_load_bytes": outcome["load_bytes"], "pool_load_s": outcome["load_wait_s"]}
            if job.kind == "both":
                self.answers.append(job)
                self._say(job, outcome["token"])
            else:
                job.first_token = outcome["token"]
                self.computed.append(job)
                self._open()

    def _settle(self, jobs: list[Job], then: Callable[[Job, list[dict]], None]) -> None:
        for job in list(jobs):
            if self.ranks.first.here(job.name) is None:
                continue
            outcomes = self.ranks.call("settled", job.name)
            if outcomes is None:
                continue
            if "error" in outcomes[0]:
                self._end(jobs, job, outcomes[0])
            else:
                then(job, outcomes)

    def _left(self, job: Job, outcomes: list[dict]) -> None:
        nbytes = sum(outcome["push_bytes"] for outcome in outcomes)
        exposed_s = max(outcome["push_exposed_s"] for outcome in outcomes)
        done = job.result | outcomes[0] | {"push_bytes": nbytes, "push_exposed_s": exposed_s}
        self._end(self.leaving, job, {"done": done})

    def _came(self, job: Job, outcomes: list[dict]) -> None:
        self.coming.remove(job)
        self.answers.append(job)
        job.result = {"kv_wait_s": time.perf_counter() - job.began}
        self._say(job, outcomes[0]["meta"]["first_token"])

    def _step(self) -> None:
        """One token for each answer; with more than fit a batch, those that came first go first."""
        batch = self.answers[: self.max_batch]
        if batch:
            tokens = self.ranks.call("decode", [job.name for job in batch], [job.tokens[-1] for job in batch])
            for job, token in zip(batch, tokens, strict=True):
                self._say(job, token)

    def _say(self, job: Job, token: int) -> None:
        job.tokens.append(token)
        job.emit({"token": token})
        if token in job.eos or len(job.tokens) == job.max_tokens:
            self._end(self.answers, job, {"done": job.result}, job.tokens)

    def _end(self, jobs: list[Job], job: Job, event: dict, answer: list[int] | None = None) -> None:
        jobs.remove(job)
        self.ranks.call("release", job.name, answer)
        job.emit(event)
