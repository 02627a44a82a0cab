"""What the pool's keys and metadata say of KV pages. Runs without torch."""

from __future__ import annotations

from typing import Any, NamedTuple
from urllib.parse import unquote

import msgspec
import numpy as np

from torch_mooncake.errors import InvalidArgument
from torch_mooncake.kv.hashing import PageHash, hash_of_name

PREFIX = "kv/"


class PageKey(NamedTuple):
    """What a page's key says: ``kv/<namespace>/<fingerprint of the layout>/<hash>``."""

    namespace: str
    fingerprint: str
    page_hash: PageHash

    @classmethod
    def parse(cls, key: str) -> PageKey | None:
        """None: not a page's key."""
        parts = key.split("/")
        if len(parts) != 4 or parts[0] + "/" != PREFIX:
            return None
        try:
            return cls(unquote(parts[1]), parts[2], hash_of_name(parts[3]))
        except (ValueError, InvalidArgument):
            return None


class PageMeta(msgspec.Struct, frozen=True, omit_defaults=True):
    """What is stored beside a page, as the object's ``meta``."""

    block_size: int  # tokens
    parent: str | None = None  # name of the hash of the page before, see hash_name
    tokens: bytes | None = None  # int64, little endian

    def token_ids(self) -> list[int] | None:
        return None if self.tokens is None else np.frombuffer(self.tokens, "<i8").tolist()


def page_meta(user: dict[str, Any] | None) -> PageMeta | None:
    """None if ``user`` (an object's ``meta``) is not a page's."""
    try:
        return msgspec.convert(user, PageMeta)
    except msgspec.ValidationError:
        return None
