"""``torch-mooncake get put``: objects to and from files, standard input and output.

A file's suffix says what it holds: ``.npy`` one array; ``.safetensors`` the tensors under a prefix, a key each;
anything else bytes as they are.
"""

from __future__ import annotations

import argparse
import contextlib
import mmap
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np

from torch_mooncake.cli import emit, human, seconds
from torch_mooncake.cli.objects import connect, located, show, until
from torch_mooncake.errors import Corrupt, DeadlineExceeded, InvalidArgument, KeyNotFound
from torch_mooncake.tensors import Array, Bytes, Tensor, Text, leaf_nbytes

_CHUNK = 64 << 20
Flat = Bytes | Text | Tensor | Array  # what one run of bytes is


def add_commands(commands: Any, common: argparse.ArgumentParser) -> None:
    get = commands.add_parser("get", parents=[common], help="write an object to a file, or say what it is")
    get.add_argument("key", help="for a .safetensors file: the prefix of the keys that go into it")
    get.add_argument("-o", "--out", metavar="FILE", help="write it here (- is stdout; .npy and .safetensors as such)")
    get.add_argument("--wait", type=seconds, metavar="SECONDS", help="wait for the key to appear")
    get.set_defaults(run=_get, refuse=get.error)

    put = commands.add_parser("put", parents=[common], help="store a file's bytes, array (.npy) or .safetensors")
    put.add_argument("key", help="for a .safetensors file: the prefix of its tensors' keys")
    put.add_argument("file", help="- is stdin")
    put.add_argument("--sealed", action="store_true", help="the key names its content")
    put.add_argument("--if-exists", choices=("replace", "keep", "error"), default="replace")
    put.add_argument("--version", help="label of this version")
    put.add_argument("--ttl", type=seconds, metavar="SECONDS", help="missing after so long")
    put.add_argument("--pin", choices=("soft", "hard"), help="evicted last, or never")
    put.add_argument("--parent", metavar="KEY", help="evicted after this one, not before")
    put.add_argument("--replicas", default="1", metavar="N", help='copies on different hosts; "<=N" makes do with less')
    put.set_defaults(run=_put)


class Progress:
    """One line on a terminal's stderr, from half a second on. Silent elsewhere."""

    def __init__(self, what: str, total: int | None) -> None:
        self._what, self._total = what, total
        self._done = 0
        self._started = self._shown = time.monotonic()
        self._on = sys.stderr.isatty()
        self._drawn = False

    def add(self, nbytes: int) -> None:
        self._done += nbytes
        now = time.monotonic()
        if not self._on or now - self._shown < 0.5:
            return
        self._shown, self._drawn = now, True
        of = "" if self._total is None else f" of {human(self._total)}"
        rate = human(int(self._done / (now - self._started)))
        print(f"\r{self._what}: {human(self._done)}{of}, {rate}/s \x1b[K", end="", file=sys.stderr, flush=True)

    def close(self) -> None:
        if self._drawn:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def _get(args: argparse.Namespace) -> None:
    if args.out is None:
        return show(args)
    if args.out.endswith(".safetensors"):
        if args.wait is not None:
            args.refuse("--wait is for one key, and a .safetensors file holds those under a prefix")
        with connect(args) as pool:
            nbytes = pool.export_safetensors(args.key, args.out, timeout=args.timeout)
        emit(args, {"prefix": args.key, "nbytes": nbytes}, "")
        return None
    deadline = until(args)
    with connect(args) as pool:
        while True:
            client, found, description = located(pool, args.key, deadline, args.wait)
            leaf = description.root
            if not isinstance(leaf, (Bytes, Text, Tensor, Array)):
                raise InvalidArgument(
                    f"{args.key} is not one tensor, array, str or bytes: its bytes have no meaning alone"
                )
            try:
                if args.out.endswith(".npy"):
                    data = bytearray(leaf_nbytes(leaf))
                    if data:
                        client.read(found, leaf.offset, [data], deadline)
                    with _replacing(args.out) as out:
                        np.save(out, _as_array(leaf, data))
                elif args.out == "-":
                    _write(client, found, leaf, sys.stdout.buffer, deadline)
                    sys.stdout.buffer.flush()
                else:
                    with _replacing(args.out) as out:
                        _write(client, found, leaf, out, deadline)
                break
            except KeyNotFound:  # replaced while it was read: what has left us cannot be taken back
                if args.out == "-" or time.monotonic_ns() >= deadline:
                    raise DeadlineExceeded(f"{args.key} was replaced while it was read") from None
    if args.out != "-":
        emit(args, {"key": args.key, "version": list(found.version), "nbytes": leaf_nbytes(leaf)}, "")
    return None


