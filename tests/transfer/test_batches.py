"""Paged and multi-target ops, regions found by address, shared peers, priorities, asyncio."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import signal
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from processes import eventually
from verbs import VERBS, nics

import torch_mooncake as tm
from torch_mooncake import aio

PAGE = 512


class Pair:
    """Two engines of this process."""

    def __init__(self, transports: tuple[str, ...], **options: Any) -> None:
        self.a = tm.Engine(transports=transports, name="a", nics=nics(0), **options)
        self.b = tm.Engine(transports=transports, name="b", nics=nics(1))
        self.peer = self.a.connect(self.b.addresses[0])

    def open(self, memory: Any, **options: Any) -> tm.RemoteRegion:
        return self.peer.open(self.b.register(memory, **options).descriptor())

    def close(self) -> None:
        self.a.close()
        self.b.close()


@pytest.fixture(params=["rdma"] if VERBS else ["local", "shm", "tcp"])
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    pair = Pair((request.param,))
    yield pair
    pair.close()


def randoms(nbytes: int) -> torch.Tensor:
    return torch.empty(nbytes, dtype=torch.uint8).random_()


# --- pages ---


@pytest.mark.parametrize("kind", ["int32", "int64", "numpy", "numpy32", "list", "strided"])
def test_pages_of_several_layers(pair: Pair, kind: str) -> None:
    """Page ids on both sides, another stride on each, a base for each layer."""
    make: Any = {
        "int32": lambda t: t.int(),
        "int64": lambda t: t,
        "numpy": lambda t: t.numpy(),
        "numpy32": lambda t: t.int().numpy(),
        "list": lambda t: t.tolist(),
        "strided": lambda t: torch.stack([t, -t], 1)[:, 0],
    }[kind]
    layers, pages, stride = 3, 100, 2 * PAGE
    there = [randoms(pages * stride) for _ in range(layers)]
    here = [randoms(pages * PAGE) for _ in range(layers)]
    remotes = [pair.open(t) for t in there]
    regions = [pair.a.register(t) for t in here]
    mine, wanted = torch.randperm(pages)[:60], torch.randperm(pages)[:60]
    want = [t.clone() for t in here]
    for layer in range(layers):
        want[layer].view(pages, PAGE)[mine] = there[layer].view(pages, stride)[wanted, :PAGE]
    op = pair.a.read(tm.Pages(regions, PAGE, make(mine)), tm.Pages(remotes, PAGE, make(wanted), stride))
    op.wait()
    assert op.nbytes == layers * 60 * PAGE
    assert all(torch.equal(a, b) for a, b in zip(here, want, strict=True))
    # And back: contiguous pages from the middle of a region to scattered ones.
    want = [t.clone() for t in there]
    for layer in range(layers):
        want[layer].view(pages, stride)[wanted[:40], :PAGE] = here[layer][7 * PAGE : 47 * PAGE].view(40, PAGE)
    bases = [region[7 * PAGE : 47 * PAGE] for region in regions]
    pair.a.write(tm.Pages(bases, PAGE), tm.Pages(remotes, PAGE, make(wanted[:40]), stride)).wait()
    assert all(torch.equal(a, b) for a, b in zip(there, want, strict=True))


@pytest.mark.parametrize("count", [0, 1, 31, 32, 33, 63, 64, 65, 1000, 100_000])
def test_any_number_of_pages_is_one_call(pair: Pair, count: int) -> None:
    nbytes = 24
    there, here = randoms(max(1, count) * nbytes), randoms(max(1, count) * nbytes)
    ids = torch.randperm(count)
    remote, region = pair.open(there), pair.a.register(here)
    pair.a.read(tm.Pages(region, nbytes, count=count), tm.Pages(remote, nbytes, ids)).wait()
    assert torch.equal(here[: count * nbytes].view(count, nbytes), there[: count * nbytes].view(count, nbytes)[ids])
    here.random_()
    pair.a.write(tm.Pages(region, nbytes, ids), tm.Pages(remote, nbytes)).wait()
    assert torch.equal(there[: count * nbytes].view(count, nbytes), here[: count * nbytes].view(count, nbytes)[ids])


def test_pages_that_make_no_sense_move_nothing(pair: Pair) -> None:
    there = randoms(10 * PAGE)
    before = there.clone()
    region, remote = pair.a.register(randoms(10 * PAGE)), pair.open(there)

    def write(local: Any, remote_: Any) -> None:
        pair.a.write(local, remote_).wait()

    ten = tm.Pages(remote, PAGE, count=10)
    for local, error, says in (
        (tm.Pages(region, PAGE, [0, 10]), tm.OutOfBounds, "page 10"),
        (tm.Pages(region, PAGE, np.array([0, -1])), tm.OutOfBounds, "negative"),
        (tm.Pages(region, PAGE, [0, 2**62]), tm.OutOfBounds, "beyond"),
        (tm.Pages(region[PAGE:], PAGE, [3, 9]), tm.OutOfBounds, "page 9"),
        (tm.Pages(region, PAGE, [0, 1], stride=-1), tm.OutOfBounds, "negative"),
        (tm.Pages(region, PAGE, np.zeros(2, np.float32)), tm.InvalidArgument, "float32"),
        (tm.Pages(region, PAGE, np.zeros((2, 2), np.int64)), tm.InvalidArgument, "one-dimensional"),
        (tm.Pages(region, PAGE, torch.zeros(2, dtype=torch.int64, device="meta")), tm.InvalidArgument, "meta"),
        (tm.Pages(region, PAGE - 1, [0, 1]), tm.InvalidArgument, "do not match"),
        (tm.Pages([region, region], PAGE, [0, 1]), tm.InvalidArgument, "bases"),
        (region, tm.InvalidArgument, "Pages"),
    ):
        with pytest.raises(error, match=says):
            write(local, tm.Pages(remote, PAGE, [0, 1]))
    with pytest.raises(tm.InvalidArgument, match="do not match"):
        write(tm.Pages(region, PAGE, range(9)), ten)
    with pytest.raises(tm.InvalidArgument, match="do not match"):
        write(tm.Pages(region, PAGE), tm.Pages(remote, PAGE))
    assert torch.equal(there, before)


# --- several targets ---


def test_one_op_to_several_peers() -> None:
    a = tm.Engine(name="a")
    others = [tm.Engine(name=f"target{i}") for i in range(3)]
    there = [torch.zeros(4096, dtype=torch.uint8) for _ in others]
    regions = [e.register(t) for e, t in zip(others, there, strict=True)]
    remotes = [a.connect(e.addresses[0]).open(r.descriptor()) for e, r in zip(others, regions, strict=True)]
    source = randoms(3 * 4096)
    region = a.register(source)
    pairs = [(region[i * 4096 : (i + 1) * 4096], remotes[i]) for i in range(3)]
    op = a.write(pairs, notify=b"x")
    op.wait()
    assert set(op.peers.split(", ")) == {"target0", "target1", "target2"}
    assert torch.equal(torch.cat(there), source)
    for engine in others:
        assert engine.next_notification(10).data == b"x"
        with pytest.raises(tm.DeadlineExceeded):
            engine.next_notification(0.01)
    others[1].deregister(regions[1])
    with pytest.raises(tm.KeyNotFound) as caught:
        a.write(pairs).wait()
    assert caught.value.peer == "target1"
    for engine in (a, *others):
        engine.close()


# --- regions by address ---


def test_a_registered_tensor_stands_for_its_region(pair: Pair) -> None:
    here, there = randoms(4096), randoms(4096)
    remote = pair.open(there)
    with pytest.raises(tm.KeyNotFound, match="no region covers"):
        pair.a.read(here, remote)
    region = pair.a.register(here)
    part = pair.a.register(here[1000:2000])
    pair.a.read(here, remote).wait()
    assert torch.equal(here, there)
    assert pair.a.region_of(here[1500:1600]).offset == 500
    assert pair.a.region_of(here[1999:2001]).offset == 1999
    pair.a.deregister(part)
    assert pair.a.region_of(here[1500:1600]).offset == 1500
    pair.a.read(tm.Pages(here, 16, [1, 3]), tm.Pages(remote, 16, [0, 1])).wait()
    pair.a.read([(here[0:8], remote[8:16]), (region[8:16], remote[0:8])]).wait()
    assert torch.equal(here[:16], torch.cat([there[8:16], there[:8]]))
    pair.a.deregister(region)
    with pytest.raises(tm.KeyNotFound):
        pair.a.read(here, remote)


def test_memory_that_went_to_another_tensor_is_not_taken_for_the_old_one(pair: Pair) -> None:
    """FSDP frees a living tensor's storage; the allocator gives the address to the next tensor."""
    remote = pair.open(randoms(48 << 10))
    old = randoms(48 << 10)
    address = old.data_ptr()
    region = pair.a.register(old)
    old.untyped_storage().resize_(0)
    with pytest.raises(tm.KeyNotFound, match="freed, moved or shrunk"):
        pair.a.write(region, remote)
    # What the allocator may give out now; the bytes are not touched here.
    new = torch.frombuffer((ctypes.c_uint8 * (48 << 10)).from_address(address), dtype=torch.uint8)
    with pytest.raises(tm.KeyNotFound, match=r"any more.*freed, moved or shrunk"):
        pair.a.write(new, remote)
    fresh = pair.a.register(new)  # is found, although the stale region was made first
    assert pair.a.region_of(new).region.descriptor() == fresh.descriptor()
    pair.a.deregister(region)
    pair.a.deregister(fresh)
    # A storage that was only replaced (`tensor.data = …`) is kept by its region.
    moved = randoms(4096)
    region, remote = pair.a.register(moved), pair.open(torch.zeros(4096, dtype=torch.uint8))
    content = moved.clone()
    moved.data = randoms(8)
    pair.a.write(region, remote).wait()
    into = pair.a.register(torch.zeros(4096, dtype=torch.uint8))
    pair.a.read(into, remote).wait()
    assert torch.equal(into.tensor, content)


