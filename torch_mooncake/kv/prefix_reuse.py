"""Loads and stores of pages that go on while the caller computes. Made by ``PoolKV.load`` and ``PoolKV.store``."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

from torch_mooncake import _core, aio
from torch_mooncake.clock import deadline_ns, seconds_left
from torch_mooncake.errors import Cancelled, DeadlineExceeded, Error, InternalError, InvalidArgument, KeyNotFound

if TYPE_CHECKING:
    from torch_mooncake.kv.pool_kv import PoolKV

_BOOKKEEPING_S = 2.0


class _Ending:
    """An outcome that comes once, from another thread."""

    def __init__(self, deadline: int) -> None:
        self._deadline = deadline
        self._changed = threading.Condition()
        self._ended = False
        self._error: Error | None = None

    @property
    def state(self) -> str:
        """ "pending", "done", "cancelled", "timeout" or "failed". Final, and the pages quiet, unless "pending"."""
        with self._changed:
            if not self._ended:
                return "pending"
            if self._error is None:
                return "done"
            return {Cancelled: "cancelled", DeadlineExceeded: "timeout"}.get(type(self._error), "failed")

    @property
    def error(self) -> Error | None:
        """What ended it; None while it is under way and when it is done."""
        with self._changed:
            return self._error

    def _until(self, reached: Callable[[], bool], timeout: float | None, what: str) -> None:
        limit = deadline_ns(timeout)
        with self._changed:
            while not reached():
                if self._ended:
                    if self._error is not None:
                        raise self._error
                    return
                left = seconds_left(limit)
                if not left:
                    raise DeadlineExceeded(f"{what}: {timeout} s were over, and it is still under way")
                self._changed.wait(min(left, threading.TIMEOUT_MAX))

    def _end(self, error: Error | None) -> None:
        with self._changed:
            self._ended = True
            self._error = error
            self._changed.notify_all()


class PrefixLoad(_Ending):
    """The pages of a prompt that the pool had, on their way into the cache, one layer of all of them after the other.

    ``hits`` pages, the first of the prompt, are loaded into ``pages``. Until the load has ended (``state``) they are
    the load's: nobody else may write them, or give them away. It ends by itself, at its deadline at the latest;
    leaving the ``with`` block, or ``cancel()``, ends it early. After the end no byte of it lands any more.

    When it fails, ``loaded`` pages are whole nevertheless, the first ones, and the error's ``failed_pages`` are those
    that the engine has to compute. A page is never filled with another's content: what is under a page's key by
    the time it is read is that page, or the load fails. Thread-safe.
    """

    def __init__(
        self, owner: PoolKV, client: Any, keys: Sequence[str], objects: list[Any], pages: list[int], deadline: int
    ) -> None:
        super().__init__(deadline)
        self.hits = len(objects)
        self.pages = tuple(pages[: self.hits])
        self._owner = owner
        self._client = client
        self._keys = keys
        self._objects = objects
        self._whole = self.hits  # pages of which nothing has failed
        self._layers = 0  # in place, of all hits
        self._loaded = 0
        self._cancelled = False
        if objects:
            aio.submit(self._run)
        else:
            self._unpin()
            self._end(None)

    def wait_layer(self, layer: int, timeout: float | None = None) -> None:
        """Return when ``layer`` (the model's number) of all ``pages`` is in place. Raises what ended the load if it
        ends before that, and then no byte lands any more; DeadlineExceeded after ``timeout`` seconds, and then it goes
        on."""
        place = self._owner._objects.group.index.get(layer)
        if place is None:
            raise InvalidArgument(f"layer {layer} is none of {list(self._owner._objects.group.layer_ids)}")
        self._until(lambda: self._layers > place or not self.hits, timeout, f"layer {layer}")

    def wait(self, timeout: float | None = None) -> int:
        """Return ``hits`` when all is in place; raises as ``wait_layer`` does."""
        self._until(lambda: self._ended and self._error is None, timeout, "load")
        return self.hits

    def cancel(self) -> None:
        """End the load, if it has not ended, and return when no byte of it lands any more: when what is being read just
        now has come, at the load's deadline at the latest."""
        with self._changed:
            self._cancelled = True
            while not self._ended:
                self._changed.wait()

    @property
    def loaded(self) -> int:
        """How many of ``pages``, from the first on, are whole; 0 until the load has ended."""
        with self._changed:
            return self._loaded

    def __enter__(self) -> PrefixLoad:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()

    # --- on a thread of the library ---

    def _run(self) -> None:
        started = time.perf_counter()
        error: Error | None = None
        try:
            error = self._read_layers()
        except Error as raised:
            error = raised
            self._whole = 0
        except BaseException as raised:  # the waiting threads have to hear of it
            error = InternalError(f"load: {type(raised).__name__}: {raised}")
            self._whole = 0
        if error is not None:
            error.failed_pages = self.pages[self._whole :]
        stats = self._owner.stats
        stats.load_s += time.perf_counter() - started
        stats.pages_loaded += self._whole
        stats.bytes_loaded += self._whole * self._owner.page_nbytes
        self._loaded = self._whole
        self._end(error)
        self._unpin()

    def _read_layers(self) -> Error | None:
        """Reads all layers of as many pages as come; the first failure."""
        failed: Error | None = None
        for place in range(len(self._owner._objects.group.layers)):
            if self._cancelled:
                self._whole = 0
                return Cancelled("the load was cancelled")
            if failure := self._read(place):
                failed = failed or failure
                if not self._whole:
                    return failed
            if failed is None:
                with self._changed:
                    self._layers = place + 1
                    self._changed.notify_all()
        return failed

    def _read(self, place: int) -> Error | None:
        """One layer of the pages that are whole so far. What has been evicted since it was located may be there again:
        under a page's key there is never anything else."""
        outcomes = self._read_pages(place, range(self._whole))
        gone = [index for index, outcome in enumerate(outcomes) if isinstance(outcome, KeyNotFound)]
        if gone:
            again = self._owner._locate_again(self._client, [self._keys[index] for index in gone], self._deadline)
            for index, found in zip(gone, again, strict=True):
                if not isinstance(found, Error):
                    self._objects[index] = found
            found = [index for index, item in zip(gone, again, strict=True) if not isinstance(item, Error)]
            for index, outcome in zip(found, self._read_pages(place, found), strict=True):
                outcomes[index] = outcome
        for index, outcome in enumerate(outcomes):
            if outcome is not None:
                self._whole = index
                return outcome
        return None

    def _read_pages(self, place: int, which: Sequence[int]) -> list[Error | None]:
        objects = [self._objects[index] for index in which]
        pages = [self.pages[index] for index in which]
        memory = self._owner._objects.memory
        return _core.read_page_layers(self._client, objects, memory, place, 1, pages, self._deadline) if objects else []

    def _unpin(self) -> None:
        limit = min(self._deadline, deadline_ns(_BOOKKEEPING_S))
        if self._keys:
            self._owner._refresh(_core.refresh_keys, self._client, list(self._keys), True, limit)


class PrefixStore(_Ending):
    """Pages on their way into the pool. Until it has ended they are read: their content has to stay, and they must not
    be given away. It ends by itself, at its deadline at the latest. Thread-safe."""

    def __init__(
        self,
        put: Callable[[], int],
        pages: Sequence[int],
        deadline: int,
        then: Callable[[PrefixStore], object] | None,
    ) -> None:
        super().__init__(deadline)
        self.pages = tuple(pages)
        self._put = put
        self._then = then
        self._new = 0
        aio.submit(self._run)

    def wait(self, timeout: float | None = None) -> None:
        """Return when it has ended, however it ended. DeadlineExceeded after ``timeout`` seconds; then it goes on."""
        self._until(lambda: self._ended, timeout, "store")

    def result(self, timeout: float | None = None) -> int:
        """How many of the pages were new to the pool, when all are in it. Raises what kept them out: PoolFull,
        DeadlineExceeded, PoolUnavailable and others."""
        self.wait(timeout)
        if (error := self.error) is not None:
            raise error
        return self._new

    def _run(self) -> None:
        error: Error | None = None
        try:
            self._new = self._put()
        except Error as raised:
            error = raised
        except BaseException as raised:  # the waiting threads have to hear of it
            error = InternalError(f"store: {type(raised).__name__}: {raised}")
        self._end(error)
        if self._then is not None:
            try:
                self._then(self)
            except BaseException:  # the caller's: told as what ends a thread is
                threading.excepthook(threading.ExceptHookArgs((*sys.exc_info(), threading.current_thread())))
