"""The transfer engine: moves bytes between registered memory of this process and of peers.

    engine = tm.Engine()
    region = engine.register(tensor)                     # region.descriptor() goes to the peer, by any way
    peer = engine.connect("tcp://host:port")
    remote = peer.open(descriptor)
    engine.read(region[0:4096], remote[4096:8192]).wait()

Offsets and sizes are bytes. Everything may be called from any thread. Ops end by their deadline, whatever the peer
does, and keep their regions (and those the tensors) until then. In a forked child every call raises ``Forked``.
"""

from __future__ import annotations

import array
import atexit
import contextlib
import io
import os
import sys
import threading
import time
import weakref
from collections.abc import AsyncIterator, Generator, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

from torch_mooncake import _core, discovery, profiling
from torch_mooncake.clock import NEVER, deadline_ns
from torch_mooncake.errors import Busy, Closed, DeadlineExceeded, Forked, InvalidArgument, IoError, KeyNotFound
from torch_mooncake.explain import Explanation
from torch_mooncake.regions import Pages, Region, RegionSlice, RemoteSlice, Tie, bounds, is_cuda, span_of, storage_of

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

    from torch_mooncake.discovery import Publication


_WITHDRAW_S = 2.0  # what close() gives the directories, all together


class Notification(NamedTuple):
    """Sent with a write of a peer (``notify=``); its data is visible when this arrives."""

    peer_id: bytes
    peer_name: str
    data: bytes


class RemoteRegion:
    """A peer's region. Valid while the session it was opened in lives."""

    __slots__ = ("__weakref__", "_core", "nbytes", "peer")

    def __init__(self, core: _core.RemoteRegion, peer: Peer) -> None:
        self._core = core
        self.peer = peer
        self.nbytes: int = core.nbytes

    @property
    def transport(self) -> str:
        """What carries a read from it: "local", "shm", "process_vm", "unix", "tcp", "file" or "staged"."""
        return self._core.transport

    def lease(self) -> Any:
        """The region's bytes where they lie, as a buffer (``torch.frombuffer``), if they are in this process's address
        space: a shared segment of this host, or an engine of this process. None: they are not, or the owner is taking
        them back.

        For reading only: to write into them is a crash. While anything refers to the buffer, the owner's
        ``deregister`` waits, or is ``Busy``: it ends with the last reference, or with this process.
        """
        return self._core.lease()

    def __getitem__(self, key: slice) -> RemoteSlice:
        return RemoteSlice(self, *bounds(key, self.nbytes))

    def __repr__(self) -> str:
        return f"<RemoteRegion of {self.nbytes} bytes at {self.peer.name}>"


class File(RemoteRegion):
    """A file of this process, as a remote region. Made by ``Engine.open_file``; a context manager."""

    __slots__ = ("_region",)

    def __init__(self, core: _core.RemoteRegion, peer: Peer, region: Region) -> None:
        super().__init__(core, peer)
        self._region: Region | None = region

    def close(self, timeout: float | None = 30) -> None:
        """Wait for what is under way and close the file. Busy at the deadline: it is closed when that has ended."""
        if (region := self._region) is not None:
            self._region = None
            region._engine.deregister(region, timeout)

    def __enter__(self) -> File:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __del__(self) -> None:
        if sys is None or sys.is_finalizing():
            return
        with contextlib.suppress(Busy, Closed, Forked):  # the file goes with its last op, or went with its engine
            self.close(0)