def test_weak_regions_go_with_their_tensor(pair: Pair) -> None:
    there = randoms(4096)
    region = pair.b.register(there, writable=False, weak=True)
    remote, into = pair.peer.open(region.descriptor()), pair.a.register(randoms(4096))
    pair.a.read(into, remote).wait()
    assert pair.b.stats()["regions"] == 1
    view = there[10:20]
    del there
    gc.collect()
    pair.a.read(into, remote).wait()  # a view keeps the storage
    del view
    gc.collect()
    assert pair.b.stats()["regions"] == 0
    with pytest.raises(tm.KeyNotFound):
        pair.a.read(into, remote).wait()
    del remote

    def refused() -> bool:  # opened still, while a lane has the op that failed
        try:
            pair.peer.open(region.descriptor())
        except tm.KeyNotFound:
            return True
        return False

    assert eventually(refused)
    with pytest.raises(tm.InvalidArgument, match="weak"):
        pair.b.register(randoms(8), weak=True)
    with pytest.raises(tm.InvalidArgument, match="weak"):
        pair.b.register(bytearray(8), writable=False, weak=True)
    with pytest.raises(tm.InvalidArgument, match="shared"):
        pair.b.register(tm.empty(8, torch.uint8), writable=False, weak=True)


def test_an_op_keeps_the_tensor_of_a_weak_region() -> None:
    pair = Pair(("tcp",), background_rate=1 << 20)
    source, there = randoms(1 << 20), torch.zeros(1 << 20, dtype=torch.uint8)
    want = source.clone()
    region = pair.a.register(source, writable=False, weak=True)
    op = pair.a.write(region, pair.open(there), priority="background")
    del source
    gc.collect()
    kept = pair.a.stats()["regions"] == 1
    assert kept or op.done()  # it takes a second; so may the collection, on a loaded machine
    op.wait()
    assert torch.equal(there, want)
    pair.close()


