"""The limits of the machine, by the loops of raw.cpp: plain copies, process_vm_readv, sockets, ping-pong.

Every function measures once or a few times and gives what it measured; who calls it interleaves and takes medians.
Each process that takes part touches its memory before the first measurement.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import resource
import socket
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

MiB, GiB = 1 << 20, 1 << 30
CONGESTION = ("bbr", "cubic", "reno")


class Stream(NamedTuple):
    """One run of the socket loop."""

    gbps: float
    cpu_s_per_gb: float  # both sides


def gbps(nbytes: int, seconds: Sequence[float]) -> list[float]:
    return [nbytes / s / 1e9 for s in seconds]


def buffer(nbytes: int, forked: bool = True) -> np.ndarray[Any, Any]:
    """Private memory, touched. ``forked=False``: no child inherits it, so that no write to it ever copies a page."""
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if not forked:
        memory.madvise(mmap.MADV_DONTFORK)
    array = np.frombuffer(memory, np.uint8)
    array.fill(1)
    return array


class Raw:
    """The functions of raw.cpp, compiled for this machine. Buffers are made once and shared by all measurements."""

    def __init__(self, nbytes: int = GiB) -> None:
        self.nbytes = nbytes
        self.folder = tempfile.TemporaryDirectory(prefix="tm-bench-")
        library = Path(self.folder.name) / "raw.so"
        command = ["g++", "-O3", "-march=native", "-std=c++17", "-pthread", "-shared", "-fPIC"]
        subprocess.run([*command, str(Path(__file__).with_name("raw.cpp")), "-o", str(library)], check=True)
        self.lib = ctypes.CDLL(str(library))
        number, size, pointer = ctypes.c_int, ctypes.c_size_t, ctypes.c_void_p
        self.lib.raw_copy.argtypes = [pointer, pointer, size, number, number, size, number, pointer]
        self.lib.raw_readv.argtypes = [number, *[pointer] * 4, size, size, number, size, number, pointer]
        for name in ("raw_send", "raw_recv"):
            getattr(self.lib, name).argtypes = [number, pointer, size, size]
        self.lib.raw_ping.argtypes = [number, pointer, size, number, number, pointer]
        self.lib.raw_pong.argtypes = [number, pointer, size, number]
        self._dst: np.ndarray[Any, Any] | None = None
        self._src: np.ndarray[Any, Any] | None = None

    @property
    def dst(self) -> np.ndarray[Any, Any]:
        if self._dst is None:
            self._dst = buffer(self.nbytes, forked=False)
        return self._dst

    @property
    def src(self) -> np.ndarray[Any, Any]:
        if self._src is None:
            self._src = buffer(self.nbytes)
        return self._src

    def release(self) -> None:
        """Give the buffers' memory back until they are needed again."""
        self._dst = self._src = None

    def copies(self, nbytes: int, threads: int, n: int) -> dict[str, list[float]]:
        """GB/s of memcpy and of interleaved non-temporal stores; other memory each time (the caches are large)."""
        span = max(1, self.nbytes // nbytes)
        speeds = {}
        for mode, name in enumerate(("memcpy", "non-temporal")):
            seconds = (ctypes.c_double * (n + 1))()
            self.lib.raw_copy(self.dst.ctypes.data, self.src.ctypes.data, nbytes, threads, mode, span, n + 1, seconds)
            speeds[name] = gbps(nbytes, list(seconds)[1:])  # the first round warms up
        return speeds

    def copy_bound(self, nbytes: int, threads: int, n: int) -> list[float]:
        """GB/s of the better of the two."""
        return max(self.copies(nbytes, threads, n).values(), key=statistics.median)

    def readv(self, block: int, count: int, threads: int, n: int, batches: Sequence[int]) -> dict[int, list[float]]:
        """GB/s of a bare process_vm_readv loop over ``count`` scattered blocks, for each number of pieces a call.
        Blocks above 1 MiB are read in pieces of 1 MiB."""
        piece = min(block, MiB)
        pieces = count * (block // piece)
        rng = np.random.default_rng(0)
        speeds: dict[int, list[float]] = {}
        dst = self.dst
        with _process_with_memory(self.nbytes) as (pid, address):
            for batch in batches:
                to, source = (
                    np.concatenate([_pieces(rng, self.nbytes, block, count, piece) for _ in range(n + 1)])
                    for _ in range(2)
                )
                seconds = (ctypes.c_double * (n + 1))()
                failed = self.lib.raw_readv(
                    pid, dst.ctypes.data, address, to.ctypes.data, source.ctypes.data, piece, pieces, threads, batch,
                    n + 1, seconds
                )  # fmt: skip
                if failed:
                    raise OSError(f"{failed} calls of process_vm_readv failed: is ptrace of a child allowed here?")
                speeds[batch] = gbps(block * count, list(seconds)[1:])
        return speeds

    def sockets(self, nbytes: int, connections: int, *, congestion: str | None, call: int = MiB) -> Stream:
        """``connections`` plain sockets between two processes, a thread each; ``congestion`` None: Unix sockets."""
        pairs = [_unix_pair() if congestion is None else tcp_pair(congestion) for _ in range(connections)]
        part = nbytes // connections
        dst, src = self.dst, self.src  # the child only reads src, and has no dst
        pid = os.fork()
        if pid == 0:
            _each(
                [s for s, _ in pairs],
                lambda s, i: self.lib.raw_send(s.fileno(), src.ctypes.data + i * part, part, call),
            )
            for s, _ in pairs:
                s.recv(1)
            os.write(pairs[0][0].fileno(), np.float64(_cpu_s()).tobytes())
            os._exit(0)
        cpu, start = _cpu_s(), time.perf_counter()
        _each([r for _, r in pairs], lambda r, i: self.lib.raw_recv(r.fileno(), dst.ctypes.data + i * part, part, call))
        seconds = time.perf_counter() - start
        cpu = _cpu_s() - cpu
        for _, r in pairs:
            r.send(b"x")
        cpu += float(np.frombuffer(pairs[0][1].recv(8), np.float64)[0])
        os.waitpid(pid, 0)
        for s, r in pairs:
            s.close()
            r.close()
        moved = part * connections
        return Stream(moved / seconds / 1e9, cpu / (moved / 1e9))

    def ping_us(self, nbytes: int, rounds: int, idle_us: int) -> list[float]:
        """Round trips of blocking sockets over loopback TCP: ``nbytes`` there, 8 bytes back."""
        ours, theirs = tcp_pair("reno")
        data = np.zeros(max(nbytes, 8), np.uint8)
        pid = os.fork()
        if pid == 0:
            ours.close()
            os._exit(0 if self.lib.raw_pong(theirs.fileno(), data.ctypes.data, nbytes, rounds) == 0 else 1)
        theirs.close()
        took = (ctypes.c_double * rounds)()
        failed = self.lib.raw_ping(ours.fileno(), data.ctypes.data, nbytes, idle_us, rounds, took)
        ours.close()
        status = os.waitpid(pid, 0)[1]
        if failed or status:
            raise OSError("the ping-pong broke off")
        return list(took)[rounds // 10 :]


def congestion_controls() -> list[str]:
    """Those of CONGESTION that this kernel lets us use."""
    found = []
    for name in CONGESTION:
        with socket.socket() as s:
            try:
                s.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, name.encode())
            except OSError:
                continue
            found.append(name)
    return found


def tcp_pair(congestion: str) -> tuple[socket.socket, socket.socket]:
    with socket.socket() as listener:
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, congestion.encode())
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        a = socket.socket()
        a.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, congestion.encode())
        a.connect(listener.getsockname())
        b, _ = listener.accept()
    for s in (a, b):
        s.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return a, b


