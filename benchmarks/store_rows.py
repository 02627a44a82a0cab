"""Rows of the pool beside other stores: batches of small values, big values, presence, and the directory by itself."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from harness import GiB, MiB, Table
from stores import HERE, TOKEN, Host, Store, free_port

BATCH = 1000
SMALL = 4 << 10
BIG = ((64 * MiB, 4), (GiB, 1))
HERE_HOST = Host()


@contextmanager
def own_node(memory: str = "4GiB", host: Host = HERE_HOST) -> Iterator[str]:
    """A node that listens on TCP, in a folder of its own; its address."""
    with tempfile.TemporaryDirectory(prefix="tm-bench-") as folder:
        address = f"{host.address}:{free_port()}"
        env = {**os.environ, "TM_RUNTIME_DIR": folder, "PYTHONPATH": str(HERE.parent), "TM_TOKEN": TOKEN}
        command = [
            *host.prefix,
            sys.executable,
            "-m",
            "torch_mooncake",
            "node",
            "--memory",
            memory,
            "--listen",
            f"tcp://{address}",
        ]
        node = subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            yield address
        finally:
            node.terminate()
            node.wait(30)


@contextmanager
def contenders(
    address: str, peers: Path | None, names: tuple[str, ...], elsewhere: bool, hosts: tuple[Host, Host] | None = None
) -> Iterator[dict[str, Store]]:
    """Ours, and those peers that start. ``elsewhere``: our reader believes to be on another host. ``hosts``: of the
    server, and of writer and reader."""
    server, users = hosts or (None, None)
    stores: dict[str, Store] = {}
    try:
        env = {"TM_HOST_ID": "elsewhere"} if elsewhere else {}
        stores["torch_mooncake"] = Store("torch_mooncake", Path(), address, env, server, users)
        for name in names if peers else ():
            try:
                stores[name] = Store(name, peers or Path(), "", None, server, users)
            except Exception as error:
                print(f"FAILED  {name}: {error}")
        yield stores
    finally:
        for store in stores.values():
            store.close()


Samples = dict[tuple[str, str], list[float]]


def rounds(stores: dict[str, Store], n: int, keys: int, nbytes: int, *, again: bool) -> Samples:
    """Seconds of put and get of fresh keys by (store, what), interleaved; with ``again`` also of a second get."""
    samples: Samples = {}
    for r in range(n + 1):
        for name, store in stores.items():
            names = [f"r{r}/{nbytes}/{i}" for i in range(keys)]
            try:
                put = store.writer.ask("put", keys=names, nbytes=nbytes, fill=r % 200 + 1)
                get = store.reader.ask("get", keys=names, nbytes=nbytes, fill=0, check=r % 200 + 1)
                more = store.reader.ask("get", keys=names, nbytes=nbytes) if again else []
                store.writer.ask("clear")
            except RuntimeError as error:
                print(f"FAILED  {name}: {error}")
                continue
            if r == 0:
                continue
            for what, seconds in (("put", put), ("get", get), ("again", more)):
                samples.setdefault((name, what), []).extend(seconds)
    return samples


def rate(samples: Samples, name: str, what: str, amount: float) -> list[float]:
    return [amount / s for s in samples.get((name, what), [])]


def batches(table: Table, peers: Path | None, n: int) -> None:
    targets = {"mooncake": 10.0, "redis": 5.0}
    with own_node() as address, contenders(address, peers, ("mooncake", "redis"), elsewhere=False) as stores:
        samples = rounds(stores, n, BATCH, SMALL, again=True)
        for what, title in (("put", "put"), ("get", "get, first"), ("again", "get, again")):
            ours = rate(samples, "torch_mooncake", what, BATCH)
            theirs = [name for name in targets if (name, what) in samples]
            if not theirs:
                table.measured(f"4 KiB, batches of {BATCH}: {title}", ours, "keys/s")
            for name in theirs:
                mode = "local segment" if name == "mooncake" else "MSET/MGET"
                table.measured(
                    f"4 KiB, batches of {BATCH}: {title}",
                    ours,
                    "keys/s",
                    against=f"{name}, {mode}",
                    baseline=rate(samples, name, what, BATCH),
                    ratio_limit=targets[name],
                )
        presence(table, stores, n)
    with own_node() as address, contenders(address, peers, ("mooncake",), elsewhere=True) as stores:
        samples = rounds(stores, n, BATCH, SMALL, again=False)
        for what in ("put", "get"):
            theirs_values = rate(samples, "mooncake", what, BATCH)
            table.measured(
                f"4 KiB, batches of {BATCH}: {what}, {'reader' if what == 'get' else 'writer'} "
                + ("on another host (TCP, loopback)" if what == "get" else "on the node's host"),
                rate(samples, "torch_mooncake", what, BATCH),
                "keys/s",
                against="mooncake" if theirs_values else "",
                baseline=theirs_values or None,
                ratio_limit=3.0 if what == "get" else None,
            )
        presence(table, stores, n, over_tcp=True)


@contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """Network namespaces joined by a veth pair, with cubic. Needs root."""
    names = [f"tm-bench-{os.getpid()}-{side}" for side in "ab"]

    def ip(*command: str) -> None:
        subprocess.run(["ip", *command], check=True, capture_output=True)

    try:
        for name in names:
            ip("netns", "add", name)
        ip("link", "add", "tm0", "netns", names[0], "type", "veth", "peer", "name", "tm0", "netns", names[1])
        for i, name in enumerate(names):
            ip("-n", name, "addr", "add", f"10.79.0.{i + 1}/24", "dev", "tm0")
            for device in ("lo", "tm0"):
                ip("-n", name, "link", "set", device, "up")
            ip("-n", name, "route", "replace", "10.79.0.0/24", "dev", "tm0", "congctl", "cubic")
        a, b = (Host(f"10.79.0.{i + 1}", ("ip", "netns", "exec", name)) for i, name in enumerate(names))
        yield a, b
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


def between_hosts(table: Table, peers: Path | None, n: int) -> None:
    """Batches of small values: what is stored lies in one namespace, writer and reader are in the other."""
    if os.geteuid() != 0:
        print("no rows between two namespaces: they need root")
        return
    with two_hosts() as hosts, own_node(host=hosts[0]) as address:
        with contenders(address, peers, ("mooncake",), elsewhere=True, hosts=hosts) as stores:
            samples = rounds(stores, n, BATCH, SMALL, again=False)
    for what in ("put", "get"):
        theirs = rate(samples, "mooncake", what, BATCH)
        table.measured(
            f"4 KiB, batches of {BATCH}: {what}, over TCP between two namespaces",
            rate(samples, "torch_mooncake", what, BATCH),
            "keys/s",
            against="mooncake" if theirs else "",
            baseline=theirs or None,
            ratio_limit=3.0,
        )


def presence(table: Table, stores: dict[str, Store], n: int, over_tcp: bool = False) -> None:
    """Which of 1000 keys are there, again and again."""
    keys = [f"page/{i}" for i in range(BATCH)]
    samples: Samples = {}
    for name, store in stores.items():
        if name == "redis":
            continue
        store.writer.ask("put", keys=keys, nbytes=256)
    for r in range(4 * n + 1):
        for name, store in stores.items():
            if name != "redis" and r:
                samples.setdefault((name, "exists"), []).extend(store.reader.ask("exists", keys=keys))
    theirs = rate(samples, "mooncake", "exists", BATCH)
    table.measured(
        f"exists, batches of {BATCH}, " + ("TCP loopback" if over_tcp else "Unix socket"),
        rate(samples, "torch_mooncake", "exists", BATCH),
        "keys/s",
        against="mooncake batch_is_exist" if theirs else "",
        baseline=theirs or None,
        limit=1.5e6 if over_tcp else None,
        ratio_limit=3.0 if over_tcp else None,
    )


def big_values(table: Table, peers: Path | None, bounds: dict[int, list[float]], n: int) -> None:
    """64 MiB to 1 GiB on one host, beside a plain copy (GB/s by size) and Mooncake's local segment."""
    with own_node("5GiB") as address, contenders(address, peers, ("mooncake",), elsewhere=False) as stores:
        for nbytes, count in BIG:
            samples = rounds(stores, n, count, nbytes, again=False)
            size = f"{nbytes >> 20} MiB"
            for what, against_peer in (("put", 2.0), ("get", 6.0)):
                ours = [v / 1e9 for v in rate(samples, "torch_mooncake", what, nbytes * count)]
                title = f"{what} {size}{', out=' if what == 'get' else ''}"
                table.measured(
                    title, ours, "GB/s", against="copy bound, 2 threads", baseline=bounds[nbytes], ratio_limit=0.85
                )
                theirs = [v / 1e9 for v in rate(samples, "mooncake", what, nbytes * count)]
                if theirs:
                    table.measured(
                        title,
                        ours,
                        "GB/s",
                        against="mooncake, local segment",
                        baseline=theirs,
                        ratio_limit=against_peer,
                    )


