"""Checksums of what a trainer rank has, and what has changed in it, made by a thread beside it: for each chunk that
leaves it first."""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence

import numpy as np

from torch_mooncake import _core
from torch_mooncake.weights.arena import Memory
from torch_mooncake.weights.board import MAX_CHUNKS, NO_PLAN
from torch_mooncake.weights.delta import Maker, itemsizes
from torch_mooncake.weights.fetch import tag_of
from torch_mooncake.weights.members import Head, Member, Room
from torch_mooncake.weights.plan import PLANNER, Plan
from torch_mooncake.weights.ranges import Addresses, Chunks, names_of
from torch_mooncake.weights.shards import Ints


def planned(sources: Sequence[Member], targets: Sequence[Member], subset: bool) -> Plan:
    """The plan that all members make."""
    manifests = [member.manifest for member in (*sources, *targets)]
    places = [member.place for member in (*sources, *targets)]
    partial = any(member.part for member in targets)
    return PLANNER.plan(manifests[: len(sources)], manifests[len(sources) :], places, subset=subset, partial=partial)


class Sums:
    """``begin`` and ``withdraw`` are to be called instead of the board's, so that no late checksum gets onto it."""

    def __init__(self, room: Room, memory: Memory, me: str, maker: Maker | None = None) -> None:
        self._maker = maker
        self._room, self._memory, self._me = room, memory, me
        self._lock = threading.Lock()  # of the board's words
        self._chunks: list[tuple[int, np.ndarray, np.ndarray, int]] = []  # (number, addresses, lengths, element size)
        self._chunks_of = ""
        self._queue: queue.SimpleQueue[tuple[int, Head] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def begin(self, slot: int) -> None:
        with self._lock:
            self._memory.board.begin(slot)

    def withdraw(self, slot: int) -> None:
        with self._lock:
            self._memory.board.withdraw(slot)

    def check(self) -> None:
        """Raises what went wrong with an earlier version; once."""
        error, self._error = self._error, None
        if error is not None:
            raise error

    def make(self, slot: int, head: Head) -> None:
        """Of the version that is in the slot. If it cannot be done, the board says so, and ``check`` why."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="tm-weights-sums", daemon=True)
            self._thread.start()
        self._queue.put((slot, head))

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            slot, head = item
            try:
                self._make(slot, head)
            except Exception as error:  # check() raises it
                self._error = error
                with self._lock:
                    if self._memory.board.version(slot) == head.version:
                        self._memory.board.set_plan(slot, NO_PLAN)  # readers go on without

    def _make(self, slot: int, head: Head) -> None:
        members = self._room.members((*head.sources, *head.targets))
        known = [member for member in members if member is not None and (member.relays or member.uid in head.sources)]
        board = self._memory.board
        # Of somebody who has left it is not known what it had: then there is no plan, and are no checksums.
        tag = NO_PLAN if None in members else self._wire(known, len(head.sources), head.subset)
        with self._lock:
            if board.version(slot) != head.version:
                return
            board.set_plan(slot, tag)
        if self._maker is not None and head.base:
            self._maker.begin(slot, head.version)
        nbytes = 0
        for number, at, lengths, itemsize in self._chunks if tag != NO_PLAN else ():
            if head.base and not self._put_blob(slot, head, number, at, lengths, itemsize):
                return
            if not head.verify:
                continue
            crc = _core.crc32c(0, self._memory.addresses(slot, at), lengths)
            with self._lock:
                if board.version(slot) != head.version:
                    return
                board.put_sum(slot, number, crc)
                nbytes += int(lengths.sum())
                board.advance(slot, nbytes)  # a sign of life for those who wait for a sum

    def _put_blob(self, slot: int, head: Head, number: int, at: Ints, lengths: Ints, itemsize: int) -> bool:
        """False: the slot holds something else by now."""
        board = self._memory.board

        def still() -> bool:
            return board.version(slot) == head.version

        word = -1
        if self._maker is not None:
            word = self._maker.word(slot, head.base, number, at, lengths, itemsize, still)
        with self._lock:
            if still():
                board.put_blob(slot, number, word)
            return still()

    def _wire(self, members: Sequence[Member], sources: int, subset: bool) -> int:
        plan = planned(members[:sources], members[sources:], subset)
        if plan.digest != self._chunks_of:
            me = next(i for i, member in enumerate(members) if member.uid == self._me)
            names = names_of(plan, [member.manifest for member in members[:sources]])
            mine = Addresses(self._memory.manifest, self._memory.offsets)
            sizes, found = itemsizes(plan), []
            for number, route in enumerate(plan.routes):
                if route.source == me:
                    chunks = Chunks(plan, names, number, mine, mine)
                    for i, (at, _, lengths) in enumerate(chunks.parts):
                        if (n := chunks.first + i) < MAX_CHUNKS:
                            found.append((i, (n, at, lengths, int(sizes[n]))))
            found.sort(key=lambda item: item[0])  # the first ones of all routes first
            self._chunks, self._chunks_of = [chunk for _, chunk in found], plan.digest
        return tag_of(plan)

    def close(self) -> None:
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join()
