"""How long a plan takes on a given network: a model to decide by, without the network.

Every edge of every route is a stream that passes on the route's chunks in order, each as soon as the node has it.
Streams share what they cross (the sender's NIC, the receiver's NIC; within a host, each node's link) by max-min
fairness, as flows under congestion control do. Time goes in steps: a chunk is seen by the next node at the end of the
step in which it has arrived, so a step is also what a hop takes on top of the bytes. And a node learns of a chunk by a
look at the board of the one before it, whose answer waits behind a chunk that is on the way already: until that one has
everything, its last chunk is not known of.

The model knows bandwidth and the schedule. It knows no losses, no CPU that is too slow, and no receiver that is late.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from torch_mooncake.errors import InvalidArgument
from torch_mooncake.weights.plan import Place, Plan
from torch_mooncake.weights.shards import Ints

Floats = npt.NDArray[np.float64]

_UNKNOWN = 1  # chunks that the node before has and this one has not heard of yet
_MOST_STEPS = 1_000_000
_COLUMNS = 400  # of a Prediction's timeline, at most twice as many


@dataclass(frozen=True)
class Network:
    """Rates in bytes a second, each for one direction."""

    nic: float
    local: float = 200e9  # of a node's link to the others of its host
    nics: Mapping[Place, float] = field(default_factory=dict)  # those that differ


@dataclass(frozen=True, eq=False)
class Prediction:
    seconds: float
    bound: float  # seconds that the busiest NIC needs for its bytes alone
    finished: Floats  # [nodes] when each had everything it wants; 0 for those that get nothing
    nics: tuple[Place, ...]
    times: Floats  # [columns] ends of the timeline's columns, in seconds
    received: Floats  # [columns, nics] bytes that came in over each NIC in the column
    sent: Floats  # [columns, nics]


def simulate(plan: Plan, network: Network, *, step: float | None = None) -> Prediction:
    """``step``: seconds; None: a 2000th of the bound. InvalidArgument for rates or a step that are not positive."""
    model = _Model(plan, network)
    bound = model.bound()
    step = max(bound, model.local_bound()) / 2000 if step is None else step
    if step <= 0 and len(model.src):
        raise InvalidArgument(f"a step of {step} seconds")
    timeline = _Timeline(model, step)
    now, count = 0.0, 0
    while not model.done():
        moved, longest = model.advance(step)
        now, count = now + step, count + 1
        timeline.add(now, moved)
        if longest < step and model.done():
            now -= step - longest
        if count > _MOST_STEPS:
            raise InvalidArgument(f"no end after {count} steps of {step} s: choose a longer one")
    return Prediction(now, bound, model.finished(), model.nics, *timeline.result())


class _Model:
    def __init__(self, plan: Plan, network: Network) -> None:
        self._nodes = len(plan.places)
        places = {place: i for i, place in enumerate(dict.fromkeys(plan.places))}
        self.nics = tuple(places)
        nic = np.array([places[place] for place in plan.places], np.int64)
        src: list[int] = []
        dst: list[int] = []
        over: list[bool] = []
        route: list[int] = []
        parent: list[int] = []
        for number, each in enumerate(plan.routes):
            stream_of = {each.source: -1}
            for edge in each.edges:
                parent.append(stream_of.get(edge.src, -1))  # another owner has it from the start, too
                stream_of[edge.dst] = len(src)
                src.append(edge.src)
                dst.append(edge.dst)
                over.append(edge.network)
                route.append(number)
        self.src, self.dst = np.array(src, np.int64), np.array(dst, np.int64)
        self.network = np.array(over, np.bool_)
        self.parent = np.array(parent, np.int64)
        of = np.array(route, np.int64)
        total = plan.route_nbytes.astype(np.float64)
        chunks = np.bincount(plan.chunk_route, minlength=len(plan.routes))
        self.total = total[of] if len(of) else np.empty(0)
        self._chunk = (total / np.maximum(chunks, 1))[of] if len(of) else np.empty(0)
        # Resources: NICs out, NICs in, nodes' links out, nodes' links in.
        n, m = len(self.nics), self._nodes
        rates = [float(network.nics.get(place, network.nic)) for place in self.nics]
        self.rate = np.array(rates * 2 + [float(network.local)] * (2 * m))
        if (self.rate <= 0).any():
            raise InvalidArgument("rates are more than 0 bytes a second")
        self.out = np.where(self.network, nic[self.src], 2 * n + self.src) if len(of) else np.empty(0, np.int64)
        self.into = np.where(self.network, n + nic[self.dst], 2 * n + m + self.dst) if len(of) else self.out
        self._have = np.zeros(len(of))
        self._ended = np.zeros(len(of))
        self._now = 0.0
        self._left = np.flatnonzero(self.total > 0)

    def done(self) -> bool:
        return not len(self._left)

    def bound(self) -> float:
        return self._bound(self.network)

    def local_bound(self) -> float:
        return self._bound(~self.network)

    def _bound(self, chosen: npt.NDArray[np.bool_]) -> float:
        loads = [
            np.bincount(resource[chosen], self.total[chosen], len(self.rate)) / self.rate
            for resource in (self.out, self.into)
        ]
        return float(np.max(loads, initial=0.0))

    def advance(self, step: float) -> tuple[tuple[Ints, Floats], float]:
        """One step: (streams, bytes that each moved), and how long the last one that ended was busy."""
        left = self._left
        parent = self.parent[left]
        there = np.where(parent < 0, self.total[left], self._have[parent])
        chunks = np.maximum(there // self._chunk[left] - _UNKNOWN, 0)
        whole = np.where(there >= self.total[left], self.total[left], chunks * self._chunk[left])
        gap = whole - self._have[left]
        busy = np.flatnonzero(gap > 0)
        active, gap = left[busy], gap[busy]
        moved = np.minimum(_fair(self.out[active], self.into[active], gap / step, self.rate) * step, gap)
        self._have[active] += moved
        close = self.total[active] - self._have[active] <= 1e-6 * self.total[active]
        ended = active[close]
        self._have[ended] = self.total[ended]
        # Within the step it took what its bytes take at the full rate of its narrowest resource, at least.
        rates = np.minimum(self.rate[self.out[ended]], self.rate[self.into[ended]])
        took = np.minimum(step, np.maximum(moved[close] / rates, 0))
        self._ended[ended] = self._now + step
        self._now += step
        if len(ended):
            self._left = left[self._have[left] < self.total[left]]
        return (active, moved), float(took.max(initial=0.0))

    def finished(self) -> Floats:
        found = np.zeros(self._nodes)
        np.maximum.at(found, self.dst, self._ended)
        return found


def _fair(out: Ints, into: Ints, most: Floats, rate: Floats) -> Floats:
    """Max-min fair rates of streams that cross two resources each and take at most ``most``.

    In each round, every stream whose level (its own limit, or the even share of a resource) is the least on both of
    its resources gets it: what the others get there can only be more."""
    found = np.zeros(len(out))
    open_ = np.arange(len(out))
    free = rate.copy()
    while len(open_):
        o, i = out[open_], into[open_]
        users = np.bincount(o, minlength=len(rate)) + np.bincount(i, minlength=len(rate))
        share = np.maximum(free, 0) / np.maximum(users, 1)
        level = np.minimum(most[open_], np.minimum(share[o], share[i]))
        least = np.full(len(rate), np.inf)
        np.minimum.at(least, o, level)
        np.minimum.at(least, i, level)
        settled = (level <= least[o] * (1 + 1e-9)) & (level <= least[i] * (1 + 1e-9))
        chosen = open_[settled]
        found[chosen] = level[settled]
        free -= np.bincount(out[chosen], found[chosen], len(rate)) + np.bincount(into[chosen], found[chosen], len(rate))
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
        streams, nbytes = moved
        over = self._model.network[streams]
        streams, nbytes = streams[over], nbytes[over]
        n = len(self._model.nics)
        self._open[0] += np.bincount(self._model.into[streams] - n, nbytes, n)
        self._open[1] += np.bincount(self._model.out[streams], nbytes, n)
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
