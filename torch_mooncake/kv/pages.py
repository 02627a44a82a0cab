"""Which pages of a paged cache are free."""

from __future__ import annotations

import threading
from collections.abc import Iterable

from torch_mooncake.errors import InvalidArgument, PoolFull


class PageAllocator:
    """Free list over `num_pages` page ids. Safe from any thread; never blocks.

    Pages that may still be written by a peer that cannot be reached are put into quarantine instead of being freed:
    they are counted there and handed to nobody until `release` says that they are quiet.
    """

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._lock = threading.Lock()
        self._free = list(range(num_pages - 1, -1, -1))
        self._taken: set[int] = set()
        self._quarantined: set[int] = set()

    def take(self, count: int) -> list[int]:
        """`count` pages, or PoolFull (and none taken)."""
        if count < 0:
            raise InvalidArgument(f"cannot take {count} pages")
        with self._lock:
            if count > len(self._free):
                raise PoolFull(f"{count} KV pages asked for, {len(self._free)} of {self.num_pages} are free")
            pages = [self._free.pop() for _ in range(count)]
            self._taken.update(pages)
            return pages

    def free(self, pages: Iterable[int]) -> None:
        """Gives pages back. A page that is not taken raises InvalidArgument (a double free), and none is freed."""
        with self._lock:
            given = self._checked(pages)
            self._taken.difference_update(given)
            self._free.extend(given)

    def quarantine(self, pages: Iterable[int]) -> None:
        """Withdraws taken pages: somebody may still write into them."""
        with self._lock:
            given = self._checked(pages)
            self._taken.difference_update(given)
            self._quarantined.update(given)

    def release(self, pages: Iterable[int]) -> None:
        """Ends the quarantine of pages that nobody can write into any more: they are free."""
        with self._lock:
            given = self._checked(pages, quarantined=True)
            self._quarantined.difference_update(given)
            self._free.extend(given)

    def _checked(self, pages: Iterable[int], quarantined: bool = False) -> list[int]:
        given = list(pages)
        held, name = (self._quarantined, "quarantined") if quarantined else (self._taken, "taken")
        wrong = [page for page in given if page not in held]
        if wrong or len(set(given)) != len(given):
            raise InvalidArgument(f"pages {wrong or given} are not {name}, or named twice")
        return given

    @property
    def available(self) -> int:
        with self._lock:
            return len(self._free)

    @property
    def quarantined(self) -> int:
        with self._lock:
            return len(self._quarantined)
