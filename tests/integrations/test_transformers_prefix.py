"""The prefix cache under transformers' generate(), on a small Llama with random weights."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import Any

import pytest
import torch
from places import ROOT
from processes import PoolEnv

import torch_mooncake as tm
from torch_mooncake.integrations.transformers import PrefixCache

transformers = pytest.importorskip("transformers", reason="requirements-demo.txt has it")
OPTIONS = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}


@pytest.fixture(scope="module")
def llama() -> Any:
    config = transformers.LlamaConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.25,  # at the usual 0.02 one token repeats and hides corruption
        max_position_embeddings=512,
    )
    torch.manual_seed(1)
    return transformers.LlamaForCausalLM(config).eval()


def prompt(length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 128, (1, length), generator=torch.Generator().manual_seed(seed))


@torch.inference_mode()
def test_answers_are_those_of_plain_generate(pool: tm.Pool, llama: Any):
    prefixes = PrefixCache(pool, llama, "m")
    for length, reused in ((100, 0), (100, 96), (97, 96), (96, 64), (33, 32), (32, 0), (150, 96)):
        ids = torch.cat((prompt(100), prompt(50, 1)), dim=1)[:, :length]
        before = prefixes.stats.reused_tokens
        assert torch.equal(prefixes.generate(llama, ids, **OPTIONS), llama.generate(ids, **OPTIONS))
        assert prefixes.stats.reused_tokens - before == reused
    assert prefixes.stats.chunks_stored == 4
    assert len(pool.keys("transformers/m/")) == 4


@torch.inference_mode()
def test_a_changed_chunk_changes_the_answer(pool: tm.Pool, llama: Any):
    """The negative control: what is read is used."""
    prefixes, ids = PrefixCache(pool, llama, "m"), prompt(70)
    right = prefixes.generate(llama, ids, **OPTIONS)
    key = prefixes.keys(ids[0].tolist())[0]
    pool.delete(key)
    pool.put(key, torch.zeros(3, 2, 2, 32, 16), sealed=True)
    assert not torch.equal(prefixes.generate(llama, ids, **OPTIONS), right)


@torch.inference_mode()
def test_what_may_not_be_shared_is_not(pool: tm.Pool, llama: Any):
    ids = prompt(80)
    for name, options in (
        ("m", {}),
        ("m", {"cache_salt": "tenant"}),
        ("other weights", {}),
        ("m", {"chunk_tokens": 16}),
    ):
        prefixes = PrefixCache(pool, llama, name, **options)
        prefixes.generate(llama, ids, **OPTIONS)
        assert prefixes.stats.reused_tokens == 0


@torch.inference_mode()
def test_what_is_no_chunk_is_not_used(pool: tm.Pool, llama: Any, caplog: pytest.LogCaptureFixture):
    prefixes, ids = PrefixCache(pool, llama, "m"), prompt(70)
    pool.put(prefixes.keys(ids[0].tolist())[0], b"something else")
    assert torch.equal(prefixes.generate(llama, ids, **OPTIONS), llama.generate(ids, **OPTIONS))
    assert prefixes.stats.reused_tokens == 0
    assert "holds no chunk" in caplog.text


@torch.inference_mode()
@pytest.mark.slow
def test_a_lost_pool_costs_the_reuse_and_not_the_answer(pool_env: PoolEnv, llama: Any):
    with tm.Pool(linger_s=0) as pool:
        prefixes, ids = PrefixCache(pool, llama, "m", timeout_s=2), prompt(70)
        prefixes.generate(llama, ids, **OPTIONS)
        for pid in pool_env.nodes():
            os.kill(pid, signal.SIGKILL)
        assert torch.equal(prefixes.generate(llama, ids, **OPTIONS), llama.generate(ids, **OPTIONS))


def test_batches_and_sliding_windows_are_refused(pool: tm.Pool, llama: Any):
    with pytest.raises(tm.InvalidArgument, match="one sequence"):
        PrefixCache(pool, llama, "m").generate(llama, torch.zeros(2, 8, dtype=torch.int64))
    config = transformers.Gemma3TextConfig(
        vocab_size=128, hidden_size=32, intermediate_size=32, num_hidden_layers=6, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16,
    )  # fmt: skip
    with pytest.raises(tm.Unsupported):
        PrefixCache(pool, transformers.Gemma3ForCausalLM(config), "m")


@pytest.mark.slow
def test_the_example_holds_its_claims(pool_env: PoolEnv):
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(ROOT / "examples" / "transformers_prefix_cache.py"), "--model", "random"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all claims hold" in done.stdout
