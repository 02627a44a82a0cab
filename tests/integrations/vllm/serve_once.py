"""One vLLM engine with its own, unmodified MooncakeStoreConnector, on mooncake_compat: generates, and prints what came.

    python serve_once.py MODEL_FOLDER TOKENS_AS_JSON ROUNDS

Run in the environment of `make env-vllm`; MODEL_FOLDER is made there if it is not (a small Llama with random weights).
The engine core is a process of its own, which finds the modules by itself.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path


def make_model(folder: Path) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
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


def main() -> None:
    folder, tokens, rounds = Path(sys.argv[1]), json.loads(sys.argv[2]), int(sys.argv[3])
    if not (folder / "config.json").exists():
        make_model(folder)
    os.environ.update(VLLM_CPU_KVCACHE_SPACE="1", VLLM_LOGGING_LEVEL="WARNING", HF_HUB_OFFLINE="1", OMP_NUM_THREADS="2")
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
    from vllm import LLM, SamplingParams
    from vllm.config import KVTransferConfig

    engine = LLM(
        model=str(folder),
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
        block_size=32,
        max_model_len=512,
        kv_transfer_config=KVTransferConfig(kv_connector="MooncakeStoreConnector", kv_role="kv_both"),
    )
    results = []
    for _ in range(rounds):
        (out,) = engine.generate(
            [{"prompt_token_ids": tokens}], SamplingParams(temperature=0, max_tokens=12, detokenize=False)
        )
        results.append({"tokens": list(out.outputs[0].token_ids), "cached": out.num_cached_tokens})
        time.sleep(2)  # its saves are asynchronous, and it says of none when it is done
        engine.reset_prefix_cache()
    print("RESULTS " + json.dumps(results), flush=True)


if __name__ == "__main__":
    main()
