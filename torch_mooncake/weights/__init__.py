"""Model weights through the pool: a trainer publishes, workers follow.

weights.publish(model, "policy", step=7)              # in the trainer
policy = weights.subscribe(model, "policy")           # in each worker
policy.update(timeout=60)                             # the next version, copied into the model's own tensors

weights.describe(model, layout)                       # which part of which global tensor this process holds
weights.compare(sources, targets)                     # do these manifests fit those?
"""

from torch_mooncake.weights.atoms import compare
from torch_mooncake.weights.describe import describe
from torch_mooncake.weights.layout import Layout, Part, Rule, Split, Stack
from torch_mooncake.weights.publish import Published, publish
from torch_mooncake.weights.shards import Manifest
from torch_mooncake.weights.subscribe import Subscription, Update, subscribe

__all__ = [
    "Layout",
    "Manifest",
    "Part",
    "Published",
    "Rule",
    "Split",
    "Stack",
    "Subscription",
    "Update",
    "compare",
    "describe",
    "publish",
    "subscribe",
]
