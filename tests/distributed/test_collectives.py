"""What the grid of test_properties.py has no room for: objects, asynchrony, tags, groups."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from worlds import run_world


def odds_and_ends(rank: int, world: int) -> None:
    # Uneven lists, lazy conjugates, PREMUL_SUM, coalesced calls, in-place gathering, objects.
    outs = [torch.zeros(r + 1) for r in range(world)]
    dist.all_gather(outs, torch.full((rank + 1,), float(rank)))
    assert [o.tolist() for o in outs] == [[float(r)] * (r + 1) for r in range(world)]
    z = torch.full((4,), 1 + 1j * (rank + 1)).conj().imag  # a lazy negative, as an input
    assert z.is_neg()
    outs = [torch.zeros(4) for _ in range(world)]
    dist.all_gather(outs, z)
    assert [o[0].item() for o in outs] == [-1.0 - r for r in range(world)]
    t = torch.ones(3)
    dist.all_reduce(t, dist._make_nccl_premul_sum(0.5))
    assert t.tolist() == [0.5 * world] * 3
    flat = torch.zeros(world * 5)
    flat[rank * 5 : rank * 5 + 5] = rank + 1.0
    dist.all_gather_into_tensor(flat, flat[rank * 5 : rank * 5 + 5])
    assert torch.equal(flat, torch.arange(1.0, world + 1).repeat_interleave(5))
    many = [torch.full((n,), float(rank)) for n in (1, 0, 70_000)]
    with dist._coalescing_manager():
        for t in many:
            dist.all_reduce(t)
    assert all((t == sum(range(world))).all() for t in many)
    objects: list[object] = [None] * world
    dist.all_gather_object(objects, {"rank": rank, "text": "x" * rank})
    assert objects == [{"rank": r, "text": "x" * r} for r in range(world)]
    shared = [("a", rank), rank] if rank == 1 else [None, None]
    dist.broadcast_object_list(shared, src=1)
    assert shared == [("a", 1), 1]
    # Asynchronous ones end in the order they were issued, whatever is waited for first.
    tensors = [torch.full((10_000 * i + 1,), float(rank)) for i in range(20)]
    works = [dist.all_reduce(t, async_op=True) for t in tensors]
    for work in reversed(works):
        work.wait()
        assert work.is_completed()
        assert work.is_success()
    assert all((t == sum(range(world))).all() for t in tensors)
    t = torch.ones(5)
    (value,) = dist.all_reduce(t, async_op=True).get_future().wait()
    assert (value == world).all()
    for bad, error in (
        (lambda: dist.all_reduce(torch.ones(2), dist.ReduceOp.BOR), RuntimeError),
        (lambda: dist.all_reduce(torch.ones(2).to(torch.float8_e5m2)), TypeError),
    ):
        with pytest.raises(error):
            bad()
    dist.barrier()  # nothing was sent for the bad ones: still in step
    pair = dist.new_group([0, 1])
    if rank < 2:
        t = torch.full((3,), rank + 1.0)
        dist.all_reduce(t, group=pair)
        assert t.tolist() == [3.0] * 3
    dist.barrier()


def test_odds_and_ends() -> None:
    run_world(3, odds_and_ends)


def messages(rank: int, world: int) -> None:
    peer = (rank + 1) % world
    back = (rank - 1) % world
    for n in (0, 5, 300_000):  # everybody sends before anybody receives
        send = dist.isend(torch.full((n,), float(rank)), peer)
        got = torch.zeros(n, 2)[:, 0]
        dist.recv(got, back)
        send.wait()
        assert (got == back).all()
    ops = [dist.P2POp(dist.isend, torch.full((40_000,), float(rank)), peer)]
    got = torch.zeros(40_000)
    ops.append(dist.P2POp(dist.irecv, got, back))
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    assert (got == back).all()
    if rank == 0:  # tags decide, not the order
        for tag in (1, 2, 3):
            dist.send(torch.tensor([tag]), 1, tag=tag)
    if rank == 1:
        for tag in (3, 1, 2):
            t = torch.zeros(1, dtype=torch.int64)
            dist.recv(t, 0, tag=tag)
            assert t.item() == tag
    dist.barrier()
    if rank == 0:
        seen = set()
        for _ in range(world - 1):
            t = torch.zeros(1, dtype=torch.int64)
            source = dist.recv(t)
            assert t.item() == source * 10
            seen.add(source)
        assert seen == set(range(1, world))
    else:
        dist.send(torch.tensor([rank * 10]), 0)
    # A pending receive holds up neither collectives nor other messages, and its tensor may go out of scope.
    t = torch.zeros(2)
    pending = dist.irecv(t, back, tag=99)
    dist.barrier()
    dist.isend(torch.tensor([1.0, 2.0]), peer, tag=99)
    pending.wait()
    assert t.tolist() == [1.0, 2.0]
    dist.barrier()


def test_messages() -> None:
    run_world(3, messages)
