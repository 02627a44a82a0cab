"""The common refinement of all manifests: boxes that nobody holds or wants in part.

An *atom* is a box of a whole tensor together with who has all of it (sources) and who wants all of it (targets). Nodes
are numbers: the sources' from 0, then the targets'. Tensors whose pieces have the same geometry (the layers of a model,
its experts) are cut once, and all of them share the atoms' boxes.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from torch_mooncake.errors import LayoutMismatch
from torch_mooncake.tensors import DTYPES
from torch_mooncake.weights.shards import Ints, Manifest, Whole, listed


@dataclass(frozen=True)
class Atom:
    wholes: Ints  # [n] the tensors that have this atom, indices into Refinement.wholes
    start: tuple[int, ...]  # ndim numbers, see Manifest
    size: tuple[int, ...]
    itemsize: int


@dataclass
class Demand:
    """Atoms that the same nodes have and the same nodes want."""

    owners: tuple[int, ...]
    wanters: tuple[int, ...]
    atoms: list[Atom] = field(default_factory=list)


@dataclass(frozen=True)
class Refinement:
    wholes: tuple[Whole, ...]
    demands: tuple[Demand, ...]  # in the order of (wanters, owners)


def compare(
    sources: Sequence[Manifest], targets: Sequence[Manifest], *, subset: bool = False, partial: bool = False
) -> None:
    """LayoutMismatch, with the first ten differences, unless the sources together have exactly what the targets want:
    the same names, shapes and dtypes, and every element. ``subset``: they may have fewer names (adapters).
    ``partial``: the targets may want fewer (they are some of a model's ranks)."""
    refine(sources, targets, subset=subset, partial=partial)


def fitting(
    sources: Sequence[Manifest], targets: Sequence[Manifest], *, subset: bool = False, partial: bool = False
) -> list[bool]:
    """Of each target by itself: whether ``compare`` has nothing against it."""
    different = list(dict.fromkeys(targets))
    if not different:
        return []
    try:
        compare(sources, different, subset=subset, partial=partial)
        return [True] * len(targets)
    except LayoutMismatch:
        if len(different) == 1:
            return [False] * len(targets)
    half = len(different) // 2
    fits: dict[Manifest, bool] = {}
    for some in (different[:half], different[half:]):
        fits.update(zip(some, fitting(sources, some, subset=subset, partial=partial), strict=True))
    return [fits[target] for target in targets]


def refine(
    sources: Sequence[Manifest], targets: Sequence[Manifest], *, subset: bool = False, partial: bool = False
) -> Refinement:
    """Errors as ``compare``."""
    names = _Names(sources, targets, subset, partial)
    if names.problems:
        raise LayoutMismatch(listed("the weights do not fit", names.problems))
    table = _table(names, sources, targets)
    demands: dict[tuple[tuple[int, ...], tuple[int, ...]], Demand] = {}
    geometries: dict[bytes, _Geometry] = {}
    holes: dict[int, tuple[str, ...]] = {}
    for members, first, last in _groups(table, names.itemsize):
        key = table.shape[first:last].tobytes()
        geometry = geometries.get(key)
        if geometry is None:
            geometry = geometries[key] = _cut(table, first, last)
        for box in geometry.holes:
            holes.update((int(whole), box) for whole in members)
        nodes = table.node[first:last]
        for start, size, has, wants in geometry.cells:
            owners, wanters = tuple(np.unique(nodes[has]).tolist()), tuple(np.unique(nodes[wants]).tolist())
            demand = demands.get((owners, wanters))
            if demand is None:
                demand = demands[owners, wanters] = Demand(owners, wanters)
            demand.atoms.append(Atom(members, start, size, names.itemsize[int(members[0])]))
    if holes:
        problems = []
        for number in sorted(holes):
            whole = names.wholes[number]
            box = holes[number][len(holes[number]) - len(whole.shape) :]
            problems.append(f"{whole.name}: nobody has [{', '.join(box)}]")
        raise LayoutMismatch(listed("the weights do not fit", problems))
    order = sorted(demands, key=lambda key: (key[1], key[0]))
    return Refinement(tuple(names.wholes), tuple(demands[key] for key in order))


class _Names:
    """Wholes of all sides under one numbering. Names that the sources tie are one whole."""

    def __init__(self, sources: Sequence[Manifest], targets: Sequence[Manifest], subset: bool, partial: bool) -> None:
        self.problems: list[str] = []
        self.aliases: dict[str, str] = {}
        for manifest in sources:
            self.aliases.update(manifest.aliases)
        published = self._union(sources, "published")
        wanted = self._union(targets, "in the model")
        for name in sorted(published.keys() | wanted.keys()):
            mine, theirs = wanted.get(name), published.get(name)
            if theirs is None:
                assert mine is not None
                if subset or self._tied(targets, name, published):
                    continue
                self.problems.append(f"{name}: {_kind(mine)} in the model, not published")
            elif mine is None:
                if partial:
                    continue
                self.problems.append(f"{name}: published as {_kind(theirs)}, not in the model")
            elif mine != theirs:
                self.problems.append(f"{name}: published as {_kind(theirs)}, {_kind(mine)} in the model")
        for manifest in targets:
            for name, first in manifest.aliases.items():
                if self.root(name) != self.root(first) and name in published:
                    self.problems.append(f"{name}: tied to {first} in the model, not tied where it is published")
        self.problems = list(dict.fromkeys(self.problems))
        self.wholes = [published[name] for name in sorted(published) if self.root(name) == name]
        self.index = {whole.name: i for i, whole in enumerate(self.wholes)}
        self.itemsize = [DTYPES[whole.dtype] for whole in self.wholes]

    @staticmethod
    def _tied(targets: Sequence[Manifest], name: str, published: Mapping[str, Whole]) -> bool:
        """Whether whoever wants the name gets it with another one (files leave tied names out)."""
        first = {manifest.aliases.get(name) for manifest in targets if name in manifest.names}
        return all(other is not None and other in published for other in first)

    def root(self, name: str) -> str:
        return self.aliases.get(name, name)

    def _union(self, manifests: Sequence[Manifest], where: str) -> dict[str, Whole]:
        found: dict[str, Whole] = {}
        seen: set[int] = set()
        for manifest in manifests:
            if id(manifest.wholes) in seen:
                continue
            seen.add(id(manifest.wholes))
            for whole in manifest.wholes:
                known = found.setdefault(whole.name, whole)
                if known is not whole and known != whole:
                    self.problems.append(f"{whole.name}: {_kind(known)} and {_kind(whole)}, both {where}")
        return found


def _kind(whole: Whole) -> str:
    return f"{whole.dtype}{list(whole.shape)}"


@dataclass(frozen=True)
class _Table:
    """All pieces, sorted by whole, then geometry, then node."""

    whole: Ints  # [n]
    target: npt.NDArray[np.bool_]  # [n]
    node: Ints  # [n]
    start: Ints  # [n, ndim]
    size: Ints  # [n, ndim]
    shape: Ints  # [n] equal for pieces of the same box and side


def _table(names: _Names, sources: Sequence[Manifest], targets: Sequence[Manifest]) -> _Table:
    ndim = max([1, *(manifest.ndim for manifest in (*sources, *targets))])
    wholes, nodes, starts, sizes, sides = [], [], [], [], []
    numbers: dict[int, Ints] = {}
    for node, manifest in enumerate((*sources, *targets)):
        number = numbers.get(id(manifest.wholes))
        if number is None:
            of_name = [names.index.get(names.root(whole.name), -1) for whole in manifest.wholes]
            number = numbers[id(manifest.wholes)] = np.array(of_name, np.int64)
        whole = number[manifest.whole] if len(manifest.whole) else np.empty(0, np.int64)
        keep = whole >= 0  # not published: allowed only for subsets
        fill = ndim - manifest.ndim
        wholes.append(whole[keep])
        nodes.append(np.full(int(keep.sum()), node, np.int64))
        starts.append(np.pad(manifest.start[keep], ((0, 0), (fill, 0))))
        sizes.append(np.pad(manifest.size[keep], ((0, 0), (fill, 0)), constant_values=1))
        sides.append(np.full(int(keep.sum()), node >= len(sources)))
    all_wholes, all_nodes, side = np.concatenate(wholes), np.concatenate(nodes), np.concatenate(sides)
    start, size = np.concatenate(starts), np.concatenate(sizes)
    box = np.concatenate([side[:, None].astype(np.int64), start, size], axis=1)
    shape = _numbered(box)
    order = np.lexsort((all_nodes, shape, all_wholes))
    return _Table(all_wholes[order], side[order], all_nodes[order], start[order], size[order], shape[order])


def _numbered(rows: Ints) -> Ints:
    """A number for each row, the same for equal rows, that depends on nothing but the set of rows."""
    number = np.zeros(len(rows), np.int64)
    for column in rows.T:
        _, inverse = np.unique(column, return_inverse=True)
        _, number = np.unique(number * (int(inverse.max(initial=0)) + 1) + inverse, return_inverse=True)
    return number


def _groups(table: _Table, itemsize: Sequence[int]) -> list[tuple[Ints, int, int]]:
    """(wholes, first, last row of one of them) of each set of wholes whose elements have one size and whose pieces are
    the same on the same nodes."""
    bounds = np.flatnonzero(np.diff(table.whole, prepend=-1)).tolist()
    found: dict[tuple[int, bytes, bytes], tuple[list[int], int, int]] = {}
    for first, last in itertools.pairwise([*bounds, len(table.whole)]):
        whole = int(table.whole[first])
        key = itemsize[whole], table.shape[first:last].tobytes(), table.node[first:last].tobytes()
        entry = found.get(key)
        if entry is None:
            entry = found[key] = [], first, last
        entry[0].append(whole)
    return [(np.array(members, np.int64), first, last) for members, first, last in found.values()]


@dataclass(frozen=True)
class _Geometry:
    # start, size, which rows have it, which rows want it: of each atom that is wanted
    cells: list[tuple[tuple[int, ...], tuple[int, ...], Ints, Ints]]
    holes: list[tuple[str, ...]]  # boxes that are wanted and nobody has


def _cut(table: _Table, first: int, last: int) -> _Geometry:
    target = table.target[first:last]
    _, rows, inverse = np.unique(table.shape[first:last], return_index=True, return_inverse=True)
    start, size = table.start[first:last][rows], table.size[first:last][rows]
    end = start + size
    cuts = [np.unique(np.concatenate([start[:, d], end[:, d]])) for d in range(start.shape[1])]
    inside = [(start[:, d] <= cut[:-1, None]) & (cut[1:, None] <= end[:, d]) for d, cut in enumerate(cuts)]
    wanted_boxes, had_boxes = target[rows], ~target[rows]
    cells, holes = [], []
    for at in itertools.product(*(range(len(cut) - 1) for cut in cuts)):
        within = np.logical_and.reduce([inside[d][i] for d, i in enumerate(at)])
        if not (within & wanted_boxes).any():
            continue
        low = tuple(int(cut[i]) for cut, i in zip(cuts, at, strict=True))
        lengths = tuple(int(cut[i + 1] - cut[i]) for cut, i in zip(cuts, at, strict=True))
        if not (within & had_boxes).any():
            holes.append(tuple(f"{a}:{a + n}" for a, n in zip(low, lengths, strict=True)))
            continue
        of_row = within[inverse]
        cells.append((low, lengths, np.flatnonzero(of_row & ~target), np.flatnonzero(of_row & target)))
    return _Geometry(cells, holes)
