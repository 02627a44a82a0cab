"""A client of the front: any OpenAI client would do; this one also keeps the token ids and the server's metrics."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import aiohttp


class RequestFailed(RuntimeError):
    """The front's error, with its HTTP status (0: in the middle of a stream), and when to come again if it says so."""

    def __init__(self, status: int, body: dict, retry_after_s: float | None = None) -> None:
        super().__init__(f"HTTP {status}: {body['error']['message']}")
        self.status = status
        self.error = body["error"]
        self.retry_after_s = retry_after_s


@dataclass
class Answer:
    text: str
    prompt_token_ids: list[int]
    token_ids: list[int]
    usage: dict
    metrics: dict
    token_times: list[float] = field(default_factory=list)  # of perf_counter, one a token, if it was streamed

    @property
    def reused_tokens(self) -> int:
        return self.usage["prompt_tokens_details"]["cached_tokens"]


async def ask(url: str, path: str, body: dict, *, on_text: Callable[[str], None] | None = None) -> Answer:
    """One request with the answer's token ids; with `on_text` it streams. Raises RequestFailed."""
    body = {"return_token_ids": True, "stream": on_text is not None, **body}
    async with aiohttp.ClientSession(read_bufsize=1 << 20) as http, http.post(url + path, json=body) as response:
        if response.status != 200:
            retry_after = response.headers.get("Retry-After")
            raise RequestFailed(response.status, await response.json(), float(retry_after) if retry_after else None)
        if on_text is None:
            whole = await response.json()
            choice = whole["choices"][0]
            text = choice["message"]["content"] if "message" in choice else choice["text"]
            return Answer(text, whole["prompt_token_ids"], choice["token_ids"], whole["usage"], whole["metrics"])
        return await _collect(response, on_text)


async def _collect(response: aiohttp.ClientResponse, on_text: Callable[[str], None]) -> Answer:
    text, prompt, tokens, times = "", [], [], []
    summary: dict[str, Any] = {}
    async for raw in response.content:
        line = raw.strip()
        if not line or line == b"data: [DONE]":
            continue
        event = json.loads(line.removeprefix(b"data: "))
        if "error" in event:
            raise RequestFailed(0, event)
        choice = event["choices"][0]
        piece = choice["delta"].get("content", "") if "delta" in choice else choice["text"]
        prompt += event.get("prompt_token_ids", [])
        tokens += choice["token_ids"]
        times += [time.perf_counter()] * len(choice["token_ids"])
        text += piece
        on_text(piece)
        if "usage" in event:
            summary = event
    if not summary:
        raise RequestFailed(0, {"error": {"message": "the stream ended early"}})
    return Answer(text, prompt, tokens, summary["usage"], summary["metrics"], times)
