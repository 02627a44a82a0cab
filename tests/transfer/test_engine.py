"""Engines in one process and in two: every form of read and write over every transport."""

from __future__ import annotations

import array
import asyncio
import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from processes import running
from verbs import VERBS, nics

import torch_mooncake as tm

# transports allowed on both sides, kind of memory, and what must carry the bytes (one of)
PATHS = {
    "local": (("local", "shm", "tcp"), "private", {"local"}),
    "shm": (("shm", "tcp"), "shared", {"shm"}),
    "private": (("shm", "tcp"), "private", {"process_vm", "unix"}),
    "stream": (("tcp",), "private", {"tcp", "unix"}),
}
if VERBS:
    PATHS = {"rdma": (("rdma",), "private", {"rdma"})}
IN_THIS_PROCESS = ("local", "rdma")


def memory(kind: str, nbytes: int) -> torch.Tensor:
    tensor = tm.empty(nbytes, torch.uint8) if kind == "shared" else torch.empty(nbytes, dtype=torch.uint8)
    return tensor.random_()


class Two:
    """Our engine, and another whose region we have opened; in this process, or in another one."""

    def __init__(self, path: str, child: Any) -> None:
        transports, self.kind, self.expected = PATHS[path]
        self.engine = tm.Engine(transports=transports, token="t", nics=nics(0))
        self.local = memory(self.kind, 1 << 20)
        self.region = self.engine.register(self.local)
        self.other = None if path in IN_THIS_PROCESS else child()
        code = (
            "import numpy as np, torch_mooncake as tm; from torch_mooncake._core import SharedBuffer\n"
            "engine = tm.Engine(transports=transports, token='t', name='other', nics=nics)\n"
            "there = np.frombuffer(SharedBuffer(1 << 20) if kind == 'shared' else bytearray(1 << 20), np.uint8)\n"
            "there[:] = np.random.default_rng(1).integers(0, 256, 1 << 20, np.uint8)\n"
            "region = engine.register(there)\n"
            "result = [engine.addresses[0], region.descriptor().hex(), there.tobytes().hex()]"
        )
        names = {"transports": list(transports), "kind": self.kind, "nics": nics(1)}
        self.names: dict[str, Any] = dict(names)
        if self.other is None:
            exec(code, self.names)
            address, descriptor, content = self.names["result"]
        else:
            address, descriptor, content = self.other(code, **names)
        self.address = address
        self.content = torch.frombuffer(bytearray.fromhex(content), dtype=torch.uint8)
        self.peer = self.engine.connect(address)
        self.remote = self.peer.open(bytes.fromhex(descriptor))

    def there(self) -> torch.Tensor:
        """What the other side's memory holds now."""
        if self.other is None:
            return torch.from_numpy(self.names["there"].copy())
        content = bytearray.fromhex(self.other("result = there.tobytes().hex()"))
        return torch.frombuffer(content, dtype=torch.uint8)

    def note(self) -> tm.Notification:
        if self.other is None:
            return self.names["engine"].next_notification(10)
        code = "n = engine.next_notification(10); result = [n.peer_id.hex(), n.peer_name, n.data.hex()]"
        peer_id, name, data = self.other(code)
        return tm.Notification(bytes.fromhex(peer_id), name, bytes.fromhex(data))

    def close(self) -> None:
        self.engine.close()
        if self.other is None:
            self.names["engine"].close()


@pytest.fixture(params=list(PATHS))
def two(request: pytest.FixtureRequest, child: Any) -> Iterator[Two]:
    two = Two(request.param, child)
    yield two
    two.close()


def test_what_carries_the_bytes_is_visible(two: Two) -> None:
    assert two.remote.transport in two.expected
    assert two.engine.transport_for(two.remote) == two.remote.transport
    assert two.engine.transport_for(two.peer) in {"local", "process_vm", "unix", "tcp", "rdma"}
    op = two.engine.read(two.region, two.remote)
    op.wait()
    assert op.transport in two.expected
    stats = two.engine.stats()
    assert stats["bytes_received"].get(op.transport, 0) >= 1 << 20
    assert stats["regions"] == 1


