"""Fixtures for all tests: a pool of one's own, other processes, and the check that nothing is left behind."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from etcd_server import Etcd
from processes import Child, PoolEnv, eventually

# A shell starts background jobs with SIGINT ignored, and children inherit that: tests of Ctrl-C need it back.
signal.signal(signal.SIGINT, signal.default_int_handler)


# Files of few long tests: begun last, they would keep one of two processes busy when the other has nothing left.
LONGEST = ("test_membership.py", "test_silent_etcd.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.name not in LONGEST)


@pytest.fixture
def pool_env(monkeypatch: pytest.MonkeyPatch) -> Iterator[PoolEnv]:
    """TM_* set to a pool of this test's own. At the end: no node runs on, nothing lies in /dev/shm."""
    runtime_dir = tempfile.mkdtemp(prefix="tm-test-", dir="/tmp")  # short: Unix socket paths are
    env = PoolEnv(runtime_dir, f"t-{uuid.uuid4().hex[:8]}")
    for name, value in {
        "TM_RUNTIME_DIR": env.runtime_dir,
        "TM_POOL": env.pool,
        "TM_LINGER_S": "0",
        "TM_MEMORY": "256MiB",
    }.items():
        monkeypatch.setenv(name, value)
    for name in ("TM_TOKEN", "TM_ADDRESS", "TM_HOST_ID", "TORCHELASTIC_RUN_ID", "TM_FAILPOINTS"):
        monkeypatch.delenv(name, raising=False)
    shm_before = set(os.listdir("/dev/shm"))
    yield env
    import torch_mooncake as tm

    tm.close()
    left = not eventually(lambda: not env.nodes(), timeout=15)
    survivors = env.nodes()
    for pid in survivors:
        os.kill(pid, signal.SIGKILL)
    shm_left = {
        name for name in set(os.listdir("/dev/shm")) - shm_before if "mooncake" in name or name.startswith("tm")
    }
    log = env.log()
    shutil.rmtree(runtime_dir, ignore_errors=True)
    assert not left, f"the node did not exit after its last client: {survivors}\n{log}"
    assert not shm_left, f"left in /dev/shm: {shm_left}"


@pytest.fixture
def pool(pool_env: PoolEnv) -> Iterator[Any]:
    """The default pool, on a node of this test's own."""
    import torch_mooncake as tm

    yield tm.init()
    tm.close()


@pytest.fixture
def child() -> Iterator[Callable[..., Child]]:
    """Starts other processes: ``other = child()``. All are ended after the test, also stopped ones."""
    children: list[Child] = []

    def make(env: dict[str, str] | None = None, prefix: Sequence[str] = ()) -> Child:
        children.append(Child(env, prefix))
        return children[-1]

    yield make
    try:
        for c in children:
            if c.process.poll() is None:
                c.process.send_signal(signal.SIGCONT)
            c.close()
    finally:  # one that does not end leaves none of the others behind
        for c in children:
            c.process.kill()


@pytest.fixture
def etcd() -> Iterator[Etcd]:
    if shutil.which("etcd") is None:
        pytest.skip("needs etcd (Debian: etcd-server)")
    server = Etcd()
    yield server
    server.close()