def _unix_pair() -> tuple[socket.socket, socket.socket]:
    a, b = socket.socketpair()
    for s in (a, b):
        s.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 * MiB)
    return a, b


def _each(sockets: list[socket.socket], function: Callable[[socket.socket, int], Any]) -> None:
    threads = [threading.Thread(target=function, args=(s, i)) for i, s in enumerate(sockets)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _pieces(rng: Any, nbytes: int, block: int, count: int, piece: int) -> Any:
    """Offsets of the pieces of ``count`` blocks at random places of ``nbytes``."""
    places = rng.permutation(nbytes // block)[:count].astype(np.int64) * block
    return (places[:, None] + np.arange(0, block, piece, dtype=np.int64)).ravel()


class _process_with_memory:
    """Another process with ``nbytes`` of touched memory: (pid, address). It ends with the block."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes

    def __enter__(self) -> tuple[int, int]:
        self.pipe, theirs = socket.socketpair()
        self.pid = os.fork()
        if self.pid == 0:
            self.pipe.close()
            memory = buffer(self.nbytes)
            theirs.send(np.int64(memory.ctypes.data).tobytes())
            theirs.recv(1)  # until the other end closes
            os._exit(0)
        theirs.close()
        return self.pid, int(np.frombuffer(self.pipe.recv(8), np.int64)[0])

    def __exit__(self, *exc: object) -> None:
        self.pipe.close()
        os.waitpid(self.pid, 0)
