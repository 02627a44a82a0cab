"""explain(): which path carries what, and why not a better one, in a dict and in words."""

from __future__ import annotations

import os
import time

import torch_mooncake as tm


def paths(engine: tm.Engine, peer: tm.Peer) -> dict[str, dict]:
    return {path["transport"]: path for path in engine.explain(peer)["paths"]}


def test_within_a_process_local_carries_everything() -> None:
    with tm.Engine() as a, tm.Engine(name="other") as b:
        peer = a.connect(b.addresses[0])
        said = a.explain(peer)
        assert (said["read"], said["write"]) == ("local", "local") == (a.transport_for(peer),) * 2
        assert said["peer"] == f"other (pid {os.getpid()})"
        assert said["alive"]
        assert said["same_host"]
        by_name = paths(a, peer)
        assert by_name["local"]["no_read"] == ""
        assert by_name["shm"]["serves"] == "regions in shared segments"
        sizes = [(rule["direction"], rule["up_to_nbytes"]) for rule in by_name["local"]["sizes"]]
        assert ("read", None) in sizes
        assert sizes == sorted(sizes, key=lambda s: (s[0], s[1] is None, s[1] or 0))


def test_what_the_options_leave_out_is_named() -> None:
    with tm.Engine(transports=["tcp"]) as a, tm.Engine(transports=["tcp", "shm"]) as b:
        peer = a.connect(b.addresses[0])
        said = a.explain(peer)
        assert said["read"] == said["write"] == a.transport_for(peer) == "unix"
        by_name = paths(a, peer)
        assert "not among the transports" in by_name["shm"]["no_read"]
        assert by_name["unix"]["no_write"] == ""
        lanes = by_name["unix"]["lanes"]
        assert {lane["transport"] for lane in lanes} >= {"unix"}
        assert all(lane["alive"] and lane["queued_bytes"] == 0 for lane in lanes)
        text = str(said)
        for words in ("read by unix", "shm: not used, not among the transports this engine allows", "lane "):
            assert words in text


def test_the_peer_may_be_the_reason() -> None:
    with tm.Engine(transports=["shm", "tcp"]) as a, tm.Engine(transports=["tcp"]) as b:
        peer = a.connect(b.addresses[0])
        by_name = paths(a, peer)
        assert by_name["shm"]["no_read"] == by_name["process_vm"]["no_write"] == "the peer does not allow shm"
        assert a.explain(peer)["read"] == "unix"


def test_hosts_that_differ_and_peers_that_are_gone() -> None:
    with tm.Engine(transports=["shm", "tcp"], host_id="here") as a, tm.Engine(host_id="there") as b:
        peer = a.connect(b.addresses[0])
        said = a.explain(peer)
        assert not said["same_host"]
        assert "there" in said["not_same_host_because"]
        assert "there" in str(said)
        assert paths(a, peer)["process_vm"]["no_read"] == "the peer is not on this host"
        assert said["read"] == "tcp"
        b.close()
        deadline = time.monotonic() + 10
        while peer.alive and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not a.explain(peer)["alive"]
        assert ", lost" in str(a.explain(peer))


def test_memory_that_may_not_be_read_says_why(child) -> None:
    """B, in a user namespace of its own, may not read A, which has made itself undumpable. A may read B."""
    start = (
        "import ctypes; assert ctypes.CDLL(None, use_errno=True).{call} == 0, ctypes.get_errno()\n"
        "import torch_mooncake as tm\nengine = tm.Engine(transports=['shm', 'tcp'])\nresult = engine.addresses[0]"
    )
    undumpable, confined = child(), child()
    address = undumpable(start.format(call="prctl(4, 0)"))
    confined(start.format(call="unshare(0x10000000)"))
    said = confined(
        f"peer = engine.connect({address!r}); result = [dict(engine.explain(peer)), str(engine.explain(peer))]"
    )
    path = next(path for path in said[0]["paths"] if path["transport"] == "process_vm")
    assert path["no_write"] == "", "the target of a write reads: it may"
    assert any(word in path["no_read"] for word in ("ptrace is not permitted", "Yama"))
    assert (said[0]["read"], said[0]["write"]) == ("unix", "process_vm")
    assert f"read: not used, {path['no_read']}" in said[1]