def test_read_and_write_of_whole_regions(two: Two) -> None:
    op = two.engine.read(two.region, two.remote)
    op.wait()
    assert torch.equal(two.local, two.content)
    assert op.done()
    assert (op.state, op.nbytes, op.bytes_done) == ("done", 1 << 20, 1 << 20)
    two.local.random_()
    two.engine.write(two.region, two.remote).wait()
    assert torch.equal(two.there(), two.local)


def test_slices(two: Two) -> None:
    want = two.content.clone()
    want[5000:6001] = two.local[100:1101]
    two.engine.write(two.region[100:1101], two.remote[5000:6001]).wait()
    assert torch.equal(two.there(), want)
    before = two.local.clone()
    two.engine.read(two.region[7:8], two.remote[:1]).wait()
    before[7] = want[0]
    assert torch.equal(two.local, before)


def test_lists_of_pairs(two: Two) -> None:
    want = two.content.clone()
    pairs = []
    for i in range(100):
        a, b, n = i * 1000, i * 3000 + 7, i * 7
        pairs.append((two.region[a : a + n], two.remote[b : b + n]))
        want[b : b + n] = two.local[a : a + n]
    op = two.engine.write(pairs, notify=b"listed")
    op.wait()
    assert op.nbytes == sum(i * 7 for i in range(100))
    assert two.note() == (two.engine.id, "engine", b"listed")
    assert torch.equal(two.there(), want)


@pytest.mark.parametrize("kind", ["tensor", "numpy", "list", "array"])
def test_arrays_of_offsets(two: Two, kind: str) -> None:
    pages = torch.randperm(256)
    page = 4096
    local, remote = torch.arange(256) * page, pages * page
    make: Any = {"tensor": lambda t: t, "numpy": lambda t: t.numpy(), "list": lambda t: t.tolist(),
                 "array": lambda t: array.array("q", t.tolist())}[kind]  # fmt: skip
    two.engine.read(two.region, two.remote, local_offsets=make(local), remote_offsets=make(remote), nbytes=page).wait()
    assert torch.equal(two.local.view(256, page), two.content.view(256, page)[pages])
    sizes = torch.randint(0, page, (256,))
    want = two.content.clone()
    for i in range(256):
        want[int(remote[i]) : int(remote[i] + sizes[i])] = two.local[int(local[i]) : int(local[i] + sizes[i])]
    two.engine.write(
        two.region, two.remote, local_offsets=make(local), remote_offsets=make(remote), nbytes=make(sizes)
    ).wait()
    assert torch.equal(two.there(), want)


def test_out_of_bounds_writes_nothing(two: Two) -> None:
    n = 1 << 20
    for make in (
        lambda: two.engine.write(two.region[0 : n + 1], two.remote[0 : n + 1]),
        lambda: two.engine.write(two.region[-1:5], two.remote[0:6]),
        lambda: two.engine.write(two.region, two.remote, local_offsets=[0, 0], remote_offsets=[0, n - 7], nbytes=8),
        lambda: two.engine.write(two.region, two.remote, local_offsets=[0, n], remote_offsets=[0, 0], nbytes=1),
        lambda: two.engine.write(two.region, two.remote, local_offsets=[0, -8], remote_offsets=[0, 8], nbytes=8),
        lambda: two.engine.write(two.region, two.remote, local_offsets=[0], remote_offsets=[2**63 - 1], nbytes=8),
        lambda: two.engine.write(two.region, two.remote, local_offsets=[0], remote_offsets=[0], nbytes=-1),
    ):
        with pytest.raises(tm.OutOfBounds):
            make().wait()
    assert torch.equal(two.there(), two.content)


