"""Encoder outputs between two connectors that vLLM's own factory makes: prints what came of each question."""

from __future__ import annotations

import json
import time
from types import SimpleNamespace
from typing import Any

import torch
from vllm.config import ECTransferConfig
from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorRole
from vllm.distributed.ec_transfer.ec_connector.factory import ECConnectorFactory


def connector(role: str, part: ECConnectorRole) -> Any:
    config = ECTransferConfig(
        ec_connector="MooncakeECConnector",
        ec_connector_module_path="torch_mooncake.integrations.vllm",
        ec_role=role,
    )
    model = SimpleNamespace(model="a/vision-model", hf_config=None)
    return ECConnectorFactory.create_connector(SimpleNamespace(ec_transfer_config=config, model_config=model), part)


def main() -> None:
    made = torch.randn(6, 16, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    producer = connector("ec_producer", ECConnectorRole.WORKER)
    producer.save_caches({"cat": made}, "cat")
    scheduler = connector("ec_consumer", ECConnectorRole.SCHEDULER)
    worker = connector("ec_consumer", ECConnectorRole.WORKER)
    places = [("cat", 1, 6), ("dog", 8, 4)]
    request = SimpleNamespace(
        request_id="r",
        mm_features=[
            SimpleNamespace(identifier=name, mm_position=SimpleNamespace(offset=offset, length=length))
            for name, offset, length in places
        ],
        get_num_encoder_embeds=lambda index: places[index][2],
    )
    end = time.monotonic() + 20
    while not scheduler.ensure_cache_available(request, 0) and time.monotonic() < end:
        time.sleep(0.01)
    has = {name: scheduler.has_cache_item(name) for name, _, _ in places}
    for index in range(2):
        scheduler.update_state_after_alloc(request, index)
    worker.bind_connector_metadata(scheduler.build_connector_meta(None))
    cache: dict[str, torch.Tensor] = {}
    worker.start_load_caches(cache)
    worker.clear_connector_metadata()
    held = scheduler.request_finished(request)
    same = list(cache) == ["cat"] and torch.equal(cache["cat"], made)
    for each in (producer, scheduler, worker):
        each.shutdown()
    print("RESULTS " + json.dumps({"has": has, "same": same, "held": held}), flush=True)


if __name__ == "__main__":
    main()
