"""What the prefill and the decode worker have in common: life and death of the process, the model, the HTTP side."""

from __future__ import annotations

import argparse
import asyncio
import functools
import os
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

import aiohttp
import torch
from aiohttp import web
from model import empty_model
from paged_cache import make_cache
from process import read_json

import torch_mooncake as tm
from torch_mooncake import weights
from torch_mooncake.kv import PageAllocator, PoolKV

WEIGHTS = "demo"
CONFIG_KEY = "demo/config"
PAGE_SIZE = 16
_START_TIMEOUT_S = 300
_ANNOUNCE_EVERY_S = 0.5


def arguments(role: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=f"{role} worker of the demo; started by demo.py")
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--pages", type=int, default=256, help="pages of the KV cache (default 256)")
    parser.add_argument("--threads", type=int, default=1, help="torch threads (default 1)")
    return parser.parse_args()


class Worker:
    """Model, paged cache, pool and engine of one worker process, and the one thread that computes."""

    def __init__(self, role: str, args: argparse.Namespace) -> None:
        self.role = role
        self.run_dir: Path = args.run_dir
        torch.set_num_threads(args.threads)
        self.pool = tm.init(name=role)
        self.engine = tm.Engine(listen=["tcp://127.0.0.1:0"], token=os.environ.get("TM_TOKEN"), name=role)
        self.config_json: str = tm.get(CONFIG_KEY, wait=_START_TIMEOUT_S)
        self.model = empty_model(self.config_json)
        self._subscription = weights.subscribe(self.model, WEIGHTS)
        self.weights = self._subscription.update(timeout=_START_TIMEOUT_S)
        self.kv = make_cache(
            self.model.config, args.pages, PAGE_SIZE, make_tensor=functools.partial(tm.empty, shared=True)
        )
        self.allocator = PageAllocator(args.pages)
        self.pool_kv = self._pool_kv()
        self.compute = ThreadPoolExecutor(1, thread_name_prefix="compute")

    def _pool_kv(self) -> PoolKV:
        # Keys and values of other weights are other pages.
        return PoolKV(tm, self.kv, model=f"{WEIGHTS}#{self.weights.serial}")

    def update_weights(self, timeout_s: float, on_weights: Callable[[], None]) -> weights.Update:
        """Takes the next published version. Runs on the compute thread, between prompts and steps."""
        self.weights = self._subscription.update(timeout=timeout_s)
        self.pool_kv = self._pool_kv()
        on_weights()
        return self.weights

    async def run(self, call: Callable, *args):
        """Runs a call on the compute thread."""
        return await asyncio.get_running_loop().run_in_executor(self.compute, functools.partial(call, *args))

    def describe(self) -> dict:
        return {
            "role": self.role,
            "pid": os.getpid(),
            "engine": self.engine.addresses[0],
            "weights": asdict(self.weights),
            "pages_available": self.allocator.available,
            "pages_quarantined": self.allocator.quarantined,
            "engine_stats": self.engine.stats(),
        }

    def close(self) -> None:
        self.compute.shutdown()
        self.engine.close()
        tm.close()


def error_response(error: Exception) -> web.Response:
    """The library's errors by name, so that the front can tell a peer's death from a bad request."""
    status = 503 if isinstance(error, tm.PoolFull | tm.PeerLost | tm.Cancelled | tm.Closed) else 500
    return web.json_response({"error": {"type": type(error).__name__, "message": str(error)}}, status=status)


def serve(
    worker: Worker, routes: list[web.RouteDef], describe: Callable[[], dict], on_weights: Callable[[], None]
) -> None:
    """Serves until SIGTERM or SIGINT, telling the front twice a second where this worker is. `on_weights` is called on
    the compute thread after new weights were copied in."""

    async def health(_: web.Request) -> web.Response:
        return web.json_response(worker.describe() | describe())

    async def take_weights(request: web.Request) -> web.Response:
        body = await request.json()
        try:
            update = await worker.run(worker.update_weights, body.get("timeout_s", 60), on_weights)
        except tm.Error as error:
            return error_response(error)
        return web.json_response(asdict(update))

    async def main() -> None:
        app = web.Application(client_max_size=16 << 20)
        app.add_routes([web.get("/health", health), web.post("/weights", take_weights), *routes])
        # A client that goes away cancels its handler.
        runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = site._server.sockets[0].getsockname()[1]  # type: ignore[union-attr]
        stop = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        announcer = asyncio.create_task(_announce(worker, f"http://127.0.0.1:{port}"))
        await stop.wait()
        announcer.cancel()
        await runner.cleanup()

    asyncio.run(main())
    worker.close()


async def _announce(worker: Worker, url: str) -> None:
    """The front may start later than we do, and again."""
    body = {"role": worker.role, "url": url, "engine": worker.engine.addresses[0], "pid": os.getpid()}
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=2)) as session:
        while True:
            front = read_json(worker.run_dir / "front.json")
            if front is not None:
                try:
                    async with session.post(f"{front['url']}/workers", json=body):
                        pass
                except (aiohttp.ClientError, TimeoutError):
                    pass  # not up, or not any more: asked again
            await asyncio.sleep(_ANNOUNCE_EVERY_S)