def test_arguments_that_make_no_sense(two: Two) -> None:
    with pytest.raises(tm.InvalidArgument, match="do not match"):
        two.engine.write(two.region[0:8], two.remote[0:9])
    with pytest.raises(tm.InvalidArgument, match="go together"):
        two.engine.write(two.region, two.remote, local_offsets=[0], nbytes=1)
    with pytest.raises(tm.InvalidArgument, match="elements"):
        two.engine.write(two.region, two.remote, local_offsets=[0, 1], remote_offsets=[0], nbytes=1)
    with pytest.raises(tm.InvalidArgument, match="int64"):
        two.engine.write(two.region, two.remote, local_offsets=np.zeros(1, np.int32), remote_offsets=[0], nbytes=1)
    with pytest.raises(tm.InvalidArgument, match="expected"):
        two.engine.write(two.remote, two.region)  # type: ignore[arg-type]
    with pytest.raises(tm.InvalidArgument):
        two.engine.write(two.region, two.remote, notify=b"x" * (1 << 17))


def test_an_empty_op_is_done_and_still_notifies(two: Two) -> None:
    op = two.engine.write(two.region[0:0], two.remote[0:0], notify=b"only this")
    op.wait(10)
    assert op.done()
    assert two.note().data == b"only this"


def test_read_only_regions_refuse_writes(child: Any) -> None:
    two = Two("stream", child)
    assert two.other
    code = "ro = engine.register(there, writable=False, label='frozen'); result = ro.descriptor().hex()"
    remote = two.peer.open(bytes.fromhex(two.other(code)))
    two.engine.read(two.region, remote).wait()
    with pytest.raises(tm.Error):
        two.engine.write(two.region, remote).wait()
    assert torch.equal(two.there(), two.content)
    two.close()


def test_many_ops_in_flight_from_many_threads(two: Two) -> None:
    errors = []

    def work(t: int) -> None:
        try:
            for i in range(50):
                a = (t * 50 + i) * 1000
                two.engine.write(two.region[a : a + 1000], two.remote[a : a + 1000]).wait(20)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(t,)) for t in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert torch.equal(two.there()[:400_000], two.local[:400_000])


def test_small_ops_that_we_can_copy_are_over_in_the_call(two: Two) -> None:
    at_once = {"local": (True, True), "shm": (True, True), "process_vm": (False, True)}  # write, read
    writes, reads = at_once.get(two.remote.transport, (False, False))
    before = two.engine.stats()["ops"]
    op = two.engine.write(two.region[8:4104], two.remote[16:4112])
    assert op.done() or not writes
    op.wait()
    back = torch.zeros(4096, dtype=torch.uint8)
    region = two.engine.register(back)
    op = two.engine.read(region[:], two.remote[16:4112])
    assert op.done() or not reads
    op.wait()
    assert torch.equal(back, two.local[8:4104])
    assert (op.state, op.nbytes, op.bytes_done, op.remote_quiescent) == ("done", 4096, 4096, True)
    assert two.engine.stats()["ops"] == before + 2
    op.cancel()  # too late
    assert op.state == "done"
    # What cannot be done raises as for any op.
    if reads:
        with pytest.raises(tm.errors.DeadlineExceeded):
            two.engine.read(region[:], two.remote[:4096], timeout=0).wait()
    two.engine.deregister(region)
    with pytest.raises(tm.errors.Closed, match="deregistered"):
        two.engine.read(region[:], two.remote[:4096]).wait()
    two.peer.close()
    with pytest.raises(tm.errors.Closed):
        two.engine.write(two.region[:8], two.remote[:8]).wait()


def test_await(two: Two) -> None:
    async def run() -> None:
        await two.engine.read(two.region, two.remote)
        assert torch.equal(two.local, two.content)
        ops = [two.engine.write(two.region[i : i + 9], two.remote[i : i + 9], notify=b"n") for i in range(0, 900, 9)]
        await asyncio.gather(*ops)
        with pytest.raises(tm.OutOfBounds):
            await two.engine.write(two.region, two.remote, local_offsets=[0], remote_offsets=[1 << 20], nbytes=1)

    asyncio.run(run())
    asyncio.run(run())  # another loop

    op = two.engine.read(two.region, two.remote)  # made outside a loop

    async def later() -> None:
        await op
        await op

    asyncio.run(later())
    assert op.done()


