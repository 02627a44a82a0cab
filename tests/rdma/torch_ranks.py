"""Two ranks over RDMA, forked from a process that has imported torch (which takes most of a minute in the machine).

Each rank is a "host" of its own, with the pool's node POOL and its rank, and says in FOLDER/RANK.log what went well.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import traceback
from pathlib import Path

import torch
import torch.distributed as dist

import torch_mooncake as tm
from torch_mooncake.distributed import MooncakeBackendOptions
from torch_mooncake.weights import Place, Publisher, Subscriber

sys.path.insert(0, str(Path(__file__).parents[1] / "kv"))
from sides import DecodeSide, PrefillSide, cache, model_pages

COUNT = 1 << 18
LAYERS, PAGES, SIZE, HEADS, DIM = 3, 9, 4, 2, 64
SENT = [7, 2, 5]
WORLD = 2


def engine(rank: int, name: str) -> tm.Engine:
    return tm.Engine(
        listen=["tcp://127.0.0.1:0"], transports=("rdma",), nics=[f"rxe_?{rank}"], name=name, host_id=f"host-{rank}"
    )


def collectives(rank: int) -> None:
    tensor = torch.arange(COUNT, dtype=torch.float32) if rank == 0 else torch.zeros(COUNT)
    dist.broadcast(tensor, 0)
    assert torch.equal(tensor, torch.arange(COUNT, dtype=torch.float32))
    dist.all_reduce(tensor)
    assert torch.equal(tensor, 2 * torch.arange(COUNT, dtype=torch.float32))


def pool(rank: int, here: tm.Pool) -> None:
    """Puts a value on this host and gets the one that lies on the other."""
    here.put(f"of rank {rank}", torch.arange(COUNT, dtype=torch.int32) * (rank + 1))
    dist.barrier()
    got = here.get(f"of rank {1 - rank}")
    assert torch.equal(got, torch.arange(COUNT, dtype=torch.int32) * (2 - rank))
    dist.barrier()


def weights(rank: int, here: tm.Pool) -> None:
    """One publisher, two subscribers on the other host: each gets every byte, and over RDMA only."""
    trainer = {f"w{i}": torch.arange(COUNT, dtype=torch.float32) + i for i in range(2)}
    nbytes = sum(tensor.nbytes for tensor in trainer.values())
    if rank == 0:
        with engine(0, "trainer") as ours, Publisher("p", trainer, engine=ours, place=Place("host-0"), pool=here) as p:
            dist.barrier()  # both have subscribed
            p.publish(step=3)
            dist.barrier()  # both have it
        return
    with engine(1, "worker 0") as first, engine(1, "worker 1") as second:
        models = [{name: torch.zeros_like(tensor) for name, tensor in trainer.items()} for _ in range(2)]
        subscribers = [
            Subscriber("p", model, engine=each, place=Place(each.name), patience_s=60, pool=here)
            for model, each in zip(models, (first, second), strict=True)
        ]
        dist.barrier()
        for subscriber, model, each in zip(subscribers, models, (first, second), strict=True):
            assert subscriber.update(timeout=60).step == 3
            assert all(torch.equal(model[name], trainer[name]) for name in trainer)
            received = {name: n for name, n in each.stats()["bytes_received"].items() if n}
            assert set(received) == {"rdma"}, received
            assert received["rdma"] >= nbytes
        dist.barrier()
        for subscriber in subscribers:
            subscriber.close()


def kv(rank: int, here: tm.Pool) -> None:
    """Pages of a prompt, pushed layer by layer into pages that the other side has reserved."""
    model = model_pages(LAYERS, PAGES, SIZE, HEADS, DIM)
    if rank == 0:
        prefill = PrefillSide(cache(model.shape), ("rdma",))
        for layer in range(LAYERS):
            prefill.kv.layers[layer].copy_(model[layer])
        dist.barrier()  # the ticket is there
        with prefill.sender.open(bytes(here.get("ticket"))) as push:
            for layer in range(LAYERS):
                push.push_layer(layer, SENT)
            result = push.finish({"first_token": 42})
        assert result.nbytes == len(SENT) * model[:, 0].nbytes
        dist.barrier()
        prefill.close()
        return
    decode = DecodeSide(cache((LAYERS, 6, *model.shape[2:])), ("rdma",))
    session = decode.receiver.open(len(SENT))
    here.put("ticket", session.ticket())
    dist.barrier()
    for layer in range(LAYERS):
        session.wait_layer(layer)
        assert torch.equal(decode.kv.layers[layer][session.pages], model[layer, SENT])
    assert session.wait() == {"first_token": 42}
    dist.barrier()
    decode.close()


def main(rank: int, folder: Path, name: str, log: int) -> None:
    os.environ["TM_HOST_ID"], os.environ["TM_NICS"] = f"host-{rank}", f"rxe_?{rank}"
    torch.set_num_threads(1)
    options = MooncakeBackendOptions(transports=("rdma",))
    store = f"file://{folder}/store"
    dist.init_process_group("mooncake", init_method=store, rank=rank, world_size=WORLD, pg_options=options)
    with tm.Pool(pool=f"{name}{rank}") as here:
        for step in (pool, weights, kv):
            step(rank, here)
            os.write(log, f"done: {step.__name__}\n".encode())
    collectives(rank)
    os.write(log, b"done: collectives\n")
    dist.destroy_process_group()


def start(rank: int, folder: Path, name: str) -> int:
    """The pid of that rank. What it prints goes to its log."""
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        log = os.open(folder / f"{rank}.log", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        for fd in (1, 2):
            os.dup2(log, fd)
        faulthandler.enable(file=log)  # where it is, when it is aborted
        main(rank, folder, name, log)
        status = 0
    except BaseException:
        os.write(2, traceback.format_exc().encode())
    os._exit(status)