def _write(client: Any, found: Any, leaf: Flat, out: IO[bytes], deadline: int) -> None:
    """A leaf's bytes, chunk by chunk: all of one version, each chunk validated."""
    nbytes = leaf_nbytes(leaf)
    progress = Progress("get", nbytes)
    buffer = bytearray(min(nbytes, _CHUNK))
    for at in range(0, nbytes, _CHUNK):
        part = memoryview(buffer)[: min(_CHUNK, nbytes - at)]
        client.read(found, leaf.offset + at, [part], deadline)
        out.write(part)
        progress.add(len(part))
    progress.close()


@contextlib.contextmanager
def _replacing(path: str) -> Iterator[IO[bytes]]:
    """The file is there whole or not at all. What is no regular file (a device, a pipe) is written to as it is."""
    if os.path.exists(path) and not os.path.isfile(path):
        with open(path, "wb") as out:
            yield out
        return
    fresh = f"{path}.{os.getpid()}.part"
    try:
        with open(fresh, "wb") as out:
            yield out
        os.replace(fresh, path)
    except BaseException:
        Path(fresh).unlink(missing_ok=True)
        raise


def _as_array(leaf: Flat, data: bytearray) -> np.ndarray:
    if not isinstance(leaf, (Tensor, Array)):
        return np.frombuffer(data, np.uint8)
    try:
        dtype = np.dtype(leaf.dtype)
    except TypeError:
        raise InvalidArgument(f"numpy has no {leaf.dtype}: write the raw bytes to another kind of file") from None
    return np.frombuffer(data, dtype).reshape(leaf.shape)


@contextlib.contextmanager
def _file_bytes(path: str) -> Iterator[Any]:
    """A file's bytes, mapped; of stdin, a pipe or an empty file, read."""
    if path == "-":
        yield _read_all(sys.stdin.buffer)
        return
    with open(path, "rb") as file:
        if not os.path.isfile(path) or os.fstat(file.fileno()).st_size == 0:
            yield _read_all(file)
            return
        with mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped, memoryview(mapped) as view:
            yield view


def _read_all(file: IO[bytes]) -> bytearray:
    data = bytearray()
    progress = Progress("read", None)
    while chunk := file.read(_CHUNK):
        data += chunk
        progress.add(len(chunk))
    progress.close()
    return data


def _array_in(path: str) -> np.ndarray:
    """The array of an .npy file. Corrupt, whatever else it holds."""
    with open(path, "rb") as file:
        try:
            return np.lib.format.read_array(file, allow_pickle=False)
        except OSError:
            raise
        except Exception as error:  # numpy has no list of what it says to bytes that are not its own
            why = " ".join(str(error).split()) or type(error).__name__
            raise Corrupt(f"{path} is not an .npy file of numbers: {why}") from None


def _put(args: argparse.Namespace) -> None:
    options = {
        "sealed": args.sealed,
        "if_exists": args.if_exists,
        "version": args.version,
        "ttl_s": args.ttl,
        "replicas": args.replicas,
        "pin": args.pin,
        "parent": args.parent,
        "timeout": args.timeout,
    }
    with connect(args, start=True) as pool:
        if args.file.endswith(".safetensors"):
            keys = pool.import_safetensors(args.file, args.key, **options)
            emit(args, {"keys": keys}, f"{len(keys)} tensors")
            return
        if args.file.endswith(".npy"):
            try:
                result = pool.put(args.key, _array_in(args.file), **options)
            except TypeError as error:
                raise InvalidArgument(f"{args.file}: {error}") from None
        else:
            with _file_bytes(args.file) as data:
                result = pool.put(args.key, data, **options)
    document = {"version": list(result.version), "stored": result.stored, "nbytes": result.nbytes}
    emit(args, document, "" if result.stored else f"{args.key} was there and is kept")
