"""What all benchmarks share: rows, tables, timing, other processes, and the limits of the machine.

A row holds a median and its spread beside what it is held against in the same run. ``holds`` says whether its target
is met; a baseline that comes out slower than 0.7 of what the docs record for this machine voids its row: run again.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import multiprocessing
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

MiB, GiB = 1 << 20, 1 << 30


@dataclass
class Row:
    name: str
    value: float
    unit: str
    spread: tuple[float, float]
    against: str = ""
    against_value: float | None = None
    ratio: float | None = None
    target: str = ""
    holds: bool | None = None  # None: this row has no target
    note: str = ""


class Table:
    """Collects rows, prints each as it comes, and writes them at the end."""

    def __init__(self, title: str) -> None:
        self.rows: list[Row] = []
        print(f"\n{title}\n{'':-<132}")
        print(f"{'':44}{'value':>10} {'':9}{'spread':>20}   {'against':<26}{'value':>9}{'ratio':>7}  target")

    def add(self, row: Row) -> None:
        self.rows.append(row)
        spread = f"({row.spread[0]:.3g} - {row.spread[1]:.3g})"
        against = "" if row.against_value is None else f"{row.against_value:>9.3g}"
        ratio = "" if row.ratio is None else f"{row.ratio:>7.2f}"
        verdict = {True: "holds", False: "MISSED", None: ""}[row.holds]
        print(
            f"{row.name:<44}{row.value:>10.4g} {row.unit:<9}{spread:>20}   {row.against:<26}{against:>9}{ratio:>7}  "
            f"{row.target} {verdict}{'  ' + row.note if row.note else ''}",
            flush=True,
        )

    def measured(
        self,
        name: str,
        values: list[float],
        unit: str,
        *,
        against: str = "",
        baseline: list[float] | None = None,
        limit: float | None = None,
        ratio_limit: float | None = None,
        at_least: bool = True,
        note: str = "",
    ) -> None:
        """A row of repeated values; ``limit`` bounds the value, ``ratio_limit`` its ratio to the baseline's median."""
        value = statistics.median(values)
        base = statistics.median(baseline) if baseline else None
        ratio = value / base if base else None
        sign = "≥" if at_least else "≤"
        checks = [(limit, value, f"{sign} {limit} {unit}"), (ratio_limit, ratio, f"{sign} {ratio_limit} ×")]
        bounds = [(bound, got, text) for bound, got, text in checks if bound is not None and got is not None]
        holds = all((got >= bound) if at_least else (got <= bound) for bound, got, _ in bounds) if bounds else None
        target = ", ".join(text for _, _, text in bounds)
        spread = (min(values), max(values))
        self.add(Row(name, value, unit, spread, against, base, ratio, target, holds, note))


