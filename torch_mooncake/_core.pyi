from collections.abc import Callable, Sequence
from typing import Annotated, Any

import numpy
from numpy.typing import NDArray
from typing_extensions import CapsuleType


VERSION: str = '0.1.0'

def set_failpoints(spec: str) -> None:
    """Replace what TM_FAILPOINTS says, for tests."""

class Mapped:
    """Bytes of a pool object, with the buffer protocol."""

    @property
    def address(self) -> int: ...

    @property
    def nbytes(self) -> int: ...

    @property
    def zero_copy(self) -> bool: ...

    @property
    def read_only(self) -> bool: ...

    def __len__(self) -> int: ...

def crc32c(address: int, offsets: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], sizes: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)]) -> int:
    """CRC-32C of byte ranges of this process' memory, one after another."""

def copy_ranges(targets: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], sources: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], sizes: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)]) -> None:
    """
    Copies byte ranges of this process' memory, by all copy threads; none overlap.
    """

class Pinned:
    """A buffer of Python's, held in place."""

    def __init__(self, buffer: object, writable: bool = True) -> None: ...

    @property
    def address(self) -> int: ...

    @property
    def nbytes(self) -> int: ...

    @property
    def read_only(self) -> bool: ...

LATENCY_BOUNDS_S: tuple = ...

def file_io() -> str:
    """What carries file I/O here: "io_uring", or "threads (why)"."""

class SharedBuffer:
    """Memory that same-host peers can map."""

    def __init__(self, nbytes: int) -> None: ...

    @property
    def nbytes(self) -> int: ...

class Region:
    @property
    def nbytes(self) -> int: ...

    @property
    def kind(self) -> str: ...

    @property
    def address(self) -> int: ...

    @property
    def id(self) -> int: ...

    @property
    def shared(self) -> bool: ...

    @property
    def generation(self) -> int: ...

    def descriptor(self) -> bytes: ...

class RemoteRegion:
    @property
    def nbytes(self) -> int: ...

    @property
    def transport(self) -> str: ...

    def lease(self) -> Mapped | None:
        """
        The region's bytes where they lie, for reading only; None if they are not in this process.
        """

class Peer:
    @property
    def name(self) -> str: ...

    @property
    def id(self) -> bytes: ...

    @property
    def host_id(self) -> str: ...

    @property
    def pid(self) -> int: ...

    @property
    def addresses(self) -> list[str]: ...

    @property
    def alive(self) -> bool: ...

    @property
    def same_host(self) -> bool: ...

    def open(self, descriptor: bytes, deadline_ns: int) -> RemoteRegion: ...

    def call(self, method: int, body: bytes, deadline_ns: int) -> bytes:
        """
        A control message by its number, for programs that speak the protocol themselves.
        """

    def close(self) -> None: ...

class Engine:
    def transfer_one(self, write: bool, local: Region, local_offset: int, remote: RemoteRegion, remote_offset: int, nbytes: int, deadline_ns: int, notify: bytes, background: bool, keep: object | None, stream: tuple[int, int] | None = None) -> Op: ...

    def transfer_now(self, write: bool, local: Region, local_offset: int, remote: RemoteRegion, remote_offset: int, nbytes: int, /) -> Op | None: ...

    def transfer_list(self, write: bool, items: list, deadline_ns: int, notify: bytes, background: bool, keep: object | None, stream: tuple[int, int] | None = None) -> Op: ...

    def transfer_offsets(self, write: bool, local: Region, local_offsets: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], remote: RemoteRegion, remote_offsets: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], sizes: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], deadline_ns: int, notify: bytes, background: bool, keep: object | None, stream: tuple[int, int] | None = None) -> Op: ...

    def transfer_pages(self, write: bool, locals: list, local_ids: Annotated[NDArray, dict(shape=(None,), device='cpu', writable=False)] | None, local_stride: int, remotes: list, remote_ids: Annotated[NDArray, dict(shape=(None,), device='cpu', writable=False)] | None, remote_stride: int, count: int, nbytes: int, deadline_ns: int, notify: bytes, background: bool, keep: object | None, stream: tuple[int, int] | None = None) -> Op: ...

    def watch_notifications(self, completions: Completions, tag: int) -> bool: ...

    @staticmethod
    def create(*, listen: Sequence[str], token: str, transports: Sequence[str], host_id: str, socket_dir: str, name: str, role: str, lanes: int, io_threads: int, nics: Sequence[str], rdma: str, foreground_rate: int, background_rate: int) -> Engine: ...

    @staticmethod
    def from_capsule(capsule: CapsuleType) -> Engine: ...

    def capsule(self) -> CapsuleType: ...

    @property
    def addresses(self) -> list[str]: ...

    @property
    def listening(self) -> list[str]: ...

    @property
    def name(self) -> str: ...

    @property
    def id(self) -> bytes: ...

    def listen(self, address: str) -> str: ...

    def register(self, address: int, nbytes: int, keep: object | None, readable: bool, writable: bool, label: str) -> Region: ...

    def register_cuda(self, address: int, nbytes: int, keep: object | None, readable: bool, writable: bool, label: str) -> Region: ...

    def register_file(self, path: str, fd: int, nbytes: int | None, create: bool, readable: bool, writable: bool, label: str) -> Region: ...

    def self_peer(self, deadline_ns: int) -> Peer: ...

    def region_at(self, address: int, nbytes: int) -> Region | None: ...

    def forget_address(self, region: Region) -> None: ...

    def deregister(self, region: Region, deadline_ns: int) -> None: ...

    def connect(self, address: str, deadline_ns: int) -> Peer: ...

    def next_notification(self, deadline_ns: int) -> tuple: ...

    def transport_for(self, peer: Peer) -> str: ...

    def explain(self, peer: Peer) -> dict: ...

    def stats(self) -> dict: ...

    def close(self) -> None: ...

