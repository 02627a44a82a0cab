"""``mooncake.engine.TransferEngine`` on torch_mooncake's transfer engine.

Calls take and return what Mooncake's do: 0 or a negative code, never an exception for what went wrong at run time; the
reason is logged under "torch_mooncake.compat". Every call ends in bounded time (``MC_TRANSFER_TIMEOUT`` seconds, 30 by
default), and after its end no byte of it is read or written. Peers are named "host:port", found by ``get_rpc_port``.
"""

from __future__ import annotations

import enum
import itertools
import json
import os
from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch_mooncake as tm
from mooncake._codes import INTERNAL_ERROR, logger
from mooncake._engine_memory import Memory
from mooncake._transfers import Transfer, notification

_UNREACHABLE = -102
_KEPT = 1024  # outcomes of transfers that nobody has asked about yet


class TransferOpcode(enum.IntEnum):
    Read = 0
    Write = 1


_Opcode: TypeAlias = TransferOpcode
Sides: TypeAlias = tuple[Sequence[int], Sequence[int], Sequence[int]]  # addresses here, those there, sizes in bytes


class TransferNotify:
    """A message that comes with a transfer: ``get_notifies`` of the peer returns it when the data is there."""

    def __init__(self, name: str = "", msg: str = "") -> None:
        self.name, self.msg = name, msg


def _one(write: bool, later: bool = False) -> Callable[..., int]:
    """A method for one piece of memory, in one direction."""

    def transfer(
        self: TransferEngine,
        target_hostname: str,
        buffer: int,
        peer_buffer_address: int,
        length: int,
        transport_hint: str = "",
    ) -> int:
        return self._transfer(write, target_hostname, ([buffer], [peer_buffer_address], [length]), later=later)

    return transfer


def _many(write: bool, later: bool = False) -> Callable[..., int]:
    """A method for many, in one direction."""

    def transfer(
        self: TransferEngine,
        target_hostname: str,
        buffers: Sequence[int],
        peer_buffer_addresses: Sequence[int],
        lengths: Sequence[int],
        transport_hint: str = "",
    ) -> int:
        return self._transfer(write, target_hostname, (buffers, peer_buffer_addresses, lengths), later=later)

    return transfer


