"""Runs mooncake_calls.py on the real wheel (`make peers` has it), beside a mooncake_master of its own.

python tests/integrations/mooncake_real.py > tests/integrations/mooncake_expected.json
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
PEERS = HERE.parents[1] / ".venv-peers"


def run(peers: Path = PEERS) -> dict[str, Any]:
    """What the real wheel does, by sequence. Needs `make peers`."""
    libraries = sorted({str(path.parent) for path in (peers / "debian").resolve().rglob("*.so.*")})
    quiet = {"MC_FORCE_TCP": "1", "MC_LOG_LEVEL": "ERROR", "GLOG_minloglevel": "2", "MC_STORE_CLIENT_METRIC": "0"}
    env = os.environ | quiet | {"LD_LIBRARY_PATH": ":".join(libraries)}
    env.pop("PYTHONPATH", None)
    master = next(peers.rglob("mooncake/mooncake_master"))
    with tempfile.TemporaryDirectory() as folder:
        port, metrics = _free_ports(2)
        server = subprocess.Popen(
            [str(master), f"--rpc_port={port}", f"--metrics_port={metrics}", "--default_kv_lease_ttl=1000"],
            env=env, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        try:
            _wait_for(port, server)
            command = [str(peers / "bin" / "python"), str(HERE / "mooncake_calls.py"), f"127.0.0.1:{port}"]
            return results(subprocess.run(command, env=env, cwd=folder, capture_output=True, text=True, timeout=170))
        finally:
            server.kill()
            server.wait()


def results(finished: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    """What a run of mooncake_calls.py printed."""
    lines = [line for line in finished.stdout.splitlines() if line.startswith("RESULTS ")]
    if not lines:
        raise RuntimeError(f"exit status {finished.returncode}: {finished.stderr[-3000:]}")
    found: dict[str, Any] = json.loads(lines[0].removeprefix("RESULTS "))
    return found


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def _wait_for(port: int, server: subprocess.Popen[bytes]) -> None:
    import time

    for _ in range(400):
        if server.poll() is not None:
            raise RuntimeError(f"mooncake_master ended with {server.returncode}")
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        except OSError:
            time.sleep(0.05)
    raise RuntimeError("mooncake_master does not listen")


if __name__ == "__main__":
    json.dump(run(Path(sys.argv[1]) if len(sys.argv) > 1 else PEERS), sys.stdout, indent=1)
    print()
