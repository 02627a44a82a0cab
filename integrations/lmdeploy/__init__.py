"""LMDeploy (PyTorch engine) on torch_mooncake: ``TorchMooncakeMigration`` moves KV blocks from prefill to decode.

    from torch_mooncake.integrations import lmdeploy
    lmdeploy.register()         # in every process of the engine, before it connects: --migration-backend Mooncake

See ``docs/integrations/lmdeploy.md``, also for the KV connector (a shared prefix cache). LMDeploy is imported with the
first use.
"""

from torch_mooncake.integrations._lazy import lazily

__all__ = ["TorchMooncakeMigration", "register"]
__getattr__ = lazily(__name__, {"TorchMooncakeMigration": "migration", "register": "migration"})