class TransferEngine(Memory):
    """An engine by plain addresses. Any thread. Before ``initialize`` calls fail with a code."""

    TransferOpcode = TransferOpcode

    def __init__(self) -> None:
        super().__init__()
        self._transfers: dict[int, Transfer] = {}
        self._numbers = itertools.count(1)
        self._timeout_s = max(5.0, float(os.environ.get("MC_TRANSFER_TIMEOUT", 30)))

    # --- transfers ---

    transfer_sync_write, batch_transfer_sync_write = _one(True), _many(True)
    transfer_sync_read, batch_transfer_sync_read = _one(False), _many(False)
    # A number for get_batch_transfer_status and transfer_check_status; 0 if it did not begin.
    transfer_submit_write, batch_transfer_async_write = _one(True, later=True), _many(True, later=True)
    batch_transfer_async_read = _many(False, later=True)

    def transfer_sync(
        self,
        target_hostname: str,
        buffer: int,
        peer_buffer_address: int,
        length: int,
        opcode: _Opcode,
        notify: TransferNotify | None = None,
        transport_hint: str = "",
    ) -> int:
        return self.batch_transfer_sync(
            target_hostname, [buffer], [peer_buffer_address], [length], opcode, notify, transport_hint
        )

    def batch_transfer_sync(
        self,
        target_hostname: str,
        buffers: Sequence[int],
        peer_buffer_addresses: Sequence[int],
        lengths: Sequence[int],
        opcode: _Opcode,
        notify: TransferNotify | None = None,
        transport_hint: str = "",
    ) -> int:
        sides = buffers, peer_buffer_addresses, lengths
        return self._transfer(opcode == TransferOpcode.Write, target_hostname, sides, notify=notify)

    def batch_transfer_async(
        self,
        target_hostname: str,
        buffers: Sequence[int],
        peer_buffer_addresses: Sequence[int],
        lengths: Sequence[int],
        opcode: _Opcode,
        transport_hint: str = "",
    ) -> int:
        """As ``batch_transfer_async_write``, in the direction that is said."""
        sides = buffers, peer_buffer_addresses, lengths
        return self._transfer(opcode == TransferOpcode.Write, target_hostname, sides, later=True)

    def get_batch_transfer_status(self, batch_ids: Sequence[int]) -> int:
        """Wait for all of them: 0, or -1 if one failed (or is not known). They are forgotten then."""
        codes = []
        for number in batch_ids:
            with self._lock:
                transfer = self._transfers.get(number)
            codes.append(INTERNAL_ERROR if transfer is None else transfer.wait())
            with self._lock:
                self._transfers.pop(number, None)
        return next((code for code in codes if code), 0)

    def transfer_check_status(self, batch_id: int) -> int:
        """0: under way; 1: done; -1: failed, or not known. Forgotten when it is over."""
        with self._lock:
            transfer = self._transfers.get(batch_id)
        if transfer is None:
            return INTERNAL_ERROR
        code = transfer.poll()
        if code is None:
            return 0
        with self._lock:
            self._transfers.pop(batch_id, None)
        return 1 if code == 0 else INTERNAL_ERROR

    def get_notifies(self) -> list[TransferNotify]:
        """What has come with peers' transfers since the last call."""
        found: list[TransferNotify] = []
        engine = self._engine
        while engine is not None:
            try:
                name, message = json.loads(engine.next_notification(0).data)
            except tm.DeadlineExceeded:
                break
            except (ValueError, TypeError) as error:
                logger.warning("get_notifies: a notification of another program: %s", error)
                continue
            found.append(TransferNotify(str(name), str(message)))
        return found

    def send_probe(self, peer_server_name: str) -> int:
        """0: the peer answers."""
        if self._engine is None:
            return INTERNAL_ERROR
        try:
            self._session(peer_server_name).refresh()
        except tm.Error as error:
            self._refused("send_probe", f"{type(error).__name__}: {error}")
            return _UNREACHABLE
        return 0

    # --- inside ---

    def _transfer(
        self, write: bool, session: str, sides: Sides, *, later: bool = False, notify: TransferNotify | None = None
    ) -> int:
        """Its code when it is over; with ``later`` its number, 0 if it did not begin."""
        transfer = self._begin(write, session, sides, notify)
        if transfer is None:
            return 0 if later else INTERNAL_ERROR
        if not later:
            return transfer.wait()
        with self._lock:
            number = next(self._numbers)
            self._transfers[number] = transfer
            others = list(self._transfers.items())[:-1]
        self._tidy(others)
        return number

    def _tidy(self, transfers: list[tuple[int, Transfer]]) -> None:
        """What nobody asks about keeps no memory registered when it is over, and is forgotten when there is much of
        it."""
        for i, (number, transfer) in enumerate(transfers):
            if transfer.settle() and len(transfers) - i >= _KEPT:
                with self._lock:
                    self._transfers.pop(number, None)

    def _begin(self, write: bool, session: str, sides: Sides, notify: TransferNotify | None) -> Transfer | None:
        """None, and nothing is under way, if it cannot be done."""
        local, remote, lengths = sides
        if not len(local) == len(remote) == len(lengths):
            self._refused(session, f"{len(local)} buffers, {len(remote)} of the peer, {len(lengths)} lengths")
            return None
        try:
            peer, engine = self._session(session), self._engine
        except tm.Error as error:
            self._refused(session, f"{type(error).__name__}: {error}")
            return None
        assert engine is not None
        note = b"" if notify is None else notification(notify.name, notify.msg)
        transfer = Transfer(engine, peer, self._regions, write, *sides, notify=note, timeout_s=self._timeout_s)
        return transfer if transfer.begin() else None


__all__ = ["TransferEngine", "TransferNotify", "TransferOpcode"]
