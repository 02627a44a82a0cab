"""SGLang's transfer classes of prefill/decode disaggregation: prefill ranks write pages into decode ranks' caches.

Bootstrap, the mapping of ranks, statuses and the heartbeat are SGLang's (its Common classes, over HTTP and ZeroMQ);
what moves is ours.
"""

from __future__ import annotations

import os
import threading
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.common.conn import (
    AbortNotification,
    CommonKVBootstrapServer,
    CommonKVManager,
    CommonKVReceiver,
    CommonKVSender,
)
from sglang.srt.disaggregation.common.utils import FastQueue, TransferKVChunk
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.environ import envs
from sglang.srt.runtime_context import get_memory, get_parallel
from sglang.srt.utils.network import NetworkAddress

import torch_mooncake as tm
from torch_mooncake.integrations import _memory
from torch_mooncake.integrations._hash_check import logger
from torch_mooncake.integrations.sglang import pd_messages as messages
from torch_mooncake.integrations.sglang.pd_peer import Decoder, register
from torch_mooncake.integrations.sglang.pd_plan import Plan

_WORKERS = 4


class TorchMooncakeKVManager(CommonKVManager):
    """One rank. ``TM_SGLANG_LISTEN`` ("tcp://127.0.0.1:0"; beyond loopback a TM_TOKEN is needed),
    ``TM_SGLANG_TRANSPORTS`` ("local,shm,tcp"), ``TM_SGLANG_TIMEOUT_S`` (30, for each chunk of a request).

    A chunk that cannot be sent fails its request on both sides, with the reason. Layouts are compared before anything
    is written. After an abort nothing more is sent. What is under way then is cancelled; with
    SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE it ends by itself instead, and decode, which keeps the pages that
    long, is told that nothing can be written any more.
    """

    supports_role_switch = True
    supports_deferred_decode_kv_release = True
    reports_transfer_latency = True
    kv_status_msg_tag = b"TM_STATUS"
    kv_status_msg_carries_reason = True
    enable_staging = False

    def __init__(self, args: Any, disaggregation_mode: Any, server_args: Any, is_mla_backend: bool | None = False):
        _refuse()
        self._timeout_s = float(os.environ.get("TM_SGLANG_TIMEOUT_S", 30))
        transports = os.environ.get("TM_SGLANG_TRANSPORTS", "local,shm,tcp").split(",")
        self.engine = tm.Engine(
            os.environ.get("TM_SGLANG_LISTEN", "tcp://127.0.0.1:0"),
            transports=transports,
            name=f"sglang-{disaggregation_mode.value}-{args.engine_rank}",
        )
        self._regions: _memory.Ranges[tm.Region] = _memory.Ranges()
        self._threads: list[threading.Thread] = []
        self._queues: list[Any] = []
        self._ops: dict[int, list[tm.Op]] = defaultdict(list)  # of a room, under way
        self._ops_lock = threading.Lock()
        self._stopped = False
        super().__init__(args, disaggregation_mode, server_args, is_mla_backend)
        self.register_buffer_to_engine()
        if disaggregation_mode == DisaggregationMode.PREFILL:
            self._queues = [FastQueue() for _ in range(_WORKERS)]
            for i, each in enumerate(self._queues):
                self._start(partial(self._work, each), f"tm-send-{i}")
            self._start(partial(self._listen, self._from_decode), "tm-control")
        else:
            self._start(partial(self._listen, self._from_prefill), "tm-control")
            self._threads.append(self._start_heartbeat_checker_thread())

    # --- memory ---

    def register_buffer_to_engine(self) -> None:
        """All buffers. SGLang calls it again when it has its memory back."""
        if not self._regions.starts:
            decode = self.disaggregation_mode == DisaggregationMode.DECODE
            self._regions = register(self.engine, self.kv_args, reachable=decode)

    def deregister_buffer_to_engine(self) -> None:
        """Returns when no peer can write any of it any more. Busy: see ``Engine.deregister``."""
        regions, self._regions = self._regions, _memory.Ranges()
        for region in regions.values:
            self.engine.deregister(region, timeout=self._timeout_s)
        if self.disaggregation_mode == DisaggregationMode.DECODE:
            with self.connection_lock:
                self.connection_pool.clear()  # so that prefill is told the new ones

    def teardown(self) -> None:
        """Stop threads, close sockets and the engine; the memory is the scheduler's."""
        self._stopped = True
        for queue in self._queues:
            queue.put(None)
        self._send_multipart_locked(NetworkAddress(self.local_ip, self.rank_port).to_tcp(), [messages.WAKE])
        if self.disaggregation_mode == DisaggregationMode.DECODE:
            self._heartbeat_shutdown.set()
        for thread in self._threads:
            thread.join(timeout=self._timeout_s)
        for sockets in (self._socket_cache, self._monitor_cache):
            for each in sockets.values():
                each.close(linger=0)
            sockets.clear()
        self.server_socket.close(linger=0)
        self._zmq_ctx.destroy(linger=0)
        self.engine.close()

    def _start(self, run: Callable[[], None], name: str) -> None:
        self._threads.append(threading.Thread(target=run, name=name, daemon=True))
        self._threads[-1].start()

    def _listen(self, handle: Callable[[list[bytes]], None]) -> None:
        receive = self._make_worker_recv(self.server_socket)
        while not self._stopped:
            frames = receive()
            if frames and frames[0] != messages.WAKE:
                try:
                    handle(frames)
                except Exception as error:  # of one peer: the others are still to be heard
                    logger.warning("SGLang control message %r: %s: %s", frames[0][:20], type(error).__name__, error)

    # --- decode ---

    def build_receiver_registration_message(self) -> list[bytes]:
        args, regions = self.kv_args, self._regions
        spans = zip(regions.starts, regions.ends, regions.values, strict=True)
        told = messages.Memory(
            engine=self.engine.id.hex(),
            addresses=self.engine.listening,
            regions=[(start, end - start, region.descriptor()) for start, end, region in spans],
            tp_rank=args.engine_rank,
            tp_size=self.attn_tp_size,
            state_tp_size=self.state_tp_size,
            page_size=args.page_size,
            kv=list(args.kv_data_ptrs),
            kv_nbytes=list(args.kv_item_lens),
            kv_layers=list(args.kv_layer_ids or []),
            aux=list(args.aux_data_ptrs),
            aux_nbytes=list(args.aux_item_lens),
            state_types=[each.value for each in args.state_types],
            states=messages.lists(args.state_data_ptrs),
            state_nbytes=messages.lists(args.state_item_lens),
            state_dims=messages.lists(getattr(args, "state_dim_per_tensor", [])),
            state_layers=messages.lists(args.state_layer_ids),
        )
        return messages.encoded(messages.MEMORY, told)

    def build_receiver_metadata_message(
        self,
        *,
        bootstrap_room: int,
        required_dst_info_num: int,
        kv_indices: Any,
        aux_index: int | None,
        state_indices: list[Any] | None,
        decode_prefix_len: int | None,
        is_dummy: bool,
        device_kv_indices: Any = None,
    ) -> list[bytes]:
        if device_kv_indices is not None:
            raise tm.Unsupported("pages of HiSparse, on two devices at once")
        told = messages.Room(
            room=int(bootstrap_room),
            endpoint=self.local_ip,
            dst_port=self.rank_port,
            engine=self.engine.id.hex(),
            pages=b"" if is_dummy else np.asarray(kv_indices, np.int32).tobytes(),
            aux_index=None if is_dummy or aux_index is None else int(aux_index),
            states=[] if is_dummy else messages.lists(state_indices),
            required_dst_info_num=required_dst_info_num,
            decode_prefix_len=int(decode_prefix_len or 0),
            is_dummy=is_dummy,
        )
        return messages.encoded(messages.ROOM, told)

    def _from_prefill(self, frames: list[bytes]) -> None:
        if self.handle_abort_ack_message(frames):
            return
        parsed = self.parse_kv_status_message(frames)
        if parsed is not None:
            room, status, rank, reason = parsed
            self.apply_prefill_status(bootstrap_room=room, status=status, prefill_rank=rank, failure_reason=reason)

    # --- prefill ---

    def _from_decode(self, frames: list[bytes]) -> None:
        if frames[0] == messages.MEMORY:
            self._met(messages.memory_of(frames))
        elif frames[0] == messages.ROOM:
            self._invited(messages.room_of(frames))
        elif (abort := AbortNotification.from_zmq(frames) if frames[0] == b"ABORT" else None) is not None:
            self._aborted(abort)

    def _met(self, far: messages.Memory) -> None:
        """A decode rank's memory, compared with ours: what does not fit is refused now, and again with each request."""
        plan, refused = None, ""
        try:
            plan = Plan(self, far, get_memory().enable_unified_memory)
        except tm.Error as error:
            refused = f"{type(error).__name__}: {error}"
            logger.error("SGLang decode rank %d is refused: %s", far.tp_rank, refused)
        for engine, decoder in list(self.decode_kv_args_table.items()):
            if engine == far.engine or not decoder.alive():
                decoder.close()
                del self.decode_kv_args_table[engine]
        self.decode_kv_args_table[far.engine] = Decoder(self.engine, far, plan, refused, self._timeout_s)

    def _invited(self, info: messages.Room) -> None:
        infos = self.transfer_infos.setdefault(info.room, {})
        infos[info.engine] = info
        if len(infos) == info.required_dst_info_num:
            self.resolve_kv_replica_factor(infos)
            self.req_to_decode_prefix_len[info.room] = max(each.decode_prefix_len for each in infos.values())
            self.update_status(info.room, KVPoll.WaitingForInput)
        decoder = self.decode_kv_args_table.get(info.engine)
        if decoder is None or decoder.refused:
            reason = decoder.refused if decoder else "its memory is not known here"
            self.conclude_failure(bootstrap_room=info.room, failure_reason=reason)

    def _aborted(self, abort: AbortNotification) -> None:
        if self.request_status.get(abort.room) not in (None, KVPoll.Success):
            self.record_failure(abort.room, "Aborted by decode")
            self.update_status(abort.room, KVPoll.Failed)
        self.cancel(abort.room)
        target = abort.deferred_ack_target() if self.enable_deferred_decode_kv_release else None
        if target is not None:
            self.register_deferred_ack_target(abort.room, target)
            self._maybe_ack_drained_abort(abort.room)

    def cancel(self, room: int) -> None:
        """What is under way for a request, unless decode waits for its end: of an op that was cancelled it cannot
        always be said that none of its bytes arrives later."""
        if self.enable_deferred_decode_kv_release:
            return
        with self._ops_lock:
            for op in self._ops.get(room, ()):
                op.cancel()

    def add_transfer_request(
        self,
        bootstrap_room: int,
        kv_indices: Any,
        index_slice: slice,
        is_last_chunk: bool,
        aux_index: int | None = None,
        state_indices: list[Any] | None = None,
        num_kv_tokens: int | None = None,
        *,
        wait_event: Any = None,
        indices_event: Any = None,
        trace_ctx: Any = None,
    ) -> None:
        """Queue a chunk; those of a request go one after the other. Chunks of one that has ended are dropped."""
        if not self._active(bootstrap_room) or bootstrap_room not in self.transfer_infos:
            return
        self._queues[bootstrap_room % len(self._queues)].put(
            TransferKVChunk(
                room=bootstrap_room,
                prefill_kv_indices=kv_indices,
                index_slice=index_slice,
                is_last_chunk=is_last_chunk,
                prefill_aux_index=aux_index,
                state_indices=state_indices,
                num_kv_tokens=num_kv_tokens,
                wait_event=wait_event,
                indices_event=indices_event,
            )
        )

    def _active(self, room: int) -> bool:
        return self.request_status.get(room) not in (None, KVPoll.Failed)

    def _work(self, queue: Any) -> None:
        while (chunk := queue.get()) is not None:
            self._staging_outstanding[chunk.room] += 1  # what is counted here holds Success and abort's answer back
            try:
                if self._active(chunk.room):
                    self._send(chunk)
            except Exception as error:
                logger.warning("SGLang room %d: %s: %s", chunk.room, type(error).__name__, error)
                if self._active(chunk.room):  # else it has failed before, and decode knows why
                    self.conclude_failure(bootstrap_room=chunk.room, failure_reason=f"{type(error).__name__}: {error}")
            finally:
                self._ended(chunk)

    def _ended(self, chunk: Any) -> None:
        room = chunk.room
        self._staging_outstanding[room] -= 1
        if self.enable_deferred_decode_kv_release:
            self._maybe_ack_drained_abort(room)
        if chunk.is_last_chunk or not self._active(room):
            self.transfer_infos.pop(room, None)
            self.req_to_decode_prefix_len.pop(room, None)
            self._staging_outstanding.pop(room, None)

    def _send(self, chunk: Any) -> None:
        for event in (chunk.wait_event, chunk.indices_event):
            if event is not None:
                event.synchronize()
        here = np.asarray(chunk.prefill_kv_indices, np.int64)
        moves = []
        for info in list(self.transfer_infos.get(chunk.room, {}).values()):
            if info.is_dummy:
                continue
            decoder = self.decode_kv_args_table.get(info.engine)
            if decoder is None:
                raise tm.PeerLost("the decode rank has not told of its memory", peer=info.engine)
            there = np.frombuffer(info.pages, np.int32).astype(np.int64)[chunk.index_slice]
            of_peer = decoder.plan.kv(here, there)
            if chunk.is_last_chunk:
                if chunk.state_indices and not self._should_skip_cp_replicated_state_transfer():
                    of_peer += decoder.plan.states(chunk.state_indices, info.states)
                if info.aux_index is not None and chunk.prefill_aux_index is not None:
                    of_peer += decoder.plan.aux(int(chunk.prefill_aux_index), info.aux_index)
            moves += [(decoder, move) for move in of_peer]
        self._write(chunk.room, moves)
        if chunk.is_last_chunk:
            self.conclude_transfer(bootstrap_room=chunk.room, status=KVPoll.Success)

    def _write(self, room: int, moves: list[Any]) -> None:
        """All of them, or an error when none of them is under way any more."""
        ops: list[tm.Op] = []
        failure: tm.Error | None = None
        try:
            for decoder, move in moves:
                if not self._active(room):
                    raise tm.Cancelled("the request has ended")
                ops.append(decoder.write(self._regions, move))
                with self._ops_lock:
                    self._ops[room].append(ops[-1])
            if not self._active(room):
                self.cancel(room)
        except tm.Error as error:
            failure = error
            self.cancel(room)
        for op in ops:
            try:
                op.wait()
            except tm.Error as error:
                failure = failure or error
        with self._ops_lock:
            self._ops.pop(room, None)
        if not all(op.remote_quiescent for op in ops):
            self.poison_deferred_ack_room(room)  # decode waits for its own timeout before it uses the pages again
        if failure is not None:
            raise failure


class TorchMooncakeKVSender(CommonKVSender):
    """A request on a prefill rank."""

    def abort(self) -> None:
        """Decode is told at once, and what is under way is cancelled."""
        super().abort()
        if self.conclude_state == KVPoll.Failed:
            self.kv_mgr.conclude_failure(bootstrap_room=self.bootstrap_room, failure_reason="Aborted by AbortReq.")
            self.kv_mgr.cancel(self.bootstrap_room)


class TorchMooncakeKVReceiver(CommonKVReceiver):
    """A request on a decode rank."""


class TorchMooncakeKVBootstrapServer(CommonKVBootstrapServer):
    """Where decode ranks find prefill ranks (HTTP)."""


def _refuse() -> None:
    """Unsupported: settings that change what is to be moved in ways that this does not know."""
    settings = {
        "SGLANG_DISAGG_STAGING_BUFFER": envs.SGLANG_DISAGG_STAGING_BUFFER.get(),
        "--enable-kv-cache-sharding": get_parallel().enable_kv_cache_sharding,
        "decode context parallelism": get_parallel().attn_dcp_size > 1,
    }
    if any(settings.values()):
        raise tm.Unsupported(f"PD transfers with {', '.join(name for name, on in settings.items() if on)}")
