"""Random ops over every way, random kills and stops, for as long as you like: python tests/soak.py --minutes 60

A parent engine works with several children over each way; children are killed, stopped, continued and replaced all the
time. Every op has a truthful outcome in bounded time, every byte that was said to be there is there, and at the end
(and every minute) fds, threads and memory are where they were after the first. Exits with 1 at the first lie.
"""

from __future__ import annotations

import argparse
import random
import signal
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE / "faults"), str(HERE.parent)]

import numpy as np  # noqa: E402
from fault_ways import SETUP, WAYS, MiB, memory, random_bytes  # noqa: E402
from processes import Child  # noqa: E402
from test_fault_resources import resources  # noqa: E402

import torch_mooncake as tm  # noqa: E402

NBYTES = 4 * MiB
PAGE = 4096


class Lie(Exception):
    """A promise was broken."""


class Partner:
    """A child with 4 MiB, and what we know of its content."""

    def __init__(self, way: str, engine: tm.Engine, rng: random.Random) -> None:
        self.way, self.rng = way, rng
        transports, shared, other_host = WAYS[way]
        self.child = Child()
        names: dict[str, Any] = {"transports": list(transports), "shared": shared, "nbytes": NBYTES}
        names |= {"host_id": "another-host" if other_host else "", "listen": "tcp://127.0.0.1:0"}
        address, descriptor = self.child(SETUP.replace(*PRIVATE), **names)
        self.peer = engine.connect(address)
        self.remote = self.peer.open(bytes.fromhex(descriptor))
        if self.remote.transport != way:
            raise Lie(f"{way} was asked for, {self.remote.transport} carries it")
        self.content = np.zeros(NBYTES, np.uint8)
        self.known = np.ones(NBYTES // PAGE, bool)  # pages whose content is certain
        self.stopped = False

    def end(self) -> None:
        self.child.process.kill()
        self.child.process.wait()
        self.child.close()
        self.peer.close()


PRIVATE = ("mmap.mmap(os.open(window_path, os.O_RDWR), nbytes)", "mmap.mmap(-1, nbytes)")


class Soak:
    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.counts: Counter[str] = Counter()
        self.engines = {way: tm.Engine(transports=WAYS[way][0], token="t", name="soak") for way in WAYS}
        self.local = {way: memory(way, NBYTES) for way in WAYS}
        self.regions = {way: engine.register(self.local[way]) for way, engine in self.engines.items()}
        self.partners = {way: [self.partner(way) for _ in range(2)] for way in WAYS}

    def partner(self, way: str) -> Partner:
        return Partner(way, self.engines[way], self.rng)

    def step(self) -> None:
        way = self.rng.choice(list(WAYS))
        partner = self.rng.choice(self.partners[way])
        chance = self.rng.random()
        if chance < 0.01:
            self.count("killed")
            self.replace(way, partner, in_flight=self.rng.random() < 0.5)
        elif chance < 0.02 or (partner.stopped and chance < 0.5):
            partner.child.kill(signal.SIGCONT if partner.stopped else signal.SIGSTOP)
            partner.stopped = not partner.stopped
            self.count("stopped or continued")
        elif chance < 0.03:
            self.deregister(way)
        else:
            self.transfer(way, partner)

    def count(self, what: str) -> None:
        self.counts[what] += 1

    def replace(self, way: str, partner: Partner, in_flight: bool) -> None:
        ops = []
        if in_flight and partner.peer.alive:
            ops = [self.start(way, partner, "read", *self.places())[0] for _ in range(4)]
        partner.child.process.kill()
        for op in ops:
            self.outcome(op, 10, (tm.PeerLost, tm.DeadlineExceeded))
        partner.end()
        self.partners[way].remove(partner)
        self.partners[way].append(self.partner(way))

    def deregister(self, way: str) -> None:
        engine = self.engines[way]
        engine.deregister(self.regions[way], timeout=20)
        self.local[way][:] = 0
        self.regions[way] = engine.register(self.local[way])
        self.count("deregistered")

    def places(self) -> tuple[Any, Any]:
        count = self.rng.choice([1, 1, 2, 33, 64, 500])
        return tuple(np.array(self.rng.sample(range(NBYTES // PAGE), count), np.int64) * PAGE for _ in range(2))  # type: ignore[return-value]

    def start(self, way: str, partner: Partner, kind: str, local: Any, remote: Any) -> tuple[tm.Op | None, str]:
        move = getattr(self.engines[way], kind)
        timeout = 0.5 if partner.stopped else self.rng.choice([20, 20, 20, 0.001])
        try:
            offsets = {"local_offsets": local, "remote_offsets": remote, "nbytes": PAGE}
            return move(self.regions[way], partner.remote, timeout=timeout, **offsets), ""
        except (tm.PeerLost, tm.DeadlineExceeded) as error:
            return None, type(error).__name__

    def outcome(self, op: tm.Op | None, within_s: float, fair: tuple[type, ...]) -> str:
        if op is None:
            return "not begun"
        start = time.monotonic()
        try:
            op.wait(within_s)
            return "done"
        except fair as error:
            if not op.done():
                raise Lie(f"pending {time.monotonic() - start:.1f} s after its deadline: {op!r}") from error
            return type(error).__name__

    def transfer(self, way: str, partner: Partner) -> None:
        local, remote = self.places()
        kind = self.rng.choice(["write", "read"])
        here = self.local[way]
        pages = remote // PAGE
        if kind == "write":
            fresh = random_bytes(len(local) * PAGE, self.rng.getrandbits(32)).reshape(-1, PAGE)
            here.reshape(-1, PAGE)[local // PAGE] = fresh
        op, _ = self.start(way, partner, kind, local, remote)
        if op is not None and self.rng.random() < 0.03:
            op.cancel()
        fair = (tm.PeerLost, tm.DeadlineExceeded, tm.Cancelled)
        outcome = self.outcome(op, 30, fair)
        self.count(f"{kind} {outcome}")
        theirs = partner.content.reshape(-1, PAGE)
        if outcome == "done" and kind == "write":
            theirs[pages] = fresh
            partner.known[pages] = True
        elif kind == "write" and op is not None:
            partner.known[pages] = False  # some of it may have arrived
        elif outcome == "done":
            sure = partner.known[pages]
            got, want = here.reshape(-1, PAGE)[local // PAGE][sure], theirs[pages][sure]
            if not np.array_equal(got, want):
                wrong = int((got != want).any(axis=1).sum())
                raise Lie(f"{way}: {wrong} of {len(got)} pages read are not what was written")
        if not partner.peer.alive:  # stopped for longer than the heartbeat limit
            self.replace(way, partner, in_flight=False)

    def rest(self) -> dict[str, int]:
        for way, partners in self.partners.items():
            for partner in list(partners):
                if partner.stopped or not partner.peer.alive:
                    self.replace(way, partner, in_flight=False)
        time.sleep(1)
        return resources()

    def close(self) -> None:
        for partners in self.partners.values():
            for partner in partners:
                partner.end()
        for engine in self.engines.values():
            engine.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    args = parser.parse_args()
    print(f"seed {args.seed}", flush=True)
    soak = Soak(args.seed)
    end = time.monotonic() + 60 * args.minutes
    first: dict[str, int] = {}
    try:
        while time.monotonic() < end:
            until = min(end, time.monotonic() + 60)
            while time.monotonic() < until:
                soak.step()
            now = soak.rest()
            print(f"{(end - time.monotonic()) / 60:5.1f} min to go  {now}  {dict(soak.counts)}", flush=True)
            first = first or now
            limits = {"fds": 4, "threads": 0, "maps": 64, "rss_kib": 64 << 10}
            grown = {k: (first[k], now[k]) for k in now if now[k] > first[k] + limits[k]}
            if grown:
                raise Lie(f"grown since the first minute: {grown}")
            held = {way: engine.stats()["quarantined_regions"] for way, engine in soak.engines.items()}
            if any(held.values()):
                raise Lie(f"regions in quarantine at rest: {held}")
    except Lie as lie:
        print(f"FAILED: {lie} (seed {args.seed})")
        return 1
    finally:
        soak.close()
    print("all promises held")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
