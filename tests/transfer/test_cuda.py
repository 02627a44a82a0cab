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


OWNER = (
    "import torch, torch_mooncake as tm\n"
    "engine = tm.Engine(transports=transports, token='t')\n"
    "there = torch.arange(count, dtype=torch.int32, device='cuda')\n"
    "torch.cuda.synchronize()\n"
    "region = engine.register(there)\n"
    "result = [engine.addresses[0], region.descriptor().hex()]"
)


def use_cuda() -> None:
    """CUDA memory of others is mapped by processes that use CUDA already."""
    torch.zeros(1, device="cuda")


@pytest.mark.parametrize("expandable", [False, True])
@pytest.mark.parametrize("transports", [["local", "shm", "tcp"], ["tcp"]], ids=["shm", "stream"])
def test_memory_of_another_process(engine: tm.Engine, child: Any, transports: list[str], expandable: bool) -> None:
    use_cuda()
    # 40 MB: of two or more handles where segments are expandable.
    other = child({"PYTORCH_CUDA_ALLOC_CONF": f"expandable_segments:{expandable}"})
    address, descriptor = other(OWNER, transports=transports, count=10_000_000)
    remote = engine.connect(address).open(bytes.fromhex(descriptor))
    expected = torch.arange(10_000_000, dtype=torch.int32)
    for device in ("cpu", "cuda"):
        here = torch.zeros(10_000_000, dtype=torch.int32, device=device)
        torch.cuda.synchronize()
        region = engine.register(here)
        op = engine.read(region, remote)
        op.wait()
        assert op.transport == ("cuda_ipc" if "shm" in transports else "staged"), engine.explain(remote.peer)
        assert torch.equal(here.cpu(), expected)
        here.copy_(expected.flip(0))
        torch.cuda.synchronize()
        engine.write(region[400:4400], remote[20_000_000:20_004_000]).wait()
        wanted = expected.flip(0)[100:1100].tolist()
        assert other("result = there[5_000_000:5_001_000].tolist()") == wanted
        assert other("result = there[4_999_999].item(), there[5_001_000].item()") == [4_999_999, 5_001_000]
        other("there[5_000_000:5_001_000] = torch.arange(5_000_000, 5_001_000, dtype=torch.int32)")
        other("torch.cuda.synchronize()")


def test_small_tensors_of_one_allocation_of_another_process(engine: tm.Engine, child: Any) -> None:
    use_cuda()
    other = child()
    address, descriptors = other(
        "import torch, torch_mooncake as tm\n"
        "engine = tm.Engine(token='t')\n"
        "tensors = [torch.full((1000 + i,), i, dtype=torch.uint8, device='cuda') for i in range(64)]\n"
        "torch.cuda.synchronize()\n"
        "regions = [engine.register(t) for t in tensors]\n"
        "result = [engine.addresses[0], [r.descriptor().hex() for r in regions]]"
    )
    connected = engine.connect(address)
    for i, descriptor in enumerate(descriptors):
        remote = connected.open(bytes.fromhex(descriptor))
        assert remote.transport == "cuda_ipc"
        back = torch.zeros(1000 + i, dtype=torch.uint8, device="cuda")
        torch.cuda.synchronize()
        engine.read(engine.register(back), remote).wait()
        assert torch.equal(back.cpu(), torch.full((1000 + i,), i, dtype=torch.uint8))


def test_memory_that_is_freed_and_given_out_again(engine: tm.Engine, child: Any) -> None:
    use_cuda()
    other = child()
    for round_number in range(5):
        address, descriptor = other(
            ("" if round_number else "import torch, torch_mooncake as tm; engine = tm.Engine(token='t')\n")
            + "there = torch.full((8 << 20,), number, dtype=torch.uint8, device='cuda')\n"
            "torch.cuda.synchronize()\n"
            "region = engine.register(there)\n"
            "result = [engine.addresses[0], region.descriptor().hex()]",
            number=round_number,
        )
        remote = engine.connect(address).open(bytes.fromhex(descriptor))
        back = torch.zeros(8 << 20, dtype=torch.uint8, device="cuda")
        torch.cuda.synchronize()
        region = engine.register(back)
        op = engine.read(region, remote)
        op.wait()
        assert op.transport == "cuda_ipc"
        assert back.unique().tolist() == [round_number]
        # The peer has it mapped: it is unmapped before deregister() returns, and cudaFree may have it.
        other("engine.deregister(region); del region, there; torch.cuda.empty_cache()")
        with pytest.raises(tm.KeyNotFound):
            engine.read(region, remote).wait()


