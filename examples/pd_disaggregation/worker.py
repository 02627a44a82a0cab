"""A worker: one process a tensor-parallel rank, rank 0 with an HTTP side. All workers are alike; what the front asks of
one makes it a prefill worker, a decode worker, or both.

    POST /prefill    a prompt, and on a second line, which may come later, a decode worker's tickets: computes the
                     prompt and pushes its pages there
    POST /generate   a prompt that somebody else computes: gives tickets for its pages, then the answer
    POST /complete   both, here
    POST /weights    takes the next published weights
    GET  /alive     that this process runs;  GET /health     how it does

The first three answer with one JSON object a line: {"tickets": […]} from /generate, {"token": 123} for each token, and
at the end {"done": {…}} or {"error": {…}}. While there is nothing to say, {} every other second: who hears nothing for
longer may take it that this process does not run. A client that goes away cancels its job.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import functools
import json
import os
import secrets
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import aiohttp
import torch
from aiohttp import web
from model import config_from_json
from paged_cache import PAGE_SIZE, make_cache
from process import die_with_parent, read_json
from rank import Rank, Ranks, follow
from scheduler import Job, Scheduler
from shard_weights import CONFIG_KEY, ShardWeights
from tensor_parallel import Group, fork_ranks

import torch_mooncake as tm

STILL_HERE_S = 2.0
_START_TIMEOUT_S = 300
_ANNOUNCE_EVERY_S = 0.5
_BODY_NBYTES = 16 << 20  # a line of a request
_SWITCH_S = 0.0002  # the compute thread gives way to the others so soon: a token goes out before the next is computed


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="a worker of the demo; started by cluster.py")
    parser.add_argument("--name", required=True)
    parser.add_argument("--role", choices=("prefill", "decode"), required=True, help="what the front shall use it for")
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel ranks (default 1)")
    parser.add_argument("--pool-parts", type=int, default=1, help="into how many objects the pool cuts a page's heads")
    parser.add_argument("--pages", type=int, default=256, help="pages of the KV cache (default 256)")
    parser.add_argument("--chunk-size", type=int, default=64, help="prompt tokens a forward pass (default 64)")
    parser.add_argument("--max-batch", type=int, default=16, help="answers a forward pass (default 16)")
    parser.add_argument("--threads", type=int, default=1, help="torch threads of each rank (default 1)")
    return parser.parse_args()


def make_rank(args: argparse.Namespace, rank: int, parent: int, moved: Callable[[], None]) -> Rank:
    """One rank with its model, cache, pool and engine; on all ranks together. Returns when the weights are there."""
    torch.set_num_threads(args.threads)
    group = Group(rank, args.tp, args.run_dir / f"{args.name}-{parent}.store")
    name = f"{args.name}.{rank}"
    tm.init(name=name)
    engine = tm.Engine(listen=["tcp://127.0.0.1:0"], token=os.environ.get("TM_TOKEN"), name=name)
    weights = ShardWeights(group, config_from_json(tm.get(CONFIG_KEY, wait=_START_TIMEOUT_S)))
    if "error" in (outcome := weights.update(_START_TIMEOUT_S)):
        raise RuntimeError(f"no weights: {outcome['error']}")
    make_tensor = functools.partial(tm.empty, shared=True)
    kv = make_cache(weights.model.config, args.pages, PAGE_SIZE, make_tensor=make_tensor)
    return Rank(group, weights, kv, engine, args.pool_parts, moved)


class Worker:
    """Rank 0: the compute thread with its scheduler, and the HTTP side on the event loop."""

    def __init__(self, args: argparse.Namespace, rank: Rank, stop: asyncio.Event) -> None:
        self.args, self.rank = args, rank
        self.ranks = Ranks(rank)
        self.scheduler = Scheduler(self.ranks, chunk_size=args.chunk_size, max_batch=args.max_batch)
        self._stop = stop
        self.failed = False
        self.compute = threading.Thread(target=self.scheduler.run, args=(self._compute_ended,), name="compute")
        self._loop = asyncio.get_running_loop()

    def _compute_ended(self) -> None:
        self.failed = True
        self._loop.call_soon_threadsafe(self._stop.set)

    # ---- jobs ---------------------------------------------------------------------------------------------------
    async def job(self, request: web.Request, *, kind: str) -> web.StreamResponse:
        body = json.loads(await request.content.readline())
        events: asyncio.Queue[dict] = asyncio.Queue()
        job = Job(
            name=secrets.token_hex(8),
            kind=kind,
            prompt=body["prompt_token_ids"],
            emit=lambda event: self._loop.call_soon_threadsafe(events.put_nowait, event),
            max_tokens=body.get("max_tokens", 1),
            eos=frozenset(body.get("eos_token_ids", ())),
            cache_salt=body.get("cache_salt", ""),
            timeout_s=body.get("timeout_s", 120),
        )
        self.scheduler.submit(job)
        tickets = asyncio.create_task(self._take_tickets(request, job)) if kind == "prefill" else None
        try:
            response = web.StreamResponse(headers={"Content-Type": "application/x-ndjson"})
            await response.prepare(request)
            while True:
                try:
                    event = await asyncio.wait_for(events.get(), STILL_HERE_S)
                except asyncio.TimeoutError:
                    event = {}
                if "tickets" in event:
                    event = {"tickets": [base64.b64encode(ticket).decode() for ticket in event["tickets"]]}
                await response.write(json.dumps(event).encode() + b"\n")
                if "done" in event or "error" in event:
                    return response
        finally:
            if tickets is not None:
                tickets.cancel()
            self.scheduler.cancel(job)

    async def _take_tickets(self, request: web.Request, job: Job) -> None:
        """The request's second line. Without one the job ends when the client closes the connection."""
        line = await request.content.readline()
        if line:
            self.scheduler.tickets(job, [base64.b64decode(ticket) for ticket in json.loads(line)["tickets"]])

    # ---- the rest -----------------------------------------------------------------------------------------------
    async def on_compute_thread(self, call: str, *args) -> dict | list:
        """A call of all ranks between two steps."""
        result: asyncio.Future = self._loop.create_future()
        self.scheduler.between_steps(
            lambda: self._loop.call_soon_threadsafe(result.set_result, self.ranks.call(call, *args))
        )
        return await result

    async def weights(self, request: web.Request) -> web.Response:
        outcome = await self.on_compute_thread("update_weights", (await request.json()).get("timeout_s", 60))
        return web.json_response(outcome, status=500 if "error" in outcome else 200)

    async def alive(self, _: web.Request) -> web.Response:
        return web.json_response({})

    async def health(self, _: web.Request) -> web.Response:
        ranks = await self.on_compute_thread("stats")
        return web.json_response(
            {
                "name": self.args.name,
                "role": self.args.role,
                "pid": os.getpid(),
                "weights": self.rank.weights.latest,
                # Of the rank that has least.
                "pages_available": min(rank["pages_available"] for rank in ranks),
                "pages_quarantined": max(rank["pages_quarantined"] for rank in ranks),
                "sequences": ranks[0]["sequences"],
                **ranks[0]["counters"],
                "ranks": ranks,
            }
        )

    def announcement(self, url: str) -> dict:
        args = self.args
        return {"name": args.name, "role": args.role, "url": url, "pid": os.getpid()}


