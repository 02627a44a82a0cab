"""Sealed objects of the pool, to and from memory by address, with SGLang's kind of outcome: done or not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch_mooncake as tm
from torch_mooncake.integrations._hash_check import logger

Piece = tuple[int, int]  # (address, nbytes)


class Objects:
    """Every call ends by ``timeout_s``; what fails is a miss, and logged with ``who``. Any thread."""

    def __init__(self, pool: tm.Pool, who: str, timeout_s: float, replicas: Any = 1) -> None:
        self.pool = pool
        self._blobs = tm.Blobs(pool)
        self._who, self._timeout_s, self._replicas = who, timeout_s, replicas

    def write(self, names: list[str], pieces: list[list[Piece]]) -> list[bool]:
        """Whether each is there now."""
        options = {"sealed": True, "replicas": self._replicas, "timeout": self._timeout_s}
        outcomes = self.attempt("set", lambda: self._blobs.put_from(names, pieces, **options), names)
        self._log("set", outcomes)
        return [not isinstance(outcome, Exception) for outcome in outcomes]

    def read(self, names: list[str], pieces: list[list[Piece]]) -> list[bool]:
        """Whether each was there and is of the size of its pieces; those of one that was not are unspecified."""
        outcomes = self.attempt("get", lambda: self._blobs.get_into(names, pieces, timeout=self._timeout_s), names)
        self._log("get", outcomes)
        wanted = [sum(nbytes for _, nbytes in of_name) for of_name in pieces]
        return [outcome == nbytes for outcome, nbytes in zip(outcomes, wanted, strict=True)]

    def values(self, names: list[str]) -> list[Any]:
        """What the pool has, or an exception for each."""
        call = lambda: self.pool.get_many(names, errors="return", timeout=self._timeout_s)  # noqa: E731
        found: list[Any] = self.attempt("get", call, names)
        return found

    def leading(self, names: list[str]) -> int:
        """How many, from the first on, are there."""
        found: int = self.attempt("exists", lambda: self.pool.exists_prefix(names, timeout=self._timeout_s), 0)
        return found

    def there(self, names: list[str]) -> list[bool]:
        """Which are there."""
        call = lambda: self.pool.exists(names, timeout=self._timeout_s) if names else []  # noqa: E731
        return [each is True for each in self.attempt("exists", call, names)]

    def clear(self, prefix: str) -> None:
        """Remove all that begin with it."""
        call = lambda: self.pool.delete(self.pool.keys(prefix, timeout=self._timeout_s), timeout=self._timeout_s)  # noqa: E731
        self.attempt("clear", call, 0)

    def attempt(self, what: str, call: Any, otherwise: Any) -> Any:
        """What the call returns; if the pool fails, the error for each of ``otherwise``, or what that is."""
        try:
            return call()
        except tm.Error as error:
            logger.warning("%s %s: %s: %s", self._who, what, type(error).__name__, error)
            return [error] * len(otherwise) if isinstance(otherwise, list) else otherwise

    def close(self) -> None:
        self.pool.close()

    def _log(self, what: str, outcomes: Sequence[Any]) -> None:
        failed = [each for each in outcomes if isinstance(each, Exception) and not isinstance(each, tm.KeyNotFound)]
        if failed:
            logger.warning("%s %s: %d of %d failed: %s", self._who, what, len(failed), len(outcomes), failed[0])
