"""An etcd that does not answer, to all or to some: the nodes go on as they know each other, never under two leaders."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator

import numpy as np
import pytest
from clusters import NAMES, TYPED, Cluster, Writers, cluster_of, replace_while_stopped, value
from etcd_server import Etcd
from processes import PoolEnv, eventually

import torch_mooncake as tm

LONG_S = 12  # more than two leases


@pytest.fixture(params=[3])
def cluster(
    request: pytest.FixtureRequest, etcd: Etcd, pool_env: PoolEnv, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Cluster]:
    monkeypatch.setenv("TM_TOKEN", "0123456789abcdef")
    made = Cluster(etcd, pool_env, NAMES[: request.param])
    try:
        assert made.becomes_whole(request.param)
        yield made
    finally:
        made.close()


def go_on_for(writers: Writers, seconds: float) -> None:
    """So long they put and get, and nothing fails."""
    failed, until = writers.failed, time.monotonic() + seconds
    while time.monotonic() < until:
        before = writers.done
        assert eventually(lambda: writers.done > before + 20), writers.errors  # noqa: B023
    assert writers.failed == failed, writers.errors[failed:]


@pytest.mark.parametrize("how", ["stopped", "restarted"])
@pytest.mark.parametrize("cluster", [3, 1], indirect=True)
def test_reads_and_writes_go_on_while_etcd_is_away(cluster: Cluster, how: str) -> None:
    leader = cluster.leader()
    for node in cluster.living():
        node.pool.put(f"k/{node.name}", value(7))
    with Writers(cluster.living(), replicas=1) as writers:
        assert eventually(lambda: writers.done > 20)
        cluster.etcd.stop() if how == "stopped" else cluster.etcd.kill()
        go_on_for(writers, LONG_S)
        cluster.etcd.go_on() if how == "stopped" else cluster.etcd.start()
        go_on_for(writers, LONG_S)
    assert cluster.leader() is leader
    for node in cluster.living():
        for other in cluster.living():
            assert np.array_equal(node.pool.get(f"k/{other.name}"), value(7))
    # It leads as before: who comes is admitted, and takes over when it has gone.
    new = cluster.add("new")
    assert cluster.becomes_whole(len(cluster.living()))
    leader.send(signal.SIGKILL)
    assert cluster_of(cluster, *cluster.living())
    assert np.array_equal(new.pool.put("k", value(8)) and new.pool.get("k"), value(8))


def test_a_member_that_is_lost_meanwhile_ends_it_and_is_expelled_afterwards(cluster: Cluster) -> None:
    leader = cluster.leader()
    lost, other = cluster.others(leader)
    for i in range(20):
        other.pool.put(f"k/{i}", value(i))
    with Writers([leader, other], replicas=1) as writers:
        cluster.etcd.stop()
        try:
            go_on_for(writers, 6)
            lost.send(signal.SIGKILL)
            assert eventually(lambda: all(node.here().get("is_home") is False for node in cluster.living()), 15)
        finally:
            cluster.etcd.go_on()
        assert cluster_of(cluster, leader, other)
        before = writers.done
        assert eventually(lambda: writers.done > before + 20)
    for node in (leader, other):
        for i in range(20):
            assert np.array_equal(node.pool.get(f"k/{i}"), value(i))


def test_a_members_worker_that_is_killed_meanwhile_comes_back(cluster: Cluster) -> None:
    leader = cluster.leader()
    member = cluster.others(leader)[0]
    member.pool.put("k", value(3))
    with Writers([leader], replicas=1) as writers:
        cluster.etcd.stop()
        try:
            go_on_for(writers, 6)
            member.kill_worker()
            go_on_for(writers, 6)
            assert np.array_equal(member.pool.get("k", timeout=20), value(3))
        finally:
            cluster.etcd.go_on()
    assert cluster.leader() is leader
    assert cluster.becomes_whole(3)


def test_a_leader_that_only_itself_cannot_reach_etcd_leads_on_until_it_is_stopped(cluster: Cluster) -> None:
    leader = cluster.leader()
    with Writers(cluster.living(), replicas=1) as writers:
        assert eventually(lambda: writers.done > 20)
        leader.cut_from_etcd()
        go_on_for(writers, LONG_S)
        assert cluster.leader() is leader
    leader.pool.put("k", value(1))  # on the leader
    replace_while_stopped(cluster, leader, "k", value(2))
    leader.cut_from_etcd(False)
    assert cluster.becomes_whole(3)
    assert cluster.leader() is not leader
    assert np.array_equal(leader.pool.get("k"), value(2))


def test_a_stranger_that_alone_reaches_etcd_waits_for_those_who_are_recorded(cluster: Cluster) -> None:
    leader = cluster.leader()
    leader.pool.put("k", value(1))
    with Writers(cluster.living(), replicas=1) as writers:
        for node in cluster.living():
            node.cut_from_etcd()
        go_on_for(writers, 6)
        stranger = cluster.add("stranger")
        go_on_for(writers, LONG_S)
        assert stranger.here().get("is_home") is not True
        with pytest.raises(TYPED):
            stranger.pool.get("k", timeout=1)
        for node in cluster.living():
            node.cut_from_etcd(False)
        go_on_for(writers, 6)
    assert cluster.leader() is leader
    assert cluster.becomes_whole(4)
    assert np.array_equal(stranger.pool.get("k"), value(1))


def test_a_pool_that_has_left_as_a_whole_keeps_nobody_waiting(cluster: Cluster) -> None:
    for node in cluster.living():
        assert node.process
        node.process.terminate()
    for node in cluster.nodes.values():
        assert node.process
        assert node.process.wait(30) == 0
    new = cluster.add("new")
    assert cluster.becomes_whole(1, timeout=20)  # less than what it would wait for those who are recorded
    with pytest.raises(tm.KeyNotFound):
        new.pool.get("k")
