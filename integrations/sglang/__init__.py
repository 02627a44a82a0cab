"""SGLang on torch_mooncake.

``PoolHiCache``, a storage backend of its hierarchical cache:

    --hicache-storage-backend dynamic --hicache-storage-backend-extra-config '{"backend_name": "torch_mooncake",
      "module_path": "torch_mooncake.integrations.sglang", "class_name": "PoolHiCache", "interface_v1": 1}'

The others have a name of their own, which SGLang gets from ``plugin``: transfers of prefill/decode disaggregation
(``--disaggregation-transfer-backend torch_mooncake``) and ``PoolEmbeddings``, a global cache of embeddings
(``--mm-global-cache-backend torch_mooncake``). See ``docs/integrations/sglang.md``. SGLang is imported with the first
use.
"""

from torch_mooncake.integrations._lazy import lazily

_HOMES = {
    "PoolEmbeddings": "embeddings",
    "PoolHiCache": "hicache",
    "TorchMooncakeKVBootstrapServer": "pd",
    "TorchMooncakeKVManager": "pd",
    "TorchMooncakeKVReceiver": "pd",
    "TorchMooncakeKVSender": "pd",
}

__all__ = [*_HOMES]
__getattr__ = lazily(__name__, _HOMES)
