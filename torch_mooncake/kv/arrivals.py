"""What of a prompt has arrived: which pages of which layer, from which prefill ranks. Not synchronised."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

UNKNOWN = -1


class Arrivals:
    """Of one decode session. `layers`: for each group its layers' numbers; `reserved`: for each group how many pages
    lie ready; `prompt`: how many of them the prompt fills, or UNKNOWN until `done` says so.

    A layer is complete when every page of the prompt is there from every source that feeds the layer's group. While
    the prompt's length is unknown, it is when every source has sent something of it.
    """

    def __init__(self, layers: Sequence[Sequence[int]], reserved: Sequence[int], prompt: Sequence[int]) -> None:
        self.group_of = {layer: group for group, ids in enumerate(layers) for layer in ids}
        self.prompt = list(prompt)
        self._reserved = list(reserved)
        self._sources: list[frozenset[int]] | None = None
        self._masks: dict[tuple[int, int], bytearray] = {}  # (layer, rank): a byte a page
        self._parts: dict[tuple[int, int], int] = {}  # (rank, chunk): writes of it that are still out
        self._chunks: dict[int, int] = {}  # rank: chunks that are complete
        self._expected: dict[int, int] = {}  # rank: chunks it has sent, when it is done
        self.complete: set[int] = {layer for layer, group in self.group_of.items() if self.prompt[group] == 0}  # layers

    @property
    def sources(self) -> frozenset[int]:
        """Ranks that have to be heard of; empty until they are known."""
        return frozenset().union(*self._sources) if self._sources is not None else frozenset()

    @property
    def sources_known(self) -> bool:
        return self._sources is not None

    def expect(self, sources: Sequence[Iterable[int]]) -> None:
        """For each group the ranks that feed it."""
        self._sources = [frozenset(ranks) for ranks in sources]
        for layer in self.group_of:
            self._review(layer)

    def add(self, rank: int, layer: int, start: int, count: int, chunk: int, parts: int) -> None:
        """One of the `parts` writes of a chunk, `count` pages from `start`, is there. IndexError: no such pages."""
        reserved = self._reserved[self.group_of[layer]]
        if start < 0 or count < 0 or start + count > reserved:
            raise IndexError(f"pages {start}..{start + count - 1} of {reserved} reserved ones")
        if parts > 1:
            left = self._parts.get((rank, chunk), parts) - 1
            self._parts[rank, chunk] = left
            if left:
                return
            del self._parts[rank, chunk]
        mask = self._masks.get((layer, rank))
        if mask is None:
            mask = self._masks[layer, rank] = bytearray(reserved)
        mask[start : start + count] = b"\1" * count
        self._chunks[rank] = self._chunks.get(rank, 0) + 1
        self._review(layer)

    def finished(self, rank: int, chunks: int, pages: Sequence[int]) -> None:
        """A source says how much it has sent, and how many pages of each group the prompt has."""
        self._expected[rank] = chunks
        for group, count in enumerate(pages):
            if self.prompt[group] == UNKNOWN or self.prompt[group] < count:
                self.prompt[group] = min(count, self._reserved[group])
        for layer in self.group_of:
            self._review(layer)

    @property
    def over(self) -> bool:
        """Every source has finished, and all that it has sent is there."""
        return self._sources is not None and all(
            rank in self._expected and self._chunks.get(rank, 0) >= self._expected[rank] for rank in self.sources
        )

    def missing(self, group: int) -> list[int]:
        """Positions of the prompt's pages that are not there whole: in some layer, from some source."""
        count = self.known(group)
        missing = bytearray(count)
        ranks = self._sources[group] if self._sources is not None else frozenset()
        for layer, of in self.group_of.items():
            if of != group or layer in self.complete:
                continue
            if not ranks:
                return list(range(count))
            for rank in ranks:
                mask = self._masks.get((layer, rank))
                if mask is None:
                    return list(range(count))
                for place in range(count):
                    missing[place] |= not mask[place]
        return [place for place in range(count) if missing[place]]

    def known(self, group: int) -> int:
        """Pages of the prompt, as far as is known."""
        return self.prompt[group] if self.prompt[group] != UNKNOWN else self._reserved[group]

    def _review(self, layer: int) -> None:
        group = self.group_of[layer]
        if self._sources is None:
            return
        count = self.prompt[group]
        for rank in self._sources[group]:
            mask = self._masks.get((layer, rank))
            if count == 0:
                continue
            if mask is None or (count != UNKNOWN and mask.count(1, 0, count) != count):
                self.complete.discard(layer)
                return
        self.complete.add(layer)
