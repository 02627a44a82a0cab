"""LMCache on a torch_mooncake pool: ``PoolConnector`` (a remote storage plug-in), ``PoolBackend`` (a storage backend
plug-in) and ``PoolL2Adapter`` (the second tier of its multiprocess mode). See ``docs/integrations/lmcache.md`` for the
settings. LMCache is imported with the first of them."""

from torch_mooncake.integrations._lazy import lazily

__all__ = ["PoolBackend", "PoolConnector", "PoolL2Adapter"]
__getattr__ = lazily(__name__, {"PoolConnector": "connector", "PoolBackend": "backend", "PoolL2Adapter": "l2"})
