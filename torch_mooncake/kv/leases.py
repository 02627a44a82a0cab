"""Registrations of the decode cache that sessions take in turn.

A session has the cache registered for itself alone: withdrawing that registration fences everybody who was given its
ticket, and nobody else. Registering and opening anew for each session would cost a round trip for every storage, so a
registration whose session ended well (every prefill rank has said that nothing of it is under way) is lent again.

What keeps an old ticket from being used with the new session's registration is the table: a few bytes a lease, readable
by peers, that say which session has it, and which attempts of prefill it has accepted. Nobody writes before it has
found itself there.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch_mooncake.errors import Busy, Closed, PoolFull, Unsupported
from torch_mooncake.shared import empty

if TYPE_CHECKING:
    from torch_mooncake.transfer import Engine, Region

SLOT_NBYTES = 512  # session id, then the accepted attempts, 8 bytes each, then zeros
_ID_NBYTES, _ATTEMPT_NBYTES = 16, 8
_SLOTS = 1024


@dataclass(eq=False)
class Lease:
    slot: int
    regions: list[Region]
    accepted: int = 0
    descriptors: list[bytes] = field(default_factory=list)


class Leases:
    """Of one receiver. `register` registers the cache once more. Any thread."""

    def __init__(self, engine: Engine, register: Callable[[], list[Region]]) -> None:
        import torch

        self._engine = engine
        self._register = register
        self._table = empty((_SLOTS, SLOT_NBYTES), dtype=torch.uint8, shared=True).zero_()
        self._bytes: memoryview = self._table.numpy().data.cast("B")
        self.region = engine.register(self._table, writable=False, label="KV sessions")
        self._lock = threading.Lock()
        self._slots = list(range(_SLOTS - 1, -1, -1))
        self._idle: list[Lease] = []

    @property
    def idle(self) -> int:
        """Registrations that wait for a session."""
        with self._lock:
            return len(self._idle)

    def take(self, session: bytes) -> Lease:
        """PoolFull when there are more sessions than the table has room for."""
        with self._lock:
            if not self._slots:
                raise PoolFull(f"{_SLOTS} sessions are open")
            lease = self._idle.pop() if self._idle else None
            slot = self._slots.pop()
        if lease is None:
            try:
                regions = self._register()
            except BaseException:
                self._free(slot)
                raise
            lease = Lease(slot, regions, descriptors=[region.descriptor() for region in regions])
        lease.slot, lease.accepted = slot, 0
        at = slot * SLOT_NBYTES
        self._bytes[at + _ID_NBYTES : at + SLOT_NBYTES] = bytes(SLOT_NBYTES - _ID_NBYTES)
        self._bytes[at : at + _ID_NBYTES] = session
        return lease

    def accept(self, lease: Lease, attempt: bytes) -> None:
        """That attempt may write from now on."""
        at = _ID_NBYTES + lease.accepted * _ATTEMPT_NBYTES
        if at + _ATTEMPT_NBYTES > SLOT_NBYTES:
            raise Unsupported(f"more than {lease.accepted} prefill ranks feed one decode rank")
        lease.accepted += 1
        at += lease.slot * SLOT_NBYTES
        self._bytes[at : at + _ATTEMPT_NBYTES] = attempt

    def end(self, lease: Lease) -> None:
        """The session is over: whoever looks finds so."""
        self._bytes[lease.slot * SLOT_NBYTES : lease.slot * SLOT_NBYTES + _ID_NBYTES] = bytes(_ID_NBYTES)
        self._free(lease.slot)

    def lend_again(self, lease: Lease) -> None:
        """It ended well."""
        with self._lock:
            self._idle.append(lease)

    def _free(self, slot: int) -> None:
        with self._lock:
            self._slots.append(slot)

    def close(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, []
        for region in [self.region, *(region for lease in idle for region in lease.regions)]:
            try:
                self._engine.deregister(region, timeout=1)
            except (Busy, Closed):  # a stopped prefill side has it mapped; or the engine is gone
                pass


def accepted(slot: bytes, session: bytes, attempt: bytes) -> bool | None:
    """What a slot that was read says: True or False (not yet); None: the session is over."""
    if slot[:_ID_NBYTES] != session:
        return None
    attempts = range(_ID_NBYTES, SLOT_NBYTES, _ATTEMPT_NBYTES)
    return any(slot[at : at + _ATTEMPT_NBYTES] == attempt for at in attempts)
