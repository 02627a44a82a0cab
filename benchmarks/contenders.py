"""Who is measured, and the measuring of one round: every contender in processes of its own, one after the other.

Samples are kept by (contender, what); what the rows make of them is in transfer_rows.py.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from raw import GiB, MiB, Raw, congestion_controls, gbps

HERE = Path(__file__).parent
WAYS = ("shm", "process_vm", "unix", "tcp")
THREADS = min(4, os.cpu_count() or 1)  # as many as the library's copy pool has
PAGES_100K = (16 << 10, 100_000)

# (block, how many a call) of each way, and how often in one round
BATCHES = {
    (64 * MiB, 1): 5,
    (MiB, 256): 3,
    (64 << 10, 1024): 4,
    (16 << 10, 20_000): 2,
    (4 << 10, 1024): 6,
}
# Another congestion control in a network namespace of one's own, without touching the host's: by its routes.
NAMESPACE = """
ip link set lo up
for to in 127.0.0.0/8 127.0.0.1; do
  ip route replace local $to dev lo table local proto kernel scope host src 127.0.0.1 congctl "$0" || exit 1
done
exec "$@"
"""


@dataclass(frozen=True)
class Contender:
    name: str
    engine: str
    way: str
    congestion: str = ""  # run in a namespace whose loopback uses it
    batches: tuple[tuple[int, int], ...] = tuple(BATCHES)


OURS = [Contender(way, "torch_mooncake", way) for way in WAYS]
PEERS = [
    *[
        Contender(f"{title}, {congestion}", engine, "tcp", congestion)
        for congestion in ("bbr", "cubic")
        for engine, title in (("mooncake", "Mooncake TE"), ("nixl", "NIXL tcp"))
    ],
    Contender("NIXL shm/cma", "nixl", "shm", "bbr"),
]

What = tuple[Any, ...]


@dataclass
class Samples:
    values: dict[tuple[str, What], list[float]] = field(default_factory=lambda: defaultdict(list))
    failures: list[str] = field(default_factory=list)

    def add(self, contender: str, what: What, values: list[float]) -> None:
        self.values[contender, what] += values

    def get(self, contender: str, what: What) -> list[float]:
        return self.values.get((contender, what), [])

    def best(self, contenders: list[str], what: What, lowest: bool = False) -> tuple[str, list[float]]:
        """The contender with the better median, and its samples."""
        found = [(name, self.get(name, what)) for name in contenders if self.get(name, what)]
        if not found:
            return "", []
        return (min if lowest else max)(found, key=lambda item: statistics.median(item[1]))


class Pair:
    """A contender's two processes (pair.py)."""

    def __init__(self, contender: Contender, peers: Path, nbytes: int) -> None:
        python, env = sys.executable, dict(os.environ)
        if contender.engine != "torch_mooncake":
            python = str(peers / "bin" / "python")
            env.pop("PYTHONPATH", None)
            if contender.engine == "mooncake":  # needs libibverbs; NIXL brings its own
                debian = (peers / "debian").resolve()
                folders = [str(folder.parent) for folder in debian.rglob("*.so.*")]
                env["LD_LIBRARY_PATH"] = ":".join(sorted(set(folders)))
        else:
            env["PYTHONPATH"] = str(HERE.parent)
        command = [python, str(HERE / "pair.py"), contender.engine, contender.way, str(nbytes)]
        if contender.congestion and os.geteuid() == 0:
            command = ["unshare", "-n", "bash", "-c", NAMESPACE, contender.congestion, *command]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env
        )

    def ask(self, do: str, **request: Any) -> Any:
        assert self.process.stdin
        assert self.process.stdout
        try:
            self.process.stdin.write(json.dumps({"do": do, **request}) + "\n")
            self.process.stdin.flush()
            answer = json.loads(self.process.stdout.readline() or "{}")
        except BrokenPipeError:
            answer = {}
        if "result" not in answer:
            raise RuntimeError(answer.get("error") or self._last_words())
        return answer["result"]

    def _last_words(self) -> str:
        self.process.kill()
        assert self.process.stderr
        lines = self.process.stderr.read().strip().splitlines()
        return lines[-1] if lines else "it ended without a word"

    def close(self) -> None:
        assert self.process.stdin
        try:
            self.process.stdin.close()
        except BrokenPipeError:
            pass
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        for stream in (self.process.stdout, self.process.stderr):
            assert stream
            stream.close()


