"""One version comes into one node's memory: one-sided reads, by the plan, from whoever is before it on each route.

From every upstream node there are reads of chunks under way, up to a window, and between them reads of its board: they
say which chunks it has. What has come is offered to others at once, and is *proven* when a look at the upstream's board
afterwards says that its slot still held the version and that the chunk is proven there. A version is complete when all
of it is proven. An upstream that is lost, stopped, or that has moved on is replaced by the one before it on the route,
in the end by the source; what is proven stays, what is not comes again, and the board says so.

Where chunks have checksums, a chunk is there when it agrees with the one that its source made: the board of each node
passes those on. One that disagrees is read again, then from the node before. Where there are blobs of what changed
(delta.py), they come in the place of chunks. Bytes for tensors that cannot be written as they come go through staging
memory, chunk by chunk, and from there into the tensors when they are proven.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch_mooncake import _core
from torch_mooncake.errors import Cancelled, Corrupt, DeadlineExceeded, Error, KeyNotFound, PeerLost
from torch_mooncake.regions import Region
from torch_mooncake.transfer import Engine, Op
from torch_mooncake.weights.arena import Memory, pairs
from torch_mooncake.weights.delta import Blob, Taker
from torch_mooncake.weights.members import Links, Member
from torch_mooncake.weights.plan import Plan
from torch_mooncake.weights.ranges import Addresses, Chunks
from torch_mooncake.weights.staging import Staging
from torch_mooncake.weights.upstream import Route, Superseded, Upstream

__all__ = ["Fetch", "Progress", "Superseded", "Wiring", "tag_of"]

_OP_S = 20.0
_WAIT_S = 0.002  # for something to end, before all upstreams are looked at again


@dataclass
class Progress:
    version: int
    nbytes: int  # that this node takes
    bytes_done: int = 0
    started: float = field(default_factory=time.monotonic)
    began: bool = False  # something was asked for, and may have been written
    full_nbytes: int = 0  # that were read as they are, by now
    delta_nbytes: int = 0  # of blobs that were read in the place of others
    bytes_looked: int = 0  # of other nodes' boards, once it has ended

    @property
    def eta_s(self) -> float | None:
        """Seconds that the rest takes at the rate so far; None before the first bytes."""
        if not self.bytes_done:
            return None
        return (time.monotonic() - self.started) * (self.nbytes - self.bytes_done) / self.bytes_done


@dataclass
class Wiring:
    """A plan as one of its nodes sees it; kept while the plan is the same.

    ``me``: whose chunks are taken: this node's, or those of a node with the same layout. ``behind``: then that node
    itself is the last one before this one on each route.
    """

    plan: Plan
    members: Sequence[Member]
    me: int
    names: Sequence[Sequence[str]]
    mine: Addresses
    behind: bool = False
    known: dict[tuple[int, int], Chunks] = field(default_factory=dict)  # by route and upstream
    sides: dict[int, Addresses] = field(default_factory=dict)  # by node

    def paths(self) -> list[tuple[int, list[int]]]:
        """(route, nodes from its source to the one before this node), of each route that reaches this node."""
        found = [(number, _path_to(route.edges, self.me)) for number, route in enumerate(self.plan.routes)]
        return [(number, [*path, self.me] if self.behind else path) for number, path in found if path]

    def chunks(self, route: int, node: int) -> Chunks:
        key = route, node
        if key not in self.known:
            if node not in self.sides:
                self.sides[node] = Addresses(self.members[node].manifest, self.members[node].offsets)
            self.known[key] = Chunks(self.plan, self.names, route, self.sides[node], self.mine)
        return self.known[key]


class Fetch:
    """``run()`` once, on one thread."""

    def __init__(
        self,
        engine: Engine,
        links: Links,
        wiring: Wiring,
        memory: Memory,
        slot: int,
        version: int,
        patience_s: float,
        *,
        verify: bool = False,
        staging: Staging | None = None,
        deltas: bool = False,
        taker: Taker | None = None,
    ) -> None:
        self._engine, self._links, self._wiring, self._memory = engine, links, wiring, memory
        self._slot, self._version, self._patience_s, self._verify = slot, version, patience_s, verify
        self._board, self._staging = memory.board, staging
        self._deltas, self._taker = deltas, taker  # whether there are blobs; whether this node can take them
        self._coming: dict[tuple[int, int], Blob] = {}  # (route, chunk): into which place its blob comes
        self._tag = tag_of(wiring.plan)
        self._upstreams: dict[int, Upstream] = {}
        self._dead: set[int] = set()
        self._blocks: dict[tuple[int, int], int] = {}  # of staging memory: where a chunk that is there lies
        self._wrong: set[tuple[int, int, int]] = set()  # (node, route, chunk) whose checksum did not agree
        self.lost: list[str] = []  # uids of upstreams that were given up
        self._routes = [Route(number, path, wiring.chunks(number, path[-1])) for number, path in wiring.paths()]
        for route in self._routes:
            route.there, route.proven = ([False] * len(route.chunks.parts) for _ in range(2))
        self.progress = Progress(version, sum(route.chunks.total for route in self._routes))

    def run(self, stopped: Callable[[], bool]) -> None:
        """Returns when everything is there. Superseded; PeerLost or DeadlineExceeded when a source is lost; Corrupt
        when bytes are wrong again and again; Cancelled when ``stopped()``."""
        self._board.begin(self._slot, self._tag, self.progress.nbytes)
        self._board.announce(self._slot, self._version)
        if self._taker is not None:
            self._taker.begin()
        try:
            for route in self._routes:
                self._give(route)
            while not all(route.done for route in self._routes):
                if stopped():
                    raise Cancelled(f"version {self._version} of the weights was not awaited")
                moved = False
                for upstream in list(self._upstreams.values()):
                    moved |= self._serve(upstream)
                if not moved and self._upstreams:
                    next(iter(self._upstreams.values())).wait(_WAIT_S)
        except BaseException:
            self._board.begin(self._slot)
            raise
        finally:
            for upstream in self._upstreams.values():
                self._close(upstream)
            self._free_blocks(list(self._blocks))
        for route in self._routes:
            for source, target, nbytes in route.chunks.copies:
                self._memory.copy(self._slot, source, target, nbytes)
        self._board.complete(self._slot)

    def _serve(self, upstream: Upstream) -> bool:
        """Whether anything came of it."""
        try:
            moved = arrived = self._take(upstream)
            proofs = upstream.answer() or []
            moved |= bool(proofs)
            for route, chunk in proofs:
                self._prove(route, chunk)
            moved |= self._request(upstream)
            upstream.routes = [route for route in upstream.routes if not route.done]
            if not upstream.routes:
                del self._upstreams[upstream.node]
                self._close(upstream)
                return True
            moved |= upstream.ask()
            if arrived or proofs:
                upstream.last_news = time.monotonic()
            elif upstream.deltas and upstream.source and time.monotonic() - upstream.last_news > self._patience_s:
                upstream.deltas, upstream.last_news = False, time.monotonic()  # nobody says anything of blobs
            elif not upstream.source and time.monotonic() - upstream.last_news > self._patience_s:
                raise DeadlineExceeded(f"nothing came from {upstream.member.record.name} in {self._patience_s} s")
            elif upstream.source and time.monotonic() - upstream.last_news > _OP_S:
                if upstream.slot is None:
                    raise Superseded
                raise DeadlineExceeded(f"nothing came from {upstream.member.record.name} in {_OP_S} s")
            return moved
        except Superseded:
            if upstream.source:
                raise
            self._replace(upstream, PeerLost(f"{upstream.member.record.name} has another version by now"))
        except Error as error:
            self._replace(upstream, error)
        return True

    def _take(self, upstream: Upstream) -> bool:
        """Chunks whose reads have ended are there, and wait for a look at the board."""
        ended = [read for read in upstream.reads if read[0].done()]
        if not ended:
            return False
        for read in ended:
            op, route, chunk, block = read
            op.wait()
            upstream.reads.remove(read)
            upstream.inflight -= route.chunks.nbytes[chunk]
            upstream.taken += route.chunks.nbytes[chunk]
            if not self._put_in(route, chunk) or not self._agrees(upstream, route, chunk, block):
                continue
            upstream.unproven.append((route, chunk))
            route.there[chunk] = True
            if block is not None:
                self._blocks[route.number, chunk] = block
            self.progress.bytes_done += route.chunks.nbytes[chunk]
            self._tell(route)
        self._board.advance(self._slot, self.progress.bytes_done)
        return True

    def _put_in(self, route: Route, chunk: int) -> bool:
        """Makes the chunk of its blob, if that is what came. False: it has to come again, in full."""
        number, blob = route.chunks.first + chunk, self._coming.pop((route.number, chunk), None)
        if blob is None:
            self.progress.full_nbytes += route.chunks.nbytes[chunk]
        elif self._taker is not None:
            self.progress.delta_nbytes += blob.nbytes
            _, here, lengths = route.chunks.parts[chunk]
            if not self._taker.apply(blob, here, lengths):
                self._taker.in_full(number)
                route.next = min(route.next, chunk)
                return False
        if self._deltas:
            self._board.put_blob(self._slot, number, -1 if blob is None else blob.to_word())
        return True

    def _prove(self, route: Route, chunk: int) -> None:
        block = self._blocks.pop((route.number, chunk), None)
        if block is not None and self._staging is not None:
            self._staging.apply(block, route.chunks.applies[chunk])
        route.proven[chunk] = True
        self._tell(route)

    def _free_blocks(self, chunks: Sequence[tuple[int, int]]) -> None:
        """Staging memory of chunks that will not be proven."""
        for key in chunks:
            block = self._blocks.pop(key, None)
            if block is not None and self._staging is not None:
                self._staging.give_back(block)

    def _crc(self, route: Route, chunk: int, block: int | None) -> int:
        _, here, lengths = route.chunks.parts[chunk]
        staging = 0 if self._staging is None or block is None else self._staging.address(block)
        return _core.crc32c(0, self._memory.addresses(self._slot, here, staging), lengths)

    def _agrees(self, upstream: Upstream, route: Route, chunk: int, block: int | None) -> bool:
        """Whether what came has the checksum of its source. If not, it comes again; Corrupt the second time."""
        if not self._verify:
            return True
        crc = upstream.crc(route, chunk)
        if crc is None or self._crc(route, chunk, block) == crc:
            self._board.put_sum(self._slot, route.chunks.first + chunk, crc)
            return True
        if block is not None and self._staging is not None:
            self._staging.give_back(block)
        if self._taker is not None:
            self._taker.in_full(route.chunks.first + chunk)
        route.next = min(route.next, chunk)
        key = upstream.node, route.number, chunk
        if key in self._wrong:
            name = upstream.member.record.name
            raise Corrupt(f"version {self._version} of the weights came from {name} with other bytes than it should")
        self._wrong.add(key)
        return False

    def _forget(self, route: Route, chunk: int) -> None:
        route.there[chunk] = False
        if self._deltas:
            self._board.put_blob(self._slot, route.chunks.first + chunk, 0)  # it is not known yet how it comes again
        route.next = min(route.next, chunk)
        self.progress.bytes_done -= route.chunks.nbytes[chunk]
        if chunk < route.told[0]:
            route.told = chunk, route.told[1]
            self._board.count(self._slot, route.number, *route.told)

    def _request(self, upstream: Upstream) -> bool:
        moved, has = False, upstream.has
        wanted = [route for route in upstream.routes if route.next < has.get(route.number, 0)]
        window = upstream.window() if wanted else 0
        while wanted and upstream.inflight < window:
            for route in list(wanted):  # in turns: all routes get on
                if self._word(upstream, route) == 0:  # it is not known yet whether there is a blob
                    wanted.remove(route)
                    continue
                if not self._read(upstream, route):
                    if not upstream.reads and not upstream.doubtful():
                        upstream.last_news = time.monotonic()  # it is we who wait, for what others hold
                    return moved
                moved = True
                if route.next >= has[route.number]:
                    wanted.remove(route)
                if upstream.inflight >= window:
                    break
        return moved

    def _read(self, upstream: Upstream, route: Route) -> bool:
        """False: there is no staging memory for it now."""
        assert upstream.slot is not None
        self._skip(upstream, route)
        if route.next >= upstream.has[route.number]:  # those that it has are all there, or under way
            return True
        if (op := self._read_blob(upstream, route)) is not None:
            self._reading(upstream, op, route, None)
            return True
        chunk, block = route.next, None
        if self._staging is not None and route.chunks.staged[chunk]:
            block = self._staging.take()
            if block is None:
                return False
        there, here, lengths = route.chunks.parts[chunk]
        regions = self._links.slot(upstream.member, upstream.slot)
        own: Sequence[Region] = self._memory.slots[self._slot]
        bases = self._memory.bases
        if len(regions) == len(own) == 1 and block is None:
            op = self._engine.read(
                own[0], regions[0], local_offsets=here, remote_offsets=there, nbytes=lengths, timeout=_OP_S
            )
        else:
            if block is not None and self._staging is not None:
                own, bases, here = self._staging.beside(own, bases, here, block)
            remote = regions, upstream.member.bases, there
            op = self._engine.read(pairs((own, bases, here), remote, lengths), timeout=_OP_S)
        self._coming.pop((route.number, chunk), None)
        self._reading(upstream, op, route, block)
        return True

    def _reading(self, upstream: Upstream, op: Op, route: Route, block: int | None) -> None:
        upstream.began = upstream.began or time.monotonic()
        self.progress.began = True
        upstream.reads.append((op, route, route.next, block))
        upstream.inflight += route.chunks.nbytes[route.next]
        route.next += 1

    def _read_blob(self, upstream: Upstream, route: Route) -> Op | None:
        """None: the next chunk is to be taken in full."""
        word = self._word(upstream, route)
        theirs = None if word is None else Blob.of_word(word)
        if theirs is None or self._taker is None or upstream.slot is None:
            return None
        mine = self._taker.room(theirs, route.chunks.nbytes[route.next])
        if mine is None:
            return None
        try:
            there = self._links.blobs(upstream.member, upstream.slot)
        except KeyNotFound:
            upstream.deltas = False
            return None
        here = self._taker.region()[mine.offset : mine.offset + mine.nbytes]
        self._coming[route.number, route.next] = mine
        return self._engine.read(here, there[theirs.offset : theirs.offset + theirs.nbytes], timeout=_OP_S)

    def _word(self, upstream: Upstream, route: Route) -> int | None:
        """What the upstream says of the next chunk's blob, 0 if it has not yet; None if it is not asked."""
        self._skip(upstream, route)
        if self._taker is None or not upstream.deltas or route.next == len(route.there):
            return None
        if not self._taker.wanted(route.chunks.first + route.next):
            return None
        return upstream.words.get((route.number, route.next), 0)

    def _skip(self, upstream: Upstream, route: Route) -> None:
        while route.next < len(route.there) and (route.there[route.next] or self._asked(upstream, route)):
            route.next += 1

    def _asked(self, upstream: Upstream, route: Route) -> bool:
        return any(read[1] is route and read[2] == route.next for read in upstream.reads)

    def _tell(self, route: Route) -> None:
        there, proven = route.told
        while proven < len(route.proven) and route.proven[proven]:
            proven += 1
        while there < len(route.there) and route.there[there]:
            there += 1
        if (there, proven) != route.told:
            route.told = there, proven
            self._board.count(self._slot, route.number, there, proven)

    def _replace(self, upstream: Upstream, error: Error) -> None:
        """The routes go to the nodes before it. ``error`` is raised if it is a source."""
        del self._upstreams[upstream.node]
        self._close(upstream)
        self._dead.add(upstream.node)
        self.lost.append(upstream.member.uid)
        self._links.drop(upstream.member.uid)
        doubtful = upstream.doubtful()
        if doubtful:
            self._board.restart(self._slot)
        for route, chunk in doubtful:
            self._free_blocks([(route.number, chunk)])
            self._forget(route, chunk)
        for route in upstream.routes:
            route.path.pop()
            if not route.path:
                if isinstance(error, Corrupt):
                    raise error
                name = upstream.member.record.name
                raise PeerLost(f"version {self._version} of the weights cannot come from {name}: {error}") from error
            self._give(route)

    def _give(self, route: Route) -> None:
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
                member = self._wiring.members[node]
                self.lost.append(member.uid)
                if len(route.path) == 1:
                    text = f"version {self._version} of the weights cannot come from {member.record.name}: {error}"
                    raise PeerLost(text) from error
        route.chunks = self._wiring.chunks(route.number, node)
        if not route.done:
            upstream.give(route)

    def _connect(self, node: int) -> Upstream:
        member, source = self._wiring.members[node], node < self._wiring.plan.sources
        upstream = self._upstreams[node] = Upstream(
            self._engine, self._links, node, member, source, self._version, self._tag, self._verify, self._taker
        )
        return upstream

    def _close(self, upstream: Upstream) -> None:
        upstream.close()
        self.progress.bytes_looked += upstream.looked
        for _, _, _, block in upstream.reads:
            if block is not None and self._staging is not None:
                self._staging.give_back(block)
        upstream.reads = []


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
