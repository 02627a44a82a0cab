"""Which bytes of a prefill rank go where on a decode rank: SGLang's buffers, pages and states as the engine's pages."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sglang.srt.disaggregation.base.conn import StateType
from sglang.srt.disaggregation.common.staging_buffer import compute_head_slice_params, resolve_total_kv_heads
from sglang.srt.disaggregation.utils import (
    build_dsa_tail_transfer_blocks,
    build_transfer_entry_pairs,
    compute_mamba_state_slice_byte_blocks,
    should_send_replicated_state,
    slice_dsa_tail_dst_ptrs_for_pp,
)

import torch_mooncake as tm
from torch_mooncake.integrations.sglang.pd_messages import Memory

Ids = NDArray[np.int64]
_REPLICATED = (StateType.QSA_PENDING, StateType.QSA_COMPRESSED)  # the same on all ranks
_DRIFT = (StateType.SWA, StateType.DSA)  # SGLang lets one side have a page more at the end


@dataclass
class Move:
    """Page ``here[i]`` of each of our buffers to page ``there[i]`` of each of theirs. Addresses and bytes."""

    here: Ids
    there: Ids
    stride: int
    far_stride: int
    nbytes: int
    ours: list[int] = field(default_factory=list)
    theirs: list[int] = field(default_factory=list)


class Plan:
    """Of one prefill rank (its ``CommonKVManager``) and one decode rank. LayoutMismatch or Unsupported if they do not
    go together. Any thread."""

    def __init__(self, manager: Any, far: Memory, unified: bool) -> None:
        self._manager, self._args, self._far = manager, manager.kv_args, far
        args = self._args
        self._flat = manager.is_mla_backend or manager.is_hybrid_mla_backend or unified
        self._same_tp = manager.attn_tp_size == far.tp_size
        if far.page_size != args.page_size:
            raise tm.LayoutMismatch(f"pages of {args.page_size} tokens here, of {far.page_size} there")
        if list(args.aux_item_lens) != far.aux_nbytes:
            raise tm.LayoutMismatch(f"metadata of {list(args.aux_item_lens)} bytes here, of {far.aux_nbytes} there")
        if [str(each.value) for each in args.state_types] != far.state_types:
            raise tm.LayoutMismatch(f"states {[each.value for each in args.state_types]} here, {far.state_types} there")
        if unified and not self._same_tp:
            raise tm.Unsupported("unified memory with different tensor-parallel degrees")
        self._kv = self._pairs(args.kv_layer_ids, far.kv_layers, len(args.kv_data_ptrs), len(far.kv), None)
        self._sliced = not self._same_tp and not manager.is_mla_backend and not manager.is_hybrid_mla_backend
        if not self._sliced:
            self._check_sizes("KV", self._kv, args.kv_item_lens, far.kv_nbytes)
        for i, kind in enumerate(args.state_types):
            self._check_state(i, kind)

    def kv(self, here: Ids, there: Ids) -> list[Move]:
        """Of pages; as many here as there."""
        if len(here) != len(there):
            raise tm.LayoutMismatch(f"{len(here)} pages are sent, {len(there)} are expected")
        if not len(here) or self._another_rank_sends_kv():
            return []
        args, far = self._args, self._far
        return self._move(self._kv, args.kv_data_ptrs, args.kv_item_lens, far.kv, far.kv_nbytes, here, there)

    def aux(self, here: int, there: int) -> list[Move]:
        """One slot of every metadata buffer."""
        args, far = self._args, self._far
        pairs = [(i, i) for i in range(len(far.aux))]
        sides = args.aux_data_ptrs, args.aux_item_lens, far.aux, far.aux_nbytes
        return _pages(pairs, *sides, np.array([here], np.int64), np.array([there], np.int64))

    def states(self, here: list[Any], there: list[list[int]]) -> list[Move]:
        """What hybrid models have besides KV: for each type its indices on both sides."""
        moves: list[Move] = []
        for i, kind in enumerate(self._args.state_types):
            if i >= len(here) or here[i] is None:
                continue
            ours = [int(each) for each in here[i]]
            theirs = there[i] if i < len(there) else []
            if len(ours) != len(theirs) and kind in _DRIFT:
                ours, theirs = ours[: len(theirs)], theirs[: len(ours)]
            if len(ours) != len(theirs):
                raise tm.LayoutMismatch(f"state {kind.value}: {len(ours)} indices here, {len(theirs)} there")
            if ours:
                moves += self._state(i, kind, ours, theirs)
        return moves

    def _state(self, i: int, kind: Any, ours: list[int], theirs: list[int]) -> list[Move]:
        args, far = self._args, self._far
        sides = args.state_data_ptrs[i], args.state_item_lens[i], far.states[i], far.state_nbytes[i]
        if kind == StateType.DSA_TAIL:
            stage = args.prefill_start_layer, args.prefill_end_layer
            there, sizes = (slice_dsa_tail_dst_ptrs_for_pp(sides[0], each, *stage) for each in sides[2:])
            return _blocks(build_dsa_tail_transfer_blocks(sides[0], sides[1], there, ours, theirs, sizes))
        pairs = self._state_pairs(i, kind)
        if kind == StateType.MAMBA and self._manager.state_tp_size != far.state_tp_size:
            return self._mamba(i, pairs, ours[0], theirs[0])
        if kind in _REPLICATED and not self._same_tp:
            sizes_and_rank = {"src_attn_tp_size": self._manager.attn_tp_size, "dst_attn_tp_size": far.tp_size}
            if not should_send_replicated_state(**sizes_and_rank, local_tp_rank_in_group=self._rank()):
                return []
            return _pages(pairs, *sides, np.array(ours, np.int64), np.array(theirs, np.int64))
        return self._move(pairs, *sides, np.array(ours, np.int64), np.array(theirs, np.int64))

    def _mamba(self, i: int, pairs: list[tuple[int, int]], ours: int, theirs: int) -> list[Move]:
        """Each rank's share of a state, by SGLang's arithmetic."""
        args, far, blocks = self._args, self._far, []
        groups = _at(getattr(args, "state_conv_shard_groups", []), i) or []
        counts = _at(getattr(args, "state_slice_outer_counts", []), i) or []
        for mine, other in pairs:
            size, far_size = args.state_item_lens[i][mine], far.state_nbytes[i][other]
            for offset, far_offset, nbytes in compute_mamba_state_slice_byte_blocks(
                src_item_len=size,
                dst_item_len=far_size,
                src_dim=args.state_dim_per_tensor[i][mine],
                dst_dim=far.state_dims[i][other],
                outer_count=_at(counts, mine) or 1,
                src_attn_tp_size=self._manager.state_tp_size,
                dst_attn_tp_size=far.state_tp_size,
                dst_tp_rank_in_group=far.tp_rank % far.state_tp_size,
                local_tp_rank_in_group=args.engine_rank % self._manager.state_tp_size,
                conv_shard_groups=_at(groups, mine),
            ):
                here = args.state_data_ptrs[i][mine] + size * ours + offset
                blocks.append((here, far.states[i][other] + far_size * theirs + far_offset, nbytes))
        return _blocks(blocks)

    def _move(
        self, pairs: list[tuple[int, int]], near: Any, sizes: Any, far: Any, far_sizes: Any, here: Ids, there: Ids
    ) -> list[Move]:
        if not self._sliced:
            return _pages(pairs, near, sizes, far, far_sizes, here, there)
        manager, page = self._manager, self._args.page_size
        heads = resolve_total_kv_heads(self._args, manager.attn_tp_size)
        first, count, far_first, _ = compute_head_slice_params(
            manager.attn_tp_size, self._far.tp_size, self._args.engine_rank, self._far.tp_rank, heads
        )
        mine, others = max(1, heads // manager.attn_tp_size), max(1, heads // self._far.tp_size)
        tokens = np.arange(page, dtype=np.int64)
        rows, far_rows = ((ids[:, None] * page + tokens).ravel() for ids in (here, there))
        moves: dict[int, Move] = {}
        for i, j in pairs:
            head = sizes[i] // (page * mine)
            if head * page * mine != sizes[i] or head * page * others != far_sizes[j]:
                raise tm.LayoutMismatch(
                    f"pages of {sizes[i]} bytes here and {far_sizes[j]} there are not {mine} and {others} heads of "
                    f"{page} tokens"
                )
            move = moves.setdefault(head, Move(rows, far_rows, mine * head, others * head, count * head))
            move.ours.append(near[i] + first * head)
            move.theirs.append(far[j] + far_first * head)
        return list(moves.values())

    # --- which buffer is which ---

    def _pairs(self, near: Any, far: Any, count: int, far_count: int, kind: Any) -> list[tuple[int, int]]:
        """(ours, theirs): by layer where both say them, else by place, a pipeline stage's within the whole model's."""
        manager = self._manager
        try:
            if near or far:
                some = bool(manager.pp_size == 1)
                return list(build_transfer_entry_pairs(near or [], far or [], count, far_count, some))
            if count == far_count:
                return [(i, i) for i in range(count)]
            if self._flat:
                ours, theirs, _ = manager.get_mla_kv_ptrs_with_pp(list(range(count)), list(range(far_count)), kind)
                return list(zip(ours, theirs, strict=True))
            k, v, far_k, far_v, _ = manager.get_mha_kv_ptrs_with_pp(list(range(count)), list(range(far_count)))
            return list(zip([*k, *v], [*far_k, *far_v], strict=True))
        except (RuntimeError, ValueError, AssertionError) as error:
            raise tm.LayoutMismatch(f"{count} buffers here and {far_count} there do not pair: {error}") from error

    def _state_pairs(self, i: int, kind: Any) -> list[tuple[int, int]]:
        args, far = self._args, self._far
        layers = _at(args.state_layer_ids, i), _at(far.state_layers, i)
        return self._pairs(*layers, len(args.state_data_ptrs[i]), len(far.states[i]), kind)

    def _check_state(self, i: int, kind: Any) -> None:
        args, far = self._args, self._far
        if kind == StateType.DSA_TAIL:
            return  # SGLang's arithmetic checks it
        if kind == StateType.MAMBA and self._manager.state_tp_size != far.state_tp_size:
            if not _at(args.state_dim_per_tensor, i) or not _at(far.state_dims, i):
                raise tm.Unsupported("mamba states without dimensions, and different tensor-parallel degrees")
            return
        if kind == StateType.SWA and self._sliced:
            return  # cut as KV is
        if self._sliced and kind not in (*_REPLICATED, StateType.MAMBA):
            raise tm.Unsupported(f"state {kind.value} with different tensor-parallel degrees")
        self._check_sizes(kind.value, self._state_pairs(i, kind), args.state_item_lens[i], far.state_nbytes[i])

    def _check_sizes(self, what: str, pairs: list[tuple[int, int]], sizes: Any, far_sizes: Any) -> None:
        for i, j in pairs:
            if sizes[i] != far_sizes[j] and sizes[i] and (far_sizes[j] or what != StateType.DSA.value):
                raise tm.LayoutMismatch(f"{what}: pages of {sizes[i]} bytes here, of {far_sizes[j]} there")

    def _rank(self) -> int:
        return int(self._args.engine_rank % self._manager.attn_tp_size)

    def _another_rank_sends_kv(self) -> bool:
        """Hybrid MLA: several prefill ranks of one decode rank have the same KV; the first sends it."""
        ranks = self._manager.attn_tp_size // self._far.tp_size
        return bool(self._manager.is_hybrid_mla_backend and ranks > 1 and self._rank() % ranks)


def _pages(
    pairs: list[tuple[int, int]], near: Any, sizes: Any, far: Any, far_sizes: Any, here: Ids, there: Ids
) -> list[Move]:
    """Whole pages; buffers that have none on one side (layers that share an index) are left out."""
    moves: dict[int, Move] = {}
    for i, j in pairs:
        if sizes[i] and far_sizes[j]:
            move = moves.setdefault(sizes[i], Move(here, there, sizes[i], sizes[i], sizes[i]))
            move.ours.append(near[i])
            move.theirs.append(far[j])
    return list(moves.values())


def _blocks(blocks: list[tuple[int, int, int]]) -> list[Move]:
    """(our address, theirs, bytes) each."""
    one, by_size = np.zeros(1, np.int64), defaultdict[int, list[tuple[int, int]]](list)
    for here, there, nbytes in blocks:
        by_size[nbytes].append((here, there))
    return [
        Move(one, one, nbytes, nbytes, nbytes, [here for here, _ in some], [there for _, there in some])
        for nbytes, some in by_size.items()
    ]


def _at(values: Any, i: int) -> Any:
    return values[i] if values is not None and i < len(values) else None
