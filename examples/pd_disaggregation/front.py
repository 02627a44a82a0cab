"""The HTTP front: OpenAI's /v1/completions and /v1/chat/completions over any number of workers.

Workers announce themselves with POST /workers. Requests beyond what is served at a time wait, and beyond what may wait
are answered 429 with Retry-After. A request that loses a worker is run again elsewhere (router.py); when that does not
help it is answered 503 with the worker's role, or, in the middle of a stream, ends with an error event. A client that
goes away takes its jobs with it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path

import aiohttp
import openai_api as api
from admission import Admission, Overloaded
from aiohttp import web
from process import die_with_parent, read_json, write_json
from router import ROLES, Metrics, Place, Router, Work, WorkerFailed, WorkerUnavailable
from transformers import AutoTokenizer

REQUEST_TIMEOUT_S = 120
_LINE_NBYTES = 16 << 20


class Front:
    def __init__(self, router: Router, admission: Admission, tokenizer, model: dict, max_model_tokens: int) -> None:
        self.router = router
        self.admission = admission
        self.tokenizer = tokenizer
        self.model: str = model["name"]
        self.eos: list[int] = model["eos_token_ids"]
        self.max_model_tokens = max_model_tokens

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
        work = Work(
            prompt=request.prompt_token_ids,
            max_tokens=request.max_tokens,
            eos=[] if request.ignore_eos else self.eos,
            cache_salt=request.cache_salt,
            colocated=request.colocated,
            timeout_s=REQUEST_TIMEOUT_S,
        )
        try:
            async with self.admission.place(), aclosing(self.router.tokens(work, metrics)) as tokens:
                if request.stream:
                    return await self._stream(http_request, request, tokens, metrics)
                text, token_ids = api.TextStream(self.tokenizer), []
                pieces = []
                async for token in tokens:
                    token_ids.append(token)
                    pieces.append(text.push(token))
                answer = "".join([*pieces, text.finish()])
                extra = self._summary(request, len(token_ids), metrics)
                reason = self._finish_reason(request, token_ids)
                return web.json_response(
                    api.completion(request, answer, token_ids=token_ids, finish_reason=reason, extra=extra)
                )
        except Overloaded as error:
            body = api.error_body(str(error), "overloaded", code="rate_limit_exceeded")
            return web.json_response(body, status=429, headers={"Retry-After": str(error.retry_after_s)})
        except WorkerUnavailable as error:
            body = api.error_body(str(error), "worker_unavailable", code=error.role)
            return web.json_response(body, status=503, headers={"Retry-After": "1"})
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
        reason = self._finish_reason(request, token_ids)
        await _event(response, api.chunk(request, text.finish() or None, finish_reason=reason, extra=extra))
        await response.write(b"data: [DONE]\n\n")
        return response

    def _summary(self, request: api.Request, tokens: int, metrics: Metrics) -> dict:
        cached = metrics.prefill["reused_tokens"] if metrics.prefill else 0
        return {"usage": api.usage(request, tokens, cached), "metrics": metrics.to_dict()}

    def _finish_reason(self, request: api.Request, token_ids: list[int]) -> str:
        return "stop" if token_ids[-1] in self.eos and not request.ignore_eos else "length"

    async def register(self, http_request: web.Request) -> web.Response:
        place = Place(**await http_request.json())
        if place.role not in ROLES:
            return _error(400, f"role must be one of {ROLES}", "invalid_request_error", param="role")
        self.router.announced(place)
        return web.json_response({})

    async def health(self, _: web.Request) -> web.Response:
        workers = await self.router.health()
        able = [state["role"] for state in workers.values() if "error" not in state]
        status = "unavailable" if set(able) != set(ROLES) else "ok" if len(able) == len(workers) else "degraded"
        body = {"status": status, "admission": self.admission.to_dict(), "workers": workers}
        return web.json_response(body, status=503 if status == "unavailable" else 200)

    async def models(self, _: web.Request) -> web.Response:
        return web.json_response(
            {"object": "list", "data": [{"id": self.model, "object": "model", "owned_by": "demo"}]}
        )


async def _event(response: web.StreamResponse, value: dict) -> None:
    await response.write(b"data: " + json.dumps(value).encode() + b"\n\n")


def _error(status: int, message: str, kind: str, *, code: str | None = None, param: str | None = None) -> web.Response:
    return web.json_response(api.error_body(message, kind, code=code, param=param), status=status)


async def serve(args: argparse.Namespace) -> None:
    tokenizer = AutoTokenizer.from_pretrained(args.run_dir / "tokenizer")
    model = read_json(args.run_dir / "model.json")
    assert model is not None, "the trainer writes it before it says that it is ready"
    connector = aiohttp.TCPConnector(limit=0, force_close=True)  # to a worker a closed connection is a cancelled job
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector, read_bufsize=_LINE_NBYTES) as http:
        router = Router(http, recovery_s=args.recovery_s)
        front = Front(router, Admission(args.max_running, args.max_waiting), tokenizer, model, args.max_model_tokens)
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
        runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = site._server.sockets[0].getsockname()[1]  # type: ignore[union-attr]
        write_json(args.run_dir / "front.json", {"url": f"http://127.0.0.1:{port}", "pid": os.getpid()})
        stop = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        await stop.wait()
        await runner.cleanup()


def main() -> None:
    die_with_parent()
    parser = argparse.ArgumentParser(description="HTTP front of the demo; started by cluster.py")
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--max-model-tokens", type=int, required=True)
    parser.add_argument("--max-running", type=int, default=32, help="requests served at a time (default 32)")
    parser.add_argument("--max-waiting", type=int, default=64, help="requests that may wait behind them (default 64)")
    parser.add_argument("--recovery-s", type=float, default=30, help="how long they wait for a worker (default 30)")
    asyncio.run(serve(parser.parse_args()))


if __name__ == "__main__":
    main()
