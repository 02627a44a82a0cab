"""The command line, over a real node."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import torch_mooncake as tm


def cli(*args: str, stdin: bytes = b"", status: int = 0) -> bytes:
    done = subprocess.run(
        [sys.executable, "-m", "torch_mooncake", *args], input=stdin, capture_output=True, timeout=60, check=False
    )
    assert done.returncode == status, done.stderr.decode()
    return done.stdout if status == 0 else done.stderr


def test_put_get_ls_rm(pool: tm.Pool, tmp_path: Path) -> None:
    (tmp_path / "in").write_bytes(b"hello")
    np.save(tmp_path / "in.npy", np.arange(6.0).reshape(2, 3))
    cli("put", "a/file", str(tmp_path / "in"), "--version", "v1")
    cli("put", "a/array", str(tmp_path / "in.npy"))
    assert json.loads(cli("put", "a/stdin", "-", "--json", stdin=b"x" * 100))["nbytes"] == 100
    tm.put("model", {"w": torch.zeros(2, 3, dtype=torch.bfloat16), "step": 4})
    assert tm.get("a/file", version="v1") == b"hello"
    assert np.array_equal(tm.get("a/array"), np.arange(6.0).reshape(2, 3))

    assert cli("ls", "a/").decode().split() == ["a/array", "a/file", "a/stdin"]
    rows = {row["key"]: row for row in json.loads(cli("ls", "-l", "--json"))}
    assert rows["model"]["value"] == {"w": "tensor bfloat16 [2, 3]", "step": 4}
    assert rows["a/file"]["label"] == "v1"
    assert "array <f8 [2, 3]" in cli("ls", "-l").decode()

    assert cli("get", "a/file", "-o", "-") == b"hello"
    cli("get", "a/array", "-o", str(tmp_path / "out.npy"))
    assert np.array_equal(np.load(tmp_path / "out.npy"), np.arange(6.0).reshape(2, 3))
    assert json.loads(cli("get", "model", "--json"))["value"]["step"] == 4
    assert b"its bytes have no meaning" in cli("get", "model", "-o", "-", status=1)

    assert b"nobody" in cli("get", "nobody", status=3)
    assert cli("rm", "a/file", "a/array") == b""
    cli("rm", "a/file", status=3)
    assert tm.keys() == ["a/stdin", "model"]

    cli("put", "short", str(tmp_path / "in"), "--ttl", "600")
    assert 0 < json.loads(cli("get", "short", "--json"))["expires_in_s"] <= 600


def test_bytes_pass_as_they_are(pool: tm.Pool, tmp_path: Path) -> None:
    data = bytes(range(256)) * 40_000
    cli("put", "b", "-", stdin=data)
    assert cli("get", "b", "-o", "-") == data
    cli("get", "b", "-o", str(tmp_path / "b"))
    assert (tmp_path / "b").read_bytes() == data
    cli("get", "b", "-o", "/dev/null")
    assert Path("/dev/null").is_char_device()
    (tmp_path / "empty").touch()
    cli("put", "e", str(tmp_path / "empty"))
    assert cli("get", "e", "-o", "-") == b"" == tm.get("e")
    cli("get", "nobody", "-o", str(tmp_path / "none"), status=3)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["b", "empty"]  # no half of a file


def test_safetensors_and_exists(pool: tm.Pool, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    tensors = {"a.w": torch.arange(12.0).reshape(3, 4), "a.b": torch.ones(3, dtype=torch.bfloat16)}
    save_file(tensors, tmp_path / "m.safetensors", metadata={"format": "pt"})
    assert json.loads(cli("put", "m/", str(tmp_path / "m.safetensors"), "--json"))["keys"] == ["m/a.w", "m/a.b"]
    assert torch.equal(tm.get("m/a.w"), tensors["a.w"])
    cli("get", "m/", "-o", str(tmp_path / "out.safetensors"))
    assert all(torch.equal(value, tensors[name]) for name, value in load_file(tmp_path / "out.safetensors").items())
    cli("exists", "m/a.w", "m/a.b")
    assert json.loads(cli("info", "m/a.b", "--json"))["value"] == "tensor bfloat16 [3]"
    cli("exists", "m/a.w", "m/c", status=3)
    cli("info", "m/c", status=3)


def test_a_reader_that_has_enough_ends_us_quietly(pool: tm.Pool) -> None:
    pool.put("big", bytes(1 << 20))
    command = f"{sys.executable} -m torch_mooncake get big -o - | head -c 10"
    done = subprocess.run(["bash", "-c", command], capture_output=True, check=False)
    assert (done.stdout, done.stderr) == (bytes(10), b"")


def test_stat_and_doctor(pool: tm.Pool, pool_env: Any) -> None:
    tm.put("k", torch.zeros(1 << 20))
    assert json.loads(cli("stat", "--json"))["keys"] == 1
    assert "1 keys, 1 nodes" in cli("stat").decode()
    report = json.loads(cli("doctor", "--json"))
    assert report["settings"]["pool"] == pool_env.pool
    assert {c["name"]: c["ok"] for c in report["checks"]}["native core"]
    assert "TM_RUNTIME_DIR" in cli("doctor").decode()


HELP = [["--help"], *([command, "--help"] for command in ("node", "top", "drain", "ls", "doctor")), ["--version"]]


@pytest.mark.parametrize("args", HELP)
def test_help(args: list[str]) -> None:
    assert b"torch-mooncake" in cli(*args)


def test_errors_are_one_line_and_a_status(pool_env: Any) -> None:
    assert b"Traceback" not in cli("ls", "--address", "pigeon://x", status=1)
    document = subprocess.run(
        [sys.executable, "-m", "torch_mooncake", "ls", "--address", "pigeon://x", "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        check=False,
    ).stdout
    assert json.loads(document)["error"] == "UNSUPPORTED"
    cli("no-such-command", status=2)
