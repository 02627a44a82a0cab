"""A pool of one's own for each test."""

import pytest

import torch_mooncake as tm


@pytest.fixture(autouse=True)
def pool(tmp_path, monkeypatch):
    monkeypatch.setenv("TM_RUNTIME_DIR", str(tmp_path / "tm"))
    monkeypatch.setenv("TM_POOL", "weights-test")
    monkeypatch.setenv("TM_LINGER_S", "0")
    monkeypatch.setenv("TM_MEMORY", "64MiB")
    yield tm.init()
    tm.close()
