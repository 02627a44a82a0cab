"""Who feeds whom, and how the bytes travel: written directly to their pages, or packed, sent and unpacked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch_mooncake.errors import InvalidArgument, LayoutMismatch
from torch_mooncake.kv import exchange
from torch_mooncake.kv.groups import Group
from torch_mooncake.kv.layout import PagedKVLayout
from torch_mooncake.kv.wire import Place

# A run shorter than this costs more on its own than packing and unpacking do: benchmarks/kv_push.py measures where the
# two cross, over shm (between 32 and 128 bytes on a busy 2-core machine) and over tcp (between 128 and 512).
DIRECT_RUN_NBYTES = {"local": 64, "shm": 64}
_DIRECT_RUN_NBYTES_ELSE = 256


@dataclass(frozen=True)
class Feed:
    """What one prefill rank gives one decode rank of one group: its local heads and which of the other's they are.
    None on both sides: all there is (MLA, states)."""

    source: int
    source_heads: range | None
    sink: int
    sink_heads: range | None


def feeds(ours: Group, theirs: Group, source_tp: int, sink_tp: int) -> list[Feed]:
    """Every feed from any rank of `source_tp` to any of `sink_tp`; each head of each decode rank has one source.
    `ours` and `theirs` are the group as one prefill rank and one decode rank hold it."""
    if ours.kind != "attention" or ours.replicated:
        return [Feed(sink % source_tp, None, sink, None) for sink in range(sink_tp)]
    total = exchange.total_heads(ours.kv_heads, source_tp, theirs.kv_heads, sink_tp)
    if not total:
        raise LayoutMismatch(
            f"kv_heads {ours.kv_heads} on each of {source_tp} ranks, {theirs.kv_heads} on each of {sink_tp}"
        )
    return [Feed(*move) for move in exchange.head_map(source_tp, sink_tp, total)]


def feeds_of(prefill: PagedKVLayout, source: Place, decode: PagedKVLayout, sink: Place) -> list[Feed | None]:
    """For each group what that prefill rank gives that decode rank; None: nothing."""
    out: list[Feed | None] = []
    for ours, theirs in zip(prefill.groups, decode.groups, strict=True):
        found = feeds(ours, theirs, source.size, sink.size)
        out.append(next((f for f in found if (f.source, f.sink) == (source.rank, sink.rank)), None))
    return out


def sources_of(prefill: PagedKVLayout, source_tp: int, decode: PagedKVLayout, sink: Place) -> list[set[int]]:
    """For each group the prefill ranks that feed that decode rank."""
    return [
        {feed.source for feed in feeds(ours, theirs, source_tp, sink.size) if feed.sink == sink.rank}
        for ours, theirs in zip(prefill.groups, decode.groups, strict=True)
    ]


def sinks_of(prefill: PagedKVLayout, source: Place, decode: PagedKVLayout, sink_tp: int) -> set[int]:
    """The decode ranks that a prefill rank feeds."""
    return {
        feed.sink
        for ours, theirs in zip(prefill.groups, decode.groups, strict=True)
        for feed in feeds(ours, theirs, source.size, sink_tp)
        if feed.source == source.rank
    }


@dataclass(frozen=True)
class Plan:
    """How pages go from one prefill rank to one decode rank, and why."""

    wire: str  # "direct", "packed", "packed_fp8"; "none": that rank gets nothing from this one
    reason: str
    source: Place
    sink: Place
    transport: str
    heads: tuple[range | None, ...]  # of each group, which of the prefill rank's heads are sent; None: all or nothing
    run_nbytes: int  # mean length of a run that lies in one piece on both sides, within a page
    runs_per_page: int  # of one layer

    def __str__(self) -> str:
        sent = "" if self.heads == (None,) * len(self.heads) else f", heads {', '.join(map(_range, self.heads))}"
        return (
            f"prefill rank {self.source.rank} of {self.source.size} "
            f"to decode rank {self.sink.rank} of {self.sink.size} "
            f"over {self.transport or 'nothing'}: {self.wire} ({self.reason}){sent}; "
            f"{self.runs_per_page} runs of {self.run_nbytes} bytes a page and layer"
        )


def agree(asked: str, allowed: str) -> str:
    """The wire that both sides want: `asked` by the one who begins, `allowed` by the one who made the ticket. Lossy
    only if both say so: InvalidArgument."""
    if asked not in ("auto", "direct", "packed", "packed_fp8"):
        raise InvalidArgument(f'wire is "auto", "direct", "packed" or "packed_fp8", not {asked!r}')
    if asked == "packed_fp8" and allowed != "packed_fp8":
        raise InvalidArgument(
            f'"packed_fp8" loses precision and the other side has not asked for it (wire={allowed!r})'
        )
    if "auto" not in (asked, allowed) and asked != allowed:
        raise InvalidArgument(f"wire {asked!r} here, {allowed!r} there")
    return allowed if asked == "auto" else asked


def choose(
    wire: str,
    prefill: PagedKVLayout,
    source: Place,
    decode: PagedKVLayout,
    sink: Place,
    given: Sequence[Feed | None],
    transport: str,
    can_pack: str,
) -> Plan:
    """`wire` as agreed. `can_pack`: why pages cannot be packed, or "". InvalidArgument if packing is asked for and
    cannot be."""
    heads = tuple(feed.source_heads if feed is not None else None for feed in given)
    if all(feed is None for feed in given):
        return Plan("none", "its heads come from other ranks", source, sink, transport, heads, 0, 0)
    count = nbytes = 0
    for group, feed in enumerate(given):
        if feed is not None and prefill.groups[group].num_pages and decode.groups[group].num_pages:
            first = prefill.groups[group].layer_ids[:1]
            runs = exchange.runs(prefill, [0], decode, [0], first, feed.source_heads, feed.sink_heads, group)
            count, nbytes = count + len(runs), nbytes + runs.total_nbytes
    mean = nbytes // count if count else 0
    if wire != "auto":
        if wire != "direct" and can_pack:
            raise InvalidArgument(f"wire {wire!r} is asked for, and {can_pack}")
        return Plan(wire, "asked for", source, sink, transport, heads, mean, count)
    limit = DIRECT_RUN_NBYTES.get(transport, _DIRECT_RUN_NBYTES_ELSE)
    if mean >= limit or not count:
        why, wire = f"runs of {limit} bytes and more go directly", "direct"
    elif can_pack:
        why, wire = f"runs are shorter than {limit} bytes, but {can_pack}", "direct"
    else:
        why, wire = f"runs are shorter than {limit} bytes", "packed"
    return Plan(wire, why, source, sink, transport, heads, mean, count)


def _range(heads: range | None) -> str:
    return "all" if heads is None else f"{heads.start}..{heads.stop - 1}"