def main(description: str, run: Callable[[argparse.Namespace], list[Row]]) -> int:
    """Parse ``--json FILE``, ``--quick``; run; write the rows. Exit status 0 whatever holds."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--json", metavar="FILE", help="write the rows here")
    parser.add_argument("--quick", action="store_true", help="fewer repetitions and smaller sizes: no numbers to quote")
    args = parser.parse_args()
    rows = run(args)
    if args.json:
        Path(args.json).write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    missed = [row.name for row in rows if row.holds is False]
    print(f"\n{len(rows)} rows; targets missed: {', '.join(missed) if missed else 'none'}")
    return 0


def repeat(n: int, call: Callable[[], Any], before: Callable[[], Any] = lambda: None) -> list[float]:
    """Seconds of each of ``n`` calls, after one that is not counted."""
    seconds = []
    for _ in range(n + 1):
        before()
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return seconds[1:]


def gbps(nbytes: int, seconds: list[float]) -> list[float]:
    return [nbytes / s / 1e9 for s in seconds]


def buffer(nbytes: int) -> np.ndarray[Any, Any]:
    """Private memory, touched."""
    return np.full(nbytes, 1, np.uint8)


# --- the limits of the machine ---


class Raw:
    """The functions of raw.cpp."""

    def __init__(self) -> None:
        source = Path(__file__).with_name("raw.cpp")
        self.folder = tempfile.TemporaryDirectory(prefix="tm-bench-")
        library = Path(self.folder.name) / "raw.so"
        command = ["g++", "-O3", "-march=native", "-std=c++17", "-pthread", "-shared", "-fPIC"]
        subprocess.run([*command, str(source), "-o", str(library)], check=True)
        self.lib = ctypes.CDLL(str(library))
        number, size, pointer = ctypes.c_int, ctypes.c_size_t, ctypes.c_void_p
        self.lib.raw_copy.argtypes = [pointer, pointer, size, number, number, size, number, pointer]
        for name in ("raw_send", "raw_recv"):
            getattr(self.lib, name).argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t]

    def copy_bound(self, nbytes: int, threads: int, n: int) -> list[float]:
        """GB/s of the better of memcpy and interleaved non-temporal stores; other memory each time (the caches are
        large), both sides touched."""
        span = max(1, GiB // nbytes)
        src, dst = buffer(span * nbytes), buffer(span * nbytes)
        best: list[float] = []
        for mode in (0, 1):
            seconds = (ctypes.c_double * (n + 1))()
            self.lib.raw_copy(dst.ctypes.data, src.ctypes.data, nbytes, threads, mode, span, n + 1, seconds)
            speeds = gbps(nbytes, list(seconds)[1:])  # the first round warms up
            if not best or statistics.median(speeds) > statistics.median(best):
                best = speeds
        return best

    def socket_loop(self, nbytes: int, connections: int, n: int, *, unix: bool = False) -> list[float]:
        """GB/s of ``connections`` plain sockets between two processes, 1 MiB calls; the better of the default
        congestion control and reno."""
        best: list[float] = []
        for congestion in [""] if unix else ["", "reno"]:
            speeds = self._sockets(nbytes, connections, n, unix, congestion)
            if not best or statistics.median(speeds) > statistics.median(best):
                best = speeds
        return best

    def _sockets(self, nbytes: int, connections: int, n: int, unix: bool, congestion: str) -> list[float]:
        pairs = [_unix_pair() if unix else _tcp_pair(congestion) for _ in range(connections)]
        part = nbytes // connections
        pid = os.fork()
        if pid == 0:
            src = buffer(nbytes)
            for _ in range(n + 1):
                self._each([s for s, _ in pairs], self.lib.raw_send, src.ctypes.data, part)
                for s, _ in pairs:
                    s.recv(1)
            os._exit(0)
        dst = buffer(nbytes)

        def receive() -> None:
            self._each([r for _, r in pairs], self.lib.raw_recv, dst.ctypes.data, part)

        def go() -> None:
            for _, r in pairs:
                r.send(b"x")

        seconds = []
        for _ in range(n + 1):
            start = time.perf_counter()
            receive()
            seconds.append(time.perf_counter() - start)
            go()
        os.waitpid(pid, 0)
        for s, r in pairs:
            s.close()
            r.close()
        return gbps(part * connections, seconds[1:])

    def _each(self, sockets: list[socket.socket], function: Any, address: int, part: int) -> None:
        threads = [
            threading.Thread(target=function, args=(s.fileno(), address + i * part, part, MiB))
            for i, s in enumerate(sockets)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


def _unix_pair() -> tuple[socket.socket, socket.socket]:
    a, b = socket.socketpair()
    for s in (a, b):
        s.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 * MiB)
    return a, b


def _tcp_pair(congestion: str) -> tuple[socket.socket, socket.socket]:
    with socket.socket() as listener:
        if congestion:
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, congestion.encode())
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        a = socket.socket()
        if congestion:
            a.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, congestion.encode())
        a.connect(listener.getsockname())
        b, _ = listener.accept()
        return a, b


# --- other processes ---


@contextmanager
def other_process(target: Callable[[Any], None]) -> Iterator[Any]:
    """``target(pipe)`` in a fresh interpreter; yields our end of the pipe. It ends when it reads None."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=target, args=(theirs,), daemon=True)
    process.start()
    theirs.close()
    try:
        yield ours
    finally:
        try:
            ours.send(None)
        except (BrokenPipeError, OSError):
            pass
        process.join(20)
        if process.is_alive():
            process.kill()


def run_python(code: str, **env: str) -> str:
    """stdout of a fresh interpreter."""
    done = subprocess.run(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True, env={**os.environ, **env}
    )
    return done.stdout
