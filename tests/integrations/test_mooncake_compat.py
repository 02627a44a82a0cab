"""mooncake_compat: what Mooncake's own modules do, ours do, call for call (mooncake_calls.py), and what they do not."""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import mooncake_calls
import mooncake_real
import numpy as np
import pytest
import torch
from lost import lose_node
from places import COMPAT, ROOT
from processes import PoolEnv, eventually

import torch_mooncake as tm

HERE = Path(__file__).parent
EXPECTED: dict[str, Any] = json.loads((HERE / "mooncake_expected.json").read_text())  # facts: the real wheel's
MiB = 1 << 20


@pytest.fixture(scope="module")
def ours() -> Iterator[dict[str, Any]]:
    """What ours does, by sequence, in a process of its own."""
    runtime = tempfile.mkdtemp(prefix="tm-compat-", dir="/tmp")  # short: Unix socket paths are
    env = {name: value for name, value in os.environ.items() if not name.startswith("TM_")}
    env |= {"TM_RUNTIME_DIR": runtime, "TM_POOL": "compat", "PYTHONPATH": f"{ROOT}:{COMPAT}"}
    # The node stays between a sequence's end and the next one's setup: for as long as this client is there.
    with tm.Pool(runtime_dir=runtime, pool="compat", memory=64 * MiB, linger_s=0):
        command = [sys.executable, str(HERE / "mooncake_calls.py"), "127.0.0.1:50051"]
        found = mooncake_real.results(subprocess.run(command, env=env, capture_output=True, text=True, timeout=170))
    yield found
    shutil.rmtree(runtime, ignore_errors=True)


@pytest.mark.parametrize("name", mooncake_calls.SEQUENCES)
def test_calls_end_as_the_real_wheel_s_do(ours: dict[str, Any], name: str):
    assert ours[name] == EXPECTED[name]


def test_every_sequence_was_recorded():
    assert EXPECTED.keys() == mooncake_calls.SEQUENCES.keys()
    assert all(EXPECTED.values())


