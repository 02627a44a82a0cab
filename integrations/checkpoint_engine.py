"""checkpoint-engine's interface on torch_mooncake: a parameter server that publishes, workers that follow.

    from torch_mooncake.integrations.checkpoint_engine import ParameterServer

    ps = ParameterServer()                                       # in every rank, in place of checkpoint_engine's
    ps.register_checkpoint("step-7", files=my_part_of_the_files)
    ps.gather_metas("step-7")
    ps.update("step-7", req_func)

``req_func`` gets what checkpoint-engine gives it, (device, handle) of every rank, and hands it on as it does there
(``checkpoint_engine.request_inference_to_update`` will do). A handle here names weights and a version, not a socket:
who is asked brings the version by itself, from whatever host, over one NIC a host, and passes it on. Nobody allocates
device buffers, and no process group is made. In the worker, in place of checkpoint-engine's function of that name:

    update_weights_from_ipc(context, handle, device_id, run=load_weights, post_hook=None)

or ``WorkerExtension`` as vLLM's ``worker_extension_cls``. Files are read by ``weights.Checkpoint``: they are mapped
nowhere, pinned nowhere and deleted never.
"""

from __future__ import annotations

import json
import math
import os
import platform
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from urllib.parse import quote

import torch

import torch_mooncake as tm
from torch_mooncake import weights

_ALIGN = 256  # of checkpoint-engine's buffers: what its metas call aligned_size
_POLL_S = 0.01
Named = list[tuple[str, torch.Tensor]]


@dataclass(frozen=True)
class Handle:
    """What a worker needs to know. ``str()`` of it travels."""

    name: str
    version: int
    address: str | None = None  # of the pool, as for ``tm.Pool``
    pool: str | None = None

    def __str__(self) -> str:
        return json.dumps({"torch_mooncake": [self.name, self.version, self.address, self.pool]})

    @classmethod
    def parse(cls, text: str) -> Handle:
        """InvalidArgument for what is none (such as a socket of checkpoint-engine)."""
        try:
            name, version, address, pool = json.loads(text)["torch_mooncake"]
        except (ValueError, KeyError, TypeError):
            raise tm.InvalidArgument(f"{text!r} is no handle of torch_mooncake's ParameterServer") from None
        return cls(name, version, address, pool)


