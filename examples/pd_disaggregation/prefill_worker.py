"""The prefill worker: POST /prefill runs a prompt and pushes its KV pages to the decode worker named by the ticket."""

from __future__ import annotations

import base64
from dataclasses import asdict

from aiohttp import web
from engines import PrefillEngine
from process import die_with_parent
from worker import Worker, arguments, error_response, serve

import torch_mooncake as tm
from torch_mooncake.kv import KVSender


def main() -> None:
    die_with_parent()
    worker = Worker("prefill", arguments("prefill"))
    sender = KVSender(worker.engine, worker.kv)
    engine = PrefillEngine(worker.model, worker.kv, worker.allocator, worker.pool_kv, sender)

    async def prefill(request: web.Request) -> web.Response:
        body = await request.json()
        ticket = base64.b64decode(body["ticket"])
        try:
            result = await worker.run(engine.prefill, body["prompt_token_ids"], ticket, body.get("cache_salt", ""))
        except tm.Error as error:
            return error_response(error)
        return web.json_response(asdict(result))

    def on_weights() -> None:
        engine.pool_kv = worker.pool_kv

    serve(worker, [web.post("/prefill", prefill)], lambda: {"pool_kv": asdict(engine.pool_kv.stats)}, on_weights)


if __name__ == "__main__":
    main()
