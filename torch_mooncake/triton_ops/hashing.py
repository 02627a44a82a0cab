"""hash_pages in Triton: XXH3-128 over the page hash chain (csrc/kv/page_hash.h), a lane a prompt."""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

LANES = 32

SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221"
    "b8084674f743248ee03590e6813a264c3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
    "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364eac5ac8334d3ebc3c581a0fffa1363eb"
    "170ddd51b7f0da49d316552629d4689e2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)
PRIME32_1 = tl.constexpr(0x9E3779B1)
PRIME32_2 = tl.constexpr(0x85EBCA77)
PRIME32_3 = tl.constexpr(0xC2B2AE3D)
PRIME64_1 = tl.constexpr(0x9E3779B185EBCA87)
PRIME64_2 = tl.constexpr(0xC2B2AE3D27D4EB4F)
PRIME64_3 = tl.constexpr(0x165667B19E3779F9)
PRIME64_4 = tl.constexpr(0x85EBCA77C2B2AE63)
PRIME64_5 = tl.constexpr(0x27D4EB2F165667C5)
PRIME_MIX = tl.constexpr(0x165667919E3779F9)


@lru_cache(maxsize=8)
def _constants(device: torch.device) -> Tensor:
    """The secret's 64-bit words at every byte of it, then what the eight accumulators begin with."""
    words = [int.from_bytes(SECRET[i : i + 8], "little", signed=True) for i in range(len(SECRET) - 7)]
    start = [PRIME32_3, PRIME64_1, PRIME64_2, PRIME64_3, PRIME64_4, PRIME32_2, PRIME64_5, PRIME32_1]
    words += [number.value - (1 << 64) * (number.value >> 63) for number in start]
    return torch.tensor(words, dtype=torch.int64).to(device)


START = tl.constexpr(len(SECRET) - 7)


