"""What prefill and decode tell each other: a ticket, and notes that ride on the engine's notifications.

Version 2. A ticket travels by any channel of the caller's (HTTP, a queue); everything after it by the engine:

    ticket   the side that asks -> the side that begins     whose memory, whose pages, which layout and TP place
    hello    begins -> asked                                its layout and TP place, and where notes for it go
    layer    prefill -> decode, on the write itself         pages of a layer are in place (direct wire)
    packed   prefill -> decode                              pages of a layer lie packed in prefill's staging memory
    ready    prefill -> decode                              pages of a layer may be read (pull)
    ack      decode -> prefill                              a packed chunk has been fetched
    done     prefill -> decode                              everything is there, with prefill's `meta`
    closed   decode -> prefill                              everything is in place (pull)
    alive    prefill -> decode                              every few seconds, in case it cannot be dialled
    failed   either way                                     it is over, and why

Every note names its session (16 random bytes, never used twice) and, from prefill, the attempt (one `PrefillSession`):
a late note of another session, or of another attempt with the same ticket, never counts.
"""

from __future__ import annotations

import zlib
from typing import Any

import msgspec

from torch_mooncake import errors
from torch_mooncake.errors import Cancelled, DeadlineExceeded, Error, InvalidArgument, PeerLost, VersionMismatch

VERSION = 2
REASON_S = 0.5  # how long who finds memory withdrawn waits for the other side's word why
MAX_NOTE_NBYTES = 60 << 10  # the engine takes 64 KiB
WIRES = ("auto", "direct", "packed", "packed_fp8")
PREFILL, DECODE = "prefill", "decode"


class Place(msgspec.Struct, array_like=True, frozen=True):
    """Where a side stands: tensor-parallel rank `rank` of `size`."""

    rank: int = 0
    size: int = 1


class Contact(msgspec.Struct, array_like=True):
    """How notes reach a side: its engine's id and addresses (may be none), and the descriptor of its mailbox, a few
    bytes that nothing is ever written into."""

    engine: bytes
    addresses: list[str]
    mailbox: bytes


class Ticket(msgspec.Struct, array_like=True):
    """Leave to fill (push) or to read (pull) some pages. It names memory but carries no secret: who wants to use it
    must hold the engine's token."""

    version: int
    session: bytes
    mode: str  # "push": made by decode; "pull": made by prefill
    contact: Contact
    attempt: bytes  # of the prefill side (pull), or b""
    layout: bytes  # pack_layout()
    place: Place
    regions: list[bytes]  # descriptors, in the order of the layout's storages, of this session alone
    table: bytes  # descriptor of the table of leases (push), or b""
    slot: int  # in the table
    pages: list[bytes]  # int64 page ids of each group (push)
    prompt_pages: list[int]  # of each group: how many count for completeness; -1: prefill says so at the end
    wire: str
    timeout_s: float  # from now: clocks of two hosts are not compared


class Note(msgspec.Struct, array_like=True):
    """One of the kinds above, to prefill or decode. `rank` is who says it. `chunk` numbers what one attempt pushes to
    one rank; a direct chunk is `parts` writes."""

    session: bytes
    kind: str
    to: str
    attempt: bytes = b""
    rank: int = 0
    layer: int = -1
    start: int = 0
    count: int = 0
    chunk: int = -1
    parts: int = 1
    body: dict[str, Any] = {}


def decode_ticket(data: bytes) -> Ticket:
    """Raises InvalidArgument for bytes that are no ticket and VersionMismatch for one of another version."""
    try:
        head = msgspec.msgpack.decode(data)
        if isinstance(head, list) and head and head[0] != VERSION:
            raise VersionMismatch(f"ticket of version {head[0]}, this library speaks {VERSION}")
        ticket = msgspec.msgpack.decode(data, type=Ticket)
    except msgspec.MsgspecError as error:
        raise InvalidArgument(f"not a ticket: {error}") from error
    if (
        ticket.mode not in ("push", "pull")
        or ticket.wire not in WIRES
        or not 0 <= ticket.place.rank < ticket.place.size
    ):
        raise InvalidArgument(f"not a ticket: mode {ticket.mode!r}, wire {ticket.wire!r}, place {ticket.place}")
    return ticket


def decode_note(data: bytes) -> Note | None:
    """None for a notification that is not one of ours: the engine may be shared."""
    try:
        return msgspec.msgpack.decode(data, type=Note)
    except msgspec.MsgspecError:
        return None


encode = msgspec.msgpack.encode


def contact_of(body: dict[str, Any]) -> Contact:
    """InvalidArgument for a body without one."""
    try:
        return msgspec.convert(body.get("contact"), Contact)
    except msgspec.ValidationError as error:
        raise InvalidArgument(f"not a contact: {error}") from error


def pack_layout(fields: dict[str, Any]) -> bytes:
    return zlib.compress(msgspec.msgpack.encode(fields), 1)


def unpack_layout(data: bytes) -> dict[str, Any]:
    try:
        fields = msgspec.msgpack.decode(zlib.decompress(data))
    except (msgspec.MsgspecError, zlib.error) as error:
        raise InvalidArgument(f"not a layout: {error}") from error
    if not isinstance(fields, dict):
        raise InvalidArgument("not a layout")
    return fields


def failed(session: bytes, to: str, error: BaseException, *, attempt: bytes = b"", rank: int = 0) -> bytes:
    body = {"error": type(error).__name__, "message": getattr(error, "message", None) or str(error)}
    body["message"] = body["message"][:4096]
    return encode(Note(session, "failed", to, attempt, rank, body=body))


def state_of(settled: bool, error: Error | None) -> str:
    """What a session's `state` says."""
    if not settled:
        return "pending"
    kinds: dict[type[Error] | None, str] = {None: "done", Cancelled: "cancelled", DeadlineExceeded: "timeout"}
    return kinds.get(type(error) if error is not None else None, "failed")


def rebuild_error(note: Note, who: str) -> Error:
    """The peer's error, as the same class here; PeerLost when it is not one of the library's."""
    name, message = str(note.body.get("error", "")), str(note.body.get("message", ""))
    kind = getattr(errors, name, None)
    if isinstance(kind, type) and issubclass(kind, Error):
        return kind(f"{who} failed: {message}")
    return PeerLost(f"{who} failed: {name}: {message}")
