"""Hidden states from an inference engine to the trainer of a draft model, by the calls that TorchSpec makes of
Mooncake's store, on mooncake_compat.

    pip install ./integrations/mooncake_compat        # or PYTHONPATH=integrations/mooncake_compat:.
    python examples/torchspec_hidden_states.py [--samples 16]

The engine is a process of its own. A sample is three objects ("_hs", "_ids", "_tgt"), pinned until the trainer,
which has them in its own registered memory, removes them. Exit status 1 if a sample came changed, or is there
afterwards.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
from typing import Any

import torch
from mooncake.store import MooncakeDistributedStore, ReplicateConfig

TOKENS, HIDDEN, TARGET = 128, 512, 1024
SHAPES = {"_hs": (TOKENS, HIDDEN), "_ids": (TOKENS,), "_tgt": (TOKENS, TARGET)}
WAIT_S = 60.0


def connect() -> Any:
    store = MooncakeDistributedStore()
    code = store.setup(
        local_hostname="127.0.0.1",
        metadata_server="P2PHANDSHAKE",
        global_segment_size=256 << 20,
        local_buffer_size=16 << 20,
        protocol="tcp",
        rdma_devices="",
        master_server_addr="127.0.0.1:50051",
    )
    if code != 0:
        raise SystemExit(f"the store cannot be set up: {code}")
    return store


def sample(number: int) -> dict[str, torch.Tensor]:
    """What an engine has computed: the trainer of this example can compute it, too, and compare."""
    generator = torch.Generator().manual_seed(number)
    made = {name: torch.randn(shape, generator=generator).bfloat16() for name, shape in SHAPES.items()}
    made["_ids"] = torch.randint(0, 32000, (TOKENS,), generator=generator)
    return made


def like() -> dict[str, torch.Tensor]:
    return {name: torch.empty_like(tensor) for name, tensor in sample(0).items()}


def register(store: Any, tensors: dict[str, torch.Tensor]) -> None:
    for tensor in tensors.values():
        if store.register_buffer(tensor.data_ptr(), tensor.nbytes) != 0:
            raise SystemExit("memory cannot be registered")


def where(tensors: dict[str, torch.Tensor]) -> tuple[list[int], list[int]]:
    return [tensor.data_ptr() for tensor in tensors.values()], [tensor.nbytes for tensor in tensors.values()]


def engine(samples: int) -> None:
    store, memory = connect(), like()
    register(store, memory)
    pinned = ReplicateConfig()
    pinned.with_hard_pin = True
    for number in range(samples):
        for name, tensor in sample(number).items():
            memory[name].copy_(tensor)
        codes = store.batch_put_from([f"sample-{number}{name}" for name in memory], *where(memory), pinned)
        if any(codes):
            raise SystemExit(f"sample {number} was not stored: {codes}")
    time.sleep(0.1)
    store.close()


def train(samples: int) -> int:
    store, memory = connect(), like()
    register(store, memory)
    changed = 0
    for number in range(samples):
        keys = [f"sample-{number}{name}" for name in memory]
        until = time.monotonic() + WAIT_S
        while store.batch_is_exist(keys) != [1] * len(keys):
            if time.monotonic() > until:
                raise SystemExit(f"sample {number} did not come in {WAIT_S:.0f} s")
            time.sleep(0.002)
        sizes = store.batch_get_into(keys, *where(memory))
        expected = sample(number)
        whole = sizes == [tensor.nbytes for tensor in expected.values()]
        changed += not whole or not all(torch.equal(memory[name], tensor) for name, tensor in expected.items())
        store.batch_remove(keys, force=True)
        changed += any(code != 0 for code in store.batch_is_exist(keys))
    print(f"{samples} samples of {sum(t.nbytes for t in memory.values()) >> 10} KiB, {changed} changed")
    store.close()
    return 1 if changed else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=16)
    samples = parser.parse_args().samples
    process = multiprocessing.get_context("spawn").Process(target=engine, args=(samples,))
    process.start()
    result = train(samples)
    process.join()
    return result or process.exitcode or 0


if __name__ == "__main__":
    sys.exit(main())