def test_regions_keep_their_tensor_until_deregistered(child: Any) -> None:
    two = Two("stream", child)
    tensor = torch.empty(100, dtype=torch.uint8)
    region = two.engine.register(tensor)
    with pytest.raises(tm.OutOfBounds):
        two.engine.read(region[0:101], two.remote[0:101])
    two.engine.read(region[0:100], two.remote[0:100]).wait()
    two.engine.deregister(region)
    with pytest.raises(tm.Error):
        two.engine.read(region[0:100], two.remote[0:100]).wait()
    finalised = threading.Event()

    class Watched(bytearray):
        def __del__(self) -> None:
            assert threading.current_thread() is threading.main_thread()
            finalised.set()

    watched = Watched(1000)
    region = two.engine.register(watched)
    del watched
    gc.collect()
    assert not finalised.is_set()
    two.engine.read(region, two.remote[0:1000]).wait()
    two.engine.deregister(region)
    del region
    end = time.monotonic() + 5
    while not finalised.is_set() and time.monotonic() < end:
        time.sleep(0.01)
    assert finalised.is_set()
    two.close()


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: torch.zeros(4, 4).t(), "contiguous"),
        (lambda: torch.zeros(4, device="meta"), "meta"),
        (lambda: torch.eye(3).to_sparse(), "sparse"),
        (lambda: b"read-only", "bytes"),
        (lambda: 3, "int"),
    ],
)
def test_what_cannot_be_registered(make: Any, says: str) -> None:
    with tm.Engine() as engine:
        with pytest.raises(tm.InvalidArgument, match=says):
            engine.register(make())
        engine.register(b"read-only", writable=False)
        engine.register(np.zeros(3))


# --- peers: addresses, tokens, death ---


def test_unknown_transports_and_schemes_are_named() -> None:
    with pytest.raises(tm.Unsupported, match="carrier-pigeon"):
        tm.Engine(transports=("tcp", "carrier-pigeon"))
    with pytest.raises(tm.Unsupported, match="ftp"):
        tm.Engine(listen="ftp://127.0.0.1:0")
    with tm.Engine() as engine, pytest.raises(tm.Unsupported, match="ftp"):
        engine.connect("ftp://127.0.0.1:1")


def test_a_bind_beyond_loopback_needs_a_token() -> None:
    with pytest.raises(tm.Error, match="token"):
        tm.Engine(listen="tcp://0.0.0.0:0")
    with tm.Engine(listen="tcp://0.0.0.0:0", token="t") as engine:
        assert engine.addresses[0].startswith("tcp://")


def test_wrong_token_is_AuthError_and_the_other_lives(child: Any) -> None:
    other = child()
    address = other("import torch_mooncake as tm; e = tm.Engine(token='right'); result = e.addresses[0]")
    for token in ("wrong", None):
        with tm.Engine(token=token) as engine, pytest.raises(tm.AuthError):
            engine.connect(address, timeout=10)
    with tm.Engine(token="right") as engine:
        assert engine.connect(address).alive


def test_nobody_there_and_nobody_answering() -> None:
    import socket

    with tm.Engine() as engine:
        with pytest.raises(tm.PeerLost):
            engine.connect("tcp://127.0.0.1:1", timeout=3)
        with socket.socket() as silent:
            silent.bind(("127.0.0.1", 0))
            silent.listen()
            start = time.monotonic()
            with pytest.raises((tm.DeadlineExceeded, tm.PeerLost)):
                engine.connect(f"tcp://127.0.0.1:{silent.getsockname()[1]}", timeout=1)
            assert time.monotonic() - start < 5


