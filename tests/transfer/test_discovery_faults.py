"""Directories that answer nonsense, hang up, or do not answer at all."""

from __future__ import annotations

import base64
import json
import threading
import time
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
import torch.distributed as dist
from processes import eventually

import torch_mooncake as tm
from torch_mooncake import discovery
from torch_mooncake import etcd as etcd_module

ERROR = {"error": {"grpc_code": 14, "message": "etcdserver: no leader"}, "code": 14}


class Gateway:
    """Answers as etcd's HTTP gateway does, or as ``answers`` says: (status, JSON document or bytes) by the path's end.
    Counts what was asked."""

    def __init__(self) -> None:
        self.answers: dict[str, tuple[int, Any]] = {
            "grant": (200, {"ID": "7", "TTL": "5"}),
            "keepalive": (200, {"result": {"ID": "7", "TTL": "5"}}),
            "revoke": (200, {}),
            "txn": (200, {"succeeded": True}),
            "range": (200, {"header": {"revision": "1"}}),
            "watch": (200, {"result": {"created": True}}),
        }
        self.asked: Counter[str] = Counter()
        gateway = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                self.rfile.read(int(self.headers["Content-Length"]))
                what = self.path.rpartition("/")[2]
                gateway.asked[what] += 1
                status, answer = gateway.answers[what]
                body = answer if isinstance(answer, bytes) else json.dumps(answer).encode() + b"\n"
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"etcd://127.0.0.1:{self.server.server_port}"
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.05,))
        self.thread.start()

    def hold(self, name: str, engine: tm.Engine) -> None:
        """The record of ``engine`` is there."""
        record = discovery.record_of(engine).encode()
        kv = {"key": f"/torch_mooncake/{name}".encode(), "value": record}
        kv64 = {k: base64.b64encode(v).decode() for k, v in kv.items()}
        self.answers["range"] = (200, {"header": {"revision": "1"}, "kvs": [kv64]})

    def close(self) -> None:
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()


@pytest.fixture
def gateway() -> Iterator[Gateway]:
    server = Gateway()
    yield server
    server.close()


@pytest.mark.parametrize("nonsense", [ERROR, [], None, {"result": None}, {"result": {"TTL": []}}, b"<html>"])
def test_a_lease_outlives_an_answer_that_is_none(
    gateway: Gateway, nonsense: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(etcd_module, "_REFRESH_S", 0.02)
    with tm.Engine() as engine:
        right = gateway.answers["keepalive"]
        gateway.answers["keepalive"] = (200, nonsense)
        engine.publish(gateway.url, "x")
        assert eventually(lambda: gateway.asked["keepalive"] > 2)
        gateway.answers["keepalive"] = right
        asked = gateway.asked["keepalive"]
        assert eventually(lambda: gateway.asked["keepalive"] > asked + 2)


@pytest.mark.parametrize("nonsense", [ERROR, [], {"header": {}}, {"header": {"revision": "1"}, "kvs": [1]}])
def test_a_mirror_outlives_an_answer_that_is_none(gateway: Gateway, nonsense: Any) -> None:
    with tm.Engine() as finder, tm.Engine() as other:
        gateway.answers["range"] = (200, nonsense)
        with pytest.raises(tm.IoError, match="does not answer"):
            finder.find(gateway.url, "x", timeout=0.3)
        gateway.hold("x", other)
        assert finder.find(gateway.url, "x", timeout=20).id == other.id


@pytest.mark.parametrize(
    "watch", [(200, b""), (200, ERROR), (200, [1]), (200, {"result": {"created": True}}), (503, {"result": {}})]
)
def test_a_watch_that_ends_at_once_is_not_made_anew_without_a_pause(gateway: Gateway, watch: tuple[int, Any]) -> None:
    gateway.answers["watch"] = watch
    with tm.Engine() as finder, tm.Engine() as other:
        with pytest.raises((tm.KeyNotFound, tm.IoError)):
            finder.find(gateway.url, "x", timeout=1)
        assert 1 <= gateway.asked["watch"] < 8
        if watch[0] == 200:
            gateway.hold("x", other)
            assert finder.find(gateway.url, "x", timeout=20).id == other.id


class StuckStore(dist.Store):
    """A HashStore whose server stops answering when told."""

    def __init__(self) -> None:
        super().__init__()
        self.store = dist.HashStore()
        self.answering = threading.Event()
        self.answering.set()

    def _asked(self, what: str, *args: Any) -> Any:
        self.answering.wait()
        return getattr(self.store, what)(*args)

    def set(self, *args: Any) -> Any:
        return self._asked("set", *args)

    def get(self, *args: Any) -> Any:
        return self._asked("get", *args)

    def check(self, *args: Any) -> Any:
        return self._asked("check", *args)

    def compare_set(self, *args: Any) -> Any:
        return self._asked("compare_set", *args)


@pytest.fixture
def stuck() -> Iterator[StuckStore]:
    store = StuckStore()
    yield store
    store.answering.set()
    assert eventually(lambda: not [t for t in threading.enumerate() if t.name.startswith(("tm-withdraw", "tm-store"))])


def test_close_waits_two_seconds_for_all_directories_together(stuck: StuckStore) -> None:
    with tm.Engine() as engine, tm.Engine() as other:
        healthy = dist.HashStore()
        for name in ("a", "b", "c"):
            engine.publish(stuck, name)
        engine.publish(healthy, "x")
        peer = other.connect(engine.addresses[0])
        stuck.answering.clear()
        start = time.monotonic()
        engine.close()
        engine.close()
        assert time.monotonic() - start < 6
        assert eventually(lambda: not peer.alive)
        with pytest.raises(tm.KeyNotFound):  # the others were withdrawn
            other.find(healthy, "x", timeout=0)


def test_find_on_a_store_that_does_not_answer_ends_in_time(stuck: StuckStore) -> None:
    with tm.Engine() as engine:
        stuck.answering.clear()
        start = time.monotonic()
        with pytest.raises(tm.IoError, match="in time"):
            engine.find(stuck, "x", timeout=0.5)
        assert time.monotonic() - start < 5
