"""What ``torch-mooncake node --http`` serves: ``/healthz``, ``/readyz`` and ``/metrics`` of this host's node.

The Python process that was started stays as the node's parent: it answers HTTP, passes SIGTERM and SIGINT on, and ends
with the node. Every answer asks the node's worker at that moment, so that a worker that is stopped or hangs is told as
such within two seconds.
"""

from __future__ import annotations

import contextlib
import ctypes
import signal
import socketserver
import subprocess
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any, NamedTuple

from torch_mooncake import __version__
from torch_mooncake.clock import deadline_ns
from torch_mooncake.config import Config
from torch_mooncake.errors import Error, InvalidArgument, PoolUnavailable

if TYPE_CHECKING:
    from torch_mooncake import _core

ANSWER_S = 2.0  # a worker that does not answer for so long is not alive
_PR_SET_PDEATHSIG = 1


class Health(NamedTuple):
    live: bool  # the worker answers
    ready: bool  # and serves: it has joined its leader, the directory is complete, it is not leaving
    why: str = ""  # it is not


class Watch:
    """Asks this host's node. Any thread; one question at a time. Does not count as one of the node's clients."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._lock = threading.Lock()
        self._client: _core.Client | None = None

    def stat(self) -> dict[str, Any]:
        """``Pool.stat`` of this node alone, or why there is none: one of the library's errors, in ANSWER_S."""
        from torch_mooncake import _core, node

        until = deadline_ns(ANSWER_S)
        with self._lock:
            if self._client is None or not self._client.alive:
                self._client = None
                self._client = _core.Client.connect(
                    address=node.socket_address(self._config),
                    token=node.pool_token(self._config),
                    name="health",
                    host_id=self._config.host_id,
                    engine=None,
                    view_ttl_s=0,
                    monitor=True,
                    deadline_ns=until,
                )
            return self._client.stat(until, here=True)

    def health(self) -> Health:
        try:
            node = self.stat()["nodes"][0]
        except PoolUnavailable as error:  # the worker itself said so
            return Health(True, False, str(error))
        except Error as error:
            return Health(False, False, f"the worker does not answer: {error}")
        ready = node["ready"] and not node["draining"]
        return Health(True, ready, "" if ready else node["unready"] or "draining")

    def close(self) -> None:
        with self._lock:
            if self._client is not None:
                self._client.close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64

    def __init__(self, address: tuple[str, int], watch: Watch, metrics: Callable[[], bytes]) -> None:
        self.watch, self.metrics = watch, metrics
        super().__init__(address, _Handler)

    def server_bind(self) -> None:
        socketserver.TCPServer.server_bind(self)  # HTTPServer's asks DNS for our name, which nothing here needs
        self.server_name, self.server_port = self.server_address[:2]  # type: ignore[assignment]


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    server_version = f"torch-mooncake/{__version__}"
    timeout = 5  # for a request to come

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path == "/metrics":
            self._answer(200, self.server.metrics(), "text/plain; version=0.0.4; charset=utf-8")
        elif path in ("/healthz", "/readyz"):
            health = self.server.watch.health()
            good = health.live if path == "/healthz" else health.ready
            self._answer(200 if good else 503, (("ok" if good else health.why) + "\n").encode())
        else:
            self._answer(404, b"here are /healthz, /readyz and /metrics\n")

    do_HEAD = do_GET

    def _answer(self, status: int, body: bytes, kind: str = "text/plain; charset=utf-8") -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Success logs nothing, and a probe every few seconds least of all."""


def parse_http(text: str) -> tuple[str, int]:
    """``"127.0.0.1:9400"``, ``":9400"`` (every interface), ``"[::1]:9400"`` is not supported. InvalidArgument."""
    host, colon, port = text.rpartition(":")
    if not colon or not port.isdecimal() or int(port) > 65535 or ":" in host:
        raise InvalidArgument(f"--http takes host:port, such as 127.0.0.1:9400, not {text!r}")
    return host, int(port)


@contextlib.contextmanager
def serving(address: tuple[str, int], config: Config) -> Any:
    """The HTTP server on a thread of its own, for the time of the block; yields its port. OSError if it is taken."""
    try:
        from prometheus_client import CollectorRegistry, generate_latest
    except ImportError as error:
        raise InvalidArgument("--http needs prometheus-client: pip install torch_mooncake[metrics]") from error
    from torch_mooncake.pool_metrics import PoolCollector

    watch = Watch(config)
    registry = CollectorRegistry()
    registry.register(PoolCollector(watch.stat))
    server = _Server(address, watch, lambda: generate_latest(registry))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 1}, name="http", daemon=True)
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        server.server_close()
        watch.close()


def run_with_http(command: list[str], env: dict[str, str], http: str, config: Config) -> int:
    """Run the node as our child, with HTTP beside it. Its exit status; 128 + n if a signal ended it."""
    with serving(parse_http(http), config):
        process: subprocess.Popen[bytes] | None = None
        early: list[int] = []

        def pass_on(signum: int, frame: Any) -> None:
            if process is None:
                early.append(signum)
            else:
                process.send_signal(signal.SIGTERM)

        for signum in (signal.SIGTERM, signal.SIGINT):
            signal.signal(signum, pass_on)
        # A session of its own: Ctrl-C reaches it through us, once. It drains if we are killed.
        process = subprocess.Popen(command, env=env, start_new_session=True, preexec_fn=_end_with_parent)
        if early:
            process.send_signal(signal.SIGTERM)
        status = process.wait()
    return status if status >= 0 else 128 - status


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
