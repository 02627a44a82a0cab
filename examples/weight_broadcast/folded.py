"""The ranks of the 1T run in a few processes: each rank has its own engine, tensors, Publisher or Subscriber.

What a tensor holds is a stretch of one table of random bytes; which one, its name and the version say. So everybody
knows every element without asking, and no two tensors or versions are alike.
"""

from __future__ import annotations

import time
import traceback
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import kimi_k2
import numpy as np
import torch

import torch_mooncake as tm
from torch_mooncake import weights
from torch_mooncake.weights.plan import Place
from torch_mooncake.weights.shards import Manifest, Whole

TABLE = 64 << 20
TIMEOUT_S = 600
_REPORT_S = 1.0


@dataclass(frozen=True)
class Rank:
    number: int  # among the trainers, or in its engine
    manifest: Manifest
    place: Place


@dataclass(frozen=True)
class Update:
    """From whom to whom. Every process makes the manifests for itself: that is faster than to send them."""

    shapes: kimi_k2.Shapes
    engines: int
    tp: int

    def trainers(self) -> list[Rank]:
        manifests = kimi_k2.trainers(self.shapes)
        places = kimi_k2.places(len(manifests), "trainer")
        return [Rank(i, *pair) for i, pair in enumerate(zip(manifests, places, strict=True))]

    def servers(self) -> list[Rank]:
        manifests = kimi_k2.servers(self.shapes, instances=self.engines, tp=self.tp)
        places = kimi_k2.places(len(manifests), "server")
        return [Rank(i % self.tp, *pair) for i, pair in enumerate(zip(manifests, places, strict=True))]


class Contents:
    def __init__(self) -> None:
        self._table = np.random.default_rng(7).integers(0, 256, TABLE, np.uint8)

    def whole(self, whole: Whole, version: int) -> np.ndarray[Any, Any]:
        """The elements as unsigned integers of their size."""
        dtype = np.dtype(f"u{getattr(torch, whole.dtype).itemsize}")
        nbytes = int(np.prod(whole.shape)) * dtype.itemsize
        at = zlib.crc32(f"{whole.name} {version}".encode()) % (TABLE - nbytes) // 8 * 8
        return self._table[at : at + nbytes].view(dtype).reshape(whole.shape)

    def pieces(
        self, rank: Rank, tensors: dict[str, torch.Tensor], version: int
    ) -> Iterator[tuple[str, np.ndarray[Any, Any], np.ndarray[Any, Any]]]:
        """(name, elements in the rank's memory, what they should be) of every piece of its tensors."""
        flat = {name: tensor.view(-1).view(torch.uint8).numpy() for name, tensor in tensors.items()}
        for piece in rank.manifest.pieces():
            whole, name = rank.manifest.wholes[piece.whole], rank.manifest.locals[piece.local].name
            inside = tuple(slice(a, a + n) for a, n in zip(piece.start, piece.size, strict=True))
            right = self.whole(whole, version)[inside]
            here = np.ndarray(
                piece.size, right.dtype, flat[name].data, piece.offset * right.itemsize,
                tuple(stride * right.itemsize for stride in piece.stride),
            )  # fmt: skip
            yield name, here, right


def tensors_of(rank: Rank) -> dict[str, torch.Tensor]:
    return {local.name: torch.zeros(local.shape, dtype=getattr(torch, local.dtype)) for local in rank.manifest.locals}


def engine_of(rank: Rank, what: str) -> tm.Engine:
    """TCP even within a host, so that each end counts."""
    host = rank.place.host
    return tm.Engine(transports=("tcp",), host_id=host, name=f"{what} {host}.{rank.place.nic}", lanes=1, io_threads=1)


def counted(engines: list[tm.Engine], direction: str) -> list[int]:
    return [sum(engine.stats()[direction].values()) for engine in engines]


@dataclass(frozen=True)
class Talk:
    """What a process hears from the one that started it, and says to it."""

    number: int
    orders: Any  # queues
    answers: Any

    def await_order(self) -> None:
        self.orders.get()

    def say(self, kind: str, *values: Any) -> None:
        self.answers.put((self.number, kind, values))


