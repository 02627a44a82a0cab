"""One rank's weights: rank 0 takes them from the pool, whole, and scatters to every rank its part."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from model import empty_model
from tensor_parallel import Group, scatter_weights, shard_config, sum_partial_results

import torch_mooncake as tm
from torch_mooncake import weights

WEIGHTS = "demo"  # what the trainer publishes them as
CONFIG_KEY = "demo/config"  # and where in the pool it puts the model's configuration


def namespace_of(serial: int) -> str:
    """Names the model and its weights in the pool: pages of others are other pages."""
    return f"{WEIGHTS}#{serial}"


class ShardWeights:
    """`model` is this rank's narrow model; the first `update` fills it. All ranks call `update` together."""

    def __init__(self, group: Group, config: Any) -> None:
        self.group = group
        self.model = empty_model(shard_config(config, group.size))
        sum_partial_results(self.model, group)
        self.latest: dict = {}
        self._full = empty_model(config) if group.rank == 0 and group.size > 1 else self.model
        self._subscription = weights.subscribe(self._full, WEIGHTS) if group.rank == 0 else None

    @property
    def namespace(self) -> str:
        return namespace_of(self.latest["serial"])

    def update(self, timeout_s: float) -> dict:
        """Waits for a version newer than the one held. Returns its serial, step, nbytes and seconds, or {"error": …}
        with the weights as they were; the same on all ranks."""
        outcome = self.group.broadcast(self._take(timeout_s) if self._subscription is not None else None)
        if "error" not in outcome:
            if self.group.size > 1:
                scatter_weights(self._full.state_dict() if self.group.rank == 0 else None, self.model, self.group)
            self.latest = outcome
        return outcome

    def _take(self, timeout_s: float) -> dict:
        assert self._subscription is not None
        try:
            return asdict(self._subscription.update(timeout=timeout_s))
        except tm.Error as error:
            return {"error": {"type": type(error).__name__, "message": str(error)}}
