"""TensorRT-LLM's KV-cache connector on a torch_mooncake pool: a prefix cache that all servers share.

    kv_connector_config:
      connector_module: torch_mooncake.integrations.tensorrt_llm
      connector_scheduler_class: PoolConnectorScheduler
      connector_worker_class: PoolConnectorWorker

**Not run against TensorRT-LLM**: see ``docs/integrations/tensorrt_llm.md``. TensorRT-LLM is imported with the classes.
"""

from torch_mooncake.integrations._lazy import lazily

__all__ = ["PoolConnectorScheduler", "PoolConnectorWorker"]
__getattr__ = lazily(__name__, {"PoolConnectorScheduler": "connector", "PoolConnectorWorker": "connector"})
