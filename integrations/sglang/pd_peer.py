"""Our end of a prefill rank's engine, and one decode rank as the engine reaches it."""

from __future__ import annotations

import threading
from typing import Any

import torch_mooncake as tm
from torch_mooncake.integrations import _memory
from torch_mooncake.integrations._dial import dial
from torch_mooncake.integrations.sglang.pd_messages import Memory
from torch_mooncake.integrations.sglang.pd_plan import Move, Plan

Ours = _memory.Ranges[tm.Region]


def register(engine: tm.Engine, args: Any, reachable: bool) -> Ours:
    """All buffers of SGLang's ``KVArgs``, each once. ``reachable``: peers may write them. InvalidArgument: two of them
    overlap without being the same."""
    lists = [(args.kv_data_ptrs, args.kv_data_lens), (args.aux_data_ptrs, args.aux_data_lens)]
    lists += list(zip(args.state_data_ptrs, args.state_data_lens, strict=True))
    spans = dict.fromkeys((int(at), int(nbytes)) for pair in lists for at, nbytes in zip(*pair, strict=True) if nbytes)
    made: Ours = _memory.Ranges()
    for at, nbytes in spans:
        region = _memory.register(engine, at, nbytes, "sglang", readable=False, writable=reachable)
        more = made.added(at, nbytes, region)
        if more is None:
            raise tm.InvalidArgument(f"{nbytes} bytes at {at:#x} overlap other buffers")
        made = more
    return made


class Decoder:
    """A decode rank. It is dialled when something is sent there, and again after its session has ended. Any thread."""

    def __init__(self, engine: tm.Engine, far: Memory, plan: Plan | None, refused: str, timeout_s: float) -> None:
        self.far, self.refused = far, refused
        self._plan, self._engine, self._timeout_s = plan, engine, timeout_s
        self._lock = threading.Lock()  # of who dials or opens, which takes its time
        self._peer: tm.Peer | None = None
        self._closed = False
        self._opened: dict[int, tm.RemoteRegion] = {}
        self._spans: _memory.Ranges[bytes] = _memory.Ranges()
        for at, nbytes, descriptor in sorted(far.regions):
            more = self._spans.added(at, nbytes, descriptor)
            if more is None:
                raise tm.InvalidArgument("its regions overlap")
            self._spans = more

    @property
    def plan(self) -> Plan:
        """LayoutMismatch: their layouts do not go together."""
        if self._plan is None:
            raise tm.LayoutMismatch(self.refused, peer=self.far.engine)
        return self._plan

    def write(self, ours: Ours, move: Move) -> tm.Op:
        """Errors: those of dialling and of ``Engine.write``; OutOfBounds: an address is in no registered memory;
        Closed."""
        near = [_slice(ours, at, lambda i: ours.values[i]) for at in move.ours]
        with self._lock:
            far = [_slice(self._spans, at, self._remote) for at in move.theirs]
        return self._engine.write(
            tm.Pages(near, move.nbytes, ids=move.here, stride=move.stride),
            tm.Pages(far, move.nbytes, ids=move.there, stride=move.far_stride),
            timeout=self._timeout_s,
        )

    def _remote(self, index: int) -> tm.RemoteRegion:
        if not self._closed and (self._peer is None or not self._peer.alive):
            self._opened.clear()
            self._peer = dial(self._engine, self.far.addresses, self.far.engine, self._timeout_s)
        if self._closed or self._peer is None:
            if self._peer is not None:
                self._peer.close()  # again, if it was there to be closed
            raise tm.Closed("the decode rank has gone, or has told of other memory", peer=self.far.engine)
        if index not in self._opened:
            self._opened[index] = self._peer.open(self._spans.values[index], timeout=self._timeout_s)
        return self._opened[index]

    def alive(self) -> bool:
        """Not known to be gone. At once, whoever dials."""
        peer = self._peer
        return peer is None or peer.alive

    def close(self) -> None:
        """At once: who dials closes what they get."""
        self._closed = True
        if (peer := self._peer) is not None:
            peer.close()


def _slice(spans: _memory.Ranges[Any], address: int, region_of: Any) -> Any:
    """From ``address`` to the end of the range it is in."""
    index = spans.index(address, 1)
    if index < 0:
        raise tm.OutOfBounds(f"{address:#x} lies in no registered buffer")
    return region_of(index)[address - spans.starts[index] : spans.ends[index] - spans.starts[index]]
