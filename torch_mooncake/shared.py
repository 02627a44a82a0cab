"""Tensors in shared memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch_mooncake import _core

if TYPE_CHECKING:
    import torch


def empty(shape: int | Sequence[int], dtype: torch.dtype | None = None, *, shared: bool = True) -> torch.Tensor:
    """An uninitialised contiguous CPU tensor (``dtype`` defaults to torch's default dtype).

    ``shared=True`` puts it in a shared segment: registered with an engine, same-host peers map it instead of asking
    for copies. The memory has no name and is freed with the tensor's storage. PoolFull if the host has no memory.
    """
    import torch

    dtype = torch.get_default_dtype() if dtype is None else dtype
    size = (shape,) if isinstance(shape, int) else tuple(shape)
    if not shared or math.prod(size) == 0:
        return torch.empty(size, dtype=dtype)
    nbytes = math.prod(size) * dtype.itemsize
    return torch.frombuffer(_core.SharedBuffer(nbytes), dtype=dtype, count=math.prod(size)).view(size)
