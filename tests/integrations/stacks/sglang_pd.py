"""One side of prefill/decode disaggregation: SGLang's own control plane with our classes, over caches in host memory.

A ``Side`` has all ranks of one server in one process. ``Other`` runs one in another process, by the same calls.
"""

from __future__ import annotations

import contextlib
import functools
import multiprocessing.forkserver
import os
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import sglang_here  # noqa: F401
import torch
from processes import eventually
from sglang.srt import runtime_context
from sglang.srt.disaggregation.base.conn import KVArgs, KVPoll, StateType
from sglang.srt.disaggregation.utils import DisaggregationMode, KVClassType
from sglang.srt.plugins.hook_registry import HookRegistry
from sglang.srt.server_args import ServerArgs

from torch_mooncake.integrations.sglang import plugin

HOST, LAYERS, PAGE, PAGES, HEADS, DIM, SLOTS = "127.0.0.1", 3, 4, 12, 4, 8, 6
STATUS = {
    getattr(KVPoll, name): name for name in ("Failed", "Bootstrapping", "WaitingForInput", "Transferring", "Success")
}


def published() -> None:
    """SGLang's configuration of this process, from its own server arguments, with our backend's name."""
    plugin.register()
    HookRegistry.apply_hooks()
    if runtime_context.publish_role() is None:
        args = ServerArgs(
            model_path="dummy", device="cpu", host=HOST, disaggregation_mode="prefill",
            disaggregation_transfer_backend=plugin.NAME,
        )  # fmt: skip
        runtime_context.publish(args, role="scheduler")


def classes() -> SimpleNamespace:
    from sglang.srt.disaggregation import utils  # its names are others since the hooks were applied

    backend = utils.TransferBackend(plugin.NAME)
    return SimpleNamespace(**{kind.value: utils.get_kv_class(backend, kind) for kind in KVClassType})


def whole(seed: int, mla: bool) -> torch.Tensor:
    """The cache of a model: [K or V, layer, token, head, dim]; MLA [layer, token, dim]."""
    shape = (LAYERS, PAGES * PAGE, 2 * DIM) if mla else (2, LAYERS, PAGES * PAGE, HEADS, DIM)
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).half()


def recurrent(seed: int) -> torch.Tensor:
    """A mamba layer's states: [slot, channel]."""
    return torch.randn((SLOTS, 16), generator=torch.Generator().manual_seed(100 + seed))


