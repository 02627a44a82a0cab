"""SIGKILL and SIGSTOP of each rank before and inside every collective: all survivors raise, name it, and none hangs.

The fast tier runs each collective once, with other ranks, signals and moments in turn; the slow one all of it."""

from __future__ import annotations

import datetime
import itertools
import os
import re
import signal
import threading
import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from worlds import run_world

WORLD = 3
LARGE = 400_000
SEEN_S = 6.0  # docs/distributed.md: a dead rank is seen at once; a silent one after so long, or when the timeout ends

COLLECTIVES: dict[str, Callable[[int], object]] = {
    "broadcast": lambda rank: dist.broadcast(torch.ones(4), 0),
    "large broadcast": lambda rank: dist.broadcast(torch.ones(LARGE), 0),
    "all_reduce": lambda rank: dist.all_reduce(torch.ones(4)),
    "large all_reduce": lambda rank: dist.all_reduce(torch.ones(LARGE)),
    "reduce": lambda rank: dist.reduce(torch.ones(4), 0),
    "large reduce": lambda rank: dist.reduce(torch.ones(LARGE), 0),
    "all_gather": lambda rank: dist.all_gather([torch.ones(4) for _ in range(WORLD)], torch.ones(4)),
    "large all_gather": lambda rank: dist.all_gather([torch.ones(LARGE) for _ in range(WORLD)], torch.ones(LARGE)),
    "gather": lambda rank: dist.gather(torch.ones(4), [torch.ones(4) for _ in range(WORLD)] if rank == 0 else None),
    "large gather": lambda rank: dist.gather(
        torch.ones(LARGE), [torch.ones(LARGE) for _ in range(WORLD)] if rank == 0 else None
    ),
    "scatter": lambda rank: dist.scatter(torch.ones(4), [torch.ones(4) for _ in range(WORLD)] if rank == 0 else None),
    "large scatter": lambda rank: dist.scatter(
        torch.ones(LARGE), [torch.ones(LARGE) for _ in range(WORLD)] if rank == 0 else None
    ),
    "reduce_scatter": lambda rank: dist.reduce_scatter(torch.ones(4), [torch.ones(4) for _ in range(WORLD)]),
    "large reduce_scatter": lambda rank: dist.reduce_scatter(
        torch.ones(LARGE), [torch.ones(LARGE) for _ in range(WORLD)]
    ),
    "all_to_all": lambda rank: dist.all_to_all(
        [torch.ones(4) for _ in range(WORLD)], [torch.ones(4) for _ in range(WORLD)]
    ),
    "large all_to_all": lambda rank: dist.all_to_all_single(torch.ones(3 * LARGE), torch.ones(3 * LARGE)),
    "barrier": lambda rank: dist.barrier(),
}
MESSAGES = "send and recv"  # between the victim and each of the others


def exchange(peers: list[int]) -> None:
    works = [dist.isend(torch.ones(LARGE), peer) for peer in peers]
    for peer in peers:
        dist.recv(torch.ones(LARGE), peer)
    for work in works:
        work.wait()


def struck(
    rank: int, world: int, what: str, victim: int, blow: str, moment: str, timeout_s: float
) -> list[tuple[float, str]]:
    """How long the call took that raised, and the one after it, and what they said."""
    store = dist.distributed_c10d._get_default_store()
    dist.group.WORLD.set_timeout(datetime.timedelta(seconds=timeout_s))
    others = [r for r in range(world) if r != victim]

    def call() -> None:
        if what == MESSAGES:
            exchange(others if rank == victim else [victim])
        else:
            COLLECTIVES[what](rank)

    if moment != "before the first":
        for _ in range(6):  # more than there are slots
            call()
    strike = getattr(signal, blow)
    if rank == victim:
        store.set("victim", str(os.getpid()))
        for other in others:  # they are ready
            store.wait([f"ready {other}"])
        if moment == "inside":
            threading.Timer(0.2, os.kill, (os.getpid(), strike)).start()
            while True:
                call()
        os.kill(os.getpid(), strike)
        raise AssertionError("nobody goes on after this")
    pid = int(store.get("victim"))
    store.set(f"ready {rank}", "")
    raised = []
    for again in range(2):
        with pytest.raises(dist.DistBackendError) as error:  # noqa: PT012
            while True:  # a root may be ahead of the others by some calls
                begin = time.monotonic()
                call() if not again or what == MESSAGES else dist.barrier()
        raised.append((time.monotonic() - begin, str(error.value)))
        if what == MESSAGES and blow == "SIGSTOP" and not again:
            break  # messages with others go on, and so may those with a rank that is only late
    store.set(f"raised {rank}", "")
    store.wait([f"raised {other}" for other in others])  # who leaves is missed, too
    if rank == others[0] and blow == "SIGSTOP":
        os.kill(pid, signal.SIGKILL)
    return raised


def cases() -> list[object]:
    ways = [
        ("SIGKILL", "before the first", 60),
        ("SIGKILL", "before", 60),
        ("SIGKILL", "inside", 60),
        ("SIGSTOP", "before the first", 3),
        ("SIGSTOP", "before", 3),
        ("SIGSTOP", "inside", 3),
        ("SIGSTOP", "inside", 60),
    ]
    out: list[object] = []
    for i, what in enumerate((*COLLECTIVES, MESSAGES)):
        for victim, (k, way) in itertools.product(range(WORLD), enumerate(ways)):
            fast = victim == i % WORLD and k == i % len(ways)
            name = re.sub(r"\s+", "-", f"{what} {victim} {way[0]} {way[1]} {way[2]}s")
            out.append(pytest.param(what, victim, *way, id=name, marks=[] if fast else pytest.mark.slow))
    return out


@pytest.mark.parametrize(("what", "victim", "blow", "moment", "timeout_s"), cases())
def test_survivors_raise_and_name_it(what: str, victim: int, blow: str, moment: str, timeout_s: float) -> None:
    results = run_world(WORLD, struck, what, victim, blow, moment, timeout_s, expect_dead=(victim,))
    limit = 2 * min(timeout_s, SEEN_S) if blow == "SIGSTOP" else SEEN_S
    if what == MESSAGES:
        limit *= 2  # a send, then a receive: where they have to dial first, one waits after the other
    for first, *later in results.values():
        assert first[0] < limit
        assert all(seconds < 2 for seconds, _ in later)  # the group stays broken, at once
    named = [re.search(rf"rank {victim}\b", text) is not None for raised in results.values() for _, text in raised]
    # Where all time out at once, a leaf may have waited for the root only, which says for whom it waited itself.
    assert any(named) if timeout_s < SEEN_S else all(named), results
