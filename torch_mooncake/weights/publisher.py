"""The trainers' side of the direct way: from the trainers' memory to the subscribers', and on between those."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, Literal

import torch

import torch_mooncake
from torch_mooncake import sharding
from torch_mooncake.errors import DeadlineExceeded, InvalidArgument, LayoutMismatch, Unsupported
from torch_mooncake.transfer import Engine
from torch_mooncake.weights.arena import SLOTS, Arena, copy_tensors
from torch_mooncake.weights.atoms import fitting
from torch_mooncake.weights.describe import described
from torch_mooncake.weights.layout import Layout
from torch_mooncake.weights.manifest import tensors_of
from torch_mooncake.weights.members import Head, Links, Member, Room, own_place
from torch_mooncake.weights.plan import Place
from torch_mooncake.weights.publish import Published

_WAIT_S = 5.0  # for the head at a time


class Publisher:
    """One trainer rank's part of the weights called ``name``. All ranks make one and call ``publish`` in step.

    ``layout``: as for ``describe``. ``rank`` and ``world``: of the trainers; all ranks' tensors together are the
    weights. ``subset``: subscribers may have more tensors than these (adapters). ``engine``: what others read from, to
    be reached by all subscribers; by default one of its own, which processes of this host reach. ``place``: this
    host, and which of its NICs carries this rank. ``pool``: where they meet; by default the process's own pool.

    It has two copies of this rank's tensors, in shared memory: what subscribers read is never what an optimiser
    writes. For one thread; a context manager.
    """

    def __init__(
        self,
        name: str,
        model_or_state_dict: torch.nn.Module | Mapping[str, torch.Tensor],
        *,
        layout: Layout | None = None,
        rank: int = 0,
        world: int = 1,
        subset: bool = False,
        engine: Engine | None = None,
        place: Place | None = None,
        pool: Any = None,
    ) -> None:
        if not 0 <= rank < world:
            raise InvalidArgument(f"rank {rank} of {world}")
        self._room = Room(name, torch_mooncake if pool is None else pool)
        self._model, self._rank, self._world, self._subset = model_or_state_dict, rank, world, subset
        manifest = described(tensors_of(model_or_state_dict), layout, packed=True)
        self._own_engine = engine is None
        self._engine = Engine(name=f"trainer {rank} of {name}") if engine is None else engine
        self._arena = Arena(self._engine, manifest)
        self._member = Member.of(self._engine, self._arena, own_place(place), world > 1)
        self._links = Links(self._engine)
        self._fits: dict[str, bool] = {}  # targets, by uid
        head = self._room.head()
        self.version = head.version if head is not None else 0  # of what is current
        self._room.enter(self._member, target=False)

    def publish(
        self, *, step: int | None = None, mode: Literal["auto", "full", "delta"] = "auto", timeout: float = 120
    ) -> Published:
        """Makes the tensors as they are now the current version, and returns when it is: when all ranks have copied
        theirs. It waits for no subscriber.

        DeadlineExceeded: not all ranks came within ``timeout`` seconds; the version before stays the current one.
        LayoutMismatch: a tensor has not the shape any more that it was made with. Unsupported: ``mode="delta"``.
        """
        if mode not in ("auto", "full"):
            raise Unsupported(f"weights are published in full, not as {mode!r}")
        started = time.perf_counter()
        deadline = time.monotonic() + timeout
        version = self.version + 1
        slot = version % SLOTS
        here = local_tensors(self._model)
        views = self._arena.views(slot)
        for name, view in views.items():
            if name not in here or here[name].shape != view.shape:
                raise LayoutMismatch(f"{name}: {list(view.shape)} when the publisher was made, not any more")
        self._arena.begin(slot)
        copy_tensors(views, {name: here[name] for name in views})
        self._arena.announce(slot, version)
        self._arena.complete(slot)
        self._room.say_ready(self._rank, self._member.uid, version)
        if self._rank == 0:
            self._flip(version, step, deadline, timeout)
        else:
            self._await_flip(version, deadline, timeout)
        self.version = version
        return Published(version, step, self._arena.manifest.nbytes, time.perf_counter() - started)

    def _flip(self, version: int, step: int | None, deadline: float, timeout: float) -> None:
        sources: list[Member] = []
        while len(sources) < self._world:
            rank = len(sources)
            uid = self._member.uid if rank == 0 else self._room.ready(rank, version)
            member = None if uid is None else self._room.member(uid)
            if member is not None:
                sources.append(member)
            elif time.monotonic() > deadline:
                raise DeadlineExceeded(f"rank {rank} did not publish version {version} within {timeout} s")
            else:
                time.sleep(0.001)
        there = [member for uid in self._room.targets() if (member := self._there(uid)) is not None]
        self._judge(there, sources)
        targets = [member.uid for member in there if self._fits[member.uid]]
        self._room.replace_head(
            Head(version, step, tuple(member.uid for member in sources), tuple(targets), self._subset)
        )

    def _there(self, uid: str) -> Member | None:
        """None if the target has left or is gone."""
        member = self._room.member(uid)
        if member is None:
            return None
        alive = self._links.alive(member)
        if not alive:
            self._links.drop(uid)
            if alive is False:
                self._room.leave(uid)  # its process is gone; one that is not enters again when it finds out
        return member if alive else None

    def _judge(self, targets: list[Member], sources: list[Member]) -> None:
        """Which of them can take these weights. Who cannot is told so when it tries by itself."""
        for part in (False, True):
            some = [member for member in targets if member.part == part and member.uid not in self._fits]
            manifests = [member.manifest for member in some]
            fits = fitting([source.manifest for source in sources], manifests, subset=self._subset, partial=part)
            self._fits.update(zip((member.uid for member in some), fits, strict=True))

    def _await_flip(self, version: int, deadline: float, timeout: float) -> None:
        seen = None
        while (head := self._room.head()) is None or head.version < version:
            if time.monotonic() > deadline:
                raise DeadlineExceeded(f"rank 0 did not publish version {version} within {timeout} s")
            seen = self._room.await_head(seen, max(0.0, min(deadline - time.monotonic(), _WAIT_S))) or seen

    def delivered(self) -> dict[str, bool]:
        """Of the targets of the current version: whether each has all of it. Those that are gone have not."""
        head = self._room.head()
        found: dict[str, bool] = {}
        for uid in head.targets if head is not None else ():
            member = self._room.member(uid)
            found[uid] = member is not None and self._links.has(member, self.version)
        return found

    def close(self) -> None:
        """What was published can be had no more, except from subscribers."""
        self._links.close()
        self._room.leave(self._member.uid)
        self._arena.close()
        if self._own_engine:
            self._engine.close()

    def __enter__(self) -> Publisher:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def local_tensors(model_or_state_dict: torch.nn.Module | Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors of this process's memory, by name: of a DTensor, its local shard."""
    found = tensors_of(model_or_state_dict)
    return {
        name: tensor.to_local() if sharding.is_dtensor(tensor) else tensor  # type: ignore[attr-defined]
        for name, tensor in found.items()
    }
