"""A real vLLM engine on the CPU that takes weights from a trainer in another process, by torch_mooncake's backend.

    python transfer_weights.py FOLDER

Run in the environment of `make env-vllm`. Makes two small Llamas with random weights in FOLDER, prints what happened.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

TOKENS = [(7 * i * i + 3 * i) % 509 for i in range(60)]


def make_model(folder: Path, seed: int) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.25,  # at the usual 0.02 one token repeats and hides corruption
        max_position_embeddings=1024,
    )
    LlamaForCausalLM(config).to(torch.float32).save_pretrained(folder)


class Client:
    """vLLM's VLLMWeightSyncClient over an offline engine; its core and worker are another process."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        assert json.loads(json.dumps(init_info)) == init_info  # its HTTP client sends JSON
        self._engine.collective_rpc("init_weight_transfer_engine", kwargs={"init_info": init_info})

    def start_weight_update(self) -> None:
        self._engine.collective_rpc("start_weight_update")

    def update_weights(self, update_info: Any) -> None:
        self._engine.collective_rpc("update_weights", kwargs={"update_info": json.loads(json.dumps(update_info))})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._engine.collective_rpc("finish_weight_update")


def engine_of(folder: Path, **options: Any) -> Any:
    from vllm import LLM

    return LLM(
        model=str(folder),
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
        block_size=32,
        max_model_len=256,
        **options,
    )


def tokens_of(engine: Any) -> list[int]:
    from vllm import SamplingParams

    engine.reset_prefix_cache()
    (out,) = engine.generate(
        [{"prompt_token_ids": TOKENS}], SamplingParams(temperature=0, max_tokens=12, detokenize=False), use_tqdm=False
    )
    return list(out.outputs[0].token_ids)


def main() -> None:
    root = Path(sys.argv[1])
    os.environ.update(VLLM_CPU_KVCACHE_SPACE="1", VLLM_LOGGING_LEVEL="WARNING", HF_HUB_OFFLINE="1", OMP_NUM_THREADS="2")
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
    folders = [root / name for name in ("a", "b")]
    for seed, folder in enumerate(folders):
        make_model(folder, seed)

    import torch
    from transformers import LlamaForCausalLM
    from vllm.config.weight_transfer import WeightTransferConfig
    from vllm.distributed.weight_transfer import ModuleSource, WeightTransferTrainerFactory

    from torch_mooncake.integrations.checkpoint_engine import ParameterServer
    from torch_mooncake.integrations.vllm.weights import BACKEND, ShardSource, TrainerInit

    found: dict[str, Any] = {}
    plain = engine_of(folders[1])
    found["b"] = tokens_of(plain)
    plain.llm_engine.engine_core.shutdown()  # one engine at a time
    del plain
    engine = engine_of(
        folders[0],
        weight_transfer_config=WeightTransferConfig(backend=BACKEND),
        worker_extension_cls="torch_mooncake.integrations.checkpoint_engine.WorkerExtension",
    )
    found["a"] = tokens_of(engine)
    trainer = LlamaForCausalLM.from_pretrained(folders[1], dtype=torch.float32)
    original = LlamaForCausalLM.from_pretrained(folders[0], dtype=torch.float32)
    client = Client(engine)
    for name, source in (("stream", ModuleSource(trainer)), ("shards", ShardSource(trainer))):
        sender = WeightTransferTrainerFactory.trainer_init(TrainerInit(name, rank=0), client=client, source=source)
        found[f"{name} before"] = tokens_of(engine)  # told, and nothing sent
        sender.send_weights()
        found[f"{name} sent"] = tokens_of(engine)
        with torch.no_grad():
            for here, other in zip(trainer.parameters(), original.parameters(), strict=True):
                here.copy_(other)
        sender.send_weights(step=2)
        found[f"{name} back"] = tokens_of(engine)
        try:  # a version that nobody publishes
            client.start_weight_update()
            client.update_weights({"version": 99, "timeout_s": 0.5})
        except Exception as error:  # vLLM wraps what its worker raised
            found[f"{name} error"] = str(error)
        found[f"{name} kept"] = tokens_of(engine)
        sender.send_weights(step=3)  # and it goes on
        found[f"{name} on"] = tokens_of(engine)
        trainer.load_state_dict(LlamaForCausalLM.from_pretrained(folders[1], dtype=torch.float32).state_dict())
        engine.collective_rpc("shutdown_weight_transfer_engine")
        sender.shutdown()
    with ParameterServer(rank=0, world_size=1) as server:  # checkpoint-engine's way, from the files
        for name, folder in (("b", folders[1]), ("a", folders[0])):
            server.register_checkpoint(name, files=[str(file) for file in folder.glob("*.safetensors")])
            server.update(name, lambda paths: engine.collective_rpc("update_weights_from_ipc", args=(dict(paths),)))
            found[f"files {name}"] = tokens_of(engine)
    print("RESULTS " + json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