class Completions:
    """
    What an event loop watches: ops that it awaits say here that they ended.
    """

    def __init__(self) -> None: ...

    def fileno(self) -> int: ...

    def take(self) -> list[int]: ...

class Op:
    def done(self) -> bool: ...

    def wait(self, deadline_ns: int) -> None: ...

    def watch(self, completions: Completions, tag: int) -> bool: ...

    def cancel(self) -> None: ...

    @property
    def state(self) -> str: ...

    @property
    def nbytes(self) -> int: ...

    @property
    def bytes_done(self) -> int: ...

    @property
    def transport(self) -> str: ...

    @property
    def peers(self) -> str: ...

    @property
    def remote_quiescent(self) -> bool: ...

class PlainBatch:
    """Values whose bytes lie in one piece each, with their descriptions."""

def set_plain_describer(describe: Callable) -> None:
    """tensors.py's, from a plain value to its (metadata, nbytes)."""

def set_tensor_types(tensor: type, parameter: type) -> None:
    """torch's, once it is imported: until then no tensor is plain."""

def plain(value: Any) -> tuple[bytes, tuple[int, int]] | None:
    """
    (metadata, (address, nbytes)) of bytes, or of a dense CPU tensor as it is; None for everything else. The value has to stay until it has been put.
    """

def plain_batch(values: list, writable: bool) -> PlainBatch | None:
    """None if one of them is not plain, or is bytes and is to be written."""

MAX_KEY_BYTES: int = 1024

MAX_META_BYTES: int = 1048576

MAX_PARTS: int = 4096

MAX_TTL_MS: int = 315360000000

class Object:
    """A found version of a key."""

    @property
    def key(self) -> bytes: ...

    @property
    def sealed(self) -> bool: ...

    @property
    def version(self) -> tuple[int, int]: ...

    @property
    def nbytes(self) -> int: ...

    @property
    def meta(self) -> bytes: ...

    @property
    def parts(self) -> list: ...

    @property
    def single(self, /) -> tuple[bytes, int] | None:
        """(meta, nbytes) of an object of one writer, else None."""

    @property
    def pin(self) -> str: ...

    @property
    def left_ms(self) -> int | None: ...

    @property
    def label(self) -> str: ...

    @property
    def replicas(self) -> int: ...

    @property
    def tiers(self) -> list: ...

    @property
    def local(self) -> bool: ...

def set_result_types(version: type, put_result: type) -> None:
    """pool.py's named tuples."""

class PutOptions:
    """What a put does, whatever it puts."""

    def __init__(self, *, sealed: bool = False, if_exists: str = 'replace', replicas: int = 1, replicas_lenient: bool = False, label: str = '', part: int = 0, parts: int = 1, group: str = '', checksum: bool = False, ttl_ms: int = 0, pin: str = 'none', parent: str = '') -> None: ...

