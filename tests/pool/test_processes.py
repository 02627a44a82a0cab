"""Several processes and one pool: zero-copy, isolation, death and fork."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from processes import eventually, processes_with, running

import torch_mooncake as tm

MiB = 1 << 20


def test_writers_and_readers_never_touch_each_other(pool: tm.Pool, child: Any) -> None:
    other = child()
    other("import torch, torch_mooncake as tm; t = torch.arange(2_000_000); tm.put('k', t); t.zero_()")
    ours = tm.get("k")
    want = torch.arange(2_000_000)
    assert torch.equal(ours, want)  # the writer's zeroing came after its put
    ours.fill_(7)
    assert torch.equal(tm.get("k"), want)  # and ours stays with us
    assert other("result = bool((tm.get('k') == torch.arange(2_000_000)).all())")


def test_a_big_get_maps_and_copies_nothing(pool: tm.Pool, child: Any) -> None:
    child()("import torch, torch_mooncake as tm; tm.put('k', torch.ones(50 << 20, dtype=torch.uint8))")

    def private_bytes() -> int:
        return int(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("RssAnon"))) << 10

    before = private_bytes()
    readonly = tm.get("k", readonly=True)
    plain = tm.get("k")
    assert int(readonly.sum()) == int(plain.sum()) == 50 * MiB
    assert private_bytes() - before < 16 * MiB
    assert tm.stat()["client_maps"] >= 1
    plain[0] = 2
    assert readonly[0] == 1


def test_a_tensor_keeps_its_version_while_the_key_is_replaced_and_deleted(pool: tm.Pool, child: Any) -> None:
    other = child()
    other("import torch, torch_mooncake as tm; tm.put('k', torch.full((20 << 20,), 1, dtype=torch.uint8))")
    old, old_readonly = tm.get("k"), tm.get("k", readonly=True)
    for i in range(2, 30):  # 28 × 20 MiB through a pool of 256 MiB: the old bytes would be reused if they could
        other(f"tm.put('k', torch.full((20 << 20,), {i}, dtype=torch.uint8))")
    assert other("result = tm.delete('k')")
    for tensor in (old, old_readonly):
        assert int(tensor.sum(dtype=torch.int64)) == 20 * MiB
        assert int(tensor.max()) == 1
    del old, old_readonly, tensor
    assert eventually(lambda: tm.stat()["nodes"][0]["limbo_bytes"] == 0)


def test_a_client_holds_at_most_half_the_pool_mapped_then_gets_copies(pool: tm.Pool) -> None:
    tensors = []
    for i in range(20):
        tm.put(f"k{i}", torch.full((20 * MiB,), i, dtype=torch.uint8), timeout=10)
        tensors.append(tm.get(f"k{i}", readonly=True))
    assert all(int(t[0]) == int(t[-1]) == i for i, t in enumerate(tensors))
    assert 100 * MiB <= tm.stat()["client_mapped_bytes"] <= 128 * MiB
    tensors.clear()
    assert eventually(lambda: tm.stat()["client_mapped_bytes"] == 0)
    tm.put("after", torch.zeros(200 * MiB, dtype=torch.uint8))


def test_a_pinned_pool_is_full_and_recovers(pool: tm.Pool, child: Any) -> None:
    code = (
        "import torch, torch_mooncake as tm; held = []\n"
        "for i in range(6):\n"
        "    tm.put(f'{name}{i}', torch.full((20 << 20,), i, dtype=torch.uint8)); held.append(tm.get(f'{name}{i}'))\n"
    )
    others = [child(), child()]
    for name, other in zip("ab", others, strict=True):
        other(code, name=name)
    with pytest.raises(tm.PoolFull, match="pinned"):
        tm.put("k", torch.zeros(40 * MiB, dtype=torch.uint8), timeout=1)
    for other in others:
        assert other("result = [int(t[0]) == int(t[-1]) == i for i, t in enumerate(held)]") == [True] * 6
    others[0].kill()
    tm.put("k", torch.zeros(100 * MiB, dtype=torch.uint8), timeout=10)
    assert others[1]("result = [int(t[0]) == int(t[-1]) == i for i, t in enumerate(held)]") == [True] * 6


def test_unpinned_objects_are_evicted_for_new_ones(pool: tm.Pool) -> None:
    for i in range(40):
        tm.put(f"k{i}", torch.full((20 * MiB,), i, dtype=torch.uint8))
    assert int(tm.get("k39")[5]) == 39
    assert 5 < len(tm.keys()) < 13
    with pytest.raises(tm.KeyNotFound):
        tm.get("k0")


def test_a_client_may_be_killed_at_any_time(pool: tm.Pool, child: Any) -> None:
    tm.put("k", torch.arange(1_000_000))
    for _ in range(3):
        other = child()
        other("import torch, torch_mooncake as tm; held = tm.get('k', readonly=True); big = torch.zeros(8 << 20)")
        other.start("while True: tm.put('mine', big)")
        time.sleep(0.3)
        other.kill()
    assert torch.equal(tm.get("k"), torch.arange(1_000_000))
    tm.delete("k")
    tm.delete("mine")
    # Nothing the dead held or were writing stays.
    assert eventually(lambda: all(tm.stat()["nodes"][0][n] == 0 for n in ("limbo_bytes", "prepared_bytes", "pinned")))


def test_worker_killed_then_everything_works_again(pool: tm.Pool, pool_env: Any) -> None:
    want = torch.arange(500_000)
    tm.put("k", want)
    held = tm.get("k", readonly=True)
    os.kill(pool_env.worker(), signal.SIGKILL)
    errors = []

    def works() -> bool:
        try:
            tm.put("new", 1, timeout=5)
            return torch.equal(tm.get("k", timeout=5), want)
        except (tm.PeerLost, tm.PoolUnavailable) as error:  # clear, and gone soon
            errors.append(error)
            return False

    assert eventually(works, timeout=20)
    assert torch.equal(held, want)
    assert tm.get("new") == 1
    assert len(pool_env.nodes()) == 2


def test_node_killed_then_a_new_one_serves(pool: tm.Pool, pool_env: Any) -> None:
    tm.put("k", torch.arange(500_000))
    held = tm.get("k", readonly=True)
    for pid in pool_env.nodes():
        os.kill(pid, signal.SIGKILL)

    def works() -> bool:
        try:
            tm.put("new", 1, timeout=10)
            return True
        except (tm.PeerLost, tm.PoolUnavailable):
            return False

    assert eventually(works, timeout=30)
    assert int(held[-1]) == 499_999  # our map keeps the dead node's pages
    with pytest.raises(tm.KeyNotFound):  # the memory had no name: it is gone
        tm.get("k")


def test_keeper_takes_its_worker_along(pool: tm.Pool, pool_env: Any) -> None:
    os.kill(pool_env.nodes()[0], signal.SIGKILL)
    assert eventually(lambda: not pool_env.nodes())


def test_everything_killed_leaves_nothing(pool_env: Any, child: Any) -> None:
    others = [child() for _ in range(3)]
    for i, other in enumerate(others):
        other(f"import torch, torch_mooncake as tm; tm.put('k{i}', torch.zeros(5 << 20)); t = tm.get('k{i}')")
    shm = set(os.listdir("/dev/shm"))
    for pid in [*(o.pid for o in others), *pool_env.nodes()]:
        os.kill(pid, signal.SIGKILL)
    for other in others:
        other.process.wait()
    assert eventually(lambda: not processes_with(pool_env.runtime_dir))
    assert set(os.listdir("/dev/shm")) <= shm
    assert not any(p.name.startswith("core") for p in pool_env.folder.iterdir())
    tm.put("again", 1)  # a stale socket file is in nobody's way
    assert tm.keys() == ["again"]


def test_many_processes_start_one_node(pool_env: Any, child: Any) -> None:
    others = [child() for _ in range(4)]
    for i, other in enumerate(others):
        other.start(
            f"import torch_mooncake as tm; tm.put('k{i}', {i}); tm.wait('k0'); result = len(tm.stat()['nodes'])"
        )
    assert [other.result() for other in others] == [1, 1, 1, 1]
    assert len(pool_env.nodes()) == 2  # one keeper, one worker
    tm.init()
    assert tm.keys() == ["k0", "k1", "k2", "k3"]


def test_fork_reattaches(pool: tm.Pool) -> None:
    tm.put("k", torch.arange(100_000))
    held = tm.get("k")
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            # numpy compares: torch's OpenMP threads do not survive a fork
            assert np.array_equal(tm.get("k").numpy(), held.numpy())
            tm.put("from child", os.getpid())
            engine_error = b"ok"
        except BaseException as error:
            engine_error = repr(error).encode()
        os.write(writer, engine_error)
        os._exit(0)
    os.close(writer)
    os.waitpid(pid, 0)
    assert os.read(reader, 4096) == b"ok"
    os.close(reader)
    assert tm.get("from child") == pid
    assert torch.equal(tm.get("k"), held)
    assert tm.delete("k")
    assert int(held[5]) == 5


def test_torch_dataloader_workers_use_the_pool(pool: tm.Pool) -> None:
    tm.put_many({f"sample{i}": torch.full((4,), i) for i in range(8)})

    class Samples(torch.utils.data.Dataset):  # type: ignore[type-arg]
        def __len__(self) -> int:
            return 8

        def __getitem__(self, i: int) -> torch.Tensor:
            return tm.get(f"sample{i}")

    loader = torch.utils.data.DataLoader(Samples(), batch_size=2, num_workers=2, multiprocessing_context="fork")
    assert torch.cat(list(loader))[:, 0].tolist() == list(range(8))


def test_a_service_node_over_tcp_needs_its_token(pool_env: Any, child: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    env = {**os.environ, "TM_TOKEN": "secret"}
    command = [sys.executable, "-m", "torch_mooncake", "node", "--listen", f"tcp://127.0.0.1:{port}"]
    node = subprocess.Popen(command, env=env, stderr=subprocess.PIPE)
    try:
        assert eventually(lambda: (pool_env.folder / "node.sock").exists(), timeout=20)
        with pytest.raises(tm.AuthError):
            tm.Pool(f"127.0.0.1:{port}", token="wrong", timeout=10)
        with tm.Pool(f"127.0.0.1:{port}", token="secret") as remote:  # and the node lives
            remote.put("k", torch.arange(1_000_000))
            assert int(remote.get("k")[-1]) == 999_999
        monkeypatch.setenv("TM_TOKEN", "secret")
        assert int(tm.get("k")[-1]) == 999_999
        tm.close()
    finally:
        node.send_signal(signal.SIGTERM)
        assert node.wait(20) == 0
        assert node.stderr
        node.stderr.close()


def test_a_folder_that_others_prepared_is_refused(
    pool_env: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    open_to_all = tmp_path / "r"
    open_to_all.mkdir(mode=0o777)
    open_to_all.chmod(0o777)
    monkeypatch.setenv("TM_RUNTIME_DIR", str(open_to_all))
    with pytest.raises(tm.AuthError, match="open to others"):
        tm.init()
    (tmp_path / "link").symlink_to(tmp_path)
    monkeypatch.setenv("TM_RUNTIME_DIR", str(tmp_path / "link"))
    with pytest.raises(tm.AuthError, match="not a folder"):
        tm.init()
    monkeypatch.setenv("TM_RUNTIME_DIR", "/tmp/" + "x" * 100)
    with pytest.raises(tm.InvalidArgument, match="shorter TM_RUNTIME_DIR"):
        tm.init()


def test_unreachable_addresses_are_clear_errors(pool_env: Any) -> None:
    with pytest.raises(tm.Unsupported, match="carrier-pigeon"):
        tm.Pool("carrier-pigeon://roof", timeout=5)
    start = time.monotonic()
    with pytest.raises((tm.PoolUnavailable, tm.PeerLost, tm.IoError, tm.DeadlineExceeded)):
        tm.Pool("127.0.0.1:1", timeout=3)
    assert time.monotonic() - start < 8


@pytest.mark.parametrize("wait", ["tm.wait('never', timeout=60)", "tm.get('never', wait=60)"])
def test_ctrl_c_ends_a_wait(pool: tm.Pool, wait: str) -> None:
    code = f"import torch_mooncake as tm; tm.init(); print('waiting', flush=True)\ntry: {wait}\n"
    code += "except KeyboardInterrupt: print('interrupted', flush=True)"
    with running([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "waiting\n"
        time.sleep(0.5)  # nothing tells that it waits
        start = time.monotonic()
        process.send_signal(signal.SIGINT)
        assert process.stdout.readline() == "interrupted\n"
        assert process.wait(10) == 0
        assert time.monotonic() - start < 5
