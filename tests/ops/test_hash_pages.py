"""hash_pages against python-xxhash: every input length, chains, many prompts, errors, opcheck, torch.compile."""

from __future__ import annotations

import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from torch_mooncake import ops
from torch_mooncake.kv import page_hashes

ROOT = bytes(range(100, 116))


def as_tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def chain(tokens: torch.Tensor, page_size: int, root: bytes) -> list[bytes]:
    data = tokens.long().numpy().tobytes()
    found, previous = [], root
    for i in range(len(tokens) // page_size):
        previous = xxhash.xxh3_128_digest(previous + data[8 * page_size * i : 8 * page_size * (i + 1)])
        found.append(previous)
    return found


def digests(rows: torch.Tensor) -> list[bytes]:
    return [bytes(row.tolist()) for row in rows]


def some_tokens(n: int, seed: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    info = torch.iinfo(dtype)
    return torch.randint(info.min, info.max, (n,), dtype=dtype, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_every_page_size(dtype):
    """Inputs of 24 to 3216 bytes: every way through XXH3 that a page can take."""
    for page_size in [*range(1, 150), 256, 400]:
        tokens = some_tokens(2 * page_size + page_size // 2, page_size, dtype)
        got = ops.hash_pages(tokens, page_size, as_tensor(ROOT))
        assert digests(got) == chain(tokens, page_size, ROOT)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.integers(0, 70), max_size=12),
    st.integers(1, 20),
    st.booleans(),
    st.sampled_from([torch.int32, torch.int64]),
    st.integers(0, 99),
)
def test_many_prompts_are_each_a_chain(lengths, page_size, own_roots, dtype, seed):
    tokens = some_tokens(sum(lengths), seed, dtype)
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    roots = [bytes([p]) * 16 if own_roots else ROOT for p in range(len(lengths))]
    given_roots = as_tensor(b"".join(roots)).reshape(-1, 16) if own_roots and roots else as_tensor(ROOT)
    got = digests(ops.hash_pages_batch(tokens, offsets, page_size, given_roots))
    expected = [
        digest for p, root in enumerate(roots) for digest in chain(tokens[offsets[p] : offsets[p + 1]], page_size, root)
    ]
    assert got[: len(expected)] == expected
    assert len(got) == len(tokens) // page_size
    assert all(row == bytes(16) for row in got[len(expected) :])


def test_many_long_prompts_on_threads():
    lengths = [5000 + 37 * p for p in range(40)]
    tokens, offsets = some_tokens(sum(lengths), 1), torch.tensor([0, *lengths]).cumsum(0)
    got = ops.hash_pages_batch(tokens, offsets, 16, as_tensor(ROOT))
    expected = [
        h for p in range(40) for h in digests(ops.hash_pages(tokens[offsets[p] : offsets[p + 1]], 16, as_tensor(ROOT)))
    ]
    assert digests(got)[: len(expected)] == expected


def test_is_the_chain_of_page_hashes():
    tokens = some_tokens(100, 3)
    assert page_hashes(ROOT, tokens.tolist(), 16, "xxh3") == chain(tokens, 16, ROOT)
    assert page_hashes(ROOT, [], 16, "xxh3") == []
    read_only = tokens.numpy()
    read_only.setflags(write=False)
    assert page_hashes(ROOT, read_only, 7, "xxh3") == chain(tokens, 7, ROOT)


def test_nothing_to_hash():
    assert ops.hash_pages(some_tokens(15, 0), 16, as_tensor(ROOT)).shape == (0, 16)
    assert ops.hash_pages(some_tokens(0, 0), 1, as_tensor(ROOT)).shape == (0, 16)
    none = torch.zeros(1, dtype=torch.int64)
    assert ops.hash_pages_batch(some_tokens(0, 0), none, 4, as_tensor(ROOT)).shape == (0, 16)


def test_strided_tokens():
    tokens = some_tokens(64, 5)
    assert digests(ops.hash_pages(tokens[::2], 8, as_tensor(ROOT))) == chain(tokens[::2].contiguous(), 8, ROOT)


def test_what_does_not_fit_is_named():
    tokens, root = some_tokens(64, 6), as_tensor(ROOT)

    def refused(match: str, call, *args) -> None:
        with pytest.raises(ValueError, match=match):
            call(*args)

    refused("page_size must be at least 1, not 0", ops.hash_pages, tokens, 0, root)
    refused("page_size must be at least 1, not -3", ops.hash_pages_batch, tokens, torch.tensor([0, 64]), -3, root)
    refused("token_ids has to be int32 or int64", ops.hash_pages, tokens.float(), 4, root)
    refused("token_ids has to be one-dimensional", ops.hash_pages, tokens[None], 4, root)
    refused(r"root has shape \[15\], expected \[16\]", ops.hash_pages, tokens, 4, root[1:])
    refused("root has to be uint8", ops.hash_pages, tokens, 4, root.int())
    batch = ops.hash_pages_batch
    refused(
        r"roots has shape \[3, 16\], expected \[1, 16\]", batch, tokens, torch.tensor([0, 64]), 4, root.expand(3, 16)
    )
    refused("offsets has to be int64", batch, tokens, torch.tensor([0, 64], dtype=torch.int32), 4, root)
    refused(r"offsets has shape \[0\]", batch, tokens, torch.empty(0, dtype=torch.int64), 4, root)
    refused(r"offsets\[0\] is 1, not 0", batch, tokens, torch.tensor([1, 64]), 4, root)
    refused(r"offsets\[2\] is 3, less than the one before it, 60", batch, tokens, torch.tensor([0, 60, 3, 64]), 4, root)
    refused("offsets end at 63, token_ids at 64", batch, tokens, torch.tensor([0, 63]), 4, root)
    refused("offsets end at 0, token_ids at 64", batch, tokens, torch.tensor([0]), 4, root)


OPCHECKS = {
    "hash_pages": lambda: (some_tokens(50, 1), 8, as_tensor(ROOT)),
    "hash_pages_batch": lambda: (some_tokens(50, 1), torch.tensor([0, 20, 50]), 8, as_tensor(ROOT)),
}


@pytest.mark.parametrize("name", OPCHECKS)
def test_opcheck(name):
    torch.library.opcheck(getattr(torch.ops.torch_mooncake, name).default, OPCHECKS[name]())


def test_compiles_without_graph_break():
    def step(tokens: torch.Tensor, offsets: torch.Tensor, root: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return ops.hash_pages(tokens, 4, root) ^ 1, ops.hash_pages_batch(tokens, offsets, 4, root)

    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager", dynamic=True)
    for n in (17, 40):
        args = (some_tokens(n, n), torch.tensor([0, 9, n]), as_tensor(ROOT))
        for got, expected in zip(compiled(*args), step(*args), strict=True):
            assert torch.equal(got, expected)
