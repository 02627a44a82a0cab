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
import sys
import threading
from collections.abc import Generator, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias
from weakref import WeakSet

from torch_mooncake import _core, discovery, profiling
from torch_mooncake.clock import NEVER, deadline_ns
from torch_mooncake.errors import InvalidArgument, OutOfBounds
from torch_mooncake.explain import Explanation

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

    from torch_mooncake.aio import LoopEvents
    from torch_mooncake.discovery import Publication


class Notification(NamedTuple):
    """Sent with a write of a peer (``notify=``); its data is visible when this arrives."""

    peer_id: bytes
    peer_name: str
    data: bytes


class RegionSlice(NamedTuple):
    region: Region
    offset: int
    nbytes: int


class RemoteSlice(NamedTuple):
    region: RemoteRegion
    offset: int
    nbytes: int


def _bounds(key: slice, nbytes: int) -> tuple[int, int]:
    """(offset, nbytes) of ``key``; OutOfBounds where a Python list would clamp."""
    if not isinstance(key, slice) or key.step not in (None, 1):
        raise InvalidArgument("a region is cut by region[start:stop], in bytes")
    start = 0 if key.start is None else int(key.start)
    stop = nbytes if key.stop is None else int(key.stop)
    if not 0 <= start <= stop <= nbytes:
        raise OutOfBounds(f"[{start}:{stop}] leaves a region of {nbytes} bytes")
    return start, stop - start


class Region:
    """Memory of this process that peers may reach. ``region[a:b]`` is a part of it. Made by ``Engine.register``."""

    __slots__ = ("__weakref__", "_core", "_engine", "nbytes", "tensor")

    def __init__(self, core: _core.Region, tensor: Any, engine: Engine) -> None:
        self._core = core
        self._engine = engine
        self.tensor = tensor  # what was registered
        self.nbytes: int = core.nbytes

    def descriptor(self) -> bytes:
        """What a peer needs to open this region. It gives no access without a session."""
        return self._core.descriptor()

    def __getitem__(self, key: slice) -> RegionSlice:
        return RegionSlice(self, *_bounds(key, self.nbytes))

    def __repr__(self) -> str:
        return f"<Region {self._core.id} of {self.nbytes} bytes at {self._core.address:#x}>"


class RemoteRegion:
    """A peer's region. Valid while the session it was opened in lives."""

    __slots__ = ("__weakref__", "_core", "nbytes", "peer")

    def __init__(self, core: _core.RemoteRegion, peer: Peer) -> None:
        self._core = core
        self.peer = peer
        self.nbytes: int = core.nbytes

    @property
    def transport(self) -> str:
        """What carries a read from it: "local", "shm", "process_vm", "unix" or "tcp"."""
        return self._core.transport

    def __getitem__(self, key: slice) -> RemoteSlice:
        return RemoteSlice(self, *_bounds(key, self.nbytes))

    def __repr__(self) -> str:
        return f"<RemoteRegion of {self.nbytes} bytes at {self.peer.name}>"


class Peer:
    """Another engine, connected. Made by ``Engine.connect``."""

    __slots__ = ("__weakref__", "_core", "_engine", "address")

    def __init__(self, core: _core.Peer, address: str, engine: Engine) -> None:
        self._core = core
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
        """End the session. Pending ops fail with Closed."""
        self._core.close()

    def __repr__(self) -> str:
        return f"<Peer {self.name} at {self.address}{'' if self.alive else ', lost'}>"


class Op:
    """One batch of reads or writes with one outcome. ``op.wait()`` or ``await op``."""

    __slots__ = ("__weakref__", "_core", "_events")

    def __init__(self, core: _core.Op, events: LoopEvents | None) -> None:
        self._core = core
        self._events = events

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
        return self._ended().__await__()

    async def _ended(self) -> None:
        from torch_mooncake import aio

        if not self._core.done():
            try:
                if self._events is not None and self._events is aio.events_of_running_loop():
                    await self._events.ended(self._core)
                else:
                    await aio.in_thread(self._core.wait, NEVER)
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
    def remote_quiescent(self) -> bool:
        """After the end: no byte of this op can land in the peer's memory any more."""
        return self._core.remote_quiescent

    def __repr__(self) -> str:
        return f"<Op {self.state}, {self.bytes_done} of {self.nbytes} bytes>"


