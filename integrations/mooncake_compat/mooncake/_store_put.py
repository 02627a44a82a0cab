"""What a store stores: values, and memory by address."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import torch_mooncake as tm
from mooncake._codes import INTERNAL_ERROR, INVALID_PARAMS, NO_AVAILABLE_HANDLE, code_of
from mooncake._store_client import Client, Pieces, zipped
from mooncake._types import ReplicateConfig
from torch_mooncake.integrations._staging import Staged

Buffer = bytes | bytearray | memoryview | Any

_ROOM_S = 2.0  # how long a put waits for room
_BYTES_PER_S = 100e6  # and for its bytes to move, at the least


def _from_one(if_exists: str) -> Callable[..., int]:
    """A method that stores one piece of memory."""

    def put(
        self: Puts,
        key: str,
        buffer_ptr: int,
        size: int,
        config: ReplicateConfig = ReplicateConfig(),  # noqa: B008
    ) -> int:
        return self._put_pieces([key], [[(buffer_ptr, size)]], config, if_exists)[0]

    return put


def _from_many(if_exists: str) -> Callable[..., list[int]]:
    """A method that stores a piece of memory under each key."""

    def put(
        self: Puts,
        keys: Sequence[str],
        buffer_ptrs: Sequence[int],
        sizes: Sequence[int],
        config: ReplicateConfig = ReplicateConfig(),  # noqa: B008
    ) -> list[int]:
        if not len(keys) == len(buffer_ptrs) == len(sizes):
            return [INVALID_PARAMS] * len(keys)
        return self._put_pieces(keys, [[piece] for piece in zip(buffer_ptrs, sizes, strict=True)], config, if_exists)

    return put


class Puts(Client):
    """``put`` of a key that is there changes nothing, ``upsert`` replaces it. 0, or a negative code."""

    def put(self, key: str, value: Buffer, config: ReplicateConfig = ReplicateConfig()) -> int:  # noqa: B008
        return self.put_batch([key], [value], config)

    def put_parts(self, key: str, *args: Buffer, config: ReplicateConfig = ReplicateConfig()) -> int:  # noqa: B008
        """The parts, one after the other, as one value. Without parts, nothing is done."""
        return self._put_values([key], [list(args)], config, "keep")[0] if args else 0

    def put_batch(
        self,
        keys: Sequence[str],
        values: Sequence[Buffer],
        config: ReplicateConfig = ReplicateConfig(),  # noqa: B008
    ) -> int:
        """0, or the first code that is not; those after it were tried, too."""
        if len(keys) != len(values):
            return INVALID_PARAMS
        codes = self._put_values(keys, [[value] for value in values], config, "keep")
        return next((code for code in codes if code), 0)

    put_from, batch_put_from = _from_one("keep"), _from_many("keep")

    def batch_put_from_multi_buffers(
        self,
        keys: Sequence[str],
        all_buffer_ptrs: Sequence[Sequence[int]],
        all_sizes: Sequence[Sequence[int]],
        config: ReplicateConfig = ReplicateConfig(),  # noqa: B008
    ) -> list[int]:
        """Each key's value is the concatenation of its buffers."""
        pieces = zipped(keys, all_buffer_ptrs, all_sizes)
        if pieces is None or not all(pieces):
            return [INVALID_PARAMS] * len(keys)
        return self._put_pieces(keys, pieces, config, "keep")

    def upsert(self, key: str, value: Buffer, config: ReplicateConfig = ReplicateConfig()) -> int:  # noqa: B008
        return self._put_values([key], [[value]], config, "replace")[0]

    upsert_from, batch_upsert_from = _from_one("replace"), _from_many("replace")

    def _put_values(
        self, keys: Sequence[str], values: Sequence[Sequence[Buffer]], config: ReplicateConfig, if_exists: str
    ) -> list[int]:
        pieces, held = [], []
        for parts in values:
            pins = [_Pinned(part) for part in parts]
            held.append(pins)
            pieces.append([(pin.address, pin.nbytes) for pin in pins])
        codes = self._put_pieces(keys, pieces, config, if_exists, empty=INVALID_PARAMS)
        del held
        return codes

    def _put_pieces(
        self,
        keys: Sequence[str],
        pieces: Sequence[Pieces],
        config: ReplicateConfig,
        if_exists: str,
        empty: int = 0,
    ) -> list[int]:
        """A code for each key; ``empty`` for one without bytes, which is not stored."""
        if not isinstance(config, ReplicateConfig):
            raise TypeError(f"config is a ReplicateConfig, not {type(config).__name__}")
        blobs = self._blobs
        if blobs is None:
            return [INTERNAL_ERROR] * len(keys)
        codes = [INVALID_PARAMS] * len(keys)
        good, nbytes = [], 0
        for i, (key, of_key) in enumerate(zip(keys, pieces, strict=True)):
            size = sum(each for _, each in of_key)
            if not size or not key:
                codes[i] = empty if key else INVALID_PARAMS
            elif self._there(of_key):
                good.append(i)
                nbytes += size
        if not good:
            return codes
        timeout = _ROOM_S + nbytes / _BYTES_PER_S
        try:
            with Staged([pieces[i] for i in good], self._device) as staged:
                staged.load()
                outcomes = blobs.put_from(
                    [self._key(keys[i]) for i in good],
                    staged.pieces,
                    timeout=timeout,
                    if_exists=if_exists,
                    **config.options(),
                )
        except tm.Error as error:
            outcomes = [error] * len(good)
        full = any(isinstance(outcome, tm.PoolFull) for outcome in outcomes)
        for i, outcome in zip(good, outcomes, strict=True):
            codes[i] = code_of(outcome, f"put {keys[i]!r}") if isinstance(outcome, Exception) else 0
            if full and isinstance(outcome, tm.DeadlineExceeded):  # others of the batch have waited for room, in vain
                codes[i] = NO_AVAILABLE_HANDLE
        return codes


class _Pinned:
    """Any buffer, by address, for as long as this lives."""

    def __init__(self, value: Buffer) -> None:
        if isinstance(value, str):
            raise TypeError("a value is bytes or another buffer, not str")
        self._view = memoryview(value).cast("B")
        self.nbytes = self._view.nbytes
        if self._view.readonly or not self.nbytes:
            import numpy as np

            self._array = np.frombuffer(self._view, np.uint8)
            self.address = int(self._array.__array_interface__["data"][0]) if self.nbytes else 0
        else:
            self._anchor = (ctypes.c_char * self.nbytes).from_buffer(self._view)
            self.address = ctypes.addressof(self._anchor)
