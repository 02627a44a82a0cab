"""Every collective x dtype x operation x size x contiguity against a plain model, one spawned world a size."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist
from worlds import run_world

SIZES = (0, 1, 3, 1023, (1 << 20) + 1)
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INTS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
COMPLEX = (torch.complex64, torch.complex128)
MOVED = (*FLOATS, *INTS, *COMPLEX, torch.bool, torch.float8_e4m3fn)
OPS = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")


def values(rank: int, n: int, dtype: torch.dtype, strided: bool = False) -> torch.Tensor:
    """Rank's input [n]: small numbers that every dtype holds; strided: every other element of a larger tensor."""
    base = (torch.arange(n) * 3 + rank * 5) % 7 + 1
    out = (base % 2 == 0) if dtype == torch.bool else base.to(torch.float32).to(dtype)
    if dtype.is_complex:
        out = out * (1 + 2j)
    if strided:
        wide = torch.zeros(n, 2).to(dtype)
        wide[:, 0] = out
        return wide[:, 0]
    return out


def legal(dtype: torch.dtype, op: str) -> bool:
    if dtype.is_complex:
        return op in ("SUM", "AVG")  # torch refuses the others itself
    if dtype == torch.bool:
        return op != "AVG"
    return not (dtype.is_floating_point and op in ("BAND", "BOR", "BXOR"))


def reduced(inputs: list[torch.Tensor], op: str) -> torch.Tensor:
    """The model: one input after another in a wide type, rounded once."""
    dtype = inputs[0].dtype
    if dtype == torch.bool:
        combine = {"SUM": torch.logical_or, "MAX": torch.logical_or, "BOR": torch.logical_or, "BXOR": torch.logical_xor}
        fn = combine.get(op, torch.logical_and)
        out = inputs[0]
        for other in inputs[1:]:
            out = fn(out, other)
        return out
    wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
    fns = {
        "SUM": torch.add,
        "AVG": torch.add,
        "PRODUCT": torch.mul,
        "MIN": torch.minimum,
        "MAX": torch.maximum,
        "BAND": torch.bitwise_and,
        "BOR": torch.bitwise_or,
        "BXOR": torch.bitwise_xor,
    }
    out = inputs[0].to(wide)
    for other in inputs[1:]:
        out = fns[op](out, other.to(wide))
    if op == "AVG":
        integral = not (wide.is_floating_point or wide.is_complex)
        out = torch.div(out, len(inputs), rounding_mode="trunc") if integral else out / len(inputs)
    return out.to(dtype)


def same(actual: torch.Tensor, expected: torch.Tensor, what: object) -> None:
    def raw(t: torch.Tensor) -> torch.Tensor:
        return t.contiguous().view(torch.uint8) if t.dtype == torch.float8_e4m3fn else t

    # torch divides complex numbers in another way: its last bit may differ.
    rtol = 1e-6 if actual.dtype.is_complex else 0
    torch.testing.assert_close(raw(actual), raw(expected), rtol=rtol, atol=0, msg=lambda m: f"{what}: {m}")


def empty(n: int, dtype: torch.dtype, strided: bool) -> torch.Tensor:
    return torch.zeros(n, 2).to(dtype)[:, 0] if strided else torch.zeros(n).to(dtype)


