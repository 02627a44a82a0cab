"""Names of KV pages: a hash chain over token ids.

The hash of page i covers every token of pages 0..i and the root, so two prompts share a page's name exactly when they
share the whole prefix up to its end. The root covers everything else that decides what the page holds: the model, the
layout's fingerprint and the cache salt (a tenant, or whatever else must not share).

BLAKE2b is the default: under a sealed key a collision would be somebody else's prompt. XXH3 (128 bits) is for those
who exchange names with a program that uses it, and for whom nobody chooses prompts to make two of them collide.
Hashes of vLLM and SGLang are taken as they are: ``hash_name``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Literal
from urllib.parse import quote, unquote

import numpy as np

from torch_mooncake.errors import InvalidArgument

DIGEST_NBYTES = 16
Algorithm = Literal["blake2b", "xxh3"]
PageHash = bytes | int | str


def root_hash(*, model: str, fingerprint: str, cache_salt: str = "") -> bytes:
    """The hash that chains of this model, layout and salt start from. Fields are length-prefixed: no two sets of
    them run together into the same bytes."""
    digest = hashlib.blake2b(digest_size=DIGEST_NBYTES, person=b"tm-kv-root-v1")
    for field in (model, fingerprint, cache_salt):
        data = field.encode()
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.digest()


def page_hashes(root: bytes, token_ids: Sequence[int], page_size: int, algorithm: Algorithm = "blake2b") -> list[bytes]:
    """Hashes of the *full* pages of `token_ids`, `page_size` tokens each; an incomplete last page has none.

    ``xxh3``: XXH3-128 of the previous page's hash (16 bytes) and the page's tokens (int64, little endian); the root has
    to be 16 bytes long. It is ``torch_mooncake.ops.hash_pages``, which needs torch and also takes many prompts at once.
    Raises ValueError for a page size below 1 and OverflowError for ids that do not fit int64.
    """
    if page_size < 1:
        raise ValueError(f"page_size must be at least 1, not {page_size}")
    if algorithm not in ("blake2b", "xxh3"):
        raise ValueError(f'algorithm is "blake2b" or "xxh3", not {algorithm!r}')
    tokens = np.asarray(token_ids, dtype="<i8")
    if algorithm == "xxh3":
        return _xxh3_hashes(root, tokens, page_size)
    hashes: list[bytes] = []
    previous = root
    for start in range(0, len(tokens) - page_size + 1, page_size):
        digest = hashlib.blake2b(previous, digest_size=DIGEST_NBYTES, person=b"tm-kv-page-v1")
        digest.update(tokens[start : start + page_size].tobytes())
        previous = digest.digest()
        hashes.append(previous)
    return hashes


def _xxh3_hashes(root: bytes, tokens: np.ndarray, page_size: int) -> list[bytes]:
    import torch

    from torch_mooncake.ops import hash_pages

    own = torch.tensor(tokens, dtype=torch.int64)  # a copy: the caller's array may be read-only
    digests = hash_pages(own, page_size, torch.frombuffer(bytearray(root), dtype=torch.uint8))
    flat = digests.numpy().tobytes()
    return [flat[i : i + DIGEST_NBYTES] for i in range(0, len(flat), DIGEST_NBYTES)]


def hash_name(page_hash: PageHash) -> str:
    """A page hash as text that keeps its type, for a key: bytes (ours, vLLM's), int (vLLM's and SGLang's events) or
    str (SGLang's storage). InvalidArgument for anything else, and for what is empty or longer than 128 bytes."""
    if isinstance(page_hash, bytes) and 0 < len(page_hash) <= 128:
        return "b" + page_hash.hex()
    if isinstance(page_hash, int) and not isinstance(page_hash, bool) and page_hash.bit_length() <= 1024:
        return f"i{page_hash}"
    if isinstance(page_hash, str) and 0 < len(page_hash.encode()) <= 128:
        return "s" + quote(page_hash, safe="")
    raise InvalidArgument(f"a page hash is bytes, int or str of 1 to 128 bytes, not {page_hash!r}")


def hash_of_name(name: str) -> PageHash:
    """The inverse of ``hash_name``. ValueError for a name that it does not make."""
    kind, text = name[:1], name[1:]
    found: PageHash
    if kind == "b":
        found = bytes.fromhex(text)
    elif kind == "i":
        found = int(text)
    elif kind == "s":
        found = unquote(text)
    else:
        raise ValueError(f"{name!r} names no page")
    if hash_name(found) != name:
        raise ValueError(f"{name!r} names no page")
    return found
