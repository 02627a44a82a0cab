"""``torch-mooncake ls get put rm stat``: the pool's objects from the shell."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import numpy as np

from torch_mooncake.cli import emit, human
from torch_mooncake.clock import deadline_ns
from torch_mooncake.errors import InvalidArgument
from torch_mooncake.objects import Description, describe
from torch_mooncake.pool import Pool
from torch_mooncake.tensors import Array, Bytes, Leaf, Sharded, Tensor, Text, build, leaf_nbytes


def add_commands(commands: Any, common: argparse.ArgumentParser) -> None:
    ls = commands.add_parser("ls", parents=[common], help="list keys")
    ls.add_argument("prefix", nargs="?", default="")
    ls.add_argument("-l", "--long", action="store_true", help="with size, version, label and what it is")
    ls.set_defaults(run=_ls)

    get = commands.add_parser("get", parents=[common], help="show an object, or write its bytes to a file")
    get.add_argument("key")
    get.add_argument("-o", "--out", metavar="FILE", help="write the bytes here (- is stdout; .npy for one array)")
    get.add_argument("--wait", type=float, metavar="SECONDS", help="wait for the key to appear")
    get.set_defaults(run=_get)

    put = commands.add_parser("put", parents=[common], help="store the bytes of a file (an array, if it is .npy)")
    put.add_argument("key")
    put.add_argument("file", help="- is stdin")
    put.add_argument("--sealed", action="store_true", help="the key names its content")
    put.add_argument("--if-exists", choices=("replace", "keep", "error"), default="replace")
    put.add_argument("--version", help="label of this version")
    put.add_argument("--ttl", type=float, metavar="SECONDS", help="missing after so long")
    put.set_defaults(run=_put)

    rm = commands.add_parser("rm", parents=[common], help="delete keys; exit status 3 if one was not there")
    rm.add_argument("keys", nargs="+")
    rm.set_defaults(run=_rm)

    stat = commands.add_parser("stat", parents=[common], help="memory and counts of the pool")
    stat.set_defaults(run=_stat)


def _pool(args: argparse.Namespace) -> Pool:
    return Pool(args.address, pool=args.pool, name="torch-mooncake", timeout=args.timeout)


def _located(pool: Pool, key: str, deadline: int, wait: float | None = None) -> tuple[Any, Any, Description]:
    client = pool._client(deadline)
    found = client.locate(key, None, "", deadline) if wait is None else client.wait(key, None, "", deadline_ns(wait))
    return client, found, describe(client, found, deadline)


def _leaf(leaf: Leaf) -> str:
    if isinstance(leaf, (Tensor, Sharded, Array)):
        kind = "array" if isinstance(leaf, Array) else "tensor"
        return f"{kind} {leaf.dtype} {list(leaf.shape)}"
    return f"{'bytes' if isinstance(leaf, Bytes) else 'str'} ({leaf.nbytes})"


def _describe(description: Description) -> Any:
    """The value with a few words in the place of each leaf; JSON."""
    return _jsonable(build(description.root, _leaf))


def _jsonable(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _jsonable(item) for key, item in value.items()}
    if isinstance(value, bytes):
        return repr(value)
    return [_jsonable(item) for item in value] if isinstance(value, (list, tuple)) else value


def _ls(args: argparse.Namespace) -> None:
    with _pool(args) as pool:
        keys = pool.keys(args.prefix, timeout=args.timeout)
        if not args.long:
            emit(args, keys, "\n".join(keys))
            return
        rows = []
        deadline = deadline_ns(args.timeout)
        for key, found in zip(keys, pool._client(deadline).locate_many(keys, deadline), strict=True):
            if isinstance(found, Exception):
                continue  # deleted since it was listed
            description = describe(pool._client(deadline), found, deadline)
            rows.append(
                {
                    "key": key,
                    "nbytes": found.nbytes,
                    "version": list(found.version),
                    "label": found.label,
                    "sealed": found.sealed,
                    "value": _describe(description),
                }
            )
        emit(args, rows, "\n".join(_row(row) for row in rows))


def _row(row: dict[str, Any]) -> str:
    value = row["value"]
    what = f"{type(value).__name__} of {len(value)}" if isinstance(value, (dict, list)) else str(value)
    view, counter = row["version"]
    return f"{human(row['nbytes']):>10}  {view}.{counter:<6} {row['label'] or '-':<10} {what:<32} {row['key']}"


def _get(args: argparse.Namespace) -> None:
    deadline = deadline_ns(args.timeout)
    with _pool(args) as pool:
        client, found, description = _located(pool, args.key, deadline, args.wait)
        if args.out is None:
            document = {
                "key": args.key,
                "nbytes": found.nbytes,
                "version": list(found.version),
                "label": found.label,
                "sealed": found.sealed,
                "replicas": found.replicas,
                "expires_in_s": None if found.left_ms is None else found.left_ms / 1000,
                "meta": _jsonable(description.user or {}),
                "value": _describe(description),
            }
            emit(args, document, "\n".join(f"{name}: {value}" for name, value in document.items()))
            return
        leaf = description.root
        if not isinstance(leaf, (Bytes, Text, Tensor, Array)):
            raise InvalidArgument(f"{args.key} is not one tensor, array, str or bytes: its bytes have no meaning alone")
        data = bytearray(leaf_nbytes(leaf))
        if data:
            client.read(found, leaf.offset, [data], deadline)
        if args.out.endswith(".npy"):
            np.save(args.out, _as_array(leaf, data))
        elif args.out == "-":
            sys.stdout.buffer.write(data)
        else:
            Path(args.out).write_bytes(data)


def _as_array(leaf: Leaf, data: bytearray) -> np.ndarray:
    if not isinstance(leaf, (Tensor, Array)):
        return np.frombuffer(data, np.uint8)
    try:
        dtype = np.dtype(leaf.dtype)
    except TypeError:
        raise InvalidArgument(f"numpy has no {leaf.dtype}: write the raw bytes to another kind of file") from None
    return np.frombuffer(data, dtype).reshape(leaf.shape)


def _put(args: argparse.Namespace) -> None:
    value: Any
    if args.file.endswith(".npy"):
        value = np.load(args.file, allow_pickle=False)
    else:
        value = sys.stdin.buffer.read() if args.file == "-" else Path(args.file).read_bytes()
    with _pool(args) as pool:
        result = pool.put(
            args.key,
            value,
            sealed=args.sealed,
            if_exists=args.if_exists,
            version=args.version,
            ttl_s=args.ttl,
            timeout=args.timeout,
        )
    document = {"version": list(result.version), "stored": result.stored, "nbytes": result.nbytes}
    emit(args, document, "" if result.stored else f"{args.key} was there and is kept")


def _rm(args: argparse.Namespace) -> int:
    with _pool(args) as pool:
        removed = pool.delete(args.keys, timeout=args.timeout)
    missing = [key for key, yes in zip(args.keys, removed, strict=True) if not yes]
    emit(args, dict(zip(args.keys, removed, strict=True)), "\n".join(f"{key} was not there" for key in missing))
    return 3 if missing else 0


def _stat(args: argparse.Namespace) -> None:
    with _pool(args) as pool:
        stat = pool.stat(timeout=args.timeout)
    lines = [f"view {stat['view']}, {stat['keys']} keys, {len(stat['nodes'])} nodes"]
    for n in stat["nodes"]:
        lines.append(
            f"  {n['address']}{' (home)' if n['is_home'] else ''}: {human(n['used_bytes'])} of "
            f"{human(n['limit_bytes'])} used in {n['extents']} extents, {human(n['limbo_bytes'])} in limbo, "
            f"{human(n['prepared_bytes'])} being written, {n['pinned']} pinned, {n['evictions']} evictions"
        )
    emit(args, stat, "\n".join(lines))
