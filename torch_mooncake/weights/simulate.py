"""How long a plan takes on a given network: a model to decide by, without the network.

Every edge of every route is a stream that passes on the route's chunks in order, whole ones only. Streams from one node
to another share a connection and take turns. Connections share what they cross by max-min fairness, as flows under
congestion control do: between hosts the sender's NIC and the receiver's; within a host both nodes' links to it, and
what all copies of the host have together.

A node asks for chunks that it knows of, and knows them by a look at the board of the node before it. Questions leave by
a NIC that is busy with what the node passes on, and answers by one that is busy sending to it: both wait for what is
queued there. While a node keeps up with the one before, its connection rests for the time of a look and of a question,
and each rest puts it further behind, until it always knows of a chunk that it has not asked for. That is what a hop
costs on top of a chunk.

Time goes in steps, and everything but the bytes happens at their ends. The model knows no losses, no CPU that is too
slow, and no receiver that is late.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from torch_mooncake.errors import InvalidArgument
from torch_mooncake.weights.plan import Place, Plan
from torch_mooncake.weights.shards import Ints

Floats = npt.NDArray[np.float64]

_LEAST_STEPS, _MOST_STEPS = 2000, 50_000  # in the time that the bytes need, if steps are not given
_END = 1_000_000  # steps
_COLUMNS = 400  # of a Prediction's timeline, at most twice as many


@dataclass(frozen=True)
class Network:
    """Rates in bytes a second, each for one direction; times in seconds."""

    nic: float
    local: float = 200e9  # of a node's link to the others of its host: NVLink, or what one process copies
    host: float = math.inf  # of all copies within a host together: its memory; inf for links that a switch carries
    nics: Mapping[Place, float] = field(default_factory=dict)  # those that differ
    payload: float = 1.0  # part of a NIC's rate that is not headers: TCP has 0.99 with an MTU of 9000, 0.95 with 1500
    latency_s: float = 0.001  # from asking for something to its first byte, where nothing is queued
    queue: int = 512 << 10  # bytes before a NIC that sends: what the kernel takes of a connection's two lanes
    look_s: float = 0.001  # from the answer of a look to the next look, as in fetch.py
    verify: bool = True  # a chunk is passed on when it is proven: when a look that was sent after it came is answered
    start_s: float = 0.003  # from the publication to the first look: the pool tells, the plan is known


@dataclass(frozen=True, eq=False)
class Prediction:
    seconds: float
    bound: float  # seconds that the busiest NIC needs for its bytes alone
    finished: Floats  # [nodes] when each had everything it wants; 0 for those that get nothing
    nics: tuple[Place, ...]
    times: Floats  # [columns] ends of the timeline's columns, in seconds
    received: Floats  # [columns, nics] bytes that came in over each NIC in the column
    sent: Floats  # [columns, nics]


def simulate(plan: Plan, network: Network, *, step: float | None = None, share: float = 1.0) -> Prediction:
    """``step``: seconds; None: a 2000th of the time that the bytes need, or less, down to the time between looks.
    ``share``: the part of each chunk's bytes that moves; of an update by delta, of its blobs (0.031 of a bfloat16 model
    of which 2 % has changed), and neither encoding nor applying is in the prediction.
    InvalidArgument for rates or a step that are not positive, or a share that is not in (0, 1]."""
    if not 0 < share <= 1:
        raise InvalidArgument(f"a share of {share}")
    model = _Model(plan, network, share)
    least = max(model.bound(), model.local_bound())
    if step is None:
        step = max(min(least / _LEAST_STEPS, network.look_s or math.inf), least / _MOST_STEPS)
    if step <= 0 and len(model.total):
        raise InvalidArgument(f"a step of {step} seconds")
    timeline = _Timeline(model, step)
    count = 0
    while not model.done():
        timeline.add(model.now + step, model.advance(step))
        count += 1
        if count > _END:
            raise InvalidArgument(f"no end after {count} steps of {step} s: choose a longer one")
    finished = model.finished()
    return Prediction(float(finished.max(initial=0.0)), model.bound(), finished, model.nics, *timeline.result())


class _Model:
    """Streams, and connections (pairs of nodes) that carry them."""

    def __init__(self, plan: Plan, network: Network, share: float) -> None:
        self._network, self._nodes = network, len(plan.places)
        pairs: dict[tuple[int, int, bool], int] = {}
        pair: list[int] = []
        route: list[int] = []
        parent: list[int] = []
        for number, each in enumerate(plan.routes):
            stream_of = {each.source: -1}
            for edge in each.edges:
                parent.append(stream_of.get(edge.src, -1))  # another owner has it from the start, too
                stream_of[edge.dst] = len(pair)
                pair.append(pairs.setdefault(edge, len(pairs)))
                route.append(number)
        self._pair, self._parent, of = (np.array(values, np.int64) for values in (pair, parent, route))
        chunks = np.maximum(np.bincount(plan.chunk_route, minlength=len(plan.routes)), 1)
        self.total = plan.route_nbytes[of] * share
        self._chunk = (plan.route_nbytes / chunks)[of] * share
        src, self._dst, over = np.array(list(pairs), np.int64).reshape(-1, 3).T
        self.network = over.astype(np.bool_)
        self._resources(plan, network, src)
        self._have, self._ended = np.zeros(len(of)), np.zeros(len(of))
        self._asked, self._proven = np.zeros(len(of)), np.zeros(len(of))  # when the look was sent; by the last answer
        self._known = np.where(self._parent < 0, self.total, 0.0)
        self._left = np.flatnonzero(self.total > 0)
        self.now = 0.0
        # Of each connection: what it has carried; what it has to have carried, and the time, before the answer of the
        # look that is under way; when the next look is sent; when what was asked for begins to come.
        n = len(pairs)
        self._taken, self._mark = np.zeros(n), np.zeros(n)
        self._answer_at, self._look_at = np.full(n, network.start_s + network.latency_s), np.full(n, np.inf)
        self._ready_at = self._answer_at.copy()
        # Questions leave by the receiver's NIC, and wait for this time if it sends.
        self._home = np.where(self.network, self.into - len(self.nics), 0)
        self._wait = np.where(self.network, network.queue / self.rate[self._home], 0.0)
        self._sends = np.zeros(len(self.nics), np.bool_)

    def _resources(self, plan: Plan, network: Network, src: Ints) -> None:
        """NICs out, NICs in, nodes' links out, nodes' links in, hosts; and the three or two that each pair crosses."""
        places = {place: i for i, place in enumerate(dict.fromkeys(plan.places))}
        hosts = {host: i for i, host in enumerate(dict.fromkeys(place.host for place in plan.places))}
        self.nics = tuple(places)
        n, m = len(places), self._nodes
        nics = [float(network.nics.get(place, network.nic)) * network.payload for place in places]
        links = [float(network.local)] * (2 * m)
        self.rate = np.array(nics * 2 + links + [float(network.host)] * len(hosts) + [math.inf])
        if not (self.rate > 0).all():
            raise InvalidArgument("rates are more than 0 bytes a second")
        nic = np.array([places[place] for place in plan.places], np.int64)
        host = np.array([hosts[place.host] for place in plan.places], np.int64)
        dst, over = self._dst, self.network
        self.out = np.where(over, nic[src], 2 * n + src)
        self.into = np.where(over, n + nic[dst], 2 * n + m + dst)
        shared = np.where(over, len(self.rate) - 1, 2 * n + 2 * m + host[src])
        self._crosses = np.stack([self.out, self.into, shared], axis=1)

    def done(self) -> bool:
        return not len(self._left)

    def bound(self) -> float:
        return self._bound(self.network)

    def local_bound(self) -> float:
        return self._bound(~self.network)

    def _bound(self, chosen: npt.NDArray[np.bool_]) -> float:
        nbytes = np.bincount(self._pair, self.total, len(self.out))[chosen]
        loads = [np.bincount(r[chosen], nbytes, len(self.rate)) / self.rate for r in self._crosses.T]
        return float(np.max(loads, initial=0.0))

    def advance(self, step: float) -> tuple[Ints, Floats]:
        """One step: (pairs, bytes that each has carried)."""
        self._looks()
        left = self._left[self._ready_at[self._pair[self._left]] <= self.now]
        gap = self._known[left] - self._have[left]
        active, gap = left[gap > 0], gap[gap > 0]
        wanted: Floats = np.bincount(self._pair[active], gap, len(self.out)).astype(np.float64)
        pairs = np.flatnonzero(wanted)
        moved = np.minimum(_fair(self._crosses[pairs], wanted[pairs] / step, self.rate) * step, wanted[pairs])
        self._take(active, gap, pairs, moved, wanted)
        self._taken[pairs] += moved
        over = self.network[pairs]
        self._sends = np.bincount(self.out[pairs[over]], moved[over], len(self.nics)) > 0
        self.now += step
        came = active[self.total[active] - self._have[active] <= 1e-6 * self.total[active]]
        self._have[came] = self.total[came]
        return pairs, moved

    def _take(self, active: Ints, gap: Floats, pairs: Ints, moved: Floats, wanted: Floats) -> None:
        """Divides what a connection has carried over its streams: chunk by chunk in turns, then evenly."""
        budget = np.zeros(len(self.out))
        budget[pairs] = moved
        pair, have, chunk = self._pair[active], self._have[active], self._chunk[active]
        count = np.floor(have / chunk + 1e-6)
        order = np.lexsort((active, count, pair))
        first = np.minimum((count + 1) * chunk - have, gap)[order]
        ordered = pair[order]
        before = np.cumsum(first) - first
        starts = np.flatnonzero(np.diff(ordered, prepend=-1))
        before -= np.repeat(before[starts], np.diff(starts, append=len(ordered)))
        taken = np.clip(budget[ordered] - before, 0, first)
        rest = budget - np.bincount(ordered, taken, len(budget))
        more = wanted - np.bincount(ordered, first, len(budget))
        part = np.divide(rest, more, out=np.zeros_like(rest), where=more > 1e-9 * wanted)
        taken += np.clip(part, 0, 1)[ordered] * (gap[order] - first)
        self._have[active[order]] += taken

    def _looks(self) -> None:
        """Answers the looks that have nothing before them any more, and sends those whose time has come."""
        answered = (self._answer_at <= self.now) & (self._taken >= self._mark * (1 - 1e-9))
        sent = (self._look_at <= self.now) & ~answered
        if not (answered.any() or sent.any()):
            return
        ahead = np.bincount(self._pair[self._left], self._known[self._left] - self._have[self._left], len(self.out))
        waits = self.network & self._sends[self._home]
        latency = self._network.latency_s + np.where(waits, self._wait, 0.0)
        rested = answered & (ahead <= 0)
        self._ready_at[rested] = self.now + latency[rested]
        self._answer(self._left[answered[self._pair[self._left]]])
        self._answer_at[answered] = np.inf
        self._look_at[answered] = self.now + self._network.look_s
        self._mark[sent] = self._taken[sent] + np.minimum(ahead, self._network.queue)[sent]
        self._answer_at[sent] = self.now + latency[sent]
        self._look_at[sent] = np.inf
        asking = self._left[sent[self._pair[self._left]]]
        self._asked[asking] = self._whole(asking, self._have[asking])

    def _answer(self, streams: Ints) -> None:
        self._proven[streams] = self._asked[streams]
        ended = streams[self._proven[streams] >= self.total[streams]]
        if len(ended):
            self._ended[ended] = self.now
            self._left = self._left[self._proven[self._left] < self.total[self._left]]
        behind = streams[self._parent[streams] >= 0]
        before = self._parent[behind]
        offered = self._proven[before] if self._network.verify else self._have[before]
        self._known[behind] = self._whole(behind, offered)

    def _whole(self, streams: Ints, nbytes: Floats) -> Floats:
        """Bytes of the chunks that are there."""
        total, chunk = self.total[streams], self._chunk[streams]
        return np.where(nbytes >= total, total, np.floor(nbytes / chunk + 1e-6) * chunk)

    def finished(self) -> Floats:
        found = np.zeros(self._nodes)
        some = self.total > 0
        np.maximum.at(found, self._dst[self._pair[some]], self._ended[some])
        return found


def _fair(crosses: Ints, most: Floats, rate: Floats) -> Floats:
    """Max-min fair rates of flows that cross these resources (indices into ``rate``) and take at most ``most``.

    In each round, every flow whose level (its own limit, or the even share of a resource) is the least on all of its
    resources gets it: what the others get there can only be more."""
    found = np.zeros(len(crosses))
    open_ = np.arange(len(crosses))
    free = rate.copy()
    while len(open_):
        through = crosses[open_]
        users = np.bincount(through.ravel(), minlength=len(rate))
        share = np.maximum(free, 0) / np.maximum(users, 1)
        level = np.minimum(most[open_], share[through].min(axis=1))
        least = np.full(len(rate), np.inf)
        np.minimum.at(least, through.ravel(), np.repeat(level, through.shape[1]))
        settled = (level[:, None] <= least[through] * (1 + 1e-9)).all(axis=1)
        chosen = open_[settled]
        found[chosen] = level[settled]
        for resources in crosses[chosen].T:
            free -= np.bincount(resources, found[chosen], len(rate))
        open_ = open_[~settled]
    return found


class _Timeline:
    """Bytes by NIC and column. When there are too many columns, two become one."""

    def __init__(self, model: _Model, step: float) -> None:
        self._model, self._span, self._step = model, 1, step
        self._times: list[float] = []
        self._rows: list[Floats] = []
        self._open = np.zeros((2, len(model.nics)))
        self._steps = 0

    def add(self, now: float, moved: tuple[Ints, Floats]) -> None:
        pairs, nbytes = moved
        over = self._model.network[pairs]
        pairs, nbytes = pairs[over], nbytes[over]
        n = len(self._model.nics)
        self._open[0] += np.bincount(self._model.into[pairs] - n, nbytes, n)
        self._open[1] += np.bincount(self._model.out[pairs], nbytes, n)
        self._steps += 1
        if self._steps % self._span == 0:
            self._close(now)
            if len(self._rows) == 2 * _COLUMNS:
                self._rows = [a + b for a, b in zip(self._rows[::2], self._rows[1::2], strict=True)]
                self._times = self._times[1::2]
                self._span *= 2

    def _close(self, now: float) -> None:
        self._times.append(now)
        self._rows.append(self._open)
        self._open = np.zeros_like(self._open)

    def result(self) -> tuple[Floats, Floats, Floats]:
        if self._open.any():
            self._close(self._steps * self._step)
        rows = np.array(self._rows).reshape(-1, 2, len(self._model.nics))
        return np.array(self._times), rows[:, 0], rows[:, 1]
