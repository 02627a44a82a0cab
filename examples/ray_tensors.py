"""Weights from a trainer actor to two rollout actors: from memory to memory, not through Ray's object store.

    pip install ray==2.60.0
    python examples/ray_tensors.py

Exit status 1 if a rollout actor got other bytes than the trainer had.
"""

from __future__ import annotations

import sys
from typing import Any

import ray
import torch

from torch_mooncake.integrations import ray as tm_ray

tm_ray.register()  # before the actors' classes


@ray.remote(enable_tensor_transport=True, num_cpus=0)
class Trainer:
    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Linear(512, 512)

    @ray.method(tensor_transport="torch_mooncake")
    def weights(self) -> dict[str, torch.Tensor]:
        return {name: value.detach() for name, value in self.model.state_dict().items()}

    def total(self) -> float:
        return sum(float(value.double().sum()) for value in self.model.state_dict().values())


@ray.remote(enable_tensor_transport=True, num_cpus=0)
class Rollout:
    def update(self, weights: dict[str, Any]) -> float:
        return sum(float(value.double().sum()) for value in weights.values())


def main() -> int:
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    trainer, rollouts = Trainer.remote(), [Rollout.remote() for _ in range(2)]
    weights = trainer.weights.remote()
    expected = ray.get(trainer.total.remote(), timeout=120)
    got = ray.get([each.update.remote(weights) for each in rollouts], timeout=120)
    print(f"trainer {expected:.6f}, rollouts {', '.join(f'{value:.6f}' for value in got)}")
    ray.shutdown()
    return 0 if got == [expected] * 2 else 1


if __name__ == "__main__":
    sys.exit(main())
