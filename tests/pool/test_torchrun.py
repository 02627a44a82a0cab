"""Hosts of one torchrun make one pool, found through the Store. The hosts here are two runtime folders and host ids."""

from __future__ import annotations

import contextlib
import socket
import tempfile
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist
from processes import eventually

import torch_mooncake as tm
from torch_mooncake.clock import deadline_ns
from torch_mooncake.config import Config
from torch_mooncake.node import nobody_listens
from torch_mooncake.torchrun import cluster


def test_two_hosts_make_one_pool(pool_env: Any, child: Any) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=30), wait_for_workers=False)
    with tempfile.TemporaryDirectory(prefix="tm-test-", dir="/tmp") as other_dir:
        common = {
            "TORCHELASTIC_RUN_ID": "job",
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "GROUP_WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(store.port),
        }
        host0 = child({**common, "GROUP_RANK": "0", "TM_HOST_ID": "h0"})
        host1 = child({**common, "GROUP_RANK": "1", "TM_HOST_ID": "h1", "TM_RUNTIME_DIR": other_dir})
        host1.start("import torch, torch_mooncake as tm; tm.put('from1', torch.arange(100_000)); result = tm.keys()")
        host0("import torch, torch_mooncake as tm; tm.put('from0', torch.arange(200_000)); tm.wait('from1')")
        host1.result()
        assert host0("result = [len(tm.stat()['nodes']), int(tm.get('from1')[-1])]") == [2, 99_999]
        assert host1("result = [len(tm.stat()['nodes']), int(tm.get('from0')[-1])]") == [2, 199_999]
        host1("tm.put('from0', 'replaced')")
        assert host0("result = tm.get('from0')") == "replaced"
        assert host1.close() == 0
        assert host0.close() == 0


def test_hosts_that_give_a_store_make_one_pool(pool_env: Any, child: Any) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=30), wait_for_workers=False)
    begin = "import torch, torch.distributed as dist, torch_mooncake as tm\n"
    begin += f"store = dist.PrefixStore('job', dist.TCPStore('127.0.0.1', {store.port}, is_master=False))\n"
    begin += "tm.init(store=store)"
    with tempfile.TemporaryDirectory(prefix="tm-test-", dir="/tmp") as other_dir:
        hosts = [child({"TM_HOST_ID": "h0"}), child({"TM_HOST_ID": "h1", "TM_RUNTIME_DIR": other_dir})]
        for host in hosts:
            host.start(begin)  # at once: one leads
        for host in hosts:
            host.result()
        hosts[0]("tm.put('k', torch.arange(100_000))")
        assert hosts[1]("result = [int(tm.get('k')[-1]), len(tm.stat()['nodes'])]") == [99_999, 2]
        assert hosts[1]("result = sorted(n['is_home'] for n in tm.stat()['nodes'])") == [False, True]
        hosts[1]("tm.init(store=store)")  # again: the same pool
        with pytest.raises(RuntimeError, match="InvalidArgument"):
            hosts[1]("tm.init(store=dist.HashStore())")
        for host in reversed(hosts):
            assert host.close() == 0


def test_two_pools_of_one_job_have_a_leader_each(pool_env: Any) -> None:
    store = dist.HashStore()
    with tempfile.TemporaryDirectory(prefix="tm-test-", dir="/tmp") as other_dir:
        with tm.Pool(store=store) as one, tm.Pool(store=store, pool="other") as two:
            one.put("k", b"of one")
            assert two.keys() == []
            with tm.Pool(store=store, pool="other", runtime_dir=other_dir, host_id="h2") as third:
                assert len(third.stat()["nodes"]) == len(two.stat()["nodes"]) == 2
            assert len(one.stat()["nodes"]) == 1


