"""The OpenAI shapes the front speaks: requests checked, answers and stream chunks made. No I/O here."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

DEFAULT_MAX_TOKENS = 16
# What would change the answer and is not implemented is refused, not ignored.
_ONLY_DEFAULT = {"n": 1, "best_of": 1, "echo": False, "stop": None, "logprobs": None, "suffix": None, "tools": None}


class BadRequest(ValueError):
    """400, with the parameter at fault."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


@dataclass
class Request:
    chat: bool
    prompt_token_ids: list[int]
    max_tokens: int
    stream: bool
    model: str
    cache_salt: str = ""
    return_token_ids: bool = False
    ignore_eos: bool = False
    colocated: bool = False
    id: str = field(default_factory=lambda: secrets.token_hex(12))
    created: int = field(default_factory=lambda: int(time.time()))


def parse(body: Any, tokenizer: Any, *, chat: bool, model: str, max_model_tokens: int) -> Request:
    """Checks a request body and tokenises its prompt. Greedy decoding only: temperature 0 or absent. Beyond OpenAI's
    fields: `return_token_ids`; `cache_salt`, whose bearers share pages; `ignore_eos`, exactly `max_tokens` tokens;
    `colocated`, prompt and answer by one worker."""
    if not isinstance(body, dict):
        raise BadRequest("the body is not a JSON object")
    for name, default in _ONLY_DEFAULT.items():
        if body.get(name, default) not in (default, None):
            raise BadRequest(f"{name!r} is not supported", name)
    if body.get("temperature") not in (None, 0, 0.0):
        raise BadRequest("this server decodes greedily: temperature must be 0 or left out", "temperature")
    if body.get("model") not in (None, model):
        raise BadRequest(f"the model here is {model!r}", "model")
    prompt = _chat_prompt(body, tokenizer) if chat else _prompt(body, tokenizer)
    limit_name = "max_completion_tokens" if "max_completion_tokens" in body else "max_tokens"
    max_tokens = body.get(limit_name)
    max_tokens = DEFAULT_MAX_TOKENS if max_tokens is None else max_tokens
    if not isinstance(max_tokens, int) or isinstance(max_tokens, bool) or max_tokens < 1:
        raise BadRequest(f"{limit_name} must be a positive integer", limit_name)
    if len(prompt) + max_tokens > max_model_tokens:
        raise BadRequest(
            f"{len(prompt)} prompt tokens and {max_tokens} more exceed this server's {max_model_tokens}", limit_name
        )
    salt = body.get("cache_salt") or ""
    if not isinstance(salt, str):
        raise BadRequest("cache_salt must be a string", "cache_salt")
    return Request(
        chat=chat,
        prompt_token_ids=prompt,
        max_tokens=max_tokens,
        stream=bool(body.get("stream", False)),
        model=model,
        cache_salt=salt,
        return_token_ids=bool(body.get("return_token_ids", False)),
        ignore_eos=bool(body.get("ignore_eos", False)),
        colocated=bool(body.get("colocated", False)),
    )


def _prompt(body: dict, tokenizer: Any) -> list[int]:
    prompt = body.get("prompt")
    if isinstance(prompt, str):
        tokens = list(tokenizer.encode(prompt))
    elif isinstance(prompt, list) and all(isinstance(token, int) and not isinstance(token, bool) for token in prompt):
        tokens = prompt
    else:
        raise BadRequest("prompt must be a string or a list of token ids", "prompt")
    if not tokens:
        raise BadRequest("the prompt is empty", "prompt")
    if not all(0 <= token < len(tokenizer) for token in tokens):
        raise BadRequest(f"token ids must be in 0..{len(tokenizer) - 1}", "prompt")
    return tokens


def _chat_prompt(body: dict, tokenizer: Any) -> list[int]:
    messages = body.get("messages")
    valid = isinstance(messages, list) and all(
        isinstance(message, dict)
        and message.get("role") in ("system", "user", "assistant")
        and isinstance(message.get("content"), str)
        for message in messages
    )
    if not valid or not messages:
        raise BadRequest("messages must be a list of {role: system|user|assistant, content: text}", "messages")
    encoded = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
    return list(encoded["input_ids"])


class TextStream:
    """Turns tokens into text piece by piece; bytes of a character that is not complete yet are held back."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._tokens: list[int] = []
        self._sent = ""

    def push(self, token: int) -> str:
        self._tokens.append(token)
        text = self._tokenizer.decode(self._tokens, skip_special_tokens=True)
        return "" if text.endswith("\ufffd") else self._advance(text)

    def finish(self) -> str:
        return self._advance(self._tokenizer.decode(self._tokens, skip_special_tokens=True))

    def _advance(self, text: str) -> str:
        piece, self._sent = text[len(self._sent) :], text
        return piece


def usage(request: Request, tokens: int, cached_tokens: int) -> dict:
    prompt = len(request.prompt_token_ids)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": tokens,
        "total_tokens": prompt + tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }


def chunk(
    request: Request,
    text: str | None,
    *,
    token_ids: list[int] | None = None,
    first: bool = False,
    finish_reason: str | None = None,
    extra: Mapping[str, Any] = {},
) -> dict:
    """One event of a stream. `text` None: nothing said in this one."""
    choice: dict[str, Any] = {"index": 0, "finish_reason": finish_reason}
    if request.chat:
        choice["delta"] = ({"role": "assistant"} if first else {}) | ({} if text is None else {"content": text})
    else:
        choice["text"] = text or ""
    if request.return_token_ids:
        choice["token_ids"] = token_ids or []
        if first:
            extra = {**extra, "prompt_token_ids": request.prompt_token_ids}
    kind = "chat.completion.chunk" if request.chat else "text_completion"
    return {**_head(request, kind), "choices": [choice], **extra}


def completion(
    request: Request, text: str, *, token_ids: list[int], finish_reason: str, extra: Mapping[str, Any]
) -> dict:
    """The whole answer of a request that does not stream."""
    choice: dict[str, Any] = {"index": 0, "finish_reason": finish_reason}
    if request.chat:
        choice["message"] = {"role": "assistant", "content": text}
    else:
        choice["text"] = text
    body = {**_head(request, "chat.completion" if request.chat else "text_completion"), "choices": [choice], **extra}
    if request.return_token_ids:
        choice["token_ids"] = token_ids
        body["prompt_token_ids"] = request.prompt_token_ids
    return body


def _head(request: Request, kind: str) -> dict:
    prefix = "chatcmpl" if request.chat else "cmpl"
    return {"id": f"{prefix}-{request.id}", "object": kind, "created": request.created, "model": request.model}


def error_body(message: str, kind: str, *, code: str | None = None, param: str | None = None) -> dict:
    return {"error": {"message": message, "type": kind, "code": code, "param": param}}
