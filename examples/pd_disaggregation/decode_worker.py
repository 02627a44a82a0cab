"""The decode worker: POST /generate answers with one JSON object a line.

    {"ticket": "…"}                     take it to a prefill worker
    {"token": 123} …                    the answer, the first one computed by the prefill worker
    {"done": {…}}  or  {"error": {…}}   always one of the two, unless this process dies

A client that goes away ends its session and frees its pages.
"""

from __future__ import annotations

import asyncio
import base64
import json
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict

from aiohttp import web
from engines import DecodeEngine, DecodeSequence
from process import die_with_parent
from worker import PAGE_SIZE, Worker, arguments, error_response, serve

import torch_mooncake as tm
from torch_mooncake.kv import DecodeSession, KVReceiver

_WAITERS = 32  # sessions that may wait for their pages at the same time


class DecodeService:
    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.engine = DecodeEngine(worker.model, worker.kv, worker.allocator, worker.pool_kv)
        self.receiver = KVReceiver(worker.engine, worker.kv, worker.allocator)
        self._waiters = ThreadPoolExecutor(_WAITERS, thread_name_prefix="kv-wait")
        self._peers: dict[str, tm.Peer] = {}

    async def generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        prompt, max_tokens = body["prompt_token_ids"], body["max_tokens"]
        try:
            session = await self._wait_in_thread(self._open, len(prompt) + max_tokens, body)
        except tm.Error as error:
            return error_response(error)
        sequence: DecodeSequence | None = None
        complete = False
        try:
            response = web.StreamResponse(headers={"Content-Type": "application/x-ndjson"})
            await response.prepare(request)
            try:
                await _line(response, ticket=base64.b64encode(session.ticket()).decode())
                began = time.perf_counter()
                meta = await self._wait_in_thread(session.wait)
                kv_wait_s = time.perf_counter() - began
                sequence = self.engine.start(session.pages, prompt, meta["first_token"], body.get("cache_salt", ""))
                await self._stream(response, sequence, max_tokens, set(body["eos_token_ids"]))
                complete = True
                await _line(response, done={"kv_wait_s": kv_wait_s, "prompt_tokens_run": self.engine.prompt_tokens_run})
            except tm.Error as error:
                await _line(response, error={"type": type(error).__name__, "message": str(error)})
            return response
        finally:
            # Also when the client has gone (CancelledError). On the compute thread: a step of this sequence may still
            # be running there, and its pages are not free before it ends.
            self.worker.compute.submit(self._release, session, sequence, complete)

    def _open(self, tokens: int, body: dict) -> DecodeSession:
        address = body["prefill_engine"]
        peer = self._peers.get(address)
        if peer is None or not peer.alive:
            peer = self._peers[address] = self.worker.engine.connect(address, timeout=5)
        return self.receiver.open(-(-tokens // PAGE_SIZE), timeout=body["timeout_s"], peer=peer)

    async def _stream(
        self, response: web.StreamResponse, sequence: DecodeSequence, max_tokens: int, eos: set[int]
    ) -> None:
        await _line(response, token=sequence.tokens[-1])
        while len(sequence.tokens) < max_tokens and sequence.tokens[-1] not in eos:
            await _line(response, token=await self.worker.run(sequence.step))

    def _release(self, session: DecodeSession, sequence: DecodeSequence | None, complete: bool) -> None:
        session.cancel()
        if sequence is not None:
            sequence.close(store=complete)
        elif session.state == "done":
            self.worker.allocator.free(session.pages)

    async def _wait_in_thread(self, call, *args):
        return await asyncio.get_running_loop().run_in_executor(self._waiters, call, *args)

    def describe(self) -> dict:
        return {
            "prompt_tokens_run": self.engine.prompt_tokens_run,
            "tokens_run": self.engine.tokens_run,
            "pool_kv": asdict(self.engine.pool_kv.stats),
        }

    def on_weights(self) -> None:
        self.engine.pool_kv = self.worker.pool_kv


async def _line(response: web.StreamResponse, **value) -> None:
    await response.write(json.dumps(value).encode() + b"\n")


def main() -> None:
    die_with_parent()
    worker = Worker("decode", arguments("decode"))
    service = DecodeService(worker)
    serve(worker, [web.post("/generate", service.generate)], service.describe, service.on_weights)
    service.receiver.close()


if __name__ == "__main__":
    main()
