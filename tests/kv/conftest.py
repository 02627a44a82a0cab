"""A pool of one's own for each test that asks for it."""

import pytest

import torch_mooncake as tm


@pytest.fixture
def pool(tmp_path, monkeypatch):
    monkeypatch.setenv("TM_RUNTIME_DIR", str(tmp_path / "tm"))
    monkeypatch.setenv("TM_POOL", "kv-test")
    monkeypatch.setenv("TM_LINGER_S", "0")
    monkeypatch.setenv("TM_MEMORY", "64MiB")
    yield tm.init()
    tm.close()