class Peer:
    """Another engine, connected. Made by ``Engine.connect``."""

    __slots__ = ("__weakref__", "_closed", "_core", "_engine", "address")

    def __init__(self, core: _core.Peer, address: str, engine: Engine) -> None:
        self._core = core
        self._closed = False
        self._engine = engine
        self.address = address

    @property
    def name(self) -> str:
        return self._core.name

    @property
    def id(self) -> bytes:
        """16 random bytes of that engine."""
        return self._core.id

    @property
    def alive(self) -> bool:
        return self._core.alive

    @property
    def same_host(self) -> bool:
        """Proven over a Unix socket; equal IP addresses prove nothing."""
        return self._core.same_host

    def open(self, descriptor: bytes, timeout: float | None = 30) -> RemoteRegion:
        """The region behind a descriptor. InvalidArgument: of another engine; KeyNotFound: the region is gone."""
        return RemoteRegion(self._core.open(descriptor, deadline_ns(timeout)), self)

    def close(self) -> None:
        """Give this handle back: its regions take no new ops. The session is shared by all who connected to that engine
        and ends with the last handle; pending ops then fail with Closed."""
        self._closed = True
        self._core.close()

    def _check_open(self) -> None:
        if self._closed:
            raise Closed(f"the peer at {self.address} was closed")

    def __repr__(self) -> str:
        return f"<Peer {self.name} at {self.address}{'' if self.alive else ', lost'}>"


class Op:
    """One batch of reads or writes with one outcome. ``op.wait()`` or ``await op``."""

    __slots__ = ("__weakref__", "_core")

    def __init__(self, core: _core.Op) -> None:
        self._core = core

    def wait(self, timeout: float | None = None) -> None:
        """Return when the op is done; raise its error if it failed. DeadlineExceeded if ``timeout`` seconds pass first:
        the op goes on. Ctrl-C ends the wait, not the op."""
        if profiling.active():
            with profiling.span("wait", f"{self.nbytes} bytes"):
                return self._core.wait(deadline_ns(timeout))
        return self._core.wait(deadline_ns(timeout))

    def done(self) -> bool:
        """True when it has ended, well or not."""
        return self._core.done()

    def cancel(self) -> None:
        """Ask for the end. The op ends as Cancelled unless it was done already."""
        self._core.cancel()

    def __await__(self) -> Generator[Any, None, None]:
        """Any number of tasks, of any loop, may await an op. One that is cancelled meanwhile cancels the op."""
        return self._ended().__await__()

    async def _ended(self) -> None:
        from torch_mooncake import aio

        if not self._core.done():
            try:
                await aio.events_of_running_loop().of(self._core.watch)
            except BaseException:
                self._core.cancel()  # the task was cancelled
                raise
        self._core.wait(NEVER)

    @property
    def state(self) -> str:
        """ "pending", "done", "failed", "timeout" or "cancelled"."""
        return self._core.state

    @property
    def nbytes(self) -> int:
        return self._core.nbytes

    @property
    def bytes_done(self) -> int:
        return self._core.bytes_done

    @property
    def transport(self) -> str:
        """What carries it; several joined by "+"."""
        return self._core.transport

    @property
    def peers(self) -> str:
        """Whom it is with; after a failure, who failed. Names, separated by commas."""
        return self._core.peers

    @property
    def remote_quiescent(self) -> bool:
        """After the end: no byte of this op can land in the peer's memory any more."""
        return self._core.remote_quiescent

    def __repr__(self) -> str:
        return f"<Op {self.state}, {self.bytes_done} of {self.nbytes} bytes>"


Local: TypeAlias = "Region | RegionSlice | torch.Tensor"
Remote: TypeAlias = RemoteRegion | RemoteSlice
Offsets: TypeAlias = "torch.Tensor | Sequence[int] | Any"  # Any: what has a buffer of int64


