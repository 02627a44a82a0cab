"""CUDA tensors as regions, on a real device. Run by ``make test-gpu``; the same over a fake driver: cuda_test.cpp."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import torch_mooncake as tm

pytestmark = pytest.mark.gpu

SIZES = [1, 7, 8, 511, 512, 65535, 65536, 65537, (5 << 20) + 3]


@pytest.fixture
def engine() -> Iterator[tm.Engine]:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    with tm.Engine(token="t") as engine:
        yield engine


def noise(nbytes: int, device: str = "cuda") -> torch.Tensor:
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, device=device)


@pytest.mark.parametrize("there", ["cpu", "cuda"])
@pytest.mark.parametrize("here", ["cpu", "cuda"])
def test_sizes_in_one_process(engine: tm.Engine, here: str, there: str) -> None:
    with tm.Engine(token="t") as other:
        source, target = noise(6 << 20, here), torch.zeros(6 << 20, dtype=torch.uint8, device=there)
        local, region = engine.register(source), other.register(target)
        remote = engine.connect(other.addresses[0]).open(region.descriptor())
        assert region.kind == ("cuda" if there == "cuda" else "host")
        torch.cuda.synchronize()
        for n in SIZES:
            engine.write(local[3 : 3 + n], remote[100 : 100 + n]).wait()
            assert torch.equal(target[100 : 100 + n].cpu(), source[3 : 3 + n].cpu())
            back = torch.zeros(n, dtype=torch.uint8, device=here)
            engine.read(engine.register(back), remote[100 : 100 + n]).wait()
            assert torch.equal(back.cpu(), source[3 : 3 + n].cpu())


def test_many_small_tensors_of_one_allocation(engine: tm.Engine) -> None:
    with tm.Engine(token="t") as other:
        connected = engine.connect(other.addresses[0])
        tensors = [noise(1000 + i) for i in range(64)]  # torch cuts them from one cudaMalloc
        torch.cuda.synchronize()
        for tensor in tensors:
            back = torch.zeros_like(tensor, device="cpu")
            remote = connected.open(other.register(tensor).descriptor())
            engine.read(engine.register(back), remote).wait()
            assert torch.equal(back, tensor.cpu())


@pytest.mark.parametrize("transports", [["local", "shm", "tcp"], ["tcp"]], ids=["shm", "stream"])
def test_memory_of_another_process(engine: tm.Engine, child: Any, transports: list[str]) -> None:
    other = child()
    address, descriptor = other(
        "import torch, torch_mooncake as tm\n"
        "engine = tm.Engine(transports=transports, token='t')\n"
        "there = torch.arange(3_000_000, dtype=torch.int32, device='cuda')\n"
        "torch.cuda.synchronize()\n"
        "region = engine.register(there)\n"
        "result = [engine.addresses[0], region.descriptor().hex()]",
        transports=transports,
    )
    remote = engine.connect(address).open(bytes.fromhex(descriptor))
    for device in ("cpu", "cuda"):
        here = torch.zeros(3_000_000, dtype=torch.int32, device=device)
        torch.cuda.synchronize()
        region = engine.register(here)
        engine.read(region, remote).wait()
        assert torch.equal(here.cpu(), torch.arange(3_000_000, dtype=torch.int32))
    engine.write(region[:1000], remote[4000:5000]).wait()
    assert other("result = there[1000:1250].tolist()") == list(range(250))


def test_expandable_segments() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    code = (
        "import torch, torch_mooncake as tm\n"
        "a = torch.arange(10_000_000, device='cuda'); b = torch.arange(7_000_000, device='cuda')\n"
        "torch.cuda.synchronize(); engine = tm.Engine(); other = tm.Engine()\n"
        "peer = engine.connect(other.addresses[0])\n"
        "for t in (a, b):\n"
        "    here = torch.zeros_like(t, device='cpu')\n"
        "    engine.read(engine.register(here), peer.open(other.register(t).descriptor())).wait()\n"
        "    assert torch.equal(here, t.cpu())\n"
        "print('right')"
    )
    env = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120)
    assert done.stdout == "right\n", done.stderr


def test_files_to_and_from_the_device(engine: tm.Engine, tmp_path: Path) -> None:
    data = noise(9_000_001)
    torch.cuda.synchronize()
    region = engine.register(data)
    with engine.open_file(tmp_path / "data", nbytes=9_000_001, writable=True, create=True) as file:
        engine.write(region, file).wait()
        assert (tmp_path / "data").read_bytes() == data.cpu().numpy().tobytes()
        back = torch.zeros_like(data)
        torch.cuda.synchronize()
        engine.read(engine.register(back), file).wait()
        assert torch.equal(back, data)


def test_ops_keep_their_place_on_a_stream(engine: tm.Engine) -> None:
    with tm.Engine(token="t") as other:
        source, target = torch.zeros(1 << 22, device="cuda"), torch.zeros(1 << 22, device="cuda")
        seen = torch.zeros(20, device="cuda")
        torch.cuda.synchronize()
        local, remote_region = engine.register(source), other.register(target)
        remote = engine.connect(other.addresses[0]).open(remote_region.descriptor())
        stream = torch.cuda.Stream()
        ops = []
        with torch.cuda.stream(stream):
            for i in range(20):
                torch.cuda._sleep(1_000_000)
                source.fill_(i)
                ops.append(engine.write(local, remote, stream=stream))
                seen[i] = target.sum() / target.numel()
        for op in ops:
            op.wait(30)
        stream.synchronize()
        assert seen.tolist() == list(range(20))


def test_a_process_without_cuda_tensors_makes_no_context() -> None:
    code = (
        "import ctypes, numpy as np, torch_mooncake as tm\n"
        "engine = tm.Engine(); other = tm.Engine()\n"
        "remote = engine.connect(other.addresses[0]).open(other.register(np.zeros(100, np.uint8)).descriptor())\n"
        "engine.write(engine.register(np.ones(100, np.uint8)), remote).wait()\n"
        "print('libcuda' in open('/proc/self/maps').read())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout == "False\n", done.stderr
