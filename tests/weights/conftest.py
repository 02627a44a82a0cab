"""A pool of one's own for each test."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import torch_mooncake as tm


@pytest.fixture(autouse=True)
def pool(tmp_path, monkeypatch):
    monkeypatch.setenv("TM_RUNTIME_DIR", str(tmp_path / "tm"))
    monkeypatch.setenv("TM_POOL", "weights-test")
    monkeypatch.setenv("TM_LINGER_S", "0")
    monkeypatch.setenv("TM_MEMORY", "64MiB")
    yield tm.init()
    tm.close()


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """torch's own threads only get in each other's way at these sizes."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def opened(pool: Any) -> Iterator[Callable[[Any], Any]]:
    """Closes what it is given, the last one first, before the pool."""
    with contextlib.ExitStack() as stack:

        def open_(what: Any) -> Any:
            stack.callback(what.close)
            return what

        yield open_
