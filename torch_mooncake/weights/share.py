"""A model whose tensors lie in shared memory."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from torch_mooncake import sharding
from torch_mooncake.errors import Unsupported
from torch_mooncake.shared import empty

_ALIGN = 64


@torch.no_grad()
def share(model_or_state_dict: torch.nn.Module | Mapping[str, torch.Tensor]) -> None:
    """Moves the tensors into shared memory: one piece of it, in which each storage keeps its layout, so that tied and
    overlapping tensors stay so. Values stay, too. Processes of this host then map what a ``Publisher(in_place=True)``
    has, instead of asking the kernel for copies of it.

    Parameters and buffers stay the same objects; other tensors over the old memory (views that are kept elsewhere) do
    not follow. So call it when the model has been made, before an optimiser or anything else takes views of it.

    Unsupported: a tensor that is not in CPU memory, or a DTensor.
    """
    tensors = _own(model_or_state_dict)
    for name, tensor in tensors.items():
        if not tensor.is_cpu or tensor.layout is not torch.strided or sharding.is_dtensor(tensor):
            raise Unsupported(f"only plain CPU tensors can be moved into shared memory; {name} is none")
    places: dict[int, int] = {}
    at = 0
    for tensor in tensors.values():
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in places:
            places[storage.data_ptr()] = at
            at += -(-storage.nbytes() // _ALIGN) * _ALIGN
    memory = empty((max(at, 1),), torch.uint8)
    copied: set[int] = set()
    for tensor in {id(tensor): tensor for tensor in tensors.values()}.values():
        storage = tensor.untyped_storage()
        place, nbytes = places[storage.data_ptr()], storage.nbytes()
        if storage.data_ptr() not in copied:
            copied.add(storage.data_ptr())
            memory[place : place + nbytes] = torch.empty(0, dtype=torch.uint8).set_(storage)
        shape, stride, offset = tensor.shape, tensor.stride(), tensor.storage_offset()
        here = memory[place : place + nbytes // tensor.element_size() * tensor.element_size()].view(tensor.dtype)
        tensor.data = torch.as_strided(here, shape, stride, here.storage_offset() + offset)


def _own(model_or_state_dict: torch.nn.Module | Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    if isinstance(model_or_state_dict, torch.nn.Module):
        found: dict[str, torch.Tensor] = dict(model_or_state_dict.named_parameters(remove_duplicate=False))
        return found | dict(model_or_state_dict.named_buffers(remove_duplicate=False))
    return dict(model_or_state_dict)