def test_who_leads_is_settled_anew_when_the_leader_has_left(pool_env: Any) -> None:
    store = dist.HashStore()
    for _ in range(2):
        with tm.Pool(store=store, timeout=20) as pool:
            assert pool.stat()["nodes"][0]["is_home"]
            pool.put("k", b"1")
        assert eventually(lambda: not pool_env.nodes())
    with tempfile.TemporaryDirectory(prefix="tm-test-", dir="/tmp") as other_dir:
        with tm.Pool(store=store, runtime_dir=other_dir, host_id="h2", timeout=20) as elsewhere:
            assert elsewhere.stat()["nodes"][0]["is_home"]


def test_a_node_that_does_not_start_leads_nobody(pool_env: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.HashStore()
    monkeypatch.setenv("TM_SSD", "/proc/no-such-folder:1G")
    with pytest.raises(tm.PoolUnavailable, match="did not start"):
        tm.Pool(store=store, timeout=20)
    monkeypatch.delenv("TM_SSD")
    with tm.Pool(store=store, timeout=20) as pool:
        assert pool.stat()["nodes"][0]["is_home"]


def test_hosts_of_a_torchrun_wait_for_a_new_leader(pool_env: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Host 0 was here before: what it said then is not taken for where it is now."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=30), wait_for_workers=False)
    for name, value in {
        "TORCHELASTIC_RUN_ID": "job",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "GROUP_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("GROUP_RANK", "0")
    with tm.Pool() as pool:
        pool.put("k", b"1")
    assert eventually(lambda: not pool_env.nodes())
    monkeypatch.setenv("GROUP_RANK", "1")
    with pytest.raises(tm.PoolUnavailable, match="has left"):
        tm.Pool(timeout=1)


def test_a_leader_that_never_comes_is_told_of_in_time(pool_env: Any) -> None:
    store = dist.HashStore()
    store.set(f"torch_mooncake/{pool_env.pool}/claim", "a host that died before it had a node")
    with pytest.raises(tm.PoolUnavailable, match="leader was not found"):
        tm.Pool(store=store, timeout=1)


def test_several_hosts_without_a_store_are_told_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job")
    monkeypatch.setenv("GROUP_WORLD_SIZE", "2")
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    with pytest.raises(tm.PoolUnavailable, match="init_process_group"):
        cluster(Config.from_env(), 0)


def test_one_host_needs_no_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job")
    monkeypatch.setenv("GROUP_WORLD_SIZE", "1")
    assert cluster(Config.from_env(), 0).listen == []


def listens(discovery: str) -> str:
    (address,) = cluster(Config.from_env(discovery=discovery, token="t"), deadline_ns(5)).listen
    return address


def test_the_hosts_of_a_discovery_are_tried_in_turn() -> None:
    unknown = "a" * 64  # too long for a name
    assert listens(f"etcd://{unknown}:1,127.0.0.1:1") == "tcp://127.0.0.1:0"
    with pytest.raises(tm.PoolUnavailable, match=unknown):
        listens(f"etcd://{unknown}:1")
    with pytest.raises(tm.PoolUnavailable, match="300"):
        listens("etcd://300.300.300.300:1")
    try:
        elsewhere = listens("etcd://192.0.2.1:1")
    except tm.PoolUnavailable:
        pytest.skip("needs a route to other hosts")
    assert listens("etcd://127.0.0.1:1,192.0.2.1:1") == elsewhere != "tcp://127.0.0.1:0"


def test_a_store_and_a_discovery_are_one_too_many(pool_env: Any) -> None:
    with pytest.raises(tm.InvalidArgument, match="give one"):
        tm.init(store=dist.HashStore(), discovery="etcd://127.0.0.1:1", token="t")
    assert not pool_env.nodes()


def test_a_listener_that_takes_nobody_in_is_somebody(tmp_path: Any) -> None:
    path = str(tmp_path / "s")
    with socket.socket(socket.AF_UNIX) as listener, contextlib.ExitStack() as others:
        listener.bind(path)
        listener.listen(0)
        taken = 0
        while taken == 0:
            other = others.enter_context(socket.socket(socket.AF_UNIX))
            other.setblocking(False)
            taken = other.connect_ex(path)
        assert not nobody_listens(f"unix://{path}")
    assert nobody_listens(f"unix://{path}")
