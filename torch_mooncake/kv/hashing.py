"""Names of KV pages: a hash chain over token ids.

The hash of page i covers every token of pages 0..i and the root, so two prompts share a page's name exactly when they
share the whole prefix up to its end. The root covers everything else that decides what the page holds: the model, the
layout's fingerprint and the cache salt (a tenant, or whatever else must not share). BLAKE2b is used, not a fast
non-cryptographic hash: under a sealed key a collision would be somebody else's prompt.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

DIGEST_NBYTES = 16


def root_hash(*, model: str, fingerprint: str, cache_salt: str = "") -> bytes:
    """The hash that chains of this model, layout and salt start from. Fields are length-prefixed: no two sets of
    them run together into the same bytes."""
    digest = hashlib.blake2b(digest_size=DIGEST_NBYTES, person=b"tm-kv-root-v1")
    for field in (model, fingerprint, cache_salt):
        data = field.encode()
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.digest()


def page_hashes(root: bytes, token_ids: Sequence[int], page_size: int) -> list[bytes]:
    """Hashes of the *full* pages of `token_ids`, `page_size` tokens each; an incomplete last page has none.

    Raises ValueError for a page size below 1 and OverflowError for ids that do not fit int64.
    """
    if page_size < 1:
        raise ValueError(f"page_size must be at least 1, not {page_size}")
    tokens = np.asarray(token_ids, dtype="<i8")
    hashes: list[bytes] = []
    previous = root
    for start in range(0, len(tokens) - page_size + 1, page_size):
        digest = hashlib.blake2b(previous, digest_size=DIGEST_NBYTES, person=b"tm-kv-page-v1")
        digest.update(tokens[start : start + page_size].tobytes())
        previous = digest.digest()
        hashes.append(previous)
    return hashes