class Engine:
    """Listens, connects, and moves bytes. Use as a context manager, or ``close()`` it.

    ``listen``: addresses ("tcp://127.0.0.1:0", "unix:///path"); a TCP address beyond loopback needs a token.
    ``transports``: those allowed, best first; an unknown name is ``Unsupported``. ``host_id``: what makes two
    processes neighbours (default: the boot id; a Unix socket must prove it). ``nics``: which NICs to use, globs of
    names and networks ("eth*", "!docker*", "10.0.0.0/8"); all of both sides' that reach each other are used together.
    ``lanes``: connections for bulk on each pair of NICs. ``rdma``: settings of that transport, "sl=3,tc=106"; the
    devices it opens are those that ``nics`` allows, by their own names ("mlx5_*") or their interfaces'.
    """

    def __init__(
        self,
        listen: str | Sequence[str] = ("tcp://127.0.0.1:0",),
        *,
        token: str | None = None,
        transports: Sequence[str] = ("local", "shm", "tcp"),
        host_id: str | None = None,
        name: str = "engine",
        lanes: int = 2,
        nics: Sequence[str] | None = None,
        rdma: str | None = None,
        io_threads: int = 2,
        foreground_rate: int = 0,
        background_rate: int = 0,
    ) -> None:
        from torch_mooncake.config import Config

        config = Config.from_env(
            token=token,
            host_id=host_id,
            transports=transports,
            lanes=lanes,
            io_threads=io_threads,
            nics=nics,
            rdma=rdma,
        )
        self._core = _core.Engine.create(
            listen=[listen] if isinstance(listen, str) else list(listen),
            token=config.token,
            transports=list(config.transports),
            host_id=config.host_id,
            socket_dir=config.runtime_dir,
            name=name,
            role="engine",
            lanes=config.lanes,
            nics=list(config.nics),
            rdma=config.rdma,
            io_threads=config.io_threads,
            foreground_rate=foreground_rate,
            background_rate=background_rate,
        )
        self._ties: dict[int, Tie] = {}  # by region id
        self._publications: list[discovery.Publication] = []
        self._pid = os.getpid()
        self._directories: dict[str | int, discovery.Directory] = {}
        self._directories_lock = threading.Lock()
        _engines.add(self)

    @property
    def addresses(self) -> list[str]:
        """What peers can dial."""
        return self._core.addresses

    @property
    def id(self) -> bytes:
        """16 random bytes, new for every engine."""
        return self._core.id

    @property
    def listening(self) -> list[str]:
        """Every address peers may dial: each NIC's for a wildcard, and the Unix socket that proves "same host"."""
        return self._core.listening

    @property
    def name(self) -> str:
        """How peers call this engine in messages."""
        return self._core.name

    def register(
        self,
        memory: Any,
        *,
        readable: bool = True,
        writable: bool | None = None,
        label: str = "",
        weak: bool = False,
        nbytes: int | None = None,
        create: bool = False,
    ) -> Region:
        """Let peers reach ``memory``: a contiguous CPU or CUDA tensor, a writable buffer (numpy array, bytearray), or
        a file (a path, or an open file object).

        The region keeps it (of a tensor: its storage) alive until it is deregistered. Regions may overlap and repeat;
        each is deregistered by itself. Tensors of ``tm.empty(shared=True)`` are recognised: same-host peers map them.

        ``weak``: the region does not keep the tensor, and is deregistered when its storage dies. Only for
        ``writable=False`` and memory that is not shared: nobody may write, or keep mapped, what can go at any time.

        ``writable``: by peers; memory is unless told otherwise, a file only if it is asked for. Of a file: ``nbytes``
        is the region's size (default: what it holds); a writable one that is shorter is made longer, ``create`` makes
        one that does not exist. Errors: InvalidArgument (a folder, a pipe), OutOfBounds (a file shorter than
        ``nbytes`` and not writable), IoError.
        """
        if isinstance(memory, (str, os.PathLike, io.IOBase)):
            path, fd = _file(memory)
            core = self._core.register_file(path, fd, nbytes, create, readable, bool(writable), label)
            return Region(core, memory, self)
        if nbytes is not None or create:
            raise InvalidArgument("nbytes and create are for files; cut memory before it is registered")
        writable = writable is not False
        address, size, keep = span_of(memory, writable)
        storage = storage_of(memory)
        tie = Tie(storage, weak) if storage is not None else None
        if weak and (tie is None or writable):
            raise InvalidArgument("weak regions are made from tensors, with writable=False")
        keep = (keep, storage) if storage is not None else keep
        make = self._core.register_cuda if is_cuda(memory) else self._core.register
        core = make(address, size, None if weak else keep, readable, writable, label)
        if weak and core.shared:
            self._core.deregister(core, deadline_ns(30))
            raise InvalidArgument("shared memory cannot be registered weakly: peers map it")
        if tie is not None:
            self._ties[core.id] = tie
        if weak:
            weakref.finalize(storage, _storage_died, weakref.ref(self), core).atexit = False
        return Region(core, None if weak else memory, self, tie)

    def open_file(
        self,
        path: str | os.PathLike[str] | io.IOBase,
        *,
        nbytes: int | None = None,
        writable: bool = False,
        create: bool = False,
        timeout: float | None = 30,
    ) -> File:
        """A file of this machine as a remote region, to be read into and written from local memory:
        ``engine.read(region, file)``. Arguments and errors as ``register``; close it when done."""
        region = self.register(path, nbytes=nbytes, writable=writable, create=create)
        peer = Peer(self._core.self_peer(deadline_ns(timeout)), "self", self)
        return File(peer._core.open(region.descriptor(), deadline_ns(timeout)), peer, region)

    def deregister(self, region: Region, timeout: float | None = 30) -> None:
        """Return when nobody can read or write the memory any more. Busy (naming who can) at the deadline: it stays in
        quarantine, kept alive, until they are gone."""
        self._ties.pop(region._core.id, None)
        self._core.deregister(region._core, deadline_ns(timeout))

    def region_of(self, memory: Any) -> RegionSlice:
        """The part of a registered region that ``memory`` (a tensor or buffer) lies in: the innermost, newest one.

        KeyNotFound if none covers it, or only regions made from tensors whose storage has died, moved or shrunk since:
        then the memory is another tensor's now, and peers must not be told that it is still the old one.
        """
        address, nbytes, _ = span_of(memory, False)
        stale = ""
        while core := self._core.region_at(address, nbytes):
            region = Region(core, None, self, self._ties.get(core.id))
            try:
                region._hold()
            except KeyNotFound as error:
                stale = stale or f" any more: {error}"
                self._core.forget_address(core)
                continue
            return RegionSlice(region, address - core.address, nbytes)
        raise KeyNotFound(f"no region covers the {nbytes} bytes at {address:#x}{stale}")

    def connect(self, address: str, timeout: float | None = 30) -> Peer:
        """A session with the engine at ``address``. AuthError, PeerLost, Unsupported (naming the scheme), …"""
        return Peer(self._core.connect(address, deadline_ns(timeout)), address, self)

    def publish(self, where: str | dist.Store, name: str) -> Publication:
        """Let others ``find()`` this engine: ``where`` is "etcd://host:port[,host:port…][/prefix]" or a Store.

        Replaces what was published under that name. Withdrawn by ``close()`` of the result or of the engine; in etcd
        it goes with the process, too. IoError if the directory does not answer.
        """
        publication = self._directory(where).publish(name, lambda: discovery.record_of(self))
        self._publications.append(publication)
        return publication

    def find(self, where: str | dist.Store, name: str, timeout: float | None = 30) -> Peer:
        """Connect to the engine published as ``name``; waits until there is one.

        KeyNotFound if none was published within ``timeout``; PeerLost if the record is of an incarnation that is gone
        (also if another engine answers at its addresses); IoError if the directory does not answer.
        """
        return discovery.find(self, self._directory(where), name, timeout)

    def _directory(self, where: str | dist.Store) -> discovery.Directory:
        with self._directories_lock:
            key = where if isinstance(where, str) else id(where)
            if key not in self._directories:
                self._directories[key] = discovery.open_directory(where)
            return self._directories[key]

    def write(
        self,
        local: Local | Pages | Iterable[tuple[Local, Remote]],
        remote: Remote | Pages | None = None,
        *,
        local_offsets: Offsets | None = None,
        remote_offsets: Offsets | None = None,
        nbytes: int | Offsets | None = None,
        timeout: float | None = 30,
        notify: bytes = b"",
        priority: Literal["foreground", "background"] = "foreground",
        stream: torch.cuda.Stream | None = None,
    ) -> Op:
        """Copy local memory into a peer's. One call, one op with one outcome, in four forms: a pair of slices; a list
        of pairs (of several peers, if need be: the first failure stops the rest, and the error names who failed);
        ``Pages`` and ``Pages``; two regions with int64 arrays of byte offsets and a size for all or each. The last two
        make no Python object a slice. A registered tensor may stand for its region (see ``region_of``).

        ``notify`` (≤ 64 KiB) is delivered to each peer once, after its data is visible there. ``priority``: background
        ops yield to foreground ones. Sizes that differ: InvalidArgument; a slice that leaves its region: OutOfBounds,
        and nothing is written.

        ``stream``: keep the op's place on a CUDA stream. It begins when the work queued there before is done, and the
        work queued afterwards waits for its end, however it ends: look at the op before you use the data.
        """
        if profiling.active():
            with profiling.span("write", ""):
                return self._transfer(
                    True, local, remote, local_offsets, remote_offsets, nbytes, timeout, notify, priority, stream
                )
        return self._transfer(
            True, local, remote, local_offsets, remote_offsets, nbytes, timeout, notify, priority, stream
        )

    def read(
        self,
        local: Local | Pages | Iterable[tuple[Local, Remote]],
        remote: Remote | Pages | None = None,
        *,
        local_offsets: Offsets | None = None,
        remote_offsets: Offsets | None = None,
        nbytes: int | Offsets | None = None,
        timeout: float | None = 30,
        notify: bytes = b"",
        priority: Literal["foreground", "background"] = "foreground",
        stream: torch.cuda.Stream | None = None,
    ) -> Op:
        """Copy a peer's memory into local memory: the local destination comes first. Forms and errors as ``write``."""
        if profiling.active():
            with profiling.span("read", ""):
                return self._transfer(
                    False, local, remote, local_offsets, remote_offsets, nbytes, timeout, notify, priority, stream
                )
        return self._transfer(
            False, local, remote, local_offsets, remote_offsets, nbytes, timeout, notify, priority, stream
        )

    def _transfer(
        self,
        write: bool,
        local: Any,
        remote: Any,
        local_offsets: Any,
        remote_offsets: Any,
        nbytes: Any,
        timeout: float | None,
        notify: bytes,
        priority: str,
        stream: torch.cuda.Stream | None,
    ) -> Op:
        plain = not notify and priority == "foreground" and stream is None
        if plain and type(local) is RegionSlice and type(remote) is RemoteSlice:
            region, offset, size = local
            there, offset_there, size_there = remote
            paged = local_offsets is not None or remote_offsets is not None
            if size == size_there and not paged and (timeout is None or timeout > 0) and not there.peer._closed:
                kept = region._hold()  # until the copy is over
                ended = self._core.transfer_now(write, region._core, offset, there._core, offset_there, size)
                del kept
                if ended is not None:
                    return Op(ended)
        deadline = deadline_ns(timeout)
        background = priority == "background"
        if not background and priority != "foreground":
            raise InvalidArgument(f'priority is "foreground" or "background", not {priority!r}')
        order = None if stream is None else (stream.device.index, stream.cuda_stream)
        if local_offsets is not None or remote_offsets is not None:
            if not isinstance(local, Region) or not isinstance(remote, RemoteRegion):
                raise InvalidArgument("with offsets, give a whole Region and a whole RemoteRegion")
            if local_offsets is None or remote_offsets is None or nbytes is None:
                raise InvalidArgument("local_offsets, remote_offsets and nbytes go together")
            arrays = [_int64(local_offsets), _int64(remote_offsets), _int64(nbytes)]
            remote.peer._check_open()
            return Op(
                self._core.transfer_offsets(
                    write, local._core, arrays[0], remote._core, arrays[1], arrays[2], deadline, notify, background,
                    local._hold(), order,
                )
            )  # fmt: skip
        if remote is None:
            keep: list[Any] = []
            items = [self._pair(here, there, keep) for here, there in local]
            return Op(self._core.transfer_list(write, items, deadline, notify, background, keep or None, order))
        if isinstance(local, Pages) or isinstance(remote, Pages):
            return self._pages(write, local, remote, deadline, notify, background, order)
        keep = []
        pair = self._pair(local, remote, keep)
        return Op(self._core.transfer_one(write, *pair, deadline, notify, background, keep or None, order))

    def _pages(
        self, write: bool, local: Any, remote: Any, deadline: int, notify: bytes, background: bool, order: Any
    ) -> Op:
        if not isinstance(local, Pages) or not isinstance(remote, Pages):
            raise InvalidArgument("Pages go with Pages, on both sides")
        if local.nbytes != remote.nbytes:
            raise InvalidArgument(f"local pages of {local.nbytes} bytes do not match remote ones of {remote.nbytes}")
        ids = local.id_array(), remote.id_array()
        counts = [len(i) if i is not None else side.count for i, side in zip(ids, (local, remote), strict=True)]
        count = counts[0] if counts[0] is not None else counts[1]
        if count is None or (counts[1] is not None and counts[1] != count):
            raise InvalidArgument(f"{counts[0]} local pages do not match {counts[1]} remote ones")
        keep: list[Any] = []
        locals_ = [self._local(base, keep) for base in local.base_list()]
        remotes = [_remote(base) for base in remote.base_list()]
        strides = [side.nbytes if side.stride is None else side.stride for side in (local, remote)]
        return Op(
            self._core.transfer_pages(
                write, [(base.region._core, base.offset, base.nbytes) for base in locals_], ids[0], strides[0],
                [(base.region._core, base.offset, base.nbytes) for base in remotes], ids[1], strides[1],
                count, local.nbytes, deadline, notify, background, keep or None, order,
            )
        )  # fmt: skip

    def _pair(self, local: Any, remote: Any, keep: list[Any]) -> tuple[_core.Region, int, _core.RemoteRegion, int, int]:
        """A pair of slices as ``_core`` takes it; ``keep`` gets what the op has to keep alive besides the region."""
        local = self._local(local, keep)
        remote = _remote(remote)
        if local.nbytes != remote.nbytes:
            raise InvalidArgument(f"{local.nbytes} local bytes do not match {remote.nbytes} remote bytes")
        return local.region._core, local.offset, remote.region._core, remote.offset, local.nbytes

    def _local(self, local: Any, keep: list[Any]) -> RegionSlice:
        if isinstance(local, Region):
            local = RegionSlice(local, 0, local.nbytes)
        elif not isinstance(local, RegionSlice):
            if storage_of(local) is None:
                raise InvalidArgument(f"expected Region, region[a:b] or registered tensor, not {type(local).__name__}")
            local = self.region_of(local)
        if (hold := local.region._hold()) is not None:
            keep.append(hold)
        return local

    def next_notification(self, timeout: float | None = None) -> Notification:
        """The next notification of any peer. DeadlineExceeded if none comes within ``timeout`` seconds."""
        return Notification(*self._core.next_notification(deadline_ns(timeout)))

    async def anext_notification(self, timeout: float | None = None) -> Notification:
        """``await`` form of ``next_notification``. No thread waits."""
        from torch_mooncake import aio

        events = aio.events_of_running_loop()
        deadline = deadline_ns(timeout)
        while True:
            try:
                return Notification(*self._core.next_notification(0))
            except DeadlineExceeded:
                left = None if timeout is None else (deadline - time.monotonic_ns()) / 1e9
                if left is not None and left <= 0:
                    raise
            await events.of(self._core.watch_notifications, left, shared=self)

    async def notifications(self) -> AsyncIterator[Notification]:
        """``async for note in engine.notifications()``: each notification of any peer, until the engine is closed."""
        while True:
            try:
                note = await self.anext_notification()
            except Closed:
                return
            yield note

    def transport_for(self, peer: Peer | RemoteRegion) -> str:
        """What carries bytes between here and there: for a region exactly; for a peer, memory that is not shared."""
        if isinstance(peer, RemoteRegion):
            return peer.transport
        return self._core.transport_for(peer._core)

    def explain(self, peer: Peer | RemoteRegion) -> Explanation:
        """Which path carries what to and from a peer, for which sizes, and why not a better one. ``print()`` it."""
        peer = peer.peer if isinstance(peer, RemoteRegion) else peer
        return Explanation(self._core.explain(peer._core))

    def stats(self) -> dict[str, Any]:
        """Counters since the engine was made, and how things stand now.

        ``reads`` and ``writes``: ended ops by outcome; ``ops_in_flight``; ``latencies``: for each direction, transport
        and size class (``up_to_nbytes``, None: larger) ``ops``, ``nbytes``, ``latency_sum_s`` and ``latency``, a
        histogram (bucket 0 ends at 256 ns, each next at twice that); ``bytes_sent`` and ``bytes_received`` by
        transport; ``lanes``; ``resent_slices``, ``failovers``; tasks that wait (``mover_queue``, ``callback_queue``);
        ``regions``, ``quarantined_regions``, ``sessions``. Plain values, as JSON has them. ``torch_mooncake.metrics``
        exports it to Prometheus.
        """
        return self._core.stats()

    def capsule(self) -> Any:
        """The native engine, for the library's other native modules."""
        return self._core.capsule()

    def close(self) -> None:
        """End all sessions; pending ops fail with Closed, and so do later calls. Idempotent. Records are withdrawn
        within 2 s, or left to their lease (etcd) or to whoever dials in vain (a Store that does not answer)."""
        try:
            if os.getpid() == self._pid:  # a forked child withdraws nothing: the records are its parent's
                self._withdraw(time.monotonic() + _WITHDRAW_S)
        finally:
            self._core.close()

    def _withdraw(self, deadline: float) -> None:
        publications, self._publications = self._publications, []
        with self._directories_lock:
            directories = list(self._directories.values())
        closers = [each.close for each in publications] + [each.close for each in directories]
        for closing in [discovery.Question(close, "tm-withdraw") for close in closers]:
            with contextlib.suppress(IoError):  # not in time
                closing.result(deadline - time.monotonic())

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _remote(remote: Any) -> RemoteSlice:
    if isinstance(remote, RemoteRegion):
        remote = RemoteSlice(remote, 0, remote.nbytes)
    elif not isinstance(remote, RemoteSlice):
        raise InvalidArgument(f"expected RemoteRegion or remote[a:b], not {type(remote).__name__}")
    remote.region.peer._check_open()
    return remote


