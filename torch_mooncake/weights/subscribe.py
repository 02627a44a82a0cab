"""The worker's side of weights."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

import torch_mooncake
from torch_mooncake.errors import DeadlineExceeded, KeyNotFound, LayoutMismatch
from torch_mooncake.weights.manifest import Head, TensorSpec, checked_name, differences, head_key, tensors_of

_SHOWN_DIFFERENCES = 10


@dataclass(frozen=True)
class Update:
    serial: int
    step: int | None
    nbytes: int  # copied into the model: tied tensors count once
    seconds: float  # from the version being found to the last byte copied
    delta_nbytes: int = 0  # of what had changed, that came in the place of other bytes (``Subscriber``)


class Subscription:
    """Follows the versions of one name. Belongs to one thread at a time, as the model's tensors do."""

    def __init__(
        self, model_or_state_dict: torch.nn.Module | Mapping[str, torch.Tensor], name: str, pool: Any = None
    ) -> None:
        self.name = checked_name(name)
        self.serial = 0  # of the version the model holds; 0: none yet
        self.step: int | None = None
        self._target = model_or_state_dict
        self._pool = torch_mooncake if pool is None else pool

    def update(self, *, timeout: float = 30) -> Update:
        """Waits for a version newer than the one applied last and copies it into the model's own tensors.

        The version is looked up, mapped and compared before the first byte is copied, so an update that fails with
        LayoutMismatch (the first ten differences), DeadlineExceeded or a pool error leaves the model as it was.
        DeadlineExceeded: no newer version came within `timeout` seconds.
        """
        deadline = time.monotonic() + timeout
        while True:
            head = self._newer(deadline, timeout)
            started = time.perf_counter()
            targets = tensors_of(self._target)
            wanted = {name: TensorSpec.of(tensor) for name, tensor in targets.items()}
            if found := differences(head.specs, wanted):
                more = f"\n  and {len(found) - _SHOWN_DIFFERENCES} more" if len(found) > _SHOWN_DIFFERENCES else ""
                raise LayoutMismatch(
                    f"weights {self.name!r} (step {head.step}) do not fit the model:\n  "
                    + "\n  ".join(found[:_SHOWN_DIFFERENCES])
                    + more
                )
            try:
                left = max(0.001, deadline - time.monotonic())
                values = self._pool.get(head.data_key, readonly=True, timeout=left)
            except KeyNotFound:
                continue  # a newer version came in between, and this one is gone
            nbytes = _copy(targets, values, head.aliases)
            self.serial, self.step = head.serial, head.step
            return Update(head.serial, head.step, nbytes, time.perf_counter() - started)

    def _newer(self, deadline: float, timeout: float) -> Head:
        pause_s = 0.002
        while True:
            value = self._pool.get(head_key(self.name), default=None)
            if value is not None and value["serial"] != self.serial:
                return Head.from_value(value)
            left = deadline - time.monotonic()
            if left <= 0:
                have = f"newer than serial {self.serial}" if self.serial else "at all"
                raise DeadlineExceeded(f"no version of weights {self.name!r} {have} came in {timeout} s")
            time.sleep(min(pause_s, left))
            pause_s = min(pause_s * 2, 0.05)


def subscribe(
    model_or_state_dict: torch.nn.Module | Mapping[str, torch.Tensor], name: str, *, pool: Any = None
) -> Subscription:
    """Follows `name` with this model (or flat state dict), whose tensors `update()` writes in place."""
    return Subscription(model_or_state_dict, name, pool)


@torch.no_grad()
def _copy(targets: Mapping[str, torch.Tensor], values: Mapping[str, torch.Tensor], aliases: Mapping[str, str]) -> int:
    done: set[tuple[int, str]] = set()
    nbytes = 0
    for name, target in targets.items():
        source = aliases.get(name, name)
        place = (target.data_ptr(), source)
        if target.numel() == 0 or place in done:  # tied here as it was there
            continue
        target.copy_(values[source])
        done.add(place)
        nbytes += target.nbytes
    return nbytes
