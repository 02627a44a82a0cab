"""Engines find each other by a torch Store and by a real etcd."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from etcd_server import Etcd
from processes import Child, eventually

import torch_mooncake as tm
from torch_mooncake import discovery

PUBLISHER = """
import torch_mooncake as tm
engine = tm.Engine(listen=listen, name='other')
if where.startswith('file://'):
    import torch.distributed as dist
    where = dist.FileStore(where[7:])
engine.publish(where, 'rank1')
result = [engine.id.hex(), engine.addresses[0]]
"""


@pytest.fixture
def engine() -> Iterator[tm.Engine]:
    with tm.Engine(name="finder") as e:
        yield e
    assert not [t for t in threading.enumerate() if t.name.startswith("tm-etcd")]


@pytest.fixture(params=["file", "etcd"])
def where(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, Any]:
    """The same directory for a child (a text) and for ``find()`` here."""
    if request.param == "etcd":
        url = request.getfixturevalue("etcd").url + "/some/prefix"
        return url, url
    path = str(tmp_path / "store")
    return f"file://{path}", dist.FileStore(path)


def test_found_by_name_and_usable(where: tuple[str, Any], engine: tm.Engine, child: Callable[..., Child]) -> None:
    other = child()
    identity, _ = other(PUBLISHER, where=where[0], listen="tcp://127.0.0.1:0")
    peer = engine.find(where[1], "rank1")
    assert (peer.id.hex(), peer.name) == (identity, "other")
    there, here = bytearray(b"x" * 100), bytearray(100)
    descriptor = other(
        "region = engine.register(bytearray(b'x' * 100)); result = region.descriptor().hex()",
    )
    engine.read(engine.register(here), peer.open(bytes.fromhex(descriptor))).wait()
    assert here == there


def test_find_waits_for_the_publication(where: tuple[str, Any], engine: tm.Engine) -> None:
    with tm.Engine(name="late") as late:
        timer = threading.Timer(0.3, lambda: late.publish(where[1], "late"))
        timer.start()
        assert engine.find(where[1], "late", timeout=20).id == late.id
        timer.join()


def test_missing_is_key_not_found(where: tuple[str, Any], engine: tm.Engine) -> None:
    with pytest.raises(tm.KeyNotFound, match="nobody"):
        engine.find(where[1], "nobody", timeout=2)


def test_a_restarted_engine_is_found(where: tuple[str, Any], engine: tm.Engine, child: Callable[..., Child]) -> None:
    first = child()
    identity, address = first(PUBLISHER, where=where[0], listen="tcp://127.0.0.1:0")
    assert engine.find(where[1], "rank1").id.hex() == identity
    first.kill()
    second = child()
    again, _ = second(PUBLISHER, where=where[0], listen=address)
    assert again != identity
    assert eventually(lambda: engine.find(where[1], "rank1").id.hex() == again)


@pytest.mark.slow
def test_a_record_of_the_dead_is_peer_lost(
    where: tuple[str, Any], engine: tm.Engine, child: Callable[..., Child]
) -> None:
    other = child()
    identity, address = other(PUBLISHER, where=where[0], listen="tcp://127.0.0.1:0")
    other.kill()
    with pytest.raises(tm.PeerLost, match=f"gone.*{identity[:8]}"):
        engine.find(where[1], "rank1", timeout=10)
    with tm.Engine(listen=address, name="squatter"):  # another incarnation answers there
        with pytest.raises(tm.PeerLost, match=r"another engine \(squatter"):
            engine.find(where[1], "rank1", timeout=10)


def test_close_withdraws_only_what_is_ours(where: tuple[str, Any], engine: tm.Engine) -> None:
    with tm.Engine() as first, tm.Engine() as second:
        old = first.publish(where[1], "name")
        second.publish(where[1], "name")
        old.close()
        old.close()
        assert engine.find(where[1], "name").id == second.id
    with pytest.raises((tm.KeyNotFound, tm.PeerLost)):
        engine.find(where[1], "name", timeout=0)
    if isinstance(where[1], str):  # the watch tells soon
        time.sleep(0.5)
    with pytest.raises(tm.KeyNotFound):
        engine.find(where[1], "name", timeout=0)


def test_a_forked_child_withdraws_nothing(
    where: tuple[str, Any], engine: tm.Engine, child: Callable[..., Child]
) -> None:
    publisher = child()
    publisher(PUBLISHER, where=where[0], listen="tcp://127.0.0.1:0")
    publisher("import os, sys\nif (pid := os.fork()) == 0: sys.exit(0)\nresult = os.waitpid(pid, 0)[1]")
    assert engine.find(where[1], "rank1").name == "other"


def test_what_cannot_be_published_or_asked(engine: tm.Engine) -> None:
    with tm.Engine(listen=[]) as deaf, pytest.raises(tm.InvalidArgument, match="listens nowhere"):
        deaf.publish(dist.HashStore(), "deaf")
    for url, error in (
        ("zookeeper://h", tm.Unsupported),
        ("etcd://", tm.InvalidArgument),
        ("etcd://h:x", tm.InvalidArgument),
    ):
        with pytest.raises(error):
            engine.find(url, "x", timeout=1)
    store = dist.HashStore()
    store.set("torch_mooncake/odd", "{}")
    with pytest.raises(tm.InvalidArgument, match="not a record"):
        engine.find(store, "odd", timeout=1)


def test_a_tcp_store(engine: tm.Engine) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=10))
    with tm.Engine() as other:
        other.publish(store, "x")
        assert engine.find(store, "x").id == other.id


@pytest.mark.slow
def test_a_lease_ends_with_its_process(etcd: Etcd, engine: tm.Engine, child: Callable[..., Child]) -> None:
    other = child()
    other(PUBLISHER, where=etcd.url, listen="tcp://127.0.0.1:0")
    engine.find(etcd.url, "rank1")
    other.kill()

    def gone() -> bool:
        try:
            engine.find(etcd.url, "rank1", timeout=0)
        except tm.KeyNotFound:
            return True
        except tm.PeerLost:
            return False
        return False

    assert eventually(gone, discovery.LEASE_S + 8)


def test_etcd_comes_back_without_its_memory(etcd: Etcd, engine: tm.Engine) -> None:
    with tm.Engine() as other:
        other.publish(etcd.url, "x")
        assert engine.find(etcd.url, "x").id == other.id
        etcd.kill(forget=True)
        with pytest.raises(tm.IoError):
            tm.Engine().publish(etcd.url, "y")
        with pytest.raises(tm.IoError):
            engine.find(etcd.url, "y", timeout=1)
        assert engine.find(etcd.url, "x").id == other.id  # known already, and it answers
        etcd.start()
        with tm.Engine() as third:  # knows nothing yet: sees what was published again
            assert third.find(etcd.url, "x", timeout=20).id == other.id


def test_the_next_etcd_host_is_asked(etcd: Etcd, engine: tm.Engine) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        url = f"etcd://127.0.0.1:{closed.getsockname()[1]},{etcd.url.removeprefix('etcd://')}"
    with tm.Engine() as other:
        other.publish(url, "x")
        assert engine.find(url, "x").id == other.id
