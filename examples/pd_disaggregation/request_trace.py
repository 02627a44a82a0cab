"""Request traces: recorded ones in the form of those published with the Mooncake paper, and made-up ones of that form.

One JSON object a line: `timestamp` (ms), `input_length` and `output_length` (tokens), `hash_ids` (one a block of 512
prompt tokens; equal ids up to some place are an equal prefix). What the tokens are is not in a trace: they are drawn,
the same ones for the same id.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path

BLOCK_TOKENS = 512


@dataclass(frozen=True)
class Row:
    timestamp: float  # ms
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]


@dataclass(frozen=True)
class TimedRequest:
    at_s: float  # since the start of the replay
    prompt: list[int]
    max_tokens: int


def read(path: Path, limit: int | None = None) -> list[Row]:
    """The first `limit` rows. ValueError naming the line that is not one of a trace."""
    rows: list[Row] = []
    with path.open() as lines:
        for number, line in enumerate(lines, 1):
            if limit is not None and len(rows) == limit:
                break
            try:
                entry = json.loads(line)
                hash_ids = tuple(int(block) for block in entry["hash_ids"])
                row = Row(float(entry["timestamp"]), int(entry["input_length"]), int(entry["output_length"]), hash_ids)
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(f"{path}, line {number}: {type(error).__name__}: {error}") from error
            if len(hash_ids) != -(-row.input_length // BLOCK_TOKENS):
                raise ValueError(f"{path}, line {number}: {row.input_length} tokens in {len(hash_ids)} blocks")
            rows.append(row)
    return rows


def synthetic(count: int, seed: int = 0) -> list[Row]:
    """Conversations that share a system prompt, each turn's prompt beginning with the turns before it; arrivals at
    random (exponential gaps, mean 300 ms), lengths like those of the recorded conversations."""
    rng = random.Random(seed)
    system = [0, 1]
    conversations: list[list[int]] = []
    fresh, clock, rows = len(system), 0.0, []
    for _ in range(count):
        clock += rng.expovariate(1 / 300)
        if not conversations or rng.random() < 0.4:
            conversations.append(list(system))
        history = rng.choice(conversations)
        new = min(8, 1 + int(rng.expovariate(1 / 2)))
        history += range(fresh, fresh + new)
        fresh += new
        length = len(history) * BLOCK_TOKENS - rng.randrange(BLOCK_TOKENS)
        rows.append(Row(round(clock), length, 1 + int(rng.expovariate(1 / 300)), tuple(history)))
        if len(history) > 24:
            conversations.remove(history)
    return rows


def write(rows: list[Row], path: Path) -> None:
    path.write_text("".join(json.dumps(vars(row) | {"hash_ids": list(row.hash_ids)}) + "\n" for row in rows))


def scaled(
    rows: list[Row], *, rate: float, shrink: int, max_prompt: int, max_tokens: int, tokens: range
) -> list[TimedRequest]:
    """The trace made fit for a small model: `rate` requests a second on average, lengths divided by `shrink` and then
    limited. A block becomes 512/`shrink` ids out of `tokens`; prefixes that were shared are."""
    span_s = max(1.0, rows[-1].timestamp - rows[0].timestamp) / 1000
    pace = len(rows) / rate / span_s
    block = max(1, BLOCK_TOKENS // shrink)
    requests = []
    for row in rows:
        length = max(1, min(row.input_length // shrink, max_prompt))
        prompt: list[int] = []
        for hash_id in row.hash_ids[: -(-length // block)]:
            prompt += random.Random(hash_id).choices(tokens, k=block)
        at_s = (row.timestamp - rows[0].timestamp) / 1000 * pace
        requests.append(TimedRequest(at_s, prompt[:length], max(2, min(row.output_length // shrink, max_tokens))))
    return requests
