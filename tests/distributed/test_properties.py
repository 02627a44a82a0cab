"""Every collective x dtype x operation x world x size x layout against a plain model (reference_model.py).

Each world is spawned once and runs its whole list of cases. The fast tier runs a world of 3 over every type and
operation in every size below a million, the layouts in turn; the slow one all of it at 2, 3, 5 and 7 ranks.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from reference_model import FACTOR, FP8, LAYOUTS, MOVED, OPS, REDUCED, check, empty, expected, laid_out, legal, values
from worlds import run_world

SIZES = (0, 1, 3, 1023)
LARGE = (1 << 20) + 1
KINDS = [(dtype, op) for dtype in REDUCED for op in OPS if legal(dtype, op)]


def reduce_op(op: str) -> object:
    return dist._make_nccl_premul_sum(FACTOR) if op == "PREMUL_SUM" else getattr(dist.ReduceOp, op)


def in_place(layout: str) -> str:
    return "offset" if layout == "expanded" else layout


def roots_of(n: int, world: int, shift: int) -> Iterator[int]:
    return iter(range(world)) if n in (1, 3) else iter([shift % world])


def reductions_of(rank: int, world: int, dtype: torch.dtype, op: str, n: int, layout: str, shift: int) -> None:
    what = (dtype, op, n, layout)
    red = reduce_op(op)
    ranks = range(world)
    total = expected(dtype, op, ranks, n, shift)
    mine = values(dtype, rank, n, shift)

    tensor = laid_out(mine, in_place(layout))
    dist.all_reduce(tensor, red)
    check(tensor, total, ("all_reduce", *what))
    for root in roots_of(n, world, shift):
        tensor = laid_out(mine, in_place(layout))
        dist.reduce(tensor, root, red)
        check(tensor, total if rank == root else mine, ("reduce", root, *what))

    # Rank r's piece for rank t has seed r + 100 t; the large ones are shared out.
    constant = layout == "expanded"
    each = n if n < LARGE else n // world + 1
    parts = [laid_out(values(dtype, rank + 100 * to, each, shift, constant), layout) for to in ranks]
    wanted = expected(dtype, op, [r + 100 * rank for r in ranks], each, shift, constant)
    out = empty(dtype, each, layout)
    dist.reduce_scatter(out, parts, red)
    check(out, wanted, ("reduce_scatter", *what))
    whole = torch.cat([values(dtype, rank + 100 * to, each, shift).view(torch.uint8) for to in ranks]).view(dtype)
    wanted = expected(dtype, op, [r + 100 * rank for r in ranks], each, shift)
    out = empty(dtype, each, layout)
    dist.reduce_scatter_tensor(out, laid_out(whole, in_place(layout)), red)
    check(out, wanted, ("reduce_scatter_tensor", *what))
    if n == LARGE:
        return
    parts = [laid_out(values(dtype, rank + 100 * to, n + to, shift), in_place(layout)) for to in ranks]
    out = empty(dtype, n + rank, layout)
    dist.reduce_scatter(out, parts, red)
    check(out, expected(dtype, op, [r + 100 * rank for r in ranks], n + rank, shift), ("uneven", *what))

    several = [laid_out(values(dtype, rank, size, shift), in_place(layout)) for size in (n, 1, 5)]
    with dist._coalescing_manager():
        for tensor in several:
            dist.all_reduce(tensor, red)
    for tensor, size in zip(several, (n, 1, 5), strict=True):
        check(tensor, expected(dtype, op, ranks, size, shift), ("all_reduce, coalesced", *what))
    several = [laid_out(values(dtype, rank, size, shift), in_place(layout)) for size in (n, 2)]
    dist.all_reduce_coalesced(several, red)
    for tensor, size in zip(several, (n, 2), strict=True):
        check(tensor, expected(dtype, op, ranks, size, shift), ("all_reduce_coalesced", *what))
    outs = [empty(dtype, n, layout) for _ in range(2)]
    with dist._coalescing_manager():
        for out in outs:
            dist.reduce_scatter_tensor(out, laid_out(whole, in_place(layout)), red)
    for out in outs:
        check(out, wanted, ("reduce_scatter_tensor, coalesced", *what))


def movement_of(rank: int, world: int, dtype: torch.dtype, n: int, layout: str, shift: int) -> None:
    what = (dtype, n, layout)
    ranks = range(world)
    constant = layout == "expanded"

    def given(seed: int, size: int) -> torch.Tensor:
        return values(dtype, seed, size, shift, constant)

    def pieces(size: int) -> list[torch.Tensor]:
        """What this rank has for each."""
        return [laid_out(given(rank + 100 * to, size), layout) for to in ranks]

    each = n if n < LARGE else n // world + 1
    mine = laid_out(given(rank, n), layout)
    for root in roots_of(n, world, shift):
        tensor = mine if rank == root else empty(dtype, n, layout)
        dist.broadcast(tensor, root)
        check(tensor, given(root, n), ("broadcast", root, *what))
        outs = [empty(dtype, n, layout) for _ in ranks] if rank == root else None
        dist.gather(mine, outs, dst=root)
        for r, got in enumerate(outs or []):
            check(got, given(r, n), ("gather", root, *what))
        out = empty(dtype, each, layout)
        dist.scatter(out, pieces(each) if rank == root else None, src=root)
        check(out, given(root + 100 * rank, each), ("scatter", root, *what))

    outs = [empty(dtype, n, layout) for _ in ranks]
    dist.all_gather(outs, mine)
    for r in ranks:
        check(outs[r], given(r, n), ("all_gather", *what))
    flat = empty(dtype, world * n, layout)
    dist.all_gather_into_tensor(flat, mine)
    wanted = torch.cat([given(r, n).view(torch.uint8) for r in ranks]).view(dtype)
    check(flat, wanted, ("all_gather_into_tensor", *what))
    outs = [empty(dtype, each, layout) for _ in ranks]
    dist.all_to_all(outs, pieces(each))
    for r in ranks:
        check(outs[r], given(r + 100 * rank, each), ("all_to_all", *what))
    packed = torch.cat([given(rank + 100 * to, each).view(torch.uint8) for to in ranks]).view(dtype)
    out = empty(dtype, world * each, "strided" if layout == "channels_last" else "offset")
    dist.all_to_all_single(out, packed)
    for r, piece in enumerate(out.split(each) if each else []):
        check(piece, given(r + 100 * rank, each), ("all_to_all_single", *what))

    # To the next, from the one before.
    got = empty(dtype, n, layout)
    send = dist.isend(mine, (rank + 1) % world)
    dist.recv(got, (rank - 1) % world)
    send.wait()
    check(got, given((rank - 1) % world, n), ("send and recv", *what))
    if n == LARGE:
        return

    outs = [empty(dtype, n + r, layout) for r in ranks]
    dist.all_gather(outs, laid_out(given(rank, n + rank), layout))
    for r in ranks:
        check(outs[r], given(r, n + r), ("all_gather, uneven", *what))
    sizes = [(rank + to) % 3 * n for to in ranks]  # the same both ways
    outs = [empty(dtype, size, layout) for size in sizes]
    dist.all_to_all(outs, [laid_out(given(rank + 100 * to, sizes[to]), layout) for to in ranks])
    for r in ranks:
        check(outs[r], given(r + 100 * rank, sizes[r]), ("all_to_all, uneven", *what))
    packed = torch.cat([given(rank + 100 * to, sizes[to]).view(torch.uint8) for to in ranks]).view(dtype)
    out = empty(dtype, sum(sizes), "offset")
    dist.all_to_all_single(out, packed, sizes, sizes)
    for r, piece in enumerate(out.split(sizes)):
        check(piece, given(r + 100 * rank, sizes[r]), ("all_to_all_single, uneven", *what))
    flats = [empty(dtype, world * n, layout) for _ in range(2)]
    with dist._coalescing_manager():
        for flat in flats:
            dist.all_gather_into_tensor(flat, mine)
    for flat in flats:
        check(flat, wanted, ("all_gather_into_tensor, coalesced", *what))


def grid(rank: int, world: int, sizes: tuple[int, ...], layouts: tuple[str, ...] | None, step: int) -> tuple[int, int]:
    """All kinds (every `step`th) in all sizes; in the layouts given, or in one of them, in turn. How many were run."""
    warnings.simplefilter("ignore", FutureWarning)  # torch gives some of its calls other names
    turn = itertools.count()
    reductions = movements = 0
    for n in sizes:
        for i, (dtype, op) in enumerate(KINDS[::step]):
            for layout in layouts or (LAYOUTS[next(turn) % len(LAYOUTS)],):
                reductions_of(rank, world, dtype, op, n, layout, 31 * i)
                reductions += 1
        next(turn)  # another layout for each in the next size
        for i, dtype in enumerate(MOVED):
            for layout in layouts or (LAYOUTS[next(turn) % len(LAYOUTS)],):
                movement_of(rank, world, dtype, n, layout, 31 * i)
                movements += 1
    dist.barrier()
    return reductions, movements


def test_a_world_of_three() -> None:
    for counts in run_world(3, grid, SIZES, None, 1).values():
        assert counts == (len(SIZES) * len(KINDS), len(SIZES) * len(MOVED))


def test_large_ones() -> None:
    for reductions, movements in run_world(3, grid, (LARGE,), None, 7).values():
        assert reductions >= len(KINDS) // 7
        assert movements == len(MOVED)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("world", [2, 3, 5, 7])
def test_all_of_it(world: int) -> None:
    for counts in run_world(world, grid, SIZES, LAYOUTS, 1, timeout_s=300, limit_s=1700).values():
        assert counts == (len(SIZES) * len(LAYOUTS) * len(KINDS), len(SIZES) * len(LAYOUTS) * len(MOVED))


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("world", [3, 5, 7])
def test_all_of_it_large(world: int) -> None:
    for counts in run_world(world, grid, (LARGE,), LAYOUTS, 1, timeout_s=300, limit_s=3500).values():
        assert counts == (len(LAYOUTS) * len(KINDS), len(LAYOUTS) * len(MOVED))


def refusals(rank: int, world: int) -> None:
    # Refused on every rank before anything is sent, so that the group goes on.
    premul = dist._make_nccl_premul_sum(FACTOR)
    for dtype in FP8:
        with pytest.raises(TypeError, match="cannot reduce"):
            dist.all_reduce(values(dtype, rank, 8))
    for dtype in (torch.int32, torch.uint8, torch.bool):
        for call in (
            lambda t: dist.all_reduce(t, premul),
            lambda t: dist.reduce(t, 0, premul),
            lambda t: dist.reduce_scatter_tensor(t[:1].clone(), t[:world], premul),
            lambda t: dist.reduce_scatter(t[:1].clone(), list(t[:world].split(1)), premul),
        ):
            with pytest.raises(RuntimeError, match="PREMUL_SUM"):
                call(values(dtype, rank, 8))
    one = torch.zeros(1)
    for call in (
        lambda t: dist.all_reduce(t),
        lambda t: dist.broadcast(t, (rank + 1) % world),
        lambda t: dist.all_gather_into_tensor(t, one),
        lambda t: dist.recv(t, (rank + 1) % world),
    ):
        with pytest.raises(ValueError, match="expanded"):
            call(one.expand(world))
    # What could be put into an expanded input is as good as any: it is only read.
    out = torch.zeros(1)
    dist.reduce_scatter_tensor(out, torch.full((1,), rank + 1.0).expand(world))
    assert out.item() == world * (world + 1) / 2
    tensor = torch.full((1,), rank + 1.0).expand(4) if rank == 0 else torch.zeros(4)
    dist.broadcast(tensor, 0)
    assert tensor.tolist() == [1.0] * 4
    tensor = (torch.full((1,), rank + 1.0)).expand(4) if rank else torch.ones(4)
    dist.reduce(tensor, 0)
    assert tensor[0].item() == (world * (world + 1) / 2 if rank == 0 else rank + 1)


def test_what_has_no_meaning_is_refused_and_the_group_goes_on() -> None:
    run_world(3, refusals)
