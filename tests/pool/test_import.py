"""What importing costs and brings along."""

from __future__ import annotations

import json
import subprocess
import sys

import torch_mooncake as tm
from torch_mooncake.config import Config, parse_bytes
from torch_mooncake.errors import InvalidArgument

import pytest  # isort: skip


def modules_after(code: str) -> set[str]:
    out = subprocess.run(
        [sys.executable, "-c", f"{code}\nimport sys, json; print(json.dumps(list(sys.modules)))"],
        stdout=subprocess.PIPE,
        check=True,
    ).stdout
    return set(json.loads(out.splitlines()[-1]))


@pytest.mark.parametrize(
    "code",
    [
        "import torch_mooncake",
        "import torch_mooncake as tm; tm.Pool, tm.Engine, tm.put, tm.init, tm.errors, tm.config",
        "import torch_mooncake.cli as c; c._parser()",
        "import torch_mooncake as tm; e = tm.Engine(); e.register(bytearray(10)); e.close()",
    ],
)
def test_torch_is_not_imported(code: str) -> None:
    assert "torch" not in modules_after(code)


def test_import_alone_loads_next_to_nothing() -> None:
    ours = modules_after("import torch_mooncake") - modules_after("pass")
    assert "torch_mooncake._core" not in ours
    assert "numpy" not in ours
    assert len(ours) < 40


def test_all_names_resolve() -> None:
    for name in tm.__all__:
        assert getattr(tm, name) is not None
    with pytest.raises(AttributeError):
        tm.no_such_name  # noqa: B018


def test_errors_are_also_what_python_expects() -> None:
    for ours, theirs in {
        tm.KeyNotFound: KeyError,
        tm.InvalidArgument: ValueError,
        tm.OutOfBounds: IndexError,
        tm.PeerLost: ConnectionError,
        tm.DeadlineExceeded: TimeoutError,
        tm.IoError: OSError,
    }.items():
        error = ours("what happened", peer="node", bytes_done=3)
        assert isinstance(error, theirs)
        assert str(error) == "what happened (peer node)"
        assert (error.peer, error.bytes_done) == ("node", 3)
        import pickle

        copy = pickle.loads(pickle.dumps(error))
        assert (type(copy), str(copy), copy.bytes_done) == (ours, str(error), 3)


def test_every_setting_comes_from_its_variable() -> None:
    config = Config.from_env({})
    assert len(config.describe()) < 25
    env = {
        "TM_RUNTIME_DIR": "/run/x",
        "TM_POOL": "p",
        "TM_TOKEN": "s",
        "TM_MEMORY": "4GiB",
        "TM_LINGER_S": "0",
        "TM_TRANSPORTS": "shm, tcp",
        "TM_LANES": "4",
    }
    config = Config.from_env(env, lanes=8)
    assert (config.runtime_dir, config.pool, config.memory, config.linger_s) == ("/run/x", "p", 4 << 30, 0.0)
    assert (config.transports, config.lanes) == (("shm", "tcp"), 8)
    assert all(value != "s" for _, _, value, _ in config.describe())  # the token is not shown


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("TM_RUNTIME_DIR", "relative"),
        ("TM_POOL", "../x"),
        ("TM_MEMORY", "lots"),
        ("TM_MEMORY", "1"),
        ("TM_LINGER_S", "soon"),
        ("TM_LANES", "0"),
        ("TM_IO_THREADS", "99"),
        ("TM_TOKEN", "two\nlines"),
        ("TM_TRANSPORTS", "tcp,,"),
        ("TM_LOG_LEVEL", "loud"),
    ],
)
def test_a_bad_setting_names_its_variable(name: str, value: str) -> None:
    with pytest.raises(InvalidArgument, match=name if name != "TM_MEMORY" or value == "1" else "lots"):
        Config.from_env({name: value})


def test_torchrun_scopes_the_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job/7")
    assert Config.from_env({}).pool == "run-job_7"
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("MASTER_PORT", "29400")
    assert Config.from_env({}).pool == "run-port-29400"
    assert Config.from_env({"TM_POOL": "mine"}).pool == "mine"


def test_numbers_of_bytes() -> None:
    assert [parse_bytes(v) for v in ("0", 12, "1k", "1.5 MiB", "2GB", "1T")] == [0, 12, 1024, 3 << 19, 2 << 30, 1 << 40]
    for bad in ("", "x", "-1", -1, "1Q"):
        with pytest.raises(InvalidArgument):
            parse_bytes(bad)