def run(role: Callable[..., None], talk: Talk, *arguments: Any) -> None:
    """The whole life of a process."""
    torch.set_num_threads(1)
    tm.init()
    try:
        role(talk, *arguments)
    except BaseException:
        talk.say("failed", traceback.format_exc())
        raise
    tm.close()


def trainers(talk: Talk, update: Update, share: range, rounds: int) -> None:
    """Says "ready"; of each round "filled" (bytes that each rank has sent before), "published" (when), "sent"."""
    everybody = update.trainers()
    ranks, world, contents = [everybody[i] for i in share], len(everybody), Contents()
    held = [tensors_of(rank) for rank in ranks]
    engines = [engine_of(rank, "trainer") for rank in ranks]
    publishers = [
        weights.Publisher(
            "kimi-k2", tensors, layout=kimi_k2.trainer_layout(update.shapes, rank.number), rank=rank.number,
            world=world, engine=engine, place=rank.place, patience_s=TIMEOUT_S,
        )
        for rank, tensors, engine in zip(ranks, held, engines, strict=True)
    ]  # fmt: skip
    talk.say("ready", len(ranks))
    with ThreadPoolExecutor(len(ranks)) as threads:
        for version in range(1, rounds + 1):
            for rank, tensors in zip(ranks, held, strict=True):
                for _, here, right in contents.pieces(rank, tensors, version):
                    here[...] = right
            talk.say("filled", counted(engines, "bytes_sent"))
            talk.await_order()
            publish = partial(weights.Publisher.publish, step=version, timeout=TIMEOUT_S)
            list(threads.map(publish, publishers))
            talk.say("published", time.monotonic())
            talk.await_order()  # everybody has it
            talk.say("sent", counted(engines, "bytes_sent"))
    talk.await_order()
    for publisher, engine in zip(publishers, engines, strict=True):
        publisher.close()
        engine.close()


def servers(talk: Talk, update: Update, share: range, rounds: int) -> None:
    """Takes each version and compares every element. Says "ready"; now and then "progress" (bytes so far); of each
    round "updated" (when the last rank had it) and "compared" (elements, tensors that differ, of each rank the bytes
    that its engine received and those of them that were looks at boards)."""
    everybody = update.servers()
    ranks, contents = [everybody[i] for i in share], Contents()
    held = [tensors_of(rank) for rank in ranks]
    engines = [engine_of(rank, "server") for rank in ranks]
    subscribers = [
        weights.Subscriber(
            "kimi-k2", tensors, layout=kimi_k2.server_layout(update.shapes, rank.number, tp=update.tp), flip="swap",
            engine=engine, place=rank.place, patience_s=TIMEOUT_S,
        )
        for rank, tensors, engine in zip(ranks, held, engines, strict=True)
    ]  # fmt: skip
    talk.say("ready", len(ranks))
    for version in range(1, rounds + 1):
        talk.await_order()
        received = counted(engines, "bytes_received")
        for subscriber in subscribers:
            while subscriber.version < version:
                try:
                    subscriber.update(timeout=_REPORT_S)
                except tm.DeadlineExceeded:
                    every = [s.progress for s in subscribers]
                    talk.say("progress", sum(p.bytes_done for p in every if p is not None and p.version == version))
        talk.say("updated", time.monotonic())
        looked = [s.progress.bytes_looked if s.progress is not None else 0 for s in subscribers]
        got = [now - before for now, before in zip(counted(engines, "bytes_received"), received, strict=True)]
        elements, wrong = 0, set()
        for rank, tensors in zip(ranks, held, strict=True):
            for name, here, right in contents.pieces(rank, tensors, version):
                elements += here.size
                if not np.array_equal(here, right):
                    wrong.add(f"{rank.place.host}.{rank.place.nic} {name}")
        talk.say("compared", elements, sorted(wrong), got, looked)
    talk.await_order()
    for subscriber, engine in zip(subscribers, engines, strict=True):
        subscriber.close()
        engine.close()
