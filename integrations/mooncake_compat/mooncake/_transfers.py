"""One call's transfer: from plain addresses to ops of the engine, and their end."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Sequence

import numpy as np

import torch_mooncake as tm
from mooncake._codes import INTERNAL_ERROR, logger
from mooncake._peers import Session
from torch_mooncake.integrations import _memory

Registered = _memory.Ranges[tm.Region]


class Transfer:
    """Reads or writes of one call, with one deadline. ``begin`` it, then ``wait``, or ``poll`` until it is over, which
    any thread may, and all are told the same.

    A peer that has taken its memory back and registered it anew is asked once more for what it has; nothing else is
    tried again.
    """

    def __init__(
        self,
        engine: tm.Engine,
        session: Session,
        regions: Registered,
        write: bool,
        local: Sequence[int],
        remote: Sequence[int],
        lengths: Sequence[int],
        *,
        notify: bytes,
        timeout_s: float,
    ) -> None:
        self._engine, self._session, self._regions = engine, session, regions
        self._write, self._notify = write, notify
        self._deadline = time.monotonic() + timeout_s
        self._lock = threading.Lock()
        self._code: int | None = None
        self._sides = tuple(np.asarray(values, np.int64) for values in (local, remote, lengths))
        self._ops: list[tm.Op] = []
        self._loose: list[tm.Region] = []
        self._unreleased: list[tm.Error] = []
        self._again = True

    def begin(self) -> bool:
        """False, and nothing is under way: it cannot be done; the log says why."""
        while True:
            try:
                self._submit()
                return True
            except tm.Error as error:
                for op in self._ops:
                    op.cancel()
                self._end()
                self._session.forget()
                if not (self._again and isinstance(error, (tm.PeerLost, tm.Closed, tm.KeyNotFound))):
                    logger.warning("transfer with %s: %s: %s", self._session.name, type(error).__name__, error)
                    return False
                self._again = False

    def poll(self) -> int | None:
        """None: under way; else its code."""
        if not self._lock.acquire(blocking=False):
            return self._code  # somebody waits for it
        try:
            if self._code is None and all(op.done() for op in self._ops):
                self._code = self._finish()
            return self._code
        finally:
            self._lock.release()

    def wait(self) -> int:
        """0, or -1 when one of its ops has failed; nothing of it is touched from then on."""
        with self._lock:
            if self._code is None:
                self._code = self._finish()
            return self._code

    def settle(self) -> bool:
        """Whether its ops are over. What was registered for it alone is not any more then."""
        if self._code is not None or not self._lock.acquire(blocking=False):
            return self._code is not None
        try:
            over = all(op.done() for op in self._ops)
            if over:
                self._release()
            return over
        finally:
            self._lock.release()

    def _finish(self) -> int:
        while True:
            failures = self._end()
            stale = [error for error in failures if isinstance(error, tm.KeyNotFound)]
            if stale and len(stale) == len(failures) and self._again:
                self._again = False
                self._session.forget()
                if not self.begin():
                    return INTERNAL_ERROR
                continue
            for error in failures:
                logger.warning("transfer with %s: %s: %s", self._session.name, type(error).__name__, error)
            if failures:
                self._session.forget()
            return INTERNAL_ERROR if failures else 0

    def _end(self) -> list[tm.Error]:
        """Wait for all ops; what failed. Each has a deadline of its own."""
        failures: list[tm.Error] = []
        for op in self._ops:
            try:
                op.wait()
            except tm.Error as error:
                failures.append(error)
        self._ops = []
        self._release()
        failures += self._unreleased
        self._unreleased = []
        return failures

    def _release(self) -> None:
        for region in self._loose:
            try:
                self._engine.deregister(region)
            except tm.Error as error:
                self._unreleased.append(error)
        self._loose = []

    def _submit(self) -> None:
        ours, theirs, sizes = self._sides
        if not len(sizes):
            self._session.connected()
            return
        which, far, far_starts = self._session.locate(theirs, sizes)
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise tm.DeadlineExceeded("its time is over", peer=self._session.name)
        near = self._regions
        mine = near.indices(ours, sizes)
        move = self._engine.write if self._write else self._engine.read
        groups = mine * len(far) + which
        if (mine < 0).any() or (self._notify and len(np.unique(groups)) > 1):
            pairs = []
            rows = zip(ours.tolist(), theirs.tolist(), sizes.tolist(), mine.tolist(), which.tolist(), strict=True)
            for here, there, nbytes, ours_at, theirs_at in rows:
                start = near.starts[ours_at] if ours_at >= 0 else here
                region = near.values[ours_at] if ours_at >= 0 else self._loosely(here, nbytes)
                a, b = here - start, there - far_starts[theirs_at]
                pairs.append((region[a : a + nbytes], far[theirs_at][b : b + nbytes]))
            self._ops.append(move(pairs, timeout=left, notify=self._notify))
            return
        for group in np.unique(groups).tolist():
            chosen = groups == group
            index = group // len(far)
            self._ops.append(
                move(
                    near.values[index],
                    far[group % len(far)],
                    local_offsets=ours[chosen] - near.starts[index],
                    remote_offsets=theirs[chosen] - far_starts[group % len(far)],
                    nbytes=sizes[chosen],
                    timeout=left,
                    notify=self._notify,
                )
            )

    def _loosely(self, address: int, nbytes: int) -> tm.Region:
        """A region for local memory that was not registered: for this transfer only, and not for peers."""
        if _memory.cuda_device(address) is not None or not _memory.mapped(address, nbytes):
            raise tm.OutOfBounds(f"{nbytes} bytes at {address:#x} are not registered here, or not there")
        region = self._engine.register(_memory.view(address, nbytes), readable=False, writable=False, label="loose")
        self._loose.append(region)
        return region


def notification(name: str, message: str) -> bytes:
    return json.dumps([name, message]).encode()
