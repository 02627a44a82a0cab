"""gather, scatter, copy_pages and reshard_heads over the one copy of ``copying``: arguments, checks, regions."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from torch_mooncake.triton_ops import checks, copying


class Copies:
    """Copies with the same ids from several tensors to several others: one launch for those that lie alike."""

    def __init__(
        self, src_ids: Tensor | None, dst_ids: Tensor | None, count: int, src_pages: int, dst_pages: int
    ) -> None:
        self._ids = (src_ids, dst_ids)
        self._sizes = (count, src_pages, dst_pages)
        self._alike: dict[tuple[object, ...], list[tuple[int, int]]] = {}

    def add(
        self,
        source: int,
        destination: int,
        sizes: Sequence[int],
        element_nbytes: int,
        source_strides: Sequence[int],
        destination_strides: Sequence[int],
    ) -> None:
        """Pages of `sizes`; addresses of page 0; strides in elements, the pages' first."""
        strides = [[stride * element_nbytes for stride in side] for side in (source_strides, destination_strides)]
        dims = tuple(
            copying.Dim(n, s, d) for n, s, d in zip(sizes, strides[0][1:], strides[1][1:], strict=True) if n != 1
        )
        key = (strides[0][0], strides[1][0], dims, element_nbytes)
        self._alike.setdefault(key, []).append((source, destination))

    def run(self, device: torch.device) -> None:
        ids = [None if ids is None else ids.to(device).contiguous() for ids in self._ids]
        for (src_stride, dst_stride, dims, element_nbytes), regions in self._alike.items():
            copying.run(
                copying.Copy(
                    device,
                    tuple(regions),
                    self._sizes[0],
                    ids[0],
                    ids[1],
                    self._sizes[1],
                    self._sizes[2],
                    src_stride,  # type: ignore[arg-type]
                    dst_stride,  # type: ignore[arg-type]
                    dims,  # type: ignore[arg-type]
                    element_nbytes,  # type: ignore[arg-type]
                )
            )


def _gather_or_scatter(pools: Sequence[Tensor], page_ids: Tensor, listed: Tensor, layered: bool, scatter: bool) -> None:
    """pools[l] [num_pages, *page] against one layer `listed` [n, *page], or all layers [layers, n, *page]."""
    list_name, pool_name = "pages" if scatter else "out", "pools[0]" if layered else "pool"
    if layered and (listed.dim() < 1 or listed.shape[0] != len(pools)):
        raise ValueError(
            f"{list_name} has shape {list(listed.shape)} for {len(pools)} pools: the first size is the layers'"
        )
    if not pools:
        return
    first = pools[0]
    if first.dim() < 1:
        raise ValueError(f"{pool_name} has no dimension: expected [num_pages, *page]")
    checks.device(copying._copy_kernel, first, pool_name)
    checks.page_ids(page_ids, "page_ids", first, pool_name)
    count, num_pages = page_ids.numel(), first.shape[0]
    lead = [len(pools)] if layered else []
    checks.shape(listed, list_name, [*lead, count, *first.shape[1:]])
    checks.contiguous_pages(listed, 1 + len(lead), list_name)
    checks.like(listed, list_name, first, pool_name)
    if not scatter:
        checks.own_places(listed, list_name)
    element_nbytes = first.element_size()
    places = None
    copies = Copies(places if scatter else page_ids, page_ids if scatter else places, count, *(
        (count, num_pages) if scatter else (num_pages, count)
    ))  # fmt: skip
    for l, pool in enumerate(pools):
        name = f"pools[{l}]" if layered else "pool"
        checks.like(pool, name, first, pool_name)
        if pool.shape != first.shape:
            raise ValueError(f"{name} has shape {list(pool.shape)}, {pool_name} has {list(first.shape)}")
        if scatter:
            checks.own_places(pool, name)
        in_list = listed.data_ptr() + (l * listed.stride(0) * element_nbytes if layered else 0)
        sides = [(pool.data_ptr(), pool.stride()), (in_list, listed.stride()[len(lead) :])]
        source, destination = reversed(sides) if scatter else sides
        copies.add(source[0], destination[0], pool.shape[1:], element_nbytes, source[1], destination[1])
    ranges = [checks.Range(pool) for pool in pools]
    if shared := checks.sharing([checks.Range(listed)], ranges):
        raise ValueError(f"{list_name} and {f'pools[{shared[1]}]' if layered else 'pool'} share memory")
    if scatter and (shared := checks.same_memory(ranges)):
        raise ValueError(f"pools[{shared[0]}] and pools[{shared[1]}] are the same memory: a page can be written once")
    ids = checks.values(page_ids)
    checks.in_range(ids, "page_ids", num_pages)
    if scatter:
        checks.once(ids, "page_ids")
    copies.run(first.device)


