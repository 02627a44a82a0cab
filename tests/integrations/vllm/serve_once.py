"""One vLLM engine with its own, unmodified MooncakeStoreConnector, on mooncake_compat: generates, and prints what came.

    python serve_once.py MODEL_FOLDER TOKENS_AS_JSON ROUNDS

Run in the environment of `make env-vllm`. The engine core is a process of its own, which finds the modules by itself.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path


def main() -> None:
    folder, tokens, rounds = Path(sys.argv[1]), json.loads(sys.argv[2]), int(sys.argv[3])
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