def hash_prompts(token_ids: Tensor, offsets: Tensor, page_size: int, roots: Tensor, hashes: Tensor) -> None:
    """Writes the hashes of all prompts; offsets: int64 [prompts + 1] on the CPU; roots: uint8 [1 or prompts, 16]."""
    prompts = offsets.numel() - 1
    rows = torch.zeros_like(offsets)
    torch.cumsum(offsets.diff() // page_size, 0, out=rows[1:])
    if prompts == 0 or rows[-1] == 0:
        return
    device = token_ids.device
    roots = roots.contiguous().clone()  # a fresh tensor is aligned for 64-bit words
    _hash_kernel[(triton.cdiv(prompts, LANES),)](
        token_ids.contiguous(),
        offsets.to(device),
        rows.to(device),
        roots.view(torch.int64),
        hashes.view(torch.int64),
        _constants(device),
        prompts,
        2 if roots.shape[0] > 1 else 0,
        PAGE=page_size,
        LANES=LANES,
        num_warps=1,
    )


@triton.jit
def _secret(constants, at):
    return tl.load(constants + at).to(tl.uint64, bitcast=True)


@triton.jit
def _fold(a, b):
    return (a * b) ^ tl.umulhi(a, b)


@triton.jit
def _avalanche(h):
    h = (h ^ (h >> 37)) * PRIME_MIX
    return h ^ (h >> 32)


@triton.jit
def _swapped(x):
    """The bytes in opposite order."""
    x = ((x >> 8) & 0x00FF00FF00FF00FF) | ((x & 0x00FF00FF00FF00FF) << 8)
    x = ((x >> 16) & 0x0000FFFF0000FFFF) | ((x & 0x0000FFFF0000FFFF) << 16)
    return (x >> 32) | (x << 32)


@triton.jit
def _word(tokens, index: tl.constexpr, before0, before1, alive):
    """Word `index` of a page's input: the hash before, then the tokens."""
    if index == 0:
        return before0
    elif index == 1:
        return before1
    else:
        return tl.load(tokens + (index - 2), mask=alive, other=0).to(tl.int64).to(tl.uint64, bitcast=True)


@triton.jit
def _mix32(low, high, a0, a1, b0, b1, constants, at):
    low = (low + _fold(a0 ^ _secret(constants, at), a1 ^ _secret(constants, at + 8))) ^ (b0 + b1)
    high = (high + _fold(b0 ^ _secret(constants, at + 16), b1 ^ _secret(constants, at + 24))) ^ (a0 + a1)
    return low, high


@triton.jit
def _hash_short(tokens, before0, before1, alive, constants, N: tl.constexpr):
    """Of `N` words, at most 30."""
    low = tl.full(before0.shape, 0, tl.uint64) + (N * 8 * PRIME64_1) % (1 << 64)
    high = tl.full(before0.shape, 0, tl.uint64)
    if N <= 16:
        for step in tl.static_range((N - 1) // 4 + 1):
            i: tl.constexpr = (N - 1) // 4 - step
            a0 = _word(tokens, 2 * i, before0, before1, alive)
            a1 = _word(tokens, 2 * i + 1, before0, before1, alive)
            b0 = _word(tokens, N - 2 * (i + 1), before0, before1, alive)
            b1 = _word(tokens, N - 2 * (i + 1) + 1, before0, before1, alive)
            low, high = _mix32(low, high, a0, a1, b0, b1, constants, 32 * i)
    else:
        for i in tl.static_range(N // 4):
            a0 = _word(tokens, 4 * i, before0, before1, alive)
            a1 = _word(tokens, 4 * i + 1, before0, before1, alive)
            b0 = _word(tokens, 4 * i + 2, before0, before1, alive)
            b1 = _word(tokens, 4 * i + 3, before0, before1, alive)
            low, high = _mix32(low, high, a0, a1, b0, b1, constants, 32 * i if i < 4 else 32 * i - 125)
            if i == 3:
                low = _avalanche(low)
                high = _avalanche(high)
        a0 = _word(tokens, N - 2, before0, before1, alive)
        a1 = _word(tokens, N - 1, before0, before1, alive)
        b0 = _word(tokens, N - 4, before0, before1, alive)
        b1 = _word(tokens, N - 3, before0, before1, alive)
        low, high = _mix32(low, high, a0, a1, b0, b1, constants, 103)
    mixed = low * PRIME64_1 + high * PRIME64_4 + (N * 8 * PRIME64_2) % (1 << 64)
    zero = tl.full(before0.shape, 0, tl.uint64)
    return _avalanche(low + high), zero - _avalanche(mixed)


@triton.jit
def _accumulated(acc, tokens, first, before0, before1, alive, constants, at):
    """Eight words from `first` on; acc is [lanes, 8]."""
    lane = tl.arange(0, 8)[None, :]
    word = first + lane
    other = first + (lane ^ 1)
    data = tl.load(tokens[:, None] + (word - 2), mask=alive[:, None] & (word >= 2), other=0).to(tl.int64)
    swap = tl.load(tokens[:, None] + (other - 2), mask=alive[:, None] & (other >= 2), other=0).to(tl.int64)
    data = data.to(tl.uint64, bitcast=True)
    swap = swap.to(tl.uint64, bitcast=True)
    data = tl.where(word == 0, before0[:, None], tl.where(word == 1, before1[:, None], data))
    swap = tl.where(other == 0, before0[:, None], tl.where(other == 1, before1[:, None], swap))
    keyed = data ^ _secret(constants, at + 8 * lane)
    return acc + swap + (keyed & 0xFFFFFFFF) * (keyed >> 32)


@triton.jit
def _merged(acc, constants, at, start, LANES: tl.constexpr):
    lane = tl.arange(0, 8)[None, :]
    keyed = acc ^ _secret(constants, at + 8 * lane)
    even, odd = tl.split(tl.reshape(keyed, (LANES, 4, 2)))
    return _avalanche(tl.sum(_fold(even, odd), 1) + start)


@triton.jit
def _hash_long(tokens, before0, before1, alive, constants, N: tl.constexpr, LANES: tl.constexpr):
    """Of `N` words, more than 30."""
    lane = tl.arange(0, 8)[None, :]
    acc = tl.broadcast_to(_secret(constants, START + lane), (LANES, 8))
    for stripe in range((N - 1) // 8):
        acc = _accumulated(acc, tokens, stripe * 8, before0, before1, alive, constants, stripe % 16 * 8)
        if stripe % 16 == 15:
            acc = (acc ^ (acc >> 47) ^ _secret(constants, 128 + 8 * lane)) * PRIME32_1
    acc = _accumulated(acc, tokens, N - 8, before0, before1, alive, constants, 121)
    low = _merged(acc, constants, 11, (N * 8 * PRIME64_1) % (1 << 64), LANES)
    high = _merged(acc, constants, 117, (1 << 64) - 1 - (N * 8 * PRIME64_2) % (1 << 64), LANES)
    return low, high


@triton.jit
def _hash_kernel(
    token_ids, offsets, rows, roots, hashes, constants, prompts, root_stride, PAGE: tl.constexpr, LANES: tl.constexpr
):
    """roots and hashes in 64-bit words."""
    prompt = tl.program_id(0) * LANES + tl.arange(0, LANES)
    there = prompt < prompts
    begin = tl.load(offsets + prompt, mask=there, other=0)
    pages = (tl.load(offsets + prompt + 1, mask=there, other=0) - begin) // PAGE
    row = tl.load(rows + prompt, mask=there, other=0)
    before0 = tl.load(roots + prompt * root_stride, mask=there, other=0).to(tl.uint64, bitcast=True)
    before1 = tl.load(roots + prompt * root_stride + 1, mask=there, other=0).to(tl.uint64, bitcast=True)
    for page in range(tl.max(pages, 0)):
        alive = page < pages
        tokens = token_ids + begin + page * PAGE
        if PAGE <= 28:
            low, high = _hash_short(tokens, before0, before1, alive, constants, PAGE + 2)
        else:
            low, high = _hash_long(tokens, before0, before1, alive, constants, PAGE + 2, LANES)
        before0 = _swapped(high)
        before1 = _swapped(low)
        out = hashes + 2 * (row + page)
        tl.store(out, before0.to(tl.int64, bitcast=True), mask=alive)
        tl.store(out + 1, before1.to(tl.int64, bitcast=True), mask=alive)
