"""Who sends which bytes to whom: the plan of one update, the same for all versions while nobody's layout changes.

* Each unique byte leaves the sources' hosts over the network once, from the owner whose NIC has least to send.
* It crosses each receiving host's NIC once: one node of the host takes it (the one whose NIC has least to take), the
  others of that host copy it from there. A host that has an owner of its own uses no NIC at all.
* Receivers pass on what they have: the hosts that want a byte are a chain, so everybody sends and receives it at most
  once over the network, and a source sends the same amount however many receivers there are. Chains over the same
  hosts begin at different ones.
* Bytes travel in *chunks* of 1 to 16 MiB (less only where a whole route has less): whole boxes of whole elements, many
  small tensors in one, large ones cut.

The plan depends on its arguments only: everybody who knows the manifests and places makes the same one.
"""

from __future__ import annotations

import hashlib
import math
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import msgspec
import numpy as np

from torch_mooncake.errors import InvalidArgument
from torch_mooncake.weights.atoms import Demand, refine
from torch_mooncake.weights.shards import Ints, Manifest, Whole

MIN_CHUNK, MAX_CHUNK = 1 << 20, 16 << 20
_MAX_PIECE = MAX_CHUNK - MIN_CHUNK  # so that a chunk that is still too small always takes the next piece
_CHUNKS_A_HOP = 64  # the pipeline fills in this part of a route's time


class Place(NamedTuple):
    """Where a node is: nodes of one host share memory; ``nic`` is its NIC there (several nodes may share one)."""

    host: str
    nic: int = 0


class Edge(NamedTuple):
    src: int  # node
    dst: int
    network: bool  # over NICs; else within a host


@dataclass(frozen=True)
class Route:
    """``edges``: a tree rooted at the source, parents before children. All bytes of the route go over all edges."""

    source: int
    edges: tuple[Edge, ...]


@dataclass(frozen=True, eq=False)
class Plan:
    """Nodes: the sources from 0, then the targets. Chunks are sorted by route, pieces by chunk: that is their order on
    the wire. Do not write into the arrays."""

    digest: str  # of all manifests and places
    sources: int
    places: tuple[Place, ...]  # of every node
    wholes: tuple[Whole, ...]
    routes: tuple[Route, ...]
    chunk_route: Ints  # [chunks]
    chunk_nbytes: Ints  # [chunks]
    piece_chunk: Ints  # [pieces]
    piece_whole: Ints  # [pieces]
    piece_start: Ints  # [pieces, ndim], see Manifest
    piece_size: Ints  # [pieces, ndim]
    piece_nbytes: Ints  # [pieces]

    @property
    def nbytes(self) -> int:
        """Unique bytes that somebody wants."""
        return int(self.chunk_nbytes.sum())

    @cached_property
    def route_nbytes(self) -> Ints:
        return np.bincount(self.chunk_route, self.chunk_nbytes, len(self.routes)).astype(np.int64)

    def traffic(self, *, network: bool = True) -> tuple[Ints, Ints]:
        """(bytes sent, bytes received) of each node: over NICs, or within hosts."""
        sent, received = np.zeros(len(self.places), np.int64), np.zeros(len(self.places), np.int64)
        for route, nbytes in zip(self.routes, self.route_nbytes.tolist(), strict=True):
            for edge in route.edges:
                if edge.network == network:
                    sent[edge.src] += nbytes
                    received[edge.dst] += nbytes
        return sent, received

    def __repr__(self) -> str:
        return (
            f"<Plan {self.digest[:12]}: {self.sources} sources, {len(self.places) - self.sources} targets, "
            f"{self.nbytes} bytes in {len(self.chunk_route)} chunks on {len(self.routes)} routes>"
        )


def digest_of(
    sources: Sequence[Manifest],
    targets: Sequence[Manifest],
    places: Sequence[Place],
    subset: bool = False,
    partial: bool = False,
) -> str:
    layouts = [manifest.digest for manifest in (*sources, *targets)]
    return hashlib.sha256(msgspec.json.encode((len(sources), layouts, list(places), subset, partial))).hexdigest()


