"""Twenty sessions a second between two processes, some cancelled by either side: none is stuck, nothing leaks."""

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from processes import running
from sides import DecodeSide, cache, settled

import torch_mooncake as tm

SHAPE = (4, 640, 2, 4, 2, 8)
RATE = 20
SERVICE = Path(__file__).with_name("prefill_service.py")


class Service:
    def __init__(self, process: subprocess.Popen) -> None:
        self.process = process
        self.answers: dict[object, object] = {}
        self.changed = threading.Condition()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in self.process.stdout:
            answer = json.loads(line)
            with self.changed:
                self.answers[answer["id"]] = answer["outcome"]
                self.changed.notify_all()

    def ask(self, **request) -> None:
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()

    def answer(self, number):
        with self.changed:
            assert self.changed.wait_for(lambda: number in self.answers, 60), f"session {number} is stuck on prefill"
            return self.answers.pop(number)


def held(side: DecodeSide) -> dict[str, int]:
    threads = [thread.name for thread in threading.enumerate() if thread.name.startswith("tm-kv")]
    return {
        "fds": len(os.listdir("/proc/self/fd")),
        "threads": len(threads),
        "regions": side.engine.stats()["regions"] - side.receiver.own_regions,
        "quarantined": side.engine.stats()["quarantined_regions"],
        "pages": side.allocator.available,
    }


def one(side: DecodeSide, service: Service, number: int, outcomes: dict[str, int]) -> None:
    """One session: most are done, one in ten is cancelled here, one in ten there. Both sides agree how it ended, but
    for a cancellation that comes when the other side is done already."""
    session = side.receiver.open(5, prompt_pages=4, timeout=30)
    pages = [(number * 7 + i) % SHAPE[1] for i in range(4)]
    cancel_at = number % SHAPE[0] if number % 10 == 3 else -1
    wire = ("auto", "direct", "packed")[number % 3]
    service.ask(id=number, ticket=session.ticket().hex(), wire=wire, pages=pages, cancel_at=cancel_at)
    try:
        session.wait_layer(0)
        if number % 10 == 7:
            session.cancel()
        assert session.wait() == {"id": number}
        for layer, tensor in enumerate(side.kv.layers):
            wanted = torch.tensor(pages).view(-1, 1, 1, 1, 1) + 100 * layer
            assert tensor[session.pages[:4]].eq(wanted).all(), f"session {number}"
        side.allocator.free(session.pages)
    except tm.Cancelled:
        assert number % 10 in (3, 7)
    there = service.answer(number)
    assert session.state in ("done", "cancelled")
    assert there == session.state or (number % 10 == 7 and there in ("done", "cancelled", "KeyNotFound"))
    outcomes[session.state] = outcomes.get(session.state, 0) + 1


def run(seconds: int) -> None:
    side = DecodeSide(cache(SHAPE), ("shm", "tcp"))
    outcomes: dict[str, int] = {}
    failures: list[BaseException] = []

    def guarded(service: Service, number: int) -> None:
        try:
            one(side, service, number, outcomes)
        except BaseException as error:
            failures.append(error)

    def sustain(numbers: range) -> None:
        begin = time.monotonic()
        threads: list[threading.Thread] = []
        for place, number in enumerate(numbers):
            time.sleep(max(0.0, begin + place / RATE - time.monotonic()))  # the load's rate, not a wait
            threads = [thread for thread in threads if thread.is_alive()]
            threads.append(threading.Thread(target=guarded, args=(service, number)))
            threads[-1].start()
            assert not failures, failures[0]
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive(), "a session is stuck"
        assert not failures, failures[0]
        assert settled(side)

    command = [sys.executable, str(SERVICE), json.dumps(SHAPE), "PKHND"]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    with running(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env) as process:
        service = Service(process)
        sustain(range(2 * RATE))  # what is made on first use is made
        service.ask(id="held")
        before = held(side), service.answer("held")
        outcomes.clear()
        sustain(range(2 * RATE, (2 + seconds) * RATE))
        service.ask(id="held")
        for now, then in zip((held(side), service.answer("held")), before, strict=True):
            assert now.pop("fds") <= then.pop("fds") + 2  # the engine keeps a pidfd of a peer while it maps something
            assert now == then
        assert sum(outcomes.values()) == RATE * seconds
        assert outcomes["cancelled"] >= RATE * seconds // 10
        assert outcomes["done"] >= RATE * seconds * 8 // 10
    side.close()


def test_ten_seconds():
    run(10)


@pytest.mark.slow
@pytest.mark.timeout(480)
def test_five_minutes():
    run(300)