class Client:
    @staticmethod
    def connect(*, address: str, token: str, name: str, host_id: str, engine: object | None, view_ttl_s: float, transports: Sequence[str] = ['local', 'shm', 'tcp'], nics: Sequence[str] = [], rdma: str = '', monitor: bool = False, deadline_ns: int) -> Client: ...

    def capsule(self) -> CapsuleType: ...

    def engine_capsule(self) -> CapsuleType: ...

    def put(self, key: str, meta: bytes, data: Sequence[object], options: PutOptions, deadline_ns: int) -> Any: ...

    def put_many(self, keys: list, metas: list, datas: list, options: PutOptions, deadline_ns: int) -> list:
        """
        One PutResult or exception for each key. A data is bytes-like, (address, nbytes), or a list of these.
        """

    def put_plain(self, keys: list, values: PlainBatch, options: PutOptions, deadline_ns: int) -> list:
        """One PutResult or exception for each key."""

    def read_many(self, objects: list, outs: list, deadline_ns: int) -> list:
        """
        All of each object into (address, nbytes) or a buffer. None or an exception for each.
        """

    def get_plain(self, keys: list, values: PlainBatch, deadline_ns: int) -> list:
        """
        Looks up, and reads into those values whose form it is: None, Object or an exception each.
        """

    def map_many(self, objects: list, read_only: bool, deadline_ns: int) -> list:
        """One Mapped or exception for each object."""

    def remove_many(self, keys: list, only: object | None, deadline_ns: int) -> list:
        """Whether each was there, or an exception."""

    def locate(self, key: str, at_least: tuple[int, int] | None, label: str, deadline_ns: int) -> Object: ...

    def locate_many(self, keys: Sequence[str], deadline_ns: int) -> list:
        """One Object or exception for each key."""

    def peek_many(self, keys: Sequence[str], deadline_ns: int) -> list:
        """
        As locate_many, and no use: what is on an SSD stays there, and its bytes cannot be read.
        """

    def wait(self, key: str, at_least: tuple[int, int] | None, label: str, deadline_ns: int) -> Object: ...

    def read(self, object: Object, offset: int, out: Sequence, deadline_ns: int) -> None: ...

    def read_ranges(self, object: Object, ranges: bytes, address: int, nbytes: int, deadline_ns: int) -> None:
        """
        (offset in the object, offset in the memory, nbytes) of each, as int64 in native order.
        """

    def map(self, object: Object, read_only: bool, deadline_ns: int) -> Mapped: ...

    def exists(self, keys: Sequence[str], deadline_ns: int) -> list: ...

    def remove(self, key: str, deadline_ns: int, only: tuple[int, int] | None = None) -> bool: ...

    def keys(self, prefix: str, deadline_ns: int) -> list[str]: ...

    def pin_many(self, keys: Sequence[str], pin: str, deadline_ns: int) -> list: ...

    def set_quota(self, prefix: str, limit_bytes: int, deadline_ns: int) -> list:
        """All quotas there are then."""

    def stat(self, deadline_ns: int, here: bool = False) -> dict: ...

    def drained(self, deadline_ns: int) -> dict:
        """
        Wait until the node at our address, which drain() was told to leave, has moved its objects; what has become of them.
        """

    def drain(self, deadline_ns: int) -> None: ...

    @property
    def alive(self) -> bool: ...

    def close(self) -> None: ...

MAX_PIN_MS: int = 3600000

def match_prefix(client: Client, keys: Sequence[str], pin_ms: int, deadline_ns: int) -> int: ...

def refresh_keys(client: Client, keys: Sequence[str], unpin: bool, deadline_ns: int) -> None: ...

def refresh_objects(client: Client, objects: Sequence, unpin: bool, deadline_ns: int) -> None: ...

def key_events(client: Client, stream: int, after: int, prefix: str, wait_ms: int, deadline_ns: int) -> tuple:
    """(stream, last, anew, [(kind, hash, key, sealed, version, medium)])"""

def key_hashes(client: Client, keys: Sequence[str]) -> list: ...

def key_media(client: Client, keys: Sequence[str], deadline_ns: int) -> list:
    """"cpu", "disk" or None: not there."""

class PagedMemory:
    """
    A paged cache: of each layer its pieces of a page (address of page 0's, bytes from a page to the next, bytes). The memory has to outlive it.
    """

    def __init__(self, layers: Sequence[Sequence[tuple[int, int, int]]], num_pages: int) -> None: ...

    @property
    def object_nbytes(self) -> int: ...

def put_pages(client: Client, keys: Sequence[str], metas: Sequence[bytes], memory: PagedMemory, pages: Sequence[int], deadline_ns: int) -> list:
    """For each key whether it was stored, or an exception."""

def read_pages(client: Client, objects: Sequence, memory: PagedMemory, pages: Sequence[int], deadline_ns: int) -> int:
    """How many were read before the first that was gone."""

def read_page_layers(client: Client, objects: Sequence, memory: PagedMemory, first: int, count: int, pages: Sequence[int], deadline_ns: int) -> list:
    """For each page None, or an exception."""

def topology(sysfs: str, nics: Sequence[str]) -> dict: ...