def gather_pages(pool: Tensor, page_ids: Tensor) -> Tensor:
    if pool.dim() < 1:
        raise ValueError("pool has no dimension: expected [num_pages, *page]")
    out = pool.new_empty([page_ids.numel(), *pool.shape[1:]])
    _gather_or_scatter([pool], page_ids, out, layered=False, scatter=False)
    return out


def gather_pages_out(pool: Tensor, page_ids: Tensor, *, out: Tensor) -> None:
    _gather_or_scatter([pool], page_ids, out, layered=False, scatter=False)


def scatter_pages(pool: Tensor, page_ids: Tensor, pages: Tensor) -> None:
    _gather_or_scatter([pool], page_ids, pages, layered=False, scatter=True)


def gather_pages_layers(pools: Sequence[Tensor], page_ids: Tensor, out: Tensor) -> None:
    _gather_or_scatter(pools, page_ids, out, layered=True, scatter=False)


def scatter_pages_layers(pools: Sequence[Tensor], page_ids: Tensor, pages: Tensor) -> None:
    _gather_or_scatter(pools, page_ids, pages, layered=True, scatter=True)


def copy_pages(src: Sequence[Tensor], src_ids: Tensor, dst: Sequence[Tensor], dst_ids: Tensor) -> None:
    if len(src) != len(dst):
        raise ValueError(f"src has {len(src)} layers, dst {len(dst)}")
    if not src:
        return
    first = src[0]
    for t, name in ((first, "src[0]"), (dst[0], "dst[0]")):
        if t.dim() < 1:
            raise ValueError(f"{name} has no dimension: expected [num_pages, *page]")
    checks.device(copying._copy_kernel, first, "src[0]")
    checks.page_ids(src_ids, "src_ids", first, "src[0]")
    checks.page_ids(dst_ids, "dst_ids", first, "src[0]")
    if src_ids.numel() != dst_ids.numel():
        raise ValueError(f"src_ids has {src_ids.numel()} ids, dst_ids {dst_ids.numel()}")
    src_pages, dst_pages = first.shape[0], dst[0].shape[0]
    copies = Copies(src_ids, dst_ids, src_ids.numel(), src_pages, dst_pages)
    for l, (source, destination) in enumerate(zip(src, dst, strict=True)):
        for t, name, pages in ((source, f"src[{l}]", src_pages), (destination, f"dst[{l}]", dst_pages)):
            checks.like(t, name, first, "src[0]")
            checks.shape(t, name, [pages, *first.shape[1:]])
        checks.own_places(destination, f"dst[{l}]")
        copies.add(
            source.data_ptr(),
            destination.data_ptr(),
            first.shape[1:],
            first.element_size(),
            source.stride(),
            destination.stride(),
        )
    reads, writes = [checks.Range(t) for t in src], [checks.Range(t) for t in dst]
    if shared := checks.same_memory(writes):
        raise ValueError(f"dst[{shared[0]}] and dst[{shared[1]}] are the same memory: a page can be written once")
    apart = [l for l in range(len(src)) if src_pages != dst_pages or reads[l].place != writes[l].place]
    if shared := checks.sharing([reads[l] for l in apart], writes):
        raise ValueError(f"src[{apart[shared[0]]}] and dst[{shared[1]}] share memory")
    in_place = len(apart) < len(src)
    read, written = checks.values(src_ids), checks.values(dst_ids)
    checks.in_range(read, "src_ids", src_pages)
    checks.in_range(written, "dst_ids", dst_pages)
    checks.once(written, "dst_ids")
    if in_place and read and written:
        both = set(read)
        for position, page in enumerate(written):
            if page in both:
                raise ValueError(
                    f"dst_ids[{position}] is {page}, which is in src_ids too: a page of one pool is read or written, "
                    "not both"
                )
    copies.run(first.device)


