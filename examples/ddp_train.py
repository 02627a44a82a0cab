"""Data-parallel training over the "mooncake" backend.

    torchrun --standalone --nproc-per-node=2 examples/ddp_train.py

Trains a small network to tell which of two inputs is larger. Across hosts: start torchrun on each with --nnodes,
--node-rank and --master-addr as usual; every rank listens on the address that leads to the master (or on
TM_LISTEN_HOST).
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import torch_mooncake.distributed  # registers "mooncake"; not needed where the package is installed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=64, help="samples per rank and step")
    parser.add_argument("--backend", default=torch_mooncake.distributed.BACKEND)
    args = parser.parse_args()

    dist.init_process_group(args.backend)
    torch.manual_seed(0)  # equal weights everywhere; DDP would broadcast rank 0's anyway
    model = DistributedDataParallel(
        torch.nn.Sequential(torch.nn.Linear(2, 512), torch.nn.ReLU(), torch.nn.Linear(512, 1))
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    samples = torch.Generator().manual_seed(dist.get_rank())
    for step in range(1, args.steps + 1):
        x = torch.randn(args.batch, 2, generator=samples)
        loss = torch.nn.functional.binary_cross_entropy_with_logits(model(x)[:, 0], (x[:, 0] > x[:, 1]).float())
        optimizer.zero_grad()
        loss.backward()  # gradients are averaged over the ranks here
        optimizer.step()
        if step % 10 == 0:
            mean = loss.detach().clone()
            dist.all_reduce(mean, dist.ReduceOp.AVG)
            if dist.get_rank() == 0:
                print(
                    f"step {step:4d}  loss {mean.item():.4f}  ({os.environ.get('WORLD_SIZE', '1')} ranks)", flush=True
                )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
