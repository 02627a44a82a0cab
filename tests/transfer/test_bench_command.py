"""`torch-mooncake bench transfer`: alone, and between two processes as between two hosts."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys

import pytest
from processes import running
from verbs import VERBS

from torch_mooncake import cli

TRANSPORTS = ["rdma"] if VERBS else ["shm", "tcp"]
SMALL = ["--block", "64KiB", "--batch", "4", "--buffer", "1MiB", "--seconds", "0.05"]


def check(said: str, carriers: tuple[str, ...]) -> None:
    (row,) = json.loads(said)
    assert (row["block"], row["batch"]) == (64 << 10, 4)
    assert row["transport"] in carriers
    assert row["gb_per_s"] > 0
    assert row["mean_us"] > 0
    assert row["p99_us"] > 0


@pytest.mark.parametrize("read", [False, True])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_alone(transport: str, read: bool, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["bench", "transfer", "--json", "--transport", transport, *(["--read"] if read else []), *SMALL]
    assert cli.main(words) == 0
    check(capsys.readouterr().out, {"shm": ("process_vm",), "tcp": ("tcp", "unix"), "rdma": ("rdma",)}[transport])


@pytest.mark.parametrize("transport", TRANSPORTS[-1:])
def test_what_the_other_end_prints_is_what_to_run_here(transport: str, capsys: pytest.CaptureFixture[str]) -> None:
    serve = [sys.executable, "-m", "torch_mooncake", "bench", "transfer", "--transport", transport]
    serve += ["--buffer", "1MiB", "--serve", "tcp://127.0.0.1:0"]
    with running(serve, stdout=subprocess.PIPE, text=True) as server:
        words = shlex.split(server.stdout.readline())
        assert words[:3] == ["torch-mooncake", "bench", "transfer"]
        assert cli.main([*words[1:], "--json", *SMALL]) == 0
        check(capsys.readouterr().out, (transport, "unix"))


def test_no_block_that_fits(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["bench", "transfer", "--transport", TRANSPORTS[0], "--block", "1MiB", "--buffer", "1MiB"]
    assert cli.main(words) != 0
    assert "no block size fits" in capsys.readouterr().err
