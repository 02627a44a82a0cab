"""One engine between two processes: measures what it is asked for.

    python pair.py ENGINE WAY NBYTES        (started by transfer.py, with the interpreter that has the engine)

Requests come on stdin and answers leave on stdout, one JSON document a line. Blocks lie at random places on both
sides, other places at each repetition. Before a case is timed its data is checked once, at the instant of completion.
"""

from __future__ import annotations

import json
import os
import random
import resource
import socket
import subprocess
import sys
import time
from typing import Any

from engines import ENGINES


def cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def holds(memory: Any, offsets: list[int], block: int, value: int) -> bool:
    return all(bool((memory[at : at + block] == value).all()) for at in offsets)


class Channel:
    """JSON lines over a socket, between the two processes."""

    def __init__(self, s: socket.socket) -> None:
        self.file = s.makefile("rw")

    def send(self, document: Any) -> None:
        self.file.write(json.dumps(document) + "\n")
        self.file.flush()

    def receive(self) -> Any:
        line = self.file.readline()
        if not line:
            os._exit(1)  # the other side is gone
        return json.loads(line)

    def ask(self, *request: Any) -> Any:
        self.send(request)
        return self.receive()


def be_the_target(engine: Any, channel: Channel) -> None:
    channel.send(engine.info())
    engine.meet(channel.receive())
    while True:
        what, *arguments = channel.receive()
        if what == "holds":
            channel.send(holds(engine.memory, *arguments))
        elif what == "fill":
            offsets, block, value = arguments
            for at in offsets:
                engine.memory[at : at + block] = value
            channel.send(True)
        elif what == "cpu":
            channel.send(cpu_s())


class Initiator:
    def __init__(self, engine: Any, channel: Channel) -> None:
        self.engine, self.channel = engine, channel
        self.random = random.Random(1)
        channel.send(engine.info())
        engine.meet(channel.receive())

    def places(self, block: int, count: int) -> tuple[list[int], list[int]]:
        """Where ``count`` blocks lie on the two sides: each place once."""
        there = range(self.engine.memory.nbytes // block)
        return tuple([i * block for i in self.random.sample(there, count)] for _ in range(2))  # type: ignore[return-value]

    def cpu(self) -> float:
        return cpu_s() + self.channel.ask("cpu")

    def check(self, op: str, block: int, count: int) -> None:
        """Once through, every byte of up to 64 blocks looked at as soon as it is done."""
        local, remote = self.places(block, count)
        value = self.random.randrange(10, 250)
        sample = range(0, count, max(1, count // 64))
        if op == "write":
            for at in local:
                self.engine.memory[at : at + block] = value
        else:
            self.channel.ask("fill", remote, block, value)
        handle = self.engine.prepare(op, local, remote, block)
        self.engine.run(handle)
        if op == "write":
            right = self.channel.ask("holds", [remote[i] for i in sample], block, value)
        else:
            right = holds(self.engine.memory, [local[i] for i in sample], block, value)
        self.engine.release(handle)
        if not right:
            raise RuntimeError(f"{op} of {count} x {block} bytes was said to be done, and the data was not there")

    def throughput(self, op: str, block: int, count: int, n: int, check: bool = True) -> dict[str, Any]:
        """Seconds of each of ``n`` batches, and the processor seconds of both sides for all of them."""
        if check:
            self.check(op, block, count)
        seconds = []
        cpu = 0.0
        for _ in range(n):
            handle = self.engine.prepare(op, *self.places(block, count), block)
            before = self.cpu()
            start = time.perf_counter()
            self.engine.run(handle)
            seconds.append(time.perf_counter() - start)
            cpu += self.cpu() - before
            self.engine.release(handle)
        return {"seconds": seconds, "cpu_s": cpu}

    def latency(self, op: str, block: int, n: int, idle_us: int = 0) -> list[float]:
        """Microseconds of each of ``n`` single ops, one at a time, after ``idle_us`` of rest each."""
        self.check(op, block, 1)
        local, remote = self.places(block, n)
        handles = [self.engine.prepare(op, [a], [b], block) for a, b in zip(local, remote, strict=True)]
        took = []
        run = self.engine.run
        for handle in handles:
            if idle_us:
                time.sleep(idle_us / 1e6)
            start = time.perf_counter()
            run(handle)
            took.append((time.perf_counter() - start) * 1e6)
        for handle in handles:
            self.engine.release(handle)
        return took[n // 10 :]

    def submission(self, op: str, block: int, count: int, n: int) -> list[float]:
        """Milliseconds inside the call that submits a batch: what passes before its first byte moves is no more."""
        took = []
        for _ in range(n + 1):
            handle = self.engine.prepare(op, *self.places(block, count), block)
            start = time.perf_counter()
            op_handle = self.engine.submit(handle)
            took.append((time.perf_counter() - start) * 1e3)
            op_handle.wait()
        return took[1:]

    def idle(self, seconds: float) -> float:
        """Processor milliseconds of both sides in the time after an op."""
        self.throughput("write", 4096, 1, 1, check=False)
        before = self.cpu()
        time.sleep(seconds)
        return (self.cpu() - before) * 1e3


def main(name: str, way: str, nbytes: int) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries may print what they like
    target = os.environ.get("TM_BENCHMARK_FD")
    if target is not None:
        return be_the_target(ENGINES[name](way, True, nbytes), Channel(socket.socket(fileno=int(target))))
    ours, theirs = socket.socketpair()
    subprocess.Popen(
        [sys.executable, *sys.argv],
        pass_fds=[theirs.fileno()],
        env={**os.environ, "TM_BENCHMARK_FD": str(theirs.fileno())},
        stdin=subprocess.DEVNULL,
    )
    theirs.close()
    initiator = Initiator(ENGINES[name](way, False, nbytes), Channel(ours))
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = {"result": getattr(initiator, request.pop("do"))(**request)}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
    os._exit(0)  # NIXL crashes at an orderly exit; the target ends with its channel


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
