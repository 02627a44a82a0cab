"""``torch-mooncake drain`` says that a node has left when it has, and only then."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest
from chaos_proxy import Proxy
from processes import PoolEnv, eventually, stop, stopped

import torch_mooncake as tm

COMMAND = [sys.executable, "-m", "torch_mooncake"]


@pytest.fixture
def node(pool_env: PoolEnv, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """A node of this host, and its TCP address."""
    monkeypatch.setenv("TM_TOKEN", "0123456789abcdef")
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    process = subprocess.Popen([*COMMAND, "node", "--listen", address])
    try:
        assert eventually(lambda: (pool_env.folder / "node.sock").exists())
        yield process, address
    finally:
        tm.close()
        process.terminate()
        try:
            process.wait(20)
        finally:
            process.kill()


@pytest.fixture
def writer(node: tuple[subprocess.Popen[bytes], str]) -> Iterator[subprocess.Popen[bytes]]:
    """Stands still before its commit, so that the node waits for it when it leaves. SIGCONT lets it end."""
    code = "import numpy as np, torch_mooncake as tm; tm.put('k', np.ones(1 << 20)); print('stored')"
    env = {**os.environ, "TM_FAILPOINTS": "client.written=stop"}
    process = subprocess.Popen([sys.executable, "-c", code], env=env, stdout=subprocess.PIPE)
    try:
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
        yield process
    finally:
        process.kill()
        process.communicate()


@contextlib.contextmanager
def drain(*options: str, **env: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [*COMMAND, "drain", *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, **env},
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def is_draining() -> bool:
    return bool(tm.init().stat()["nodes"][0]["draining"])


def test_a_lost_connection_is_no_departure(
    node: tuple[subprocess.Popen[bytes], str], writer: subprocess.Popen[bytes]
) -> None:
    process, address = node
    proxy = Proxy(address)
    try:
        with drain("--address", proxy.address, TM_HOST_ID="another") as leaving:  # over TCP
            assert eventually(is_draining)
            before = len(proxy.links)
            for link in proxy.links:
                link.reset()
            assert eventually(lambda: len(proxy.links) > before or leaving.poll() is not None)  # it asks again
            assert leaving.poll() is None
            assert process.poll() is None
            writer.send_signal(signal.SIGCONT)
            assert writer.communicate(timeout=20)[0] == b"stored\n"
            assert process.wait(20) == 0
            proxy.close()  # as the node's own port: nobody has it any more
            assert "has left the pool" in leaving.communicate(timeout=20)[0]
            assert leaving.returncode == 0
    finally:
        proxy.close()


def test_a_node_that_cannot_be_heard_has_not_left(
    node: tuple[subprocess.Popen[bytes], str], writer: subprocess.Popen[bytes], pool_env: PoolEnv
) -> None:
    with drain("--timeout", "6") as leaving:
        assert eventually(is_draining)
        with stopped(pool_env.worker()):
            said = leaving.communicate(timeout=30)[0]
        assert leaving.returncode == 1
        assert "has not left: it does not answer" in said


def test_another_node_in_its_place_is_not_the_one_that_left(
    node: tuple[subprocess.Popen[bytes], str], writer: subprocess.Popen[bytes]
) -> None:
    process, _ = node
    with drain() as leaving:
        assert eventually(is_draining)
        stop(leaving.pid)
        writer.send_signal(signal.SIGCONT)
        assert writer.communicate(timeout=20)[0] == b"stored\n"
        assert process.wait(20) == 0
        tm.put("k", b"on a node that was started for it")
        leaving.send_signal(signal.SIGCONT)
        said = leaving.communicate(timeout=20)[0]
        assert "has left the pool" in said
        # What the old node said of its objects, or nothing, if it went before the question was put.
        assert "could not be moved: the pool ends with its leader" in said or "objects is not known" in said
        assert leaving.returncode == 0
        assert tm.get("k") == b"on a node that was started for it"


def test_a_node_that_is_killed_while_it_leaves_says_nothing_of_its_objects(
    node: tuple[subprocess.Popen[bytes], str], writer: subprocess.Popen[bytes], pool_env: PoolEnv
) -> None:
    with drain("--json") as leaving:
        assert eventually(is_draining)
        for pid in pool_env.nodes():  # the keeper first: nobody starts another worker
            os.kill(pid, signal.SIGKILL)
        answer = json.loads(leaving.communicate(timeout=20)[0])
        assert leaving.returncode == 0
    assert (answer["moved"], answer["left"]) == (None, None)
    assert answer["why"] == "what became of its objects is not known"
