"""The trainer's side of weights."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

import torch_mooncake
from torch_mooncake.weights.manifest import (
    Head,
    TensorSpec,
    checked_name,
    data_key,
    find_aliases,
    head_key,
    tensors_of,
)


@dataclass(frozen=True)
class Published:
    serial: int  # 1, 2, 3, … under this name
    step: int | None
    nbytes: int  # that travelled: tied tensors count once
    seconds: float


def publish(
    model_or_state_dict: torch.nn.Module | Mapping[str, torch.Tensor],
    name: str,
    *,
    step: int | None = None,
    timeout: float = 120,
    pool: Any = None,
) -> Published:
    """Makes these weights the current version of `name` in the pool.

    The tensors are stored first, as one object; the version flips when all of it is there, so a subscriber sees the
    old version whole or the new one whole. The version before is then deleted (a subscriber that is reading it keeps
    what it has mapped). The pool must hold two versions at that moment. One publisher a name: two that run at the same
    time leave one of the versions, whole.

    On error the old version stays current. Raises the errors of `put`; TypeError for what is not a tensor.
    """
    pool = torch_mooncake if pool is None else pool
    started = time.perf_counter()
    tensors = tensors_of(model_or_state_dict)
    aliases = find_aliases(tensors)
    before = pool.get(head_key(checked_name(name)), default=None, timeout=timeout)
    serial = before["serial"] + 1 if before else 1
    head = Head(
        serial=serial,
        step=step,
        data_key=data_key(name, serial),
        specs={key: TensorSpec.of(tensor) for key, tensor in tensors.items()},
        aliases=aliases,
    )
    own = {key: tensor for key, tensor in tensors.items() if key not in aliases}
    pool.put(head.data_key, own, timeout=timeout)
    pool.put(head_key(name), head.to_value(), timeout=timeout)
    if before:
        pool.delete(before["data_key"])
    nbytes = sum(tensor.nbytes for tensor in own.values())
    return Published(serial, step, nbytes, time.perf_counter() - started)
