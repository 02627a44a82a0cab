"""``torch-mooncake ls rm exists info stat``: what is in the pool. ``copy.py`` has get and put."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from torch_mooncake.cli import EXIT_ERROR, EXIT_MISSING, emit, human, seconds
from torch_mooncake.clock import deadline_ns, seconds_left
from torch_mooncake.config import Config
from torch_mooncake.errors import Error, IoError, KeyNotFound, PeerLost, PoolUnavailable
from torch_mooncake.objects import Description, describe, describe_peeked
from torch_mooncake.pool import Pool, peek
from torch_mooncake.tensors import Array, Bytes, Leaf, Sharded, Tensor, build


def add_commands(commands: Any, common: argparse.ArgumentParser) -> None:
    ls = commands.add_parser("ls", parents=[common], help="list keys")
    ls.add_argument("prefix", nargs="?", default="")
    ls.add_argument("-l", "--long", action="store_true", help="with size, version, label and what it is")
    ls.set_defaults(run=_ls)

    rm = commands.add_parser("rm", parents=[common], help="delete keys; exit status 3 if one was not there")
    rm.add_argument("keys", nargs="+")
    rm.set_defaults(run=_rm)

    exists = commands.add_parser("exists", parents=[common], help="exit status 0 if all keys are there, 3 if not")
    exists.add_argument("keys", nargs="+")
    exists.set_defaults(run=_exists)

    info = commands.add_parser("info", parents=[common], help="version, size and kind of an object, without reading it")
    info.add_argument("key")
    info.add_argument("--wait", type=seconds, metavar="SECONDS", help="wait for the key to appear")
    info.set_defaults(run=show)

    pin = commands.add_parser("pin", parents=[common], help="keep keys in memory; exit status 3 if one was not there")
    pin.add_argument("keys", nargs="+")
    pin.add_argument(
        "--as",
        dest="level",
        choices=("soft", "hard", "none"),
        default="hard",
        help="soft: evicted last, hard: never (hard), none: as any other",
    )
    pin.set_defaults(run=_pin)

    quota = commands.add_parser(
        "quota", parents=[common], help="limit the memory of keys with a prefix, or show limits"
    )
    quota.add_argument("prefix", nargs="?")
    quota.add_argument("limit", nargs="?", metavar="BYTES", help='e.g. 20GiB, or "none"')
    quota.set_defaults(run=_quota, refuse=quota.error)

    stat = commands.add_parser("stat", parents=[common], help="memory and counts of the pool")
    stat.set_defaults(run=_stat)


class _Monitor(Pool):
    _monitor = True


def connect(args: argparse.Namespace, *, monitor: bool = False, start: bool = False) -> Pool:
    """The pool of ``--address``, or of this host's node, which is started only with ``start``. PoolUnavailable."""
    kind = _Monitor if monitor else Pool
    if args.address or start:
        return kind(args.address, pool=args.pool, name="torch-mooncake", timeout=args.timeout)
    from torch_mooncake import node

    config = Config.from_env(pool=args.pool)
    if config.address:
        return kind(None, name="torch-mooncake", timeout=args.timeout)
    nobody = PoolUnavailable(
        f"this host has no node of the pool {config.pool!r} in {config.runtime_dir}: start one (torch-mooncake node), "
        f"or name another host's (--address)"
    )
    if not (Path(config.runtime_dir) / config.pool / "node.sock").exists():
        raise nobody
    try:
        return kind(
            node.socket_address(config), token=node.pool_token(config), name="torch-mooncake", timeout=args.timeout
        )
    except (PeerLost, IoError):
        raise nobody from None


def located(pool: Pool, key: str, deadline: int, wait: float | None = None) -> tuple[Any, Any, Description]:
    """(client, object, description). KeyNotFound, or DeadlineExceeded after ``wait`` seconds, which ``deadline`` has
    room for: see ``until``."""
    client = pool._client(deadline)
    found = client.locate(key, None, "", deadline) if wait is None else client.wait(key, None, "", deadline_ns(wait))
    return client, found, describe(client, found, deadline)


def _leaf(leaf: Leaf) -> str:
    if isinstance(leaf, (Tensor, Sharded, Array)):
        kind = "array" if isinstance(leaf, Array) else "tensor"
        return f"{kind} {leaf.dtype} {list(leaf.shape)}"
    return f"{'bytes' if isinstance(leaf, Bytes) else 'str'} ({leaf.nbytes})"


def _describe(description: Description | None) -> Any:
    """The value with a few words in the place of each leaf; JSON."""
    if description is None:
        return "not told: its description is on an SSD with it"
    return _jsonable(build(description.root, _leaf))


def _jsonable(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _jsonable(item) for key, item in value.items()}
    if isinstance(value, bytes):
        return repr(value)
    return [_jsonable(item) for item in value] if isinstance(value, (list, tuple)) else value


def until(args: argparse.Namespace) -> int:
    """The deadline of a command that may wait for its key first."""
    return deadline_ns(args.timeout + (args.wait or 0))


def _ls(args: argparse.Namespace) -> int:
    deadline = deadline_ns(args.timeout)
    with connect(args) as pool:
        keys = pool.keys(args.prefix, timeout=args.timeout)
        if not args.long:
            emit(args, keys, "\n".join(keys))
            return 0
        client = pool._client(deadline)
        rows = []
        for key, found in zip(keys, client.peek_many(keys, deadline), strict=True):
            try:
                rows.append(_entry(client, key, found, deadline))
            except KeyNotFound:
                continue  # deleted since it was listed
            except Error as error:
                rows.append({"key": key, "error": error.code, "message": f"{type(error).__name__}: {error}"})
    emit(args, rows, "\n".join(_row(row) for row in rows))
    return EXIT_ERROR if any("error" in row for row in rows) else 0


