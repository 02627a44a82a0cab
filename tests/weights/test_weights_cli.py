"""``torch-mooncake weights``: checkpoints on disk published from the shell, and who has them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import running
from safetensors.torch import save_file

from torch_mooncake import weights
from torch_mooncake.cli import main
from torch_mooncake.weights import Publisher, Subscriber

CLI = [sys.executable, "-m", "torch_mooncake", "weights"]


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """The command in this process, where torch is imported: what it printed, or what it said of an error."""

    def run(*args: str, status: int = 0) -> str:
        try:
            ended = main(["weights", *args])
        except SystemExit as exit_:  # argparse
            ended = int(exit_.code or 0)
        out, err = capsys.readouterr()
        assert ended == status, err
        return out if status == 0 else err

    return run


@pytest.fixture
def path(tmp_path: Path) -> str:
    save_file(
        {"model.w": torch.arange(4000.0), "model.b": torch.ones(3), "other": torch.zeros(2)}, tmp_path / "m.safetensors"
    )
    return str(tmp_path / "m.safetensors")


def wanted() -> dict[str, torch.Tensor]:
    return {"w": torch.zeros(4000), "b": torch.zeros(3)}


def test_two_commands_publish_a_file_and_stay_until_it_is_read(pool, opened, cli, path: str):
    mine = wanted()
    subscriber = opened(Subscriber("policy", mine))
    options = ["--prefix", "model.", "--step", "5", "--json", "--until-read", "1", "--timeout", "120"]
    with (
        running([*CLI, "publish", "policy", path, "--rank", "1/2", *options], stdout=subprocess.PIPE) as second,
        running([*CLI, "publish", "policy", path, "--rank", "0/2", *options], stdout=subprocess.PIPE) as first,
    ):
        assert subscriber.update(timeout=120).step == 5
        assert torch.equal(mine["w"], torch.arange(4000.0))
        assert torch.equal(mine["b"], torch.ones(3))
        assert [process.wait(60) for process in (first, second)] == [0, 0]
        documents = [json.loads(process.stdout.read()) for process in (first, second)]
    assert [(d["version"], d["step"], d["tensors"]) for d in documents] == [(1, 5, 2)] * 2
    assert sum(d["nbytes"] for d in documents) == 16012
    assert abs(documents[0]["nbytes"] - documents[1]["nbytes"]) <= 8
    shown = json.loads(cli("show", "policy", "--json"))
    assert [source["has"] for source in shown["sources"]] == [None, None]
    assert [target["has"] for target in shown["targets"]] == [True]


def test_ctrl_c_ends_it(pool, cli, path: str):
    with running([*CLI, "publish", "policy", path], stdout=subprocess.PIPE, text=True) as process:
        assert "version 1 of policy: 15.6 KiB at" in process.stdout.readline()
        shown = cli("show", "policy")
        process.send_signal(2)
        assert process.wait(60) == 130
    assert "policy: version 1, 3 tensors, 15.6 KiB" in shown
    assert "source trainer 0 of policy: 15.6 KiB on " in shown
    assert ", has it" in shown


def test_what_is_published_is_shown(pool: Any, opened, cli):
    publisher = opened(Publisher("policy", {"w": torch.ones(10)}))
    opened(Subscriber("policy", wanted()))  # does not fit
    fits = opened(Subscriber("policy", {"w": torch.zeros(10)}))
    weights.publish({"w": torch.ones(3)}, "other", step=4)
    publisher.publish(step=7)
    fits.update(timeout=20)
    assert cli("show").split() == ["other", "policy"]
    shown = json.loads(cli("show", "policy", "--json"))
    assert (shown["version"], shown["step"], shown["tensors"], shown["nbytes"]) == (1, 7, 1, 40)
    assert sorted(target["has"] for target in shown["targets"]) == [False, True]
    assert json.loads(cli("show", "other", "--json")) == {
        "name": "other", "way": "through the pool", "version": 1, "step": 4, "tensors": 1,
    }  # fmt: skip
    assert "no weights 'nobody' are published" in cli("show", "nobody", status=3)


def test_mistakes(pool, cli, tmp_path: Path, path: str):
    for rank in ("1", "2/2", "a/b", "-1/2"):
        assert "--rank is i/n" in cli("publish", "policy", path, f"--rank={rank}", status=2)
    assert "not allowed with" in cli("publish", "policy", path, "--for", "1", "--until-read", "1", status=2)
    assert "IoError" in cli("publish", "policy", str(tmp_path / "no"), status=1)
    assert "no tensors under 'x.'" in cli("publish", "policy", path, "--prefix", "x.", status=1)
    assert "0 of 1 subscribers have it" in cli(
        "publish", "policy", path, "--until-read", "1", "--timeout", "0.5", status=1
    )
    assert cli("publish", "policy", path, "--for", "0", "--subset").startswith("version 2 of policy")
    for command in ([], ["publish"], ["show"]):
        assert "usage: torch-mooncake weights" in cli(*command, "--help")
