"""What a decode rank tells a prefill rank, over SGLang's own control sockets: where its memory is, and which of it a
request is to fill. Frames are a tag and one msgpack value, checked against the types below when it is read."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

MEMORY, ROOM, WAKE = b"TM_MEMORY", b"TM_ROOM", b"TM_WAKE"


class Memory(msgspec.Struct, frozen=True):
    """A decode rank's memory. Lists of buffers are in SGLang's order (``KVArgs``)."""

    engine: str  # the id of its transfer engine, in hex
    addresses: list[str]  # where that listens
    regions: list[tuple[int, int, bytes]]  # (address, nbytes, descriptor)
    tp_rank: int
    tp_size: int
    state_tp_size: int
    page_size: int
    kv: list[int]
    kv_nbytes: list[int]  # of a page, for each buffer
    kv_layers: list[int]  # empty: buffers go by their places
    aux: list[int]
    aux_nbytes: list[int]
    state_types: list[str]
    states: list[list[int]]  # for each type, its buffers
    state_nbytes: list[list[int]]
    state_dims: list[list[int]]
    state_layers: list[list[int]]


class Room(msgspec.Struct):
    """A request's pages on one decode rank. SGLang's base classes read some of these by their names."""

    room: int
    endpoint: str
    dst_port: int
    engine: str
    pages: bytes  # int32
    aux_index: int | None
    states: list[list[int]]
    required_dst_info_num: int
    decode_prefix_len: int
    is_dummy: bool


_T = TypeVar("_T", Memory, Room)


def encoded(tag: bytes, value: msgspec.Struct) -> list[bytes]:
    return [tag, msgspec.msgpack.encode(value)]


def memory_of(frames: list[bytes]) -> Memory:
    """Errors: ValueError for anything that is none."""
    return _decoded(frames, Memory)


def room_of(frames: list[bytes]) -> Room:
    """Errors: ValueError for anything that is none."""
    return _decoded(frames, Room)


def _decoded(frames: list[bytes], kind: type[_T]) -> _T:
    if len(frames) != 2:
        raise ValueError(f"{len(frames)} frames, not a tag and a value")
    try:
        return msgspec.msgpack.decode(frames[1], type=kind)
    except msgspec.MsgspecError as error:  # none of which is a ValueError
        raise ValueError(f"no {kind.__name__}: {error}") from error


def lists(values: Any) -> list[list[int]]:
    """SGLang's lists of lists, whose inner ones may be None or numpy's."""
    return [[] if each is None else [int(value) for value in each] for each in values or []]
