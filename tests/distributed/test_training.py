"""Training over the backend: DDP and FSDP2 follow gloo's losses."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from worlds import run_world, torchrun

EXAMPLE = Path(__file__).parents[2] / "examples" / "ddp_train.py"


def _no_gloo(*_args: object, **_kwargs: object) -> None:
    raise AssertionError("a gloo process group was made")


@dataclass(frozen=True)
class Size:
    width: int
    layers: int
    vocabulary: int
    steps: int
    bucket_mb: float


SMALL = Size(width=64, layers=2, vocabulary=128, steps=20, bucket_mb=0.2)
FULL = Size(width=512, layers=7, vocabulary=3072, steps=50, bucket_mb=25)  # 25 million parameters
TOKENS = 32


class Transformer(torch.nn.Module):
    """A language model: each token is to be followed by the next one."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.tokens = torch.nn.Embedding(size.vocabulary, size.width)
        self.places = torch.nn.Parameter(torch.randn(TOKENS, size.width) * 0.02)
        self.layers = torch.nn.ModuleList(
            torch.nn.TransformerEncoderLayer(
                size.width, size.width // 32, 4 * size.width, dropout=0, batch_first=True, norm_first=True
            )
            for _ in range(size.layers)
        )
        self.head = torch.nn.Linear(size.width, size.vocabulary)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        causal = torch.nn.Transformer.generate_square_subsequent_mask(TOKENS)
        x = self.tokens(tokens) + self.places
        for layer in self.layers:
            x = layer(x, src_mask=causal, is_causal=True)
        return self.head(x)


def sharded(model: Transformer, world: int, backend: str) -> torch.nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (world,))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    whole = fully_shard(model, mesh=mesh)
    if backend == "gloo":
        for module in (*model.layers, whole):
            module.set_force_sum_reduction_for_comms(True)  # gloo has no AVG
    return whole


def train(rank: int, world: int, kind: str, backend: str, size: Size) -> list[float]:
    from torch.nn.parallel import DistributedDataParallel

    if backend == "mooncake":
        import torch.distributed.distributed_c10d as c10d

        c10d.ProcessGroupGloo = _no_gloo  # type: ignore[assignment, misc]
    torch.manual_seed(0)
    model: torch.nn.Module = Transformer(size)
    if size == FULL:
        assert 24e6 < sum(p.numel() for p in model.parameters()) < 27e6
    if kind == "ddp":
        model = DistributedDataParallel(model, bucket_cap_mb=size.bucket_mb)
    else:
        assert isinstance(model, Transformer)
        model = sharded(model, world, backend)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    generator = torch.Generator().manual_seed(rank)
    batches = [torch.randint(size.vocabulary, (1, TOKENS + 1), generator=generator) for _ in range(4)]
    losses = []
    for step in range(size.steps):
        tokens = batches[step % len(batches)]
        loss = torch.nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(total.item() / world)
    return losses


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
@pytest.mark.parametrize(
    ("world", "size"),
    [
        pytest.param(3, SMALL, id="3"),
        pytest.param(2, FULL, id="2, 25M parameters", marks=pytest.mark.slow),
        pytest.param(4, FULL, id="4, 25M parameters", marks=pytest.mark.slow),
    ],
)
def test_losses_follow_gloo(kind: str, world: int, size: Size) -> None:
    reference = run_world(world, train, kind, "gloo", size, backend="gloo", timeout_s=300, limit_s=550)
    ours = run_world(world, train, kind, "mooncake", size, timeout_s=300, limit_s=550)
    assert reference[0][-1] < reference[0][0] - 0.2
    for rank in range(world):
        assert ours[rank] == pytest.approx(reference[0], rel=1e-4)


def test_the_example_runs_under_torchrun() -> None:
    assert "step   10" in torchrun(EXAMPLE, "--steps=10", world=2)
