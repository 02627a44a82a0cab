"""``torch-mooncake node``: this host's node as a service, in the foreground."""

from __future__ import annotations

import argparse
import os
from typing import Any

from torch_mooncake.config import Config, parse_bytes


def add_commands(commands: Any, common: argparse.ArgumentParser) -> None:
    parser = commands.add_parser("node", help="run this host's node in the foreground (a service)")
    parser.add_argument("--pool", help="name of the pool (TM_POOL)")
    parser.add_argument("--memory", type=parse_bytes, metavar="BYTES", help="memory to lend, e.g. 64GiB (TM_MEMORY)")
    parser.add_argument(
        "--listen", action="append", default=[], metavar="ADDRESS", help="also listen here, e.g. tcp://0.0.0.0:7400"
    )
    parser.add_argument("--leader", default="", metavar="ADDRESS", help="join the pool of this node")
    parser.add_argument("--linger", type=float, default=-1, metavar="SECONDS", help="exit when unused so long (never)")
    parser.add_argument("--host-id", help="name of this host (TM_HOST_ID)")
    parser.set_defaults(run=_node, json=False)


def _node(args: argparse.Namespace) -> int:
    from torch_mooncake import node

    config = Config.from_env(pool=args.pool, memory=args.memory, linger_s=args.linger, host_id=args.host_id)
    node.pool_dir(config)
    command = node.arguments(config, listen=args.listen, leader=args.leader)
    os.execve(command[0], command, node.environment(config.token))
