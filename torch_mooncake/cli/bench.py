"""``torch-mooncake bench transfer``: bandwidth and latency between two engines, over the transport of choice.

One host: both ends in this process. Two hosts: ``--serve tcp://HOST:PORT`` on one prints what to run on the other.
"""

from __future__ import annotations

import argparse
import array
import base64
import threading
import time
from typing import Any

from torch_mooncake.cli import emit, human
from torch_mooncake.config import Config, parse_bytes
from torch_mooncake.errors import Unsupported


def add_commands(commands: Any, common: argparse.ArgumentParser) -> None:
    bench = commands.add_parser("bench", help="measure this machine").add_subparsers(required=True, metavar="WHAT")
    parser = bench.add_parser("transfer", help="bytes between two engines", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--transport", default="tcp", help="shm, rdma or tcp: the only one allowed (%(default)s)")
    parser.add_argument("--read", action="store_true", help="read instead of writing")
    parser.add_argument("--block", type=parse_bytes, metavar="SIZE", help="of each piece (4 KiB to 16 MiB)")
    parser.add_argument("--batch", type=int, default=32, help="pieces of an op (%(default)s)")
    parser.add_argument("--ops", type=int, default=2, help="under way at once (%(default)s)")
    parser.add_argument("--seconds", type=float, default=2.0, help="for each block size (%(default)s)")
    parser.add_argument("--buffer", type=parse_bytes, default=256 << 20, metavar="SIZE", help="of either end (256 MiB)")
    ends = parser.add_mutually_exclusive_group()
    ends.add_argument("--serve", metavar="ADDRESS", help="be the other end, until told to stop")
    ends.add_argument("--target", metavar="WORD", help="what --serve printed on the other host")
    parser.set_defaults(run=_transfer)


def _engine(args: argparse.Namespace, name: str, listen: list[str]) -> Any:
    from torch_mooncake.transfer import Engine

    return Engine(listen, transports=(args.transport,), name=name, token=Config.from_env().token or "bench")


def _transfer(args: argparse.Namespace) -> int:
    if args.serve:
        with _engine(args, "target", [args.serve]) as engine:
            descriptor = engine.register(bytearray(args.buffer)).descriptor()
            word = engine.addresses[0] + "/" + base64.urlsafe_b64encode(descriptor).decode().rstrip("=")
            other = " --read" if args.read else ""
            print(f"torch-mooncake bench transfer --transport {args.transport}{other} --target '{word}'", flush=True)
            threading.Event().wait()
    if args.target:
        address, _, word = args.target.rpartition("/")
        descriptor = base64.urlsafe_b64decode(word + "=" * (-len(word) % 4))
        return _measure(args, address, descriptor)
    with _engine(args, "target", ["tcp://127.0.0.1:0"]) as engine:
        return _measure(args, engine.addresses[0], engine.register(bytearray(args.buffer)).descriptor())


def _measure(args: argparse.Namespace, address: str, descriptor: bytes) -> int:
    rows = []
    with _engine(args, "bench", []) as engine:
        remote = engine.connect(address).open(descriptor)
        local = engine.register(bytearray(args.buffer))
        sizes = [args.block] if args.block else [4 << 10 << shift for shift in range(0, 13, 2)]
        for block in sizes:
            if block * args.batch * args.ops > min(args.buffer, remote.nbytes):
                continue
            rows.append(_row(args, engine, local, remote, block))
    if not rows:
        raise Unsupported("no block size fits: a larger --buffer (at both ends), or a smaller --batch")
    lines = [f"{'block':>10} {'batch':>6} {'GB/s':>8} {'mean us':>10} {'p99 us':>10}  over"]
    lines += [
        f"{human(row['block']):>10} {row['batch']:>6} {row['gb_per_s']:>8.3f} {row['mean_us']:>10.1f} "
        f"{row['p99_us']:>10.1f}  {row['transport']}"
        for row in rows
    ]
    emit(args, rows, "\n".join(lines))
    return 0


def _row(args: argparse.Namespace, engine: Any, local: Any, remote: Any, block: int) -> dict[str, Any]:
    """Ops of ``batch`` blocks, ``ops`` of them under way at once, each on a part of the buffers of its own."""
    nbytes = block * args.batch
    lists = [array.array("q", [op * nbytes + i * block for i in range(args.batch)]) for op in range(args.ops)]
    begin = engine.read if args.read else engine.write

    def start(op: int) -> tuple[Any, float]:
        at = time.perf_counter()
        return begin(local, remote, local_offsets=lists[op], remote_offsets=lists[op], nbytes=block), at

    start(0)[0].wait()  # connections are made, pages are there
    latencies: list[float] = []
    under_way = [start(op) for op in range(args.ops)]
    began = time.perf_counter()
    while True:
        for op, (work, at) in enumerate(under_way):
            work.wait()
            now = time.perf_counter()
            latencies.append(now - at)
            under_way[op] = start(op)
        if now - began >= args.seconds:
            break
    moved = len(latencies) * nbytes
    transport = under_way[0][0].transport
    for work, _ in under_way:
        work.wait()
    latencies.sort()
    return {
        "block": block,
        "batch": args.batch,
        "gb_per_s": moved / (now - began) / 1e9,
        "mean_us": 1e6 * sum(latencies) / len(latencies),
        "p99_us": 1e6 * latencies[min(len(latencies) - 1, len(latencies) * 99 // 100)],
        "transport": transport,
    }