def test_ten_thousand_regions() -> None:
    with tm.Engine() as engine:
        memory = randoms(10_000 * 64)
        parts = list(memory.split(64))
        regions = [engine.register(part) for part in parts]
        assert engine.region_of(parts[1234]).region.descriptor() == regions[1234].descriptor()
        for region in regions:
            engine.deregister(region)
        assert engine.stats()["regions"] == 0


def test_a_region_that_is_mapped_by_a_stopped_peer_is_Busy_and_keeps_its_tensor(child: Any) -> None:
    engine = tm.Engine(transports=("shm",), name="owner")
    tensor = tm.empty(1 << 20, torch.uint8)
    region = engine.register(tensor)
    other = child()
    code = (
        "import torch_mooncake as tm; e = tm.Engine(transports=('shm',), name='mapper')\n"
        "remote = e.connect(address).open(bytes.fromhex(descriptor)); result = remote.transport"
    )
    assert other(code, address=engine.addresses[0], descriptor=region.descriptor().hex()) == "shm"
    other.kill(signal.SIGSTOP)
    with pytest.raises(tm.Busy, match="mapper") as caught:
        engine.deregister(region, timeout=0.3)
    assert caught.value.retryable
    assert engine.stats()["quarantined_regions"] == 1
    with pytest.raises(tm.KeyNotFound):
        engine.region_of(tensor)
    died = weakref.finalize(tensor.untyped_storage(), lambda: None)
    del tensor
    region.tensor = region._tie = None
    gc.collect()
    assert died.alive
    other.kill(signal.SIGCONT)
    engine.deregister(region, timeout=10)
    assert engine.stats()["quarantined_regions"] == 0
    assert eventually(lambda: bool(gc.collect() >= 0 and not died.alive), timeout=10)
    engine.close()


# --- peers ---


def test_closing_a_peer_leaves_the_other_handles(pair: Pair) -> None:
    second = pair.a.connect(pair.b.addresses[0])
    theirs = pair.b.register(randoms(64))
    first_remote, second_remote = pair.peer.open(theirs.descriptor()), second.open(theirs.descriptor())
    region = pair.a.register(randoms(64))
    pair.peer.close()
    pair.peer.close()
    assert not pair.peer.alive
    with pytest.raises(tm.Closed):
        pair.a.read(region, first_remote)
    with pytest.raises(tm.Closed):
        pair.peer.open(theirs.descriptor())
    assert second.alive
    pair.a.read(region, second_remote).wait()
    second.close()
    third = pair.a.connect(pair.b.addresses[0])
    pair.a.read(region, third.open(theirs.descriptor())).wait()


