"""Gives each request to a prefill and to a decode server at once; the answer is decode's, as it comes.

    python proxy.py --prefill http://127.0.0.1:8100 --door 127.0.0.1:7100 --decode http://127.0.0.1:8200 --port 8000

--door: where the prefill server's ranks are asked for prompts, one for each rank (``port`` of its connector, and the
numbers after it). A request that prefill refuses at once goes to decode alone. Runs where vLLM is installed (aiohttp
comes with it).
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import uuid
from typing import Any

import aiohttp
from aiohttp import web

logger = logging.getLogger("proxy")
REFUSED_S = 0.02  # a server that cannot take a request says so within it, as a rule
ONE_TOKEN = {"max_tokens": 1, "max_completion_tokens": 1, "min_tokens": 0}


class Proxy:
    def __init__(self, prefill: str, doors: list[str], decode: str) -> None:
        self._prefill, self._doors, self._decode = prefill, doors, decode
        self._session: aiohttp.ClientSession | None = None
        self._running: set[asyncio.Task[bool]] = set()

    async def open(self, app: web.Application) -> None:
        self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None, sock_connect=5))

    async def close(self, app: web.Application) -> None:
        assert self._session is not None
        await self._session.close()

    async def serve(self, request: web.Request) -> web.StreamResponse:
        """/v1/completions and /v1/chat/completions."""
        body = await request.json()
        name = uuid.uuid4().hex
        prefilling = asyncio.create_task(self._begin(request.path, body, name))
        self._running.add(prefilling)
        prefilling.add_done_callback(self._running.discard)
        assert self._session is not None
        try:
            await asyncio.wait([prefilling], timeout=REFUSED_S)
            sent = body
            if not prefilling.done() or prefilling.result():
                params = {"do_remote_prefill": True, "transfer_id": name, "remote": self._doors}
                sent = {**body, "kv_transfer_params": params}
            async with self._session.post(self._decode + request.path, json=sent) as answer:
                out = web.StreamResponse(status=answer.status, headers={"Content-Type": answer.content_type})
                await out.prepare(request)
                async for data in answer.content.iter_any():
                    await out.write(data)
                return out
        except aiohttp.ClientConnectorError as error:
            raise web.HTTPBadGateway(text=f"no decode: {error}") from error
        finally:  # a client that goes away takes its prefill with it
            prefilling.cancel()

    async def _begin(self, path: str, body: dict[str, Any], name: str) -> bool:
        """Prefill computes the prompt and one token, which nobody reads. Whether it has: if it cannot, decode computes
        the prompt."""
        sent = {
            **{key: value for key, value in body.items() if key not in ("stream", "stream_options")},
            **{key: value for key, value in ONE_TOKEN.items() if key in body or key == "max_tokens"},
            "kv_transfer_params": {"do_remote_decode": True, "transfer_id": name},
        }
        assert self._session is not None
        try:
            async with self._session.post(self._prefill + path, json=sent) as answer:
                if answer.status != 200:
                    logger.warning("prefill says %d: %s", answer.status, (await answer.text())[:200])
                return answer.status == 200
        except aiohttp.ClientError as error:
            logger.warning("no prefill: %s", error)
            return False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prefill", required=True)
    parser.add_argument("--door", required=True, action="append", help="host:port; once for each prefill rank")
    parser.add_argument("--decode", required=True)
    parser.add_argument("--port", type=int, default=8000)
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO)
    proxy = Proxy(args.prefill, args.door, args.decode)
    app = web.Application(client_max_size=64 << 20)
    app.on_startup.append(proxy.open)
    app.on_cleanup.append(proxy.close)
    app.add_routes([web.post(f"/v1/{what}", proxy.serve) for what in ("completions", "chat/completions")])
    web.run_app(app, host="127.0.0.1", port=args.port, handle_signals=True)


if __name__ == "__main__":
    main()