class Rank:
    """A rank's tensors and its manager. ``states``: what its model has besides KV."""

    def __init__(
        self, mode: Any, rank: int, tp: int, mla: bool, seed: int | None, page: int, states: tuple[str, ...]
    ) -> None:
        share = max(1, HEADS // tp)
        heads = slice(rank * HEADS // tp // share * share, rank * HEADS // tp // share * share + share)

        def cut(model: torch.Tensor) -> list[torch.Tensor]:
            if mla:
                return [model[layer].clone() for layer in range(LAYERS)]
            return [model[k, layer, :, heads].clone() for k in (0, 1) for layer in range(LAYERS)]

        self.kv, self.swa = cut(whole(seed or 0, mla)), cut(whole(50 + (seed or 0), mla))
        width = 16 // tp
        self.mamba = [recurrent(i)[:, rank * width : (rank + 1) * width].clone() for i in range(2)]
        rows = torch.arange(SLOTS * 16, dtype=torch.int32).reshape(SLOTS, 16) + 1000 * rank
        self.aux = [rows.clone(), rows.double()[:, :3].contiguous()]
        if seed is None:
            for each in (*self.kv, *self.swa, *self.mamba, *self.aux):
                each.zero_()
        args = self.described(rank, tp, page, states)
        self.manager = classes().manager(args, mode, runtime_context.get_server_args(), mla)

    def described(self, rank: int, tp: int, page: int, states: tuple[str, ...]) -> KVArgs:
        args = KVArgs()
        args.engine_rank, args.pp_rank, args.system_dp_rank, args.gpu_id = rank, 0, 0, 0
        args.kv_cache_dtype_str, args.page_size, args.ib_device = "float16", page, ""
        args.kv_head_num, args.total_kv_head_num = max(1, HEADS // tp), HEADS
        args.prefill_start_layer, args.prefill_end_layer, args.kv_layer_ids = 0, LAYERS, []
        args.kv_data_ptrs, args.kv_data_lens = pointers(self.kv)
        args.kv_item_lens = [each[:page].nbytes for each in self.kv]
        args.aux_data_ptrs, args.aux_data_lens = pointers(self.aux)
        args.aux_item_lens = [each[0].nbytes for each in self.aux]
        args.state_types = [StateType(each) for each in states]
        buffers = [getattr(self, each) for each in states]
        args.state_data_ptrs = [pointers(each)[0] for each in buffers]
        args.state_data_lens = [pointers(each)[1] for each in buffers]
        rows = {"mamba": 1, "swa": page}
        args.state_item_lens = [[each[: rows[kind]].nbytes for each in getattr(self, kind)] for kind in states]
        args.state_dim_per_tensor = [[each.shape[1] for each in some] for some in buffers]
        args.state_layer_ids = [[] for _ in states]
        return args


def pointers(tensors: list[torch.Tensor]) -> tuple[list[int], list[int]]:
    return [each.data_ptr() for each in tensors], [each.nbytes for each in tensors]


class Side:
    """A server. ``seed``: what its cache has, None for zeros (decode)."""

    def __init__(
        self,
        mode: str,
        tp: int,
        mla: bool = False,
        seed: int | None = None,
        page: int = PAGE,
        states: tuple[str, ...] = (),
    ) -> None:
        published()
        self.mode, self.classes = DisaggregationMode(mode), classes()
        self.bootstrap, self.port = None, 0
        self.requests: dict[int, list[Any]] = {}
        if mode == "prefill":
            self.bootstrap = self.classes.bootstrap_server(HOST, 0)
            assert eventually(lambda: getattr(self.bootstrap, "_runner", None) and self.bootstrap._runner.addresses)
            self.port = self.bootstrap._runner.addresses[0][1]
        self.ranks = []
        for rank in range(tp):
            with contextlib.ExitStack() as stack:
                parallel = {"attn_tp_size": tp, "attn_tp_rank": rank, "tp_size": tp, "tp_rank": rank, "moe_tp_size": tp}
                fixed = {"attn_cp_rank": 0, "attn_dp_rank": 0, "pp_group": None, "pp_rank": 0}
                stack.enter_context(runtime_context.get_parallel().override(**parallel, **fixed))
                stack.enter_context(runtime_context.get_disagg().override(disaggregation_bootstrap_port=self.port))
                self.ranks.append(Rank(self.mode, rank, tp, mla, seed, page, states))

    def open(
        self, room: int, pages: int, aux: int, port: int = 0, into: list[int] | None = None, states: Any = None
    ) -> list[str]:
        """A request of that many pages; on decode with the pages and states that are to be filled. Statuses."""
        address, made = f"{HOST}:{port or self.port}", []
        for rank in self.ranks:
            if self.bootstrap is not None:
                made.append(self.classes.sender(mgr=rank.manager, bootstrap_addr=address, bootstrap_room=room))
                made[-1].init(pages, aux)
                continue
            made.append(self.classes.receiver(rank.manager, address, room))
            if rank.manager.try_ensure_parallel_info(address):
                made[-1].init(0)
            if made[-1].poll() == KVPoll.WaitingForInput:
                made[-1].send_metadata(numbers(into or []), aux, states)
        self.requests[room] = made
        return self.poll(room)

    def send(self, room: int, pages: list[int], states: list[Any] | None = None) -> None:
        """A chunk of a request, on all ranks."""
        for sender in self.requests[room]:
            sender.send(numbers(pages), states)

    def poll(self, room: int) -> list[str]:
        return [STATUS[each.poll()] for each in self.requests[room]]

    def wait(self, room: int, *statuses: str, timeout: float = 30) -> list[str]:
        """Its statuses, once all are among these, or at the timeout."""
        eventually(lambda: set(self.poll(room)) <= set(statuses), timeout)
        return self.poll(room)

    def abort(self, room: int) -> None:
        for each in self.requests[room]:
            each.abort()

    def why(self, room: int) -> list[str]:
        """Why it has failed, on each rank; that ends the request."""
        reasons = []
        for each in self.requests.pop(room):
            try:
                each.failure_exception()
            except Exception as error:
                reasons.append(str(error))
        return reasons

    def clear(self, room: int) -> None:
        for each in self.requests.pop(room):
            each.clear()

    def tensors(self, what: str) -> list[list[torch.Tensor]]:
        return [getattr(rank, what) for rank in self.ranks]

    def left(self) -> list[int]:
        """What the managers hold of requests."""
        tables = ("request_status", "transfer_infos", "_ops", "failure_records", "req_to_decode_prefix_len")
        return [sum(len(getattr(rank.manager, name, ())) for name in tables) for rank in self.ranks]

    def close(self) -> None:
        for rank in self.ranks:
            rank.manager.teardown()
        if self.bootstrap is not None:
            self.bootstrap.close()


def numbers(pages: list[int]) -> Any:
    return torch.tensor(pages, dtype=torch.int32).numpy()


def serve(pipe: Any, environment: dict[str, str]) -> None:
    """Another process: makes what it is told to, and calls it until the pipe is closed."""
    os.environ.update(environment)
    side: Any = None
    with contextlib.suppress(EOFError):
        while True:
            name, args, named = pipe.recv()
            try:
                if name == "make":
                    side = Side(*args, **named)
                    pipe.send(side.port)
                else:
                    pipe.send(getattr(side, name)(*args, **named))
            except Exception as error:
                pipe.send(error)


@functools.cache
def forkserver_context() -> Any:
    """Processes that begin with this module imported: SGLang's take long."""
    made = multiprocessing.get_context("forkserver")
    made.set_forkserver_preload(["sglang_pd"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
        multiprocessing.forkserver.ensure_running()
    return made


class Other:
    """A Side in a process of its own."""

    def __init__(self, *args: Any, **named: Any) -> None:
        context = forkserver_context()
        self._pipe, theirs = context.Pipe()
        environment = {name: value for name, value in os.environ.items() if name.startswith(("TM_", "SGLANG_"))}
        self.process = context.Process(target=serve, args=(theirs, environment), daemon=True)
        self.process.start()
        theirs.close()
        self.port = self("make", *args, **named)

    def __call__(self, name: str, *args: Any, **named: Any) -> Any:
        self._pipe.send((name, args, named))
        assert self._pipe.poll(120), f"{name}: no answer"
        answer = self._pipe.recv()
        if isinstance(answer, Exception):
            raise answer
        return answer

    def kill(self) -> None:
        self.process.kill()
        self.process.join(30)

    def close(self) -> None:
        if self.process.is_alive():
            self("close")
        self._pipe.close()
        self.process.join(30)
        assert self.process.exitcode is not None