@pytest.mark.slow
@pytest.mark.network
def test_the_real_wheel_still_does_what_was_recorded(ours: dict[str, Any]):
    """Differential: both now, call for call. `make peers` fetches the wheel."""
    subprocess.run(["make", "peers"], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    real = mooncake_real.run()
    assert real == EXPECTED
    assert ours == real


# --- what is ours alone: no crash, whatever is asked ---


@pytest.mark.parametrize("closed", [False, True])
def test_a_store_that_is_not_set_up_answers_with_codes(compat_env: dict[str, str], closed: bool):
    """With the real one most of these end the process."""
    from mooncake.store import MooncakeDistributedStore

    store = MooncakeDistributedStore()
    if closed:
        assert store.setup("127.0.0.1", "P2PHANDSHAKE", 0, 0, "tcp", "", "") == 0
        assert store.close() == 0
    memory = mooncake_calls.Memory(4096)
    assert store.put("k", b"v") == store.is_exist("k") == store.get_size("k") == store.remove("k") == -1
    assert store.remove_all() == store.remove_by_regex("k") == store.register_buffer(memory.at, 4096) == -1
    assert store.batch_put_from(["a", "b"], [memory.at] * 2, [8, 8]) == [-1, -1]
    assert store.batch_get_into(["a", "b"], [memory.at] * 2, [8, 8]) == [-1, -1]
    assert store.batch_is_exist(["a", "b"]) == store.batch_remove(["a", "b"]) == [-1, -1]
    assert store.batch_get_buffer(["a"]) == [None]
    assert store.batch_get_replica_desc(["a"]) == {}


def test_an_engine_that_is_not_initialized_answers_with_codes(compat_env: dict[str, str]):
    from mooncake.engine import TransferEngine

    engine = TransferEngine()
    memory = mooncake_calls.Memory(4096)
    assert engine.get_rpc_port() == 0
    assert engine.register_memory(memory.at, 64) == engine.transfer_sync_write("127.0.0.1:1", memory.at, 1, 8) == -1
    assert engine.unregister_memory(memory.at) == -3
    assert engine.batch_transfer_async_read("127.0.0.1:1", [memory.at], [1], [8]) == 0
    assert engine.get_batch_transfer_status([7]) == engine.transfer_check_status(7) == -1
    assert engine.get_notifies() == []
    assert engine.initialize("127.0.0.1", "P2PHANDSHAKE", "no such protocol", "") == -1
    assert engine.initialize("127.0.0.1", "etcd://127.0.0.1:2379", "tcp", "") == -1
    assert engine.initialize("0.0.0.0", "P2PHANDSHAKE", "tcp", "") == -1  # it needs a token


def test_memory_that_is_not_there_is_a_code_and_no_crash(compat_env: dict[str, str]):
    """The real one dies of SIGSEGV."""
    from mooncake.engine import TransferEngine
    from mooncake.store import MooncakeDistributedStore, MooncakeHostMemAllocator

    store, engine = MooncakeDistributedStore(), TransferEngine()
    assert store.setup("127.0.0.1", "P2PHANDSHAKE", 0, 0, "tcp", "", "") == 0
    assert engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
    allocator = MooncakeHostMemAllocator()
    freed, here = allocator.alloc(MiB), mooncake_calls.Memory(MiB, 3)
    assert allocator.free(freed) == 0
    assert allocator.free(freed) == -1
    reserved = mmap.mmap(-1, MiB, prot=0)  # nobody may touch it, and nobody else is given its addresses
    gone = np.frombuffer(reserved, np.uint8).__array_interface__["data"][0]
    assert store.batch_put_from(["a", "b"], [gone, here.at], [MiB, MiB]) == [-600, 0]
    assert store.put_from("c", here.at + (1 << 40), 16) == -600
    assert store.batch_get_into(["b", "b"], [gone, here.at], [MiB, MiB]) == [-600, MiB]
    assert store.register_buffer(gone, MiB) == -600
    assert engine.register_memory(gone, MiB) == -1
    session = f"127.0.0.1:{engine.get_rpc_port()}"
    assert engine.register_memory(here.at, MiB) == 0
    assert engine.transfer_sync_write(session, gone, here.at, 4096) == -1
    assert engine.transfer_sync_write(session, here.at, here.at + 65536, 4096) == 0
    assert here.read(65536, 4096) == here.read(0, 4096)
    assert store.close() == 0


def test_tenants_do_not_see_or_remove_each_other_s_keys(compat_env: dict[str, str], pool: tm.Pool):
    from mooncake.store import MooncakeDistributedStore

    one, two = MooncakeDistributedStore(), MooncakeDistributedStore()
    assert one.setup("127.0.0.1", "P2PHANDSHAKE", 0, 0, "tcp", "", "", tenant_id="a/b") == 0
    assert two.setup("127.0.0.1", "P2PHANDSHAKE", 0, 0, "tcp", "", "", tenant_id="a") == 0
    assert one.put("b/k", b"one") == two.put("b/k", b"two") == 0
    pool.put("not/theirs", b"mine")
    assert (one.get("b/k"), two.get("b/k")) == (b"one", b"two")
    assert two.remove_by_regex(".*") == 1
    assert one.get("b/k") == b"one"
    assert one.remove_all() == 1
    assert pool.keys() == ["not/theirs"]
    assert one.close() == two.close() == 0


def test_objects_are_the_pool_s(compat_env: dict[str, str], pool: tm.Pool):
    from mooncake.store import MooncakeDistributedStore

    store = MooncakeDistributedStore()
    assert store.setup("127.0.0.1", "P2PHANDSHAKE", 0, 0, "tcp", "", "") == 0
    assert store.put("k", b"bytes") == 0
    assert pool.get("mooncake/default/k") == b"bytes"
    pool.put("mooncake/default/tensor", torch.arange(10))
    assert store.get("tensor") == torch.arange(10).numpy().tobytes()
    assert store.close() == 0


def test_another_process_reads_what_one_wrote(compat_env: dict[str, str], child: Any):
    """Spawned processes find the modules, and the same pool."""
    from mooncake.store import MooncakeDistributedStore

    store = MooncakeDistributedStore()
    assert store.setup("127.0.0.1", "P2PHANDSHAKE", 0, 0, "tcp", "", "") == 0
    data = mooncake_calls.pattern(3 * MiB, 5)
    assert store.put("from here", data) == 0
    other = child(compat_env)
    digest = other(
        """
import hashlib, mooncake
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
store.setup("127.0.0.1", "P2PHANDSHAKE", 0, 0, "tcp", "", "")
result = [hashlib.sha256(store.get("from here")).hexdigest(), store.put("from there", b"back"), mooncake.PROVIDED_BY]
store.close()
"""
    )
    import hashlib

    assert digest == [hashlib.sha256(data).hexdigest(), 0, "torch_mooncake"]
    assert store.get("from there") == b"back"
    assert store.close() == 0


SERVER = """
import ctypes
from mooncake.engine import TransferEngine
engine = TransferEngine()
code = engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "")
memory = (ctypes.c_ubyte * (1 << 20))(*range(1, 200))
address = ctypes.addressof(memory)
engine.register_memory(address, 1 << 20)
result = [code, engine.get_rpc_port(), address]
"""


@pytest.mark.parametrize("host_id", ["", "elsewhere"])
def test_engines_of_two_processes(compat_env: dict[str, str], child: Any, host_id: str):
    from mooncake.engine import TransferEngine

    other = child({**compat_env, "TM_HOST_ID": host_id})
    code, port, there = other(SERVER)
    assert code == 0
    engine, memory = TransferEngine(), mooncake_calls.Memory(MiB, 9)
    assert engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
    assert engine.register_memory(memory.at, MiB) == 0
    session = f"127.0.0.1:{port}"
    assert engine.transfer_sync_read(session, memory.at, there, 100) == 0
    assert memory.read(0, 100) == bytes(range(1, 101))
    sides = [memory.at + i * 4096 for i in range(100)], [there + (99 - i) * 8192 for i in range(100)], [4096] * 100
    assert engine.batch_transfer_sync_write(session, *sides) == 0
    assert other("result = list(memory[99 * 8192 : 99 * 8192 + 8])") == list(memory.read(0, 8))
    other.kill()
    started = time.monotonic()
    assert engine.transfer_sync_read(session, memory.at, there, 100) == -1
    assert engine.send_probe(session) == -102
    assert time.monotonic() - started < 15


def test_transfers_that_nobody_asks_about_keep_no_memory_registered(
    compat_env: dict[str, str], monkeypatch: pytest.MonkeyPatch
):
    """What was registered for one transfer alone; and of many of them, the oldest are forgotten."""
    from mooncake import engine as module

    monkeypatch.setattr(module, "_KEPT", 8)
    engine, there = module.TransferEngine(), mooncake_calls.Memory(MiB)
    assert engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
    assert engine.register_memory(there.at, MiB) == 0
    session, here = f"127.0.0.1:{engine.get_rpc_port()}", mooncake_calls.Memory(MiB, 7)
    numbers = []
    for i in range(32):
        numbers.append(engine.transfer_submit_write(session, here.at + i * 4096, there.at + i * 4096, 4096))
        transfer = engine._transfers[numbers[-1]]
        assert eventually(lambda: all(op.done() for op in transfer._ops))  # noqa: B023
    assert all(numbers)
    assert engine._engine.stats()["regions"] <= 2  # its own, and the last one's
    assert engine.transfer_check_status(numbers[0]) == -1  # forgotten
    assert [engine.transfer_check_status(number) for number in numbers[-8:]] == [1] * 8
    assert there.read(0, 32 * 4096) == here.read(0, 32 * 4096)
    assert engine._engine.stats()["regions"] == 1


def test_a_transfer_s_status_is_the_same_for_all_who_ask(compat_env: dict[str, str], child: Any):
    """While its peer stands still it is under way, whoever else asks, or waits for it."""
    from mooncake.engine import TransferEngine

    other = child({**compat_env, "TM_HOST_ID": "elsewhere"})
    _, port, there = other(SERVER)
    engine, memory = TransferEngine(), mooncake_calls.Memory(MiB)
    assert engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
    session = f"127.0.0.1:{port}"
    assert engine.send_probe(session) == 0
    assert engine.transfer_sync_read(session, memory.at, there, 100) == 0
    os.kill(other.process.pid, signal.SIGSTOP)
    try:
        number = engine.transfer_submit_write(session, memory.at, there, 512 * 1024)
        assert number > 0
        with ThreadPoolExecutor(5) as threads:
            waits = threads.submit(engine.get_batch_transfer_status, [number])
            for _ in range(20):
                asked = [threads.submit(engine.transfer_check_status, number) for _ in range(16)]
                assert {each.result(30) for each in asked} == {0}
            os.kill(other.process.pid, signal.SIGCONT)
            assert waits.result(60) == 0
    finally:
        os.kill(other.process.pid, signal.SIGCONT)
    assert engine.transfer_check_status(number) == -1


def test_a_transfer_that_is_tried_again_has_no_more_time(compat_env: dict[str, str]):
    from mooncake._transfers import Transfer
    from mooncake.engine import TransferEngine

    engine, memory = TransferEngine(), mooncake_calls.Memory(4096)
    assert engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
    assert engine.register_memory(memory.at, 4096) == 0
    peer = engine._session(f"127.0.0.1:{engine.get_rpc_port()}")
    sides = [memory.at], [memory.at + 2048], [1024]
    made = [Transfer(engine._engine, peer, engine._regions, True, *sides, notify=b"", timeout_s=t) for t in (30, 0)]
    assert [each.begin() for each in made] == [True, False]
    assert (made[0].wait(), made[0].wait(), made[0].poll()) == (0, 0, 0)


def test_a_peer_that_does_not_have_the_token_is_refused(
    compat_env: dict[str, str], child: Any, monkeypatch: pytest.MonkeyPatch
):
    from mooncake.engine import TransferEngine

    monkeypatch.setenv("TM_TOKEN", "the right one")
    other = child({**compat_env, "TM_TOKEN": "the right one"})
    _, port, there = other(SERVER)
    memory = mooncake_calls.Memory(4096)
    session = f"127.0.0.1:{port}"
    right = TransferEngine()
    assert right.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
    assert right.send_probe(session) == 0
    assert right.transfer_sync_read(session, memory.at, there, 16) == 0
    monkeypatch.setenv("TM_TOKEN", "a wrong one")
    wrong = TransferEngine()
    assert wrong.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
    assert wrong.send_probe(session) == -102
    assert wrong.transfer_sync_read(session, memory.at, there, 16) == -1


def test_nonsense_on_the_port_harms_nobody(compat_env: dict[str, str]):
    import socket

    from mooncake.engine import TransferEngine

    engine, memory = TransferEngine(), mooncake_calls.Memory(4096)
    assert engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
    assert engine.register_memory(memory.at, 4096) == 0
    port = engine.get_rpc_port()
    silent = [socket.create_connection(("127.0.0.1", port)) for _ in range(8)]
    for data in (b"\n", b"{}\n", b"[1]\n", b"x" * 100_000, b'{"nonce": 7, "mac": null}\n', b"\xff\xfe\n"):
        with socket.create_connection(("127.0.0.1", port)) as connection:
            connection.recv(100)
            connection.sendall(data)
    assert engine.send_probe(f"127.0.0.1:{port}") == 0
    assert engine.transfer_sync_write(f"127.0.0.1:{port}", memory.at, memory.at + 2048, 1024) == 0
    for connection in silent:
        connection.close()


def test_it_does_not_stand_in_front_of_the_real_one(compat_env: dict[str, str], tmp_path: Path):
    info = tmp_path / "mooncake_transfer_engine_non_cuda-0.3.13.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mooncake-transfer-engine-non-cuda\nVersion: 0.3.13\n")
    env = {**compat_env, "PYTHONPATH": f"{compat_env['PYTHONPATH']}:{tmp_path}"}
    tried = subprocess.run([sys.executable, "-c", "import mooncake.store"], env=env, capture_output=True, text=True)
    assert tried.returncode == 1
    assert "ImportError: mooncake-transfer-engine-non-cuda is installed" in tried.stderr


