"""Traces are read, made up and scaled; what is measured is what was seen."""

import json
from itertools import pairwise

import pytest
import request_trace as trace
from checks import Checks, Comparison, compare
from client import Answer
from load import Replay, Served, percentiles
from plots import draw

TRACE = trace.synthetic(200, seed=3)


def test_made_up_traces_have_the_recorded_form(tmp_path):
    path = tmp_path / "trace.jsonl"
    trace.write(TRACE, path)
    assert set(json.loads(path.read_text().splitlines()[0])) == {
        "timestamp",
        "input_length",
        "output_length",
        "hash_ids",
    }
    assert trace.read(path) == TRACE
    assert trace.read(path, 5) == TRACE[:5]
    assert all(before.timestamp <= after.timestamp for before, after in pairwise(TRACE))
    assert all(row.hash_ids[:2] == (0, 1) for row in TRACE)  # the system prompt
    assert len({row.hash_ids for row in TRACE}) > 150


@pytest.mark.parametrize(
    "line", ["{", "{}", '{"timestamp": 0, "input_length": 1000, "output_length": 1, "hash_ids": [1]}']
)
def test_other_files_are_refused(tmp_path, line):
    path = tmp_path / "trace.jsonl"
    trace.write(TRACE[:1], path)
    path.write_text(path.read_text() + line)
    with pytest.raises(ValueError, match=r"trace.jsonl, line 2"):
        trace.read(path)


def test_scaling_keeps_prefixes_and_the_rate():
    requests = trace.scaled(TRACE, rate=4, shrink=32, max_prompt=150, max_tokens=9, tokens=range(10, 90))
    assert requests[-1].at_s == pytest.approx(len(TRACE) / 4)
    assert all(1 <= len(each.prompt) <= 150 and 2 <= each.max_tokens <= 9 for each in requests)
    assert all(token in range(10, 90) for each in requests for token in each.prompt)
    for row, other, each, another in zip(TRACE, TRACE[1:], requests, requests[1:], strict=False):
        shared = sum(1 for a, b in zip(row.hash_ids, other.hash_ids, strict=False) if a == b)
        tokens = min(shared * 16, len(each.prompt), len(another.prompt))
        assert each.prompt[:tokens] == another.prompt[:tokens]


def served(at_s: float, ttft_s: float, gaps_s: list[float]) -> Served:
    metrics = {"retries": 0}
    answer = Answer("", [1, 2], [5] * (1 + len(gaps_s)), {"prompt_tokens_details": {"cached_tokens": 0}}, metrics)
    request = trace.TimedRequest(at_s, [1, 2], 1 + len(gaps_s))
    return Served(request, answer, ttft_s, gaps_s, ttft_s + sum(gaps_s), 0)


def test_numbers_and_plots(tmp_path):
    assert percentiles([0.001 * value for value in range(100, 0, -1)]) == {
        "p50": pytest.approx(51), "p90": pytest.approx(91), "p99": pytest.approx(100), "max": pytest.approx(100),
    }  # fmt: skip
    replays = [
        Replay(mode, [served(0, 0.1 * factor, [0.01, 0.02]), served(1, 0.3 * factor, [0.04])], took_s=2)
        for factor, mode in enumerate(("disaggregated", "colocated"), 1)
    ]
    row = replays[0].to_dict()
    assert row["tokens_per_s"] == 2.5
    assert row["ttft_ms"]["max"] == pytest.approx(300)
    assert row["tbt_ms"]["p50"] == pytest.approx(20)
    draw(replays, "two modes", tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_claims_about_answers_can_fail():
    same, tie = Comparison(True, tokens=4), compare([1, 9], [1, 2], [1.0, 5e-5])
    for comparisons, holds in (
        ([same] * 5, True),
        ([*[same] * 99, tie], True),
        ([*[same] * 98, tie], False),  # more than one in a hundred
        ([same, compare([1, 9], [1, 2], [1.0, 0.5])], False),
        ([], False),
    ):
        checks = Checks()
        checks.answers("all right", comparisons)
        assert checks.all_hold == holds
    checks.answers("ties are said", [*[same] * 99, tie])
    assert "tie: token 1: 9, reference 2" in checks.rows[-1]["evidence"]
