"""Two ranks over RDMA: torch is imported once (that takes most of a minute in the machine), then forked.

    python torch_ranks.py FOLDER POOL

Each rank is a "host" of its own, with the pool's node POOL and its rank. Prints a JSON object for what went well.
"""

from __future__ import annotations

import json
import os
import sys

import torch
import torch.distributed as dist

import torch_mooncake as tm
from torch_mooncake.distributed import MooncakeBackendOptions

COUNT = 1 << 18


def say(rank: int, what: str) -> None:
    print(json.dumps({"rank": rank, "done": what}), flush=True)


def collectives(rank: int) -> None:
    tensor = torch.arange(COUNT, dtype=torch.float32) if rank == 0 else torch.zeros(COUNT)
    dist.broadcast(tensor, 0)
    assert torch.equal(tensor, torch.arange(COUNT, dtype=torch.float32))
    dist.all_reduce(tensor)
    assert torch.equal(tensor, 2 * torch.arange(COUNT, dtype=torch.float32))


def pool(rank: int, name: str) -> None:
    """Puts a value on this host and gets the one that lies on the other."""
    with tm.Pool(pool=f"{name}{rank}") as here:
        here.put(f"of rank {rank}", torch.arange(COUNT, dtype=torch.int32) * (rank + 1))
        dist.barrier()
        got = here.get(f"of rank {1 - rank}")
        assert torch.equal(got, torch.arange(COUNT, dtype=torch.int32) * (2 - rank))
        dist.barrier()


def main(rank: int, folder: str, name: str) -> None:
    os.environ["TM_HOST_ID"], os.environ["TM_NICS"] = f"host-{rank}", f"rxe_?{rank}"
    options = MooncakeBackendOptions(transports=("rdma",))
    store = f"file://{folder}/store"
    dist.init_process_group("mooncake", init_method=store, rank=rank, world_size=2, pg_options=options)
    collectives(rank)
    say(rank, "collectives")
    pool(rank, name)
    say(rank, "pool")
    dist.destroy_process_group()


if __name__ == "__main__":
    child = os.fork()
    main(0 if child else 1, *sys.argv[1:])
    if child:
        sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
