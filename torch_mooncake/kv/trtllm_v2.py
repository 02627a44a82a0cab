"""TensorRT-LLM's `KvCacheLayout` (V2 cache manager): regions of raw memory, by layer group."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable
from typing import Any

import torch

from torch_mooncake.errors import InvalidArgument, Unsupported
from torch_mooncake.kv.cache import GroupTensors, PlaneTensor
from torch_mooncake.kv.frameworks import block_shape

_ROLES = {"key": "k", "value": "v"}


def trtllm_v2_groups(
    layout: Any,
    *,
    kv_heads: int,
    order: str = "HND",
    device: torch.device | str = "cuda",
    mapping_origin: Callable[[int], int] | None = None,
) -> tuple[list[GroupTensors], dict[int, tuple[int, int]]]:
    """Groups of a layout with TensorRT-LLM's attributes (duck typed), and what its memory is mapped in.

    Slot `i` of a region is `size` bytes at `base + i * stride`: its `buffers` (layer_id, role) one after the other, of
    one size. Keys and values are blocks of `kv_heads` heads in `order` ("HND" or "NHD") and the layout's dtype; other
    roles are opaque bytes. A layer with keys only is MLA. `replicated_regions` of a group make a group of their own,
    "…replicated", of the same page ids. A page index of -1 addresses no page: leave it out.

    The memory stays the cache manager's, who has to outlive the result. `mapping_origin(address)` gives an address at
    or below it that a boundary of `gpu_pool_mapping_bytes` falls on (the start of its reservation); by default the
    lowest address of each pool.
    """
    regions = [region for group in layout.groups for region in _all_regions(group)]
    memory = _Memory(regions, torch.device(device))
    groups = []
    for group in layout.groups:
        name = f"group{group.layer_group_id}"
        layers = _planes(group.regions, memory, layout, kv_heads, order)
        if sorted(layers) != sorted(group.layer_ids):
            raise InvalidArgument(f"{name}: regions have layers {sorted(layers)}, the group {sorted(group.layer_ids)}")
        roles = {plane.role for planes in layers.values() for plane in planes}
        kind = "attention" if "v" in roles else "mla" if "kv" in roles else "state"
        common: dict[str, Any] = {"page_size": layout.tokens_per_block, "window": group.window_size}
        heads = kv_heads if kind == "attention" else 1
        groups.append(GroupTensors(layers, name, kind, kv_heads=heads, replicated=kind == "mla", **common))
        if replicated := tuple(getattr(group, "replicated_regions", ())):
            planes = _planes(replicated, memory, layout, kv_heads, order, opaque=True)
            groups.append(GroupTensors(planes, f"{name}.replicated", "state", replicated=True, **common))
    every = getattr(layout, "gpu_pool_mapping_bytes", None)
    origin = mapping_origin or (lambda address: address)
    return groups, {address: (every, origin(address)) for address in memory.starts} if every else {}


def _all_regions(group: Any) -> list[Any]:
    return [*group.regions, *getattr(group, "replicated_regions", ())]


def _planes(
    regions: Iterable[Any], memory: _Memory, layout: Any, kv_heads: int, order: str, opaque: bool = False
) -> dict[int, list[PlaneTensor]]:
    found: dict[int, list[tuple[str, torch.Tensor]]] = {}
    for region in regions:
        if any(getattr(buffer, "expansion", 1) != 1 for buffer in region.buffers):
            raise Unsupported("buffers with a page expansion other than 1: tokens per block differ between layers")
        if not region.buffers or region.size % len(region.buffers):
            raise InvalidArgument(f"a region of {region.size} bytes has {len(region.buffers)} buffers of one size")
        nbytes = region.size // len(region.buffers)
        for index, buffer in enumerate(region.buffers):
            tensor = memory.slots(region, index * nbytes, nbytes)
            found.setdefault(buffer.layer_id, []).append((str(buffer.role), tensor))
    layers = {}
    for layer, buffers in sorted(found.items()):
        latent = not any(role == "value" for role, _ in buffers)
        planes = []
        for role, tensor in buffers:
            if opaque or role not in _ROLES:
                planes.append(PlaneTensor(tensor, "PD", role))
                continue
            item = layout.dtype.itemsize
            if any(step % item for step in (tensor.storage_offset(), tensor.stride(0), tensor.shape[1])):
                raise InvalidArgument(f"layer {layer}: {role} is not at multiples of {item} bytes")
            typed = tensor.view(layout.dtype)
            shape = block_shape(typed.shape[1], 1 if latent else kv_heads, layout.tokens_per_block, order)
            planes.append(PlaneTensor(typed.unflatten(1, shape), f"P{order}", "kv" if latent else _ROLES[role]))
        planes.sort(key=lambda plane: plane.role not in ("k", "v", "kv"))  # what the group's numbers are read off
        layers[layer] = planes
    return layers


class _Memory:
    """The regions' memory as tensors, one for each stretch of memory that regions cover without a gap."""

    def __init__(self, regions: list[Any], device: torch.device) -> None:
        spans = sorted((r.base, r.base + r.stride * (r.num_slots - 1) + r.size) for r in regions if r.num_slots)
        merged: list[list[int]] = []
        for start, end in spans:
            if merged and start <= merged[-1][1]:
                merged[-1][1] = max(merged[-1][1], end)
            else:
                merged.append([start, end])
        self._flat = [(start, _raw(start, end - start, device)) for start, end in merged]
        self.starts = [start for start, _ in merged]

    def slots(self, region: Any, offset: int, nbytes: int) -> torch.Tensor:
        """uint8 [num_slots, nbytes] at `offset` of each slot."""
        if not region.num_slots:
            return torch.empty((0, nbytes), dtype=torch.uint8, device=self._flat[0][1].device if self._flat else None)
        start, flat = next((s, f) for s, f in self._flat if s <= region.base < s + f.numel())
        stride = region.stride if region.num_slots > 1 else max(region.stride, nbytes)
        return flat.as_strided((region.num_slots, nbytes), (stride, 1), region.base - start + offset)


def _raw(address: int, nbytes: int, device: torch.device) -> torch.Tensor:
    """A uint8 tensor over memory that somebody else owns."""
    if device.type == "cpu":
        return torch.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), dtype=torch.uint8)
    if device.type != "cuda":
        raise Unsupported(f"memory of device {device}")

    return torch.as_tensor(_DeviceArray(address, nbytes), device=device)


class _DeviceArray:
    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {"shape": (nbytes,), "typestr": "|u1", "data": (address, False), "version": 3}
