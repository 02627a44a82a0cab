"""Model weights: a trainer publishes, workers follow.

Through the pool, which keeps the version:

weights.publish(model, "policy", step=7)              # in the trainer
policy = weights.subscribe(model, "policy")           # in each worker
policy.update(timeout=60)                             # the next version, copied into the model's own tensors

Directly between the processes, whatever their layouts, with the workers passing on what they have:

publisher = weights.Publisher("policy", model)        # in each trainer rank
publisher.publish(step=7)
subscriber = weights.Subscriber("policy", model)      # in each worker
subscriber.update(timeout=60)

weights.Publisher("policy", weights.Checkpoint("run/step7"))  # from files: safetensors, torch.distributed.checkpoint
weights.share(model)                                  # move its tensors into shared memory, for in_place=True

weights.describe(model, layout)                       # which part of which global tensor this process holds
weights.compare(sources, targets)                     # do these manifests fit those?
weights.contents("policy")                            # what is published, by whom, and who has it
weights.Together([weights.Checkpoint(mine), extra])   # what one rank has in several places, for its Publisher
weights.tensors_of_version("policy")                  # name, shape and dtype of all tensors
"""

from torch_mooncake.weights.atoms import compare
from torch_mooncake.weights.bring import Torn
from torch_mooncake.weights.contents import Contents, contents, tensors_of_version
from torch_mooncake.weights.describe import describe
from torch_mooncake.weights.files import Checkpoint
from torch_mooncake.weights.formats import Fp8Blocks, Fp8Channels
from torch_mooncake.weights.layout import Layout, Part, Rule, Split, Stack
from torch_mooncake.weights.plan import Place
from torch_mooncake.weights.publish import Published, publish
from torch_mooncake.weights.publisher import Publisher
from torch_mooncake.weights.shards import Manifest
from torch_mooncake.weights.share import share
from torch_mooncake.weights.sources import Stream
from torch_mooncake.weights.subscribe import Subscription, Update, subscribe
from torch_mooncake.weights.subscriber import Subscriber
from torch_mooncake.weights.together import Together

__all__ = [
    "Checkpoint",
    "Contents",
    "Fp8Blocks",
    "Fp8Channels",
    "Layout",
    "Manifest",
    "Part",
    "Place",
    "Published",
    "Publisher",
    "Rule",
    "Split",
    "Stack",
    "Stream",
    "Subscriber",
    "Subscription",
    "Together",
    "Torn",
    "Update",
    "compare",
    "contents",
    "describe",
    "publish",
    "share",
    "subscribe",
    "tensors_of_version",
]
