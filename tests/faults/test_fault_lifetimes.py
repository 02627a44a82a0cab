"""``close()``, garbage collection, fork and the end of the interpreter, in every state an engine can be in."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from typing import Any

import numpy as np
import pytest
from fault_ways import MiB, Two, ends
from fault_ways import memory as fresh_memory
from processes import eventually

import torch_mooncake as tm


def test_close_with_ops_in_flight(way: str, make_two: Any) -> None:
    """Each op ends, as done or closed; close() takes at most its two seconds; the memory is the caller's."""
    two = make_two(way, 32 * MiB)
    ops = [getattr(two.engine, kind)(two.region, two.remote, timeout=30) for kind in ("write", "read") * 4]
    time.sleep(0.005)
    start = time.monotonic()
    two.engine.close()
    assert time.monotonic() - start < 4
    outcomes = [ends(op, 1) for op in ops]
    assert all(error is None or isinstance(error, tm.Closed) for error in outcomes), outcomes
    two.local[:] = 7
    time.sleep(0.1)
    assert (two.local == 7).all()
    assert eventually(lambda: two.other("result = engine.stats()['sessions']") == 0)


def test_close_while_others_wait_and_a_peer_is_stopped(make_two: Any) -> None:
    two = make_two("tcp")
    second = bytes.fromhex(two.other("second = engine.register(bytearray(8)); result = second.descriptor().hex()"))
    two.other.kill(signal.SIGSTOP)
    op = two.engine.write(two.region, two.remote, timeout=60, notify=b"n")
    outcomes: list[Any] = []

    def collect(call: Any) -> None:
        try:
            outcomes.append(call())
        except tm.Error as error:
            outcomes.append(type(error))

    calls = [
        lambda: op.wait(),
        lambda: two.engine.next_notification(60),
        lambda: two.peer.open(second, timeout=60),
        lambda: two.engine.deregister(two.region, timeout=60),
    ]
    threads = [threading.Thread(target=collect, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    time.sleep(0.2)
    start = time.monotonic()
    two.engine.close()
    for thread in threads:
        thread.join(10)
    assert time.monotonic() - start < 4
    assert len(outcomes) == len(calls)
    assert outcomes.count(tm.Closed) >= 3, outcomes  # deregister() may succeed: the op is over
    two.other.process.send_signal(signal.SIGCONT)


def test_the_other_side_closes_in_flight(way: str, make_two: Any) -> None:
    two = make_two(way, 32 * MiB)
    ops = [two.engine.write(two.region, two.remote, timeout=30, notify=b"n") for _ in range(4)]
    two.other.start("engine.close()")
    outcomes = [ends(op, 10) for op in ops]
    fitting = tm.PeerLost | tm.KeyNotFound  # the session is over, or the region went first
    assert all(error is None or isinstance(error, fitting) for error in outcomes), outcomes
    two.other.result()
    assert eventually(lambda: not two.peer.alive)


@pytest.mark.parametrize("what", ["op", "region", "remote", "peer", "everything"])
def test_dropped_in_flight(way: str, what: str, lasting_two: Two) -> None:
    """Whatever the caller forgets, the op keeps what it needs, and the memory lives until it is over."""
    two = lasting_two
    two.fill_there(5)
    memory = fresh_memory(way, two.nbytes)
    region = two.engine.register(memory)
    peer = two.engine.connect(two.address)
    remote = peer.open(two.descriptor)
    op: Any = two.engine.read(region, remote, timeout=30)
    watch = weakref.ref(memory)
    if what in ("region", "everything"):
        del region
    if what in ("remote", "everything"):
        del remote
    if what in ("peer", "everything"):
        del peer
    if what in ("op", "everything"):
        del op
    else:
        assert ends(op, 30) is None
        assert (memory == 5).all()
    gc.collect()
    for _ in range(3):  # the engine is as it was
        two.engine.read(two.region, two.remote, timeout=30).wait()
    if what == "op":
        assert (memory == 5).all()
    assert watch() is not None
    assert two.engine.stats()["sessions"] >= 1
    if what not in ("region", "everything"):
        two.engine.deregister(region)


def test_an_engine_that_is_forgotten_ends(make_two: Any) -> None:
    """Without close(): its sessions, threads and fds go with it, ops in flight or not."""
    two = make_two("tcp", 8 * MiB)
    engine = tm.Engine(transports=("tcp",), token="t")
    region = engine.register(np.zeros(8 * MiB, np.uint8))
    remote = engine.connect(two.address).open(two.descriptor)
    op = engine.read(region, remote, timeout=30)
    sessions = two.other("result = engine.stats()['sessions']")
    del engine, region, remote
    del op
    gc.collect()
    assert eventually(lambda: two.other("result = engine.stats()['sessions']") < sessions)


ENDINGS = {
    "without close": "",
    "after close": "engine.close()",
    "in flight": "ops = [engine.write(region, remote, timeout=30, notify=b'n') for _ in range(8)]",
    "in flight, peer stopped": "os.kill(pid, signal.SIGSTOP); op = engine.write(region, remote, notify=b'n')",
    "in atexit": "import atexit; atexit.register(lambda: engine.write(region, remote, timeout=5))",
    "waiting in a daemon thread": (
        "import contextlib, threading\ndef wait():\n"
        "    with contextlib.suppress(tm.Closed): engine.next_notification()\n"
        "threading.Thread(target=wait, daemon=True).start(); time.sleep(0.1)"
    ),
    "forked": "p = os.fork()\nif p == 0: sys.exit(0)\nassert os.waitpid(p, 0)[1] == 0",
    "forked in flight": (
        "ops = [engine.write(region, remote, timeout=30) for _ in range(8)]\np = os.fork()\nif p == 0: sys.exit(0)\n"
        "assert os.waitpid(p, 0)[1] == 0\n[op.wait() for op in ops]"
    ),
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_the_interpreter_ends(ending: str, make_two: Any) -> None:
    """Exit status 0, within seconds, and not a word on stderr, in whatever state the engine is."""
    two = make_two("tcp", MiB)
    program = f"""
import os, signal, sys, time, torch_mooncake as tm
engine = tm.Engine(transports=("tcp",), token="t")
region = engine.register(bytearray({MiB}))
remote = engine.connect({two.address!r}).open(bytes.fromhex({two.descriptor.hex()!r}))
engine.write(region, remote).wait()
pid = {two.other.pid}
{ENDINGS[ending]}
"""
    start = time.monotonic()
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert time.monotonic() - start < 8  # promised: 2 s, beside starting Python
    two.other.process.send_signal(signal.SIGCONT)
    two.engine.write(two.region, two.remote, timeout=20).wait()


def test_a_forked_child_leaves_the_parents_transfers_alone(lasting_two: Two) -> None:
    """fork() in the middle of ops: the child's end (with all its destructors) takes nothing from the parent."""
    two = lasting_two
    two.local[:] = 3
    ops = [two.engine.write(two.region, two.remote, timeout=30) for _ in range(4)]
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            two.engine.write(two.region, two.remote)
        except tm.Forked:
            code = 0
        finally:
            gc.collect()
            os._exit(code)
    assert all(ends(op, 30) is None for op in ops)
    assert os.waitpid(pid, 0)[1] == 0
    assert (two.there() == 3).all()
