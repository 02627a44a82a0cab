"""Key-value stores side by side: one writer and one reader process for each, told by JSON lines what to do.

As a script it is one such process (``stores.py STORE ROLE ADDRESS HOST``, in the peers' environment for peers);
``Store`` in the benchmark's process starts server, writer and reader. Values lie in, and come into, memory of the
process's own.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
MEMORY = 1 << 30
TOKEN = "benchmarks"  # of our own nodes
SEGMENT = 3 << 30  # what a Mooncake client lends


class Mooncake:
    """Pointers to registered memory, in batches; the writer holds the segment (its fastest mode), or a lender does."""

    def __init__(self, role: str, address: str, host: str, memory: Any) -> None:
        from mooncake.store import MooncakeDistributedStore

        self.store = MooncakeDistributedStore()
        lends = SEGMENT if role in ("writer", "lender") else 0
        if self.store.setup(host, "P2PHANDSHAKE", lends, 64 << 20, "tcp", "", address) != 0:
            raise RuntimeError("Mooncake's client was not set up")
        self.base = memory.ctypes.data
        if self.store.register_buffer(self.base, memory.nbytes) != 0:
            raise RuntimeError("Mooncake did not register memory")

    def put(self, keys: list[str], nbytes: int) -> None:
        at = [self.base + i * nbytes for i in range(len(keys))]
        if set(self.store.batch_put_from(keys, at, [nbytes] * len(keys))) != {0}:
            raise RuntimeError("Mooncake's put failed")

    def get(self, keys: list[str], nbytes: int) -> None:
        at = [self.base + i * nbytes for i in range(len(keys))]
        if set(self.store.batch_get_into(keys, at, [nbytes] * len(keys))) != {nbytes}:
            raise RuntimeError("Mooncake's get failed")

    def exists(self, keys: list[str]) -> None:
        if set(self.store.batch_is_exist(keys)) != {1}:
            raise RuntimeError("Mooncake does not find what was put")

    def clear(self) -> None:
        self.store.remove_all()


class Redis:
    """redis-py with hiredis; MSET and MGET."""

    def __init__(self, role: str, address: str, host: str, memory: Any) -> None:
        import redis

        server, _, port = address.rpartition(":")
        self.redis, self.memory = redis.Redis(host=server, port=int(port)), memory

    def put(self, keys: list[str], nbytes: int) -> None:
        view = memoryview(self.memory)
        self.redis.mset({key: bytes(view[i * nbytes : (i + 1) * nbytes]) for i, key in enumerate(keys)})

    def get(self, keys: list[str], nbytes: int) -> None:
        import numpy as np

        for i, value in enumerate(self.redis.mget(keys)):
            self.memory[i * nbytes : (i + 1) * nbytes] = np.frombuffer(value, np.uint8)

    def exists(self, keys: list[str]) -> None:
        if self.redis.exists(*keys) != len(keys):
            raise RuntimeError("Redis does not find what was put")

    def clear(self) -> None:
        self.redis.flushall()


class Ours:
    """Tensors; put_many, and get_many into tensors."""

    def __init__(self, role: str, address: str, host: str, memory: Any) -> None:
        import torch

        import torch_mooncake as tm

        self.tm = tm
        self.memory = torch.from_numpy(memory)
        if address:
            tm.init(address)
        self.views: dict[tuple[int, int], list[Any]] = {}

    def _views(self, n: int, nbytes: int) -> list[Any]:
        if (n, nbytes) not in self.views:
            self.views[n, nbytes] = list(self.memory[: n * nbytes].split(nbytes))
        return self.views[n, nbytes]

    def put(self, keys: list[str], nbytes: int) -> None:
        self.tm.put_many(dict(zip(keys, self._views(len(keys), nbytes), strict=True)), timeout=120)

    def get(self, keys: list[str], nbytes: int) -> None:
        self.tm.get_many(keys, out=self._views(len(keys), nbytes), timeout=120)

    def exists(self, keys: list[str]) -> None:
        if not all(self.tm.exists(keys)):
            raise RuntimeError("a key that was put is not there")

    def clear(self) -> None:
        self.tm.delete(self.tm.keys())


STORES = {"mooncake": Mooncake, "redis": Redis, "torch_mooncake": Ours}


def serve(name: str, role: str, address: str, host: str) -> None:
    """Do what stdin says: seconds of each call."""
    import numpy as np

    memory = np.full(MEMORY, 1, np.uint8)
    answers, sys.stdout = sys.stdout, sys.stderr

    def tell(**answer: Any) -> None:
        answers.write(json.dumps(answer) + "\n")
        answers.flush()

    try:
        store: Any = STORES[name](role, address, host, memory)
    except Exception as error:  # told to who asked
        tell(error=f"{type(error).__name__}: {error}")
        return
    tell(seconds=[])
    for line in sys.stdin:
        order = json.loads(line)
        do, keys, nbytes = order["do"], order.get("keys", []), order.get("nbytes", 0)
        try:
            if "fill" in order:
                memory[: len(keys) * nbytes] = order["fill"]
            seconds = []
            if do == "clear":
                store.clear()
            elif order.get("singly"):
                for key in keys:
                    start = time.perf_counter()
                    getattr(store, do)([key], nbytes)
                    seconds.append(time.perf_counter() - start)
            else:
                start = time.perf_counter()
                store.exists(keys) if do == "exists" else getattr(store, do)(keys, nbytes)
                seconds.append(time.perf_counter() - start)
            if "check" in order and not (memory[: len(keys) * nbytes] == order["check"]).all():
                raise RuntimeError("what came back is not what was put")
            tell(seconds=seconds)
        except Exception as error:
            tell(error=f"{type(error).__name__}: {error}")


@dataclass
class Host:
    """An address, and what a command begins with to run there."""

    address: str = "127.0.0.1"
    prefix: tuple[str, ...] = ()


class Worker:
    """One such process, on ``host``."""

    def __init__(self, python: str, name: str, role: str, address: str, env: dict[str, str], host: Host) -> None:
        command = [*host.prefix, python, str(HERE / "stores.py"), name, role, address, host.address]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)
        self._answer()

    def _answer(self) -> list[float]:
        assert self.process.stdout
        answer = json.loads(self.process.stdout.readline() or '{"error": "the process ended"}')
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer["seconds"]

    def ask(self, do: str, **order: Any) -> list[float]:
        """Seconds of the call, or of each with ``singly``."""
        assert self.process.stdin
        self.process.stdin.write(json.dumps({"do": do, **order}) + "\n")
        self.process.stdin.flush()
        return self._answer()

    def close(self) -> None:
        assert self.process.stdin
        self.process.stdin.close()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()


class Store:
    """A store with its server, a writer and a reader. ``address``: of our node. With ``users`` on another host than the
    server, what is stored is on the server's."""

    def __init__(
        self,
        name: str,
        peers: Path,
        address: str = "",
        reader_env: Any = None,
        server: Host | None = None,
        users: Host | None = None,
    ) -> None:
        self.host, users = server or Host(), users or server or Host()
        far = users != self.host
        self.server: subprocess.Popen[bytes] | None = None
        self.folder = tempfile.mkdtemp(prefix="tm-bench-")
        env, python = dict(os.environ), sys.executable
        try:
            if name != "torch_mooncake":
                python = str(peers / "bin" / "python")
                debian = (peers / "debian").resolve()
                env.pop("PYTHONPATH", None)
                env["LD_LIBRARY_PATH"] = ":".join(sorted({str(path.parent) for path in debian.rglob("*.so.*")}))
                env |= {"MC_FORCE_TCP": "1", "MC_LOG_LEVEL": "ERROR", "GLOG_minloglevel": "2"}
                env["MC_STORE_CLIENT_METRIC"] = "0"
                port = free_port()
                address = f"{self.host.address}:{port}"
                self.server = self._serve(name, peers, debian, port, env)
            else:
                env |= {"PYTHONPATH": str(HERE.parent), "TM_TOKEN": TOKEN}
            elsewhere = env | (reader_env or {})
            if far and name == "mooncake":
                self.lender = Worker(python, name, "lender", address, env, self.host)
            self.writer = Worker(python, name, "user" if far else "writer", address, elsewhere if far else env, users)
            self.reader = Worker(python, name, "reader", address, elsewhere, users)
        except BaseException:
            self.close()
            raise

    def _serve(self, name: str, peers: Path, debian: Path, port: int, env: dict[str, str]) -> Any:
        if name == "redis":
            command = [str(debian / "usr/bin/redis-server"), "--port", str(port), "--bind", self.host.address]
            command += ["--save", "", "--appendonly", "no"]
        else:
            found = next(iter(peers.rglob("mooncake/mooncake_master")))
            command = [str(found), f"--rpc_port={port}", f"--metrics_port={free_port()}", "--default_kv_lease_ttl=1000"]
        server = subprocess.Popen(
            [*self.host.prefix, *command],
            env=env,
            cwd=self.folder,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        # Seen from its own host: a connection from elsewhere would need to be there.
        look = f"import socket; socket.create_connection(('{self.host.address}', {port}), 1)"
        for _ in range(100):
            if subprocess.run([*self.host.prefix, sys.executable, "-c", look], capture_output=True).returncode == 0:
                return server
            time.sleep(0.05)
        server.kill()
        raise RuntimeError(f"{command[0]} does not listen")

    def close(self) -> None:
        for role in ("reader", "writer", "lender"):
            if (worker := getattr(self, role, None)) is not None:
                worker.close()
        if self.server is not None:
            self.server.terminate()
            self.server.wait(10)
        shutil.rmtree(self.folder, ignore_errors=True)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


if __name__ == "__main__":
    serve(*sys.argv[1:5])
