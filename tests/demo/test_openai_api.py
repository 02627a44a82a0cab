"""Requests are checked before anything runs; answers have OpenAI's shapes."""

import openai_api as api
import pytest
from checks import compare
from model import byte_tokenizer

TOKENIZER = byte_tokenizer()


def parse(body, chat=False):
    return api.parse(body, TOKENIZER, chat=chat, model="random", max_model_tokens=64)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ([], None),
        ({}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [100_000]}, "prompt"),
        ({"prompt": "hi", "max_tokens": 0}, "max_tokens"),
        ({"prompt": "hi", "max_tokens": True}, "max_tokens"),
        ({"prompt": "hi", "max_tokens": "7"}, "max_tokens"),
        ({"prompt": "hi", "max_tokens": 63}, "max_tokens"),
        ({"prompt": "hi", "temperature": 0.7}, "temperature"),
        ({"prompt": "hi", "n": 2}, "n"),
        ({"prompt": "hi", "stop": ["."]}, "stop"),
        ({"prompt": "hi", "model": "gpt"}, "model"),
        ({"prompt": "hi", "cache_salt": 3}, "cache_salt"),
    ],
)
def test_bad_completions(body, param):
    with pytest.raises(api.BadRequest) as caught:
        parse(body)
    assert caught.value.param == param


@pytest.mark.parametrize(
    "messages",
    [None, [], "hi", [{"role": "user"}], [{"role": "tool", "content": "x"}], [{"role": "user", "content": 1}]],
)
def test_bad_chats(messages):
    with pytest.raises(api.BadRequest) as caught:
        parse({"messages": messages}, chat=True)
    assert caught.value.param == "messages"


def test_good_requests():
    request = parse({"prompt": "abc", "max_tokens": 5, "temperature": 0, "model": "random", "stop": None})
    assert TOKENIZER.decode(request.prompt_token_ids) == "abc"
    assert parse({"prompt": [1, 2]}).prompt_token_ids == [1, 2]
    chat = parse({"messages": [{"role": "user", "content": "hey"}], "max_completion_tokens": 7}, chat=True)
    assert TOKENIZER.decode(chat.prompt_token_ids) == "<|user|>hey<|end|><|assistant|>"
    assert chat.max_tokens == 7


def test_text_streams_whole_characters():
    text = "naïve 漢字 🙂"
    stream = api.TextStream(TOKENIZER)
    pieces = [stream.push(token) for token in TOKENIZER.encode(text)]
    assert "".join(pieces) + stream.finish() == text
    assert all("\ufffd" not in piece for piece in pieces)
    broken = api.TextStream(TOKENIZER)
    assert broken.push(TOKENIZER.encode("漢")[0]) == ""
    assert broken.finish() == "\ufffd"


def test_a_difference_is_a_tie_only_where_the_reference_was_undecided():
    assert compare([1, 2, 3], [1, 2, 3], [1.0, 1.0, 1.0]).same
    wrong = compare([1, 9, 3], [1, 2, 3], [0.0, 2e-4, 0.0])
    assert not wrong.passed
    assert "token 1: 9, reference 2" in wrong.detail
    tie = compare([1, 9, 7, 7], [1, 2, 3], [1.0, 5e-5, 1.0])
    assert tie.passed
    assert not tie.same
    assert tie.tie_at == 1
    assert not compare([1, 2], [1, 2, 3], [1.0, 1.0, 1.0]).passed
