"""What a paged KV cache looks like in memory, read off its real tensors.

A cache is one tensor a layer. `axes` names its dimensions, one letter each:

    P page   K key and value (size 2)   N token within the page   H KV head   D element of a head

The first cut takes caches whose page axis comes first and whose pages are contiguous (the bytes of one page of one
layer are one run); layers may share a storage, in any order and with any stride between pages. Other orders raise
Unsupported and are named.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch

from torch_mooncake import ops
from torch_mooncake.errors import InvalidArgument, OutOfBounds, Unsupported

if TYPE_CHECKING:
    from torch_mooncake.transfer import Engine, Region

_CONTENT_FIELDS = ("num_layers", "page_size", "kv_heads", "head_dim", "dtype", "page_axes", "page_nbytes")


@dataclass(frozen=True)
class PagedKVLayout:
    """Sizes, order and place of the pages. Immutable; travels as `to_dict()`.

    Two caches can exchange pages when their *content* fields agree (`num_layers` … `page_nbytes`); where the pages
    lie (storages, offsets, strides, how many) is each side's own business and not part of the fingerprint.
    """

    num_layers: int
    page_size: int  # tokens
    kv_heads: int
    head_dim: int
    dtype: str  # "float32"
    page_axes: str  # order inside a page, "KNHD"
    page_nbytes: int  # of one page of one layer
    num_pages: int
    storage_index: tuple[int, ...]  # per layer
    layer_offsets: tuple[int, ...]  # bytes from the storage's start to page 0, per layer
    page_strides: tuple[int, ...]  # bytes from a page to the next, per layer

    @classmethod
    def from_tensors(cls, layers: Sequence[torch.Tensor], *, axes: str = "PKNHD") -> PagedKVLayout:
        """Layout of `layers`, one tensor a layer, all of one shape and dtype, dimensions named by `axes`."""
        if not layers:
            raise InvalidArgument("a paged KV cache needs at least one layer")
        if sorted(axes) != sorted("PKNHD"):
            raise InvalidArgument(f"axes must name P, K, N, H and D once each, not {axes!r}")
        if axes[0] != "P":
            raise Unsupported(f"axes {axes!r}: caches whose page axis is not the first are not supported yet")
        first = layers[0]
        if first.dim() != 5:
            raise InvalidArgument(f"layer 0 has {first.dim()} dimensions, axes {axes!r} name 5")
        size = dict(zip(axes, first.shape, strict=True))
        if size["K"] != 2:
            raise InvalidArgument(f"axis K (key, value) has size {size['K']}, not 2")
        bases: list[int] = []
        storage_index: list[int] = []
        offsets: list[int] = []
        strides: list[int] = []
        for index, layer in enumerate(layers):
            if layer.shape != first.shape or layer.dtype != first.dtype or layer.device != first.device:
                raise InvalidArgument(
                    f"layer {index} is {tuple(layer.shape)} {layer.dtype} on {layer.device}, "
                    f"layer 0 is {tuple(first.shape)} {first.dtype} on {first.device}"
                )
            if layer.shape[0] and not layer[0].is_contiguous():
                raise Unsupported(f"pages of layer {index} are not contiguous: strides {layer.stride()}")
            base = layer.untyped_storage().data_ptr()
            if base not in bases:
                bases.append(base)
            storage_index.append(bases.index(base))
            offsets.append(int(layer.storage_offset()) * layer.element_size())
            strides.append(int(layer.stride(0)) * layer.element_size())
        return cls(
            num_layers=len(layers),
            page_size=size["N"],
            kv_heads=size["H"],
            head_dim=size["D"],
            dtype=str(first.dtype).removeprefix("torch."),
            page_axes=axes[1:],
            page_nbytes=first.shape[1:].numel() * first.element_size(),
            num_pages=size["P"],
            storage_index=tuple(storage_index),
            layer_offsets=tuple(offsets),
            page_strides=tuple(strides),
        )

    def fingerprint(self) -> str:
        """16 hex digits over the content fields: equal exactly when pages can be exchanged as they are."""
        content = json.dumps({name: getattr(self, name) for name in _CONTENT_FIELDS}, sort_keys=True)
        return hashlib.blake2b(content.encode(), digest_size=8, person=b"tm-kv-layout-v1").hexdigest()

    def differences(self, other: PagedKVLayout) -> list[str]:
        """The content fields that differ, as "kv_heads 3 here, 4 there"; empty when pages can be exchanged."""
        return [
            f"{name} {getattr(self, name)} here, {getattr(other, name)} there"
            for name in _CONTENT_FIELDS
            if getattr(self, name) != getattr(other, name)
        ]

    def offsets(self, layer: int, page_ids: torch.Tensor) -> torch.Tensor:
        """Byte offsets of `page_ids` (int64 [n]) of one layer from the start of that layer's storage, int64 [n]."""
        return page_ids * self.page_strides[layer] + self.layer_offsets[layer]

    def page_ids(self, pages: Sequence[int] | torch.Tensor) -> torch.Tensor:
        """`pages` as int64 [n], checked: OutOfBounds names the first id that is not a page of this cache."""
        ids = torch.as_tensor(pages, dtype=torch.int64)
        wrong = ids[(ids < 0) | (ids >= self.num_pages)]
        if len(wrong):
            raise OutOfBounds(f"page {int(wrong[0])} is not in 0..{self.num_pages - 1}")
        return ids

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> PagedKVLayout:
        values: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()
        }
        return cls(**values)


class PagedKV:
    """The tensors of a paged cache together with their layout. Holds references to the tensors, nothing else.

    Not synchronised: who may touch which page is decided by a `PageAllocator`.
    """

    def __init__(self, layers: Sequence[torch.Tensor], *, axes: str = "PKNHD") -> None:
        self.layers = list(layers)
        self.layout = PagedKVLayout.from_tensors(self.layers, axes=axes)
        storages: dict[int, torch.UntypedStorage] = {}
        for index, layer in zip(self.layout.storage_index, self.layers, strict=True):
            storages.setdefault(index, layer.untyped_storage())
        # Flat uint8 views over whole storages: what is registered with an engine.
        self.storages = [torch.empty(0, dtype=torch.uint8).set_(storage) for storage in storages.values()]

    @property
    def page_shape(self) -> tuple[int, ...]:
        """Shape of one page over all layers, (num_layers, ...): what is stored in the pool under one key."""
        return (len(self.layers), *self.layers[0].shape[1:])

    def gather(self, pages: Sequence[int] | torch.Tensor) -> torch.Tensor:
        """Copies of whole pages, all layers: [n, num_layers, ...page]."""
        ids = self.layout.page_ids(pages)
        out = torch.empty((len(ids), *self.page_shape), dtype=self.layers[0].dtype)
        for index in range(len(ids)):
            ops.gather_pages_layers(self.layers, ids[index : index + 1], out[index].unsqueeze(1))
        return out

    def scatter(self, pages: Sequence[int] | torch.Tensor, values: Sequence[torch.Tensor]) -> None:
        """Writes whole pages, one value [num_layers, ...page] an id."""
        ids = self.layout.page_ids(pages)
        for index, value in enumerate(values):
            ops.scatter_pages_layers(self.layers, ids[index : index + 1], value.unsqueeze(1))

    def register(self, engine: Engine, *, writable: bool, label: str) -> list[Region]:
        """One region a storage, in the order of `layout.storage_index`."""
        return [engine.register(storage, writable=writable, label=label) for storage in self.storages]