def plan(
    sources: Sequence[Manifest],
    targets: Sequence[Manifest],
    places: Sequence[Place] | None = None,
    *,
    subset: bool = False,
    partial: bool = False,
) -> Plan:
    """Plans an update of all ``targets`` from all ``sources``. ``places``: of the sources, then of the targets; None:
    each on a host of its own. ``subset``, ``partial`` and errors: as ``compare``."""
    if places is None:
        places = [Place(str(node)) for node in range(len(sources) + len(targets))]
    if len(places) != len(sources) + len(targets):
        raise InvalidArgument(f"{len(places)} places for {len(sources)} sources and {len(targets)} targets")
    refinement = refine(sources, targets, subset=subset, partial=partial)
    router = _Router(places)
    ndim = max([1, *(manifest.ndim for manifest in (*sources, *targets))])
    table = _Pieces(ndim)
    demands = [(demand, router.choices(demand)) for demand in refinement.demands]
    demands.sort(key=lambda item: (item[1].free, -_nbytes(item[0])))  # stable: where there is no choice comes first
    for demand, choices in demands:
        limit = _chunk_target(_nbytes(demand) // len(demand.owners), len(choices.hosts))
        first = len(table)
        for atom in demand.atoms:
            table.add(atom.wholes, *_cut(atom.start, atom.size, atom.itemsize, min(limit, _MAX_PIECE)))
        table.assign(router.assign(choices, table.nbytes_from(first), limit))
    digest = digest_of(sources, targets, places, subset, partial)
    return table.plan(digest, len(sources), tuple(places), refinement.wholes, router)


class Planner:
    """Plans, kept by their digest: the same members and layouts are planned once. Thread-safe; threads that want a plan
    while another one is made wait for it."""

    def __init__(self, kept: int = 8) -> None:
        self._plans: OrderedDict[str, Plan] = OrderedDict()
        self._kept = kept
        self._lock = threading.Lock()
        self.made = 0  # plans computed

    def plan(
        self,
        sources: Sequence[Manifest],
        targets: Sequence[Manifest],
        places: Sequence[Place],
        *,
        subset: bool = False,
        partial: bool = False,
    ) -> Plan:
        """As ``plan``."""
        digest = digest_of(sources, targets, places, subset, partial)
        with self._lock:
            found = self._plans.get(digest)
            if found is None:
                found = self._plans[digest] = plan(sources, targets, places, subset=subset, partial=partial)
                self.made += 1
                if len(self._plans) > self._kept:
                    self._plans.popitem(last=False)
            self._plans.move_to_end(digest)
            return found


PLANNER = Planner()  # of this process: ranks that share it plan once


@dataclass(frozen=True)
class _Choices:
    """What is open in a demand: the source, and the node that takes it from the network in each host."""

    owners: tuple[int, ...]
    near: tuple[Edge, ...]  # within hosts that have an owner
    hosts: tuple[tuple[int, ...], ...]  # the wanters of each other host

    @property
    def free(self) -> bool:
        return bool(self.hosts) and (len(self.owners) > 1 or any(len(host) > 1 for host in self.hosts))


class _Router:
    def __init__(self, places: Sequence[Place]) -> None:
        self.routes: list[Route] = []
        self._places = places
        nics: dict[Place, int] = {}
        self._nic = [nics.setdefault(place, len(nics)) for place in places]
        self._sent, self._received = [0] * len(nics), [0] * len(nics)
        self._numbers: dict[tuple[object, ...], int] = {}
        self._turns: dict[tuple[tuple[int, ...], ...], int] = {}
        self._copied = [0] * len(places)  # bytes that others of its host copy from a node

    def choices(self, demand: Demand) -> _Choices:
        owners: dict[str, list[int]] = {}
        for owner in demand.owners:
            owners.setdefault(self._places[owner].host, []).append(owner)
        far: dict[str, list[int]] = {}
        near: list[Edge] = []
        nbytes = _nbytes(demand)
        for wanter in demand.wanters:
            host = self._places[wanter].host
            if host in owners:
                source = min(owners[host], key=lambda node: (self._copied[node], node))
                self._copied[source] += nbytes
                near.append(Edge(source, wanter, False))
            else:
                far.setdefault(host, []).append(wanter)
        return _Choices(demand.owners, tuple(near), tuple(tuple(far[host]) for host in sorted(far)))

    def assign(self, choices: _Choices, nbytes: Ints, bundle: int) -> Ints:
        """The route of each piece of these sizes. Where there is a choice, it is made once for a bundle of pieces."""
        nic, sent, received = self._nic, self._sent, self._received
        known: dict[tuple[int, tuple[int, ...]], int] = {}
        found = np.empty(len(nbytes), np.int64)
        for first, last in _bundles(nbytes, bundle) if choices.free else [(0, len(nbytes))]:
            source = min(choices.owners, key=lambda node: (sent[nic[node]], node)) if choices.hosts else -1
            takers = tuple(min(host, key=lambda node: (received[nic[node]], node)) for host in choices.hosts)
            number = known.get((source, takers))
            if number is None:
                number = known[source, takers] = self._number(choices, source, takers)
            found[first:last] = number
            self._load(number, int(nbytes[first:last].sum()))
        return found

    def _load(self, number: int, nbytes: int) -> None:
        for edge in self.routes[number].edges:
            if edge.network:
                self._sent[self._nic[edge.src]] += nbytes
                self._received[self._nic[edge.dst]] += nbytes

    def _number(self, choices: _Choices, source: int, takers: tuple[int, ...]) -> int:
        key = choices.near, choices.hosts, source, takers
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = len(self.routes)
            self.routes.append(self._route(choices, source, takers))
        return number

    def _route(self, choices: _Choices, source: int, takers: tuple[int, ...]) -> Route:
        if not takers:
            return Route(choices.near[0].src, choices.near)
        turn = self._turns.get(choices.hosts, 0)
        self._turns[choices.hosts] = turn + 1
        first = turn % len(takers)
        edges: list[Edge] = []
        before = source
        for i in (*range(first, len(takers)), *range(first)):
            edges.append(Edge(before, takers[i], True))
            edges.extend(Edge(takers[i], node, False) for node in choices.hosts[i] if node != takers[i])
            before = takers[i]
        return Route(source, (*edges, *choices.near))


class _Pieces:
    def __init__(self, ndim: int) -> None:
        self._ndim = ndim
        self._wholes: list[Ints] = []
        self._starts: list[Ints] = []
        self._sizes: list[Ints] = []
        self._nbytes: list[Ints] = []
        self._routes: list[Ints] = []

    def __len__(self) -> int:
        return len(self._wholes)

    def add(self, wholes: Ints, start: Ints, size: Ints, nbytes: Ints) -> None:
        """Each of ``wholes`` has each of these boxes."""
        self._wholes.append(np.repeat(wholes, len(start)))
        self._starts.append(np.tile(start, (len(wholes), 1)))
        self._sizes.append(np.tile(size, (len(wholes), 1)))
        self._nbytes.append(np.tile(nbytes, len(wholes)))

    def nbytes_from(self, first: int) -> Ints:
        return np.concatenate(self._nbytes[first:])

    def assign(self, routes: Ints) -> None:
        self._routes.append(routes)

    def plan(
        self, digest: str, sources: int, places: tuple[Place, ...], wholes: tuple[Whole, ...], router: _Router
    ) -> Plan:
        empty, no_boxes = np.empty(0, np.int64), np.empty((0, self._ndim), np.int64)
        whole, nbytes = np.concatenate([empty, *self._wholes]), np.concatenate([empty, *self._nbytes])
        start, size = np.concatenate([no_boxes, *self._starts]), np.concatenate([no_boxes, *self._sizes])
        route = np.concatenate([empty, *self._routes])
        order = np.lexsort((*reversed(start.T), whole, route))
        whole, nbytes, start, size, route = whole[order], nbytes[order], start[order], size[order], route[order]
        chunk = _chunks(route, nbytes, router.routes)
        count = int(chunk[-1]) + 1 if len(chunk) else 0
        first_piece = np.flatnonzero(np.diff(chunk, prepend=-1))
        chunk_nbytes = np.bincount(chunk, nbytes, count).astype(np.int64)
        return Plan(
            digest, sources, places, wholes, tuple(router.routes), route[first_piece], chunk_nbytes, chunk, whole,
            start, size, nbytes,
        )  # fmt: skip


def _nbytes(demand: Demand) -> int:
    return sum(len(atom.wholes) * math.prod(atom.size) * atom.itemsize for atom in demand.atoms)


def _bundles(nbytes: Ints, least: int) -> list[tuple[int, int]]:
    """(first, last) of runs of pieces that have ``least`` bytes or more, the last one perhaps less."""
    found, first, size = [], 0, 0
    for i, n in enumerate(nbytes.tolist()):
        size += n
        if size >= least:
            found.append((first, i + 1))
            first, size = i + 1, 0
    if first < len(nbytes):
        found.append((first, len(nbytes)))
    return found


def _chunk_target(nbytes: int, hops: int) -> int:
    return min(MAX_CHUNK, max(MIN_CHUNK, nbytes // (_CHUNKS_A_HOP * max(1, hops))))


def _cut(start: tuple[int, ...], size: tuple[int, ...], itemsize: int, limit: int) -> tuple[Ints, Ints, Ints]:
    """(starts, sizes, nbytes) of boxes of at most ``limit`` bytes, as few cuts as that takes."""
    inner = itemsize
    dim = len(size)
    while dim > 0 and inner * size[dim - 1] <= limit:
        dim -= 1
        inner *= size[dim]
    if dim == 0:
        return np.array([start], np.int64), np.array([size], np.int64), np.array([inner], np.int64)
    rows = max(1, limit // inner)  # of dimension dim - 1; the ones outside of it go one by one
    firsts = [np.arange(n, dtype=np.int64) for n in size[: dim - 1]]
    firsts.append(np.arange(0, size[dim - 1], rows, dtype=np.int64))
    grid = np.stack([axis.ravel() for axis in np.meshgrid(*firsts, indexing="ij")], axis=1)
    starts = np.tile(np.array(start, np.int64), (len(grid), 1))
    starts[:, :dim] += grid
    sizes = np.tile(np.array(size, np.int64), (len(grid), 1))
    sizes[:, : dim - 1] = 1
    sizes[:, dim - 1] = np.minimum(rows, size[dim - 1] - grid[:, dim - 1])
    return starts, sizes, sizes.prod(axis=1) * itemsize


def _chunks(route: Ints, nbytes: Ints, routes: Sequence[Route]) -> Ints:
    """The chunk of each piece: whole pieces one after another, up to the size that suits the route."""
    totals = np.bincount(route, nbytes, len(routes)).astype(np.int64)
    hops = [sum(edge.network for edge in r.edges) for r in routes]
    targets = [_chunk_target(total, n) for total, n in zip(totals.tolist(), hops, strict=True)]
    found = np.empty(len(route), np.int64)
    chunk, size, before = -1, 0, -1
    for i, (number, piece) in enumerate(zip(route.tolist(), nbytes.tolist(), strict=True)):
        if number != before or size >= targets[number] or size + piece > MAX_CHUNK:
            chunk, size, before = chunk + 1, 0, number
        size += piece
        found[i] = chunk
    return _joined_tails(found, route, nbytes)


def _joined_tails(chunk: Ints, route: Ints, nbytes: Ints) -> Ints:
    """Last chunks of a route that are smaller than the least size go with the ones before them, where both fit."""
    if not len(chunk):
        return chunk
    first = np.flatnonzero(np.diff(chunk, prepend=-1))
    size = np.add.reduceat(nbytes, first)
    of = route[first]
    last = np.append(of[1:] != of[:-1], True)
    joins = np.zeros(len(first), np.bool_)
    joins[1:] = last[1:] & (of[1:] == of[:-1]) & (size[1:] < MIN_CHUNK) & (size[1:] + size[:-1] <= MAX_CHUNK)
    return (np.cumsum(~joins) - 1)[chunk]