def reductions(rank: int, world: int) -> int:
    count = 0
    kinds = [(d, o) for d in (*FLOATS, *INTS, *COMPLEX, torch.bool) for o in OPS if legal(d, o)]
    for n, strided in itertools.product(SIZES, (False, True)):
        # The largest size with every third kind only, shifted so that all ops and types occur.
        for dtype, op in kinds[:: 3 if n > 10_000 else 1]:
            what = (n, strided, dtype, op)
            red = getattr(dist.ReduceOp, op)
            inputs = [values(r, n, dtype) for r in range(world)]
            expected = reduced(inputs, op)
            tensor = values(rank, n, dtype, strided)
            dist.all_reduce(tensor, red)
            same(tensor, expected, ("all_reduce", *what))
            root = n % world
            tensor = values(rank, n, dtype, strided)
            dist.reduce(tensor, root, red)
            same(tensor, expected if rank == root else inputs[rank], ("reduce", *what))
            if n <= 10_000:
                parts = [values(rank + 3 * r, n, dtype, strided) for r in range(world)]
                mine = reduced([values(r + 3 * rank, n, dtype) for r in range(world)], op)
                out = empty(n, dtype, strided)
                dist.reduce_scatter(out, parts, red)
                same(out, mine, ("reduce_scatter", *what))
                out = empty(n, dtype, strided)
                dist.reduce_scatter_tensor(out, torch.cat([p.contiguous() for p in parts]), red)
                same(out, mine, ("reduce_scatter_tensor", *what))
            count += 1
    return count


def movement(rank: int, world: int) -> int:
    count = 0
    for n, strided, dtype in itertools.product(SIZES, (False, True), MOVED):
        if n > 10_000 and dtype not in (torch.bfloat16, torch.int64, torch.bool):
            continue
        what = (n, strided, dtype)
        inputs = [values(r, n, dtype) for r in range(world)]
        mine = values(rank, n, dtype, strided)
        root = n % world
        tensor = mine.clone() if not strided else values(rank, n, dtype, True)
        dist.broadcast(tensor, root)
        same(tensor, inputs[root], ("broadcast", *what))
        outs = [empty(n, dtype, strided) for _ in range(world)]
        dist.all_gather(outs, mine)
        for r in range(world):
            same(outs[r], inputs[r], ("all_gather", *what))
        flat = torch.zeros(world * n).to(dtype)
        dist.all_gather_into_tensor(flat, mine)
        same(flat, torch.cat([i.view(torch.uint8) for i in inputs]).view(dtype) if n else flat, ("into_tensor", *what))
        outs = [empty(n, dtype, strided) for _ in range(world)]
        dist.gather(mine, outs if rank == root else None, dst=root)
        for r in range(world if rank == root else 0):
            same(outs[r], inputs[r], ("gather", *what))
        out = empty(n, dtype, strided)
        dist.scatter(out, [values(r, n, dtype, strided) for r in range(world)] if rank == root else None, src=root)
        same(out, inputs[rank], ("scatter", *what))
        outs = [empty(n, dtype, strided) for _ in range(world)]
        dist.all_to_all(outs, [values(rank + 3 * r, n, dtype, strided) for r in range(world)])
        for r in range(world):
            same(outs[r], values(r + 3 * rank, n, dtype), ("all_to_all", *what))
        if n in (3, 1023):  # rank i sends (i + j) % 3 * n elements to rank j
            sent = [(rank + r) % 3 * n for r in range(world)]
            chunks = [values(rank + 3 * r, size, dtype) for r, size in enumerate(sent)]
            packed = torch.cat([c.view(torch.uint8) for c in chunks]).view(dtype)
            out = torch.zeros(sum(sent)).to(dtype)
            dist.all_to_all_single(out, packed, sent, sent)
            for r, piece in enumerate(out.split(sent)):
                same(piece, values(r + 3 * rank, sent[r], dtype), ("all_to_all_single", *what))
        count += 1
    return count


def grid(rank: int, world: int) -> tuple[int, int]:
    out = reductions(rank, world), movement(rank, world)
    dist.barrier()
    return out


@pytest.mark.parametrize("world", [2, 3, 4])
def test_grid(world: int) -> None:
    for reductions_run, movements_run in run_world(world, grid).values():
        assert reductions_run > 500
        assert movements_run > 90


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
    same(t, torch.full((3,), 0.5 * world), "premul_sum")
    flat = torch.zeros(world * 5)
    flat[rank * 5 : rank * 5 + 5] = rank + 1.0
    dist.all_gather_into_tensor(flat, flat[rank * 5 : rank * 5 + 5])
    same(flat, torch.arange(1.0, world + 1).repeat_interleave(5), "in place")
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
