"""Bytes that lie in pieces of memory, by key: objects gathered from addresses, and scattered to addresses.

For engines that manage their own memory (KV pages of many layers, registered buffers, arenas) and know it by address.
A blob is an ordinary object of the pool: ``pool.get(key)`` returns its bytes, ``pool.delete`` removes it, and a tensor
or array that was put with ``pool.put`` can be read into addresses, too.

    blobs = tm.Blobs(pool)
    blobs.put_from(["page/7"], [[(k.data_ptr(), 4096), (v.data_ptr(), 4096)]])
    blobs.get_into(["page/7"], [[(k.data_ptr(), 4096), (v.data_ptr(), 4096)]])     # [8192]
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeAlias

from torch_mooncake import context
from torch_mooncake import pool as pools
from torch_mooncake.clock import deadline_ns
from torch_mooncake.errors import DeadlineExceeded, Error, InvalidArgument, KeyNotFound, LayoutMismatch
from torch_mooncake.objects import Description, describe, describe_peeked
from torch_mooncake.tensors import describe_bytes

if TYPE_CHECKING:
    from torch_mooncake.pool import Pool, PutResult

Piece: TypeAlias = "tuple[int, int]"  # (address, nbytes) of this process's host memory


class Blobs:
    """Puts and gets of many keys in one call, each with an outcome of its own. Any thread.

    ``pool``: a ``Pool``, or the module ``torch_mooncake`` (its default pool). The memory named by addresses is the
    caller's: it must be there, and for a put unchanged, until the call has returned; afterwards nothing touches it. An
    address that is not mapped ends the process, as any use of it would. Device memory is not for here.
    """

    def __init__(self, pool: Pool | ModuleType) -> None:
        self._given = pool

    def put_from(
        self,
        keys: Sequence[str],
        pieces: Sequence[Sequence[Piece]],
        *,
        metas: Sequence[dict[str, Any] | None] | None = None,
        timeout: float | None = 30,
        **options: Any,
    ) -> list[PutResult | Error]:
        """Store the concatenation of each key's pieces under it, whole or not at all; a PutResult or an error for each.

        ``metas``: a small dict for each, or None, as ``Pool.put(meta=)`` takes it; ``look`` tells it. ``options``:
        those of ``Pool.put`` (``if_exists``, ``sealed``, ``pin``, ``replicas``, ``ttl_s``, ``parent`` …) but ``part``
        and ``group``. Raises InvalidArgument, and stores nothing, if the lists differ in length.
        """
        if len(keys) != len(pieces):
            raise InvalidArgument(f"{len(keys)} keys, but {len(pieces)} lists of pieces")
        if metas is not None and len(metas) != len(keys):
            raise InvalidArgument(f"{len(keys)} keys, but {len(metas)} metas")
        deadline = deadline_ns(timeout)
        native = pools._put_options(**options)
        documents, datas = [], []
        for of_key, user in zip(pieces, metas or [None] * len(keys), strict=True):
            some = [(address, nbytes) for address, nbytes in of_key if nbytes]
            documents.append(describe_bytes(sum(nbytes for _, nbytes in some), user))
            datas.append(some if some else [b""])
        names = pools._checked_keys(list(keys))
        return self._pool()._client(deadline).put_many(names, documents, datas, native, deadline) if names else []

    def get_into(
        self, keys: Sequence[str], pieces: Sequence[Sequence[Piece]], *, timeout: float | None = 30
    ) -> list[int | Error]:
        """Fill each key's pieces, in their order, with its bytes: how many there were, or an error, for each.

        Pieces may hold more than the object has; what is behind its bytes stays as it was. LayoutMismatch if they hold
        less, or the value is neither bytes nor one dense tensor or array; KeyNotFound. What was written before an error
        is unspecified. Raises InvalidArgument, and writes nothing, if the lists differ in length.
        """
        if len(keys) != len(pieces):
            raise InvalidArgument(f"{len(keys)} keys, but {len(pieces)} lists of pieces")
        deadline = deadline_ns(timeout)
        names = pools._checked_keys(list(keys))
        results: list[int | Error] = [KeyNotFound("")] * len(names)
        left = list(range(len(names)))
        while left:
            client = self._pool()._client(deadline)
            found = client.locate_many([names[i] for i in left], deadline)
            whole: list[tuple[int, Any, Piece]] = []
            again: list[int] = []
            for i, item in zip(left, found, strict=True):
                try:
                    if isinstance(item, Exception):
                        raise item
                    targets = _targets(names[i], describe(client, item, deadline), item.nbytes, pieces[i])
                    if len(targets) == 1:
                        whole.append((i, item, targets[0]))
                        continue
                    if targets:
                        client.read(item, 0, targets, deadline)
                    results[i] = item.nbytes
                except KeyNotFound as error:
                    results[i] = error
                    if item is not error:
                        again.append(i)  # superseded between the look-up and the read
                except Error as error:
                    results[i] = error
            if whole:
                outcomes = client.read_many([item for _, item, _ in whole], [piece for *_, piece in whole], deadline)
                for (i, item, _), failure in zip(whole, outcomes, strict=True):
                    results[i] = item.nbytes if failure is None else failure
                    if isinstance(failure, KeyNotFound):
                        again.append(i)
            left = sorted(again)
            if left and time.monotonic_ns() >= deadline:
                for i in left:
                    results[i] = DeadlineExceeded(f"{names[i]!r} was replaced faster than it could be read")
                break
        return results

    def nbytes(self, keys: Sequence[str], *, timeout: float | None = 30) -> list[int | Error]:
        """How many bytes ``get_into`` would write for each key, or an error. Not a use of the keys."""
        return [found if isinstance(found, Exception) else found[0] for found in self.look(keys, timeout=timeout)]

    def look(self, keys: Sequence[str], *, timeout: float | None = 30) -> list[tuple[int, dict[str, Any]] | Error]:
        """(bytes, meta) of each key, or an error: KeyNotFound, or LayoutMismatch for what ``get_into`` would not read.
        Not a use of the keys."""
        deadline = deadline_ns(timeout)
        client = self._pool()._client(deadline)
        results: list[tuple[int, dict[str, Any]] | Error] = []
        names = pools._checked_keys(list(keys))
        for name, item in zip(names, client.peek_many(names, deadline) if names else [], strict=True):
            try:
                if isinstance(item, Exception):
                    raise item
                description = describe_peeked(client, item, deadline)
                if description is not None:
                    _check(name, description, item.nbytes)
                results.append((item.nbytes, dict((description and description.user) or {})))
            except Error as error:
                results.append(error)
        return results

    def _pool(self) -> Pool:
        return context.default() if isinstance(self._given, ModuleType) else self._given


def _check(key: str, description: Description, nbytes: int) -> None:
    if not description.simple and nbytes == 0:
        return
    leaves = description.leaves
    if not description.simple or len(leaves) != 1 or leaves[0].offset or description.nbytes != nbytes:  # type: ignore[union-attr]
        raise LayoutMismatch(f"{key!r} holds more than one run of bytes: read it with get")


def _targets(key: str, description: Description, nbytes: int, pieces: Sequence[Piece]) -> list[Piece]:
    """The pieces, cut to the object's size."""
    _check(key, description, nbytes)
    out: list[Piece] = []
    left = nbytes
    for address, size in pieces:
        take = min(size, left)
        if take:
            out.append((address, take))
            left -= take
    if left:
        raise LayoutMismatch(f"{key!r} has {nbytes} bytes, the pieces hold {nbytes - left}")
    return out
