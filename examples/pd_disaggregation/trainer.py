"""The trainer: the only process that loads the model from its files. It publishes weights and, being plain
single-process transformers, says what the right answers are.

One JSON command a line on stdin, one JSON answer a line on stdout:
    {"publish": step}                             the weights go to the pool as the next version
    {"train": 1}                                  a step of "training": every weight moves a little
    {"generate": [token ids], "max_tokens": n}    the reference answer, and the gap of the top two logits at each token;
                                                  with "ignore_eos": true it has all n tokens
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import asdict
from pathlib import Path

import torch
from model import config_to_json, eos_token_ids, generate_reference, load
from process import die_with_parent, write_json
from shard_weights import CONFIG_KEY, WEIGHTS

import torch_mooncake as tm
from torch_mooncake import weights

_NOISE = 0.05  # of each tensor's standard deviation


@torch.no_grad()
def train(model, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.add_(noise, alpha=_NOISE * float(parameter.std()))


def main() -> None:
    die_with_parent()
    parser = argparse.ArgumentParser(description="trainer of the demo; started by demo.py")
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--model", required=True)
    args = parser.parse_args()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints goes to the log
    torch.set_num_threads(1)
    tm.init(name="trainer")
    model, tokenizer = load(args.model)
    tokenizer.save_pretrained(args.run_dir / "tokenizer")
    write_json(args.run_dir / "model.json", {"name": args.model, "eos_token_ids": eos_token_ids(model)})
    tm.put(CONFIG_KEY, config_to_json(model))
    nbytes = sum(parameter.nbytes for parameter in model.parameters())
    print(json.dumps({"ready": True, "nbytes": nbytes}), file=answers, flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        if "publish" in command:
            answer = asdict(weights.publish(model, WEIGHTS, step=command["publish"]))
        elif "train" in command:
            train(model, command["train"])
            answer = {}
        elif "generate" in command:
            tokens, gaps = generate_reference(
                model, command["generate"], command["max_tokens"], ignore_eos=command.get("ignore_eos", False)
            )
            answer = {"tokens": tokens, "gaps": gaps}
        else:
            raise ValueError(f"unknown command {sorted(command)}")
        print(json.dumps(answer), file=answers, flush=True)
    tm.close()


if __name__ == "__main__":
    main()
