"""Two prompts share a page's name exactly when they share everything up to its end."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from torch_mooncake.kv import hash_name, hash_of_name, page_hashes, root_hash

ROOT = root_hash(model="m", fingerprint="f")
tokens = st.lists(st.integers(0, 50_000), max_size=70)


@given(tokens, tokens, st.integers(1, 8))
def test_shared_hashes_are_the_shared_prefix(left, right, page_size):
    a, b = page_hashes(ROOT, left, page_size), page_hashes(ROOT, right, page_size)
    assert len(a) == len(left) // page_size
    for index in range(min(len(a), len(b))):
        end = (index + 1) * page_size
        assert (a[index] == b[index]) == (left[:end] == right[:end])


@given(tokens, st.integers(1, 8))
def test_a_longer_prompt_keeps_its_prefix_names(prompt, page_size):
    assert page_hashes(ROOT, [*prompt, 7], page_size)[: len(prompt) // page_size] == page_hashes(
        ROOT, prompt, page_size
    )


def test_position_matters():
    same_page_twice = page_hashes(ROOT, [1, 2, 1, 2], 2)
    assert same_page_twice[0] != same_page_twice[1]


def test_model_layout_and_salt_are_in_the_root():
    variants = [
        root_hash(model="m", fingerprint="f"),
        root_hash(model="n", fingerprint="f"),
        root_hash(model="m", fingerprint="g"),
        root_hash(model="m", fingerprint="f", cache_salt="s"),
        root_hash(model="mf", fingerprint=""),  # no running together
        root_hash(model="", fingerprint="mf"),
    ]
    assert len(set(variants)) == len(variants)
    assert len({page_hashes(root, [1, 2], 2)[0] for root in variants}) == len(variants)


def test_names_do_not_change_between_releases():
    assert page_hashes(ROOT, [1, 2, 3, 4], 2)[1].hex() == GOLDEN


def test_page_size_below_one_is_refused():
    with pytest.raises(ValueError, match="page_size"):
        page_hashes(ROOT, [1], 0)
    with pytest.raises(OverflowError):
        page_hashes(ROOT, [1 << 80], 1)


GOLDEN = "523ca6798780a4ca603636e4841813b6"


def test_xxh3_is_a_chain_of_its_own():
    import xxhash

    tokens = list(range(8))
    first, second = page_hashes(ROOT, tokens, 4, "xxh3")
    page = np.arange(8, dtype="<i8").tobytes()
    assert first == xxhash.xxh3_128(ROOT + page[:32]).digest()
    assert second == xxhash.xxh3_128(first + page[32:]).digest()
    assert set(page_hashes(ROOT, tokens, 4)).isdisjoint((first, second))
    with pytest.raises(ValueError, match="algorithm"):
        page_hashes(ROOT, tokens, 4, "md5")


@given(
    st.one_of(st.binary(min_size=1, max_size=128), st.integers(-(1 << 300), 1 << 300), st.text(min_size=1, max_size=30))
)
def test_names_keep_hashes_and_their_types(page_hash):
    name = hash_name(page_hash)
    back = hash_of_name(name)
    assert (back, type(back)) == (page_hash, type(page_hash))
    assert "/" not in name
    for wrong in ("", "x", "b", "bABC0", "b0", "i1.5", "i 1", "s", "s/"):
        with pytest.raises(ValueError):
            hash_of_name(wrong)
