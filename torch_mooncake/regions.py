"""Registered memory of this process, parts and pages of it, and the ties between regions and torch's storages."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from torch_mooncake import _core
from torch_mooncake.errors import InvalidArgument, KeyNotFound, OutOfBounds

if TYPE_CHECKING:
    from torch_mooncake.transfer import RemoteRegion


class RegionSlice(NamedTuple):
    region: Region
    offset: int
    nbytes: int


class RemoteSlice(NamedTuple):
    region: RemoteRegion
    offset: int
    nbytes: int


def bounds(key: slice, nbytes: int) -> tuple[int, int]:
    """(offset, nbytes) of ``key``; OutOfBounds where a Python list would clamp."""
    if not isinstance(key, slice) or key.step not in (None, 1):
        raise InvalidArgument("a region is cut by region[start:stop], in bytes")
    start = 0 if key.start is None else int(key.start)
    stop = nbytes if key.stop is None else int(key.stop)
    if not 0 <= start <= stop <= nbytes:
        raise OutOfBounds(f"[{start}:{stop}] leaves a region of {nbytes} bytes")
    return start, stop - start


class Tie:
    """What a region made from a tensor knows of the tensor's storage: where it was, and (strongly or weakly) itself.

    torch can take memory from a living storage (``resize_``, as FSDP does), and give it to another tensor. A region
    whose storage has moved or died is *stale*: it is never found for an address again, and ops over it raise.
    """

    __slots__ = ("_address", "_nbytes", "_strong", "_weak")

    def __init__(self, storage: Any, weak: bool) -> None:
        self._strong = None if weak else storage
        self._weak = weakref.ref(storage) if weak else None
        self._address: int = storage.data_ptr()
        self._nbytes: int = storage.nbytes()

    def storage(self) -> Any:
        """The storage, if it still holds the region's memory, else None."""
        storage = self._strong if self._weak is None else self._weak()
        if storage is None or storage.data_ptr() != self._address or storage.nbytes() < self._nbytes:
            return None
        return storage

    @property
    def weak(self) -> bool:
        return self._weak is not None


class Region:
    """Memory or a file of this process that peers may reach. ``region[a:b]`` is a part of it. Made by
    ``Engine.register``."""

    __slots__ = ("__weakref__", "_core", "_engine", "_tie", "nbytes", "tensor")

    def __init__(self, core: _core.Region, tensor: Any, engine: Any, tie: Tie | None = None) -> None:
        self._core = core
        self._engine = engine
        self._tie = tie
        self.tensor = tensor  # what was registered; None if the region is weak
        self.nbytes: int = core.nbytes

    @property
    def kind(self) -> str:
        """ "host", "file" or "cuda"."""
        return self._core.kind

    def descriptor(self) -> bytes:
        """What a peer needs to open this region. It gives no access without a session."""
        return self._core.descriptor()

    def _hold(self) -> Any:
        """What an op has to keep alive besides the region. KeyNotFound if the memory is the tensor's no more."""
        if self._tie is None:
            return None
        storage = self._tie.storage()
        if storage is None:
            raise KeyNotFound(
                f"region {self._core.id} was made from a tensor whose storage has been freed, moved or shrunk since: "
                "its memory may be another tensor's; deregister it"
            )
        return storage if self._tie.weak else None

    def __getitem__(self, key: slice) -> RegionSlice:
        return RegionSlice(self, *bounds(key, self.nbytes))

    def __repr__(self) -> str:
        where = f"{self.tensor!r}" if self.kind == "file" else f"{self._core.address:#x}"
        return f"<Region {self._core.id} of {self.nbytes} bytes at {where}>"


@dataclass(frozen=True, slots=True)
class Pages:
    """Equally long pages of one base, or of several (one for each layer): page i is ``nbytes`` at ``ids[i] * stride``.

    ``bases``: a region or a part of one (or a registered tensor, on the local side), or a sequence of them; the same
    pages are meant in each. ``ids``: int32 or int64, a CPU tensor, a numpy array or a sequence; None for 0, 1, 2 …
    (``count`` of them, or as many as the other side has). ``stride``: bytes from page to page; None: ``nbytes``.

        engine.read(Pages(mine, 16384, ids=free_pages), Pages(theirs, 16384, ids=wanted_pages))
    """

    bases: Any
    nbytes: int
    ids: Any = None
    stride: int | None = None
    count: int | None = None

    def base_list(self) -> Sequence[Any]:
        return (
            self.bases if isinstance(self.bases, (list, tuple)) and not hasattr(self.bases, "_fields") else [self.bases]
        )

    def id_array(self) -> Any:
        """The ids as ``_core`` takes them: tensors and arrays as they are, sequences converted."""
        ids = self.ids
        if ids is None:
            return None
        if isinstance(ids, (list, tuple, range)):
            import array

            return array.array("q", ids)
        dtype = str(getattr(ids, "dtype", "")).removeprefix("torch.")
        if dtype not in ("int32", "int64") or getattr(ids, "ndim", 1) != 1:
            raise InvalidArgument(f"page ids are one-dimensional, int32 or int64, not {dtype or type(ids).__name__}")
        device = getattr(getattr(ids, "device", None), "type", "cpu")
        if device != "cpu":
            raise InvalidArgument(f"page ids lie in CPU memory, not on {device}")
        return ids


def span_of(memory: Any, writable: bool) -> tuple[int, int, Any]:
    """(address, nbytes, what keeps it) of a tensor or buffer."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(memory, torch.Tensor):
        if (
            memory.device.type not in ("cpu", "cuda")
            or memory.layout is not torch.strided
            or not memory.is_contiguous()
        ):
            raise InvalidArgument(
                f"only contiguous CPU and CUDA tensors can be registered, not {memory.layout} on {memory.device}"
                f"{'' if memory.layout is not torch.strided or memory.is_contiguous() else ' with strides'}"
            )
        return memory.data_ptr(), memory.numel() * memory.element_size(), memory
    try:
        pinned = _core.Pinned(memory, writable)
    except (TypeError, BufferError, ValueError) as error:
        raise InvalidArgument(f"cannot register a {type(memory).__name__}: {error}") from None
    return pinned.address, pinned.nbytes, pinned


def is_cuda(memory: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(memory, torch.Tensor) and memory.is_cuda


def storage_of(memory: Any) -> Any:
    """The storage of a tensor; None for anything else."""
    torch = sys.modules.get("torch")
    return memory.untyped_storage() if torch is not None and isinstance(memory, torch.Tensor) else None
