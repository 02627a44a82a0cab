"""A transformers model over pages says what it says over its own cache, wherever the pages lie and however many
sequences share a forward pass."""

import model as models
import pytest
import torch
from paged_cache import PAGE_SIZE, PagedCache, forward, make_cache, pages_for

PROMPT = list(range(3, 73))
NEW = 24


@pytest.fixture(scope="module")
def llama():
    return models.load("random")[0]


@pytest.fixture(scope="module")
def reference(llama):
    return models.generate_reference(llama, PROMPT, NEW)[0]


@torch.inference_mode()
def run(llama, kv, pages: list[int], length: int, tokens: list[int], **hooks) -> int:
    cache = PagedCache(kv, [pages], [length], len(tokens), **hooks)
    return int(llama.lm_head(forward(llama, cache, [tokens]))[0].argmax())


def decode(llama, kv, pages: list[int], length: int, first: int) -> list[int]:
    tokens = [first]
    while len(tokens) < NEW:
        tokens.append(run(llama, kv, pages, length + len(tokens) - 1, tokens[-1:]))
    return tokens


@pytest.mark.parametrize("chunk", [1, 7, 16, 64, 70])
def test_answers_are_those_of_plain_generation(llama, reference, chunk):
    kv = make_cache(llama.config, 32, PAGE_SIZE)
    pages = torch.randperm(32)[:6].tolist()
    for start in range(0, len(PROMPT), chunk):
        first = run(llama, kv, pages, start, PROMPT[start : start + chunk])
    assert decode(llama, kv, pages, len(PROMPT), first) == reference
    untouched = [page for page in range(32) if page not in pages]
    assert all(layer[untouched].eq(0).all() for layer in kv.layers)


@torch.inference_mode()
def test_sequences_join_and_leave_a_batch(llama):
    """Each is there from its own step on, for its own number of tokens, between others of other lengths."""
    kv = make_cache(llama.config, 64, PAGE_SIZE)
    free = torch.randperm(64).tolist()
    prompts = [PROMPT[:length] for length in (1, 16, 33, 70)]
    ends = [NEW, 9, 17, 12]
    under_way: dict[int, tuple[list[int], list[int]]] = {}  # pages, tokens
    answers: dict[int, list[int]] = {}
    step = 0
    while len(answers) < len(prompts):
        if step % 3 == 0 and step // 3 < len(prompts):
            index = step // 3
            pages = [free.pop() for _ in range(pages_for(len(prompts[index]) + NEW, PAGE_SIZE))]
            under_way[index] = pages, [run(llama, kv, pages, 0, prompts[index])]
        lengths = [len(prompts[index]) + len(tokens) - 1 for index, (_, tokens) in under_way.items()]
        tables = [pages for pages, _ in under_way.values()]
        hidden = forward(llama, PagedCache(kv, tables, lengths, 1), [tokens[-1:] for _, tokens in under_way.values()])
        for index, token in zip(list(under_way), llama.lm_head(hidden).argmax(-1).tolist(), strict=True):
            under_way[index][1].append(token)
            if len(under_way[index][1]) == ends[index]:
                pages, answers[index] = under_way.pop(index)
                free += pages
        step += 1
    for index, prompt in enumerate(prompts):
        assert answers[index] == models.generate_reference(llama, prompt, ends[index], ignore_eos=True)[0]


def test_a_zeroed_page_changes_the_answer(llama, reference):
    for page in range(4):
        kv = make_cache(llama.config, 6, PAGE_SIZE)
        pages = [5, 4, 3, 2, 1, 0]
        first = run(llama, kv, pages, 0, PROMPT)
        for layer in kv.layers:
            layer[5 - page].zero_()
        assert decode(llama, kv, pages, len(PROMPT), first) != reference


def test_layers_are_told_of_before_and_after(llama):
    kv = make_cache(llama.config, 6, PAGE_SIZE)
    told = []

    def filled() -> list[bool]:
        return [bool(each[[0, 1]].ne(0).any()) for each in kv.layers]

    def before(layer: int) -> None:
        assert filled() == [index < layer for index in range(4)]

    def after(layer: int) -> None:
        assert filled() == [index <= layer for index in range(4)]
        told.append(layer)

    run(llama, kv, [0, 1], 0, PROMPT[:20], before_layer=before, after_layer=after)
    assert told == [0, 1, 2, 3]


def test_more_tokens_than_pages(llama):
    kv = make_cache(llama.config, 6, PAGE_SIZE)
    with pytest.raises(IndexError, match="33 tokens do not fit 2 pages of 16"):
        PagedCache(kv, [[2, 3, 4], [0, 1]], [0, 0], 33)


def test_an_empty_model_with_the_same_weights_is_the_same_model(llama, reference):
    other = models.empty_model(models.config_from_json(models.config_to_json(llama)))
    other.load_state_dict(llama.state_dict())
    assert other.lm_head.weight.data_ptr() == other.model.embed_tokens.weight.data_ptr()
    assert models.generate_reference(other, PROMPT, NEW)[0] == reference


def test_a_checkpoint_is_served_from_its_folder(llama, reference, tmp_path):
    llama.save_pretrained(tmp_path)
    models.byte_tokenizer().save_pretrained(tmp_path)
    model, tokenizer = models.load(str(tmp_path))
    assert models.generate_reference(model, PROMPT, NEW)[0] == reference
    assert models.eos_token_ids(model) == [tokenizer.eos_token_id]
    with pytest.raises(models.ModelUnavailable, match="neither smollm2 nor random nor a folder"):
        models.check(str(tmp_path / "absent"))
