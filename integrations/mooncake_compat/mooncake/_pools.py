"""Which pool a store is a client of, and how its keys are called there."""

from __future__ import annotations

import hashlib
import os
import re
from urllib.parse import quote

import torch_mooncake as tm
from torch_mooncake.config import parse_bytes

_MAX_KEY_NBYTES = 1024
_LEAST_MEMORY = 64 << 20


def open_pool(master: str, segment: int | str) -> tm.Pool:
    """The pool that TM_ADDRESS, TM_DISCOVERY or TM_POOL name; else one of this host for each ``master``. Errors: those
    of ``tm.Pool``, InvalidArgument for a segment that is no number of bytes."""
    memory = parse_bytes(segment)
    name = None
    if not any(os.environ.get(variable) for variable in ("TM_ADDRESS", "TM_DISCOVERY", "TM_POOL")) and master:
        name = "mooncake-" + re.sub(r"[^A-Za-z0-9._-]", "_", master)[:50]
    if os.environ.get("TM_MEMORY") or memory == 0:
        return tm.Pool(pool=name)
    return tm.Pool(pool=name, memory=max(memory, _LEAST_MEMORY))


def key_of(prefix: str, key: str | None = None) -> str:
    """The pool's key of ``key``; without one, the prefix of a tenant (given as ``prefix``). A key that is too long for
    the pool is named by its digest, which no pattern finds."""
    if key is None:
        return f"mooncake/{quote(prefix, safe='')}/"
    name = prefix + key
    if len(name) * 4 <= _MAX_KEY_NBYTES or len(name.encode(errors="surrogatepass")) <= _MAX_KEY_NBYTES:
        return name
    return f"{prefix}#{hashlib.blake2b(key.encode(errors='surrogatepass'), digest_size=32).hexdigest()}"
