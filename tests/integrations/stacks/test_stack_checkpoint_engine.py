"""checkpoint-engine's own HTTP service and client around our parameter server, and workers that it asks to update."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_engine import MemoryBufferMetaList, request_inference_to_update
from checkpoint_engine.api import _init_api
from fastapi.testclient import TestClient
from safetensors.torch import save_file

import torch_mooncake as tm
from torch_mooncake.integrations.checkpoint_engine import Handle, ParameterServer, Worker, update_weights_from_ipc

STACK = ("checkpoint-engine", "its HTTP service and request_inference_to_update around our ParameterServer and Worker")


def tensors(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "embed": torch.randn(37, 16, generator=generator),
        "up": torch.randn(16, 8, generator=generator).bfloat16(),
        "scale": torch.tensor(0.5 + seed),
    }


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


class Inference:
    """Takes what vLLM's /collective_rpc takes, and has what its workers were given."""

    def __init__(self) -> None:
        self.loaded: dict[str, torch.Tensor] = {}
        self.hooks = 0
        self.asked: list[dict[str, Any]] = []
        self.fails = False
        self.worker = Worker()
        inference = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                inference.asked.append(request)
                try:
                    assert request["method"] == "update_weights_from_ipc"
                    inference.update(request["args"][0])
                    self.send_response(200)
                except Exception:
                    self.send_response(500)
                self.end_headers()

            def log_message(self, *args: Any) -> None:
                """No log."""

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/collective_rpc"
        self.thread = threading.Thread(target=self.server.serve_forever)
        self.thread.start()

    def update(self, handles: dict[str, str]) -> None:
        self.worker.update(next(iter(handles.values())), run=self.load, post_hook=self.hook, timeout_s=30)

    def load(self, named: list[tuple[str, torch.Tensor]]) -> None:
        if self.fails:
            raise ValueError("it does not fit")
        self.loaded = {name: tensor.clone() for name, tensor in named}

    def hook(self) -> None:
        self.hooks += 1

    def close(self) -> None:
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()
        self.worker.close()


@pytest.fixture
def inference(pool_env: Any) -> Iterator[Inference]:
    with tm.Pool():  # the node stays
        made = Inference()
        yield made
        made.close()


def files(folder: Path, seed: int) -> list[str]:
    found = tensors(seed)
    save_file({"embed": found["embed"]}, folder / f"{seed}-0.safetensors")
    save_file({name: found[name] for name in ("up", "scale")}, folder / f"{seed}-1.safetensors")
    return [str(folder / f"{seed}-{i}.safetensors") for i in range(2)]


def test_its_http_service_updates_an_inference_engine(inference: Inference, tmp_path: Path):
    with ParameterServer(rank=0, world_size=1) as server:
        client = TestClient(_init_api(server))
        for seed in (1, 2):
            name = f"step-{seed}"
            paths = files(tmp_path, seed)
            assert client.post(f"/v1/checkpoints/{name}/files", json={"files": paths}).status_code == 200
            assert client.post(f"/v1/checkpoints/{name}/gather-metas").status_code == 200
            metas = client.get("/v1/metas").json()
            meta = MemoryBufferMetaList.model_validate(metas["0"]).memory_buffer_metas_list[0]
            assert {m.name: (m.dtype, tuple(m.shape)) for m in meta.metas} == {
                n: (t.dtype, tuple(t.shape)) for n, t in tensors(seed).items()
            }
            assert [m.aligned_size % 256 for m in meta.metas] == [0, 0, 0]
            done = client.post(f"/v1/checkpoints/{name}/update", json={"update_url": inference.url, "timeout": 30})
            assert done.status_code == 200, done.text
            assert same(inference.loaded, tensors(seed))
            assert inference.hooks == seed
        assert client.delete("/v1/checkpoints/step-1").status_code == 200
        assert client.post("/v1/metas", json=metas).status_code == 200
        assert client.get("/v1/metas").json() == metas
        assert all(Path(path).exists() for path in paths)
        inference.fails = True
        before = dict(inference.loaded)
        failed = client.post("/v1/checkpoints/step-2/update", json={"update_url": inference.url})
        assert failed.status_code == 500
        assert same(inference.loaded, before)
        assert client.post("/v1/checkpoints/x/files", json={"files": [str(tmp_path / "no")]}).status_code == 500


