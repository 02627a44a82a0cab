"""Run by torchrun: ranks 0 and 1 train, ranks 2 and 3 infer, all in one job. Prints OK from each that is content."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

import torch_mooncake as tm
from torch_mooncake.weights import Layout, Part, Publisher, Rule, Split, Subscriber

STEPS = 3


def whole(step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {"up": torch.randn(37, 8, generator=generator), "down": torch.randn(8, 12, generator=generator)}


def main() -> None:
    rank = int(os.environ["RANK"])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    tm.init()
    at = rank % 2
    layout = Layout(
        [Rule("up", [Part("up", (37, -1), [Split("tp", 0)])]), Rule("down", [Part("down", split=[Split("tp", 1)])])],
        {"tp": (at, 2)},
    )

    def mine(step: int) -> dict[str, torch.Tensor]:
        found = whole(step)
        return {"up": found["up"].chunk(2)[at].clone(), "down": found["down"].chunk(2, 1)[at].clone()}

    if rank < 2:
        held = mine(0)
        with Publisher("policy", held, layout=layout, rank=rank, world=2) as publisher:
            for step in range(1, STEPS + 1):
                for name, value in mine(step).items():
                    held[name].copy_(value)
                publisher.publish(step=step, timeout=60)
                dist.barrier()  # the subscribers have it
    else:
        own = whole(99) if rank == 2 else mine(99)
        with Subscriber("policy", own, layout=None if rank == 2 else layout) as subscriber:
            for step in range(1, STEPS + 1):
                assert subscriber.update(timeout=60).step == step
                expected = whole(step) if rank == 2 else mine(step)
                assert all(torch.equal(own[name], expected[name]) for name in expected), step
                dist.barrier()
    print(f"OK {rank}", flush=True)
    dist.destroy_process_group()
    tm.close()


if __name__ == "__main__":
    main()
