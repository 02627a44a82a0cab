"""A node that chunks are read from: the reads that are under way, and looks at its board between them."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import numpy as np

from torch_mooncake.errors import Error, PeerLost
from torch_mooncake.transfer import Engine, Op
from torch_mooncake.weights.board import (
    COMPLETE,
    COUNTER_NBYTES,
    COUNTERS,
    HAS_SUM,
    HEADER,
    HEADER_NBYTES,
    MAX_CHUNKS,
    MAX_ROUTES,
    MAX_SLOTS,
    NO_PLAN,
    NO_SUM,
    PLAN,
    RESTARTS,
    VERSION,
    blob_offset,
    counter_offset,
    sum_offset,
)
from torch_mooncake.weights.delta import Taker
from torch_mooncake.weights.members import Links, Member
from torch_mooncake.weights.ranges import Chunks

_WINDOW = 64 << 20  # bytes under way from one upstream, at most
_WINDOW_S = 0.03  # and what comes in this time, or two chunks: looks at the board wait behind them
_BOARD_S = 5.0
_WORDS_AHEAD = 64  # of a route's blobs, at one look
_ASK_S = 0.001  # between two looks at a board that had nothing new
PAUSE_S = 0.0002
_SUMS_A_LOOK = 64  # of each route


class Superseded(Exception):
    """The sources have begun to overwrite this version: there is a newer one, or will be."""


@dataclass
class Route:
    number: int
    path: list[int]  # nodes from the source to the one before this one
    chunks: Chunks
    next: int = 0  # the chunk to ask for
    there: list[bool] = field(default_factory=list)  # of each chunk
    proven: list[bool] = field(default_factory=list)
    told: tuple[int, int] = (0, 0)  # chunks without a gap that are there, and proven ones: as on the board

    @property
    def done(self) -> bool:
        return self.told[1] == len(self.chunks.parts)


class Upstream:
    """``tag``: of the plan. ``verify``: a chunk is asked for when its checksum is known. ``taker``: of blobs, if any
    are taken; ``deltas``: from this node, too, as far as is known."""

    def __init__(
        self,
        engine: Engine,
        links: Links,
        node: int,
        member: Member,
        source: bool,
        version: int,
        tag: int,
        verify: bool,
        taker: Taker | None = None,
    ) -> None:
        self.node, self.member, self.source, self.version = node, member, source, version
        self.link = links.open(member)
        self.same_host = self.link.peer.same_host
        self.deltas = taker is not None and (taker.everywhere or not self.same_host)
        self.words: dict[tuple[int, int], int] = {}  # (route, chunk): what its board says of the blob
        self._worded: list[tuple[Route, int, int]] = []  # (route, chunk, count) whose words the look under way brings
        self.routes: list[Route] = []
        self.slot: int | None = None
        self.has: dict[int, int] = {}  # route: chunks that it had at the last look
        self.reads: list[tuple[Op, Route, int, int | None]] = []  # the last: which block of staging memory
        self.unproven: list[tuple[Route, int]] = []  # chunks that were read since the last look at the board
        self.inflight = 0
        self.taken = 0  # bytes
        self.looked = 0  # bytes of its board that were asked for
        self.began = 0.0  # when the first chunk was asked for
        self.last_news = time.monotonic()
        self._engine, self._tag, self._verify = engine, tag, verify
        self._words = np.zeros(HEADER_NBYTES // 8, np.int64)
        self._region = engine.register(self._words)
        self._ask: Op | None = None
        self._asked: list[Route] = []
        self._last = 0  # where the look under way brings the header once more
        self._proves: list[tuple[Route, int]] = []  # those that the look under way may prove
        self.sums: dict[tuple[int, int], int | None] = {}  # (route, chunk): None: it has none
        self._summed: list[tuple[Route, int, int]] = []  # whose checksums the look brings: route, first chunk, number
        self._known: dict[int, int] = {}  # route: up to which chunk the checksums are known, without a gap
        self._restarts = 0
        self._row = b""  # what a source's board said of the slot
        self._next_ask = 0.0

    def give(self, route: Route) -> None:
        """A route comes from here from now on; what is there already is not asked for again."""
        route.next = route.told[0]
        self._known[route.number] = route.told[0]
        self.routes.append(route)
        self.last_news = time.monotonic()

    def crc(self, route: Route, chunk: int) -> int | None:
        """The checksum of a chunk that was asked for; None: it has none."""
        if not self._verify or route.chunks.first + chunk >= MAX_CHUNKS:
            return None
        return self.sums[route.number, chunk]

    def window(self) -> int:
        """Bytes that may be under way."""
        passed = time.monotonic() - self.began
        rate = self.taken / passed if self.taken and passed > 0 else 0
        largest = max(max(route.chunks.nbytes) for route in self.routes)
        return min(_WINDOW, max(2 * largest, int(rate * _WINDOW_S)))

    def ask(self) -> bool:
        """Begin to read the board, unless that is under way or too soon."""
        if self._ask is not None or time.monotonic() < self._next_ask:
            return False
        self._asked = [route for route in self.routes if route.number < MAX_ROUTES] if not self.source else []
        self._proves, self.unproven = self.unproven, []
        self._summed = self._unknown_sums()
        there = [0, *(counter_offset(route.number) for route in self._asked)]
        there += [sum_offset(self.slot or 0, route.chunks.first + first) for route, first, _ in self._summed]
        sizes = [HEADER_NBYTES] + [COUNTER_NBYTES] * len(self._asked) + [8 * count for _, _, count in self._summed]
        self._worded = self._unknown_words() if self.deltas and self.slot is not None else []
        there += [blob_offset(self.slot or 0, route.chunks.first + chunk) for route, chunk, _ in self._worded]
        sizes += [8 * count for _, _, count in self._worded]
        there.append(0)  # once more: what lies between is of what both say
        sizes.append(HEADER_NBYTES)
        here = np.concatenate([[0], np.cumsum(sizes)])
        self._last = int(here[-2]) // 8
        self.looked += int(here[-1])
        if len(self._words) * 8 < here[-1]:
            self._engine.deregister(self._region)
            self._words = np.zeros(int(here[-1]) // 8, np.int64)
            self._region = self._engine.register(self._words)
        self._ask = self._engine.read(
            self._region, self.link.board, local_offsets=here[:-1], remote_offsets=np.array(there, np.int64),
            nbytes=np.array(sizes, np.int64), timeout=_BOARD_S,
        )  # fmt: skip
        return True

    def _unknown_words(self) -> list[tuple[Route, int, int]]:
        found = []
        for route in self.routes:
            first = route.next
            while (route.number, first) in self.words:
                first += 1
            count = min(_WORDS_AHEAD, len(route.chunks.parts) - first, MAX_CHUNKS - route.chunks.first - first)
            if first < route.next + _WORDS_AHEAD and count > 0:
                found.append((route, first, count))
        return found

    def _take_words(self, plan: int) -> None:
        """``plan``: of the version on the board; 0: its owner has not begun to say more of it."""
        if plan not in (0, self._tag):
            self.deltas = False
            return
        at = (HEADER_NBYTES + len(self._asked) * COUNTER_NBYTES) // 8 + sum(count for _, _, count in self._summed)
        for route, chunk, count in self._worded:
            for i, word in enumerate(self._words[at : at + count].tolist() if plan else ()):
                if word:
                    self.words[route.number, chunk + i] = word
            at += count

    def answer(self) -> list[tuple[Route, int]] | None:
        """None while the board has not been read, else chunks that are now proven. Superseded if the version is not
        there any more, or some of it comes again."""
        if self._ask is None or not self._ask.done():
            return None
        ask, self._ask = self._ask, None
        ask.wait()
        self._next_ask = time.monotonic() + _ASK_S
        first = self._words[: HEADER_NBYTES // 8].reshape(MAX_SLOTS, HEADER)
        header = self._words[self._last : self._last + HEADER_NBYTES // 8].reshape(MAX_SLOTS, HEADER)
        versions = header[:, VERSION]
        slots = np.flatnonzero(versions == self.version)
        if self.slot is not None and self.slot not in slots:
            raise Superseded
        if not len(slots):
            if np.abs(versions).max() >= self.version:  # a newer one, or this one, withdrawn
                raise Superseded
            return []
        slot = int(slots[0]) if self.slot is None else self.slot
        row = header[slot].tobytes()
        if self.source and row != self._row:  # it makes checksums, or begins to
            self._row, self.last_news = row, time.monotonic()
        plan, complete, restarts = header[slot, [PLAN, COMPLETE, RESTARTS]].tolist()
        if self.slot is not None and restarts != self._restarts:
            raise Superseded
        self.slot, self._restarts = slot, restarts
        steady = first[slot, [VERSION, PLAN, RESTARTS]].tolist() == [self.version, plan, restarts]
        if plan == NO_PLAN and self.source:
            self._verify = False
        if complete:
            if self._verify and not self.source and plan != self._tag:
                raise PeerLost(f"{self.member.record.name} got the version another way, and has no checksums of it")
            seen = {route.number: (len(route.chunks.parts),) * 2 for route in self.routes}
        elif steady and plan == self._tag:
            begin = HEADER_NBYTES // 8
            rows = self._words[begin : begin + len(self._asked) * COUNTER_NBYTES // 8]
            counts = rows.reshape(-1, MAX_SLOTS, COUNTERS)[:, slot].tolist()
            seen = {route.number: (row[0], row[1]) for route, row in zip(self._asked, counts, strict=True)}
        else:
            seen = {}
        if steady:
            self._take_words(plan)
        if steady and plan == self._tag:
            self._learn_sums()
        self.has = {route.number: self._may_ask(route, seen.get(route.number, (0, 0))[0]) for route in self.routes}
        proven = [item for item in self._proves if item[1] < seen.get(item[0].number, (0, 0))[1]]
        self.unproven += [item for item in self._proves if item not in proven]
        self._proves = []
        return proven

    def _unknown_sums(self) -> list[tuple[Route, int, int]]:
        if not self._verify or self.slot is None:
            return []
        found = []
        for route in self.routes:
            first = self._known.get(route.number, 0)
            last = min(len(route.chunks.parts), first + _SUMS_A_LOOK, MAX_CHUNKS - route.chunks.first)
            if first < last:
                found.append((route, first, last - first))
        return found

    def _learn_sums(self) -> None:
        at = (HEADER_NBYTES + len(self._asked) * COUNTER_NBYTES) // 8
        for route, first, count in self._summed:
            for chunk, word in enumerate(self._words[at : at + count].tolist(), first):
                if not word & (HAS_SUM | NO_SUM):
                    break
                self.sums[route.number, chunk] = word - HAS_SUM if word & HAS_SUM else None
                self._known[route.number] = chunk + 1
            at += count

    def _may_ask(self, route: Route, has: int) -> int:
        """How many of the chunks that it has may be asked for."""
        known = self._known.get(route.number, 0)
        if not self._verify or route.chunks.first + known >= MAX_CHUNKS:
            return has
        return min(has, known)

    def doubtful(self) -> list[tuple[Route, int]]:
        """Chunks that are there and not proven."""
        return [*self.unproven, *self._proves]

    def wait(self, seconds: float) -> None:
        """Until something that is under way has ended, or for so long."""
        op = self.reads[0][0] if self.reads else self._ask
        if op is None:
            time.sleep(PAUSE_S)
            return
        try:
            op.wait(seconds)
        except Error:
            pass  # not in that time; or it ended so, and whoever takes it finds that

    def close(self) -> None:
        pending = [read[0] for read in self.reads] + ([self._ask] if self._ask is not None else [])
        for op in pending:
            op.cancel()
        for op in pending:
            while not op.done():  # an op ends, whatever its peer does
                time.sleep(PAUSE_S)
        self._engine.deregister(self._region)
