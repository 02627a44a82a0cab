"""SGLang's plug-in hook: ``--disaggregation-transfer-backend torch_mooncake``, and an embedding store of that name.

``torch_mooncake`` names ``register`` in the entry-point group ``sglang.srt.plugins``; SGLang calls it in each of its
processes before it reads its arguments.
"""

from __future__ import annotations

import argparse
from enum import Enum
from typing import Any

NAME = "torch_mooncake"


def register() -> None:
    """Tell SGLang of the names. What is behind them is imported when it is asked for. A second call changes nothing."""
    from sglang.srt.arg_groups import choices
    from sglang.srt.disaggregation import utils
    from sglang.srt.mem_cache.embedding_store import EmbeddingStoreFactory
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    package = __name__.rpartition(".")[0]
    if NAME in choices.DISAGG_TRANSFER_BACKEND_CHOICES:
        return
    choices.add_disagg_transfer_backend_choices([NAME])
    EmbeddingStoreFactory.register_backend(NAME, package, "PoolEmbeddings")
    names = {member.name: member.value for member in utils.TransferBackend} | {"TORCH_MOONCAKE": NAME}
    backends = Enum("TransferBackend", names, module=utils.__name__)  # type: ignore[misc]
    HookRegistry.register("sglang.srt.disaggregation.utils.TransferBackend", backends, HookType.REPLACE)
    HookRegistry.register("sglang.srt.disaggregation.utils.get_kv_class", get_kv_class, HookType.AROUND)
    HookRegistry.register("sglang.srt.server_args.ServerArgs.add_cli_args", _more_choices, HookType.AFTER)


def _more_choices(result: Any, parser: argparse.ArgumentParser, *rest: Any, **named: Any) -> Any:
    """After SGLang has declared its arguments: of the embeddings' store it only takes names that it knows."""
    for action in parser._actions:
        if action.dest == "mm_global_cache_backend":
            action.choices = [*(action.choices or ()), NAME]
    return result


def get_kv_class(original: Any, transfer_backend: Any, class_type: Any) -> Any:
    """Around SGLang's function of that name."""
    ours = {
        "manager": "TorchMooncakeKVManager",
        "sender": "TorchMooncakeKVSender",
        "receiver": "TorchMooncakeKVReceiver",
        "bootstrap_server": "TorchMooncakeKVBootstrapServer",
    }
    if transfer_backend.value != NAME or class_type.value not in ours:
        return original(transfer_backend, class_type)
    from torch_mooncake.integrations.sglang import pd

    return getattr(pd, ours[class_type.value])
