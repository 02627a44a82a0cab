"""A paged cache: its tensors, and the layout read off their strides."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from torch_mooncake import ops
from torch_mooncake.errors import InvalidArgument, Unsupported
from torch_mooncake.kv import frameworks
from torch_mooncake.kv.groups import AXES, Group, Layer, Plane
from torch_mooncake.kv.layout import PagedKVLayout
from torch_mooncake.kv.runs import Boundary
from torch_mooncake.kv.storages import Storages

if TYPE_CHECKING:
    from torch_mooncake.transfer import Engine, Region


@dataclass
class PlaneTensor:
    """A tensor over all pages of one plane of a layer. `axes` names its dimensions: P (page) and letters of "KNHD"."""

    tensor: torch.Tensor
    axes: str = "PKNHD"
    role: str = "kv"


@dataclass
class GroupTensors:
    """A group as tensors: `layers` maps the model's number of a layer to its planes. See `Group` for the rest;
    `page_size`, `kv_heads`, `head_dim` and `dtype` are read off the first plane when they are None."""

    layers: Mapping[int, Sequence[PlaneTensor]]
    name: str = "kv"
    kind: str = "attention"
    page_size: int | None = None
    kv_heads: int | None = None
    head_dim: int | None = None
    dtype: torch.dtype | None = None
    window: int | None = None
    replicated: bool = False
    num_pages: int | None = field(default=None)


class PagedKV:
    """The tensors of a paged cache together with their layout. Holds references to the tensors, nothing else.

    ``PagedKV(layers, axes="PKNHD")`` is a cache of one tensor a layer, all of one shape and dtype; `axes` names the
    dimensions: P page, K key and value, N token within the page, H KV head, D element, in any order. Without K (and
    H) it is an MLA cache. Strides may be any that do not make elements overlap. What serving frameworks have:
    `from_vllm`, `from_sglang`, `from_trtllm_v1`, `from_trtllm_v2`, `from_lmdeploy`; anything else: `from_groups`.

    Not synchronised: who may touch which page is decided by a `PageAllocator`.
    """

    layers: list[torch.Tensor]  # as they were given
    layout: PagedKVLayout
    storages: list[torch.Tensor]  # flat uint8 views over whole storages: what is registered with an engine

    def __init__(self, layers: Sequence[torch.Tensor], *, axes: str = "PKNHD") -> None:
        if not layers:
            raise InvalidArgument("a paged KV cache needs at least one layer")
        if sorted(axes) not in (sorted("PKNHD"), sorted("PNHD"), sorted("PND")):
            raise InvalidArgument(
                f"axes must name P, K, N, H and D once each (MLA: without K, or K and H), not {axes!r}"
            )
        first = layers[0]
        for index, layer in enumerate(layers):
            if layer.dim() != len(axes):
                raise InvalidArgument(f"layer {index} has {layer.dim()} dimensions, axes {axes!r} name {len(axes)}")
            if layer.shape != first.shape or layer.dtype != first.dtype or layer.device != first.device:
                raise InvalidArgument(
                    f"layer {index} is {tuple(layer.shape)} {layer.dtype} on {layer.device}, "
                    f"layer 0 is {tuple(first.shape)} {first.dtype} on {first.device}"
                )
        kind = "attention" if "K" in axes else "mla"
        planes = {index: [PlaneTensor(layer, axes)] for index, layer in enumerate(layers)}
        self._build([GroupTensors(planes, kind=kind, replicated=kind == "mla")])

    @classmethod
    def from_groups(
        cls, groups: Sequence[GroupTensors], *, boundaries: Mapping[int, tuple[int, int]] | None = None
    ) -> PagedKV:
        """A cache of several groups, each with its own page ids (full attention, sliding window, Mamba states, …).

        `boundaries`: by the address of a tensor's storage, `(nbytes, address of one)`: transfers do not cross the
        addresses that many bytes apart.
        """
        kv = cls.__new__(cls)
        kv._build(groups, boundaries)
        return kv

    @classmethod
    def from_vllm(cls, caches: Mapping[str, torch.Tensor], **options: Any) -> PagedKV:
        """vLLM's `register_kv_caches` argument: see `frameworks.vllm_groups`."""
        return cls.from_groups(frameworks.vllm_groups(caches, **options))

    @classmethod
    def from_sglang(cls, buffers: Any, **options: Any) -> PagedKV:
        """SGLang's host or device pools: see `frameworks.sglang_groups`."""
        return cls.from_groups(frameworks.sglang_groups(buffers, **options))

    @classmethod
    def from_trtllm_v1(cls, pool: torch.Tensor, **options: Any) -> PagedKV:
        """TensorRT-LLM's single pool: see `frameworks.trtllm_v1_groups`."""
        return cls.from_groups(frameworks.trtllm_v1_groups(pool, **options))

    @classmethod
    def from_trtllm_v2(cls, layout: Any, **options: Any) -> PagedKV:
        """TensorRT-LLM's `KvCacheLayout`: see `trtllm_v2.trtllm_v2_groups`."""
        from torch_mooncake.kv.trtllm_v2 import trtllm_v2_groups

        groups, boundaries = trtllm_v2_groups(layout, **options)
        return cls.from_groups(groups, boundaries=boundaries)

    @classmethod
    def from_lmdeploy(cls, pool: torch.Tensor, **options: Any) -> PagedKV:
        """LMDeploy's packed pool: see `frameworks.lmdeploy_groups`."""
        return cls.from_groups(frameworks.lmdeploy_groups(pool, **options))

    def _build(self, groups: Sequence[GroupTensors], boundaries: Mapping[int, tuple[int, int]] | None = None) -> None:
        tensors = [plane.tensor for group in groups for planes in group.layers.values() for plane in planes]
        if len({tensor.device for tensor in tensors}) > 1:
            raise InvalidArgument(f"the cache is on several devices: {sorted({str(t.device) for t in tensors})}")
        found = Storages(tensors)
        self._groups = list(groups)
        self.layers = tensors
        self.storages = found.views
        self.layout = PagedKVLayout(
            tuple(_group(group, found) for group in groups), found.nbytes, _boundaries(found, boundaries or {})
        )

    @property
    def device(self) -> torch.device:
        return self.storages[0].device

    def pools(self, group: int = 0) -> list[list[torch.Tensor]]:
        """Views of the group's planes, a list for each layer in the layout's order: [num_pages, *shape of the plane],
        dimensions as the plane's `axes` ("KNHD" order), with whatever strides they have."""
        chosen = self.layout.group(group)
        return [[self._view(plane, chosen.num_pages) for plane in planes] for _, planes in chosen.layers]

    def _view(self, plane: Plane, num_pages: int) -> torch.Tensor:
        dtype = getattr(torch, plane.dtype)
        steps = [plane.offset, plane.page_stride, *plane.strides]
        if any(step % plane.item_nbytes for step in steps):
            raise Unsupported(f"plane {plane.role!r}: offset or strides are no multiples of {plane.item_nbytes} bytes")
        offset, *strides = (step // plane.item_nbytes for step in steps)
        storage = self.storages[plane.storage].untyped_storage()
        first = self.storages[plane.storage].storage_offset()
        if first % plane.item_nbytes:
            raise Unsupported(f"plane {plane.role!r}: its storage does not begin at a multiple of {plane.item_nbytes}")
        view = torch.empty(0, dtype=dtype, device=self.device)
        return view.set_(storage, offset + first // plane.item_nbytes, (num_pages, *plane.shape), tuple(strides))

    @property
    def page_shape(self) -> tuple[int, ...]:
        """Shape of one page over all layers, (num_layers, ...), when each layer is one tensor whose first axis is the
        page; Unsupported otherwise."""
        self._page_first()
        return (len(self.layers), *self.layers[0].shape[1:])

    def gather(self, pages: Sequence[int] | torch.Tensor) -> torch.Tensor:
        """Copies of whole pages, all layers: [n, num_layers, ...page]."""
        ids = self.layout.page_ids(pages)
        out = torch.empty((len(ids), *self.page_shape), dtype=self.layers[0].dtype, device=self.device)
        for index in range(len(ids)):
            ops.gather_pages_layers(self.layers, ids[index : index + 1], out[index].unsqueeze(1))
        return out

    def scatter(self, pages: Sequence[int] | torch.Tensor, values: Sequence[torch.Tensor]) -> None:
        """Writes whole pages, one value [num_layers, ...page] an id."""
        ids = self.layout.page_ids(pages)
        self._page_first()
        for index, value in enumerate(values):
            ops.scatter_pages_layers(self.layers, ids[index : index + 1], value.unsqueeze(1))

    def _page_first(self) -> None:
        planes = [planes for group in self._groups for planes in group.layers.values()]
        if len(self._groups) > 1 or any(len(of) > 1 or not of[0].axes.startswith("P") for of in planes):
            raise Unsupported("the cache is not one tensor a layer with the page axis first: use pools()")

    def register(self, engine: Engine, *, writable: bool, label: str) -> list[Region]:
        """One region a storage, in the order of the planes' `storage`."""
        return [engine.register(storage, writable=writable, label=label) for storage in self.storages]


def _group(group: GroupTensors, storages: Storages) -> Group:
    layers: list[Layer] = []
    pages = set()
    for layer, tensors in group.layers.items():
        pages |= {tensor.tensor.shape[tensor.axes.index("P")] for tensor in tensors if "P" in tensor.axes}
        layers.append((layer, tuple(_plane(tensor, storages, f"layer {layer}") for tensor in tensors)))
    if not layers or not layers[0][1]:
        raise InvalidArgument(f"group {group.name!r} has no layer, or a layer without planes")
    if len(pages) > 1 and group.num_pages is None:
        raise InvalidArgument(f"group {group.name!r}: planes have different numbers of pages: {sorted(pages)}")
    first = layers[0][1][0]
    dtype = first.dtype if group.dtype is None else _name(group.dtype)
    return Group(
        name=group.name,
        kind=group.kind,
        layers=tuple(layers),
        page_size=first.size("N") * ("N" in first.axes) if group.page_size is None else group.page_size,
        kv_heads=first.size("H") if group.kv_heads is None else group.kv_heads,
        head_dim=first.size("D") if group.head_dim is None else group.head_dim,
        dtype=dtype,
        num_pages=pages.pop() if group.num_pages is None else group.num_pages,
        window=group.window,
        replicated=group.replicated,
    )


def _plane(given: PlaneTensor, storages: Storages, where: str) -> Plane:
    tensor, axes = given.tensor, given.axes
    if len(axes) != tensor.dim() or len(set(axes)) != len(axes) or not {"P", "D"} <= set(axes) <= {"P", *AXES}:
        raise InvalidArgument(f"{where}: axes {axes!r} do not name the {tensor.dim()} dimensions of {given.role!r}")
    item = tensor.element_size()
    letters = "".join(letter for letter in AXES if letter in axes)
    size = dict(zip(axes, map(int, tensor.shape), strict=True))
    stride = {letter: int(step) * item for letter, step in zip(axes, tensor.stride(), strict=True)}
    storage, start = storages.place(tensor)
    return Plane(
        role=given.role,
        storage=storage,
        offset=start,
        page_stride=stride["P"],
        axes=letters,
        shape=tuple(size[letter] for letter in letters),
        strides=tuple(stride[letter] for letter in letters),
        dtype=_name(tensor.dtype),
    )


def _boundaries(storages: Storages, given: Mapping[int, tuple[int, int]]) -> tuple[Boundary, ...]:
    if not given:
        return ()
    out = []
    for address in storages.addresses:
        every, at = given.get(address, (0, 0))
        out.append((every, (at - address) % every if every else 0))
    return tuple(out)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
