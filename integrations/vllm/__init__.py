"""vLLM on torch_mooncake, with connectors of our own.

    --kv-transfer-config '{"kv_connector": "MooncakePDConnector", "kv_role": "kv_producer",
      "kv_connector_module_path": "torch_mooncake.integrations.vllm", "kv_load_failure_policy": "recompute"}'

``MooncakePDConnector`` pushes a prompt's keys and values from prefill to decode engines, layer by layer;
``MooncakePoolConnector`` is a prefix cache that engines share; ``MooncakeECConnector`` shares what encoders make.
See ``docs/integrations/vllm.md``. vLLM is imported with the classes.
"""

from torch_mooncake.integrations._lazy import lazily

__all__ = ["MooncakeECConnector", "MooncakePDConnector", "MooncakePoolConnector"]
__getattr__ = lazily(
    __name__,
    {
        "MooncakeECConnector": "encoder_connector",
        "MooncakePDConnector": "pd_connector",
        "MooncakePoolConnector": "pool_connector",
    },
)
