"""What has changed in the place of the version: rows of weights.py. Between two versions of a bfloat16 model 2 % of the
elements are changed, anywhere."""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from harness import MiB, Row, Table
from raw import Raw

ROOT = Path(__file__).resolve().parents[1]
SHARE = 0.02
SETS = 3  # of memory, taken in turn


def pair(nbytes: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A model, and the same after a step."""
    generator = torch.Generator().manual_seed(seed)
    base = torch.empty(nbytes // 2, dtype=torch.int16).random_(generator=generator)
    fresh = base.clone()
    chosen = torch.rand(base.shape, generator=generator) < SHARE
    fresh[chosen] ^= 1
    return base.view(torch.bfloat16), fresh.view(torch.bfloat16)


def operators(table: Table, quick: bool) -> None:
    """GB/s are of the model's bytes, for encoding and applying together; each round measures the bound, too."""
    from torch_mooncake import ops

    nbytes = (64 if quick else 256) * MiB
    raw = Raw(2 * nbytes)
    pairs = [pair(nbytes, seed) for seed in range(SETS)]
    blobs = [ops.delta_encode(*both) for both in pairs]
    targets = [base.clone() for base, _ in pairs]
    speeds: dict[str, list[float]] = {"encode": [], "apply": [], "both": [], "bound": []}
    for i in range((3 if quick else 9) + 1):
        bound = max(raw.copies(nbytes, torch.get_num_threads(), 1).values(), key=statistics.median)
        began = time.perf_counter()
        ops.delta_encode(*pairs[i % SETS])
        encoded = time.perf_counter()
        blob = blobs[(i + 1) % SETS]
        assert blob is not None
        ops.delta_apply(blob, targets[(i + 1) % SETS])
        applied = time.perf_counter()
        found = {"encode": encoded - began, "apply": applied - encoded, "both": applied - began}
        speeds["bound"].append(statistics.median(bound))
        for name, seconds in found.items():
            speeds[name].append(nbytes / seconds / 1e9)
    assert all(
        torch.equal(target.view(torch.int16), fresh.view(torch.int16))
        for target, (_, fresh) in zip(targets, pairs, strict=True)
    )
    bound = speeds.pop("bound")[1:]
    for name, limit in (("encode", None), ("apply", None), ("both", 0.5)):
        called = "encode + apply" if name == "both" else name
        table.measured(f"delta, {called}", speeds[name][1:], "GB/s", against="copy bound", baseline=bound,
                       ratio_limit=limit)  # fmt: skip
    shares = [blob.numel() / nbytes for blob in blobs if blob is not None]
    table.measured("delta at 2 % changed, of the bytes", shares, "", limit=0.035, at_least=False)


def one_host(table: Table, quick: bool) -> None:
    """What "auto" sends where nothing crosses a host."""
    from torch_mooncake.weights import Publisher, Subscriber

    base, fresh = pair((16 if quick else 64) * MiB, 0)
    trainer, worker = {"w": base.clone()}, {"w": torch.zeros_like(base)}
    found = []
    with Publisher("auto", trainer) as publisher, Subscriber("auto", worker) as subscriber:
        for step in range(3):
            publisher.publish(step=step)
            found.append(float(subscriber.update(timeout=60).delta_nbytes))
            trainer["w"].copy_(fresh if step % 2 == 0 else base)
    table.measured("bytes of deltas on one host, auto", found, "", limit=0.0, at_least=False)


def deltas(quick: bool) -> list[Row]:
    import torch_mooncake as tm

    table = Table("deltas: 2 % of a bfloat16 model changed")
    operators(table, quick)
    with tempfile.TemporaryDirectory(prefix="tm-", dir="/tmp") as folder:
        os.environ.update(TM_RUNTIME_DIR=folder, TM_POOL="weights", TM_MEMORY="64MiB", TM_LINGER_S="0")
        tm.init()
        one_host(table, quick)
        tm.close()
    return table.rows


SET_UP = """
import time, torch, torch_mooncake as tm
from torch_mooncake import weights
torch.set_num_threads(1)
tm.init()
engine = tm.Engine(f"tcp://{address}:0", token="t", transports=("tcp",), host_id=host, name=host)
number = int(host.removeprefix("host"))
mine = {f"w{i}": torch.zeros((mib << 20) // 32, dtype=torch.bfloat16) for i in range(16)}
place = weights.Place(host)
if number == 0:
    whole = weights.Publisher("p", mine, engine=engine, place=place)
else:
    whole = weights.Subscriber("p", mine, engine=engine, place=place, flip="swap", patience_s=60)
"""
ROUND = """
if number == 0:
    generator = torch.Generator().manual_seed(step)
    for tensor in mine.values():
        tensor.view(torch.int16)[torch.rand(tensor.shape, generator=generator) < share] ^= 1
    whole.publish(step=step, mode=mode)
    at, delta = time.monotonic(), 0
else:
    update = whole.update(timeout=200)
    at, delta = time.monotonic(), update.delta_nbytes
result = at, delta, [int(tensor.view(torch.int16).sum(dtype=torch.int64)) for tensor in mine.values()]
"""


def between_hosts(table: Table, quick: bool) -> None:
    """1 trainer to 7, as weights.py has it in full: the same updates, in full and as what has changed, in turn."""
    from shaped_hosts import ShapedHosts

    import torch_mooncake as tm

    mib, n = (64, 1) if quick else (512, 3)
    with tempfile.TemporaryDirectory(prefix="tm-", dir="/tmp") as folder:
        os.environ.update(TM_RUNTIME_DIR=folder, TM_POOL="weights", TM_MEMORY="64MiB", TM_LINGER_S="0")
        os.environ["PYTHONPATH"] = str(ROOT)
        tm.init()
        hosts = ShapedHosts(8, 1000, dict(os.environ))
        samples: dict[str, list[float]] = {"full": [], "auto": []}
        shares: list[float] = []
        try:
            hosts.run(SET_UP, mib=mib)
            for step in range(2 * n + 2):
                mode = ("full", "auto")[step % 2]
                ended: list[Any] = hosts.run(ROUND, step=step, mode=mode, share=SHARE)
                assert all(sums == ended[0][2] for _, _, sums in ended)
                samples[mode].append(max(at for at, _, _ in ended[1:]) - ended[0][0])
                if mode == "auto":
                    shares.append(max(delta for _, delta, _ in ended[1:]) / (mib * MiB))
        finally:
            hosts.close()
            tm.close()
    table.measured(
        f"1 trainer to 7, {mib} MiB, 2 % changed", samples["auto"][1:], "s", against="in full",
        baseline=samples["full"][1:], ratio_limit=0.125, at_least=False,
    )  # fmt: skip
    table.measured("  received by each, of the bytes", shares[1:], "", limit=0.035, at_least=False)
