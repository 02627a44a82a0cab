"""Data-parallel training that outlives its ranks: who dies is replaced while the others wait, without a restart.

    torchrun --standalone --nproc-per-node=3 examples/elastic_train.py --kill 0:50

Each of torchrun's workers keeps one rank alive: it starts the trainer as a process of its own, and when that dies, a
new one in its place. The other trainers see their collective fail, leave the dead rank out (deactivate_ranks), wait for
its replacement (activate_ranks), hand it the newest weights and optimizer state, and go on with the step that failed.
Any rank may die, also rank 0; nobody needs the store by then. Every sample is a function of step and rank, so the
weights at the end are, bit for bit, those of a run in which nobody died: the last line prints their digest.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import torch_mooncake.distributed as tmd

RANK, WORLD = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
MOST_RESTARTS = 5


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch", type=int, default=64, help="samples per rank and step")
    parser.add_argument("--kill", metavar="RANK:STEP", action="append", default=[], help="dies there, once; repeatable")
    parser.add_argument("--contact", type=Path, help=argparse.SUPPRESS)  # of the trainer: where it finds the others
    parser.add_argument("--generation", type=int, default=0, help=argparse.SUPPRESS)
    return parser.parse_args()


# ---- the keeper: torchrun's worker


def keep() -> int:
    """Starts this rank's trainer, and another one whenever it dies. Returns the exit status."""
    with tempfile.TemporaryDirectory(prefix="elastic-train-") as folder:
        contact = Path(folder, "contact")
        for generation in range(MOST_RESTARTS + 1):
            extra = ["--contact", str(contact), "--generation", str(generation)]
            trainer = subprocess.Popen([sys.executable, __file__, *sys.argv[1:], *extra])
            try:
                code = trainer.wait()
            finally:
                trainer.kill()  # torchrun ends us: it ends with us
            if code == 0:
                return 0
            if not contact.exists():
                return code if code > 0 else 1  # it died before there was a group
            print(f"rank {RANK} died ({code}): a new process takes its place", flush=True)
        return 1


# ---- the trainer


class Training:
    """What a replacement has to be given: model, optimizer, and the next step (0: nothing learnt yet)."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(torch.nn.Linear(2, 512), torch.nn.ReLU(), torch.nn.Linear(512, 1))
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-3)
        self.step = 0

    def agree(self) -> None:
        """All ranks go on from the state of the one that came furthest."""
        furthest = torch.tensor([self.step * WORLD + WORLD - 1 - RANK])
        dist.all_reduce(furthest, dist.ReduceOp.MAX)
        source = WORLD - 1 - int(furthest.item()) % WORLD
        state = [(self.model.state_dict(), self.optimizer.state_dict(), self.step)] if source == RANK else [None]
        dist.broadcast_object_list(state, src=source)
        assert state[0] is not None
        model, optimizer, self.step = state[0]
        self.model.load_state_dict(model)
        self.optimizer.load_state_dict(optimizer)

    def learn(self, ddp: torch.nn.Module, batch: int) -> float:
        samples = torch.Generator().manual_seed(self.step * WORLD + RANK)
        x = torch.randn(batch, 2, generator=samples)
        loss = torch.nn.functional.binary_cross_entropy_with_logits(ddp(x)[:, 0], (x[:, 0] > x[:, 1]).float())
        self.optimizer.zero_grad()
        loss.backward()  # gradients are averaged over the ranks here: where a death is noticed
        self.optimizer.step()
        self.step += 1
        return float(loss.item())

    def digest(self) -> str:
        digest = hashlib.sha256()
        for parameter in self.model.parameters():
            digest.update(parameter.detach().numpy().tobytes())
        return digest.hexdigest()[:16]


def go_on(error: Exception) -> None:
    """Without those who died: the survivors agree who is left."""
    print(f"rank {RANK}: {str(error).splitlines()[0]}", flush=True)
    tmd.deactivate_ranks(timeout_s=60)


def until_all_are_there() -> None:
    while lost := [rank for rank in range(WORLD) if rank not in tmd.active_ranks()]:
        tmd.activate_ranks(lost, timeout_s=120)


def train(args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    if args.generation == 0:
        dist.init_process_group(tmd.BACKEND)
    else:
        tmd.join(args.contact.read_text(), RANK, WORLD)
    args.contact.write_text(tmd.contact())
    deaths = [int(step) for rank, step in (kill.split(":") for kill in args.kill) if int(rank) == RANK]
    training = Training()
    ddp: torch.nn.Module | None = None
    while training.step < args.steps:
        try:
            if ddp is None:  # at the start, and after every change of ranks
                until_all_are_there()
                args.contact.write_text(tmd.contact())
                training.agree()
                ddp = DistributedDataParallel(training.model)
            if args.generation < len(deaths) and training.step == deaths[args.generation]:
                os.kill(os.getpid(), signal.SIGKILL)
            loss = training.learn(ddp, args.batch)
            if RANK == 0 and training.step % 10 == 0:
                print(f"step {training.step:4d}  loss {loss:.4f}", flush=True)
        except dist.DistBackendError as error:
            ddp = None
            go_on(error)
    dist.barrier()
    if RANK == 0:
        print(f"{args.steps} steps, weights {training.digest()}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    arguments = parse()
    if arguments.contact is None:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
        sys.exit(keep())
    train(arguments)
