"""Files: what the engine reads and writes, against a bare io_uring loop with O_DIRECT on the same file.

    python benchmarks/file.py [--folder DIR] [--json FILE] [--quick]

The folder must be on a file system that knows O_DIRECT. Runs of both alternate; a run reads or writes the whole file.
"""

from __future__ import annotations

import argparse
import ctypes
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from harness import MiB, Row, Table, main
from raw import buffer, gbps


def raw_loop(folder: Path) -> ctypes.CDLL:
    library = folder / "raw_file.so"
    command = ["g++", "-O2", "-std=c++17", "-shared", "-fPIC", str(Path(__file__).with_name("raw_file.cpp"))]
    subprocess.run([*command, "-o", str(library)], check=True)
    lib = ctypes.CDLL(str(library))
    size = ctypes.c_uint64
    lib.raw_file.argtypes = [ctypes.c_char_p, ctypes.c_int, ctypes.c_void_p, size, ctypes.c_uint32, ctypes.c_uint]
    lib.raw_file.restype = ctypes.c_double
    return lib


def run(args: argparse.Namespace) -> list[Row]:
    import torch_mooncake as tm

    table = Table("Files")
    nbytes, runs = (64 * MiB, 3) if args.quick else (512 * MiB, 7)
    with tempfile.TemporaryDirectory(dir=args.folder, prefix="tm-bench-") as name, tm.Engine() as engine:
        folder = Path(name)
        lib = raw_loop(folder)
        path = folder / "data"
        data = buffer(nbytes, forked=False)
        region = engine.register(data)
        with engine.open_file(path, nbytes=nbytes, writable=True, create=True) as file:
            engine.write(region, file, timeout=300).wait()
            for verb, transfer in (("read", engine.read), ("write", engine.write)):
                ours, raw = [], []
                for i in range(runs + 1):
                    start = time.perf_counter()
                    transfer(region, file, timeout=300).wait()
                    mine = time.perf_counter() - start
                    bare = lib.raw_file(bytes(path), verb == "write", data.ctypes.data, nbytes, MiB, 32)
                    if bare < 0:
                        raise OSError(-int(bare), f"the bare loop failed on {path}")
                    if i > 0:
                        ours.append(mine)
                        raw.append(bare)
                table.measured(
                    f"file {verb}, 1 MiB x {nbytes // MiB}, one call",
                    gbps(nbytes, ours),
                    "GB/s",
                    against="bare io_uring loop, 32 in flight",
                    baseline=gbps(nbytes, raw),
                    ratio_limit=0.85,
                )
    return table.rows


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--folder", default="/var/tmp", help="where the file is made (default: %(default)s)")


if __name__ == "__main__":
    sys.exit(main(__doc__ or "", run, arguments))