# --- priorities ---


def test_a_foreground_op_overtakes_background_ones(pair: Pair) -> None:
    n = 64 << 20
    there = torch.zeros(n, dtype=torch.uint8)
    region, remote = pair.a.register(torch.ones(n, dtype=torch.uint8)), pair.open(there)
    slow = [pair.a.write(region, remote, priority="background", notify=b"slow") for _ in range(3)]
    pair.a.write(region[: 1 << 20], remote[: 1 << 20], notify=b"fast").wait()
    assert not any(op.done() for op in slow)
    assert pair.b.next_notification(10).data == b"fast"
    for op in slow:
        op.wait()
        assert pair.b.next_notification(10).data == b"slow"
    assert bool(there.all())
    with pytest.raises(tm.InvalidArgument, match="urgent"):
        pair.a.write(region, remote, priority="urgent")  # type: ignore[arg-type]


# --- asyncio ---


def threads() -> int:
    return threading.active_count()


def test_many_awaited_ops_need_no_threads(pair: Pair) -> None:
    region, remote = pair.a.register(randoms(4 << 20)), pair.open(randoms(4 << 20))

    async def run() -> None:
        before = threads()
        ops = [pair.a.write(region, remote) for _ in range(50)]
        tasks = [asyncio.ensure_future(wait(op)) for op in ops]
        await asyncio.sleep(0)
        assert threads() == before
        await asyncio.gather(*tasks)
        assert all(op.state == "done" for op in ops)

    async def wait(op: tm.Op) -> None:
        await asyncio.gather(again(op), again(op))  # by two tasks

    async def again(op: tm.Op) -> None:
        await op

    asyncio.run(run())


def test_a_cancelled_task_cancels_its_op() -> None:
    pair = Pair(("shm",), background_rate=1 << 20)
    region, remote = pair.a.register(randoms(8 << 20)), pair.open(randoms(8 << 20))

    async def run() -> tm.Op:
        op = pair.a.write(region, remote, priority="background")

        async def wait() -> None:
            await op

        task = asyncio.ensure_future(wait())
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return op

    op = asyncio.run(run())
    with pytest.raises(tm.Cancelled):
        op.wait(10)
    assert op.state == "cancelled"
    pair.close()


def test_waits_for_a_notification_that_gave_up_leave_one_watch(pair: Pair) -> None:
    region, remote = pair.a.register(randoms(64)), pair.open(randoms(64))

    async def run() -> None:
        for _ in range(50):
            with pytest.raises(tm.DeadlineExceeded):
                await pair.b.anext_notification(0.001)
        cancelled = [asyncio.create_task(pair.b.anext_notification()) for _ in range(20)]
        waiting = [asyncio.create_task(pair.b.anext_notification(20)) for _ in range(3)]
        await asyncio.sleep(0.01)
        for task in cancelled:
            task.cancel()
        await asyncio.wait(cancelled)
        for i in range(3):
            await pair.a.write(region, remote, notify=str(i).encode())
        assert {note.data for note in await asyncio.gather(*waiting)} == {b"0", b"1", b"2"}
        # What the engine was asked to tell, as the next notification shows.
        for _ in range(50):
            with pytest.raises(tm.DeadlineExceeded):
                await pair.b.anext_notification(0.001)
        events = aio.events_of_running_loop()
        loop = asyncio.get_running_loop()
        loop.remove_reader(events._completions.fileno())
        pair.a.write(region, remote, notify=b"last").wait()
        assert pair.b.next_notification(10).data == b"last"
        told: list[int] = []
        assert eventually(lambda: told.extend(events._completions.take()) or told)
        await asyncio.sleep(0.05)
        assert len(told) + len(events._completions.take()) == 1

    asyncio.run(run())


def test_notifications_as_an_async_iterator(pair: Pair) -> None:
    region, remote = pair.a.register(randoms(64)), pair.open(randoms(64))

    async def run() -> list[bytes]:
        got: list[bytes] = []

        async def listen() -> None:
            async for note in pair.b.notifications():
                got.append(note.data)

        task = asyncio.ensure_future(listen())
        for i in range(20):
            await pair.a.write(region, remote, notify=str(i).encode())
            if i % 5 == 0:
                await asyncio.sleep(0.01)
        while len(got) < 20:
            await asyncio.sleep(0.001)
        before = threads()
        with pytest.raises(tm.DeadlineExceeded):
            await pair.b.anext_notification(0.05)
        assert threads() == before
        await asyncio.get_running_loop().run_in_executor(None, pair.b.close)
        await asyncio.wait_for(task, 10)  # ends with the engine
        return got

    assert asyncio.run(run()) == [str(i).encode() for i in range(20)]
