"""Four links of 1 Gbit/s between two hosts (network namespaces, veth, MTU 9000, tbf): together, and while one fails.

    python benchmarks/rails.py --json rows.json        # root; about two minutes

The engine's writes are held against raw sockets (the better of one and two connections a link), in turns. For failures,
writes go on for some seconds while a link is cut and restored; rates are those of the links that remain, from their
counters every 10 ms, against the same links' rate just before.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

from harness import Row, Table, main

TESTS = Path(__file__).resolve().parent.parent / "tests"
sys.path[:0] = [str(TESTS), str(TESTS / "transfer")]
from rail_hosts import Hosts  # noqa: E402

MiB = 1 << 20
NAME = "four rails shaped to 1 Gbit/s each in namespaces"
SHAPE = "rate 1gbit burst 256k latency 100ms"

RAW_SERVER = """
import socket, threading
def drain(server):
    connection, _ = server.accept()
    buffer, left = bytearray(4 << 20), nbytes
    while left:
        left -= connection.recv_into(buffer, min(len(buffer), left))
    connection.send(b".")
    connection.close()
    server.close()
servers = [socket.create_server((f"10.78.{i % links}.2", 0)) for i in range(connections)]
for s in servers:
    threading.Thread(target=drain, args=(s,), daemon=True).start()
result = [s.getsockname()[1] for s in servers]
"""
RAW_CLIENT = """
import socket, threading, time
def pour(i, port):
    i %= links
    with socket.create_connection((f"10.78.{i}.2", port), source_address=(f"10.78.{i}.1", 0)) as s:
        view, left = memoryview(bytes(4 << 20)), nbytes
        while left:
            left -= s.send(view[: min(len(view), left)])
        s.recv(1)
threads = [threading.Thread(target=pour, args=pair) for pair in enumerate(ports)]
start = time.perf_counter()
for t in threads: t.start()
for t in threads: t.join()
result = time.perf_counter() - start
"""
WRITE = """
import time
start = time.perf_counter()
engine.write(region, remote, timeout=60).wait()
result = time.perf_counter() - start
"""
STREAM = """
import time
ops, errors = [], 0
while time.monotonic() < until or ops:
    if time.monotonic() < until and len(ops) < 2:
        ops.append(engine.write(region, remote, timeout=30))
        continue
    try:
        ops.pop(0).wait()
    except tm.Error as error:
        errors += 1
result = [errors, engine.stats()["failovers"]]
"""
SAMPLE = """
import time, pathlib
paths = [f"/sys/class/net/r{i}/statistics/rx_bytes" for i in range(links)]
files = [open(p) for p in paths]
result = []
while time.monotonic() < until:
    now = []
    for f in files:
        f.seek(0)
        now.append(int(f.read()))
    result.append([time.monotonic(), now])
    time.sleep(0.01)
"""


class Trace:
    """Samples of the links' counters."""

    def __init__(self, samples: list[tuple[float, list[int]]]) -> None:
        self.samples = samples

    def rate(self, begin: float, end: float, links: list[int]) -> float:
        """GB/s of those links."""
        inside = [s for s in self.samples if begin <= s[0] <= end]
        (t0, first), (t1, last) = inside[0], inside[-1]
        return sum(last[i] - first[i] for i in links) / (t1 - t0) / 1e9

    def back_after(self, since: float, wanted: float, links: list[int]) -> float:
        """Seconds from ``since`` until 0.3 s begin in which the links together reach ``wanted`` GB/s."""
        for t, _ in self.samples:
            if t >= since and t + 0.3 <= self.samples[-1][0] and self.rate(t, t + 0.3, links) >= wanted:
                return t - since
        return float("inf")


def throughput(table: Table, hosts: Hosts, nbytes: int, rounds: int) -> None:
    raw, ours, links = [], [], len(hosts.links)
    hosts.a(WRITE)
    for _ in range(rounds):
        best = 0.0
        for connections in (links, 2 * links):
            each = {"nbytes": nbytes // connections, "links": links}
            ports = hosts.b(RAW_SERVER, connections=connections, **each)
            best = max(best, nbytes / hosts.a(RAW_CLIENT, ports=ports, **each) / 1e9)
        raw.append(best)
        ours.append(nbytes / hosts.a(WRITE) / 1e9)
    table.measured(NAME, ours, "GB/s", against="raw loop on the same rails", baseline=raw, ratio_limit=0.97)


def failures(table: Table, hosts: Hosts, rounds: int) -> None:
    links = list(range(len(hosts.links)))
    down, silent, back_up, back, errors = [], [], [], [], 0
    before_down, before_silent = [], []
    for _ in range(rounds):
        start = time.monotonic()
        cuts = [start + s for s in (1.5, 4.0, 7.0, 9.5)]  # down, up, silent, restored
        until = start + 12.5
        hosts.b.start(SAMPLE, links=len(links), until=until)
        hosts.a.start(STREAM, until=until)
        cut_at = []
        actions = [
            lambda: hosts.link(0, "r1", "down"),
            lambda: hosts.link(0, "r1", "up"),
            lambda: hosts.drop_silently("r2", True),
            lambda: hosts.drop_silently("r2", False),
        ]
        for when, action in zip(cuts, actions, strict=True):
            time.sleep(max(0, when - time.monotonic()))
            cut_at.append(time.monotonic())
            action()
        failed, _ = hosts.a.result()
        errors += failed
        trace = Trace([(t, counters) for t, counters in hosts.b.result()])
        for at, lost, grace, rates, befores in (
            (cut_at[0], 1, 0.2, down, before_down),
            (cut_at[2], 2, 0.5, silent, before_silent),
        ):
            rest = [i for i in links if i != lost]
            befores.append(trace.rate(at - 1.0, at, rest))
            rates.append(trace.rate(at + grace, at + grace + 1.0, rest))
        for at, cut, out in ((cut_at[1], cut_at[0], back_up), (cut_at[3], cut_at[2], back)):
            out.append(trace.back_after(at, 0.95 * trace.rate(cut - 1.0, cut, links), links))
    note = f"{errors} ops failed" if errors else "no op failed"
    for what, rates, befores in (
        ("link down, from 200 ms on", down, before_down),
        ("silent drop, from 500 ms on", silent, before_silent),
    ):
        limit = 0.95 if not errors else float("inf")
        against = "remaining rails before"
        table.measured(
            f"{NAME}, {what}", rates, "GB/s", against=against, baseline=befores, ratio_limit=limit, note=note
        )
    for what, seconds in (("link up again: full rate after", back_up), ("drop ended: full rate after", back)):
        table.measured(f"{NAME}, {what}", seconds, "s", limit=1.0, at_least=False)


def run(args: argparse.Namespace) -> list[Row]:
    if os.geteuid() != 0:
        raise SystemExit("needs root to make network namespaces")
    table = Table("Two hosts with four links")
    nbytes = (128 if args.quick else 512) * MiB
    hosts = Hosts(4, SHAPE)
    try:
        hosts.meet(nbytes)
        throughput(table, hosts, nbytes, 1 if args.quick else 5)
        failures(table, hosts, 1 if args.quick else 5)
    finally:
        hosts.close()
    return table.rows


if __name__ == "__main__":
    sys.exit(main(__doc__ or "", run))
