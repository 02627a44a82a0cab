"""What the two sides of the pool connector tell each other."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Order:
    """Blocks of a request, under their hashes: to be loaded, or stored behind the block of hash ``parent``."""

    request_id: str
    hashes: list[bytes]
    blocks: list[int]
    parent: bytes | None = None


@dataclass
class PoolMeta:
    """Of one step. Preempted requests lose their blocks with it; cancelled ones wait for nothing any more."""

    loads: list[Order] = field(default_factory=list)
    saves: list[Order] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)
    preempted: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class PoolPlace:
    """Of a rank: what its pages' keys begin with."""

    prefix: str
