"""examples/vllm/proxy.py between two HTTP servers that note what they are asked. With vLLM's: see vllm/."""

from __future__ import annotations

import asyncio
import importlib.util
from typing import Any

from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer
from places import ROOT

PATH = "/v1/completions"


class Server:
    """``pause_s``: before it answers; None: it refuses."""

    def __init__(self, pause_s: float | None) -> None:
        self.pause_s, self.asked = pause_s, list[dict[str, Any]]()
        app = web.Application()
        app.add_routes([web.post(PATH, self.answer)])
        self.server = TestServer(app)

    async def answer(self, request: web.Request) -> web.Response:
        self.asked.append(await request.json())
        if self.pause_s is None:
            return web.json_response({"error": "no"}, status=400)
        await asyncio.sleep(self.pause_s)
        return web.json_response({"text": "Paris"})

    @property
    def url(self) -> str:
        return str(self.server.make_url("")).rstrip("/")


async def ask(body: dict[str, Any], refuses: bool = False, gone: bool = False) -> tuple[list[Any], list[Any]]:
    """(what prefill was asked, what decode was asked) for one request."""
    spec = importlib.util.spec_from_file_location("vllm_proxy", ROOT / "examples" / "vllm" / "proxy.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.REFUSED_S = 10 if refuses or gone else 0.02
    prefill, decode = Server(None if refuses else 0.5), Server(0)
    for each in (prefill, decode):
        await each.server.start_server()
    proxy = module.Proxy(prefill.url, ["prefill:7100"], decode.url)
    app = web.Application()
    app.on_startup.append(proxy.open)
    app.on_cleanup.append(proxy.close)
    app.add_routes([web.post(PATH, proxy.serve)])
    if gone:
        await prefill.server.close()
    async with TestClient(TestServer(app)) as client:
        answer = await client.post(PATH, json=body)
        assert answer.status == 200
        assert await answer.json() == {"text": "Paris"}
    for each in (prefill, decode):
        await each.server.close()
    return prefill.asked, decode.asked


def test_both_are_asked_and_prefill_for_one_token():
    body = {"prompt": "x", "max_tokens": 12, "min_tokens": 4, "stream": True}
    (prefill,), (decode,) = asyncio.run(ask(body))
    assert {name: prefill[name] for name in prefill if name != "kv_transfer_params"} == {
        "prompt": "x",
        "max_tokens": 1,
        "min_tokens": 0,
    }
    params = decode.pop("kv_transfer_params")
    assert decode == body
    assert params == {
        "do_remote_prefill": True,
        "transfer_id": prefill["kv_transfer_params"]["transfer_id"],
        "remote": ["prefill:7100"],
    }


def test_decode_does_not_wait_for_a_prefill_that_refuses_or_is_not_there():
    for how in ("refuses", "gone"):
        _, asked = asyncio.run(ask({"prompt": "x"}, **{how: True}))
        assert asked == [{"prompt": "x"}]
