"""The memory under a set of tensors: each byte in one storage."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

from torch_mooncake.errors import Unsupported


class Storages:
    """Storages of `tensors`, in the order in which they are met; one that lies within another is part of it.

    `views`: flat uint8 tensors over them; `addresses` and `nbytes` of each. Unsupported: two overlap and neither holds
    the other.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        found: dict[tuple[int, int], torch.UntypedStorage] = {}
        for tensor in tensors:
            storage = tensor.untyped_storage()
            found.setdefault((storage.data_ptr(), storage.nbytes()), storage)
        kept = [span for span in found if not any(_holds(other, span) for other in found if other != span)]
        by_address = sorted(kept)
        for (address, nbytes), (other, _) in itertools.pairwise(by_address):
            if other < address + nbytes:
                raise Unsupported(f"storages overlap: {nbytes} bytes at {address:#x} and those at {other:#x}")
        self.addresses = tuple(address for address, _ in kept)
        self.nbytes = tuple(nbytes for _, nbytes in kept)
        self.views = [_bytes(found[span]) for span in kept]

    def place(self, tensor: torch.Tensor) -> tuple[int, int]:
        """Index of the storage that holds the tensor, and the byte where its first element is."""
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        span = (address, storage.nbytes())
        for index, known in enumerate(zip(self.addresses, self.nbytes, strict=True)):
            if known == span or _holds(known, span):
                return index, address - known[0] + int(tensor.storage_offset()) * tensor.element_size()
        raise Unsupported(f"a tensor at {address:#x} is in none of the cache's storages")


def _holds(outer: tuple[int, int], inner: tuple[int, int]) -> bool:
    return inner[1] > 0 and outer[0] <= inner[0] and inner[0] + inner[1] <= outer[0] + outer[1]


def _bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
