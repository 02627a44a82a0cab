"""Files as regions: of this process, and of another one by way of its engine."""

from __future__ import annotations

import gc
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from processes import eventually

import torch_mooncake as tm
from torch_mooncake import _core

SIZES = [0, 1, 511, 512, 513, 4095, 4096, 4097, 65535, 65536, 65537, (1 << 20) + 1]


@pytest.fixture(params=["io_uring", "threads"])
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[tm.Engine]:
    if request.param == "io_uring" and _core.file_io() != "io_uring":
        pytest.skip(f"this machine has no io_uring: {_core.file_io()}")
    _core.set_failpoints("transfer.uring=error" if request.param == "threads" else "")
    with tm.Engine() as engine:
        yield engine
    _core.set_failpoints("")


def noise(nbytes: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)


@pytest.fixture(params=["disk", "memory"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    if request.param == "disk":
        yield tmp_path
        return
    path = Path(f"/dev/shm/file-test-{os.getpid()}")
    path.mkdir()
    yield path
    for file in path.iterdir():
        file.unlink()
    path.rmdir()


def test_sizes_and_alignments(engine: tm.Engine, folder: Path) -> None:
    data = noise(SIZES[-1] + 64)
    region = engine.register(data)
    with engine.open_file(folder / "data", nbytes=3 << 20, writable=True, create=True) as file:
        assert file.transport == "file"
        assert file.nbytes == 3 << 20
        expected = np.zeros(3 << 20, np.uint8)
        for n in SIZES:
            for ours, theirs in ((0, 0), (1, 7), (0, 511), (13, 4096)):
                data[:] = noise(len(data), n + ours)
                op = engine.write(region[ours : ours + n], file[theirs : theirs + n])
                op.wait()
                assert op.transport == "file" or n == 0
                expected[theirs : theirs + n] = data[ours : ours + n]
                np.testing.assert_array_equal(np.fromfile(folder / "data", np.uint8), expected)
                back = np.zeros(n + 2, np.uint8)
                target = engine.register(back)
                engine.read(target[1 : n + 1], file[theirs : theirs + n]).wait()
                np.testing.assert_array_equal(back[1:-1], expected[theirs : theirs + n])
                assert back[0] == back[-1] == 0
                engine.deregister(target)


def test_tensors_pages_and_sparse_offsets(engine: tm.Engine, tmp_path: Path) -> None:
    cache = torch.arange(256 * 1024, dtype=torch.int32).view(256, 1024)  # pages of 4 KiB
    region = engine.register(cache)
    far = 5 << 30
    with engine.open_file(tmp_path / "sparse", nbytes=far + (1 << 20), writable=True, create=True) as file:
        pages = torch.randperm(256)
        there = torch.arange(256) * 4096 + far
        engine.write(region, file, local_offsets=pages * 4096, remote_offsets=there, nbytes=4096).wait()
        back = torch.zeros_like(cache)
        engine.read(engine.register(back), file[far : far + (1 << 20)]).wait()
        assert torch.equal(back, cache[pages])
        engine.read(engine.register(back), file[far - (1 << 20) : far]).wait()
        assert not back.any()
    assert os.stat(tmp_path / "sparse").st_blocks * 512 < 64 << 20


def test_file_objects_and_rights(engine: tm.Engine, folder: Path) -> None:
    path = folder / "data"
    content = noise(10_000)
    with open(path, "wb") as out:
        content.tofile(out)
    back = np.zeros(10_000, np.uint8)
    region = engine.register(back)
    with open(path, "rb") as opened, engine.open_file(opened) as file:
        engine.read(region, file).wait()
        np.testing.assert_array_equal(back, content)
        with pytest.raises(tm.InvalidArgument, match="not writable"):
            engine.write(region, file)
        with pytest.raises(tm.OutOfBounds):
            engine.read(region, file[1:10_001])
    with open(path, "r+b") as opened:
        opened.write(b"buffered")
        with engine.open_file(opened, nbytes=20_000, writable=True) as file:
            assert file.nbytes == 20_000
            engine.write(region[:100], file[19_900:]).wait()
    assert path.read_bytes()[:8] == b"buffered"
    assert path.stat().st_size == 20_000
    for wrong, error in (
        (folder, tm.InvalidArgument),
        (folder / "none", FileNotFoundError),
        ("/dev/null", tm.InvalidArgument),
    ):
        with pytest.raises(error if error is not FileNotFoundError else tm.IoError, match=str(wrong)):
            engine.register(wrong)
    with pytest.raises(tm.OutOfBounds, match="20000 bytes, not 20001"):
        engine.register(path, nbytes=20_001)
    with pytest.raises(tm.InvalidArgument, match="for files"):
        engine.register(back, nbytes=5)


def test_a_file_cut_short_under_a_reader(engine: tm.Engine, folder: Path) -> None:
    path = folder / "data"
    noise(8 << 20).tofile(path)
    back = np.zeros(8 << 20, np.uint8)
    region = engine.register(back)
    with engine.open_file(path) as file:
        os.truncate(path, 5_000_000)
        with pytest.raises(tm.OutOfBounds, match="ends at byte 5000000") as caught:
            engine.read(region, file).wait()
        assert caught.value.bytes_done < 8 << 20
        engine.read(region[:5_000_000], file[:5_000_000]).wait()


def test_a_failing_disk_and_a_full_one(engine: tm.Engine, folder: Path) -> None:
    data = noise(4 << 20)
    region = engine.register(data)
    with engine.open_file(folder / "data", nbytes=4 << 20, writable=True, create=True) as file:
        _core.set_failpoints("transfer.file=error@2")
        with pytest.raises(tm.IoError, match="data"):
            engine.write(region, file).wait()
        _core.set_failpoints("")
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (2 << 20, before[1]))
        try:
            with pytest.raises(tm.IoError, match="File too large") as caught:
                engine.write(region, file).wait()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert caught.value.bytes_done <= 2 << 20
        engine.write(region, file).wait()
        np.testing.assert_array_equal(np.fromfile(folder / "data", np.uint8), data)


@pytest.mark.netns
def test_no_space_left(tmp_path: Path) -> None:
    """On a file system of 1 MiB, in a mount namespace of its own."""
    code = f"""
import numpy as np, torch_mooncake as tm
engine = tm.Engine()
file = engine.open_file({str(tmp_path / "small" / "data")!r}, nbytes=8 << 20, writable=True, create=True)
try:
    engine.write(engine.register(np.ones(8 << 20, np.uint8)), file).wait()
except tm.IoError as error:
    assert "No space left" in str(error) and error.bytes_done <= 1 << 20, error
    print("as expected")
"""
    (tmp_path / "small").mkdir()
    (tmp_path / "fill.py").write_text(code)
    mount = f"mount -t tmpfs -o size=1m none {tmp_path / 'small'}"
    command = ["unshare", "-m", "sh", "-c", f"{mount} && exec {sys.executable} {tmp_path / 'fill.py'}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.stdout == "as expected\n", done.stderr


@pytest.fixture
def owner(child: Any, folder: Path) -> Any:
    noise(9_000_001, 7).tofile(folder / "theirs")
    names = {"path": str(folder / "theirs"), "transports": ["local", "shm", "tcp"]}

    def start(transports: list[str]) -> tuple[Any, str, bytes]:
        other = child()
        names["transports"] = transports
        address, descriptor = other(
            "import torch_mooncake as tm\n"
            "engine = tm.Engine(transports=transports, token='t', name='owner')\n"
            "region = engine.register(path, writable=True)\n"
            "result = [engine.addresses[0], region.descriptor().hex()]",
            **names,
        )
        return other, address, bytes.fromhex(descriptor)

    return start


@pytest.mark.parametrize("transports", [["local", "shm", "tcp"], ["tcp"]], ids=["shm", "stream"])
def test_a_file_of_another_process(owner: Any, folder: Path, transports: list[str]) -> None:
    other, address, descriptor = owner(transports)
    content = np.fromfile(folder / "theirs", np.uint8)
    with tm.Engine(transports=transports, token="t") as engine:
        remote = engine.connect(address).open(descriptor)
        assert remote.transport == "staged"
        assert remote.nbytes == len(content)
        back = np.zeros(len(content), np.uint8)
        region = engine.register(back)
        op = engine.read(region, remote)
        op.wait()
        assert op.transport == "staged"
        assert op.bytes_done == len(content)
        np.testing.assert_array_equal(back, content)
        back[:] = noise(len(back), 3)
        engine.write(region, remote, notify=b"written").wait()
        note = other("n = engine.next_notification(10); result = n.data.hex()")
        assert bytes.fromhex(note) == b"written"
        np.testing.assert_array_equal(np.fromfile(folder / "theirs", np.uint8), back)
        # Many small pieces, scattered on both sides.
        starts = np.arange(0, 8_000_000, 8_000, dtype=np.int64)
        shuffled = np.random.default_rng(1).permutation(starts)
        back[:] = 0
        engine.read(region, remote, local_offsets=starts, remote_offsets=shuffled + 17, nbytes=777).wait()
        content = np.fromfile(folder / "theirs", np.uint8)
        for ours, theirs in zip(starts.tolist(), shuffled.tolist(), strict=True):
            np.testing.assert_array_equal(back[ours : ours + 777], content[theirs + 17 : theirs + 17 + 777])
        # The owner's errors are ours.
        os.truncate(folder / "theirs", 1_000_000)
        with pytest.raises(tm.OutOfBounds, match="ends at byte 1000000"):
            engine.read(region, remote).wait()
        other("engine.deregister(region); result = 0")
        with pytest.raises(tm.KeyNotFound):
            engine.read(region, remote).wait()


def test_a_local_file_to_and_from_memory_of_another_process(child: Any, folder: Path) -> None:
    other = child()
    address, descriptor = other(
        "import numpy as np, torch_mooncake as tm\n"
        "engine = tm.Engine(token='t', name='owner')\n"
        "there = np.zeros(5_000_000, np.uint8)\n"
        "region = engine.register(there)\n"
        "result = [engine.addresses[0], region.descriptor().hex()]"
    )
    content = noise(5_000_000, 5)
    content.tofile(folder / "ours")
    with tm.Engine(token="t") as engine:
        remote = engine.connect(address).open(bytes.fromhex(descriptor))
        file = engine.register(folder / "ours", writable=True)
        assert file.kind == "file"
        op = engine.write(file, remote)
        op.wait()
        assert op.transport == "staged"
        back = np.zeros(5_000_000, np.uint8)
        engine.read(engine.register(back), remote).wait()
        np.testing.assert_array_equal(back, content)
        other("there[:] = 9; result = 0")
        engine.read(file[100:4_000_100], remote[0:4_000_000]).wait()
        content[100:4_000_100] = 9
        np.testing.assert_array_equal(np.fromfile(folder / "ours", np.uint8), content)
        # From file to file, in one process.
        with engine.open_file(folder / "copy", nbytes=5_000_000, writable=True, create=True) as copy:
            engine.write(file, copy).wait()
        np.testing.assert_array_equal(np.fromfile(folder / "copy", np.uint8), content)


def test_an_owner_that_dies_or_stops(owner: Any, folder: Path) -> None:
    other, address, descriptor = owner(["tcp"])
    with tm.Engine(transports=["tcp"], token="t") as engine:
        remote = engine.connect(address).open(descriptor)
        back = np.zeros(remote.nbytes, np.uint8)
        region = engine.register(back)
        other.kill(signal.SIGSTOP)
        with pytest.raises(tm.DeadlineExceeded):
            engine.read(region, remote, timeout=0.3).wait(5)
        back[:] = 1
        os.kill(other.process.pid, signal.SIGCONT)
        engine.read(region[:1000], remote[:1000]).wait()  # usable again; and nothing of the old one has landed
        assert (back[1000:] == 1).all()
        op = engine.read(region, remote)
        os.kill(other.process.pid, signal.SIGKILL)
        try:
            op.wait(5)
        except tm.PeerLost:
            assert op.state == "failed"
        with pytest.raises(tm.PeerLost):
            engine.read(region, remote).wait(5)


def test_a_file_goes_with_its_object(tmp_path: Path) -> None:
    with tm.Engine() as engine:
        noise(1000).tofile(tmp_path / "data")

        def count() -> int:
            links = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
            return sum(os.path.realpath(link) == str(tmp_path / "data") for link in links)

        file = engine.open_file(tmp_path / "data")
        regions = engine.stats()["regions"]
        assert count() > 0
        del file
        gc.collect()
        assert engine.stats()["regions"] == regions - 1
        assert eventually(lambda: count() == 0)
