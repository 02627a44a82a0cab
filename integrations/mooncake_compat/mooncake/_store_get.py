"""What a store reads: values, memory by address, and what there is."""

from __future__ import annotations

from collections.abc import Sequence

import torch_mooncake as tm
from mooncake._codes import INTERNAL_ERROR, INVALID_PARAMS, TRANSFER_FAIL, code_of, logger
from mooncake._store_client import Client, Pieces, zipped
from mooncake._types import BufferHandle, ReplicaDescriptor, make_handle
from torch_mooncake.integrations._staging import Staged

_GET_S = 30.0


class Gets(Client):
    """Byte counts, values, or negative codes."""

    def get(self, key: str) -> bytes:
        """b"" if it is not there."""
        return self.get_batch([key])[0]

    def get_batch(self, keys: Sequence[str]) -> list[bytes]:
        return [b"" if handle is None else handle.tobytes() for handle in self.batch_get_buffer(keys)]

    def get_buffer(self, key: str) -> BufferHandle | None:
        """The value in memory of its own; None if it is not there."""
        return self.batch_get_buffer([key])[0]

    def batch_get_buffer(self, keys: Sequence[str]) -> list[BufferHandle | None]:
        sizes = self._sizes(keys)
        handles = [make_handle(size) if size > 0 else None for size in sizes]
        wanted = [i for i, handle in enumerate(handles) if handle is not None]
        pieces = [[(handles[i].ptr(), sizes[i])] for i in wanted]  # type: ignore[union-attr]
        for i, code in zip(wanted, self._get_pieces([keys[i] for i in wanted], pieces), strict=True):
            if code != sizes[i]:  # gone, or replaced by another size, since it was looked at
                handles[i] = None
        return handles

    def get_into(self, key: str, buffer_ptr: int, size: int) -> int:
        """How many bytes there were; -600: more than ``size``."""
        return self._get_pieces([key], [[(buffer_ptr, size)]])[0]

    def batch_get_into(self, keys: Sequence[str], buffer_ptrs: Sequence[int], sizes: Sequence[int]) -> list[int]:
        if not len(keys) == len(buffer_ptrs) == len(sizes):
            return [INVALID_PARAMS] * len(keys)
        return self._get_pieces(keys, [[piece] for piece in zip(buffer_ptrs, sizes, strict=True)])

    def batch_get_into_multi_buffers(
        self,
        keys: Sequence[str],
        all_buffer_ptrs: Sequence[Sequence[int]],
        all_sizes: Sequence[Sequence[int]],
        prefer_alloc_in_same_node: bool = False,
    ) -> list[int]:
        """How many bytes were spread over each key's buffers. -600: they hold less than the value; -800: several hold
        more (the caller's idea of the value is another one)."""
        pieces = zipped(keys, all_buffer_ptrs, all_sizes)
        if pieces is None or not all(pieces):
            return [INVALID_PARAMS] * len(keys)
        codes = self._get_pieces(keys, pieces)
        for i, of_key in enumerate(pieces):
            if codes[i] >= 0 and sum(size for _, size in of_key) != codes[i]:
                logger.warning("get %r: the buffers are not of its %d bytes", keys[i], codes[i])
                codes[i] = TRANSFER_FAIL
        return codes

    def _get_pieces(self, keys: Sequence[str], pieces: Sequence[Pieces]) -> list[int]:
        blobs = self._blobs
        if blobs is None:
            return [INTERNAL_ERROR] * len(keys)
        codes = [INVALID_PARAMS] * len(keys)
        good = [i for i, key in enumerate(keys) if key and self._there(pieces[i])]
        try:
            with Staged([pieces[i] for i in good], self._device) as staged:
                outcomes = blobs.get_into([self._key(keys[i]) for i in good], staged.pieces, timeout=_GET_S)
                staged.store()
        except tm.Error as error:
            outcomes = [error] * len(good)
        for i, outcome in zip(good, outcomes, strict=True):
            codes[i] = code_of(outcome, f"get {keys[i]!r}") if isinstance(outcome, Exception) else outcome
        return codes

    # --- what is there ---

    def is_exist(self, key: str) -> int:
        return self.batch_is_exist([key])[0]

    def batch_is_exist(self, keys: Sequence[str]) -> list[int]:
        """1, 0, or -1 if nobody could say."""
        if self._pool is None:
            return [INTERNAL_ERROR] * len(keys)
        named = [i for i, key in enumerate(keys) if key]
        try:
            found = self._pool.exists([self._key(keys[i]) for i in named]) if named else []
        except tm.Error as error:
            code_of(error, "batch_is_exist")
            return [INTERNAL_ERROR] * len(keys)
        there = dict(zip(named, found, strict=True))
        return [int(there.get(i, False)) for i in range(len(keys))]

    def get_size(self, key: str) -> int:
        return self._sizes([key])[0]

    def _sizes(self, keys: Sequence[str]) -> list[int]:
        if self._blobs is None:
            return [INTERNAL_ERROR] * len(keys)
        try:
            outcomes = iter(self._blobs.nbytes([self._key(key) for key in keys if key]))
        except tm.Error as error:
            return [code_of(error, "get_size")] * len(keys)
        found = [next(outcomes) if key else tm.KeyNotFound("") for key in keys]
        return [code_of(each, "get_size") if isinstance(each, Exception) else each for each in found]

    def get_replica_desc(self, key: str) -> list[ReplicaDescriptor]:
        """One for each replica; empty for a key that is not there."""
        return self.batch_get_replica_desc([key]).get(key, [])

    def batch_get_replica_desc(self, keys: Sequence[str]) -> dict[str, list[ReplicaDescriptor]]:
        """Of the keys that are there."""
        found: dict[str, list[ReplicaDescriptor]] = {}
        for key in keys:
            if self._pool is None or not key:
                continue
            try:
                info = self._pool.info(self._key(key))
            except tm.Error as error:
                code_of(error, f"batch_get_replica_desc {key!r}")
                continue
            endpoint = self._hostname if info.local else ""
            found[key] = [ReplicaDescriptor(info.nbytes, endpoint, tier) for tier in info.tiers]
        return found
