"""``mooncake.store`` on torch_mooncake's pool.

``MooncakeDistributedStore`` takes and returns what Mooncake's does: 0, byte counts or negative codes, with the reasons
logged under "torch_mooncake.compat". What a key holds is written once; ``put`` of a key that is there changes nothing
and returns 0, ``upsert`` replaces it. Keys lie in the pool under ``mooncake/<tenant>/``.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch_mooncake as tm
from mooncake._codes import INTERNAL_ERROR, INVALID_PARAMS, OBJECT_NOT_FOUND, code_of, logger
from mooncake._store_client import Pieces as Pieces
from mooncake._store_get import Gets
from mooncake._store_put import Buffer as Buffer
from mooncake._store_put import Puts
from mooncake._types import (
    BufferHandle,
    MooncakeHostMemAllocator,
    ObjectDataType,
    ReplicaDescriptor,
    ReplicaStatus,
    ReplicateConfig,
    SoftPinAction,
)


class MooncakeDistributedStore(Puts, Gets):
    """A client of the pool. Any thread. Before ``setup`` and after ``close`` calls fail with a code."""

    # --- removal ---

    def remove(self, key: str, force: bool = False) -> int:
        """0, or -704 if it was not there. What somebody is reading stays whole for them: nothing has to be forced."""
        return self.batch_remove([key], force)[0]

    def batch_remove(self, keys: Sequence[str], force: bool = False) -> list[int]:
        """A code for each: 0, or -704 if it was not there. ``force`` changes nothing: there are no leases."""
        if self._pool is None:
            return [INTERNAL_ERROR] * len(keys)
        named = [i for i, key in enumerate(keys) if key]
        try:
            removed = self._pool.delete([self._key(keys[i]) for i in named]) if named else []
        except tm.Error as error:
            return [code_of(error, "batch_remove")] * len(keys)
        codes = [INVALID_PARAMS] * len(keys)
        for i, gone in zip(named, removed, strict=True):
            codes[i] = 0 if gone else OBJECT_NOT_FOUND
        return codes

    def remove_by_regex(self, regex_pattern: str, force: bool = False) -> int:
        """How many keys were removed in which the pattern was found (Python's ``re.search``)."""
        try:
            pattern = re.compile(regex_pattern)
        except re.error as error:
            logger.warning("remove_by_regex: %s", error)
            return INVALID_PARAMS
        return self._remove_where(lambda key: pattern.search(key) is not None)

    def remove_all(self, force: bool = False) -> int:
        """How many keys were removed: all of this tenant's."""
        return self._remove_where(lambda key: True)

    def _remove_where(self, chosen: Any) -> int:
        if self._pool is None:
            return INTERNAL_ERROR
        try:
            keys = [key for key in self._pool.keys(self._prefix) if chosen(key[len(self._prefix) :])]
            return sum(self._pool.delete(keys)) if keys else 0
        except tm.Error as error:
            return code_of(error, "remove")


__all__ = [
    "BufferHandle",
    "MooncakeDistributedStore",
    "MooncakeHostMemAllocator",
    "ObjectDataType",
    "ReplicaDescriptor",
    "ReplicaStatus",
    "ReplicateConfig",
    "SoftPinAction",
]
