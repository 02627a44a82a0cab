from __future__ import annotations

from collections.abc import Iterator

import pytest
from processes import PoolEnv

import torch_mooncake as tm


@pytest.fixture
def small(pool_env: PoolEnv, monkeypatch: pytest.MonkeyPatch) -> Iterator[tm.Pool]:
    """The default pool, with 32 MiB of memory."""
    monkeypatch.setenv("TM_MEMORY", "32MiB")
    yield tm.init()
    tm.close()
