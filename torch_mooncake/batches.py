"""Many keys in one call: what ``Pool.put_many``, ``get_many`` and ``delete`` of a list do."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from torch_mooncake import _core, attempts, values
from torch_mooncake.errors import DeadlineExceeded, Error, KeyNotFound
from torch_mooncake.objects import Description, describe
from torch_mooncake.tensors import encode, plain, plain_batch, writers

R = TypeVar("R")


def put(
    client: _core.Client,
    keys: list[str],
    items: list[Any],
    user: dict[str, Any] | None,
    options: _core.PutOptions,
    deadline: int,
    alone: Callable[[str, Any], R],
) -> list[R | Exception]:
    """An outcome for each. What cannot be encoded is not sent; a value with DTensors is put by ``alone``, in turn."""
    batch = plain_batch(items) if user is None else None
    if batch is not None:
        try:
            return client.put_plain(keys, batch, options, deadline)
        except Error as error:
            return [error] * len(keys)
    outcomes: list[R | Exception | None] = [None] * len(keys)
    metas: list[bytes] = []
    datas: list[Any] = []
    sent: list[int] = []
    keep: list[Any] = []

    def flush() -> None:
        if sent:
            results: list[R | Exception]
            try:
                results = client.put_many([keys[i] for i in sent], metas, datas, options, deadline)
            except Error as error:
                results = [error] * len(sent)
            for i, result in zip(sent, results, strict=True):
                outcomes[i] = result
        for pending in (metas, datas, sent, keep):
            pending.clear()

    for i, value in enumerate(items):
        known = plain(value) if user is None else None
        if known is not None:
            metas.append(known[0])
            datas.append(known[1])
            sent.append(i)
            continue
        try:
            if writers(value) is not None:
                flush()  # raises nothing
                outcomes[i] = alone(keys[i], value)
                continue
            encoded = encode(value, user)
        except (Error, TypeError) as error:
            outcomes[i] = error
            continue
        keep.append(encoded)
        metas.append(encoded.meta)
        datas.append(encoded.data)
        sent.append(i)
    flush()
    return outcomes  # type: ignore[return-value]  # none is None any more


class Getter:
    """One ``get_many``: look up what is left, read it, and again what was replaced in between."""

    def __init__(
        self,
        client: _core.Client,
        keys: list[str],
        outs: Sequence[Any] | None,
        *,
        readonly: bool,
        consume: bool,
        deadline: int,
    ) -> None:
        self.client, self.keys, self.outs = client, keys, outs
        self.readonly, self.consume, self.deadline = readonly, consume, deadline
        self.results: list[Any] = [None] * len(keys)
        self.failed: dict[int, Exception] = {}

    def run(self) -> None:
        left = list(range(len(self.keys)))
        while left:
            keys = self.keys if len(left) == len(self.keys) else [self.keys[i] for i in left]
            outs = None if self.consume or len(left) < len(self.keys) else self.outs
            batch = None if outs is None else plain_batch(outs, writable=True)
            if outs is not None and batch is not None:
                found, left = self._read_plain(keys, batch, outs)
            else:
                found = self.client.locate_many(keys, self.deadline)
            if self.outs is None:
                left = self._map(left, found)
            else:
                left = self._read(left, found, self.outs)
            if left and time.monotonic_ns() >= self.deadline:
                for i in left:
                    self.failed[i] = DeadlineExceeded(f"{self.keys[i]!r} was replaced faster than it could be read")
                return

    def _read_plain(self, keys: list[str], batch: _core.PlainBatch, outs: Sequence[Any]) -> tuple[list[Any], list[int]]:
        """Fill the tensors whose values are just so. What was found of the others, and which they are."""
        found = self.client.get_plain(keys, batch, self.deadline)
        left = [i for i, item in enumerate(found) if item is not None]
        self.results = list(outs)
        for i in left:
            self.results[i] = None
        return [found[i] for i in left], left

    def _described(self, where: list[int], found: list[Any]) -> list[tuple[int, Any, Description | None]]:
        usable: list[tuple[int, Any, Description | None]] = []
        for i, item in zip(where, found, strict=True):
            if isinstance(item, Exception):
                self.failed[i] = item
                continue
            try:
                usable.append((i, item, describe(self.client, item, self.deadline)))
            except KeyNotFound:
                usable.append((i, item, None))  # its description lies in its bytes, which were superseded
            except Error as error:
                self.failed[i] = error
        return usable

    def _map(self, where: list[int], found: list[Any]) -> list[int]:
        """Fresh memory, or maps. Returns what was superseded in between."""
        again: list[int] = []
        plain: list[tuple[int, Any, Description]] = []
        taken: list[tuple[int, Any]] = []
        for i, item, description in self._described(where, found):
            if description is None:
                again.append(i)
            elif description.simple:
                plain.append((i, item, description))
            else:
                self._alone(i, item, None, taken, again)
        for read_only in (False, True):
            some = [entry for entry in plain if (self.readonly or entry[2].copied) is read_only]
            if not some:
                continue
            memories = self.client.map_many([item for _, item, _ in some], read_only, self.deadline)
            for (i, item, description), memory in zip(some, memories, strict=True):
                if isinstance(memory, KeyNotFound):
                    again.append(i)
                elif isinstance(memory, Exception):
                    self.failed[i] = memory
                else:
                    self.results[i] = description.over(memory)
                    taken.append((i, item))
        return again + self._take(taken)

    def _read(self, where: list[int], found: list[Any], outs: Sequence[Any]) -> list[int]:
        again: list[int] = []
        taken: list[tuple[int, Any]] = []
        plain: list[tuple[int, Any]] = []
        targets: list[Any] = []
        for i, item, description in self._described(where, found):
            if description is None:
                again.append(i)
                continue
            target = values.dense_target(description, outs[i])
            if target is None:
                self._alone(i, item, outs[i], taken, again)
                continue
            plain.append((i, item))
            targets.append(target)
        if plain:
            statuses = self.client.read_many([item for _, item in plain], targets, self.deadline)
            for (i, item), failure in zip(plain, statuses, strict=True):
                if isinstance(failure, KeyNotFound):
                    again.append(i)
                elif failure is not None:
                    self.failed[i] = failure
                else:
                    self.results[i] = outs[i]
                    taken.append((i, item))
        return again + self._take(taken)

    def _alone(self, i: int, item: Any, out: Any, taken: list[tuple[int, Any]], again: list[int]) -> None:
        try:
            self.results[i] = values.load(self.client, item, self.deadline, out=out, readonly=self.readonly)
            taken.append((i, item))
        except KeyNotFound:
            again.append(i)
        except (Error, TypeError) as error:
            self.failed[i] = error

    def _take(self, read: list[tuple[int, Any]]) -> list[int]:
        """With ``consume``: those that somebody else has taken or replaced meanwhile."""
        if not self.consume or not read:
            return []
        attempt = attempts.current()
        if attempt is not None:
            attempt.commit()
        removed = self.client.remove_many(
            [self.keys[i] for i, _ in read], [item.version for _, item in read], self.deadline
        )
        again = []
        for (i, _), outcome in zip(read, removed, strict=True):
            if outcome is True:
                continue
            self.results[i] = None
            if isinstance(outcome, Exception):
                self.failed[i] = outcome
            else:
                again.append(i)
        return again
