"""Inside the virtual machine of tests/rdma/vm, for rdma.py: one rail, a write and ib_write_bw, in turns. Prints JSON.

    python benchmarks/rdma_machine.py REGISTER ROUNDS

REGISTER is the program that rdma.py compiled. Bandwidth in bytes/s, of messages of 1 MiB, 8 of them under way.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch_mooncake as tm

MESSAGE, DEPTH, COUNT = 1 << 20, 8, 64
OP = 4 * MESSAGE  # with one rail an op is cut in four
REGIONS, REGION_NBYTES = 1000, (1 << 20, 16 << 20)


def serve() -> None:
    with tm.Engine(transports=("rdma",), nics=["rxe_a1"], token="b") as engine:
        descriptor = engine.register(bytearray(DEPTH * MESSAGE)).descriptor()
        print(json.dumps([engine.addresses[0], descriptor.hex()]), flush=True)
        sys.stdin.read()


class Ours:
    """An engine at either end of the rail, this one's connected: made once, so that a round is nothing but writes."""

    def __enter__(self) -> Ours:
        self.server = subprocess.Popen(
            [sys.executable, __file__, "serve"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self.server.stdout
        address, descriptor = json.loads(self.server.stdout.readline())
        self.engine = tm.Engine(transports=("rdma",), nics=["rxe_a0"], token="b")
        remote = self.engine.connect(address).open(bytes.fromhex(descriptor))
        local = self.engine.register(bytearray(DEPTH * MESSAGE))
        self.halves = [(local[at : at + OP], remote[at : at + OP]) for at in (0, OP)]
        return self

    def __exit__(self, *exc: object) -> None:
        self.engine.close()
        self.server.communicate()

    def bandwidth(self) -> float:
        self.engine.write(*self.halves[0]).wait()
        start = time.perf_counter()
        under_way = [self.engine.write(*half) for half in self.halves]
        for i in range(COUNT * MESSAGE // OP):
            under_way[i % 2].wait()
            if i + 2 < COUNT * MESSAGE // OP:
                under_way[i % 2] = self.engine.write(*self.halves[i % 2])
        return COUNT * MESSAGE / (time.perf_counter() - start)


def perftest() -> float:
    flags = ["-s", str(MESSAGE), "-t", str(DEPTH), "-n", str(COUNT), "-F"]
    server = subprocess.Popen(["ib_write_bw", "-d", "rxe_a1", "-x", "1", *flags], stdout=subprocess.DEVNULL)
    try:
        for _ in range(100):  # until it listens
            command = ["ib_write_bw", "-d", "rxe_a0", "-x", "1", *flags, "127.0.0.1"]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            lines = [line.split() for line in done.stdout.splitlines()]
            found = [line for line in lines if line[:1] == [str(MESSAGE)]]
            if found:
                return float(found[0][3]) * (1 << 20)
            time.sleep(0.2)
        raise SystemExit(f"ib_write_bw: {done.stdout}{done.stderr}")
    finally:
        server.kill()
        server.wait()


def registrations(program: str, nbytes: int) -> list[float]:
    command = [program, "register", str(REGIONS), str(nbytes), "rxe_a0"]
    return [float(word) for word in subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()]


def main() -> None:
    program, rounds = sys.argv[1], int(sys.argv[2])
    result: dict[str, list[float]] = {"ours": [], "perftest": []}
    with Ours() as ours:
        for _ in range(rounds):
            result["ours"].append(ours.bandwidth())
            result["perftest"].append(perftest())
    for _ in range(rounds):
        for nbytes in REGION_NBYTES:
            for name, seconds in zip(("register", "reg_mr"), registrations(program, nbytes), strict=True):
                result.setdefault(f"{name} {nbytes >> 20}", []).append(seconds)
    print(f"{time.clock_gettime(time.CLOCK_BOOTTIME):.0f} s after the start of the machine", file=sys.stderr)
    print(json.dumps(result))


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve()
    else:
        main()
