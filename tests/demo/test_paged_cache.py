"""A transformers model over pages says what it says over its own cache, wherever the pages lie."""

import model as models
import pytest
import torch
from paged_cache import PagedSequence, make_cache

PROMPT = list(range(3, 73))
NEW = 24


@pytest.fixture(scope="module")
def llama():
    return models.load("random")[0]


@pytest.fixture(scope="module")
def reference(llama):
    return models.generate_reference(llama, PROMPT, NEW)[0]


@torch.inference_mode()
def run(llama, sequence: PagedSequence, tokens: list[int]) -> int:
    logits = llama(input_ids=torch.tensor([tokens]), past_key_values=sequence, use_cache=True, logits_to_keep=1).logits
    return int(logits[0, -1].argmax())


def decode(llama, sequence: PagedSequence, first: int) -> list[int]:
    tokens = [first]
    while len(tokens) < NEW:
        tokens.append(run(llama, sequence, tokens[-1:]))
    return tokens


@pytest.mark.parametrize("reused", [0, 16, 64])
def test_answers_are_those_of_plain_generation(llama, reference, reused):
    kv = make_cache(llama.config, 32, 16)
    pages = torch.randperm(32)[:6].tolist()
    if reused:  # somebody else filled the first pages
        run(llama, PagedSequence(kv, pages), PROMPT[:reused])
    sequence = PagedSequence(kv, pages, length=reused)
    assert decode(llama, sequence, run(llama, sequence, PROMPT[reused:])) == reference
    untouched = [page for page in range(32) if page not in pages]
    assert all(layer[untouched].eq(0).all() for layer in kv.layers)


def test_a_zeroed_page_changes_the_answer(llama, reference):
    for page in range(4):
        kv = make_cache(llama.config, 6, 16)
        sequence = PagedSequence(kv, [5, 4, 3, 2, 1, 0])
        first = run(llama, sequence, PROMPT)
        for layer in kv.layers:
            layer[5 - page].zero_()
        assert decode(llama, sequence, first) != reference


def test_layers_are_told_when_they_are_in_place(llama):
    kv = make_cache(llama.config, 6, 16)
    told = []

    def on_layer(layer: int) -> None:
        filled = [bool(each[[0, 1]].ne(0).any()) for each in kv.layers]
        assert filled == [index <= layer for index in range(len(filled))]
        told.append(layer)

    run(llama, PagedSequence(kv, [0, 1], on_layer=on_layer), PROMPT[:20])
    assert told == list(range(kv.layout.num_layers))


def test_more_tokens_than_pages(llama):
    kv = make_cache(llama.config, 6, 16)
    with pytest.raises(IndexError, match="33 tokens do not fit 2 pages of 16"):
        run(llama, PagedSequence(kv, [0, 1]), PROMPT[:33])


def test_an_empty_model_with_the_same_weights_is_the_same_model(llama, reference):
    other = models.empty_model(models.config_to_json(llama))
    other.load_state_dict(llama.state_dict())
    assert other.lm_head.weight.data_ptr() == other.model.embed_tokens.weight.data_ptr()
    assert models.generate_reference(other, PROMPT, NEW)[0] == reference