def directory(table: Table, quick: bool) -> None:
    """The home's state machine in a process of its own."""
    library = HERE.parent / "torch_mooncake"
    keys = 1_000_000 if quick else 10_000_000
    with tempfile.TemporaryDirectory(prefix="tm-bench-") as folder:
        binary = str(Path(folder) / "directory")
        command = [
            "g++",
            "-O2",
            "-std=c++20",
            "-I",
            str(HERE.parent / "csrc"),
            str(HERE / "directory.cpp"),
            "-o",
            binary,
        ]
        command += ["-L", str(library), "-ltorch_mooncake", f"-Wl,-rpath,{library}"]
        subprocess.run(command, check=True)

        def output(*arguments: str) -> list[str]:
            done = subprocess.run([binary, *arguments], check=True, stdout=subprocess.PIPE, text=True)
            return done.stdout.splitlines()

        lines = output(str(keys), "9")
        announced = [float(line) for line in output("rebuild", "1000000", "5")]
    per_key = float(lines[0])
    found: list[Any] = [[float(word) / 1e6 for word in line.split()] for line in lines[1:]]
    size = f"{keys // 1_000_000} M keys"
    table.measured(
        f"directory: look-ups in process, batched, {size}", [f[0] for f in found], "M/s", limit=5.0, note="presence"
    )
    table.measured(f"directory: locations in process, one by one, {size}", [f[1] for f in found], "M/s")
    table.measured(f"directory: memory a key, {size}", [per_key], "B", limit=128.0, at_least=False)
    table.measured("directory: 1 M announced objects taken in, in process", announced, "s", limit=1.5, at_least=False)
