"""How far the targets of a version are, as their boards say, and for whom a publisher waits."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from torch_mooncake.weights.board import COMPLETE, DONE, ELAPSED_US, NBYTES, VERSION, WANTED
from torch_mooncake.weights.fetch import Progress
from torch_mooncake.weights.members import Links, Member
from torch_mooncake.weights.shards import Ints

_LOOK_S = 1.0  # for a board that does not answer


@dataclass(frozen=True)
class State:
    complete: int  # the newest version that it has
    coming: int  # the newest of which it has a part; 0: none
    wants: bool  # it waits for the next one, whichever that is
    progress: Progress | None  # of the newest

    @classmethod
    def of(cls, header: Ints) -> State:
        version, complete = header[:, VERSION], header[:, COMPLETE] == 1
        wanted = version == WANTED
        coming = np.where(complete | wanted | (version < 0), 0, version)
        newest = int(np.where(wanted, 0, version).argmax())
        row = header[newest]
        progress = None
        if row[VERSION] > 0 and row[VERSION] != WANTED:
            done = int(row[NBYTES] if row[COMPLETE] else row[DONE])
            progress = Progress(
                int(row[VERSION]), int(row[NBYTES]), done, time.monotonic() - int(row[ELAPSED_US]) / 1e6
            )
        return cls(int(np.where(complete, version, 0).max()), int(coming.max()), bool(wanted.any()), progress)


class Watch:
    """``patience_s``: who is waited for, and shows nothing new on its board for so long, is *slow*: it is waited for no
    more until it does. For one thread."""

    def __init__(self, links: Links, patience_s: float) -> None:
        self._links, self._patience_s = links, patience_s
        self._seen: dict[str, tuple[bytes, float]] = {}  # uid: its board, and since when that is the same
        self._slow: set[str] = set()
        self.states: dict[str, State] = {}  # at the last look; of those that answered

    def begin(self) -> None:
        """Somebody is waited for from now on: until now it did not have to show anything."""
        now = time.monotonic()
        self._seen = {uid: (board, now) for uid, (board, _) in self._seen.items()}

    def look(self, members: Sequence[Member]) -> None:
        self.states = {}
        now = time.monotonic()
        for member, header in zip(members, self._links.headers(members, _LOOK_S), strict=True):
            board = b"" if header is None else header.tobytes()
            before = self._seen.get(member.uid)
            if before is None or before[0] != board:
                self._seen[member.uid] = board, now
                self._slow.discard(member.uid)
            elif now - before[1] > self._patience_s:
                self._slow.add(member.uid)
            if header is not None:
                self.states[member.uid] = State.of(header)
        uids = {member.uid for member in members}
        self._seen = {uid: seen for uid, seen in self._seen.items() if uid in uids}
        self._slow &= uids

    def kept(self, members: Sequence[Member], current: int, held: Collection[int]) -> set[int]:
        """Which of the versions that are ``held`` somebody is reading, or is about to: those that an attempt under way
        is for, and all that are new to a subscriber that has not begun with any of them yet."""
        found: set[int] = set()
        for member in members:
            state = self.states.get(member.uid)
            if state is None or member.uid in self._slow or state.complete >= current:
                continue
            if state.coming in held:
                found.add(state.coming)
            elif member.follows or state.wants:
                found |= {version for version in held if version > state.complete}
        return found

    def missing(self, members: Sequence[Member], version: int) -> list[str]:
        """Who has not the version (or a later one), and is neither gone nor slow."""
        return [
            member.uid
            for member in members
            if (state := self.states.get(member.uid)) is not None
            and member.uid not in self._slow
            and state.complete < version
        ]
