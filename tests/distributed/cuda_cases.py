"""What CUDA tensors have to do in the backend, on a device or on the fake one (csrc/tests/torch/fake_cuda.cpp)."""

from __future__ import annotations

import datetime
import importlib.util
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from reference_model import check, expected, legal, values

FAKE = Path(__file__).parents[2] / "build" / str(sys.implementation.cache_tag) / "tests" / "fake_cuda.so"
LARGE = 300_001  # elements: beyond what goes by way of the host, in every type but bytes


class FakeDevice:
    """The fake device of this process."""

    def __init__(self) -> None:
        spec = importlib.util.spec_from_file_location("fake_cuda", FAKE)
        assert spec is not None
        assert spec.loader is not None
        self.cuda: Any = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(self.cuda)
        torch.cuda.get_device_capability = lambda *_: (8, 0)  # what dist.broadcast() asks

    def put(self, tensor: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.cuda.to_device(tensor)
        return out

    def fill_late(self, tensor: torch.Tensor, value: float) -> None:
        """A kernel on the current stream that takes its time."""
        self.cuda.queue_fill(tensor, value, 1000)  # ms: busy machines look later

    def copy(self, to: torch.Tensor, source: torch.Tensor) -> None:
        """A kernel on the current stream."""
        self.cuda.queue_copy(to, source)

    def synchronize(self) -> None:
        self.cuda.synchronize()


class RealDevice:
    """The GPU, which all ranks share."""

    def put(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_contiguous():
            return tensor.cuda()
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cuda").copy_(tensor)

    def fill_late(self, tensor: torch.Tensor, value: float) -> None:
        torch.cuda._sleep(500_000_000)  # cycles
        tensor.fill_(value)

    def copy(self, to: torch.Tensor, source: torch.Tensor) -> None:
        to.copy_(source)

    def synchronize(self) -> None:
        torch.cuda.current_stream().synchronize()


def counted(rank: int, n: int) -> torch.Tensor:
    return torch.arange(n, dtype=torch.float32) % 1000 + rank


def device(fake: bool) -> Any:
    return FakeDevice() if fake else RealDevice()


def _put_strided(on: Any, tensor: torch.Tensor, strided: bool) -> torch.Tensor:
    if not strided:
        return on.put(tensor.contiguous())
    wide = on.put(torch.stack([tensor, tensor], 1))
    return wide[:, 0]


def every_collective(rank: int, world: int, fake: bool) -> None:
    on = device(fake)
    for dtype in (torch.float32, torch.float16, torch.int64, torch.bool):
        for n in (0, 1, 1023, LARGE):
            for strided in (False, True):
                _every_collective(on, rank, world, dtype, n, strided)


def _every_collective(on: Any, rank: int, world: int, dtype: torch.dtype, n: int, strided: bool) -> None:
    inputs = [values(dtype, r, n) for r in range(world)]
    what = (dtype, n, strided)

    def fresh(count: int = n) -> torch.Tensor:
        return _put_strided(on, torch.zeros(count).to(dtype), strided)

    def mine() -> torch.Tensor:
        return _put_strided(on, inputs[rank], strided)

    def same(actual: torch.Tensor, wanted: torch.Tensor, name: str) -> None:
        check(actual.cpu(), wanted, (name, *what))

    for op in ("SUM", "AVG", "MAX", "PRODUCT", "BXOR"):
        if not legal(dtype, op):
            continue
        tensor = mine()
        dist.all_reduce(tensor, getattr(dist.ReduceOp, op))
        same(tensor, expected(dtype, op, range(world), n), f"all_reduce {op}")
    total = expected(dtype, "SUM", range(world), n)
    tensor = mine()
    dist.broadcast(tensor, world - 1)
    same(tensor, inputs[world - 1], "broadcast")
    tensor = mine()
    dist.reduce(tensor, 0)
    same(tensor, total if rank == 0 else inputs[rank], "reduce")
    outs = [fresh() for _ in range(world)]
    dist.all_gather(outs, mine())
    for r in range(world):
        same(outs[r], inputs[r], "all_gather")
    out = on.put(torch.zeros(n * world).to(dtype))
    dist.all_gather_into_tensor(out, on.put(inputs[rank]))
    same(out, torch.cat(inputs), "all_gather_into_tensor")
    out = fresh()
    dist.reduce_scatter(out, [mine() for _ in range(world)])
    same(out, total, "reduce_scatter")
    out = on.put(torch.zeros(n).to(dtype))
    dist.reduce_scatter_tensor(out, on.put(inputs[rank].repeat(world)))
    same(out, total, "reduce_scatter_tensor")
    outs = [fresh() for _ in range(world)] if rank == 0 else []
    dist.gather(mine(), outs or None, dst=0)
    for r, gathered in enumerate(outs):
        same(gathered, inputs[r], "gather")
    out = fresh()
    dist.scatter(out, [_put_strided(on, one, strided) for one in inputs] if rank == 0 else None, src=0)
    same(out, inputs[rank], "scatter")
    outs = [fresh() for _ in range(world)]
    dist.all_to_all(outs, [mine() for _ in range(world)])
    for r in range(world):
        same(outs[r], inputs[r], "all_to_all")
    counts = [n if (rank + r) % 2 else n // 3 for r in range(world)]  # the same from both ends
    out = on.put(torch.zeros(sum(counts)).to(dtype))
    dist.all_to_all_single(out, on.put(torch.cat([inputs[rank][:c] for c in counts])), counts, counts)
    same(out, torch.cat([inputs[r][: counts[r]] for r in range(world)]), "all_to_all_single")
    tensor, host = mine(), inputs[rank].clone()  # both kinds of tensors in one sequence
    works = [dist.all_reduce(tensor, async_op=True), dist.all_reduce(host, async_op=True)]
    for work in works:
        work.wait()
    same(tensor, total, "cuda before cpu")
    same(host, total, "cpu after cuda")


def order(rank: int, world: int, fake: bool) -> None:
    """After the work on the stream, before what follows, and the host waits for neither."""
    on = device(fake)
    for n in (1000, LARGE):
        tensor, seen = on.put(torch.zeros(n)), on.put(torch.zeros(n))
        on.fill_late(tensor, rank + 1)
        work = dist.all_reduce(tensor, async_op=True)
        work.wait()
        assert not work.is_completed(), "the host was blocked until the end"
        on.copy(seen, tensor)
        on.synchronize()
        assert torch.equal(seen.cpu(), torch.full((n,), world * (world + 1) / 2))
        work.wait(datetime.timedelta(seconds=30))  # the host's own wait
        assert work.is_completed()
        assert work.is_success()
        assert work.exception() is None
    tensor = on.put(torch.zeros(4))
    on.fill_late(tensor, 1.0)
    dist.all_reduce(tensor)  # "synchronous" is for the stream, too
    assert torch.equal(tensor.cpu(), torch.full((4,), float(world)))


def dropped(rank: int, world: int, fake: bool) -> None:
    """Nobody keeps the tensors, nor the work: their memory is nobody else's before the end."""
    on = device(fake)
    for n in (1000, LARGE):
        out, others = on.put(torch.zeros(n)), []
        for turn in range(10):
            tensor = on.put(torch.zeros(n))
            on.fill_late(tensor, rank + 1) if turn == 0 else on.copy(tensor, out)
            dist.all_reduce(tensor, async_op=True)
            del tensor
            others.append(on.put(torch.full((n,), 7.0)))
        dist.all_reduce(out)
        assert torch.equal(out.cpu(), torch.zeros(n))
        on.synchronize()
        assert all(torch.equal(other.cpu(), torch.full((n,), 7.0)) for other in others)


def futures(rank: int, world: int, fake: bool) -> None:
    on = device(fake)
    for n in (1000, LARGE):
        tensor, seen = on.put(torch.zeros(n)), on.put(torch.zeros(n))
        on.fill_late(tensor, rank + 1)
        work = dist.all_reduce(tensor, async_op=True)
        future = work.get_future()
        assert future.done()
        assert not work.is_completed()

        def use(done: torch.futures.Future[Any], seen: torch.Tensor = seen) -> torch.Tensor:
            on.copy(seen, done.value()[0])
            return seen

        out = future.then(use).wait()
        on.synchronize()
        assert torch.equal(out.cpu(), torch.full((n,), world * (world + 1) / 2))


def messages(rank: int, world: int, fake: bool) -> None:
    on = device(fake)
    peer = 1 - rank
    for n in (0, 1, 1000, LARGE):
        for strided in (False, True):
            sent = [_put_strided(on, counted(rank, n) + tag, strided) for tag in range(3)]
            got = [_put_strided(on, torch.zeros(n), strided) for _ in range(3)]
            works = [dist.isend(sent[tag], peer, tag=tag) for tag in range(3)]
            works += [dist.irecv(got[tag], peer, tag=tag) for tag in (2, 0, 1)]
            for work in works:
                work.wait()
            for tag in range(3):
                assert torch.equal(got[tag].cpu(), counted(peer, n) + tag), (n, strided, tag)
    late, other, host = on.put(torch.zeros(LARGE)), on.put(torch.zeros(LARGE)), torch.zeros(1)
    on.fill_late(late, 5.0)
    ops = [dist.P2POp(dist.isend, late, peer), dist.P2POp(dist.irecv, other, peer)]
    works = dist.batch_isend_irecv(ops)
    future = works[0].get_future()
    future.wait()
    seen = on.put(torch.zeros(LARGE))
    on.copy(seen, future.value()[1])
    on.synchronize()
    assert torch.equal(seen.cpu(), torch.full((LARGE,), 5.0))
    # One of the host with the same tag does not overtake it.
    works += [dist.irecv(host, peer), dist.isend(torch.ones(1), peer)]
    for work in works:
        work.wait()
    assert host.item() == 1
    assert torch.equal(other.cpu(), torch.full((LARGE,), 5.0))
    if rank == 0:
        assert dist.recv(other) == 1
        assert other.cpu()[0] == 6
    else:
        dist.send(on.put(torch.full((LARGE,), 6.0)), 0)


def killed(rank: int, world: int, fake: bool) -> str:
    """wait() has returned when a rank dies: the stream goes on, the next wait() and the next collective raise."""
    on = device(fake)
    dist.all_reduce(on.put(torch.ones(LARGE)))
    on.synchronize()
    if rank == 1:
        dist.recv(torch.zeros(1), 0)
        os.kill(os.getpid(), signal.SIGKILL)
    tensor, seen = on.put(torch.ones(LARGE)), on.put(torch.zeros(1))
    work = dist.all_reduce(tensor, async_op=True)
    message = dist.irecv(on.put(torch.ones(LARGE)), 1)
    work.wait()
    message.wait()
    on.copy(seen, on.put(torch.ones(1)) if not fake else seen)
    dist.send(torch.zeros(1), 1)
    begin = time.monotonic()
    on.synchronize()
    assert time.monotonic() - begin < 8
    for _ in range(2):
        with pytest.raises(dist.DistBackendError, match=r"rank 1\b"):
            work.wait(datetime.timedelta(seconds=10))
    with pytest.raises(dist.DistBackendError, match=r"rank 1\b"):
        message.wait(datetime.timedelta(seconds=10))
    with pytest.raises(dist.DistBackendError, match=r"rank 1\b"):
        work.synchronize()
    assert not work.is_success()
    assert work.exception() is not None
    with pytest.raises(dist.DistBackendError, match=r"rank 1\b"):
        dist.all_reduce(tensor, async_op=True).wait(datetime.timedelta(seconds=10))
    return "told"


def never_comes(rank: int, world: int, fake: bool) -> None:
    """A timeout: the stream goes on."""
    on = device(fake)
    tensor = on.put(torch.ones(1000))
    dist.all_reduce(tensor)
    on.synchronize()
    if rank == 1:
        dist.recv(torch.zeros(1), 0)
        return
    options = dist.AllreduceOptions()
    options.timeout = datetime.timedelta(seconds=1)
    group: Any = dist.group.WORLD
    work = group.allreduce([tensor], options)
    work.wait()
    on.synchronize()
    with pytest.raises(dist.DistBackendError, match="rank 1"):
        work.wait()
    dist.send(torch.zeros(1), 1)


def aborted(rank: int, world: int, fake: bool) -> None:
    on = device(fake)
    tensor = on.put(torch.ones(1000))
    dist.all_reduce(tensor)
    on.synchronize()
    if rank == 0:
        on.fill_late(tensor, 1.0)
        works = [dist.all_reduce(tensor, async_op=True), dist.isend(tensor, 1), dist.irecv(tensor, 1)]
        for work in works:
            work.wait()
        group: Any = dist.group.WORLD
        group._get_backend(torch.device("cuda")).abort()
        on.synchronize()
        for work in works:
            with pytest.raises(dist.DistBackendError, match="aborted"):
                work.wait()


def sparse_and_barrier(rank: int, world: int, fake: bool) -> None:
    on = device(fake)
    late = on.put(torch.zeros(4))
    on.fill_late(late, 2.0)
    dist.barrier()
    dense = torch.zeros(6)
    dense[rank] = rank + 1
    if not fake:
        tensor = dense.to_sparse().cuda()
        dist.all_reduce(tensor)
        expected = torch.zeros(6)
        expected[:world] = torch.arange(1, world + 1)
        assert torch.equal(tensor.to_dense().cpu(), expected)
    on.synchronize()


def mixed_devices(rank: int, world: int, fake: bool) -> None:
    on = device(fake)
    with pytest.raises(ValueError, match="tensors on"):
        dist.all_gather([torch.zeros(2), on.put(torch.zeros(2))], on.put(torch.zeros(2)))
    tensor = on.put(torch.ones(3))
    dist.all_reduce(tensor)
    assert torch.equal(tensor.cpu(), torch.full((3,), float(world)))


# What needs no more than two ranks and a device, for the fake one and for a GPU.
CASES = [
    every_collective,
    order,
    dropped,
    futures,
    messages,
    never_comes,
    aborted,
    sparse_and_barrier,
    mixed_devices,
]
