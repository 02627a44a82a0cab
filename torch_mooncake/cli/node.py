"""``torch-mooncake node``: this host's node as a service, in the foreground; ``torch-mooncake drain`` ends one."""

from __future__ import annotations

import argparse
import os
import socket
import sys
import time
from concurrent import futures
from typing import TYPE_CHECKING, Any

from torch_mooncake.cli import emit, human, seconds
from torch_mooncake.clock import deadline_ns, seconds_left
from torch_mooncake.config import Config, parse_bytes
from torch_mooncake.errors import DeadlineExceeded, InvalidArgument, IoError, PeerLost, PoolUnavailable

if TYPE_CHECKING:
    from torch_mooncake.pool import Pool

_NOT_TOLD: dict[str, Any] = {
    "moved": None,
    "moved_bytes": None,
    "left": None,
    "why": "what became of its objects is not known",
}


def add_commands(commands: Any, common: argparse.ArgumentParser) -> None:
    parser = commands.add_parser("node", help="run this host's node in the foreground (a service)")
    parser.add_argument("--pool", help="name of the pool (TM_POOL)")
    parser.add_argument("--memory", type=parse_bytes, metavar="BYTES", help="memory to lend, e.g. 64GiB (TM_MEMORY)")
    parser.add_argument(
        "--ssd",
        action="append",
        metavar="PATH:SIZE",
        help="a folder of its own on an SSD for what the memory has no room for, e.g. /nvme0/tm:1T (TM_SSD)",
    )
    parser.add_argument(
        "--listen", action="append", default=[], metavar="ADDRESS", help="also listen here, e.g. tcp://0.0.0.0:7400"
    )
    parser.add_argument("--leader", default="", metavar="ADDRESS", help="join the pool of this node")
    parser.add_argument(
        "--cluster",
        default="",
        metavar="ADDRESS",
        help="the leader's address, the same on every node: the node whose host name it has is the leader",
    )
    parser.add_argument(
        "--discovery",
        metavar="URL",
        help="etcd://host:port[,…][/prefix], the same on every node: they elect their leader there (TM_DISCOVERY)",
    )
    parser.add_argument(
        "--linger", type=_linger, default=-1, metavar="SECONDS", help="exit when unused so long (never)"
    )
    parser.add_argument("--drain", type=seconds, metavar="SECONDS", help="the longest that it takes to leave (30)")
    parser.add_argument("--host-id", help="name of this host (TM_HOST_ID)")
    parser.add_argument(
        "--http", metavar="HOST:PORT", help="serve /healthz, /readyz and /metrics here, e.g. 127.0.0.1:9400"
    )
    parser.set_defaults(run=_node, json=False)

    drain = commands.add_parser(
        "drain", parents=[common], help="have a node leave the pool, and wait until it has; 0 once it is gone"
    )
    drain.set_defaults(run=_drain)


def _linger(text: str) -> float:
    """Below 0: never. ValueError for NaN."""
    return -1.0 if float(text) < 0 else seconds(text)


def is_this_host(address: str, hostname: str | None = None) -> bool:
    """Whether ``tcp://host:port`` is this host: ``host`` is its name ("tm-0", or "tm-0.tm.default.svc" on the pod
    tm-0), or one of its addresses."""
    host = address.rpartition("://")[2].rpartition(":")[0].strip("[]").lower()
    name = (hostname or socket.gethostname()).lower()
    if host == name or host.startswith(name + "."):
        return True
    try:
        family, kind, _, _, place = socket.getaddrinfo(host, 0, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as ours:
            ours.bind(place)  # only an address of this host can be bound
    except OSError:
        return False
    return True


def _node(args: argparse.Namespace) -> int:
    from torch_mooncake import node

    config = Config.from_env(
        pool=args.pool,
        memory=args.memory,
        ssd=args.ssd,
        linger_s=args.linger,
        host_id=args.host_id,
        discovery=args.discovery,
    )
    if config.discovery and (args.leader or args.cluster):
        raise InvalidArgument("--discovery elects the leader: --leader and --cluster name it")
    node.pool_dir(config)
    leader = args.leader or ("" if not args.cluster or is_this_host(args.cluster) else args.cluster)
    command = node.arguments(config, listen=args.listen, leader=leader)
    if args.drain is not None:
        command += ["--drain-s", str(args.drain)]
    env = node.environment(config.token)
    if args.http:
        from torch_mooncake.cli.health import run_with_http

        return run_with_http(command, env, args.http, config)
    return os.execve(command[0], command, env)


def _drain(args: argparse.Namespace) -> None:
    from torch_mooncake.cli.objects import connect
    from torch_mooncake.node import nobody_listens

    until = deadline_ns(args.timeout)
    # The node answers those who ask while it is there. The pool's end ends the question.
    with futures.ThreadPoolExecutor(1) as thread, connect(args, monitor=True) as pool:
        node = _stat_here(pool, until)
        pool._client(until).drain(until)
        report = thread.submit(_report, pool, until)
        told = f"{human(node['used_bytes'])} are in use there"
        while True:
            try:
                now = _stat_here(pool, min(until, deadline_ns(2)))
            except (PeerLost, IoError, PoolUnavailable, DeadlineExceeded) as error:
                if nobody_listens(pool.config.address):
                    break
                told = f"it does not answer ({error})"
            else:
                if now["id"] != node["id"]:
                    break  # another node, in its place
                told = f"{human(now['used_bytes'])} are in use there"
                if report.done() and report.exception():  # the connection was lost, the node is there
                    report = thread.submit(_report, pool, until)
            if seconds_left(until) <= 0:
                raise DeadlineExceeded(f"the node has not left: {told}")
            if sys.stderr.isatty():
                print(f"\rleaving: {told}\x1b[K", end="", file=sys.stderr)
            time.sleep(0.05)
        futures.wait([report], min(5, seconds_left(until)))  # what it said last may be under way
        moved = report.result() if report.done() and not report.exception() else _NOT_TOLD
    text = f"{node['address']} has left the pool"
    if moved is _NOT_TOLD:
        text += f"; {moved['why']}"
    if moved["moved"]:
        text += f"; {moved['moved']} objects ({human(moved['moved_bytes'])}) were moved to other nodes"
    if moved["left"]:
        text += f"; {moved['left']} could not be moved: {moved['why']}"
    emit(args, {"node": node["id"], "address": node["address"], **moved}, text)


def _stat_here(pool: Pool, deadline: int) -> dict[str, Any]:
    found: dict[str, Any] = pool._client(deadline).stat(deadline, here=True)["nodes"][0]
    return found


def _report(pool: Pool, deadline: int) -> dict[str, Any]:
    """What has become of the objects of the node that leaves, as soon as it says so."""
    moved: dict[str, Any] = pool._client(deadline).drained(deadline)
    return moved
