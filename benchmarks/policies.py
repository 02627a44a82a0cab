"""Policies of eviction to hold the pool's against: each keeps ``capacity`` keys and is told of uses. For traces.py.

``key in policy``: whether it has it; ``policy.use(key)``: it is used, and kept from now on.
"""

from __future__ import annotations

from collections import OrderedDict


class LRU:
    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.kept: OrderedDict[int, None] = OrderedDict()

    def __contains__(self, key: int) -> bool:
        return key in self.kept

    def use(self, key: int) -> None:
        self.kept[key] = None
        self.kept.move_to_end(key)
        if len(self.kept) > self.capacity:
            self.kept.popitem(last=False)


class ARC:
    """Megiddo and Modha, FAST'03: keys used once and keys used again, in shares that ghosts of both adapt."""

    def __init__(self, capacity: int) -> None:
        self.capacity, self.share = capacity, 0.0  # of those used once
        self.once: OrderedDict[int, None] = OrderedDict()
        self.again: OrderedDict[int, None] = OrderedDict()
        self.once_gone: OrderedDict[int, None] = OrderedDict()
        self.again_gone: OrderedDict[int, None] = OrderedDict()

    def __contains__(self, key: int) -> bool:
        return key in self.once or key in self.again

    def _evict(self, again_ghost: bool = False) -> None:
        over = len(self.once) > self.share or (again_ghost and len(self.once) == self.share)
        if self.once and (over or not self.again):
            self.once_gone[self.once.popitem(last=False)[0]] = None
        else:
            self.again_gone[self.again.popitem(last=False)[0]] = None

    def use(self, key: int) -> None:
        full = len(self.once) + len(self.again) >= self.capacity
        if key in self:
            self.once.pop(key, None)
            self.again[key] = None
            self.again.move_to_end(key)
        elif key in self.once_gone or key in self.again_gone:
            ours, others = self.once_gone, self.again_gone
            ghost_of_again = key in self.again_gone
            if ghost_of_again:
                self.share = max(0.0, self.share - max(1.0, len(ours) / len(others)))
            else:
                self.share = min(float(self.capacity), self.share + max(1.0, len(others) / len(ours)))
            if full:
                self._evict(ghost_of_again)
            (others if ghost_of_again else ours).pop(key)
            self.again[key] = None
        else:
            if len(self.once) + len(self.once_gone) >= self.capacity:
                if self.once_gone:
                    self.once_gone.popitem(last=False)
                    if full:
                        self._evict()
                else:
                    self.once.popitem(last=False)
            elif full:
                if len(self.once) + len(self.again) + len(self.once_gone) + len(self.again_gone) >= 2 * self.capacity:
                    self.again_gone.popitem(last=False)
                self._evict()
            self.once[key] = None


class S3FIFO:
    """Yang et al., SOSP'23: a small queue of new keys before the main one, with ghosts of the small one."""

    def __init__(self, capacity: int, small: float = 0.1) -> None:
        self.capacity, self.small_capacity = capacity, max(1, int(capacity * small))
        self.small: OrderedDict[int, int] = OrderedDict()  # uses since it came, at most 3
        self.main: OrderedDict[int, int] = OrderedDict()
        self.gone: OrderedDict[int, None] = OrderedDict()

    def __contains__(self, key: int) -> bool:
        return key in self.small or key in self.main

    def _evict_main(self) -> None:
        while self.main:
            key, uses = self.main.popitem(last=False)
            if uses == 0:
                return
            self.main[key] = uses - 1

    def _evict_small(self) -> None:
        while self.small:
            key, uses = self.small.popitem(last=False)
            if uses == 0:
                self.gone[key] = None
                if len(self.gone) > self.capacity:
                    self.gone.popitem(last=False)
                return
            self.main[key] = 0
            if len(self.main) > self.capacity - self.small_capacity:
                self._evict_main()

    def use(self, key: int) -> None:
        for queue in (self.small, self.main):
            if key in queue:
                queue[key] = min(3, queue[key] + 1)
                return
        while len(self.small) + len(self.main) >= self.capacity:
            if len(self.small) >= self.small_capacity:
                self._evict_small()
            else:
                self._evict_main()
        if key in self.gone:
            del self.gone[key]
            self.main[key] = 0
        else:
            self.small[key] = 0
