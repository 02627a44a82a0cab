"""The pool's SSD tier: 1 MiB objects, more than the memory holds, against a bare io_uring loop on the same disk.

    python benchmarks/ssd.py [--folder DIR] [--json FILE] [--quick]

Written: puts into a full memory, each of which waits until something else is on the disk. Read: get_many of objects
that are on the disk only; once while the memory holds what is not on the disk yet (so that half as much is written as
is read), then while it holds copies of what is. Four threads do either, 16 keys a call; each of them copies when its
last key has come, so that less than 64 are in flight. Rounds of all and of the bare loop (32 in flight) alternate.
benchmarks/pool.py runs this too.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from file import raw_loop
from harness import MiB, Row, Table, main
from raw import buffer, gbps

THREADS, BATCH = 4, 16
SETTINGS = ("TM_RUNTIME_DIR", "TM_POOL", "TM_LINGER_S", "TM_MEMORY", "TM_SSD")


def ssd_rows(table: Table, folder: str, quick: bool) -> None:
    import torch

    import torch_mooncake as tm

    memory, count, rounds = (128, 256, 3) if quick else (256, 512, 7)
    place = Path(tempfile.mkdtemp(prefix="tm-bench-ssd-", dir=folder))
    runtime_dir = tempfile.mkdtemp(prefix="tm-bench-", dir="/tmp")
    before = {name: os.environ.get(name) for name in SETTINGS}
    values = (runtime_dir, "bench-ssd", "0", f"{memory}MiB", f"{place}/log:{4 * count * (rounds + 2)}MiB")
    os.environ.update(zip(SETTINGS, values, strict=True))
    try:
        lib = raw_loop(place)
        data = buffer(count * MiB, forked=False)
        raw_files = [place / f"raw{i}" for i in range(4)]  # in turn, as the log goes on: a host may cache its disks
        for raw_file in raw_files:
            raw_file.write_bytes(bytes(data[: count * MiB]))

        def bare(write: bool, turn: int) -> float:
            raw_file = raw_files[turn % len(raw_files)]
            seconds = lib.raw_file(bytes(raw_file), write, data.ctypes.data, count * MiB, MiB, 32)
            if seconds < 0:
                raise OSError(-int(seconds), f"the bare loop failed on {raw_file}")
            return float(seconds)

        value = torch.arange(MiB // 8)
        outs = threading.local()

        def put_some(keys: list[str]) -> None:
            for key in keys:
                tm.put(key, value, timeout=60)

        def get_some(keys: list[str]) -> None:
            if not hasattr(outs, "tensors"):
                outs.tensors = [torch.empty_like(value) for _ in range(BATCH)]
            tm.get_many(keys, out=outs.tensors[: len(keys)], timeout=60)

        def seconds_of(work: Callable[[list[str]], None], keys: list[str]) -> float:
            begin = time.perf_counter()
            list(threads.map(work, [keys[at : at + BATCH] for at in range(0, len(keys), BATCH)]))
            return time.perf_counter() - begin

        names = ("write", "mixed", "read", "bare write", "bare read")
        times: dict[str, list[float]] = {name: [] for name in names}
        tm.init()
        with ThreadPoolExecutor(THREADS) as threads:
            put_some([f"-1/{i}" for i in range(count)])
            for turn in range(rounds):
                write = seconds_of(put_some, [f"{turn}/{i}" for i in range(count)])
                bare_write = bare(True, turn)
                mixed = seconds_of(get_some, [f"{turn - 1}/{i}" for i in range(count)])
                read = seconds_of(get_some, [f"{turn}/{i}" for i in range(count)])
                for name, took in zip(names, (write, mixed, read, bare_write, bare(False, turn)), strict=True):
                    times[name].append(took)
        told = tm.stat()["nodes"][0]["ssd"]
        if told["errors"] or told["corrupt"] or not told["promotions"]:
            raise RuntimeError(f"the tier did not do what is measured: {told}")
        table.measured(
            "SSD tier, 1 MiB objects, read while writing half as much", gbps(count * MiB, times["mixed"]), "GB/s"
        )
        for verb in ("write", "read"):
            table.measured(
                f"SSD tier, 1 MiB objects, {verb}",
                gbps(count * MiB, times[verb]),
                "GB/s",
                against="bare io_uring loop, 32 in flight",
                baseline=gbps(count * MiB, times[f"bare {verb}"]),
                ratio_limit=0.85,
            )
    finally:
        tm.close()
        for name, old in before.items():
            os.environ.pop(name, None) if old is None else os.environ.update({name: old})
        shutil.rmtree(runtime_dir, ignore_errors=True)
        shutil.rmtree(place, ignore_errors=True)


def run(args: argparse.Namespace) -> list[Row]:
    table = Table("SSD tier")
    ssd_rows(table, args.folder, args.quick)
    return table.rows


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--folder", default="/var/tmp", help="where the log is made (default: %(default)s)")


if __name__ == "__main__":
    sys.exit(main(__doc__ or "", run, arguments))
