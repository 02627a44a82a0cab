"""One version comes into one node's slot: one-sided reads, by the plan, from whoever is before it on each route.

From every upstream node there are reads of chunks under way, up to a window, and between them reads of its board: they
say which chunks it has. What has come is offered to others at once, and is *proven* when a look at the upstream's board
afterwards says that its slot still held the version and that the chunk is proven there. A version is complete when all
of it is proven. An upstream that is lost, stopped, or that has moved on is replaced by the one before it on the route,
in the end by the source; what is proven stays, what is not comes again, and the board says so.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from torch_mooncake.errors import Cancelled, DeadlineExceeded, Error, PeerLost
from torch_mooncake.transfer import Engine, Op
from torch_mooncake.weights.arena import COUNTERS, HEADER, MAX_ROUTES, SLOTS, Arena, counter_offset, header_offset
from torch_mooncake.weights.members import Link, Links, Member
from torch_mooncake.weights.plan import Plan
from torch_mooncake.weights.ranges import Addresses, Chunks

_WINDOW = 64 << 20  # bytes under way from one upstream, at most
_WINDOW_S = 0.03  # and what comes in this time, or two chunks: looks at the board wait behind them
_OP_S = 20.0
_BOARD_S = 5.0
_ASK_S = 0.001  # between two looks at a board that had nothing new
_PAUSE_S = 0.0002
_HEADER = 8 * SLOTS * HEADER


class Superseded(Exception):
    """The sources have begun to overwrite this version: there is a newer one, or will be."""


@dataclass
class _Route:
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


@dataclass
class Progress:
    version: int
    nbytes: int  # that this node takes
    bytes_done: int = 0
    started: float = field(default_factory=time.monotonic)

    @property
    def eta_s(self) -> float | None:
        """Seconds that the rest takes at the rate so far; None before the first bytes."""
        if not self.bytes_done:
            return None
        return (time.monotonic() - self.started) * (self.nbytes - self.bytes_done) / self.bytes_done


class _Upstream:
    def __init__(self, engine: Engine, node: int, member: Member, link: Link, source: bool, version: int) -> None:
        self.node, self.member, self.link, self.source, self.version = node, member, link, source, version
        self.routes: list[_Route] = []
        self.slot: int | None = None
        self.has: dict[int, int] = {}  # route: chunks that it had at the last look
        self.reads: list[tuple[Op, _Route, int]] = []
        self.unproven: list[tuple[_Route, int]] = []  # chunks that were read since the last look at the board
        self.inflight = 0
        self.taken = 0  # bytes
        self.began = 0.0  # when the first chunk was asked for
        self.last_news = time.monotonic()
        self._engine = engine
        self._words = np.zeros(_HEADER // 8, np.int64)
        self._region = engine.register(self._words)
        self._ask: Op | None = None
        self._asked: list[_Route] = []
        self._proves: list[tuple[_Route, int]] = []  # those that the look under way may prove
        self._restarts = 0
        self._next_ask = 0.0

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
        words = _HEADER // 8 + SLOTS * COUNTERS * len(self._asked)
        if len(self._words) < words:
            self._engine.deregister(self._region)
            self._words = np.zeros(words, np.int64)
            self._region = self._engine.register(self._words)
        there = [header_offset(0)]
        there += [counter_offset(slot, route.number) for route in self._asked for slot in range(SLOTS)]
        here = [0, *range(_HEADER, words * 8, 8 * COUNTERS)]
        sizes = [_HEADER] + [8 * COUNTERS] * (len(here) - 1)
        self._proves, self.unproven = self.unproven, []
        self._ask = self._engine.read(
            self._region, self.link.board, local_offsets=np.array(here, np.int64),
            remote_offsets=np.array(there, np.int64), nbytes=np.array(sizes, np.int64), timeout=_BOARD_S,
        )  # fmt: skip
        return True

    def answer(self, tag: int) -> list[tuple[_Route, int]] | None:
        """None while the board has not been read, else chunks that are now proven. Superseded if the version is not
        there any more, or some of it comes again."""
        if self._ask is None or not self._ask.done():
            return None
        self._ask.wait()
        self._ask = None
        self._next_ask = time.monotonic() + _ASK_S
        header = self._words[: _HEADER // 8].reshape(SLOTS, -1)
        slots = np.flatnonzero(header[:, 0] == self.version)
        if (self.slot is not None and self.slot not in slots) or (not len(slots) and header[:, 0].max() > self.version):
            raise Superseded
        if not len(slots):
            return []
        slot = int(slots[0])
        _, plan, complete, restarts = header[slot].tolist()
        if self.slot is not None and restarts != self._restarts:
            raise Superseded
        self.slot, self._restarts = slot, restarts
        if complete:
            counters = [(len(route.chunks.parts),) * 2 for route in self.routes]
            seen = {route.number: counts for route, counts in zip(self.routes, counters, strict=True)}
        elif plan == tag:
            rows = self._words[_HEADER // 8 :].reshape(-1, SLOTS, COUNTERS)[:, slot].tolist()
            seen = {route.number: (row[0], row[1]) for route, row in zip(self._asked, rows, strict=False)}
        else:
            seen = {}
        self.has = {number: counts[0] for number, counts in seen.items()}
        proven = [item for item in self._proves if item[1] < seen.get(item[0].number, (0, 0))[1]]
        self.unproven += [item for item in self._proves if item not in proven]
        self._proves = []
        return proven

    def doubtful(self) -> list[tuple[_Route, int]]:
        """Chunks that are there and not proven."""
        return [*self.unproven, *self._proves]

    def close(self) -> None:
        for op, _, _ in self.reads:
            op.cancel()
        pending = [op for op, _, _ in self.reads] + ([self._ask] if self._ask is not None else [])
        for op in pending:
            if op is self._ask:
                op.cancel()
            while not op.done():  # an op ends, whatever its peer does
                time.sleep(_PAUSE_S)
        self._engine.deregister(self._region)


class Fetch:
    """``run()`` once, on one thread. ``plan``'s nodes are ``members``; this one is ``me``."""

    def __init__(
        self,
        engine: Engine,
        links: Links,
        plan: Plan,
        names: Sequence[Sequence[str]],
        members: Sequence[Member],
        me: int,
        arena: Arena,
        slot: int,
        version: int,
        chunks: dict[tuple[str, int, int], Chunks],
        patience_s: float,
    ) -> None:
        self._engine, self._links, self._plan, self._names, self._members = engine, links, plan, names, members
        self._me, self._arena, self._slot, self._version = me, arena, slot, version
        self._known, self._patience_s = chunks, patience_s
        self._tag = tag_of(plan)
        self._addresses = {me: Addresses(arena.manifest)}
        self._upstreams: dict[int, _Upstream] = {}
        self._dead: set[int] = set()
        self._copies: list[tuple[int, int, int]] = []
        self.lost: list[str] = []  # uids of upstreams that were given up
        routes = [(number, path) for number, route in enumerate(plan.routes) if (path := _path_to(route.edges, me))]
        self._routes = [_Route(number, path, self._chunks(number, path[-1])) for number, path in routes]
        for route in self._routes:
            route.there, route.proven = ([False] * len(route.chunks.parts) for _ in range(2))
        self.progress = Progress(version, sum(route.chunks.total for route in self._routes))

    def run(self, stopped: Callable[[], bool]) -> None:
        """Returns when everything is there. Superseded; PeerLost or DeadlineExceeded when a source is lost; Cancelled
        when ``stopped()``."""
        self._arena.begin(self._slot, self._tag)
        self._arena.announce(self._slot, self._version)
        try:
            for route in self._routes:
                self._give(route)
            while not all(route.done for route in self._routes):
                if stopped():
                    raise Cancelled(f"version {self._version} of the weights was not awaited")
                moved = False
                for upstream in list(self._upstreams.values()):
                    moved |= self._serve(upstream)
                if not moved:
                    time.sleep(_PAUSE_S)
        finally:
            for upstream in self._upstreams.values():
                upstream.close()
        memory = self._arena.slots[self._slot]
        for route in self._routes:
            for source, target, nbytes in route.chunks.copies:
                memory[target : target + nbytes] = memory[source : source + nbytes]
        self._arena.complete(self._slot)

    def _serve(self, upstream: _Upstream) -> bool:
        """Whether anything came of it."""
        try:
            moved = arrived = self._take(upstream)
            proven = upstream.answer(self._tag) or []
            for route, chunk in proven:
                route.proven[chunk] = True
                self._tell(route)
            moved |= bool(proven)
            moved |= self._request(upstream)
            upstream.routes = [route for route in upstream.routes if not route.done]
            if not upstream.routes:
                del self._upstreams[upstream.node]
                upstream.close()
                return True
            moved |= upstream.ask()
            if arrived or proven:
                upstream.last_news = time.monotonic()
            elif not upstream.source and time.monotonic() - upstream.last_news > self._patience_s:
                raise DeadlineExceeded(f"nothing came from {upstream.member.record.name} in {self._patience_s} s")
            elif upstream.source and upstream.slot is None and time.monotonic() - upstream.last_news > _OP_S:
                raise Superseded
            return moved
        except Superseded:
            if upstream.source:
                raise
            self._replace(upstream, PeerLost(f"{upstream.member.record.name} has another version by now"))
        except Error as error:
            self._replace(upstream, error)
        return True

    def _take(self, upstream: _Upstream) -> bool:
        """Chunks whose reads have ended are there, and wait for a look at the board."""
        ended = [read for read in upstream.reads if read[0].done()]
        if not ended:
            return False
        upstream.reads = [read for read in upstream.reads if read not in ended]
        for op, route, chunk in ended:
            op.wait()
            upstream.inflight -= route.chunks.nbytes[chunk]
            upstream.taken += route.chunks.nbytes[chunk]
            upstream.unproven.append((route, chunk))
            route.there[chunk] = True
            self.progress.bytes_done += route.chunks.nbytes[chunk]
            self._tell(route)
        return True

    def _request(self, upstream: _Upstream) -> bool:
        moved, has = False, upstream.has
        wanted = [route for route in upstream.routes if route.next < has.get(route.number, 0)]
        window = upstream.window() if wanted else 0
        while wanted and upstream.inflight < window:
            for route in list(wanted):  # in turns: all routes get on
                self._read(upstream, route)
                moved = True
                if route.next >= has[route.number]:
                    wanted.remove(route)
                if upstream.inflight >= window:
                    break
        return moved

    def _read(self, upstream: _Upstream, route: _Route) -> None:
        assert upstream.slot is not None
        while route.next < len(route.there) and route.there[route.next]:
            route.next += 1
        if route.next == len(route.there):
            return
        upstream.began = upstream.began or time.monotonic()
        there, here, lengths = route.chunks.parts[route.next]
        op = self._engine.read(
            self._arena.regions[self._slot], upstream.link.slots[upstream.slot], local_offsets=here,
            remote_offsets=there, nbytes=lengths, timeout=_OP_S,
        )  # fmt: skip
        upstream.reads.append((op, route, route.next))
        upstream.inflight += route.chunks.nbytes[route.next]
        route.next += 1

    def _tell(self, route: _Route) -> None:
        there, proven = route.told
        while there < len(route.there) and route.there[there]:
            there += 1
        while proven < len(route.proven) and route.proven[proven]:
            proven += 1
        if (there, proven) != route.told:
            route.told = there, proven
            self._arena.count(self._slot, route.number, there, proven)

    def _replace(self, upstream: _Upstream, error: Error) -> None:
        """The routes go to the nodes before it. ``error`` is raised if it is a source."""
        del self._upstreams[upstream.node]
        upstream.close()
        self._dead.add(upstream.node)
        self.lost.append(upstream.member.uid)
        self._links.drop(upstream.member.uid)
        doubtful = upstream.doubtful()
        if doubtful:
            self._arena.restart(self._slot)
        for route, chunk in doubtful:
            route.there[chunk] = False
            self.progress.bytes_done -= route.chunks.nbytes[chunk]
            route.told = min(route.told[0], chunk), route.told[1]
            self._arena.count(self._slot, route.number, *route.told)
        for route in upstream.routes:
            route.path.pop()
            if not route.path:
                name = upstream.member.record.name
                raise PeerLost(f"version {self._version} of the weights cannot come from {name}: {error}") from error
            self._give(route)

    def _give(self, route: _Route) -> None:
        """To the nearest node before this one that is not known to be lost."""
        while True:
            while len(route.path) > 1 and route.path[-1] in self._dead:
                route.path.pop()
            node = route.path[-1]
            try:
                upstream = self._upstreams.get(node) or self._connect(node)
                break
            except Error as error:
                self._dead.add(node)
                self.lost.append(self._members[node].uid)
                if len(route.path) == 1:
                    name = self._members[node].record.name
                    text = f"version {self._version} of the weights cannot come from {name}: {error}"
                    raise PeerLost(text) from error
        route.chunks = self._chunks(route.number, node)
        route.next = route.told[0]
        if not route.done:
            upstream.routes.append(route)
            upstream.last_news = time.monotonic()

    def _connect(self, node: int) -> _Upstream:
        member = self._members[node]
        link = self._links.open(member)
        source = node < self._plan.sources
        upstream = self._upstreams[node] = _Upstream(self._engine, node, member, link, source, self._version)
        return upstream

    def _chunks(self, route: int, node: int) -> Chunks:
        key = self._plan.digest, route, node
        if key not in self._known:
            if node not in self._addresses:
                self._addresses[node] = Addresses(self._members[node].manifest)
            mine = self._addresses[self._me]
            self._known[key] = Chunks(self._plan, self._names, route, self._addresses[node], mine)
        return self._known[key]


def tag_of(plan: Plan) -> int:
    """63 bits of the plan's digest, never 0."""
    return int(plan.digest[:15], 16) | 1


def _path_to(edges: Sequence[tuple[int, int, bool]], node: int) -> list[int]:
    """The nodes from the root to the one before ``node``; empty if it is not on the route."""
    before = {dst: src for src, dst, _ in edges}
    path: list[int] = []
    while node in before:
        node = before[node]
        path.insert(0, node)
    return path
