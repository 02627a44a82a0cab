"""What prefill and decode tell each other: a ticket, and notes that ride on the engine's notifications."""

from __future__ import annotations

from typing import Any

import msgspec

from torch_mooncake import errors
from torch_mooncake.errors import Error, InvalidArgument, PeerLost, VersionMismatch

VERSION = 1


class Ticket(msgspec.Struct, array_like=True):
    """Leave to fill some pages of a decode cache. It names memory but carries no secret: who wants to use it must
    hold the engine's token."""

    version: int
    session: bytes
    addresses: list[str]
    layout: dict[str, Any]
    regions: list[bytes]  # descriptors, in the order of the layout's storages
    pages: list[int]
    timeout_s: float  # from now: clocks of two hosts are not compared


class Note(msgspec.Struct, array_like=True):
    """`kind`: "layer" (this layer is in place), "done" (all is; `meta` is the sender's) or "failed"."""

    session: bytes
    kind: str
    layer: int = -1
    meta: dict[str, Any] = {}
    error: str = ""
    message: str = ""


def decode_ticket(data: bytes) -> Ticket:
    """Raises InvalidArgument for bytes that are no ticket and VersionMismatch for one of another version."""
    try:
        head = msgspec.msgpack.decode(data)
        if isinstance(head, list) and head and head[0] != VERSION:
            raise VersionMismatch(f"ticket of version {head[0]}, this library speaks {VERSION}")
        return msgspec.msgpack.decode(data, type=Ticket)
    except msgspec.MsgspecError as error:
        raise InvalidArgument(f"not a ticket: {error}") from error


def decode_note(data: bytes) -> Note | None:
    """None for a notification that is not one of ours: the engine may be shared."""
    try:
        return msgspec.msgpack.decode(data, type=Note)
    except msgspec.MsgspecError:
        return None


encode = msgspec.msgpack.encode


def rebuild_error(note: Note) -> Error:
    """The peer's error, as the same class here; PeerLost when it is not one of the library's."""
    kind = getattr(errors, note.error, None)
    if isinstance(kind, type) and issubclass(kind, Error):
        return kind(f"prefill failed: {note.message}")
    return PeerLost(f"prefill failed: {note.error}: {note.message}")