Local: TypeAlias = Region | RegionSlice
Remote: TypeAlias = RemoteRegion | RemoteSlice
Offsets: TypeAlias = "torch.Tensor | Sequence[int] | Any"  # Any: what has a buffer of int64


class Engine:
    """Listens, connects, and moves bytes. Use as a context manager, or ``close()`` it.

    ``listen``: addresses ("tcp://127.0.0.1:0", "unix:///path"); a TCP address beyond loopback needs a token.
    ``transports``: those allowed, best first; an unknown name is ``Unsupported``. ``host_id``: what makes two
    processes neighbours (default: the boot id; a Unix socket must prove it). ``nics``: which NICs to use, globs of
    names and networks ("eth*", "!docker*", "10.0.0.0/8"); all of both sides' that reach each other are used together.
    ``lanes``: connections for bulk on each pair of NICs.
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
        io_threads: int = 2,
    ) -> None:
        from torch_mooncake.config import Config

        config = Config.from_env(
            token=token, host_id=host_id, transports=transports, lanes=lanes, io_threads=io_threads, nics=nics
        )
        self._core = _core.Engine.create(
            listen=[listen] if isinstance(listen, str) else list(listen),
            token=config.token,
            transports=list(config.transports),
            host_id=config.host_id,
            name=name,
            role="engine",
            lanes=config.lanes,
            nics=list(config.nics),
            io_threads=config.io_threads,
        )
        self._publications: list[discovery.Publication] = []
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

    def register(self, memory: Any, *, readable: bool = True, writable: bool = True, label: str = "") -> Region:
        """Let peers reach ``memory``: a contiguous CPU tensor, or a writable buffer (numpy array, bytearray).

        The region keeps it alive. Tensors of ``tm.empty(shared=True)`` are recognised and mapped by same-host peers.
        """
        address, nbytes, keep = _memory(memory, writable)
        return Region(self._core.register(address, nbytes, keep, readable, writable, label), memory, self)

    def deregister(self, region: Region, timeout: float | None = 30) -> None:
        """Return when nobody can read or write the memory any more. Busy at the deadline: it stays in quarantine."""
        self._core.deregister(region._core, deadline_ns(timeout))

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
        local: Local | Iterable[tuple[Local, Remote]],
        remote: Remote | None = None,
        *,
        local_offsets: Offsets | None = None,
        remote_offsets: Offsets | None = None,
        nbytes: int | Offsets | None = None,
        timeout: float | None = 30,
        notify: bytes = b"",
    ) -> Op:
        """Copy local memory into a peer's. Three forms: one pair of slices; a list of pairs; two regions with int64
        arrays of byte offsets and a size for all or each (100 000 pages are one call).

        ``notify`` (≤ 64 KiB) is delivered to the peer once, after the data is visible there. Sizes that differ:
        InvalidArgument; a slice that leaves its region: OutOfBounds, and nothing is written.
        """
        if profiling.active():
            with profiling.span("write", ""):
                return self._transfer(True, local, remote, local_offsets, remote_offsets, nbytes, timeout, notify)
        return self._transfer(True, local, remote, local_offsets, remote_offsets, nbytes, timeout, notify)

    def read(
        self,
        local: Local | Iterable[tuple[Local, Remote]],
        remote: Remote | None = None,
        *,
        local_offsets: Offsets | None = None,
        remote_offsets: Offsets | None = None,
        nbytes: int | Offsets | None = None,
        timeout: float | None = 30,
        notify: bytes = b"",
    ) -> Op:
        """Copy a peer's memory into local memory: the local destination comes first. Forms and errors as ``write``."""
        if profiling.active():
            with profiling.span("read", ""):
                return self._transfer(False, local, remote, local_offsets, remote_offsets, nbytes, timeout, notify)
        return self._transfer(False, local, remote, local_offsets, remote_offsets, nbytes, timeout, notify)

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
    ) -> Op:
        deadline = deadline_ns(timeout)
        events = _running_loop_events()
        event = events.fd if events else None
        if local_offsets is not None or remote_offsets is not None:
            if not isinstance(local, Region) or not isinstance(remote, RemoteRegion):
                raise InvalidArgument("with offsets, give a whole Region and a whole RemoteRegion")
            if local_offsets is None or remote_offsets is None or nbytes is None:
                raise InvalidArgument("local_offsets, remote_offsets and nbytes go together")
            arrays = [_int64(local_offsets), _int64(remote_offsets), _int64(nbytes)]
            core = self._core.transfer_offsets(
                write, local._core, arrays[0], remote._core, arrays[1], arrays[2], deadline, notify, event
            )
        elif remote is not None:
            core = self._core.transfer_one(write, *_pair(local, remote), deadline, notify, event)
        else:
            core = self._core.transfer_list(write, [_pair(*pair) for pair in local], deadline, notify, event)
        return Op(core, events)

    def next_notification(self, timeout: float | None = None) -> Notification:
        """The next notification of any peer. DeadlineExceeded if none comes within ``timeout`` seconds."""
        return Notification(*self._core.next_notification(deadline_ns(timeout)))

    async def anext_notification(self, timeout: float | None = None) -> Notification:
        """``await`` form of ``next_notification``; holds one thread of the library's pool while it waits."""
        from torch_mooncake import aio

        return await aio.in_thread(self.next_notification, timeout)

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
        ``regions``, ``quarantined_regions``, ``sessions``. ``torch_mooncake.metrics`` exports it to Prometheus.
        """
        return self._core.stats()

    def capsule(self) -> Any:
        """The native engine, for the library's other native modules."""
        return self._core.capsule()

    def close(self) -> None:
        """End all sessions; pending ops fail with Closed, and so do later calls. Idempotent, at most 2 s."""
        for publication in self._publications:
            publication.close()
        with self._directories_lock:
            for directory in self._directories.values():
                directory.close()
        self._core.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _pair(local: Any, remote: Any) -> tuple[_core.Region, int, _core.RemoteRegion, int, int]:
    if isinstance(local, Region):
        local = RegionSlice(local, 0, local.nbytes)
    if isinstance(remote, RemoteRegion):
        remote = RemoteSlice(remote, 0, remote.nbytes)
    if not isinstance(local, RegionSlice) or not isinstance(remote, RemoteSlice):
        raise InvalidArgument(
            f"expected (Region or region[a:b], RemoteRegion or remote[a:b]), got "
            f"({type(local).__name__}, {type(remote).__name__})"
        )
    if local.nbytes != remote.nbytes:
        raise InvalidArgument(f"{local.nbytes} local bytes do not match {remote.nbytes} remote bytes")
    return local.region._core, local.offset, remote.region._core, remote.offset, local.nbytes


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