def test_ranks_that_hold_files_and_tensors(inference: Inference, tmp_path: Path):
    """Both ranks call update, once; afterwards either is updated from alone, and a third that joins with the metas."""
    paths = files(tmp_path, 3)
    extra = {"bias": torch.arange(5.0)}
    servers = [ParameterServer(rank=rank, world_size=2) for rank in range(2)]
    servers[0].register_checkpoint("policy", files=paths[:1])
    servers[1].register_checkpoint("policy", files=paths[1:], named_tensors=extra)

    def ask(paths: list[tuple[str, str]]) -> None:
        request_inference_to_update(inference.url, dict(paths), timeout=30)

    def run(rank: int) -> None:
        servers[rank].gather_metas("policy")
        servers[rank].update("policy", ask, ranks=[0])

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert same(inference.loaded, tensors(3) | extra)
    assert len(inference.asked) == 1
    assert len(inference.asked[0]["args"][0]) == 2  # devices
    assert sorted(servers[0].get_metas()) == [0, 1]
    inference.loaded = {}
    servers[1].update("policy", ask, ranks=[1])
    assert same(inference.loaded, tensors(3) | extra)
    with ParameterServer(rank=7, world_size=8) as joiner:
        joiner.load_metas(servers[0].get_metas())
        inference.loaded = {}
        joiner.update("policy", ask)
        assert same(inference.loaded, tensors(3) | extra)
        with pytest.raises(tm.KeyNotFound):
            joiner.update("nothing", ask)
    for server in servers:
        server.close()


def test_ranks_meet_those_of_their_own_run_each_time(inference: Inference):
    """A run that was killed after it had met has left all that it wrote; the next one goes by the same names."""

    def gather(server: ParameterServer) -> threading.Thread:
        thread = threading.Thread(target=server.gather_metas, args=("policy",))
        thread.start()
        return thread

    def names(server: ParameterServer) -> dict[int, list[str]]:
        found = {rank: MemoryBufferMetaList.model_validate(metas) for rank, metas in server.get_metas().items()}
        return {rank: [m.name for m in metas.memory_buffer_metas_list[0].metas] for rank, metas in found.items()}

    for run in ("old", "new"):
        servers = [ParameterServer(rank=rank, world_size=2) for rank in range(2)]
        for rank, server in enumerate(servers):
            server.register_checkpoint("policy", named_tensors={f"{run}{rank}": torch.ones(3)})
        for _ in range(2):
            first = gather(servers[0])
            first.join(0.5)
            assert first.is_alive()  # the other has not called it
            second = gather(servers[1])
            for thread in (first, second):
                thread.join(30)
                assert not thread.is_alive()
            assert [names(server) for server in servers] == [{0: [f"{run}0"], 1: [f"{run}1"]}] * 2
        with pytest.raises(tm.DeadlineExceeded, match=r"no ranks \[1\]"):
            servers[0].gather_metas("policy", timeout=timedelta(seconds=0.1))
        for server in servers:
            server.close()


def test_another_checkpoint_under_the_same_name(inference: Inference):
    """The next step's tensors, and then a model of another shape, go by the name of the first."""
    with ParameterServer(rank=0, world_size=1) as server:
        for found in (tensors(1), tensors(2), {"other": torch.ones(3, 3)}):
            server.register_checkpoint("policy", named_tensors=found)
            server.update("policy", lambda handles: inference.update(dict(handles)))
            assert same(inference.loaded, found)
            with pytest.raises(tm.KeyExists):
                server.register_checkpoint("policy", named_tensors=found)
            server.unregister_checkpoint("policy")
        server.unregister_checkpoint("policy")  # nothing


def test_the_workers_function(inference: Inference):
    with ParameterServer(rank=0, world_size=1) as server:
        server.register_checkpoint("policy", named_tensors=tensors(4))
        calls: list[str] = []

        def load(named: list[tuple[str, torch.Tensor]]) -> None:
            inference.load(named)
            calls.append("run")

        def ask(handles: list[tuple[str, str]]) -> None:
            update_weights_from_ipc(None, handles[0][1], None, run=load, post_hook=lambda: calls.append("hook"))

        server.update("policy", ask)
        assert calls == ["run", "hook"]
        assert same(inference.loaded, tensors(4))
    with pytest.raises(tm.InvalidArgument, match="no handle"):
        update_weights_from_ipc(None, "ipc://@checkpoint-engine-GPU-0.sock", 0, run=load)
    handle = Handle("policy", 3, "host:7400", None)
    assert Handle.parse(str(handle)) == handle
