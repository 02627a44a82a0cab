"""An RL-style loop: FSDP2 trainers publish every step, inference workers of two layouts follow. See README.md."""

from __future__ import annotations

import argparse
import multiprocessing as mp
import os
import tempfile
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

import torch_mooncake as tm
from torch_mooncake import weights

HIDDEN, INNER, VOCABULARY, LAYERS = 64, 192, 500, 4
TRAINERS = 2


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, HIDDEN)
        nn.init.normal_(self.embed.weight, std=0.1)
        self.gate = nn.ModuleList(nn.Linear(HIDDEN, INNER, bias=False) for _ in range(LAYERS))
        self.up = nn.ModuleList(nn.Linear(HIDDEN, INNER, bias=False) for _ in range(LAYERS))
        self.down = nn.ModuleList(nn.Linear(INNER, HIDDEN, bias=False) for _ in range(LAYERS))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for gate, up, down in zip(self.gate, self.up, self.down, strict=True):
            x = x + down(torch.relu(gate(x)) * up(x))
        return x @ self.embed.weight.t()


def trainer(rank: int, store: str, steps: int, go: Any, truth: Any) -> None:
    """Publishes at each step, and sends what the weights are to whoever checks them."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=TRAINERS)
    torch.manual_seed(0)
    model = Model()
    fully_shard(model, mesh=init_device_mesh("cpu", (TRAINERS,)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tm.init()
    with weights.Publisher("policy", model, rank=rank, world=TRAINERS) as publisher:
        for step in range(1, steps + 1):
            tokens = torch.randint(VOCABULARY, (4, 16))
            loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.roll(1).flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            whole = {name: t.full_tensor() for name, t in model.state_dict().items() if isinstance(t, DTensor)}
            published = publisher.publish(step=step)
            if rank == 0:
                truth.put({name: tensor.detach().numpy().copy() for name, tensor in whole.items()})
                print(f"step {step}: loss {loss.item():.3f}, published in {published.seconds * 1e3:.1f} ms", flush=True)
            go.wait()
    dist.destroy_process_group()
    tm.close()


def worker(role: str, at: int, tp: int, steps: int, requests: Any, answers: Any) -> None:
    """A rank of an engine of ``tp`` ranks that fuses gate and up. Its weights are noise before each update."""
    torch.set_num_threads(1)
    tm.init()
    mine = {"embed": torch.empty(VOCABULARY, HIDDEN)}
    for i in range(LAYERS):
        mine[f"{i}.gate_up"] = torch.empty(2 * INNER // tp, HIDDEN)
        mine[f"{i}.down"] = torch.empty(HIDDEN, INNER // tp)
    fused = [weights.Part(f"{n}.{{i}}.weight", (INNER, -1), [weights.Split("tp", 0)]) for n in ("gate", "up")]
    rules = [
        weights.Rule("embed", [weights.Part("embed.weight")]),
        weights.Rule("{i}.gate_up", fused),
        weights.Rule("{i}.down", [weights.Part("down.{i}.weight", split=[weights.Split("tp", 1)])]),
    ]
    layout = weights.Layout(rules, {"tp": (at, tp)})
    with weights.Subscriber("policy", mine, layout=layout) as subscriber:
        answers.put((role, 0, {}, 0.0))
        for _ in range(steps):
            requests.get()
            for tensor in mine.values():
                tensor.normal_()
            update = subscriber.update(timeout=120)
            arrays = {name: tensor.numpy().copy() for name, tensor in mine.items()}
            answers.put((role, update.step, arrays, update.seconds))
        requests.get()
    tm.close()


def differences(truth: dict[str, Any], role: str, held: dict[str, Any]) -> list[str]:
    """Names of the worker's tensors that are not bit for bit what the trainer's say."""
    _, at, tp = role.split("-")
    whole = {name: torch.from_numpy(array) for name, array in truth.items()}
    expected = {"embed": whole["embed.weight"]}
    for i in range(LAYERS):
        gate, up = (whole[f"{n}.{i}.weight"].chunk(int(tp))[int(at)] for n in ("gate", "up"))
        expected[f"{i}.gate_up"] = torch.cat([gate, up])
        expected[f"{i}.down"] = whole[f"down.{i}.weight"].chunk(int(tp), dim=1)[int(at)]
    return [name for name, tensor in expected.items() if not torch.equal(torch.from_numpy(held[name]), tensor)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=5)
    args = parser.parse_args()
    context = mp.get_context("spawn")
    roles = [("worker-0-1", 0, 1), ("worker-0-2", 0, 2), ("worker-1-2", 1, 2)]
    with tempfile.TemporaryDirectory(prefix="tm-", dir="/tmp") as folder:
        os.environ.setdefault("TM_RUNTIME_DIR", folder)
        os.environ.setdefault("TM_POOL", "weight-broadcast")
        os.environ.setdefault("TM_MEMORY", "64MiB")
        os.environ.setdefault("TM_LINGER_S", "0")
        tm.init()
        truth, answers, go = context.Queue(), context.Queue(), context.Barrier(TRAINERS + 1)
        requests = {role: context.Queue() for role, _, _ in roles}
        processes = [
            context.Process(target=worker, args=(role, at, tp, args.steps, requests[role], answers), daemon=True)
            for role, at, tp in roles
        ]
        for process in processes:
            process.start()
        for _ in roles:
            answers.get(timeout=120)  # all are there before the first version
        store = os.path.join(folder, "store")
        trainers = [
            context.Process(target=trainer, args=(rank, store, args.steps, go, truth), daemon=True)
            for rank in range(TRAINERS)
        ]
        for process in trainers:
            process.start()
        wrong = 0
        for _ in range(args.steps):
            for queue in requests.values():
                queue.put("update")
            expected = truth.get(timeout=120)
            for _ in roles:
                role, step, held, seconds = answers.get(timeout=120)
                bad = differences(expected, role, held)
                wrong += len(bad)
                verdict = f"differs in {', '.join(bad[:5])}" if bad else "bit-equal"
                print(f"  {role}: step {step}, {seconds * 1e3:.1f} ms, {verdict}", flush=True)
            go.wait()
        for queue in requests.values():
            queue.put("end")
        for process in (*trainers, *processes):
            process.join(60)
        ended = all(process.exitcode == 0 for process in (*trainers, *processes))
        tm.close()
    if wrong or not ended:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
