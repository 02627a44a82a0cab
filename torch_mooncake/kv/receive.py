"""The decode side of prefill/decode sessions: reserves pages, hands out tickets, hears of each layer."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch_mooncake.errors import Closed, InvalidArgument
from torch_mooncake.kv import wire
from torch_mooncake.kv.arrivals import UNKNOWN
from torch_mooncake.kv.cache import PagedKV
from torch_mooncake.kv.decode import DecodeSession
from torch_mooncake.kv.fetch import Fetcher
from torch_mooncake.kv.inbox import Inbox
from torch_mooncake.kv.layer_runs import OtherLayouts
from torch_mooncake.kv.leases import Leases
from torch_mooncake.kv.packing import Packer
from torch_mooncake.kv.pages import PageAllocator
from torch_mooncake.kv.settle import Settler
from torch_mooncake.kv.staging import Staging

if TYPE_CHECKING:
    from torch_mooncake.transfer import Engine, Peer, Region

__all__ = ["DecodeSession", "KVReceiver"]


class KVReceiver:
    """Receives pages into `kv` through `engine`, whose notifications it takes. This process is tensor-parallel rank
    `tp_rank` of `tp_size`, and `kv` holds that rank's heads. `allocator`: one, or one for each group of the layout.
    Packed pages pass through `staging_nbytes` of memory, made on first use.

    Sessions whose deadline has passed or whose peer is gone are ended even if nobody waits for them. Thread safety: all
    methods.
    """

    def __init__(
        self,
        engine: Engine,
        kv: PagedKV,
        allocator: PageAllocator | Sequence[PageAllocator],
        *,
        tp_rank: int = 0,
        tp_size: int = 1,
        staging_nbytes: int = 64 << 20,
    ) -> None:
        if not 0 <= tp_rank < tp_size:
            raise InvalidArgument(f"tp_rank {tp_rank} is not in 0..{tp_size - 1}")
        self.engine = engine
        self.kv = kv
        self.allocators = [allocator] if isinstance(allocator, PageAllocator) else list(allocator)
        if len(self.allocators) != len(kv.layout.groups):
            raise InvalidArgument(f"{len(self.allocators)} allocators for {len(kv.layout.groups)} groups of pages")
        for one, group in zip(self.allocators, kv.layout.groups, strict=True):
            if one.num_pages > group.num_pages:
                raise InvalidArgument(f"an allocator of {one.num_pages} pages for {group.num_pages}")
        self.place = wire.Place(tp_rank, tp_size)
        self.layout_key = wire.pack_layout(kv.layout.to_dict())
        self.inbox = Inbox.of(engine)
        self.leases = Leases(engine, lambda: kv.register(engine, writable=True, label="decode KV pages"))
        self.settler = Settler("tm-kv-settle")
        self.fetcher = Fetcher()
        self.packer = Packer(kv)
        self.staging_nbytes = staging_nbytes
        self._scratch: Staging | None = None
        self._regions: list[Region] = []
        self.others = OtherLayouts(kv.layout, sending=False)
        self._sessions: set[DecodeSession] = set()
        self._lock = threading.Lock()
        self._closed = False

    @property
    def allocator(self) -> PageAllocator:
        """Of the first group."""
        return self.allocators[0]

    @property
    def stray_notes(self) -> int:
        """Notes to this engine of sessions that have ended, or never were."""
        return self.inbox.strays

    @property
    def sessions(self) -> list[DecodeSession]:
        """Those that have not ended."""
        with self._lock:
            return list(self._sessions)

    def open(
        self,
        num_pages: int | Sequence[int],
        *,
        prompt_pages: int | Sequence[int] | None = None,
        timeout: float = 30,
        peer: Peer | Sequence[Peer] | None = None,
        wire: str = "auto",
        keep_pages: bool = False,
    ) -> DecodeSession:
        """Reserves `num_pages` (of each group; PoolFull if there are not so many) for one prompt, to be pushed by
        whoever gets its ticket; every prefill rank gets the same one.

        `prompt_pages`: how many of them the prompt fills; the rest is room for the answer and does not count. None: the
        prefill side says so when it is done, and until then a layer counts once every source has pushed of it.
        `peer`: the prefill engines, if they are known already: the session fails with PeerLost as soon as one of them
        is gone, also before it has said anything. `wire`: what prefill may use; "packed_fp8" only if it is given here.
        `keep_pages`: when the session fails, pages that have arrived whole stay taken (`kept_pages`).
        """
        counts, prompts = self._counts(num_pages, prompt_pages)
        peers = [] if peer is None else list(peer) if isinstance(peer, Sequence) else [peer]
        session = DecodeSession(self, counts, prompts, time.monotonic() + timeout, wire, keep_pages)
        session._open(peers)
        return session

    def pull(
        self,
        tickets: bytes | Sequence[bytes],
        num_pages: int | Sequence[int],
        *,
        prompt_pages: int | Sequence[int] | None = None,
        timeout: float | None = None,
        wire: str = "auto",
        keep_pages: bool = False,
    ) -> DecodeSession:
        """Takes the tickets of all prefill ranks (`KVSender.offer`; those that have nothing for us are not asked),
        reserves pages as `open` does, and reads what they offer as it is offered. Raises LayoutMismatch naming every
        difference, InvalidArgument when a rank's ticket is wanting, KeyNotFound when an offer is over."""
        counts, prompts = self._counts(num_pages, prompt_pages)
        messages = [_offered(data) for data in ([tickets] if isinstance(tickets, bytes) else tickets)]
        if not messages:
            raise InvalidArgument("no ticket")
        allowed = min(message.timeout_s for message in messages)
        deadline = time.monotonic() + (allowed if timeout is None else min(timeout, allowed))
        session = DecodeSession(self, counts, prompts, deadline, wire, keep_pages)
        session._pull(messages)
        return session

    def close(self) -> None:
        """Ends all sessions as closed and stops the threads. The engine stays its owner's."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        for session in self.sessions:
            session._end(Closed("the receiver was closed"))
        self.fetcher.close()
        self.settler.close()
        self.leases.close()
        self.inbox.release()
        for region in [*self._regions, *([] if self._scratch is None else [self._scratch.region])]:
            try:
                self.engine.deregister(region)  # nobody but us has ever used it
            except Closed:
                pass
        self._regions, self._scratch = [], None

    @property
    def own_regions(self) -> int:
        """Regions that stay registered between sessions: those that wait for one, the cache for pulls, memory for
        packed pages."""
        return len(self._regions) + (self._scratch is not None) + self.leases.idle * len(self.kv.storages)

    # ---- for the sessions

    def _counts(
        self, num_pages: int | Sequence[int], prompt_pages: int | Sequence[int] | None
    ) -> tuple[list[int], list[int]]:
        counts = [num_pages] if isinstance(num_pages, int) else list(num_pages)
        if prompt_pages is None:
            prompts = [UNKNOWN] * len(counts)
        else:
            prompts = [prompt_pages] if isinstance(prompt_pages, int) else list(prompt_pages)
        if len(counts) != len(self.allocators) or len(prompts) != len(counts):
            raise InvalidArgument(f"pages {num_pages} and {prompt_pages} for {len(self.allocators)} groups")
        for count, prompt in zip(counts, prompts, strict=True):
            if prompt != UNKNOWN and not 0 <= prompt <= count:
                raise InvalidArgument(f"a prompt of {prompt} pages in {count} reserved ones")
        return counts, prompts

    def _add(self, session: DecodeSession) -> None:
        with self._lock:
            if self._closed:
                raise Closed("this receiver is closed")
            self._sessions.add(session)

    def _forget(self, session: DecodeSession) -> None:
        with self._lock:
            self._sessions.discard(session)

    @property
    def regions(self) -> list[Region]:
        """The cache, for our own reads into it."""
        with self._lock:
            if not self._regions:
                self._regions = self.kv.register(self.engine, writable=False, label="decode KV cache")
            return self._regions

    @property
    def scratch(self) -> Staging:
        """Where packed pages land before they are unpacked."""
        with self._lock:
            if self._scratch is None:
                label = "fetched KV pages"
                self._scratch = Staging(self.engine, self.staging_nbytes, self.packer.device, label=label)
            return self._scratch


def _offered(data: bytes) -> wire.Ticket:
    ticket = wire.decode_ticket(data)
    if ticket.mode != "pull":
        raise InvalidArgument("that ticket was made by a decode side, to be pushed to")
    return ticket
