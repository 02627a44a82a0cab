"""``torch-mooncake weights publish show``: checkpoints on disk as published weights, and who has which version.

These need torch, which is imported when one of them runs.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import TYPE_CHECKING, Any

from torch_mooncake.cli import emit, human, seconds
from torch_mooncake.cli.copy import Progress
from torch_mooncake.cli.objects import connect
from torch_mooncake.errors import DeadlineExceeded, KeyNotFound

if TYPE_CHECKING:
    from torch_mooncake.weights import Contents, Publisher

_LOOK_S = 0.1  # between two looks at who has it
_DIRECT, _THROUGH = "weights.direct/", "weights/"


def add_commands(commands: Any, common: argparse.ArgumentParser) -> None:
    weights = commands.add_parser("weights", help="publish a checkpoint on disk; show who has which version")
    actions = weights.add_subparsers(dest="action", required=True, metavar="ACTION")
    publish = actions.add_parser(
        "publish",
        parents=[common],
        help="publish a checkpoint's tensors to subscribers, and stay while they are read",
        description="Reads a checkpoint (a safetensors file, a folder of them, a torch.distributed.checkpoint folder), "
        "makes it the current version of NAME, and serves it: until Ctrl-C, or as the options say.",
    )
    publish.add_argument("name")
    publish.add_argument("path")
    publish.add_argument("--step", type=int, help="training step, told to subscribers")
    publish.add_argument("--prefix", default="", help='only tensors whose names begin so, without it (e.g. "model.")')
    publish.add_argument("--subset", action="store_true", help="subscribers may have more tensors (adapters)")
    publish.add_argument(
        "--rank", default="0/1", metavar="I/N", help="this is the i-th of n commands that share the files (0/1)"
    )
    until = publish.add_mutually_exclusive_group()
    until.add_argument("--for", type=seconds, dest="stay", metavar="SECONDS", help="serve so long")
    until.add_argument(
        "--until-read", type=int, metavar="N", help="serve until n subscribers have it all, which then serve others"
    )
    publish.set_defaults(run=_publish, refuse=publish.error)
    show = actions.add_parser(
        "show",
        parents=[common],
        help="the current version, its sources and targets, and who has all of it",
        description="Without a name: the names of all weights in the pool. Exit status 3 if nothing is published.",
    )
    show.add_argument("name", nargs="?")
    show.set_defaults(run=_show)


def _publish(args: argparse.Namespace) -> None:
    rank, world = _rank(args)
    from torch_mooncake.weights import Checkpoint, Publisher

    source = Checkpoint(args.path, prefix=args.prefix)
    with (
        connect(args, start=True) as pool,
        Publisher(args.name, source, rank=rank, world=world, subset=args.subset, pool=pool) as publisher,
    ):
        assert publisher.source is not None  # the checkpoint's
        progress = Progress(f"read {args.path}", publisher.source.manifest.nbytes)
        publisher.source.progress = progress.add
        published = publisher.publish(step=args.step, timeout=args.timeout)
        progress.close()
        document = {
            "name": args.name,
            "version": published.serial,
            "step": published.step,
            "tensors": len(source.wholes),
            "nbytes": published.nbytes,
            "seconds": published.seconds,
        }
        rate = human(int(published.nbytes / max(published.seconds, 1e-9)))
        text = f"version {published.serial} of {args.name}: {human(published.nbytes)} at {rate}/s"
        emit(args, document, text)
        sys.stdout.flush()  # who reads it through a pipe learns that it is published
        _serve(args, publisher, rank)


def _rank(args: argparse.Namespace) -> tuple[int, int]:
    first, _, second = args.rank.partition("/")
    if not (first.isdecimal() and second.isdecimal() and int(first) < int(second)):
        args.refuse(f"--rank is i/n, such as 0/4, not {args.rank!r}")
    return int(first), int(second)


def _serve(args: argparse.Namespace, publisher: Publisher, rank: int) -> None:
    end = None if args.stay is None else time.monotonic() + args.stay
    asked = time.monotonic()
    while end is None or time.monotonic() < end:
        if args.until_read is not None:
            readers = sum(publisher.delivered().values())
            if readers >= args.until_read:
                return
            if time.monotonic() - asked > args.timeout:
                raise DeadlineExceeded(f"{readers} of {args.until_read} subscribers have it after {args.timeout} s")
        time.sleep(_LOOK_S)


def _show(args: argparse.Namespace) -> None:
    with connect(args) as pool:
        if args.name is None:
            heads = [key.removeprefix(_DIRECT) for key in pool.keys(_DIRECT, timeout=args.timeout)]
            names = {key.removesuffix("/head") for key in heads if key.endswith("/head")}
            names |= {
                name for key in pool.keys(_THROUGH, timeout=args.timeout) if "/" not in (name := key[len(_THROUGH) :])
            }
            emit(args, sorted(names), "\n".join(sorted(names)))
            return
        found = pool.get(_THROUGH + args.name, default=None, timeout=args.timeout)
        if found is not None:
            document = {
                "name": args.name,
                "way": "through the pool",
                "version": found["serial"],
                "step": found["step"],
                "tensors": len(found["specs"]),
            }
            emit(args, document, json.dumps(document, indent=1))
            return
        try:
            from torch_mooncake.weights import contents

            known = contents(args.name, pool=pool)
        except KeyNotFound:
            raise KeyNotFound(f"no weights {args.name!r} are published in this pool") from None
    emit(args, _document(args.name, known), _text(args.name, known))


def _document(name: str, found: Contents) -> dict[str, Any]:
    return {
        "name": name,
        "way": "directly",
        "version": found.version,
        "step": found.step,
        "subset": found.subset,
        "tensors": len(found.tensors),
        "nbytes": found.nbytes,
        "sources": [holder.__dict__ for holder in found.sources],
        "targets": [holder.__dict__ for holder in found.targets],
    }


_HAS = {True: "has it", False: "has not all of it", None: "gone, or does not answer"}


def _text(name: str, found: Contents) -> str:
    step = "" if found.step is None else f" (step {found.step})"
    lines = [f"{name}: version {found.version}{step}, {len(found.tensors)} tensors, {human(found.nbytes)}"]
    for what, holders in (("source", found.sources), ("target", found.targets)):
        lines += [
            f"  {what} {holder.name or holder.uid[:12]}: {human(holder.nbytes)} on {holder.host or '?'} "
            f"NIC {holder.nic}, {_HAS[holder.has]}"
            for holder in holders
        ]
    return "\n".join(lines)
