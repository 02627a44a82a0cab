"""Both sides of sessions for the tests: engines, caches of any tensor-parallel rank, and what has to be where."""

from __future__ import annotations

import torch
from processes import eventually

import torch_mooncake as tm
from torch_mooncake.kv import KVReceiver, KVSender, PageAllocator, PagedKV

ORDERS = {  # physical order of the axes: that of a contiguous tensor whose dimensions are then named by "PKNHD"
    "PKNHD": (0, 1, 2, 3, 4),
    "PKHND": (0, 1, 3, 2, 4),
    "KPNHD": (1, 0, 2, 3, 4),
    "PHKND": (0, 3, 1, 2, 4),
}


def model_pages(layers: int, pages: int, size: int, heads: int, dim: int, dtype=torch.float32) -> torch.Tensor:
    """[layers, pages, 2, size, heads, dim]: no two elements of a page alike (modulo what the dtype can tell apart)."""
    shape = (layers, pages, 2, size, heads, dim)
    count = torch.Size(shape).numel()
    return (torch.arange(count) * 7 % 65521).to(torch.float32).sub(30000).div(997).to(dtype).view(shape)


def rank_heads(heads: int, rank: int, size: int) -> slice:
    """The model's heads that a tensor-parallel rank holds."""
    first = rank * heads // size
    return slice(first, first + max(1, heads // size))


def cache(shape: tuple[int, ...], order: str = "PKNHD", dtype=torch.float32, *, together: bool = False) -> PagedKV:
    """An empty cache, [layers, pages, 2, size, heads, dim], with pages in another physical order. `together`: all
    layers in one storage."""
    layers, page_shape = shape[0], shape[1:]
    there = [page_shape[axis] for axis in ORDERS[order]]
    back = [ORDERS[order].index(axis) for axis in range(5)]
    if together:
        stored = list(tm.empty((layers, *there), dtype=dtype, shared=True).fill_(-1).unbind(0))
    else:
        stored = [tm.empty(there, dtype=dtype, shared=True).fill_(-1) for _ in range(layers)]
    return PagedKV([layer.permute(back) for layer in stored])


class DecodeSide:
    def __init__(self, kv: PagedKV, transports=("local", "shm", "tcp"), *, pages: int | None = None, **options) -> None:
        self.kv = kv
        self.engine = tm.Engine(listen=["tcp://127.0.0.1:0"], token="t", name="decode", transports=transports)
        self.allocators = [PageAllocator(pages or group.num_pages) for group in kv.layout.groups]
        self.receiver = KVReceiver(self.engine, kv, self.allocators, **options)
        self.regions_at_rest = self.engine.stats()["regions"]

    @property
    def allocator(self) -> PageAllocator:
        return self.allocators[0]

    def at_rest(self) -> bool:
        """No session, no page taken, and no region but those of the receiver itself."""
        return (
            not self.receiver.sessions
            and not self.receiver.settler.waiting
            and all(allocator.available == allocator.num_pages for allocator in self.allocators)
            and self.engine.stats()["regions"] == self.regions_at_rest + self.receiver.own_regions
            and (self.receiver._scratch is None or not self.receiver._scratch.taken)
        )

    def close(self) -> None:
        self.receiver.close()
        self.engine.close()


class PrefillSide:
    def __init__(self, kv: PagedKV, transports=("local", "shm", "tcp"), *, token="t", **options) -> None:
        self.kv = kv
        self.engine = tm.Engine(listen=["tcp://127.0.0.1:0"], token=token, name="prefill", transports=transports)
        self.sender = KVSender(self.engine, kv, **options)
        self.regions_at_rest = self.engine.stats()["regions"]

    def at_rest(self) -> bool:
        staging = self.sender._staging
        return (
            not self.sender.sessions
            and not self.sender.settler.waiting
            and self.engine.stats()["regions"] == self.regions_at_rest + (staging is not None)
            and (staging is None or not staging.taken)
        )

    def close(self) -> None:
        self.sender.close()
        self.engine.close()


def settled(*sides) -> bool:
    return all(eventually(side.at_rest) for side in sides)
