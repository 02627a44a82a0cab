"""The command line and what goes wrong: one clear line and a status, and nothing half done."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from processes import PoolEnv, running

import torch_mooncake as tm
from torch_mooncake import _core

NEVER = 1 << 62


def cli(*args: str, status: int) -> tuple[str, str]:
    """(stdout, stderr), which is one line and no traceback."""
    done = subprocess.run(
        [sys.executable, "-m", "torch_mooncake", *args], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == status, done.stderr
    assert "Traceback" not in done.stderr
    assert status == 2 or len(done.stderr.splitlines()) <= 1
    return done.stdout, done.stderr


@pytest.mark.parametrize(
    "args",
    [
        ("ls", "--timeout", "nan"),
        ("ls", "--timeout", "-1"),
        ("ls", "--timeout", "soon"),
        ("info", "k", "--wait", "nan"),
        ("get", "k", "--wait", "-0.5"),
        ("node", "--drain", "nan"),
        ("node", "--linger", "nan"),
        ("node", "--linger=-nan"),
        ("node", "--linger=-soon"),
        ("put", "k", "-", "--ttl", "nan"),
        ("get", "m/", "-o", "m.safetensors", "--wait", "1"),
        ("events", "a/", "--zmq", "tcp://127.0.0.1:0"),
        ("events", "--replay", "tcp://127.0.0.1:0"),
        ("events", "--shape", "vllm"),
        ("events", "--namespace", "m"),
        ("events", "--topic", "t"),
    ],
    ids=" ".join,
)
def test_what_makes_no_sense_is_refused_before_anything_is_done(pool_env: PoolEnv, args: tuple[str, ...]) -> None:
    assert "usage: torch-mooncake" in cli(*args, status=2)[1]
    assert not pool_env.nodes()


def files(folder: Path) -> Iterator[Path]:
    (folder / "text.npy").write_text("no array at all")
    yield folder / "text.npy"
    (folder / "empty.npy").touch()
    yield folder / "empty.npy"
    np.save(folder / "objects.npy", np.array([{}, 1], dtype=object), allow_pickle=True)
    yield folder / "objects.npy"
    np.save(folder / "short.npy", np.arange(100))
    os.truncate(folder / "short.npy", 300)
    yield folder / "short.npy"
    np.save(folder / "records.npy", np.zeros(3, dtype=[("a", "<i4"), ("b", "<f8")]))
    yield folder / "records.npy"
    with open(folder / "several.npy", "wb") as several:
        np.savez(several, a=np.arange(3))
    yield folder / "several.npy"
    header = b"{'descr': '<f8', 'fortran_order': False, 'shape': (1 << 60,), }".replace(b"1 << 60", b"%d" % (1 << 60))
    (folder / "huge.npy").write_bytes(b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header)
    yield folder / "huge.npy"


def test_a_file_that_holds_no_array_is_named(pool: tm.Pool, tmp_path: Path) -> None:
    for path in files(tmp_path):
        assert str(path) in cli("put", "k", str(path), status=1)[1]
    assert not pool.exists("k")


def test_an_array_is_there_whole_or_not_at_all(pool: tm.Pool, tmp_path: Path) -> None:
    pool.put("big", np.zeros(4 << 20))
    old = tmp_path / "out.npy"
    np.save(old, np.arange(3))
    limited = f"ulimit -f 1024; exec {sys.executable} -m torch_mooncake get big -o {old}"  # 1 MiB of a file
    done = subprocess.run(["bash", "-c", f"trap '' XFSZ; {limited}"], capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr
    assert np.array_equal(np.load(old), np.arange(3))
    assert [path.name for path in tmp_path.iterdir()] == ["out.npy"]


def test_a_long_list_shows_what_cannot_be_described(pool: tm.Pool) -> None:
    pool.put("a", torch.zeros(3))
    pool._client(NEVER).put("b", b"junk", (b"bytes",), _core.PutOptions(), NEVER)  # as another program might
    pool.put("c", b"1")
    rows = json.loads(cli("ls", "-l", "--json", status=1)[0])
    assert [row["key"] for row in rows] == ["a", "b", "c"]
    assert rows[1]["error"] == "CORRUPT"
    assert rows[2]["nbytes"] == 1
    lines = cli("ls", "-l", status=1)[0].splitlines()
    assert "Corrupt" in lines[1]
    assert len(lines) == 3


def test_a_wait_may_be_longer_than_the_timeout(pool: tm.Pool) -> None:
    command = [sys.executable, "-m", "torch_mooncake", "info", "late", "--wait", "30", "--timeout", "1", "--json"]
    with running(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as waiting:
        with pytest.raises(subprocess.TimeoutExpired):
            waiting.wait(3)  # past its timeout
        pool.put("late", bytes(1 << 20))
        out, err = waiting.communicate(timeout=20)
    assert waiting.returncode == 0, err
    assert json.loads(out)["nbytes"] == 1 << 20


@pytest.mark.parametrize("module", ["torch_mooncake.kv.events", "torch_mooncake.cli"])
def test_what_needs_no_torch_imports_none(module: str) -> None:
    code = f"import sys, {module}; from torch_mooncake.kv import KVEventPublisher, hash_name; "
    code += "sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