def test_an_owner_that_dies_in_the_middle(engine: tm.Engine, child: Any) -> None:
    use_cuda()
    other = child()
    address, descriptor = other(OWNER, transports=["shm"], count=256 << 20)
    remote = engine.connect(address).open(bytes.fromhex(descriptor))
    here = torch.zeros(256 << 20, dtype=torch.int32, device="cpu")
    region = engine.register(here)
    ops = [engine.read(region, remote) for _ in range(8)]
    other.kill()
    outcomes = []
    for op in ops:
        try:
            op.wait(30)
            outcomes.append("done")
        except tm.PeerLost:
            outcomes.append("lost")
    assert "lost" in outcomes
    here.zero_()
    torch.cuda.synchronize()
    assert not here.any(), "bytes landed after the op's end"
    engine.deregister(region)


def test_a_stream_between_processes(engine: tm.Engine, child: Any) -> None:
    use_cuda()
    other = child()
    address, descriptor = other(OWNER, transports=["local", "shm", "tcp"], count=1 << 20)
    remote = engine.connect(address).open(bytes.fromhex(descriptor))
    source = torch.zeros(1 << 20, dtype=torch.int32, device="cuda")
    torch.cuda.synchronize()
    region = engine.register(source)
    stream = torch.cuda.Stream()
    for i in range(10):
        with torch.cuda.stream(stream):
            torch.cuda._sleep(5_000_000)
            source.fill_(i)
            op = engine.write(region, remote, stream=stream)
            source.fill_(-1)  # after the op has read it
        op.wait(30)
        assert op.transport == "cuda_ipc"
        assert other("result = there.unique().tolist()") == [i]
    stream.synchronize()


def test_a_process_without_cuda_reads_cuda_memory_of_another_through_its_owner(child: Any) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    owner, reader = child(), child()
    address, descriptor = owner(OWNER, transports=["local", "shm", "tcp"], count=1000)
    result = reader(
        "import numpy as np, torch_mooncake as tm\n"
        "engine = tm.Engine(token='t'); here = np.zeros(1000, np.int32)\n"
        "remote = engine.connect(address).open(bytes.fromhex(descriptor))\n"
        "op = engine.read(engine.register(here), remote); op.wait()\n"
        "result = [op.transport, 'libcuda' in open('/proc/self/maps').read(), here.tolist()]",
        address=address,
        descriptor=descriptor,
    )
    assert result == ["staged", False, list(range(1000))]


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
    """By GPUDirect Storage where libcufile is and takes the file, by pinned memory elsewhere; explain() says which."""
    data = noise(9_000_001)
    torch.cuda.synchronize()
    region = engine.register(data)
    with engine.open_file(tmp_path / "data", nbytes=9_000_001, writable=True, create=True) as file:
        op = engine.write(region, file)
        op.wait()
        assert op.transport == "file"
        assert (tmp_path / "data").read_bytes() == data.cpu().numpy().tobytes()
        back = torch.zeros_like(data)
        torch.cuda.synchronize()
        target = engine.register(back)
        engine.read(target, file).wait()
        assert torch.equal(back, data)
        for at_file, at_device, n in [(0, 512, 4096), (1, 0, 70_000), (4096, 4096, 4097), (8_999_999, 7, 2)]:
            back.zero_()
            torch.cuda.synchronize()
            engine.read(target[at_device : at_device + n], file[at_file : at_file + n]).wait()
            assert torch.equal(back[at_device : at_device + n], data[at_file : at_file + n])
            assert not back[:at_device].any()
            assert not back[at_device + n :].any()
        paths = {path["transport"]: path for path in engine.explain(file.peer)["paths"]}
        assert "not opened" not in paths["file"]["facts"]["GPUDirect Storage"]


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
