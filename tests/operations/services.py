"""Nodes as operators run them, for tests."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.error
import urllib.request
from typing import Any

import pytest
from processes import eventually, free_port

COMMAND = [sys.executable, "-m", "torch_mooncake"]


def ask(port: int, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()
    except OSError as error:
        return 0, str(error)


def becomes_ready(port: int) -> bool:
    if eventually(lambda: ask(port, "/readyz")[0] == 200, timeout=20):
        return True
    print("not ready:", ask(port, "/readyz"), ask(port, "/healthz"))
    return False


def cli(*args: str, status: int = 0) -> str:
    done = subprocess.run([*COMMAND, *args], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == status, done.stderr
    return done.stdout


def two_nodes(node: Any, monkeypatch: pytest.MonkeyPatch, *options: str) -> tuple[subprocess.Popen[bytes], str, str]:
    """A leader and a member on "another host", 64 MiB each; (the member's process and address, the leader's).
    ``options`` are the member's."""
    leader, member = (f"tcp://127.0.0.1:{free_port()}" for _ in range(2))
    monkeypatch.setenv("TM_TOKEN", "0123456789abcdef")
    monkeypatch.setenv("TM_MEMORY", "64MiB")
    node("--listen", leader)
    process = node("--listen", member, "--leader", leader, "--pool", "other", "--host-id", "h2", *options)

    def both() -> bool:
        try:
            return len(json.loads(cli("stat", "--json", "--address", leader))["nodes"]) == 2
        except AssertionError:
            return False

    assert eventually(both, timeout=20)
    return process, member, leader
