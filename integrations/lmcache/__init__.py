"""LMCache on a torch_mooncake pool: ``PoolConnector`` (a remote storage plug-in) and ``PoolBackend`` (a storage backend
plug-in). See ``docs/integrations/lmcache.md`` for the settings. LMCache is imported with the first of them."""

from torch_mooncake.integrations._lazy import lazily

__all__ = ["PoolBackend", "PoolConnector"]
__getattr__ = lazily(__name__, {"PoolConnector": "connector", "PoolBackend": "backend"})
