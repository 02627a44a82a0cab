"""Model weights through the pool: a trainer publishes, workers follow.

weights.publish(model, "policy", step=7)              # in the trainer
policy = weights.subscribe(model, "policy")           # in each worker
policy.update(timeout=60)                             # the next version, copied into the model's own tensors
"""

from torch_mooncake.weights.publish import Published, publish
from torch_mooncake.weights.subscribe import Subscription, Update, subscribe

__all__ = ["Published", "Subscription", "Update", "publish", "subscribe"]