async def serve(args: argparse.Namespace, children: list[int]) -> int:
    """Rank 0: serves until SIGTERM or SIGINT, telling the front twice a second where it is. Returns the exit status: 1
    when a rank has died or the compute thread has."""
    loop, stop = asyncio.get_running_loop(), asyncio.Event()

    def child_changed() -> None:
        gone = [pid for pid in children if os.waitpid(pid, os.WNOHANG)[0]]
        children[:] = [pid for pid in children if pid not in gone]
        if gone and not stop.is_set():
            print(f"rank processes {gone} have died, and this worker with them", flush=True)
            os._exit(1)

    loop.add_signal_handler(signal.SIGCHLD, child_changed)
    child_changed()
    wake: list[Callable[[], None]] = []
    rank = await loop.run_in_executor(None, make_rank, args, 0, os.getpid(), lambda: [call() for call in wake])
    worker = Worker(args, rank, stop)
    wake.append(worker.scheduler.wake)
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    worker.compute.start()
    app = web.Application()
    app.add_routes(
        [
            web.post("/prefill", functools.partial(worker.job, kind="prefill")),
            web.post("/generate", functools.partial(worker.job, kind="decode")),
            web.post("/complete", functools.partial(worker.job, kind="both")),
            web.post("/weights", worker.weights),
            web.get("/alive", worker.alive),
            web.get("/health", worker.health),
        ]
    )
    # A client that goes away cancels its handler.
    runner = web.AppRunner(
        app, handler_cancellation=True, access_log=None, shutdown_timeout=1, read_bufsize=_BODY_NBYTES
    )
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = site._server.sockets[0].getsockname()[1]  # type: ignore[union-attr]
    announcer = asyncio.create_task(_announce(args.run_dir, worker.announcement(f"http://127.0.0.1:{port}")))
    await stop.wait()
    announcer.cancel()
    await runner.cleanup()
    if worker.failed:
        return 1
    worker.scheduler.stop()
    worker.compute.join()
    end(rank)
    return 0


async def _announce(run_dir: Path, body: dict) -> None:
    """The front may start later than we do, and again."""
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=2)) as session:
        while True:
            front = read_json(run_dir / "front.json")
            if front is not None:
                try:
                    async with session.post(f"{front['url']}/workers", json=body):
                        pass
                except (aiohttp.ClientError, asyncio.TimeoutError):
                    pass  # not up, or not any more: asked again
            await asyncio.sleep(_ANNOUNCE_EVERY_S)


def end(rank: Rank) -> None:
    rank.engine.close()
    tm.close()
    rank.group.close()


def main() -> int:
    die_with_parent()
    sys.setswitchinterval(_SWITCH_S)
    args = arguments()
    parent = os.getpid()
    rank, children = fork_ranks(args.tp)
    if rank == 0:
        status = asyncio.run(serve(args, children))
        if status:
            os._exit(status)  # a dead rank would be waited for
        return status
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # rank 0 says when
    follower = make_rank(args, rank, parent, lambda: None)
    follow(follower)
    end(follower)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
