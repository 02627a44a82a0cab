"""Whether the programs that share a pool give the same tokens the same names.

Serving programs name KV blocks by hashes that may depend on a seed of the process (PYTHONHASHSEED) or on a setting.
Where two differ they never meet in the pool: nothing is wrong, and nothing is ever reused. So the first one leaves what
its hash makes of something known, and the others compare.
"""

from __future__ import annotations

import logging

import torch_mooncake as tm

logger = logging.getLogger("torch_mooncake.integrations")


def same_hashes(pool: tm.Pool, prefix: str, probe: str, advice: str, timeout: float = 30) -> bool:
    """Whether ``probe`` (what this process's hash makes of something known, as text) is the one of whoever came first
    under ``prefix``. If not, an error is logged that ends with ``advice``. Errors: those of the pool."""
    key = f"{prefix}hash-probe"
    pool.put(key, probe.encode(), if_exists="keep", timeout=timeout)
    first = bytes(pool.get(key, timeout=timeout)).decode(errors="replace")
    if first == probe:
        return True
    logger.error(
        "the hashes of this process differ from those of the first one that used %r (%s here, %s there): nothing that "
        "one of them stores will be found by the other. %s",
        prefix,
        probe,
        first,
        advice,
    )
    return False
