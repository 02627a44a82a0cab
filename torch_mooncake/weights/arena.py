"""The memory that others read weights from, and what its board says of it.

A node has an address space of its own: its regions, one after another, with gaps between them; a manifest and the
offsets of its tensors say where every element is. An *arena* has slots of shared memory with the tensors one after
another, contiguous, in the dtypes that travel: one region a slot, whose addresses follow from the manifest. One slot
holds the version that is current while the next one comes into another. ``OwnTensors`` are a model's own, where they
lie: as many regions as they have storages, and one slot.
"""

from __future__ import annotations

import abc
import contextlib
import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import torch

import torch_mooncake
from torch_mooncake import _core
from torch_mooncake.clock import deadline_ns, seconds_left
from torch_mooncake.errors import Busy, LayoutMismatch
from torch_mooncake.regions import Region, RegionSlice, RemoteSlice
from torch_mooncake.sharding import contiguous_strides
from torch_mooncake.shared import empty
from torch_mooncake.tensors import DTYPES
from torch_mooncake.transfer import RemoteRegion
from torch_mooncake.weights.board import MAX_SLOTS, SLOT_MEMORY, VIEW, Board
from torch_mooncake.weights.shards import Ints, Manifest, listed

SLOTS = 2  # that an arena has from the beginning
_ALIGN = 64
STAGED = 1 << 60  # addresses from here on are in staging memory, not in a node's own


