"""A node as operators run it: health, metrics, draining, ``top``. Real processes throughout."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from typing import Any

import numpy as np
import pytest
from processes import PoolEnv, eventually, free_port, running, stopped
from services import COMMAND, ask, becomes_ready, cli, two_nodes

import torch_mooncake as tm
from torch_mooncake.cli.health import _Handler, serving
from torch_mooncake.cli.node import is_this_host
from torch_mooncake.config import Config


def metric(text: str, name: str) -> float:
    return float(re.search(rf"^torch_mooncake_pool_{name}(?:{{.*}})? (\S+)$", text, re.M)[1])  # type: ignore[index]


def test_health_tells_a_stopped_a_killed_and_a_leaving_worker(node: Any, pool_env: PoolEnv) -> None:
    port = free_port()
    process = node("--http", f"127.0.0.1:{port}", "--linger", "6")
    assert becomes_ready(port)
    assert ask(port, "/healthz") == (200, "ok\n")
    assert ask(port, "/nothing")[0] == 404

    tm.put("k", np.arange(1000))
    worker = pool_env.worker()
    with stopped(worker):
        started = time.monotonic()
        status, why = ask(port, "/healthz")
        assert (status, time.monotonic() - started < 5) == (503, True)
        assert "does not answer" in why
        assert ask(port, "/readyz")[0] == 503
        assert metric(ask(port, "/metrics")[1], "up") == 0
    assert becomes_ready(port)

    os.kill(worker, signal.SIGKILL)
    assert becomes_ready(port)  # the keeper has started another
    assert np.array_equal(tm.get("k"), np.arange(1000))
    assert metric(ask(port, "/metrics")[1], "worker_starts_total") == 2

    # The health check is nobody's client: the node lingers out when the last one has been gone for six seconds.
    tm.close()
    assert process.wait(25) == 0
    assert ask(port, "/healthz")[0] == 0


def test_metrics_count_what_happened(node: Any) -> None:
    port = free_port()
    node("--http", f"127.0.0.1:{port}", "--memory", "64MiB")
    assert becomes_ready(port)
    pool = tm.init()
    for i in range(100):
        pool.put(f"k{i}", np.zeros(1 << 20, np.uint8))
    pool.put("last", b"x")
    pool.delete("last")
    pool.exists(["k99", "nobody"])
    text = ask(port, "/metrics")[1]
    assert metric(text, "up") == metric(text, "ready") == metric(text, "is_home") == metric(text, "clients") == 1
    assert metric(text, "limit_bytes") == 64 << 20
    assert 32 << 20 < metric(text, "used_bytes") <= 64 << 20
    assert metric(text, "commits_total") == 101
    assert metric(text, "removals_total") == 1
    assert metric(text, "evictions_total") == 100 - metric(text, "keys") >= 36
    assert metric(text, "misses_total") >= 1
    assert metric(text, "lookups_total") >= 2
    for line in text.splitlines():  # as Prometheus reads it
        assert line.startswith("# ") or re.fullmatch(r'[a-z_]+(\{[a-z]+="[0-9a-f]{8}"\})? [0-9.e+]+', line), line


def test_clients_that_hang_hold_up_nobody(node: Any, pool_env: PoolEnv, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_Handler, "timeout", 60)
    node()
    assert eventually(lambda: (pool_env.folder / "node.sock").exists())
    with serving(("127.0.0.1", 0), Config.from_env()) as port, contextlib.ExitStack() as hanging:
        assert becomes_ready(port)
        for said in (b"", b"GET /metr", b"GET /metrics HTTP/1.0\r\n\r\n", b"GET /healthz HTTP/1.0\r\nHost:") * 8:
            client = hanging.enter_context(socket.create_connection(("127.0.0.1", port)))
            client.sendall(said)  # and reads nothing
        started = time.monotonic()
        for path in ("/healthz", "/readyz", "/metrics"):
            assert ask(port, path)[0] == 200
        assert time.monotonic() - started < 30  # one of them alone would take 60


def test_answering_looks_up_no_names(node: Any, pool_env: PoolEnv, monkeypatch: pytest.MonkeyPatch) -> None:
    """A resolver that is out of reach would hold up the start, or each answer."""

    def asked(*args: Any) -> Any:
        raise AssertionError(f"the resolver was asked for {args}")

    for name in ("getfqdn", "gethostbyaddr", "getnameinfo"):
        monkeypatch.setattr(socket, name, asked)
    node()
    assert eventually(lambda: (pool_env.folder / "node.sock").exists())
    with serving(("127.0.0.1", 0), Config.from_env()) as port:
        assert becomes_ready(port)
        assert "torch_mooncake_pool_up" in ask(port, "/metrics")[1]


def test_a_taken_http_port_is_told_before_the_node_starts(node: Any, pool_env: PoolEnv) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        process = node("--http", f"127.0.0.1:{taken.getsockname()[1]}")
        assert process.wait(20) == 1
        assert b"in use" in process.stderr.read()
        assert not pool_env.nodes()


def test_the_node_leaves_with_its_http_parent(node: Any, pool_env: PoolEnv) -> None:
    port = free_port()
    process = node("--http", f"127.0.0.1:{port}")
    assert becomes_ready(port)
    process.kill()
    assert eventually(lambda: not pool_env.nodes())


def test_a_drained_member_is_out_of_the_view_at_once(
    node: Any, pool_env: PoolEnv, monkeypatch: pytest.MonkeyPatch
) -> None:
    process, member, leader = two_nodes(node, monkeypatch)
    started = time.monotonic()
    assert "has left the pool" in cli("drain", "--address", member)
    assert len(json.loads(cli("stat", "--json", "--address", leader))["nodes"]) == 1
    assert time.monotonic() - started < 4.5  # an expelled one would have taken 5.5 s
    assert process.wait(10) == 0


def test_a_draining_node_takes_nothing_new_and_lets_writers_finish(node: Any, pool_env: PoolEnv) -> None:
    process = node("--drain", "10")
    assert eventually(lambda: (pool_env.folder / "node.sock").exists())
    slow = {**os.environ, "TM_FAILPOINTS": "client.written=sleep:2000"}
    code = "import numpy as np, torch_mooncake as tm; tm.put('k', np.ones(1 << 20)); print('stored')"
    pool = tm.init()
    with running([sys.executable, "-c", code], env=slow, stdout=subprocess.PIPE) as writer:
        assert eventually(lambda: pool.stat()["nodes"][0]["prepared_bytes"] > 0)
        process.send_signal(signal.SIGTERM)
        assert eventually(lambda: pool.stat()["nodes"][0]["draining"])
        with pytest.raises(tm.PoolUnavailable, match="draining"):
            pool.put("late", np.ones(1 << 20), timeout=0.5)
        assert writer.communicate(timeout=20)[0] == b"stored\n"
    assert process.wait(20) == 0


def test_top_once_as_text_and_json(pool: tm.Pool) -> None:
    pool.put("k", np.zeros(1 << 20, np.uint8))
    text = cli("top", "--once")
    assert "1 nodes, 1 keys" in text
    assert "ready" in text
    stat = json.loads(cli("top", "--once", "--json"))
    assert stat["nodes"][0]["commits"] == 1
    with running([*COMMAND, "top", "--interval", "0.1", "--json"], stdout=subprocess.PIPE, text=True) as live:
        lines = [json.loads(live.stdout.readline()) for _ in range(3)]
        live.send_signal(signal.SIGINT)
        assert live.wait(10) == 130
    assert lines[2]["per_s"]["commits"] == 0
    cli("top", "--once", "--interval", "0", status=1)


def test_commands_that_look_start_no_node(pool_env: PoolEnv) -> None:
    done = subprocess.run([*COMMAND, "ls"], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "no node of the pool" in done.stderr
    assert not pool_env.nodes()


def test_which_host_an_address_is() -> None:
    assert is_this_host("tcp://tm-0:7400", "tm-0")
    assert is_this_host("tcp://tm-0.tm.default.svc:7400", "tm-0")
    assert not is_this_host("tcp://tm-0.tm:7400", "tm-1")
    assert not is_this_host("tcp://tm-0.tm:7400", "tm")
    assert is_this_host("127.0.0.1:7400", "elsewhere")
    assert not is_this_host("tcp://192.0.2.1:7400")
