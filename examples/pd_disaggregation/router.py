"""Which worker a request goes to, and what is done when one fails.

Prefill and decode workers are chosen by the work they have been given and not finished. A request whose worker is lost
is run again elsewhere: decoding is greedy, so that the prompt together with the tokens that have gone out already
continues as the lost worker would have continued it. (Its pages are computed again, but for what the pool has.)
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass, field

import aiohttp
from worker import STILL_HERE_S

ROLES = ("prefill", "decode")
_SILENCE_S = 4 * STILL_HERE_S  # a worker that is silent for so long does not run
_REASON_S = 1.0  # how long the failure of one worker waits for that of the other, which may be the reason
# Another try may succeed after these; anything else a worker says it would say again.
_TRANSIENT = ("PoolFull", "PeerLost", "Cancelled", "Closed", "DeadlineExceeded", "KeyNotFound", "PoolUnavailable")


class WorkerUnavailable(Exception):
    """A worker is dead, or refuses for now; the same request may succeed later."""

    def __init__(self, role: str, message: str) -> None:
        super().__init__(f"the {role} worker is not available: {message}")
        self.role = role


class WorkerFailed(Exception):
    """A worker answered that it cannot do this, and would again."""


@dataclass(eq=False)
class Place:
    """Where a worker is, and what it has been given."""

    name: str
    role: str
    url: str
    pid: int
    tokens: int = 0  # of requests that it has not finished


@dataclass
class Work:
    """What a request wants of the workers."""

    prompt: list[int]
    max_tokens: int
    eos: list[int]
    cache_salt: str
    colocated: bool  # prompt and answer by one worker
    timeout_s: float


@dataclass
class Metrics:
    """Of one request; goes out with its answer."""

    started: float = field(default_factory=time.perf_counter)
    ttft_s: float | None = None
    total_s: float | None = None
    retries: int = 0
    workers: list[str] = field(default_factory=list)
    prefill: dict | None = None
    decode: dict | None = None

    def to_dict(self) -> dict:
        return {name: value for name, value in vars(self).items() if name != "started"}


class Router:
    """`recovery_s`: how long a request waits for a worker when there is none. For one event loop."""

    def __init__(self, http: aiohttp.ClientSession, *, recovery_s: float, retries: int = 3) -> None:
        self._http = http
        self._recovery_s = recovery_s
        self._retries = retries
        self._changed = asyncio.Event()
        self.places: dict[str, Place] = {}
        self.lost: set[str] = set()  # names of workers that were here

    # ---- who is there -------------------------------------------------------------------------------------------
    def announced(self, place: Place) -> None:
        known = self.places.get(place.name)
        if known is None or (known.pid, known.url) != (place.pid, place.url):
            self.places[place.name] = place
            self.lost.discard(place.name)
            self._changed.set()

    def forget(self, place: Place) -> None:
        """Until it announces itself again."""
        if self.places.get(place.name) is place:
            del self.places[place.name]
            self.lost.add(place.name)

    async def choose(self, role: str) -> Place:
        """Of the workers of that role ("" for any) the one with the least to do; waits a while when there is none."""
        deadline = time.monotonic() + self._recovery_s
        while True:
            here = [place for place in self.places.values() if role in ("", place.role)]
            if here:
                return min(here, key=lambda place: place.tokens)
            self._changed.clear()
            try:
                await asyncio.wait_for(self._changed.wait(), max(0, deadline - time.monotonic()))
            except asyncio.TimeoutError:
                message = f"none has announced itself in {self._recovery_s:.0f} s"
                raise WorkerUnavailable(role or "prefill", message) from None

    # ---- one request --------------------------------------------------------------------------------------------
    async def tokens(self, work: Work, metrics: Metrics) -> AsyncIterator[int]:
        """The answer's tokens as they come. Raises WorkerUnavailable or WorkerFailed when all tries have; closing the
        iterator cancels the jobs of all workers."""
        answer: list[int] = []
        while True:
            try:
                async with aclosing(self._attempt(work, answer, metrics)) as attempt:
                    async for token in attempt:
                        answer.append(token)
                        metrics.ttft_s = metrics.ttft_s or time.perf_counter() - metrics.started
                        yield token
            except WorkerUnavailable:
                if not answer or not (answer[-1] in work.eos or len(answer) == work.max_tokens):
                    if metrics.retries == self._retries:
                        raise
                    metrics.retries += 1
                    await self._look_after(metrics.workers)
                    continue
            metrics.total_s = time.perf_counter() - metrics.started
            return

    def _attempt(self, work: Work, answer: list[int], metrics: Metrics) -> AsyncIterator[int]:
        body = {
            "prompt_token_ids": work.prompt + answer,
            "max_tokens": work.max_tokens - len(answer),
            "eos_token_ids": work.eos,
            "cache_salt": work.cache_salt,
            "timeout_s": work.timeout_s,
        }
        return (self._colocated if work.colocated else self._disaggregated)(body, metrics)

    async def _colocated(self, body: dict, metrics: Metrics) -> AsyncIterator[int]:
        place = await self.choose("")
        metrics.workers = [place.name]
        with _busy(place, len(body["prompt_token_ids"]) + body["max_tokens"]):
            async with self._job(place, "/complete", body) as job:
                while (event := await job.next()) is not None:
                    yield event["token"]
                metrics.prefill = metrics.decode = job.result

    async def _disaggregated(self, body: dict, metrics: Metrics) -> AsyncIterator[int]:
        decode, prefill = await self.choose("decode"), await self.choose("prefill")
        metrics.workers = [prefill.name, decode.name]
        length = len(body["prompt_token_ids"])
        tickets: asyncio.Future[list[str]] = asyncio.get_running_loop().create_future()
        prefill_busy = ExitStack()
        prefill_busy.enter_context(_busy(prefill, length))  # from now on, so that the next request sees it
        prefilling = asyncio.create_task(self._prefill(prefill, body, tickets))
        prefilling.add_done_callback(lambda _: prefill_busy.close())
        try:
            with _busy(decode, length + body["max_tokens"]):
                async with self._job(decode, "/generate", body) as job:
                    while (event := await _next(job, prefilling)) is not None:
                        if "tickets" in event:
                            tickets.set_result(event["tickets"])
                        else:
                            yield event["token"]
                    metrics.decode = job.result
                    metrics.prefill = await prefilling
        except WorkerUnavailable:
            # If the prefill worker is the reason, its own failure arrives within moments and says more.
            await asyncio.wait({prefilling}, timeout=_REASON_S)
            if _failed(prefilling):
                prefilling.result()
            raise
        finally:
            prefilling.cancel()

    async def _prefill(self, place: Place, body: dict, tickets: asyncio.Future[list[str]]) -> dict:
        """The prompt is computed while the decode worker finds room for it: its tickets follow."""

        async def lines() -> AsyncIterator[bytes]:
            yield json.dumps(body).encode() + b"\n"
            yield json.dumps({"tickets": await tickets}).encode() + b"\n"

        async with self._job(place, "/prefill", lines()) as job:
            await job.next()
            return job.result

    @asynccontextmanager
    async def _job(self, place: Place, path: str, body: dict | AsyncIterator[bytes]) -> AsyncIterator[_Events]:
        """A job of a worker. Connection errors become WorkerUnavailable, and the worker is forgotten; the job is
        cancelled when the block is left before its end, because its connection is closed."""
        try:
            timeout = aiohttp.ClientTimeout(total=None, sock_connect=2, sock_read=_SILENCE_S)
            data = json.dumps(body).encode() if isinstance(body, dict) else body
            async with self._http.post(place.url + path, data=data, timeout=timeout) as response:
                yield _Events(place, response)
        except (aiohttp.ClientError, ConnectionError, asyncio.TimeoutError) as error:
            self.forget(place)
            raise WorkerUnavailable(place.role, f"{place.name}: {type(error).__name__}: {error}") from error

    async def _look_after(self, names: list[str]) -> None:
        """Forgets those of these workers that are not there any more: one that cannot reach another says only that."""
        for place in [self.places[name] for name in names if name in self.places]:
            try:
                timeout = aiohttp.ClientTimeout(total=2)
                async with self._http.get(f"{place.url}/alive", timeout=timeout) as response:
                    response.raise_for_status()
            except (aiohttp.ClientError, asyncio.TimeoutError):
                self.forget(place)

    # ---- all of them --------------------------------------------------------------------------------------------
    async def health(self) -> dict[str, dict]:
        places = list(self.places.values())
        states = dict(zip([place.name for place in places], await asyncio.gather(*map(self._ask, places)), strict=True))
        return states | {name: {"error": "lost"} for name in self.lost}

    async def _ask(self, place: Place) -> dict:
        try:
            async with self._http.get(f"{place.url}/health", timeout=aiohttp.ClientTimeout(total=2)) as response:
                return {"url": place.url, **await response.json()}
        except (aiohttp.ClientError, asyncio.TimeoutError) as error:
            return {"role": place.role, "error": f"{type(error).__name__}: {error}"}


class _Events:
    """What a worker says of a job, up to "done"; what it says there is the `result`."""

    def __init__(self, place: Place, response: aiohttp.ClientResponse) -> None:
        self._place, self._response = place, response
        self.result: dict = {}

    async def next(self) -> dict | None:
        """{"tickets": …} or {"token": …}; None at the end."""
        while True:
            line = await self._response.content.readline()
            if not line.endswith(b"\n"):
                raise aiohttp.ClientPayloadError("the answer ended in the middle")
            event = json.loads(line)
            if "done" in event:
                self.result = event["done"]
                return None
            if "error" in event:
                kind, message = event["error"]["type"], event["error"]["message"]
                if kind in _TRANSIENT:
                    raise WorkerUnavailable(self._place.role, f"{self._place.name}: {kind}: {message}")
                raise WorkerFailed(f"the {self._place.role} worker {self._place.name} failed: {kind}: {message}")
            if event:
                return event


async def _next(job: _Events, prefilling: asyncio.Task[dict]) -> dict | None:
    """The job's next event, or the failure of the prefill worker that it waits for."""
    if prefilling.done():
        prefilling.result()
        return await job.next()
    event = asyncio.create_task(job.next())
    try:
        await asyncio.wait({event, prefilling}, return_when=asyncio.FIRST_COMPLETED)
        if _failed(prefilling) and not event.done():
            prefilling.result()
        return await event
    finally:
        event.cancel()


@contextmanager
def _busy(place: Place, tokens: int) -> Iterator[None]:
    place.tokens += tokens
    try:
        yield
    finally:
        place.tokens -= tokens


def _failed(task: asyncio.Task) -> bool:
    return task.done() and not task.cancelled() and task.exception() is not None