def test_another_process_of_our_address_is_another_peer(child: Any) -> None:
    """Same IP, same host id: still not the same process, and never read through our own pointers."""
    ours = tm.Engine(name="ours")
    code = (
        "import torch_mooncake as tm; e = tm.Engine(name='theirs'); t = bytearray([9]) * 4096\n"
        "r = e.register(t); result = [e.addresses[0], r.descriptor().hex()]"
    )
    first, second = child(), child()
    (address1, descriptor1), (address2, descriptor2) = first(code), second(code)
    peer1, peer2 = ours.connect(address1), ours.connect(address2)
    assert len({peer1.id, peer2.id, ours.id}) == 3
    with pytest.raises(tm.InvalidArgument):  # a descriptor of somebody else
        peer1.open(bytes.fromhex(descriptor2))
    into = torch.zeros(4096, dtype=torch.uint8)
    region = ours.register(into)
    op = ours.read(region, peer2.open(bytes.fromhex(descriptor2)))
    op.wait()
    assert op.transport != "local"
    assert int(into.sum()) == 9 * 4096
    with pytest.raises(tm.Error):
        peer1.open(b"garbage")
    assert peer1.open(bytes.fromhex(descriptor1)).nbytes == 4096
    ours.close()


@pytest.mark.parametrize("path", ["shm", "private", "stream"])
def test_a_killed_peer_is_PeerLost_within_a_second(path: str, child: Any) -> None:
    two = Two(path, child)
    assert two.other
    two.engine.read(two.region, two.remote).wait()
    two.other.kill(signal.SIGSTOP)
    ops = [two.engine.write(two.region, two.remote, timeout=20, notify=b"x") for _ in range(8)]
    two.other.kill(signal.SIGKILL)
    start = time.monotonic()
    for op in ops:
        with pytest.raises(tm.PeerLost) as caught:
            op.wait()
    assert time.monotonic() - start < 3  # promised: 1 s
    assert caught.value.retryable
    assert caught.value.peer == "other"
    with pytest.raises(tm.PeerLost):
        two.engine.read(two.region, two.remote).wait()
    assert not two.peer.alive
    assert two.other.process.wait() == -signal.SIGKILL
    two.engine.close()


def test_a_stopped_peer_ends_the_op_at_its_deadline(child: Any) -> None:
    two = Two("stream", child)
    assert two.other
    two.other.kill(signal.SIGSTOP)
    big = torch.zeros(1 << 20, dtype=torch.uint8)
    region = two.engine.register(big)
    start = time.monotonic()
    op = two.engine.write(region, two.remote, timeout=1, notify=b"x")
    with pytest.raises(tm.DeadlineExceeded):
        op.wait()
    assert time.monotonic() - start < 4
    assert op.state == "timeout"
    two.other.kill(signal.SIGCONT)
    two.engine.close()


def test_wait_with_a_timeout_leaves_the_op_alone(child: Any) -> None:
    two = Two("stream", child)
    assert two.other
    two.other.kill(signal.SIGSTOP)
    op = two.engine.write(two.region, two.remote, timeout=30, notify=b"x")
    with pytest.raises(tm.DeadlineExceeded, match="goes on"):
        op.wait(0.2)
    assert not op.done()
    two.other.kill(signal.SIGCONT)
    op.wait(20)
    assert torch.equal(two.there(), two.local)
    two.close()


def test_cancel(child: Any) -> None:
    two = Two("stream", child)
    assert two.other
    two.other.kill(signal.SIGSTOP)
    op = two.engine.write(two.region, two.remote, timeout=30, notify=b"x")
    op.cancel()
    with pytest.raises(tm.Cancelled):
        op.wait(10)

    async def run() -> tm.Op:
        op = two.engine.write(two.region, two.remote, timeout=30, notify=b"x")
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(op, 0.2)
        return op

    op = asyncio.run(run())
    with pytest.raises(tm.Cancelled):
        op.wait(10)
    two.other.kill(signal.SIGCONT)
    two.engine.close()


def test_close_ends_everything(two: Two) -> None:
    two.engine.close()
    two.engine.close()
    for call in (
        lambda: two.engine.read(two.region, two.remote).wait(),
        lambda: two.engine.register(bytearray(8)),
        lambda: two.engine.connect(two.address),
        lambda: two.engine.next_notification(1),
    ):
        with pytest.raises(tm.Closed):
            call()


def test_no_notification_is_DeadlineExceeded() -> None:
    with tm.Engine() as engine, pytest.raises(tm.DeadlineExceeded):
        engine.next_notification(0.2)


