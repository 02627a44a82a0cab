"""Nodes that elect their leader in a real etcd: it dies, is stopped, leaves; etcd does; what was acknowledged stays."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from clusters import Cluster, Node, Writers, cluster_of, replace_while_stopped, value
from etcd_server import Etcd
from processes import Child, PoolEnv, eventually

import torch_mooncake as tm


@pytest.fixture
def cluster(etcd: Etcd, pool_env: PoolEnv, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    monkeypatch.setenv("TM_TOKEN", "0123456789abcdef")
    made = Cluster(etcd, pool_env)
    try:
        assert made.becomes_whole()
        yield made
    finally:
        made.close()


def test_a_leader_that_is_killed_is_replaced_and_what_was_acknowledged_stays(cluster: Cluster) -> None:
    leader = cluster.leader()
    one, two = cluster.others(leader)
    for i in range(30):
        one.pool.put(f"one/{i}", value(i))  # on that node only
        leader.pool.put(f"both/{i}", value(i), replicas=2)
    leader.pool.put("lost", value(1))
    with Writers([one, two], replicas=1) as writers:
        assert eventually(lambda: writers.done > 20)
        leader.send(signal.SIGKILL)
        assert cluster.becomes_whole(2)
        before = writers.done
        assert eventually(lambda: writers.done > before + 20)
    assert cluster.leader() in (one, two)
    for node in (one, two):
        for i in range(30):
            assert np.array_equal(node.pool.get(f"one/{i}"), value(i))
            assert np.array_equal(node.pool.get(f"both/{i}"), value(i))
        with pytest.raises(tm.KeyNotFound):
            node.pool.get("lost")
    leader.start()
    assert cluster.becomes_whole(3)
    assert np.array_equal(leader.pool.get("one/3"), value(3))


def test_a_leader_that_was_stopped_refuses_when_it_wakes(cluster: Cluster) -> None:
    leader = cluster.leader()
    one, _ = cluster.others(leader)
    leader.pool.put("k", value(1))  # on the leader
    assert np.array_equal(one.pool.get("k"), value(1))
    replace_while_stopped(cluster, leader, "k", value(2))
    assert cluster.becomes_whole(3)
    assert cluster.leader() is not leader
    assert np.array_equal(leader.pool.get("k"), value(2))


def test_a_leaders_worker_that_is_killed_leads_again(cluster: Cluster) -> None:
    leader = cluster.leader()
    leader.pool.put("k", value(1))
    os.kill(leader.pids()[-1], signal.SIGKILL)
    for node in cluster.living():
        assert np.array_equal(node.pool.get("k", timeout=30), value(1))
        node.pool.put(f"after/{node.name}", value(2), timeout=30)
    assert cluster.becomes_whole(3)


def test_a_member_that_is_killed_is_expelled_and_comes_back(cluster: Cluster) -> None:
    leader = cluster.leader()
    member, other = cluster.others(leader)
    member.pool.put("k", value(1))
    leader.pool.put("both", value(2), replicas=3)
    member.send(signal.SIGKILL)
    assert cluster_of(cluster, leader, other)
    assert np.array_equal(other.pool.get("both"), value(2))
    with pytest.raises(tm.KeyNotFound):
        other.pool.get("k")
    member.start()
    assert cluster.becomes_whole(3)


def test_a_leader_that_leaves_hands_over_at_once(cluster: Cluster) -> None:
    leader = cluster.leader()
    one, two = cluster.others(leader)
    one.pool.put("k", value(3))
    assert leader.process
    leader.process.terminate()
    assert leader.process.wait(15) == 0
    started = time.monotonic()
    two.pool.put("k", value(4))
    assert time.monotonic() - started < 5  # its lease alone would take that
    assert np.array_equal(one.pool.get("k"), value(4))
    assert cluster_of(cluster, one, two)


def has_copies(node: Node, keys: list[str], n: int) -> bool:
    try:
        return all(node.pool.info(key).replicas == n for key in keys)
    except tm.Error:
        return False


def test_lost_replicas_are_made_again_and_single_copies_are_not(cluster: Cluster) -> None:
    leader = cluster.leader()
    member, other = cluster.others(leader)
    values = {f"two/{i}": value(i) for i in range(40)}
    values["two/big"] = np.arange(1 << 20)
    values["two/small"] = np.arange(3)
    for key, array in values.items():
        member.pool.put(key, array, replicas=2, checksum=True)
    member.pool.put("one", value(1))
    member.send(signal.SIGKILL)
    assert cluster_of(cluster, leader, other)
    keys = list(values)
    assert eventually(lambda: has_copies(leader, keys, 2), 30)
    stat = leader.pool.stat()["nodes"]
    assert sum(node["copies"] for node in stat) == len(keys)
    assert sum(node["copied_bytes"] for node in stat) > 8 << 20
    assert sum(node["to_copy"] for node in stat) == 0
    # Each is whole on either of the two that are left.
    other.send(signal.SIGKILL)
    assert eventually(lambda: alone(leader), 40)
    for key, array in values.items():
        assert np.array_equal(leader.pool.get(key, timeout=20), array)
    with pytest.raises(tm.KeyNotFound):
        leader.pool.get("one")


def alone(node: Node) -> bool:
    try:
        return len(node.pool.stat()["nodes"]) == 1
    except tm.Error:
        return False


def test_replicas_that_went_with_the_leader_are_made_again(cluster: Cluster) -> None:
    leader = cluster.leader()
    one, two = cluster.others(leader)
    keys = [f"k/{i}" for i in range(20)]
    for i, key in enumerate(keys):
        leader.pool.put(key, value(i), replicas=2)
    leader.send(signal.SIGKILL)
    assert cluster_of(cluster, one, two)
    assert eventually(lambda: has_copies(one, keys, 2), 30)
    for i, key in enumerate(keys):
        assert np.array_equal(two.pool.get(key), value(i))


@pytest.mark.parametrize("who", ["member", "leader"])
def test_a_node_that_leaves_moves_its_objects(cluster: Cluster, who: str) -> None:
    leader = cluster.leader()
    leaving = leader if who == "leader" else cluster.others(leader)[0]
    values = {f"k/{i}": value(i) for i in range(40)}
    values["big"] = np.arange(1 << 20)
    for key, array in values.items():
        leaving.pool.put(key, array)
    leaving.pool.put("sealed", value(5), sealed=True)
    done = subprocess.run(
        [sys.executable, "-m", "torch_mooncake", "drain", "--address", leaving.address, "--json"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert (answer["moved"], answer["left"]) == (42, 0), answer
    assert leaving.process
    assert leaving.process.wait(15) == 0
    one, two = cluster.others(leaving)
    assert cluster_of(cluster, one, two)
    for node in (one, two):
        for key, array in values.items():
            assert np.array_equal(node.pool.get(key), array)
        assert np.array_equal(node.pool.get("sealed"), value(5))


def test_what_finds_no_room_is_told(cluster: Cluster) -> None:
    leader = cluster.leader()
    leaving, other = cluster.others(leader)
    for node in (leader, other):  # 50 of 64 MiB each
        node.pool.put(f"full/{node.name}", np.ones(50 << 20, np.uint8))
    for i in range(5):
        leaving.pool.put(f"k/{i}", np.full(10 << 20, i, np.uint8))
    done = subprocess.run(
        [sys.executable, "-m", "torch_mooncake", "drain", "--address", leaving.address],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "2 objects" in done.stdout
    assert "3 could not be moved" in done.stdout
    there = [i for i in range(5) if other.pool.exists(f"k/{i}")]
    assert len(there) == 2
    for i in there:
        assert np.array_equal(other.pool.get(f"k/{i}"), np.full(10 << 20, i, np.uint8))
    for node in (leader, other):  # nothing was evicted for it
        assert node.pool.exists(f"full/{node.name}")


def test_programs_of_several_hosts_make_one_pool(
    etcd: Etcd, pool_env: PoolEnv, child: Callable[..., Child], monkeypatch: pytest.MonkeyPatch
) -> None:
    env = {"TM_TOKEN": "0123456789abcdef", "TM_DISCOVERY": etcd.url, "TM_MEMORY": "32MiB"}
    programs = [child({**env, "TM_POOL": f"p{i}", "TM_HOST_ID": f"h{i}"}) for i in range(2)]
    for i, program in enumerate(programs):
        program(f"import torch_mooncake as tm; tm.init().put('k{i}', b'{i}'); result = 0")
    for program in programs:
        assert program("result = [tm.get(f'k{i}', timeout=20).decode() for i in range(2)]") == ["0", "1"]
    with pytest.raises(tm.InvalidArgument, match="token"):
        tm.init(discovery=etcd.url)


def test_a_node_that_leaves_right_after_its_leader_moves_its_objects(cluster: Cluster) -> None:
    leader = cluster.leader()
    leaving, other = cluster.others(leader)
    for i in range(20):
        leaving.pool.put(f"k/{i}", value(i))
    assert leader.process
    assert leaving.process
    leader.process.terminate()
    assert leader.process.wait(15) == 0
    leaving.process.terminate()  # whoever leads from now on has just begun, or is yet to be elected
    assert leaving.process.wait(20) == 0
    for i in range(20):
        assert np.array_equal(other.pool.get(f"k/{i}", timeout=20), value(i))


def test_nodes_that_leave_together_lose_nothing_that_the_last_one_has_room_for(cluster: Cluster) -> None:
    leader = cluster.leader()
    leaving, other = cluster.others(leader)
    for i in range(20):
        leader.pool.put(f"shared/{i}", value(i), replicas=3)
        leader.pool.put(f"leader/{i}", value(i))
        leaving.pool.put(f"member/{i}", value(i))
    assert leader.process
    assert leaving.process
    leaving.process.terminate()
    leader.process.terminate()
    for node in (leaving, leader):
        assert node.process
        assert node.process.wait(20) == 0
    for i in range(20):
        for name in ("shared", "leader", "member"):
            assert np.array_equal(other.pool.get(f"{name}/{i}", timeout=20), value(i))


def test_pins_quotas_and_parents_outlive_the_leader(cluster: Cluster) -> None:
    leader = cluster.leader()
    one, two = cluster.others(leader)
    one.pool.set_quota("q/", 4 << 20)
    megabyte = np.zeros(1 << 20, np.uint8)
    leader.pool.put("hard", value(1), replicas=2, pin="hard")
    leader.pool.put("later", value(2), replicas=2)
    assert one.pool.pin("later", "soft")
    leader.pool.put("child", value(3), replicas=2, parent="later")
    assert eventually(lambda: one.here().get("ready"))
    for i in range(3):
        one.pool.put(f"q/{i}", megabyte)
    assert eventually(lambda: is_within(two))
    leader.send(signal.SIGKILL)
    assert cluster_of(cluster, one, two)
    assert eventually(lambda: has_copies(one, ["hard", "later", "child"], 2), 30)
    assert {key: one.pool.info(key).pin for key in ("hard", "later", "child")} == {
        "hard": "hard",
        "later": "soft",
        "child": None,
    }
    assert quota_of(two)["limit_bytes"] == 4 << 20
    for node in (one, two):  # each has a copy of the pinned ones, also one that was made just now
        for i in range(100):
            node.pool.put(f"{node.name}/{i}", megabyte)
        assert np.array_equal(node.pool.get("hard"), value(1))
        assert np.array_equal(node.pool.get("later"), value(2))
    assert sum(each["hard_pinned_bytes"] for each in one.pool.stat()["nodes"]) == 2 * 40960
    for i in range(10):
        one.pool.put(f"q/{i}", megabyte)
    assert eventually(lambda: is_within(one))


def is_within(node: Node) -> bool:
    """The quota, by a put that makes room for itself. (Of other nodes a node knows what they had a second ago.)"""
    node.pool.put(f"q/{node.name}", np.zeros(2 << 20, np.uint8))
    return bool(quota_of(node)["used_bytes"] <= 4 << 20)


def quota_of(node: Node) -> dict[str, Any]:
    (quota,) = node.pool.stat()["quotas"]
    return quota
