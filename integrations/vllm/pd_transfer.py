"""One prompt on its way from a prefill rank: who asked for it, what is ready, what has been pushed."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch_mooncake as tm

if TYPE_CHECKING:
    from torch_mooncake.integrations.vllm.door import Line
    from torch_mooncake.kv import PrefillSession


@dataclass(frozen=True)
class Ask:
    """Of one decode rank."""

    line: Line
    ticket: bytes
    size: int  # decode's tensor-parallel degree
    skip: int  # positions that decode has already
    digest: bytes

    @classmethod
    def of(cls, line: Line, message: dict[str, Any]) -> tuple[int, Ask]:
        """(rank, ask). InvalidArgument if the message is none."""
        try:
            rank, size, skip = int(message["rank"]), int(message["size"]), int(message["skip"])
            ticket, digest = message["ticket"], message["digest"]
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise tm.InvalidArgument(f"not a call for a prompt: {error!r}") from error
        if not isinstance(ticket, bytes) or not isinstance(digest, bytes):
            raise tm.InvalidArgument("not a call for a prompt: ticket and digest are bytes")
        ask = cls(line, ticket, size, skip, digest)
        if not 0 <= rank < size or skip < 0:
            raise tm.InvalidArgument(f"not a call for a prompt: rank {rank} of {size}, from {skip}")
        return rank, ask


class Transfer:
    """Fields are read and written with ``lock``. Whoever has ``claim``-ed it may push, one at a time: the worker's
    thread while its step runs, or a thread of the pusher's."""

    def __init__(self, transfer_id: str) -> None:
        self.id = transfer_id
        self.lock = threading.Lock()
        self.request_id: str | None = None
        self.digest = b""
        self.blocks: list[int] = []
        self.ready = 0  # positions that are whole in all layers
        self.total = 0  # of the prompt; 0: prefill has not begun
        self.pushed = 0
        self.event: Any = None  # of the stream that made the latest ready ones
        self.asks: dict[int, Ask] = {}
        self.content: set[Line] = set()  # of decode ranks that have all they get, from others
        self.session: PrefillSession | None = None
        self.dead: BaseException | None = None  # it is to end
        self.ended = False  # nothing of it is under way
        self.since = time.monotonic()
        self._claimed = False

    def claim(self) -> bool:
        """Whether the caller may push now; then ``release`` it."""
        with self.lock:
            if self._claimed or self.ended:
                return False
            self._claimed = True
            return True

    def release(self) -> None:
        with self.lock:
            self._claimed = False

    def next(self) -> str:
        """What whoever has claimed it has to do: "end", "open", "push" or "finish"; "": nothing, and then it is claimed
        no more."""
        with self.lock:
            self._compare()
            if self.dead is not None:
                return "end"
            if self.session is None:
                if self._complete():
                    return "open"
            elif self.pushed < self.ready:
                return "push"
            elif self.total and self.pushed == self.total:
                return "finish"
            self._claimed = False
            return ""

    def join(self) -> bool:
        """Claims it for a step that goes on, if its session is open and has all that is ready."""
        if self.session is None or not self.claim():
            return False
        with self.lock:
            self._compare()
            self._claimed = self.dead is None and self.pushed == self.ready
            return self._claimed

    def _compare(self) -> None:
        """It ends if decode has asked for another prompt, or of another model."""
        if self.total and self.dead is None and any(ask.digest != self.digest for ask in self.asks.values()):
            self.dead = tm.InvalidArgument(
                f"transfer {self.id}: prefill has another prompt, or another model, than decode"
            )

    def _complete(self) -> bool:
        return bool(self.asks) and len(self.asks) == next(iter(self.asks.values())).size

    def add(self, rank: int, ask: Ask) -> None:
        """InvalidArgument for a decode rank that does not fit the others."""
        with self.lock:
            if rank in self.asks or any((a.size, a.skip) != (ask.size, ask.skip) for a in self.asks.values()):
                raise tm.InvalidArgument(f"decode rank {rank} of {ask.size} does not fit those that have called before")
            self.asks[rank] = ask

    @property
    def skip(self) -> int:
        return next(iter(self.asks.values())).skip

    def push(self, layer: int, start: int, end: int, event: Any = None) -> None:
        """Positions ``start`` to ``end`` of a layer, those that decode has already left out."""
        assert self.session is not None
        first = max(start, self.skip)
        if first < end:
            self.session.push_layer(layer, self.blocks[first:end], start=first - self.skip, event=event)

    def tell(self, message: dict[str, Any]) -> None:
        """All decode ranks; those that are gone need not hear it."""
        with self.lock:
            lines = [ask.line for ask in self.asks.values()]
        for line in lines:
            try:
                line.send(message)
            except tm.PeerLost:
                continue