def test_notifications_can_be_awaited(two: Two) -> None:
    async def run() -> bytes:
        with pytest.raises(tm.DeadlineExceeded):
            await two.engine.anext_notification(0.05)
        if two.other is not None:
            return b"skip"
        waiting = asyncio.ensure_future(two.names["engine"].anext_notification(10))
        await two.engine.write(two.region[0:8], two.remote[0:8], notify=b"hi")
        return (await waiting).data

    assert asyncio.run(run()) in (b"hi", b"skip")


def test_a_forked_child_gets_Forked(child: Any) -> None:
    two = Two("stream", child)
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        outcome = []
        for call in (
            lambda: two.engine.read(two.region, two.remote),
            lambda: two.engine.connect(two.address, timeout=2),
            lambda: two.engine.register(bytearray(8)),
        ):
            try:
                call()
                outcome.append("nothing")
            except BaseException as error:
                outcome.append(type(error).__name__)
        os.write(writer, " ".join(outcome).encode())
        os._exit(0)
    os.close(writer)
    os.waitpid(pid, 0)
    assert os.read(reader, 1000) == b"Forked Forked Forked"
    os.close(reader)
    two.engine.read(two.region, two.remote).wait()  # the parent's engine is as it was
    two.close()


WAITS = {
    "op": "engine.write(region, remote, timeout=60, notify=b'x').wait()",
    "notification": "engine.next_notification(60)",
    "connect": "engine.connect(f'tcp://127.0.0.1:{silent.getsockname()[1]}', timeout=60)",
    "open": "peer.open(descriptor2, timeout=60)",
}


@pytest.mark.parametrize("what", list(WAITS))
def test_ctrl_c_ends_a_wait(what: str, child: Any) -> None:
    other = child()
    address, descriptor, descriptor2 = other(
        "import torch_mooncake as tm; e = tm.Engine(); b, c = bytearray(1 << 20), bytearray(9); r = e.register(b)\n"
        "result = [e.addresses[0], r.descriptor().hex(), e.register(c).descriptor().hex()]"
    )
    code = f"""
import os, signal, socket, sys, torch_mooncake as tm
silent = socket.socket(); silent.bind(("127.0.0.1", 0)); silent.listen()
engine = tm.Engine(transports=("tcp",)); region = engine.register(bytearray(1 << 20))
peer = engine.connect({address!r}); remote = peer.open(bytes.fromhex({descriptor!r}))
descriptor2 = bytes.fromhex({descriptor2!r})
os.kill({other.pid}, signal.SIGSTOP)
while open("/proc/{other.pid}/stat").read().rsplit(")", 1)[1].split()[0] != "T":
    pass
print("waiting", flush=True)
try:
    {WAITS[what]}
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""
    with running([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "waiting\n"
        time.sleep(0.5)  # nothing tells that it waits
        start = time.monotonic()
        process.send_signal(signal.SIGINT)
        assert process.stdout.readline() == "interrupted\n"
        assert time.monotonic() - start < 2
        os.kill(other.pid, signal.SIGCONT)
        assert process.wait(10) == 0


# --- nothing leaks ---


def test_fds_threads_and_memory_return_to_rest(child: Any) -> None:
    def resting() -> tuple[int, int]:
        gc.collect()
        return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))

    def round_of_work() -> None:
        with tm.Engine(token="t") as a, tm.Engine(token="t") as b:
            mine, theirs = tm.empty(1 << 20, torch.uint8), tm.empty(1 << 20, torch.uint8)
            region, target = a.register(mine), b.register(theirs)
            remote = a.connect(b.addresses[0]).open(target.descriptor())
            a.write(region, remote).wait()
            with pytest.raises(tm.OutOfBounds):
                a.write(region, remote, local_offsets=[0], remote_offsets=[1 << 20], nbytes=1)

    round_of_work()
    before = resting()
    for _ in range(5):
        round_of_work()
    end = time.monotonic() + 10
    while resting() > before and time.monotonic() < end:
        time.sleep(0.05)
    after = resting()
    assert after[0] <= before[0]
    assert after[1] <= before[1]
