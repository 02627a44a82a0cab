"""Registered memory that packed pages pass through: pieces are taken and given back."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import torch

from torch_mooncake.errors import InvalidArgument
from torch_mooncake.shared import empty

if TYPE_CHECKING:
    from torch_mooncake.transfer import Engine

_ALIGN = 256


class Staging:
    """`nbytes` of memory on `device`, registered with an engine (`region`: for us alone). Pieces are taken first-fit.
    Any thread."""

    def __init__(self, engine: Engine, nbytes: int, device: torch.device, *, label: str) -> None:
        nbytes = -(-nbytes // _ALIGN) * _ALIGN
        if device.type == "cpu":
            self.memory = empty((nbytes,), dtype=torch.uint8, shared=True)
        else:
            self.memory = torch.empty((nbytes,), dtype=torch.uint8, device=device)
        self.nbytes = nbytes
        self.region = engine.register(self.memory, readable=False, writable=False, label=label)
        self._changed = threading.Condition()
        self._free: list[tuple[int, int]] = [(0, nbytes)]  # (offset, nbytes), ascending
        self._taken: dict[int, int] = {}

    def try_take(self, nbytes: int) -> int | None:
        """Offset of a piece; None if there is no room now. InvalidArgument if there never is."""
        size = max(_ALIGN, -(-nbytes // _ALIGN) * _ALIGN)
        if size > self.nbytes:
            raise InvalidArgument(f"{nbytes} bytes do not fit into {self.nbytes} bytes of staging memory")
        with self._changed:
            for place, (offset, room) in enumerate(self._free):
                if room >= size:
                    self._free[place : place + 1] = [(offset + size, room - size)] if room > size else []
                    self._taken[offset] = size
                    return offset
        return None

    def give_back(self, offset: int) -> None:
        with self._changed:
            size = self._taken.pop(offset, None)
            if size is None:
                raise InvalidArgument(f"offset {offset} of the staging memory is not taken")
            self._free.append((offset, size))
            self._free.sort()
            merged: list[tuple[int, int]] = []
            for start, length in self._free:
                if merged and sum(merged[-1]) == start:
                    merged[-1] = (merged[-1][0], merged[-1][1] + length)
                else:
                    merged.append((start, length))
            self._free = merged
            self._changed.notify_all()

    @property
    def taken(self) -> int:
        """Pieces that are out."""
        with self._changed:
            return len(self._taken)
