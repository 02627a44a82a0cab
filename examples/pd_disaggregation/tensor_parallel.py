"""Tensor parallelism by hand: how one Llama is cut over the ranks of a worker, and how the ranks work together.

As usual: q, k, v, gate and up projections are cut by output rows (each rank has its heads and its part of the MLP), o
and down projections by input columns, and their partial results are summed over the ranks. A rank's model is then an
ordinary, narrower LlamaForCausalLM with an all_reduce behind two of its modules a layer. The embedding and the norms
are on every rank; logits are computed by rank 0 alone.

The ranks are one process group of torch.distributed's backend "mooncake". Rank 0 drives: it broadcasts what is to be
done, and all ranks do it. A rank that dies takes its worker along: a collective of the others fails, and so do they.
"""

from __future__ import annotations

import copy
import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec.msgpack as msgpack
import torch
import torch.distributed as dist
from process import die_with_parent

from torch_mooncake.distributed import BACKEND

_COLUMN = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
_ROW = ("o_proj", "down_proj")
# How long followers wait for work. Death is noticed at once, and silence within seconds, whatever this says.
_IDLE = timedelta(days=7)


class Group:
    """The ranks of one worker. `size` 1 needs no process group and sends nothing. Used by one thread."""

    def __init__(self, rank: int, size: int, store_file: Path) -> None:
        self.rank, self.size = rank, size
        if size > 1:
            store = dist.FileStore(str(store_file), size)
            dist.init_process_group(BACKEND, store=store, rank=rank, world_size=size, timeout=_IDLE)

    def broadcast(self, value: Any = None) -> Any:
        """Rank 0's value (msgpack's types), on all ranks."""
        if self.size == 1:
            return value
        data = torch.frombuffer(bytearray(msgpack.encode(value)), dtype=torch.uint8)
        length = torch.tensor([len(data)])
        dist.broadcast(length, 0)
        if self.rank != 0:
            data = torch.empty(int(length), dtype=torch.uint8)
        dist.broadcast(data, 0)
        return msgpack.decode(data.numpy().tobytes())

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value (msgpack's types) in rank order, on all ranks."""
        if self.size == 1:
            return [value]
        data = torch.frombuffer(bytearray(msgpack.encode(value)), dtype=torch.uint8)
        lengths = [torch.empty(1, dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(lengths, torch.tensor([len(data)]))
        parts = [torch.empty(int(length), dtype=torch.uint8) for length in lengths]
        dist.all_gather(parts, data)  # of different lengths: the backend takes them
        return [msgpack.decode(part.numpy().tobytes()) for part in parts]

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sums over the ranks, in place; equal bit for bit on all of them."""
        if self.size > 1:
            dist.all_reduce(tensor)
        return tensor

    def scatter(self, out: torch.Tensor, parts: list[torch.Tensor] | None) -> None:
        """Rank 0's `parts[rank]` into every rank's `out`."""
        if self.size == 1:
            assert parts is not None
            out.copy_(parts[0])
        else:
            dist.scatter(out, parts, 0)

    def close(self) -> None:
        if self.size > 1:
            dist.destroy_process_group()


def fork_ranks(size: int) -> tuple[int, list[int]]:
    """Forks the other ranks of this worker, which has to be done before anything has threads; they die with it. Returns
    this process's rank and, for rank 0, the pids of the others."""
    parent, children = os.getpid(), []
    for rank in range(1, size):
        pid = os.fork()
        if pid == 0:
            die_with_parent(parent)
            return rank, []
        children.append(pid)
    return 0, children


# ---- one rank's model ------------------------------------------------------------------------------------------------
def shard_config(config, size: int):
    """The configuration of one rank's narrower model. ValueError when the model cannot be cut into `size` equal parts
    (key and value heads are not replicated)."""
    for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
        if getattr(config, name) % size:
            raise ValueError(f"tensor parallelism over {size} ranks: {name} is {getattr(config, name)}")
    narrow = copy.deepcopy(config)
    narrow.head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    narrow.num_attention_heads //= size
    narrow.num_key_value_heads //= size
    narrow.intermediate_size //= size
    return narrow


def sum_partial_results(model, group: Group) -> None:
    """Lets the modules that are cut by columns sum their outputs over the ranks."""
    if group.size == 1:
        return
    for name, module in model.named_modules():
        if name.rpartition(".")[2] in _ROW:
            module.register_forward_hook(lambda _module, _args, output: group.sum(output))


def cut(name: str, tensor: torch.Tensor, size: int) -> list[torch.Tensor]:
    """One rank's part of a weight or bias after the other, contiguous."""
    module, _, kind = name.rpartition(".")
    module = module.rpartition(".")[2]
    if module in _COLUMN:
        return [part.contiguous() for part in tensor.chunk(size)]
    if module in _ROW and kind == "weight":
        return [part.contiguous() for part in tensor.chunk(size, dim=1)]
    if module in _ROW:  # a bias is added once
        return [tensor, *[torch.zeros_like(tensor)] * (size - 1)]
    return [tensor] * size


@torch.no_grad()
def scatter_weights(full: dict[str, torch.Tensor] | None, model, group: Group) -> None:
    """Rank 0's `full` weights into every rank's narrow `model`, tensor by tensor; tied ones once."""
    done: set[int] = set()
    for name, target in model.state_dict().items():
        if target.data_ptr() in done:
            continue
        done.add(target.data_ptr())
        group.scatter(target, cut(name, full[name], group.size) if full is not None else None)