def heads_of_rank(rank: int, tp: int, kv_heads: int, side: str) -> range:
    """The model's heads that a rank holds: csrc/kv/heads.h."""
    if kv_heads < 1:
        raise ValueError(f"kv_heads is {kv_heads}: at least 1")
    if tp < 1:
        raise ValueError(f"{side}_tp is {tp}: at least 1")
    if not 0 <= rank < tp:
        raise ValueError(f"{side}_ranks has {rank}, not in [0, {tp})")
    if kv_heads % tp == 0:
        return range(rank * (kv_heads // tp), (rank + 1) * (kv_heads // tp))
    if tp % kv_heads == 0:
        head = rank // (tp // kv_heads)
        return range(head, head + 1)
    raise ValueError(f"{side}_tp is {tp}, which neither divides the {kv_heads} heads nor is a multiple of them")


def _moved(values: Sequence[int], source: int, destination: int) -> list[int]:
    """As torch.movedim."""
    moved = list(values)
    moved.insert(destination, moved.pop(source))
    return moved


def reshard_heads(
    sources: Sequence[Tensor],
    outs: Sequence[Tensor],
    kv_heads: int,
    source_head_axis: int,
    out_head_axis: int,
    source_ranks: Sequence[int],
    source_tp: int,
    out_ranks: Sequence[int],
    out_tp: int,
) -> None:
    if len(sources) != len(source_ranks):
        raise ValueError(f"source_ranks has {len(source_ranks)} ranks for {len(sources)} sources")
    if len(outs) != len(out_ranks):
        raise ValueError(f"out_ranks has {len(out_ranks)} ranks for {len(outs)} outs")
    heads = [len(heads_of_rank(0, tp, kv_heads, side)) for tp, side in ((source_tp, "source"), (out_tp, "out"))]
    holder: dict[int, tuple[int, int]] = {}  # a head's first source, and where in it
    for s, rank in enumerate(source_ranks):
        held = heads_of_rank(rank, source_tp, kv_heads, "source")
        for head in held:
            holder.setdefault(head, (s, head - held.start))
    piece = math.gcd(*heads)
    pieces: list[tuple[int, int, int, int]] = []  # source, head in it, out, head in it
    for o, rank in enumerate(out_ranks):
        wanted = heads_of_rank(rank, out_tp, kv_heads, "out")
        for head in wanted[::piece]:
            if head not in holder:
                raise ValueError(f"head {head} of out rank {rank} is in none of the sources")
            pieces.append((*holder[head], o, head - wanted.start))
    if not outs:
        return

    first = sources[0]
    checks.device(copying._copy_kernel, first, "sources[0]")
    axes = []
    for axis, name in ((source_head_axis, "source_head_axis"), (out_head_axis, "out_head_axis")):
        if not -first.dim() <= axis < first.dim():
            raise ValueError(f"{name} is {axis}, not in [{-first.dim()}, {first.dim()})")
        axes.append(axis % first.dim())
    source_axis, out_axis = axes
    source_shape, out_shape = list(first.shape), list(first.shape)
    source_shape[source_axis], out_shape[source_axis] = heads
    for tensors, side, expected in (
        (sources, "sources", source_shape),
        (outs, "outs", _moved(out_shape, source_axis, out_axis)),
    ):
        for i, t in enumerate(tensors):
            checks.like(t, f"{side}[{i}]", first, "sources[0]")
            checks.shape(t, f"{side}[{i}]", expected)
    for o, out in enumerate(outs):
        checks.own_places(out, f"outs[{o}]")
    writes = [checks.Range(out) for out in outs]
    if shared := checks.sharing(writes, [checks.Range(source) for source in sources]):
        raise ValueError(f"outs[{shared[0]}] and sources[{shared[1]}] share memory")
    if shared := checks.same_memory(writes):
        raise ValueError(f"outs[{shared[0]}] and outs[{shared[1]}] share memory")

    # Pages are the first dimension where that is not the heads'; a piece of heads of all of them is one region.
    paged = source_axis != 0 and out_axis != 0
    pages = first.shape[0] if paged else 1
    sizes = list(source_shape)
    sizes[source_axis] = piece
    copies = Copies(None, None, pages, pages, pages)
    for s, source_head, o, out_head in pieces:
        from_strides, to_strides = list(sources[s].stride()), _moved(outs[o].stride(), out_axis, source_axis)
        copies.add(
            sources[s].data_ptr() + source_head * from_strides[source_axis] * first.element_size(),
            outs[o].data_ptr() + out_head * to_strides[source_axis] * first.element_size(),
            sizes[1:] if paged else sizes,
            first.element_size(),
            from_strides if paged else [0, *from_strides],
            to_strides if paged else [0, *to_strides],
        )
    copies.run(first.device)