def test_a_pool_of_its_own_for_each_master(compat_env: dict[str, str], monkeypatch: pytest.MonkeyPatch):
    from mooncake.store import MooncakeDistributedStore

    monkeypatch.delenv("TM_POOL")
    stores = []
    for master in ("10.0.0.1:50051", "10.0.0.2:50051", "10.0.0.1:50051"):
        stores.append(MooncakeDistributedStore())
        assert stores[-1].setup("127.0.0.1", "P2PHANDSHAKE", 64 * MiB, 0, "tcp", "", master) == 0
    assert stores[0].put("k", b"first") == 0
    assert [store.get("k") for store in stores] == [b"first", b"", b"first"]
    for store in stores:
        assert store.close() == 0


def test_a_pool_that_cannot_be_had_is_a_code(compat_env: dict[str, str], monkeypatch: pytest.MonkeyPatch):
    from mooncake.store import MooncakeDistributedStore

    monkeypatch.setenv("TM_ADDRESS", "127.0.0.1:1")
    assert MooncakeDistributedStore().setup("127.0.0.1", "P2PHANDSHAKE", 0, 0, "tcp", "", "") < 0


@pytest.mark.slow
def test_a_killed_node_is_a_code_in_bounded_time(compat_env: dict[str, str], pool_env: PoolEnv):
    from mooncake.store import MooncakeDistributedStore

    store = MooncakeDistributedStore()
    assert store.setup("127.0.0.1", "P2PHANDSHAKE", 0, 0, "tcp", "", "") == 0
    assert store.put("k", b"v") == 0
    lose_node(pool_env, lambda: store.is_exist("k") == 1)
    assert store.batch_is_exist(["k"]) in ([0], [-1])  # a fresh node was started, or there is none
    assert store.get("k") == b""
    out = ctypes.create_string_buffer(8)
    assert store.get_into("k", ctypes.addressof(out), 8) < 0
    assert store.close() == 0


@pytest.mark.slow
def test_the_torchspec_example_holds_its_claims(compat_env: dict[str, str]):
    command = [sys.executable, str(ROOT / "examples" / "torchspec_hidden_states.py"), "--samples", "3"]
    done = subprocess.run(command, env=compat_env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "3 samples of 385 KiB, 0 changed" in done.stdout


def test_the_distribution_has_all_of_it(tmp_path: Path):
    source = tmp_path / "source"
    shutil.copytree(COMPAT, source, ignore=shutil.ignore_patterns("__pycache__"))
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "-q",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        str(tmp_path),
        ".",
    ]
    subprocess.run(command, cwd=source, check=True)
    (wheel,) = tmp_path.glob("torch_mooncake_compat-*.whl")
    with zipfile.ZipFile(wheel) as opened:
        names = {name for name in opened.namelist() if name.startswith("mooncake/")}
    assert names == {f"mooncake/{path.name}" for path in (COMPAT / "mooncake").iterdir() if path.is_file()}
