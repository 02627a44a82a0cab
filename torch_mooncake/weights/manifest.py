"""What a published version consists of, and how two sets of weights are compared.

weights/<name>           the head, a small named object: serial, step, tensors, aliases. Replacing it is the flip.
weights/<name>/<serial>  the tensors of that version, one object
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from torch_mooncake.errors import InvalidArgument


@dataclass(frozen=True)
class TensorSpec:
    shape: tuple[int, ...]
    dtype: str

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorSpec:
        return cls(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


@dataclass(frozen=True)
class Head:
    serial: int
    step: int | None
    data_key: str
    specs: dict[str, TensorSpec]  # every name, aliases too
    aliases: dict[str, str]  # tied name -> the name its bytes travel under

    def to_value(self) -> dict[str, Any]:
        specs = {name: [list(spec.shape), spec.dtype] for name, spec in self.specs.items()}
        return {
            "serial": self.serial,
            "step": self.step,
            "data_key": self.data_key,
            "specs": specs,
            "aliases": dict(self.aliases),
        }

    @classmethod
    def from_value(cls, value: dict[str, Any]) -> Head:
        specs = {name: TensorSpec(tuple(shape), dtype) for name, (shape, dtype) in value["specs"].items()}
        return cls(value["serial"], value["step"], value["data_key"], specs, value["aliases"])


def head_key(name: str) -> str:
    return f"weights/{name}"


def data_key(name: str, serial: int) -> str:
    return f"weights/{name}/{serial}"


def tensors_of(model_or_state_dict: torch.nn.Module | Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors by name; TypeError for anything that is neither a module nor a flat mapping of tensors."""
    if isinstance(model_or_state_dict, torch.nn.Module):
        model_or_state_dict = model_or_state_dict.state_dict()
    if not isinstance(model_or_state_dict, Mapping):
        raise TypeError(f"weights are a module or a state dict, not {type(model_or_state_dict).__name__}")
    for name, tensor in model_or_state_dict.items():
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name!r} is a {type(tensor).__name__}, not a tensor")
    return {name: tensor.detach() for name, tensor in model_or_state_dict.items()}


def find_aliases(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Tied tensors: each name whose bytes are exactly those of an earlier name, and that name."""
    seen: dict[tuple[Any, ...], str] = {}
    aliases: dict[str, str] = {}
    for name, tensor in tensors.items():
        if tensor.numel() == 0:
            continue
        place = (tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())
        if place in seen:
            aliases[name] = seen[place]
        else:
            seen[place] = name
    return aliases


def differences(published: Mapping[str, TensorSpec], wanted: Mapping[str, TensorSpec]) -> list[str]:
    """Names, shapes and dtypes that differ, in the order of their names."""
    found = []
    for name in sorted(published.keys() | wanted.keys()):
        ours, theirs = wanted.get(name), published.get(name)
        if ours is None:
            found.append(f"{name}: published as {theirs}, not in the model")
        elif theirs is None:
            found.append(f"{name}: {ours} in the model, not published")
        elif ours != theirs:
            found.append(f"{name}: published as {theirs}, {ours} in the model")
    return found


def checked_name(name: str) -> str:
    if not name or "/" in name:
        raise InvalidArgument(f"a weights name is not empty and has no '/': {name!r}")
    return name