@contextmanager
def _noted(samples: Samples, who: str):  # type: ignore[no-untyped-def]
    """What a contender cannot do is written down, and the others go on."""
    try:
        yield
    except RuntimeError as error:
        samples.failures.append(f"{who}: {error}")


def measure(contender: Contender, samples: Samples, peers: Path, nbytes: int, quick: bool) -> None:
    """One round of one contender."""
    ours = contender.engine == "torch_mooncake"
    pair = Pair(contender, peers, nbytes)
    name = contender.name
    try:
        for op in ("write", "read"):
            for (block, count), n in BATCHES.items():
                with _noted(samples, f"{name} {op} {block >> 10} KiB x {count}"):
                    _throughput(pair, samples, name, op, block, count, n)
            if contender.way == "shm":
                with _noted(samples, f"{name} {op} 1 GiB"):
                    _throughput(pair, samples, name, op, GiB, 1, 1 if quick else 2)
            with _noted(samples, f"{name} {op} latency"):
                took = pair.ask("latency", op=op, block=4096, n=300 if quick else 1500)
                _latency(samples, name, ("latency", op, 0), took)
        if ours and name == "tcp":
            took = pair.ask("latency", op="write", block=4096, n=60 if quick else 150, idle_us=10_000)
            _latency(samples, name, ("latency", "write", 10_000), took)
            samples.add(name, ("idle",), [pair.ask("idle", seconds=1)])
        if ours and not quick and PAGES_100K[0] * PAGES_100K[1] <= nbytes:
            took = pair.ask("submission", op="write", block=PAGES_100K[0], count=PAGES_100K[1], n=2)
            samples.add(name, ("submission",), took)
    except RuntimeError as error:
        samples.failures.append(f"{name}: {error}")
    finally:
        pair.close()


def _throughput(pair: Pair, samples: Samples, name: str, op: str, block: int, count: int, n: int) -> None:
    got = pair.ask("throughput", op=op, block=block, count=count, n=n)
    samples.add(name, (op, block, count), gbps(block * count, got["seconds"]))
    samples.add(name, ("cpu", op, block, count), [got["cpu_s"] / (n * block * count / 1e9)])


def _latency(samples: Samples, name: str, what: What, took: list[float]) -> None:
    ordered = sorted(took)
    samples.add(name, (*what, "p50"), [statistics.median(ordered)])
    samples.add(name, (*what, "p99"), [ordered[len(ordered) * 99 // 100]])


def measure_machine(raw: Raw, samples: Samples, quick: bool) -> None:
    """One round of the raw loops. Each variant is a contender of its own; rows take the best."""
    for threads in (1, THREADS):
        for nbytes in (64 * MiB, GiB):
            for mode, speeds in raw.copies(nbytes, threads, 3 if nbytes < GiB else 1).items():
                samples.add(f"{mode}, {threads} threads", ("copy", nbytes), speeds)
    for block, count in ((64 * MiB, 1), (16 << 10, 20_000)):
        for batch, speeds in raw.readv(block, count, THREADS, 3, (1, 16, 512)).items():
            samples.add(f"process_vm_readv, {batch} a call", ("readv", block, count), speeds)
    nbytes = GiB // 4 if quick else GiB // 2
    for congestion in congestion_controls():
        for connections in (1, 2, 4):
            stream = raw.sockets(nbytes, connections, congestion=congestion)
            samples.add(f"{congestion} x {connections}", ("stream",), [stream.gbps])
            samples.add(f"{congestion} x {connections}", ("stream cpu",), [stream.cpu_s_per_gb])
    for connections in (1, 2, 4):
        stream = raw.sockets(nbytes, connections, congestion=None)
        samples.add(f"unix x {connections}", ("unix stream",), [stream.gbps])
    samples.add("ping", ("ping", 0), [statistics.median(raw.ping_us(4096, 5000, 0))])
    samples.add("ping", ("ping", 10_000), [statistics.median(raw.ping_us(4096, 60 if quick else 150, 10_000))])


def names_of(samples: Samples, kind: str) -> list[str]:
    """The variants of a raw loop that were measured."""
    return sorted({name for name, what in samples.values if what[0] == kind})


Progress = Callable[[str], None]


def run_round(samples: Samples, peers: Path | None, nbytes: int, quick: bool, say: Progress) -> None:
    raw = Raw()
    say("the machine")
    measure_machine(raw, samples, quick)
    raw.release()
    for contender in [*OURS, *(PEERS if peers else [])]:
        say(contender.name)
        measure(contender, samples, peers or Path(), nbytes, quick)
