"""A real etcd for tests."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import tempfile

from processes import eventually, stop


class Etcd:
    """A server of its own folder on a port of loopback."""

    def __init__(self) -> None:
        self.folder = tempfile.mkdtemp(prefix="tm-etcd-")
        with socket.socket() as a, socket.socket() as b:
            a.bind(("127.0.0.1", 0))
            b.bind(("127.0.0.1", 0))
            self.port, self.peer_port = a.getsockname()[1], b.getsockname()[1]
        self.url = f"etcd://127.0.0.1:{self.port}"
        self.process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        client, peer = f"http://127.0.0.1:{self.port}", f"http://127.0.0.1:{self.peer_port}"
        self.process = subprocess.Popen(
            [
                *("etcd", "--data-dir", self.folder, "--name", "t", "--unsafe-no-fsync", "--log-level", "error"),
                *("--listen-client-urls", client, "--advertise-client-urls", client, "--listen-peer-urls", peer),
                *("--initial-advertise-peer-urls", peer, "--initial-cluster", f"t={peer}"),
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        if not eventually(self.answers, 20):
            self.kill()
            raise AssertionError("etcd does not start")

    def answers(self) -> bool:
        with socket.socket() as s:
            return s.connect_ex(("127.0.0.1", self.port)) == 0

    def kill(self, forget: bool = False) -> None:
        assert self.process
        self.process.kill()
        self.process.wait()
        if forget:
            shutil.rmtree(self.folder)
            os.mkdir(self.folder)

    def stop(self) -> None:
        assert self.process
        stop(self.process.pid)

    def go_on(self) -> None:
        assert self.process
        self.process.send_signal(signal.SIGCONT)

    def close(self) -> None:
        self.kill()
        shutil.rmtree(self.folder)