class ParameterServer:
    """One rank's part. ``rank``, ``world_size``: as RANK and WORLD_SIZE say, if not given. ``address``, ``pool``: where
    ranks and workers meet, as for ``tm.Pool``. ``options``: of ``weights.Publisher`` (engine, place, …).

    For one thread; a context manager.
    """

    def __init__(
        self,
        *,
        rank: int | None = None,
        world_size: int | None = None,
        address: str | None = None,
        pool: str | None = None,
        **options: Any,
    ) -> None:
        self._rank = int(os.environ["RANK"]) if rank is None else rank
        self._world = int(os.environ["WORLD_SIZE"]) if world_size is None else world_size
        self._address, self._pool_name, self._options = address, pool, options
        self._pool = tm.Pool(address, pool=pool)
        self._publishers: dict[str, weights.Publisher] = {}
        self._published: set[str] = set()
        self._metas: dict[int, dict[str, Any]] = {}
        self._devices: list[str] = []
        self._gathered: dict[str, int] = {}  # how often, by name

    def register_checkpoint(
        self,
        checkpoint_name: str,
        *,
        files: Sequence[str] | None = None,
        named_tensors: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        """This rank's part of a checkpoint: safetensors files, tensors, or both; or nothing. Nothing is read yet.

        KeyExists if the name is registered. Otherwise as ``weights.Checkpoint`` and ``weights.Publisher``."""
        if checkpoint_name in self._publishers:
            raise tm.KeyExists(f"the checkpoint {checkpoint_name!r} is registered")
        sources: list[weights.Checkpoint | Mapping[str, torch.Tensor]] = []
        if files:
            sources.append(weights.Checkpoint(list(files)))
        if named_tensors:
            sources.append(named_tensors)
        self._publishers[checkpoint_name] = weights.Publisher(
            checkpoint_name,
            weights.Together(sources),
            rank=self._rank,
            world=self._world,
            pool=self._pool,
            **self._options,
        )

    def unregister_checkpoint(self, checkpoint_name: str, force: bool = False) -> None:
        """This rank's part can be had no more, except from workers that have it. Nothing, if it is not registered."""
        publisher = self._publishers.pop(checkpoint_name, None)
        self._published.discard(checkpoint_name)
        if publisher is not None:
            publisher.close()

    def gather_metas(self, checkpoint_name: str, *, timeout: timedelta = timedelta(minutes=10)) -> None:
        """Waits until every rank of this run has called it, as often as this one for that name. DeadlineExceeded."""
        publisher = self._publishers.get(checkpoint_name)
        tensors = []
        for whole in publisher.source.manifest.wholes if publisher is not None and publisher.source is not None else ():
            nbytes = math.prod(whole.shape) * getattr(torch, whole.dtype).itemsize
            aligned = -(-nbytes // _ALIGN) * _ALIGN
            tensors.append([whole.name, whole.dtype, list(whole.shape), aligned])
        mine = {"device": self._device(), "tensors": tensors}
        found = self._meet(checkpoint_name, json.dumps(mine), timeout.total_seconds())
        self._devices = [each["device"] for each in found]
        self._metas = {rank: _metas(each["tensors"]) for rank, each in enumerate(found) if each["tensors"]}

    def _meet(self, name: str, mine: str, timeout_s: float) -> list[dict[str, Any]]:
        """What each rank brings, when all are here. What lies in the pool may be of a run that has crashed: a rank is
        here when it has written down the number that this one has drawn for this meeting."""
        count = self._gathered[name] = self._gathered.get(name, 0) + 1
        place = f"checkpoint-engine/{quote(name, safe='')}/{count}/"
        deadline, ttl_s = time.monotonic() + timeout_s, timeout_s + 60  # nobody reads it after that
        number, written = os.urandom(8).hex(), None
        self._pool.put(f"{place}{self._rank}/{number}", mine, ttl_s=ttl_s)
        while True:
            texts = [self._pool.get(f"{place}{rank}", default=None) for rank in range(self._world)]
            records = [{"number": None, "saw": []} if text is None else json.loads(text) for text in texts]
            records[self._rank] = {"number": number, "saw": [number] * self._world}
            saw = [record["number"] for record in records]
            if saw != written:
                self._pool.put(f"{place}{self._rank}", json.dumps({"number": number, "saw": saw}), ttl_s=ttl_s)
                written = saw
            absent = [
                rank for rank, record in enumerate(records) if record["saw"][self._rank : self._rank + 1] != [number]
            ]
            if not absent:
                return [json.loads(self._pool.get(f"{place}{rank}/{drawn}")) for rank, drawn in enumerate(saw)]
            if time.monotonic() > deadline:
                raise tm.DeadlineExceeded(f"gather_metas({name!r}): no ranks {absent[:10]} within {timeout_s} s")
            time.sleep(_POLL_S)

    def get_metas(self) -> dict[int, dict[str, Any]]:
        """Of the ranks that have something: what checkpoint-engine calls MemoryBufferMetaList, as a dict."""
        return self._metas

    def load_metas(self, metas: Mapping[int, Any]) -> None:
        """For a rank that joins later, whose ``update`` has nothing of its own to publish. Who has what is in the pool:
        these are only told again by ``get_metas``."""
        self._metas = dict(metas)
        self._devices = self._devices or [self._device()]

    def update(
        self,
        checkpoint_name: str,
        req_func: Callable[[list[tuple[str, str]]], None],
        *,
        timeout: timedelta = timedelta(minutes=10),
        ranks: Sequence[int] | None = None,
    ) -> None:
        """Has the workers take the checkpoint: calls ``req_func``, and returns when it has.

        The first time after ``register_checkpoint`` it reads and publishes, and all ranks have to call it. Later, and
        in a rank that registered nothing, it is for the ranks that want it: nobody else has to do anything. ``ranks``:
        only these call ``req_func``. KeyNotFound if nothing of that name is published. What reading, publishing and
        ``req_func`` raise."""
        publisher = self._publishers.get(checkpoint_name)
        if publisher is not None and checkpoint_name not in self._published:
            publisher.publish(timeout=timeout.total_seconds())
            self._published.add(checkpoint_name)
        if ranks and self._rank not in ranks:
            return
        version = publisher.version if publisher is not None else self._current(checkpoint_name)
        handle = str(Handle(checkpoint_name, version, self._address, self._pool_name))
        req_func([(device, handle) for device in self._devices or [self._device()]])

    def _current(self, name: str) -> int:
        return weights.contents(name, pool=self._pool).version

    def _device(self) -> str:
        """As checkpoint-engine calls a GPU; without one, this host and rank."""
        if torch.cuda.is_available():
            return f"GPU-{torch.cuda.get_device_properties(torch.cuda.current_device()).uuid!s}"
        return f"CPU-{platform.node()}-{self._rank}"

    def close(self) -> None:
        for name in list(self._publishers):
            self.unregister_checkpoint(name)
        self._pool.close()

    def __enter__(self) -> ParameterServer:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _metas(tensors: list[list[Any]]) -> dict[str, Any]:
    metas = [{"name": n, "dtype": f"torch.{d}", "shape": s, "aligned_size": a} for n, d, s, a in tensors]
    buffer = {"metas": metas, "ptr": 0, "size": sum(meta["aligned_size"] for meta in metas)}
    return {"p2p_store_addr": None, "memory_buffer_metas_list": [buffer], "rdma_device": ""}


class Worker:
    """The receiving side of one process: follows the names that handles speak of, and keeps what it has, so that others
    may take it from here. For one thread; a context manager."""

    def __init__(self, **options: Any) -> None:
        self._options = options  # of weights.Subscriber
        self._followed: dict[str, tuple[tm.Pool, dict[str, torch.Tensor], weights.Subscriber]] = {}

    def update(
        self,
        handle: str,
        *,
        run: Callable[[Named], None],
        post_hook: Callable[[], None] | None = None,
        timeout_s: float = 600,
    ) -> None:
        """Brings the version that the handle names and calls ``run`` with all of its tensors, then ``post_hook``. They
        lie in shared memory of this process, and stay as they are until the update after the next.

        ``run`` is not called unless all of it is there: DeadlineExceeded, PeerLost; Cancelled, if there is a later
        version by now, because the workers of one model must not differ."""
        wanted = Handle.parse(handle)
        deadline = time.monotonic() + timeout_s
        if wanted.name in self._followed:
            tensors, subscriber = self._followed[wanted.name][1:]
            if subscriber.version < wanted.version and not self._fits(wanted.name):
                self._drop(wanted.name)  # another checkpoint goes by the name
        if wanted.name not in self._followed:
            self._follow(wanted)
        _, tensors, subscriber = self._followed[wanted.name]
        while subscriber.version < wanted.version:
            subscriber.update(timeout=max(0.0, deadline - time.monotonic()))
        if subscriber.version != wanted.version:
            raise tm.Cancelled(f"{wanted.name!r} has version {subscriber.version} by now, not {wanted.version}")
        run(list(tensors.items()))
        if post_hook is not None:
            post_hook()

    def _follow(self, wanted: Handle) -> None:
        pool = tm.Pool(wanted.address, pool=wanted.pool)
        try:
            wholes = weights.tensors_of_version(wanted.name, pool=pool)
            tensors = {whole.name: torch.empty(whole.shape, dtype=getattr(torch, whole.dtype)) for whole in wholes}
            subscriber = weights.Subscriber(wanted.name, tensors, flip="swap", pool=pool, **self._options)
        except BaseException:
            pool.close()
            raise
        self._followed[wanted.name] = pool, tensors, subscriber

    def _fits(self, name: str) -> bool:
        pool, tensors, _ = self._followed[name]
        published = {(w.name, w.shape, w.dtype) for w in weights.tensors_of_version(name, pool=pool)}
        return published == {(n, tuple(t.shape), str(t.dtype).removeprefix("torch.")) for n, t in tensors.items()}

    def _drop(self, name: str) -> None:
        pool, _, subscriber = self._followed.pop(name)
        subscriber.close()
        pool.close()

    def close(self) -> None:
        for name in list(self._followed):
            self._drop(name)

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def update_weights_from_ipc(
    zmq_ctx: Any,
    zmq_handle: str,
    device_id: int | None,
    *,
    run: Callable[[Named], None],
    post_hook: Callable[[], None] | None = None,
) -> None:
    """As checkpoint-engine's function of that name, with a handle of ours; there is no socket, and tensors are not yet
    on the device. What is brought is dropped afterwards; a ``Worker`` keeps it, for the next update and for others."""
    with Worker() as worker:
        worker.update(zmq_handle, run=run, post_hook=post_hook)


class WorkerExtension:
    """vLLM's ``worker_extension_cls``, in place of checkpoint-engine's ``VllmColocateWorkerExtension``: the workers can
    be told ``update_weights_from_ipc`` by ``collective_rpc``. The model is loaded as vLLM reloads layers."""

    def update_weights_from_ipc(self, zmq_handles: Mapping[str, str]) -> None:
        """``zmq_handles``: what ``req_func`` was given, as a dict. All handles of one update say the same."""
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

        if (worker := getattr(self, "_tm_worker", None)) is None:
            worker = self._tm_worker = Worker()
            weakref.finalize(self, worker.close)  # also at the process's end
        model = self.model_runner.get_model()  # type: ignore[attr-defined]

        def load(tensors: Named) -> None:
            initialize_layerwise_reload(model)
            try:
                model.load_weights(iter(tensors))
            finally:  # layers that were not loaded have what they had
                finalize_layerwise_reload(model, self.model_config)  # type: ignore[attr-defined]

        with set_current_vllm_config(self.vllm_config):  # type: ignore[attr-defined]
            worker.update(next(iter(zmq_handles.values())), run=load)


__all__ = ["Handle", "ParameterServer", "Worker", "WorkerExtension", "update_weights_from_ipc"]
