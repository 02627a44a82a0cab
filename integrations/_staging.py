"""Pieces of device memory, in host memory for the time of one call: the pool reads and writes host memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch_mooncake.integrations import _memory

Pieces = Sequence[_memory.Piece]


class Staged:
    """``pieces`` as the pool can use them. Where none is on a device they are those that were given."""

    def __init__(self, pieces: Sequence[Pieces], device_of: Callable[[int, int], int | None]) -> None:
        self.pieces: list[list[_memory.Piece]] = []
        self._pairs: list[tuple[Any, Any]] = []  # (device tensor, pinned host tensor)
        for of_key in pieces:
            self.pieces.append([self._host(address, nbytes, device_of(address, nbytes)) for address, nbytes in of_key])

    def _host(self, address: int, nbytes: int, device: int | None) -> _memory.Piece:
        if device is None or not nbytes:
            return address, nbytes
        import torch

        there = _memory.cuda_tensor(address, nbytes, device)
        here = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        self._pairs.append((there, here))
        return here.data_ptr(), nbytes

    def load(self) -> None:
        """From the device, what was queued on its current stream before included."""
        for there, here in self._pairs:
            here.copy_(there, non_blocking=True)
        self._synchronize()

    def store(self) -> None:
        """To the device; done when it returns."""
        for there, here in self._pairs:
            there.copy_(here, non_blocking=True)
        self._synchronize()

    def _synchronize(self) -> None:
        for device in {there.device for there, _ in self._pairs}:
            import torch

            torch.cuda.current_stream(device).synchronize()

    def __enter__(self) -> Staged:
        return self

    def __exit__(self, *exc: object) -> None:
        self._pairs.clear()