def _memory(memory: Any, writable: bool) -> tuple[int, int, Any]:
    """(address, nbytes, what keeps it) of a tensor or buffer."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(memory, torch.Tensor):
        if memory.device.type != "cpu" or memory.layout is not torch.strided or not memory.is_contiguous():
            raise InvalidArgument(
                f"only contiguous CPU tensors can be registered, not {memory.layout} on {memory.device}"
                f"{'' if memory.layout is not torch.strided or memory.is_contiguous() else ' with strides'}"
            )
        return memory.data_ptr(), memory.numel() * memory.element_size(), memory
    try:
        pinned = _core.Pinned(memory, writable)
    except (TypeError, BufferError, ValueError) as error:
        raise InvalidArgument(f"cannot register a {type(memory).__name__}: {error}") from None
    return pinned.address, pinned.nbytes, pinned


def _running_loop_events() -> LoopEvents | None:
    if "asyncio.events" not in sys.modules or sys.modules["asyncio.events"]._get_running_loop() is None:
        return None
    from torch_mooncake import aio

    return aio.events_of_running_loop()


_engines: WeakSet[Engine] = WeakSet()


def live_engines() -> list[Engine]:
    """The engines of this process that were made in Python and are still referenced."""
    return list(_engines)


@atexit.register
def _close_all() -> None:
    for engine in list(_engines):
        engine.close()
