"""Calls of every operator for two implementations to agree on, bit for bit: names, and functions of an `ops` module
and of what puts a tensor on its device, which return what was written, on the CPU. Inputs are random bits: NaN payloads
and denormals count."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from types import ModuleType

import torch
from torch import Tensor

Put = Callable[[Tensor], Tensor]  # to the device, strides kept
Call = Callable[[ModuleType, Put], list[Tensor]]
HEAD_DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.uint8, torch.float8_e4m3fn]


def noise(shape: list[int], dtype: torch.dtype = torch.uint8, seed: int = 0) -> Tensor:
    """A tensor of random bits, on the CPU."""
    generator = torch.Generator().manual_seed(seed)
    nbytes = math.prod(shape) * dtype.itemsize
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator).view(dtype).reshape(shape)


def numbers(shape: list[int], dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Of all magnitudes, with zeros, denormals, infinities and NaN of both signs among them."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator) * 10 ** (torch.rand(shape, generator=generator) * 12 - 9)
    flat = x.view(-1)
    odd = [0.0, -0.0, math.inf, -math.inf, math.nan, -math.nan, 1e-40, 65504.0, 3e38]
    at = torch.randperm(flat.numel(), generator=generator)[: flat.numel() // 8 // len(odd) * len(odd)]
    flat[at] = torch.tensor(odd).repeat(len(at) // len(odd))
    return x.to(dtype)


def ids_of(count: int, num_pages: int, dtype: torch.dtype = torch.int64, seed: int = 0) -> Tensor:
    return torch.randperm(num_pages, generator=torch.Generator().manual_seed(seed))[:count].to(dtype)


def back(*tensors: Tensor) -> list[Tensor]:
    """On the CPU, as bytes."""
    return [t.cpu().contiguous().reshape(-1).view(torch.uint8) for t in tensors]


def on_cpu(t: Tensor) -> Tensor:
    return t


def on_gpu(t: Tensor) -> Tensor:
    return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="cuda").copy_(t)


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def moves(page_nbytes: int, gap: int, id_dtype: torch.dtype, layers: int = 3) -> Call:
    """gather and scatter, of one layer and of several, with a gap before every page: it decides the accesses' width."""

    def call(ops: ModuleType, put: Put) -> list[Tensor]:
        host = noise([layers, 12, page_nbytes + gap])
        pools = list(put(host)[:, :, gap:])
        ids = put(ids_of(7, 12, id_dtype))
        listed = put(torch.zeros(layers, 7, page_nbytes, dtype=torch.uint8))
        ops.gather_pages_layers(pools, ids, listed)
        one = ops.gather_pages(pools[-1], ids)
        wide = put(torch.zeros(7, page_nbytes + gap, dtype=torch.uint8))
        ops.gather_pages(pools[0], ids, out=wide[:, gap:])
        target = put(torch.zeros_like(host))
        ops.scatter_pages_layers(list(target[:, :, gap:]), ids, listed)
        single = put(torch.zeros_like(host[0]))
        ops.scatter_pages(single[:, gap:], ids, one)
        return back(listed, one, wide, target, single)

    return call


def transposed(dtype: torch.dtype) -> Call:
    """Pools read as HND that lie as NHD, and the other way round; copy_pages between them, and inside one pool."""

    def call(ops: ModuleType, put: Put) -> list[Tensor]:
        nhd = [put(noise([9, 2, 4, 3, 10], dtype, seed)) for seed in (1, 2)]
        hnd = [t.transpose(-2, -3) for t in nhd]
        ids = put(ids_of(4, 9))
        gathered = ops.gather_pages(hnd[0], ids)
        target = put(torch.zeros(11, 2, 3, 4, 10, dtype=dtype))
        ops.scatter_pages(target.transpose(-2, -3), ids, nhd[1][:4])
        pools = [put(torch.zeros(11, 2, 3, 4, 10, dtype=dtype)) for _ in nhd]
        ops.copy_pages(hnd, ids, pools, put(ids_of(4, 11, torch.int32, 5)))
        inside = nhd[0].clone()
        ops.copy_pages([inside], ids[:2], [inside], ids[2:])
        elements = put(torch.zeros(9, 10, 3, 4, 2, dtype=dtype))  # no run longer than an element
        ops.copy_pages([nhd[0].permute(0, 4, 3, 2, 1)], ids, [elements], ids)
        return back(gathered, target, *pools, inside, elements)

    return call


