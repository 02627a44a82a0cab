"""The 1T run: a full update of Kimi-K2 from 256 trainer ranks, planned, moved at a smaller scale, and predicted.

    python one_trillion.py                             # 8 engines of 32 ranks, 400 Gbit/s NICs
    python one_trillion.py --tp 16 --gib 1             # 8 engines of 16 ranks, more bytes moved
    python one_trillion.py --plot nics.svg --json out.json

It plans the update of all 1.03 T parameters and checks that the trainers send each byte once. Then it moves one: every
width is divided so that what all servers receive fits ``--gib``, there are ``--layers`` of the 61 layers, one for each
stage of the trainers by default, and as many ranks and experts as there are. Each rank is a Publisher or Subscriber
with an engine of its own. Every element is compared at every rank, in two versions, and the bytes at the engines with
the plan. What is folded: many ranks share a process, their NICs are TCP over loopback, and so are copies within a host.
So the seconds of the move are those of this machine; those of the full size are the network model's, beside what others
have published and the bound that no schedule can beat.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing as mp
import os
import queue
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import folded
import kimi_k2
import kimi_k2_plan

import torch_mooncake as tm
from torch_mooncake.weights.plan import Plan, plan

GiB = 1 << 30
PUBLISHED = (  # seconds, by others, on their machines
    ("NCCL broadcast, 256 to 256 GPUs", 53.3),
    ("checkpoint-engine, 256 GPUs", 16.0),
    ("one-sided writes of Mooncake's engine, 256 to 256 GPUs", 7.2),
    ("static schedule of one-sided writes, 256 to 128 GPUs", 1.3),
)


def scaled(gib: float, layers: int, engines: int, tp: int) -> tuple[int, folded.Update]:
    """The largest update of which the servers receive no more, and what every width is divided by for it."""
    whole, by = kimi_k2.Shapes(layers=layers), 1
    while whole.parameters * engines / by**2 > gib * GiB:
        by *= 2
    while True:
        update = folded.Update(whole.scaled(by), engines, tp)
        if sum(rank.manifest.nbytes for rank in update.servers()) <= gib * GiB:
            return by, update
        by *= 2
        if by > 512:
            raise SystemExit(f"--gib {gib} is too little for {engines * tp} ranks of all tensors")


class Processes:
    """Of the run: their orders, and what they say."""

    def __init__(self, rounds: int, update: folded.Update) -> None:
        self._context = mp.get_context("spawn")
        self._answers = self._context.Queue()
        self._all: list[Any] = []
        self._orders: list[Any] = []
        self._heard: dict[tuple[int, str], list[Any]] = {}
        self._rounds, self._update = rounds, update
        self.progress: dict[int, int] = {}  # bytes that each process has taken of this round's

    def start(self, role: Any, ranks: int, count: int) -> list[int]:
        """``count`` processes that share the ranks; their numbers."""
        first = len(self._all)
        for i in range(count):
            share = range(ranks * i // count, ranks * (i + 1) // count)
            orders = self._context.SimpleQueue()
            talk = folded.Talk(first + i, orders, self._answers)
            arguments = (role, talk, self._update, share, self._rounds)
            process = self._context.Process(target=folded.run, args=arguments, daemon=True)
            process.start()
            self._all.append(process)
            self._orders.append(orders)
        return list(range(first, first + count))

    def order(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            self._orders[number].put(None)

    def hear(self, kind: str, numbers: Sequence[int], show: Callable[[], None] = lambda: None) -> list[Any]:
        """What each of them says next of this kind."""
        deadline = time.monotonic() + folded.TIMEOUT_S
        while not all(self._heard.get((number, kind)) for number in numbers):
            try:
                number, what, values = self._answers.get(timeout=1)
            except queue.Empty:
                dead = [i for i, process in enumerate(self._all) if process.exitcode]
                if dead or time.monotonic() > deadline:
                    raise SystemExit(f"no {kind}: processes {dead} are gone") from None
                continue
            if what == "failed":
                raise SystemExit(values[0])
            if what == "progress":
                self.progress[number] = values[0]
                show()
            else:
                self._heard.setdefault((number, what), []).append(values)
        return [self._heard[number, kind].pop(0) for number in numbers]

    def end(self) -> None:
        self.order(range(len(self._all)))
        for process in self._all:
            process.join(60)
        if any(process.exitcode != 0 for process in self._all):
            raise SystemExit("a process of the run did not end well")


def flat(lists: Sequence[Sequence[int]]) -> list[int]:
    return [value for values in lists for value in values]


def move(args: argparse.Namespace) -> dict[str, Any]:
    """The scaled update, with real bytes. What was measured and counted, of each round."""
    by, update = scaled(args.gib, args.layers, args.engines, args.tp)
    processes = Processes(args.rounds, update)
    sources, targets = update.trainers(), update.servers()
    giving = processes.start(folded.trainers, len(sources), 1)
    taking = processes.start(folded.servers, len(targets), args.processes)
    made = plan(
        *([rank.manifest for rank in side] for side in (sources, targets)), [r.place for r in (*sources, *targets)]
    )
    print(
        f"moving {sum(rank.manifest.nbytes for rank in targets) / GiB:.2f} GiB to {len(targets)} ranks from "
        f"{len(sources)}: every width divided by {by}, {len(made.wholes)} tensors, {len(made.routes)} routes",
        flush=True,
    )
    processes.hear("ready", taking)
    processes.hear("ready", giving)
    rounds = []
    for version in range(1, args.rounds + 1):
        before = flat([values[0] for values in processes.hear("filled", giving)])
        processes.progress.clear()
        processes.order([*taking, *giving])
        show = _Progress(processes, made, version)
        published = max(values[0] for values in processes.hear("published", giving, show))
        updated = max(values[0] for values in processes.hear("updated", taking, show))
        compared = processes.hear("compared", taking)
        processes.order(giving)
        after = flat([values[0] for values in processes.hear("sent", giving)])
        rounds.append(checked(made, compared, [b - a for a, b in zip(before, after, strict=True)]))
        rounds[-1]["seconds"] = updated - published
        print(told(version, rounds[-1]), flush=True)
    processes.end()
    return {"divided_by": by, "nbytes": made.nbytes, "ranks": [len(sources), len(targets)], "rounds": rounds}


class _Progress:
    """A line now and then."""

    def __init__(self, processes: Processes, made: Plan, version: int) -> None:
        self._processes, self._version = processes, version
        self._nbytes = sum(int(made.traffic(network=network)[1].sum()) for network in (True, False))
        self._next = time.monotonic() + 5

    def __call__(self) -> None:
        if time.monotonic() > self._next:
            self._next = time.monotonic() + 5
            part = sum(self._processes.progress.values()) / self._nbytes
            print(f"  version {self._version}: {part:.0%}", flush=True)


def checked(made: Plan, compared: Sequence[Any], sent: Sequence[int]) -> dict[str, Any]:
    """Compares the counters of the engines with the plan. SystemExit if they do not agree, or an element differs."""
    wrong = [name for _, names, _, _ in compared for name in names]
    if wrong:
        raise SystemExit(f"{len(wrong)} tensors differ: {', '.join(wrong[:10])}")
    planned = [made.traffic(network=network) for network in (True, False)]
    should = (planned[0][1] + planned[1][1])[made.sources :].tolist()
    got, looked = (flat([values[i] for values in compared]) for i in (2, 3))
    for rank, (nbytes, counted, looks) in enumerate(zip(should, got, looked, strict=True)):
        if not nbytes <= counted <= nbytes + looks:
            raise SystemExit(f"server rank {rank} received {counted} bytes, {nbytes} by the plan and {looks} of boards")
    unique, out = int(planned[0][0][: made.sources].sum()), sum(sent)
    if unique != made.nbytes or not unique <= out <= unique + sum(looked):
        raise SystemExit(f"the trainers sent {out} bytes; by the plan {unique}, of {made.nbytes} unique ones")
    return {
        "elements": sum(values[0] for values in compared),
        "received": sum(got),
        "received_planned": sum(should),
        "looked": sum(looked),
        "sent_by_trainers": out,
        "sent_by_trainers_planned": unique,
    }


def told(version: int, found: dict[str, Any]) -> str:
    looks = found["received"] - found["received_planned"]
    boards = found["sent_by_trainers"] - found["sent_by_trainers_planned"]
    return (
        f"  version {version}: {found['seconds']:.1f} s on this machine; {found['elements']} elements, all equal\n"
        f"    the ranks' engines received {found['received_planned']} bytes, the plan's, and {looks} of boards\n"
        f"    the trainers' sent {found['sent_by_trainers_planned']}, each unique byte once, and {boards} of boards"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kimi_k2_plan.arguments(parser)
    parser.add_argument(
        "--gib", type=float, default=0.4, help="bytes that all servers receive (default: %(default)s GiB)"
    )
    parser.add_argument("--layers", type=int, default=8, help="of what is moved, at most 61 (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=2, help="versions to move; 0: plan only (default: %(default)s)")
    parser.add_argument("--processes", type=int, default=2, help="for the servers' ranks (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what was found")
    args = parser.parse_args()
    found = kimi_k2_plan.report(args)
    for what, seconds in PUBLISHED:
        print(f"{'published by others':<28}{seconds:.1f} s, {what}")
    if args.rounds:
        with tempfile.TemporaryDirectory(prefix="tm-", dir="/tmp") as folder:
            os.environ.setdefault("TM_RUNTIME_DIR", folder)
            os.environ.setdefault("TM_POOL", "one-trillion")
            os.environ.setdefault("TM_MEMORY", "256MiB")
            os.environ.setdefault("TM_LINGER_S", "0")
            os.environ.setdefault("TM_LOG_LEVEL", "error")  # at the end, connections to ranks that have gone
            tm.init()
            found["moved"] = move(args)
            tm.close()
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
