"""What a process that starts a node tells it."""

from __future__ import annotations

import pytest

from torch_mooncake import node
from torch_mooncake.config import Config


@pytest.mark.parametrize(
    ("given", "flags"),
    [
        ({}, ["--transports", "local,shm,tcp"]),
        ({"transports": ("rdma", "tcp")}, ["--transports", "rdma,tcp"]),
        ({"nics": ("mlx5_*", "!mlx5_3")}, ["--nics", "mlx5_*,!mlx5_3"]),
        ({"rdma": "sl=3,tc=106"}, ["--rdma", "sl=3,tc=106"]),
    ],
)
def test_what_carries_bytes_is_the_nodes_choice_too(given: dict[str, object], flags: list[str]) -> None:
    args = node.arguments(Config.from_env({}, **given))
    at = args.index(flags[0])
    assert args[at : at + 2] == flags
    assert ("--nics" in args) == ("nics" in given)
    assert ("--rdma" in args) == ("rdma" in given)


def test_what_was_given_wins_over_the_environment() -> None:
    config = Config.from_env({"TM_TRANSPORTS": "local,tcp", "TM_RDMA": "sl=1"}, transports=("shm",))
    args = node.arguments(config)
    assert args[args.index("--transports") + 1] == "shm"
    assert args[args.index("--rdma") + 1] == "sl=1"
