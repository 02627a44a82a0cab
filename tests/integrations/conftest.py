"""What tests of the integrations share."""

from __future__ import annotations

import os

import pytest
from places import COMPAT, ROOT
from processes import PoolEnv


@pytest.fixture
def compat_env(pool_env: PoolEnv, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The environment of a process that finds mooncake_compat, with the pool of this test."""
    monkeypatch.syspath_prepend(str(COMPAT))
    path = os.pathsep.join([str(ROOT), str(COMPAT), *filter(None, [os.environ.get("PYTHONPATH")])])
    monkeypatch.setenv("PYTHONPATH", path)
    return dict(os.environ)


# Those need the programs that they are about: `make test-integrations` sets the variable, in their environment.
collect_ignore = [] if os.environ.get("TM_STACKS") else ["stacks"]
