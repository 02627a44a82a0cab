"""The HTTP front: OpenAI's /v1/completions and /v1/chat/completions over one prefill and one decode worker.

Workers announce themselves with POST /workers. A request that finds a worker dead, or loses one before the first
token, is answered 503 with the worker's role; later in a stream it ends with an error event. The next request after the
worker is back is served. A client that goes away takes its session with it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import openai_api as api
from aiohttp import web
from process import die_with_parent, write_json
from transformers import AutoTokenizer

ROLES = ("prefill", "decode")
REQUEST_TIMEOUT_S = 120
_LINE_NBYTES = 16 << 20


class WorkerUnavailable(Exception):
    """A worker is dead, or refuses for now; the same request may succeed later."""

    def __init__(self, role: str, message: str) -> None:
        super().__init__(f"the {role} worker is not available: {message}")
        self.role = role


class WorkerFailed(Exception):
    """A worker answered that it cannot do this, and would again."""


@dataclass
class WorkerPlace:
    url: str
    engine: str
    pid: int


@dataclass
class Metrics:
    """Of one request; goes out with its answer."""

    started: float = field(default_factory=time.perf_counter)
    ttft_s: float | None = None
    total_s: float | None = None
    prefill: dict | None = None
    decode: dict | None = None

    def to_dict(self) -> dict:
        return {"ttft_s": self.ttft_s, "total_s": self.total_s, "prefill": self.prefill, "decode": self.decode}


class Front:
    def __init__(self, tokenizer, model: str, max_model_tokens: int) -> None:
        self.tokenizer = tokenizer
        self.model = model
        self.max_model_tokens = max_model_tokens
        self.workers: dict[str, WorkerPlace] = {}
        self.http: aiohttp.ClientSession | None = None

    # ---- one answer ---------------------------------------------------------------------------------------------
    async def tokens(self, request: api.Request, metrics: Metrics) -> AsyncIterator[int]:
        """The answer's tokens as they come. Raises WorkerUnavailable or WorkerFailed; closing the iterator cancels
        the session on both workers."""
        decode, prefill = self._place("decode"), self._place("prefill")
        body = {
            "prompt_token_ids": request.prompt_token_ids,
            "max_tokens": request.max_tokens,
            "eos_token_ids": [self.tokenizer.eos_token_id],
            "prefill_engine": prefill.engine,
            "cache_salt": request.cache_salt,
            "timeout_s": REQUEST_TIMEOUT_S,
        }
        prefilling: asyncio.Task | None = None
        try:
            async with self._post("decode", decode, "/generate", body) as stream:
                async with _reaching("decode"):
                    ticket = _line(await stream.content.readline())["ticket"]
                prefilling = asyncio.create_task(self._prefill(prefill, request, ticket))
                first = asyncio.create_task(_read(stream))
                try:
                    await asyncio.wait({prefilling, first}, return_when=asyncio.FIRST_COMPLETED)
                    # A prefill worker that failed says more than the decode worker's word that it did.
                    if prefilling.done() and not first.done():
                        prefilling.result()
                    line = await first
                finally:
                    first.cancel()
                while "token" in line:
                    if metrics.ttft_s is None:
                        metrics.ttft_s = time.perf_counter() - metrics.started
                    yield line["token"]
                    line = await _read(stream)
                if "error" in line:
                    # If the prefill worker is the reason, its own failure arrives within moments and says more.
                    await asyncio.wait({prefilling}, timeout=1)
                    if prefilling.done():
                        prefilling.result()
                    raise _failure("decode", 503 if line["error"]["type"] in _TRANSIENT else 500, line["error"])
                metrics.decode = line["done"]
                metrics.total_s = time.perf_counter() - metrics.started
                with suppress(WorkerUnavailable):  # died after its work for this answer was done
                    metrics.prefill = await prefilling
        finally:
            if prefilling is not None and not prefilling.done():
                prefilling.cancel()

    async def _prefill(self, place: WorkerPlace, request: api.Request, ticket: str) -> dict:
        body = {"prompt_token_ids": request.prompt_token_ids, "ticket": ticket, "cache_salt": request.cache_salt}
        async with self._post("prefill", place, "/prefill", body) as response:
            async with _reaching("prefill"):
                return await response.json()

    def _place(self, role: str) -> WorkerPlace:
        place = self.workers.get(role)
        if place is None:
            raise WorkerUnavailable(role, "none has announced itself since the last one was lost")
        return place

    def _post(self, role: str, place: WorkerPlace, path: str, body: dict) -> _Post:
        return _Post(self, role, place, path, body)

    def lost(self, role: str, place: WorkerPlace) -> None:
        if self.workers.get(role) is place:
            del self.workers[role]

    # ---- HTTP ---------------------------------------------------------------------------------------------------
    async def completions(self, http_request: web.Request) -> web.StreamResponse:
        return await self._answer(http_request, chat=False)

    async def chat_completions(self, http_request: web.Request) -> web.StreamResponse:
        return await self._answer(http_request, chat=True)

    async def _answer(self, http_request: web.Request, *, chat: bool) -> web.StreamResponse:
        metrics = Metrics()
        try:
            body = await http_request.json()
            request = api.parse(
                body, self.tokenizer, chat=chat, model=self.model, max_model_tokens=self.max_model_tokens
            )
        except json.JSONDecodeError as error:
            return _error(400, f"the body is not JSON: {error}", "invalid_request_error")
        except api.BadRequest as error:
            return _error(400, str(error), "invalid_request_error", param=error.param)
        try:
            async with aclosing(self.tokens(request, metrics)) as tokens:
                if request.stream:
                    return await self._stream(http_request, request, tokens, metrics)
                text, token_ids = api.TextStream(self.tokenizer), []
                pieces = []
                async for token in tokens:
                    token_ids.append(token)
                    pieces.append(text.push(token))
                answer = "".join([*pieces, text.finish()])
                extra = self._summary(request, len(token_ids), metrics)
                reason = self._finish_reason(token_ids)
                return web.json_response(
                    api.completion(request, answer, token_ids=token_ids, finish_reason=reason, extra=extra)
                )
        except WorkerUnavailable as error:
            return _unavailable(error)
        except WorkerFailed as error:
            return _error(500, str(error), "server_error")

    async def _stream(
        self, http_request: web.Request, request: api.Request, tokens: AsyncIterator[int], metrics: Metrics
    ) -> web.StreamResponse:
        # The status line goes out with the first token: until then a lost worker is still a 503.
        token_ids = [await anext(tokens)]
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        await response.prepare(http_request)
        text = api.TextStream(self.tokenizer)
        await _event(response, api.chunk(request, text.push(token_ids[0]), token_ids=token_ids[:], first=True))
        try:
            async for token in tokens:
                token_ids.append(token)
                await _event(response, api.chunk(request, text.push(token), token_ids=[token]))
        except (WorkerUnavailable, WorkerFailed) as error:
            kind = "worker_unavailable" if isinstance(error, WorkerUnavailable) else "server_error"
            await _event(response, api.error_body(str(error), kind))
            return response
        extra = self._summary(request, len(token_ids), metrics)
        reason = self._finish_reason(token_ids)
        await _event(response, api.chunk(request, text.finish() or None, finish_reason=reason, extra=extra))
        await response.write(b"data: [DONE]\n\n")
        return response

    def _summary(self, request: api.Request, tokens: int, metrics: Metrics) -> dict:
        cached = metrics.prefill["reused_tokens"] if metrics.prefill else 0
        return {"usage": api.usage(request, tokens, cached), "metrics": metrics.to_dict()}

    def _finish_reason(self, token_ids: list[int]) -> str:
        return "stop" if token_ids[-1] == self.tokenizer.eos_token_id else "length"

    async def register(self, http_request: web.Request) -> web.Response:
        body = await http_request.json()
        if body.get("role") not in ROLES:
            return _error(400, f"role must be one of {ROLES}", "invalid_request_error", param="role")
        place = WorkerPlace(body["url"], body["engine"], body["pid"])
        if self.workers.get(body["role"]) != place:
            self.workers[body["role"]] = place
        return web.json_response({})

    async def health(self, _: web.Request) -> web.Response:
        states = dict(zip(ROLES, await asyncio.gather(*map(self._worker_health, ROLES)), strict=True))
        healthy = all("error" not in state for state in states.values())
        body = {"status": "ok" if healthy else "unavailable", "workers": states}
        return web.json_response(body, status=200 if healthy else 503)

    async def _worker_health(self, role: str) -> dict:
        assert self.http is not None
        try:
            place = self._place(role)
            async with self.http.get(f"{place.url}/health", timeout=aiohttp.ClientTimeout(total=2)) as response:
                return {"url": place.url, **await response.json()}
        except WorkerUnavailable as error:
            return {"error": str(error)}
        except (aiohttp.ClientError, TimeoutError) as error:
            return {"error": f"{type(error).__name__}: {error}"}

    async def models(self, _: web.Request) -> web.Response:
        return web.json_response(
            {"object": "list", "data": [{"id": self.model, "object": "model", "owned_by": "demo"}]}
        )


class _Post:
    """POST to a worker as a context: connection errors and error answers become the front's exceptions, and a worker
    that cannot be reached is forgotten until it announces itself again."""

    def __init__(self, front: Front, role: str, place: WorkerPlace, path: str, body: dict) -> None:
        self._front, self._role, self._place = front, role, place
        assert front.http is not None
        self._call = front.http.post(place.url + path, json=body)

    async def __aenter__(self) -> aiohttp.ClientResponse:
        try:
            async with _reaching(self._role):
                response = await self._call.__aenter__()
                if response.status != 200:
                    error = (await response.json())["error"]
                    response.close()
                    raise _failure(self._role, response.status, error)
                return response
        except WorkerUnavailable as error:
            if error.__cause__ is not None:
                self._front.lost(self._role, self._place)
            raise

    async def __aexit__(self, *exc) -> None:
        # Closed, not returned to the pool: to the worker a closed connection is a client that went away.
        if isinstance(exc[1], WorkerUnavailable) and exc[1].__cause__ is not None and exc[1].role == self._role:
            self._front.lost(self._role, self._place)
        await self._call.__aexit__(*exc)


class _reaching:
    """Connection errors inside become WorkerUnavailable of that role."""

    def __init__(self, role: str) -> None:
        self._role = role

    async def __aenter__(self) -> None:
        pass

    async def __aexit__(self, kind, error, trace) -> None:
        if isinstance(error, aiohttp.ClientError | ConnectionError | TimeoutError):
            raise WorkerUnavailable(self._role, f"{type(error).__name__}: {error}") from error


_TRANSIENT = ("PoolFull", "PeerLost", "Cancelled", "Closed", "DeadlineExceeded")


def _failure(role: str, status: int, error: dict) -> Exception:
    message = f"{error['type']}: {error['message']}"
    return WorkerUnavailable(role, message) if status == 503 else WorkerFailed(f"the {role} worker failed: {message}")


def _line(data: bytes) -> dict:
    if not data.endswith(b"\n"):
        raise aiohttp.ClientPayloadError("the stream ended in the middle")
    return json.loads(data)


async def _read(stream: aiohttp.ClientResponse) -> dict:
    async with _reaching("decode"):
        return _line(await stream.content.readline())


async def _event(response: web.StreamResponse, value: dict) -> None:
    await response.write(b"data: " + json.dumps(value).encode() + b"\n\n")


def _error(status: int, message: str, kind: str, *, code: str | None = None, param: str | None = None) -> web.Response:
    return web.json_response(api.error_body(message, kind, code=code, param=param), status=status)


def _unavailable(error: WorkerUnavailable) -> web.Response:
    body = api.error_body(str(error), "worker_unavailable", code=error.role)
    return web.json_response(body, status=503, headers={"Retry-After": "1"})


async def serve(front: Front, run_dir: Path) -> None:
    app = web.Application(client_max_size=16 << 20)
    app.add_routes(
        [
            web.post("/v1/completions", front.completions),
            web.post("/v1/chat/completions", front.chat_completions),
            web.get("/v1/models", front.models),
            web.get("/healthz", front.health),
            web.post("/workers", front.register),
        ]
    )
    timeout = aiohttp.ClientTimeout(total=REQUEST_TIMEOUT_S * 2, sock_connect=2)
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector, read_bufsize=_LINE_NBYTES) as front.http:
        runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = site._server.sockets[0].getsockname()[1]  # type: ignore[union-attr]
        write_json(run_dir / "front.json", {"url": f"http://127.0.0.1:{port}", "pid": os.getpid()})
        stop = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        await stop.wait()
        await runner.cleanup()


def main() -> None:
    die_with_parent()
    parser = argparse.ArgumentParser(description="HTTP front of the demo; started by demo.py")
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--max-model-tokens", type=int, required=True)
    args = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(args.run_dir / "tokenizer")
    asyncio.run(serve(Front(tokenizer, args.model, args.max_model_tokens), args.run_dir))


if __name__ == "__main__":
    main()