def _entry(client: Any, key: str, found: Any, deadline: int) -> dict[str, Any]:
    if isinstance(found, Exception):
        raise found
    return {
        "key": key,
        "nbytes": found.nbytes,
        "version": list(found.version),
        "label": found.label,
        "sealed": found.sealed,
        "value": _describe(describe_peeked(client, found, deadline)),
    }


def _row(row: dict[str, Any]) -> str:
    if "error" in row:
        return f"{'?':>10}  {row['key']}: {row['message']}"
    value = row["value"]
    what = f"{type(value).__name__} of {len(value)}" if isinstance(value, (dict, list)) else str(value)
    view, counter = row["version"]
    return f"{human(row['nbytes']):>10}  {view}.{counter:<6} {row['label'] or '-':<10} {what:<32} {row['key']}"


def show(args: argparse.Namespace) -> None:
    """What the pool knows of a key."""
    deadline = until(args)
    with connect(args) as pool:
        wait_by = deadline_ns(args.wait)
        client = pool._client(deadline)
        while True:
            try:
                found = peek(client, args.key, deadline)
                description = describe_peeked(client, found, deadline)
                break
            except KeyNotFound:  # also one that went between the two, or since it was waited for
                if args.wait is None:
                    raise
                pool.wait(args.key, seconds_left(wait_by))
        document = {
            "key": args.key,
            "nbytes": found.nbytes,
            "version": list(found.version),
            "label": found.label,
            "sealed": found.sealed,
            "replicas": found.replicas,
            "expires_in_s": None if found.left_ms is None else found.left_ms / 1000,
            "tiers": found.tiers,
            "pin": None if found.pin == "none" else found.pin,
            "meta": _jsonable((description and description.user) or {}),
            "value": _describe(description),
        }
        emit(args, document, "\n".join(f"{name}: {value}" for name, value in document.items()))


def _rm(args: argparse.Namespace) -> int:
    with connect(args) as pool:
        removed = pool.delete(args.keys, timeout=args.timeout)
    missing = [key for key, yes in zip(args.keys, removed, strict=True) if not yes]
    emit(args, dict(zip(args.keys, removed, strict=True)), "\n".join(f"{key} was not there" for key in missing))
    return EXIT_MISSING if missing else 0


def _pin(args: argparse.Namespace) -> int:
    with connect(args) as pool:
        pinned = pool.pin(args.keys, None if args.level == "none" else args.level, timeout=args.timeout)
    missing = [key for key, yes in zip(args.keys, pinned, strict=True) if not yes]
    emit(args, dict(zip(args.keys, pinned, strict=True)), "\n".join(f"{key} was not there" for key in missing))
    return EXIT_MISSING if missing else 0


def quota_lines(quotas: list[dict[str, Any]]) -> list[str]:
    return [f"quota {q['prefix']}: {human(q['used_bytes'])} of {human(q['limit_bytes'])}" for q in quotas]


def _quota(args: argparse.Namespace) -> None:
    if args.prefix is not None and args.limit is None:
        args.refuse('a prefix needs its limit: BYTES, or "none"')
    with connect(args) as pool:
        if args.prefix is None:
            quotas = pool.stat(timeout=args.timeout)["quotas"]
        else:
            limit = None if args.limit == "none" else args.limit
            quotas = pool.set_quota(args.prefix, limit, timeout=args.timeout)
    emit(args, quotas, "\n".join(quota_lines(quotas)))


def _exists(args: argparse.Namespace) -> int:
    with connect(args) as pool:
        present = pool.exists(args.keys, timeout=args.timeout)
    missing = [key for key, yes in zip(args.keys, present, strict=True) if not yes]
    emit(args, dict(zip(args.keys, present, strict=True)), "\n".join(f"{key} is not there" for key in missing))
    return EXIT_MISSING if missing else 0


def _stat(args: argparse.Namespace) -> None:
    with connect(args) as pool:
        stat = pool.stat(timeout=args.timeout)
    lines = [f"view {stat['view']}, {stat['keys']} keys, {len(stat['nodes'])} nodes"]
    for n in stat["nodes"]:
        lines.append(
            f"  {n['address']}{' (home)' if n['is_home'] else ''}: {human(n['used_bytes'])} of "
            f"{human(n['limit_bytes'])} used in {n['extents']} extents, {human(n['limbo_bytes'])} in limbo, "
            f"{human(n['prepared_bytes'])} being written, {n['pinned']} pinned, {n['evictions']} evictions"
        )
        if n["soft_pinned_bytes"] or n["hard_pinned_bytes"]:
            lines.append(
                f"    kept: {human(n['hard_pinned_bytes'])} never evicted, {human(n['soft_pinned_bytes'])} evicted last"
            )
        if (ssd := n["ssd"])["limit_bytes"] or ssd["out_of_service"]:
            lines.append(
                f"    SSD: {human(ssd['used_bytes'])} of {human(ssd['limit_bytes'])}, {ssd['records']} objects, "
                f"{ssd['demotions']} written, {ssd['promotions']} brought back, {ssd['dropped']} dropped, "
                f"{ssd['refused']} refused, {ssd['errors'] + ssd['corrupt']} errors"
                + (f", {ssd['out_of_service']} out of service" if ssd["out_of_service"] else "")
            )
    lines += quota_lines(stat["quotas"])
    emit(args, stat, "\n".join(lines))
