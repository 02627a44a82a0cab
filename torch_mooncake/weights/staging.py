"""Bounded memory for bytes that cannot go straight into a tensor: of another dtype, on a GPU, in single elements."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from torch_mooncake.errors import InvalidArgument
from torch_mooncake.regions import Region
from torch_mooncake.shared import empty
from torch_mooncake.transfer import Engine
from torch_mooncake.weights.arena import STAGED
from torch_mooncake.weights.ranges import Apply
from torch_mooncake.weights.shards import Ints, Local


class Staging:
    """Blocks, each for one chunk. ``budget``: bytes of all of them. For one thread.

    ``peak``: the most bytes that were in use at one time.
    """

    def __init__(
        self, engine: Engine, budget: int, locals: Sequence[Local], tensors: Mapping[str, torch.Tensor]
    ) -> None:
        self._engine, self._budget, self._locals, self._tensors = engine, budget, locals, tensors
        self._block = 0  # bytes
        self._memory: torch.Tensor | None = None
        self._region: Region | None = None
        self._free: list[int] = []
        self._used = 0
        self.peak = 0

    def prepare(self, sizes: Sequence[int]) -> None:
        """Chunks of at most these sizes are coming. InvalidArgument: the largest is larger than the budget."""
        largest = max(sizes, default=0)
        if largest > self._budget:
            raise InvalidArgument(f"staging of {self._budget} bytes cannot hold a chunk of {largest}")
        if largest > self._block:
            self.close()
            count = min(self._budget // largest, len(sizes))
            self._block = largest
            self._memory = empty((count * largest,), torch.uint8)
            self._region = self._engine.register(self._memory, writable=False, label="weights staging")
            self._free = list(range(count))

    def take(self) -> int | None:
        """A block; None if all are in use."""
        if not self._free:
            return None
        self._used += self._block
        self.peak = max(self.peak, self._used)
        return self._free.pop()

    def give_back(self, block: int) -> None:
        self._used -= self._block
        self._free.append(block)

    def address(self, block: int) -> int:
        assert self._region is not None
        return int(self._region._core.address) + block * self._block

    def beside(
        self, regions: Sequence[Region], bases: Ints, at: Ints, block: int
    ) -> tuple[Sequence[Region], Ints, Ints]:
        """Regions, bases and addresses of a chunk that goes into a block, or into it and into these regions."""
        assert self._region is not None
        return (
            [*regions, self._region],
            np.append(bases, STAGED),
            np.where(at >= STAGED, at + block * self._block, at),
        )

    @torch.no_grad()
    def apply(self, block: int, applies: Sequence[Apply]) -> None:
        """Each box to its place, converted, and the block is free."""
        assert self._memory is not None
        for box in applies:
            dtype = getattr(torch, box.dtype)
            count = 1
            for n in box.size:
                count *= n
            first = block * self._block + box.at
            value = self._memory[first : first + count * dtype.itemsize].view(dtype).view(box.size)
            tensor = self._tensors[self._locals[box.local].name]
            target = torch.as_strided(tensor, box.size, box.stride, tensor.storage_offset() + box.element)
            target.copy_(value)
        self.give_back(block)

    def close(self) -> None:
        if self._region is not None:
            self._engine.deregister(self._region)
        self._region, self._memory, self._free, self._block = None, None, [], 0
