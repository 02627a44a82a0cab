"""Nodes of a test's own."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator

import pytest
from processes import PoolEnv
from services import COMMAND

import torch_mooncake as tm


@pytest.fixture
def node(pool_env: PoolEnv) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Starts ``torch-mooncake node ARGS``; all are ended at the end."""
    started: list[subprocess.Popen[bytes]] = []

    def start(*args: str, **env: str) -> subprocess.Popen[bytes]:
        process = subprocess.Popen([*COMMAND, "node", *args], env={**os.environ, **env}, stderr=subprocess.PIPE)
        started.append(process)
        return process

    yield start
    tm.close()
    for process in started:
        process.terminate()
    for process in started:
        try:
            process.wait(15)
        finally:
            process.kill()
            process.stderr.close()  # type: ignore[union-attr]
