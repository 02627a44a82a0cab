"""SGLang on a torch_mooncake pool: ``PoolHiCache``, a storage backend of its hierarchical cache.

    --hicache-storage-backend dynamic --hicache-storage-backend-extra-config '{"backend_name": "torch_mooncake",
      "module_path": "torch_mooncake.integrations.sglang", "class_name": "PoolHiCache", "interface_v1": 1}'

See ``docs/integrations/sglang.md``. SGLang is imported with the class.
"""

from torch_mooncake.integrations._lazy import lazily

__all__ = ["PoolHiCache"]
__getattr__ = lazily(__name__, {"PoolHiCache": "hicache"})