def reshards(kv_heads: int, source_tp: int, out_tp: int, to_hnd: bool, dtype: torch.dtype) -> Call:
    """All sources to all outs, pages [n, 2, N, H, D]; then one out alone."""

    def call(ops: ModuleType, put: Put) -> list[Tensor]:
        heads = [max(1, kv_heads // tp) for tp in (source_tp, out_tp)]
        sources = [put(noise([5, 2, 4, heads[0], 6], dtype, seed)) for seed in range(source_tp)]
        shape = [5, 2, heads[1], 4, 6] if to_hnd else [5, 2, 4, heads[1], 6]
        outs = [put(torch.zeros(shape, dtype=dtype)) for _ in range(out_tp + 1)]
        axes = {"source_head_axis": -2, "out_head_axis": -3 if to_hnd else -2, "kv_heads": kv_heads}
        ops.reshard_heads(sources, outs[:-1], **axes)
        last = out_tp - 1
        ops.reshard_heads(sources, outs[-1:], out_ranks=[last], out_tp=out_tp, **axes)
        assert same(back(outs[-1]), back(outs[last]))
        return back(*outs)

    return call


def scales(wide: torch.dtype, narrow: torch.dtype, shape: list[int], axes: tuple[int, ...], order: list[int]) -> Call:
    """quantize and dequantize of pages whose dimensions lie in `order`, to every type."""

    def call(ops: ModuleType, put: Put) -> list[Tensor]:
        inverse = [order.index(d) for d in range(len(order))]
        pages = put(numbers([shape[d] for d in order], wide, 3)).permute(inverse)
        assert list(pages.shape) == shape
        q, s = ops.quantize_pages(pages, axes, narrow)
        strided = put(torch.zeros([shape[d] for d in order], dtype=torch.uint8).view(narrow)).permute(inverse)
        ops.quantize_pages(pages, axes, narrow, out=(strided, torch.empty_like(s)))
        restored = [ops.dequantize_pages(q, s, axes, dtype) for dtype in (torch.float32, torch.float16, torch.bfloat16)]
        target = put(torch.zeros([shape[d] for d in order], dtype=wide)).permute(inverse)
        ops.dequantize_pages(strided, s, axes, out=target)
        return back(q, s, strided, *restored, target)

    return call


def every_bit_pattern(dtype: torch.dtype, narrow: torch.dtype) -> Call:
    """All 2^16 halves; all 2^8 narrow numbers under several scales."""

    def call(ops: ModuleType, put: Put) -> list[Tensor]:
        halves = put(torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(dtype).reshape(64, 1024))
        q, s = ops.quantize_pages(halves, (0,), narrow)
        codes = put(torch.arange(256, dtype=torch.uint8).repeat(6, 1).view(narrow))
        factors = put(torch.tensor([1.0, 2.0**-100, 1e-7, 0.013, 146.3, 1e30]))
        restored = [
            ops.dequantize_pages(codes, factors, (0,), t) for t in (torch.float32, torch.float16, torch.bfloat16)
        ]
        return back(q, s, *restored)

    return call


def blocks(wide: torch.dtype, narrow: torch.dtype, shape: list[int], block: tuple[int, int]) -> Call:
    """quantize_blocks of a matrix (of a batch of them), of its transpose, and into tensors that are there."""

    def call(ops: ModuleType, put: Put) -> list[Tensor]:
        weight = put(numbers(shape, wide, 6))
        q, s = ops.quantize_blocks(weight, block, narrow)
        turned = ops.quantize_blocks(weight.transpose(-1, -2), block, narrow)
        strided = put(torch.zeros([*shape[:-1], shape[-1] + 3], dtype=torch.uint8).view(narrow))[..., : shape[-1]]
        ops.quantize_blocks(weight, block, narrow, out=(strided, torch.empty_like(s)))
        return back(q, s, *turned, strided)

    return call


def delta(size: int, numel: int, share: float, length: int) -> Call:
    """delta_encode and delta_apply; `share` of the elements changed, in stretches of `length`."""

    def call(ops: ModuleType, put: Put) -> list[Tensor]:
        dtype = {1: torch.float8_e4m3fn, 2: torch.bfloat16, 4: torch.float32, 8: torch.float64}[size]
        old, new = noise([numel * size], seed=7), noise([numel * size], seed=8)
        generator = torch.Generator().manual_seed(9)
        chosen = (torch.rand(-(-numel // length), generator=generator) < share).repeat_interleave(length)[:numel]
        new = torch.where(chosen.repeat_interleave(size), new, old)
        base, fresh = (put(t.view(dtype)) for t in (old, new))
        blob = ops.delta_encode(base, fresh)
        assert ops.delta_encode(base, fresh, limit=blob.numel() - 1) is None
        target = base.clone()
        ops.delta_apply(blob, target)
        assert torch.equal(back(target)[0], new)
        return [blob, *back(target)]

    return call


def hashes(page_size: int, id_dtype: torch.dtype) -> Call:
    def call(ops: ModuleType, put: Put) -> list[Tensor]:
        lengths = torch.tensor([3 * page_size + page_size // 2, 0, page_size, 2 * page_size - 1])
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        tokens = put(noise([int(offsets[-1])], id_dtype, 4))
        roots = put(noise([4, 16], seed=5))
        return back(
            ops.hash_pages(tokens, page_size, roots[0]),
            ops.hash_pages_batch(tokens, offsets, page_size, roots),
            ops.hash_pages_batch(tokens, offsets, page_size, roots[1]),
        )

    return call


def calls() -> Iterator[tuple[str, Call]]:
    for page_nbytes, gap in ((1, 0), (6, 1), (20, 4), (100, 16), (4096, 0), (16384 + 8, 8), (5000, 3)):
        id_dtype = torch.int32 if gap % 2 else torch.int64
        yield f"moves-{page_nbytes}-{gap}-{id_dtype}", moves(page_nbytes, gap, id_dtype)
    yield "moves-130-layers", moves(48, 0, torch.int64, layers=130)
    for dtype in HEAD_DTYPES:
        yield f"transposed-{dtype}", transposed(dtype)
    for kv_heads, source_tp, out_tp in ((3, 3, 1), (8, 2, 4), (8, 4, 2), (6, 3, 2), (2, 8, 4), (4, 2, 8), (1, 2, 1)):
        for to_hnd in (False, True):
            name = f"reshards-{kv_heads}-{source_tp}-to-{out_tp}-{'hnd' if to_hnd else 'nhd'}"
            yield name, reshards(kv_heads, source_tp, out_tp, to_hnd, torch.bfloat16)
    for wide in (torch.float32, torch.float16, torch.bfloat16):
        for narrow in (torch.float8_e4m3fn, torch.int8):
            kind = f"{wide}-{narrow}"
            yield f"scales-nhd-{kind}", scales(wide, narrow, [4, 16, 2, 8], (0, 2), [0, 1, 2, 3])
            yield f"scales-hnd-{kind}", scales(wide, narrow, [2, 2, 2, 5, 7], (0, 1, 2), [0, 1, 3, 2, 4])
            yield f"scales-page-{kind}", scales(wide, narrow, [2, 3000], (0,), [0, 1])
            yield f"scales-apart-{kind}", scales(wide, narrow, [3, 4, 8], (0,), [2, 0, 1])
    for dtype in (torch.float16, torch.bfloat16):
        for narrow in (torch.float8_e4m3fn, torch.int8):
            yield f"every-{dtype}-{narrow}", every_bit_pattern(dtype, narrow)
    for wide in (torch.float32, torch.float16, torch.bfloat16):
        yield f"blocks-{wide}", blocks(wide, torch.float8_e4m3fn, [3, 5], (2, 2))
    for shape, block in (([256, 384], (128, 128)), ([2, 130, 257], (128, 128)), ([5, 40], (1, -1)), ([4, 6], (-1, 4)),
                         ([1, 1], (128, 128)), ([0, 7], (2, 2))):  # fmt: skip
        name = f"blocks-{'x'.join(map(str, shape))}-{block[0]}x{block[1]}"
        yield name, blocks(torch.bfloat16, torch.float8_e4m3fn, shape, block)
    yield "blocks-int8", blocks(torch.bfloat16, torch.int8, [5, 9], (2, 4))
    for size in (1, 2, 4, 8):
        yield f"delta-{size}", delta(size, 9000, 0.02, 1)
        yield f"delta-{size}-runs", delta(size, 4200, 0.1, 5)
    for numel, share in ((0, 1.0), (1, 1.0), (5000, 0.0), (4097, 1.0), (8192, 0.001), (300, 0.5)):
        yield f"delta-2-{numel}-{share}", delta(2, numel, share, 1)
    for page_size in (1, 2, 14, 15, 16, 28, 29, 64, 128, 129):
        yield f"hashes-{page_size}", hashes(page_size, torch.int32 if page_size % 2 else torch.int64)


CALLS = dict(calls())
SLOW = ("moves-130-layers",)  # in an interpreter
