"""The workers' side: blocks between the KV cache and the pool."""

from __future__ import annotations

import ctypes
import hashlib
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch_mooncake as tm
from torch_mooncake.integrations import _memory
from torch_mooncake.integrations._hash_check import logger
from torch_mooncake.integrations._staging import Staged
from torch_mooncake.integrations.tensorrt_llm.settings import Settings

Region = tuple[int, int, int]  # (address of page 0, bytes from a page to the next, bytes of a page)


class Worker:
    """One rank. Loads are over before ``start_load_kv`` returns, saves before ``wait_for_save`` does; loads of requests
    that wait aside are over when ``get_finished`` names them.

    A load that fails **raises**, in ``get_finished`` if it was one aside: TensorRT-LLM has no way to be told that a
    block is not there after all, and would answer from whatever the page holds. What was matched is pinned in the pool
    until then, so that only the loss of the node that has it comes to that. A save that fails is logged, and the block
    is not in the pool.
    """

    def __init__(self, llm_args: Any, rank: int | None = None) -> None:
        super().__init__(llm_args)  # type: ignore[call-arg]  # the base class of TensorRT-LLM, or a host's
        self._settings = Settings.of(llm_args)
        self._rank = _rank() if rank is None else rank
        self._pool = tm.Pool()
        self._blobs = tm.Blobs(self._pool)
        self._groups: list[list[Region]] = []
        self._device: int | None = None
        self._threads = ThreadPoolExecutor(2, "tm-trtllm-load")
        self._aside: dict[int, Future[None]] = {}
        self._asked: set[int] = set()  # requests whose loads TensorRT-LLM has asked about, and not been told of
        self._finished: set[int] = set()  # requests that are over, likewise

    # --- the cache ---

    def register_kv_caches(self, kv_cache_tensor: Any) -> None:
        """[blocks, layers, 2 (MLA: 1), elements]: a block is one piece. LayoutMismatch if another server of this model
        and namespace has blocks of another form."""
        if not kv_cache_tensor[0].is_contiguous():
            raise tm.Unsupported(f"blocks that are not contiguous: strides {kv_cache_tensor.stride()}")
        item = kv_cache_tensor.element_size()
        region = (kv_cache_tensor.data_ptr(), kv_cache_tensor.stride(0) * item, kv_cache_tensor[0].numel() * item)
        self._register([[region]], [str(kv_cache_tensor.dtype), list(kv_cache_tensor.shape[1:])])

    def register_kv_cache_layout(self, layout: Any) -> None:
        """Regions of several layer groups: page i of a region is at base + i * stride."""
        groups = [[(int(r.base), int(r.stride), int(r.size)) for r in group.regions] for group in layout.groups]
        roles = [[list(map(str, r.buffers)) for r in group.regions] for group in layout.groups]
        self._register(groups, [getattr(layout, "tokens_per_block", None), roles])

    def _register(self, groups: list[list[Region]], described: Any) -> None:
        self._groups = groups
        self._device = _memory.cuda_device(groups[0][0][0])
        sizes = [[size for _, _, size in regions] for regions in groups]
        mine = hashlib.blake2b(repr((described, sizes)).encode(), digest_size=16).hexdigest()
        key = f"{self._settings.prefix}rank{self._rank}/layout"
        self._pool.put(key, mine.encode(), if_exists="keep", timeout=self._settings.timeout_s)
        first = bytes(self._pool.get(key, timeout=self._settings.timeout_s)).decode(errors="replace")
        if first != mine:
            raise tm.LayoutMismatch(
                f"blocks of {self._settings.model} have another layout here than at who first used "
                f"{self._settings.prefix!r}: give this server another TM_TRTLLM_NAMESPACE"
            )

    def _pieces(self, slots: tuple[int, ...], scratch: Any = None) -> list[_memory.Piece]:
        """A block's memory in all groups; where it has no page, ``scratch``."""
        if len(slots) != len(self._groups):
            raise tm.LayoutMismatch(f"pages of {len(slots)} layer groups, {len(self._groups)} are registered")
        return [
            (base + stride * slot if slot >= 0 else ctypes.addressof(scratch), size)
            for slot, regions in zip(slots, self._groups, strict=True)
            for base, stride, size in regions
        ]

    def _device_of(self, address: int, nbytes: int) -> int | None:
        return self._device

    # --- the step ---

    def start_load_kv(self, stream: Any) -> None:
        """Load what this step needs; an error of ``tm.errors`` if any of it is not there. What requests wait for aside
        is begun, behind the work that the stream has now: it may still use those pages."""
        metadata = self.get_connector_meta()  # type: ignore[attr-defined]
        if metadata is None:
            return
        for number, loads in metadata.aside:
            before = None if stream is None else stream.record_event()
            self._aside[number] = self._threads.submit(self._load, loads, before)
        self._load(metadata.loads)

    def _load(self, loads: list[Any], before: Any = None) -> None:
        if before is not None:
            before.synchronize()
        if not loads:
            return
        keys = [self._settings.key(name, self._rank) for name, _ in loads]
        scratch = (ctypes.c_char * max(size for regions in self._groups for _, _, size in regions))()
        if self._device is not None and any(-1 in slots for _, slots in loads):
            raise tm.Unsupported("blocks without a page in some layer group, on a device")
        with Staged([self._pieces(slots, scratch) for _, slots in loads], self._device_of) as staged:
            outcomes = self._blobs.get_into(keys, staged.pieces, timeout=self._settings.timeout_s)
            for key, outcome in zip(keys, outcomes, strict=True):
                if isinstance(outcome, Exception):
                    raise outcome
                wanted = sum(size for regions in self._groups for _, _, size in regions)
                if outcome != wanted:
                    raise tm.LayoutMismatch(f"{key} has {outcome} bytes, a block here {wanted}")
            staged.store()

    def wait_for_layer_load(self, layer_idx: int, stream: Any) -> None:
        """Loads are over."""

    def save_kv_layer(self, layer_idx: int, stream: Any) -> None:
        """Blocks are saved whole, by ``wait_for_save``."""

    def wait_for_save(self, stream: Any) -> None:
        """Put the blocks that this step has filled, those that are not there yet."""
        saves = self.get_connector_meta().saves if self.get_connector_meta() is not None else []  # type: ignore[attr-defined]
        if not saves:
            return
        if stream is not None:
            stream.synchronize()
        keys = [self._settings.key(name, self._rank) for name, _ in saves]
        try:
            known = self._pool.exists(keys, timeout=self._settings.timeout_s)
            new = [i for i, there in enumerate(known) if not there]
            with Staged([self._pieces(saves[i][1]) for i in new], self._device_of) as staged:
                staged.load()
                outcomes = self._blobs.put_from(
                    [keys[i] for i in new],
                    staged.pieces,
                    sealed=True,
                    replicas=self._settings.replicas,
                    timeout=self._settings.timeout_s,
                )
            failed = [outcome for outcome in outcomes if isinstance(outcome, Exception)]
        except tm.Error as error:
            failed = [error]
        if failed:
            logger.warning("TensorRT-LLM save: %d blocks: %s: %s", len(failed), type(failed[0]).__name__, failed[0])

    def get_finished(
        self, finished_gen_req_ids: list[int], started_loading_req_ids: list[int]
    ) -> tuple[list[int], list[int]]:
        """(requests that are over, and no load writes to their blocks any more; requests whose loads aside have ended).
        Each once, now or later. The error of a load that has failed is raised, unless its request is over. Saves are
        over anyway."""
        self._asked |= set(started_loading_req_ids)
        self._finished |= set(finished_gen_req_ids)
        ended = {number for number, load in self._aside.items() if load.done()}
        loaded = {number for number in self._asked if number in ended or number not in self._aside}
        finished = {number for number in self._finished if number in ended or number not in self._aside}
        self._asked -= loaded
        self._finished -= finished
        for number in ended & (loaded | finished):
            load = self._aside.pop(number)
            if number not in finished:
                load.result()
            elif (error := load.exception()) is not None:
                logger.info("TensorRT-LLM load of a request that is over: %s: %s", type(error).__name__, error)
        return sorted(finished), sorted(loaded)

    def close(self) -> None:
        """What is under way ends before."""
        self._threads.shutdown(wait=True)
        self._pool.close()


def _rank() -> int:
    from tensorrt_llm._utils import mpi_rank

    return int(mpi_rank())
