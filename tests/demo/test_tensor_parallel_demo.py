"""A Llama cut over ranks is the Llama: the parts are a partition, and the ranks, real processes of one group of the
backend, say what plain generation says."""

import os
import subprocess
import sys
from pathlib import Path

import model as models
import pytest
import tensor_parallel
import torch
from cluster import Shape

EXAMPLE = Path(models.__file__).parent
RANKS = """
import sys
import torch, model as models
from pathlib import Path
from paged_cache import PagedCache, forward, make_cache
from tensor_parallel import Group, fork_ranks, scatter_weights, shard_config, sum_partial_results

size, store, parent = int(sys.argv[1]), Path(sys.argv[2]), None
rank, children = fork_ranks(size)
torch.set_num_threads(1)
group = Group(rank, size, store)
assert group.gather({"rank": rank, "bytes": b"x" * rank}) == [{"rank": r, "bytes": b"x" * r} for r in range(size)]
assert group.broadcast([rank, b"y"]) == [0, b"y"]
full = models.load("random")[0] if rank == 0 else None
config = models.config_from_json(group.broadcast(models.config_to_json(full) if rank == 0 else None))
mine = models.empty_model(shard_config(config, size))
sum_partial_results(mine, group)
scatter_weights(full.state_dict() if rank == 0 else None, mine, group)
kv, prompt, tokens = make_cache(mine.config, 8, 16), list(range(3, 73)), []
assert kv.layers[0].shape[1] == config.num_key_value_heads // size
with torch.inference_mode():
    fed = prompt
    for _ in range(16):
        start = 0 if not tokens else len(prompt) + len(tokens) - 1
        hidden = forward(mine, PagedCache(kv, [[7, 1, 2, 6, 3, 4]], [start], len(fed)), [fed])
        tokens.append(group.broadcast(int(mine.lm_head(hidden)[0].argmax()) if rank == 0 else None))
        fed = tokens[-1:]
assert len({tuple(each) for each in group.gather(tokens)}) == 1
if rank == 0:
    assert tokens == models.generate_reference(full, prompt, 16, ignore_eos=True)[0]
    print("right")
group.close()
"""


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_ranks_say_what_one_process_says(tmp_path, size):
    done = subprocess.run(
        [sys.executable, "-c", RANKS, str(size), str(tmp_path / "store")],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(EXAMPLE), *sys.path])},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "right\n"


@pytest.mark.parametrize("size", [1, 2, 4])
def test_parts_are_a_partition(size):
    model = models.load("random")[0]
    config = model.config
    config.attention_bias = False
    for name, tensor in model.state_dict().items():
        parts = tensor_parallel.cut(name, tensor, size)
        assert len(parts) == size
        assert all(part.is_contiguous() for part in parts)
        if any(module in name for module in ("o_proj", "down_proj")):
            assert torch.equal(torch.cat(parts, 1), tensor)
        elif "_proj" in name:
            assert torch.equal(torch.cat(parts), tensor)
        else:
            assert all(part is tensor for part in parts)


def test_a_bias_behind_a_sum_is_added_once():
    bias = torch.arange(4.0)
    assert torch.equal(sum(tensor_parallel.cut("model.layers.0.mlp.down_proj.bias", bias, 3)), bias)
    assert torch.equal(torch.cat(tensor_parallel.cut("model.layers.0.mlp.up_proj.bias", bias, 2)), bias)


def test_heads_that_do_not_divide_are_refused():
    config = models.load("random")[0].config
    assert tensor_parallel.shard_config(config, 4).num_key_value_heads == 1
    with pytest.raises(ValueError, match="over 3 ranks: num_attention_heads is 8"):
        tensor_parallel.shard_config(config, 3)
    with pytest.raises(ValueError, match="over 8 ranks: num_key_value_heads is 4"):
        tensor_parallel.shard_config(config, 8)


def test_the_pool_cuts_as_finely_as_any_worker():
    assert Shape(prefill_tp=3, decode_tp=1).pool_parts == 3
    assert Shape(prefill_tp=4, decode_tp=2).pool_parts == 4
    assert Shape(prefill=2, decode=1).workers == ["prefill-0", "prefill-1", "decode-0"]