def offsets_of(manifest: Manifest) -> tuple[Ints, int]:
    """(offset of each local tensor in a slot, size of the slot), in bytes. ``manifest``: a packed one."""
    found = np.empty(len(manifest.locals), np.int64)
    at = 0
    for i, local in enumerate(manifest.locals):
        found[i] = at
        at += -(-math.prod(local.shape) * DTYPES[local.dtype] // _ALIGN) * _ALIGN
    return found, at


class Memory(abc.ABC):
    """What a node has that others may read. ``close()`` when nobody shall read it any more."""

    def __init__(self, engine: torch_mooncake.Engine, manifest: Manifest, offsets: Ints, bases: Ints) -> None:
        self.manifest = manifest
        self.offsets = offsets  # of the locals' first elements, in the node's address space; bytes
        self.bases = bases  # of the regions, ascending
        self.slots: list[list[Region]] = []
        self.board = Board()
        self.board_region = engine.register(self.board.memory, writable=False, label="weights board")
        self._engine = engine

    def take(self, slot: int, timeout: float = 0.0) -> bool:
        """Whether nobody views the slot; then nobody begins to until it is offered again."""
        return True

    @abc.abstractmethod
    def offer(self, slot: int) -> None:
        """What is in the slot may be viewed, where that is possible."""

    @abc.abstractmethod
    def copy(self, slot: int, source: int, target: int, nbytes: int) -> None:
        """Within a slot."""

    def addresses(self, slot: int, at: Ints, staging: int = 0) -> Ints:
        """Addresses in this process of bytes of the node's address space. ``staging``: address of what is STAGED."""
        regions = self.slots[slot]
        firsts = np.array([region._core.address for region in regions], np.int64)
        if not len(regions):
            return at - STAGED + staging
        index = np.searchsorted(self.bases, at, side="right") - 1
        return np.where(at >= STAGED, at - STAGED + staging, firsts[index] + at - self.bases[index])

    def close(self, timeout: float = 30) -> None:
        """Busy if somebody who does not answer has some of it mapped after ``timeout`` seconds; the rest is closed."""
        deadline = deadline_ns(timeout)
        with contextlib.ExitStack() as all_of_them:
            for region in (self.board_region, *(region for slot in self.slots for region in slot)):
                all_of_them.callback(lambda region: self._engine.deregister(region, seconds_left(deadline)), region)


class Arena(Memory):
    def __init__(self, engine: torch_mooncake.Engine, manifest: Manifest) -> None:
        offsets, nbytes = offsets_of(manifest)
        super().__init__(engine, manifest, offsets, np.zeros(1, np.int64))
        self.nbytes = max(nbytes, 1)
        self._memory: list[torch.Tensor] = []
        self._offered: list[Region | None] = []
        for _ in range(SLOTS):
            self._add()

    def _add(self) -> Region:
        memory = empty((self.nbytes,), torch.uint8)
        self._memory.append(memory)
        region = self._engine.register(memory, writable=False, label="weights")
        self.slots.append([region])
        self._offered.append(None)
        return region

    def grow(self) -> int | None:
        """One more slot; None if there are as many as there may be."""
        slot = len(self.slots)
        if slot == MAX_SLOTS:
            return None
        self.board.describe(slot, SLOT_MEMORY, self._add().descriptor())
        return slot

    def memory(self, slot: int) -> torch.Tensor:
        """All of a slot, uint8."""
        return self._memory[slot]

    def views(self, slot: int) -> dict[str, torch.Tensor]:
        """The local tensors in a slot, by name."""
        return views_of(self._memory[slot], self.manifest, self.offsets)

    def copy(self, slot: int, source: int, target: int, nbytes: int) -> None:
        memory = self._memory[slot]
        memory[target : target + nbytes] = memory[source : source + nbytes]

    def offer(self, slot: int) -> None:
        region = self._offered[slot] = self._engine.register(
            self._memory[slot], writable=False, label="weights to view"
        )
        self.board.describe(slot, VIEW, region.descriptor())

    def take(self, slot: int, timeout: float = 0.0) -> bool:
        region = self._offered[slot]
        if region is None:
            return True
        self.board.describe(slot, VIEW, b"")
        try:
            self._engine.deregister(region, timeout)
        except Busy:  # in quarantine until its viewers let it go, or die
            return False
        self._offered[slot] = None
        return True

    def close(self, timeout: float = 30) -> None:
        for slot in range(len(self.slots)):
            self.take(slot)
        super().close(timeout)


class OwnTensors(Memory):
    """Tensors where they lie: those of ``tensors`` that ``manifest`` has. ``staged``: names of those that others see a
    copy of, packed as in an arena, which ``stage`` makes; with ``hidden`` they see nothing of them."""

    def __init__(
        self,
        engine: torch_mooncake.Engine,
        manifest: Manifest,
        tensors: Mapping[str, torch.Tensor],
        staged: Sequence[str] = (),
        *,
        hidden: bool = False,
    ) -> None:
        here = [local for local in manifest.locals if local.name not in staged]
        spans = _spans([tensors[local.name] for local in here])
        memories = [_bytes_of(tensor, first, last) for tensor, first, last in spans.values()]
        places: dict[str, int] = {}
        bases, at = [], 0
        for key, (_, first, last) in spans.items():
            bases.append(at)
            for local in here:
                tensor = tensors[local.name]
                if tensor.numel() and tensor.untyped_storage().data_ptr() == key:
                    places[local.name] = at + tensor.data_ptr() - first
            at = _after(at, last - first)
        self.copies: dict[str, torch.Tensor] = {}  # of the staged ones, to be made anew by whoever publishes
        if staged and not hidden:
            there = Manifest.of((), [local for local in manifest.locals if local.name in staged], ())
            offsets, nbytes = offsets_of(there)
            memory = empty((max(nbytes, 1),), torch.uint8)
            self.copies = views_of(memory, there, offsets)
            memories.append(memory)
            bases.append(at)
            places.update(zip(self.copies, (offsets + at).tolist(), strict=True))
        found = np.array([places.get(local.name, STAGED) for local in manifest.locals], np.int64)
        super().__init__(engine, manifest, found, np.array(bases, np.int64))
        self._spans = [(base, memory) for base, memory in zip(bases, memories, strict=True)]
        self.slots.append([engine.register(memory, writable=False, label="weights") for memory in memories])

    def offer(self, slot: int) -> None:
        pass  # the model's own tensors are not viewed

    def copy(self, slot: int, source: int, target: int, nbytes: int) -> None:
        self._bytes(target, nbytes)[:] = self._bytes(source, nbytes)

    def _bytes(self, at: int, nbytes: int) -> torch.Tensor:
        base, memory = self._spans[int(np.searchsorted(self.bases, at, side="right")) - 1]
        return memory[at - base : at - base + nbytes]


def _after(at: int, nbytes: int) -> int:
    """Where a region begins that follows one of that size: not right behind it, so that no range goes over both."""
    return at + -(-nbytes // _ALIGN) * _ALIGN + _ALIGN


def _spans(tensors: Sequence[torch.Tensor]) -> dict[int, tuple[torch.Tensor, int, int]]:
    """Of each storage, by its address: a tensor in it, and the addresses between which the tensors lie."""
    found: dict[int, tuple[torch.Tensor, int, int]] = {}
    for tensor in tensors:
        if not tensor.numel():
            continue
        first = tensor.data_ptr()
        length = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
        last = first + length * tensor.element_size()
        key = tensor.untyped_storage().data_ptr()
        _, low, high = found.get(key, (tensor, first, last))
        found[key] = tensor, min(low, first), max(high, last)
    return found


def _bytes_of(tensor: torch.Tensor, first: int, last: int) -> torch.Tensor:
    storage = tensor.untyped_storage()
    return torch.empty(0, dtype=torch.uint8).set_(storage, first - storage.data_ptr(), (last - first,), (1,))


def views_of(memory: torch.Tensor, manifest: Manifest, offsets: Ints) -> dict[str, torch.Tensor]:
    """The packed locals of ``manifest`` in a slot's bytes, by name."""
    found = {}
    typed: dict[str, torch.Tensor] = {}  # the slot, in each dtype: one view of it for each tensor, not three
    for local, offset in zip(manifest.locals, offsets.tolist(), strict=True):
        itemsize = DTYPES[local.dtype]
        whole = typed.get(local.dtype)
        if whole is None:
            whole = typed[local.dtype] = memory[: len(memory) // itemsize * itemsize].view(getattr(torch, local.dtype))
        first = whole.storage_offset() + offset // itemsize
        found[local.name] = whole.as_strided(local.shape, contiguous_strides(local.shape), first)
    return found


def pairs(
    local: tuple[Sequence[Region], Ints, Ints], remote: tuple[Sequence[RemoteRegion], Ints, Ints], nbytes: Ints
) -> list[tuple[RegionSlice, RemoteSlice]]:
    """Ranges as the engine takes them: of each side its regions, their bases, and the ranges' addresses."""
    (here, bases, to), (there, far_bases, from_) = local, remote
    mine = np.searchsorted(bases, to, side="right") - 1
    theirs = np.searchsorted(far_bases, from_, side="right") - 1
    rows = zip(
        mine.tolist(), (to - bases[mine]).tolist(), theirs.tolist(), (from_ - far_bases[theirs]).tolist(),
        nbytes.tolist(), strict=True,
    )  # fmt: skip
    return [(RegionSlice(here[i], a, n), RemoteSlice(there[j], b, n)) for i, a, j, b, n in rows]


def check_shapes(here: Mapping[str, torch.Tensor], there: Mapping[str, torch.Tensor], names: Iterable[str]) -> None:
    """LayoutMismatch, unless both have all of the names, in the same shapes."""
    wrong = []
    for name in names:
        if name not in here or name not in there or here[name].shape != there[name].shape:
            shapes = [str(list(of[name].shape)) if name in of else "not there" for of in (here, there)]
            wrong.append(f"{name}: {shapes[0]}, and {shapes[1]} when the layout was made")
    if wrong:
        raise LayoutMismatch(listed("the tensors are not those that they were", wrong))


@torch.no_grad()
def copy_tensors(targets: Mapping[str, torch.Tensor], values: Mapping[str, torch.Tensor]) -> int:
    """Copies values into the targets of the same names (converting dtypes); bytes of the targets. LayoutMismatch before
    anything is written: a target is not there, or has another shape."""
    check_shapes(targets, values, values)
    nbytes = 0
    plain: list[tuple[int, int, int]] = []  # by the library's own threads, which are faster at much
    for name, value in values.items():
        target = targets[name]
        nbytes += target.nbytes
        if _is_plain(target) and _is_plain(value) and target.dtype == value.dtype and target.shape == value.shape:
            plain.append((target.data_ptr(), value.data_ptr(), target.nbytes))
        else:
            target.copy_(value)
    if plain:
        _core.copy_ranges(*np.array(plain, np.int64).T.copy())
    return nbytes


def _is_plain(tensor: torch.Tensor) -> bool:
    return type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.is_cpu and tensor.is_contiguous()