def _storage_died(engine: weakref.ref[Engine], core: _core.Region) -> None:
    """The storage of a weak region is going: nobody may read its memory from now on."""
    if (alive := engine()) is None:
        return
    alive._ties.pop(core.id, None)
    with contextlib.suppress(Closed, Forked):
        alive._core.deregister(core, deadline_ns(30))


def _file(file: Any) -> tuple[str, int]:
    """(path, descriptor or -1) of a path or file object; what the object has buffered is written out."""
    if not isinstance(file, io.IOBase):
        return os.fspath(file), -1
    try:
        fd = file.fileno()
    except OSError:
        raise InvalidArgument(f"a {type(file).__name__} is no file; register its buffer") from None
    if file.writable():
        file.flush()
    return str(getattr(file, "name", f"fd {fd}")), fd


def _int64(values: Any) -> Any:
    """Something _core takes as a contiguous int64 array: tensors and buffers as they are, ints and lists converted."""
    if isinstance(values, int):
        return array.array("q", (values,))
    dtype = getattr(values, "dtype", None)
    if dtype is not None and str(dtype).removeprefix("torch.") != "int64":
        raise InvalidArgument(f"offsets and sizes must be int64, not {dtype}")
    if isinstance(values, (list, tuple, range)):
        return array.array("q", values)
    return values


_engines: weakref.WeakSet[Engine] = weakref.WeakSet()


def live_engines() -> list[Engine]:
    """The engines of this process that were made in Python and are still referenced."""
    return list(_engines)


@atexit.register
def _close_all() -> None:
    for engine in list(_engines):
        engine.close()
