"""A plain model of the reductions: Python's own numbers, one input after another in rank order, rounded as the element
type says. Nothing of torch computes here; tensors are made from bytes and compared as bytes."""

from __future__ import annotations

import functools
import math
import random
import struct
from collections.abc import Callable, Sequence
from typing import Any

import torch

# significant bits, exponent of the smallest step, exponent that is infinite
FLOATS = {
    torch.float16: (11, -24, 16),
    torch.bfloat16: (8, -133, 128),
    torch.float32: (24, -149, 128),
    torch.float64: (53, -1074, 1024),
}
# bytes, signed
INTS = {
    torch.uint8: (1, False),
    torch.int8: (1, True),
    torch.uint16: (2, False),
    torch.int16: (2, True),
    torch.uint32: (4, False),
    torch.int32: (4, True),
    torch.uint64: (8, False),
    torch.int64: (8, True),
}
COMPLEX = {torch.complex64: torch.float32, torch.complex128: torch.float64}
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu)
REDUCED = (*FLOATS, *INTS, *COMPLEX, torch.bool)
MOVED = (*REDUCED, *FP8)
OPS = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "PREMUL_SUM")
FACTOR = 0.3  # of PREMUL_SUM

PERIOD = 509  # a prime: no slot, slice or piece is a multiple of it
Number = Any  # int, float, complex or bool


def legal(dtype: torch.dtype, op: str) -> bool:
    if dtype in COMPLEX:
        return op in ("SUM", "AVG", "PREMUL_SUM")  # torch refuses the others itself
    if dtype == torch.bool:
        return op not in ("AVG", "PREMUL_SUM")
    return op not in ("BAND", "BOR", "BXOR") if dtype in FLOATS else op != "PREMUL_SUM"


def rounded(x: float, dtype: torch.dtype) -> float:
    """The nearest number of the type, ties to even."""
    bits, lowest, top = FLOATS[dtype]
    if bits == 53 or x == 0 or math.isnan(x) or math.isinf(x):
        return x
    step = max(math.frexp(x)[1] - bits, lowest)
    y = math.ldexp(round(math.ldexp(x, -step)), step)
    return math.copysign(math.inf if abs(y) >= 2.0**top else y, x)


# ---- numbers <-> bytes


def encoded(numbers: Sequence[Number], dtype: torch.dtype) -> bytes:
    if dtype in FP8:
        return bytes(numbers)
    if dtype == torch.bool:
        return bytes(int(x) for x in numbers)
    if dtype in INTS:
        size, signed = INTS[dtype]
        return b"".join(x.to_bytes(size, "little", signed=signed) for x in numbers)
    if dtype in COMPLEX:
        return encoded([part for x in numbers for part in (x.real, x.imag)], COMPLEX[dtype])
    if dtype == torch.bfloat16:
        return b"".join(struct.pack("<f", x)[2:] for x in numbers)
    code = {torch.float16: "e", torch.float32: "f", torch.float64: "d"}[dtype]
    return struct.pack(f"<{len(numbers)}{code}", *numbers)


def decoded(data: bytes, dtype: torch.dtype) -> list[Number]:
    if dtype in FP8 or dtype == torch.bool:
        return list(data)
    if dtype in INTS:
        size, signed = INTS[dtype]
        return [int.from_bytes(data[i : i + size], "little", signed=signed) for i in range(0, len(data), size)]
    if dtype in COMPLEX:
        parts = decoded(data, COMPLEX[dtype])
        return [complex(*parts[i : i + 2]) for i in range(0, len(parts), 2)]
    if dtype == torch.bfloat16:
        return [struct.unpack("<f", b"\0\0" + data[i : i + 2])[0] for i in range(0, len(data), 2)]
    code = {torch.float16: "e", torch.float32: "f", torch.float64: "d"}[dtype]
    return [x for (x,) in struct.iter_unpack(f"<{code}", data)]


# ---- inputs: the edges of the type first, every pair of them for two ranks, then whatever it can hold


def edges(dtype: torch.dtype) -> list[Number]:
    if dtype in INTS:
        size, signed = INTS[dtype]
        most = 2 ** (8 * size - signed) - 1
        return [0, 1, 2, 3, 7, most, most - 1, most // 2 + 1] + ([-1, -2, -7, -most, -most - 1] if signed else [])
    bits, lowest, top = FLOATS[dtype]
    most = (2.0 - 2.0 ** (1 - bits)) * 2.0 ** (top - 1)
    tie = 2.0 ** (1 - bits)  # 1 + tie / 2 is halfway between two numbers
    tiny = math.ldexp(1, lowest)  # the smallest subnormal; tiny << (bits - 1) is the smallest normal
    out = [0.0, -0.0, 1.0, -1.0, 1 + tie, tie / 2, 3 * tie / 2, tie / 4, 1 / 3, -7.0, most, -most, most / 2, tiny]
    out += [-tiny, 5 * tiny, math.ldexp(tiny, bits - 1), math.ldexp(tiny, bits - 1) - tiny]
    return [rounded(x, dtype) for x in (*out, math.inf, -math.inf, math.nan)]


def any_number(dtype: torch.dtype, dice: random.Random) -> Number:
    if dtype in INTS:
        size, signed = INTS[dtype]
        bits = dice.choice((3, 8 * size))
        return dice.getrandbits(bits) - (2 ** (bits - 1) if signed else 0)
    bits, lowest, top = FLOATS[dtype]
    wide = dice.random() < 0.2
    exponent = dice.randint(max(lowest, -60), min(top - 1, 60)) if wide else dice.randint(-3, 3)
    return rounded(math.ldexp(dice.uniform(-1, 1), exponent), dtype)


@functools.cache
def numbers(dtype: torch.dtype, seed: int) -> tuple[Number, ...]:
    """PERIOD numbers, other ones for each seed (a rank's, or a piece's)."""
    dice = random.Random(f"{dtype} {seed}")
    if dtype in FP8:
        return tuple(dice.getrandbits(8) for _ in range(PERIOD))
    if dtype == torch.bool:
        return tuple(dice.random() < 0.6 for _ in range(PERIOD))
    if dtype in COMPLEX:
        # Apart from the floats' edges: an infinite part is no more than that, but NaN spreads where torch multiplies.
        return tuple(
            complex(*(any_number(COMPLEX[dtype], dice) for _ in "ri")) if i > 4 else complex(i, -i)
            for i in range(PERIOD)
        )
    some = edges(dtype)
    n = len(some)
    paired = [some[(i * (seed % 2 + 1) + seed % 2 * (i // n) + seed) % n] for i in range(min(n * n, PERIOD // 2))]
    return tuple(paired + [any_number(dtype, dice) for _ in range(PERIOD - len(paired))])


# ---- the reductions


def wrapped(x: int, dtype: torch.dtype) -> int:
    size, signed = INTS[dtype]
    x %= 2 ** (8 * size)
    return x - 2 ** (8 * size) if signed and x >= 2 ** (8 * size - 1) else x


def _ints(op: str) -> Callable[[int, int], int]:
    return {
        "SUM": lambda a, b: a + b,
        "AVG": lambda a, b: a + b,
        "PRODUCT": lambda a, b: a * b,
        "MIN": min,
        "MAX": max,
        "BAND": lambda a, b: a & b,
        "BOR": lambda a, b: a | b,
        "BXOR": lambda a, b: a ^ b,
    }[op]


def _floats(op: str) -> Callable[[float, float], float]:
    def chosen(pick: Callable[[float, float], float]) -> Callable[[float, float], float]:
        return lambda a, b: math.nan if math.isnan(a) or math.isnan(b) else pick(a, b)

    if op in ("SUM", "AVG", "PREMUL_SUM"):
        return lambda a, b: a + b
    return {"PRODUCT": lambda a, b: a * b, "MIN": chosen(min), "MAX": chosen(max)}[op]


def reduced(inputs: Sequence[Number], dtype: torch.dtype, op: str) -> Number:
    """One element of every rank. Half precision is summed in fp32; int division rounds towards zero."""
    n = len(inputs)
    if dtype == torch.bool:
        fold = {"SUM": any, "MAX": any, "BOR": any, "BXOR": lambda xs: sum(xs) % 2 == 1}
        return fold.get(op, all)(inputs)
    if dtype in COMPLEX:
        part = COMPLEX[dtype]
        return complex(*(reduced([getattr(x, side) for x in inputs], part, op) for side in ("real", "imag")))
    if dtype in INTS:
        combine = _ints(op)
        total = inputs[0]
        for x in inputs[1:]:
            total = wrapped(combine(total, x), dtype)
        return total if op != "AVG" else abs(total) // n * (1 if total >= 0 else -1)
    wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
    if op == "PREMUL_SUM":
        factor = rounded(FACTOR, wide)
        inputs = [rounded(rounded(x * factor, wide), dtype) for x in inputs]
    combine_floats = _floats(op)
    acc = inputs[0]
    for x in inputs[1:]:
        acc = rounded(combine_floats(acc, x), wide)
    return rounded(rounded(acc / n, wide) if op == "AVG" else acc, dtype)


# ---- tensors


@functools.cache
def _table(dtype: torch.dtype, seed: int) -> torch.Tensor:
    return _bytes(encoded(numbers(dtype, seed), dtype))


@functools.cache
def _reduced_table(dtype: torch.dtype, op: str, seeds: tuple[int, ...]) -> torch.Tensor:
    rows = zip(*(numbers(dtype, seed) for seed in seeds), strict=True)
    return _bytes(encoded([reduced(row, dtype, op) for row in rows], dtype))


# Of the same size, and known to everything in torch.
PLAIN = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


def _bytes(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=PLAIN[len(data) // PERIOD])


@functools.cache
def _places(n: int, shift: int, constant: bool) -> torch.Tensor:
    i = torch.arange(n)
    return (i * (not constant) + i // PERIOD * 7 * (not constant) + shift) % PERIOD


def _laid(table: torch.Tensor, dtype: torch.dtype, n: int, shift: int, constant: bool) -> torch.Tensor:
    return table[_places(n, shift % PERIOD, constant)].view(dtype)


def values(dtype: torch.dtype, seed: int, n: int, shift: int = 0, constant: bool = False) -> torch.Tensor:
    """[n], contiguous. `shift`: which of the numbers come first; constant: one of them only, n times."""
    return _laid(_table(dtype, seed), dtype, n, shift, constant)


def expected(
    dtype: torch.dtype, op: str, seeds: Sequence[int], n: int, shift: int = 0, constant: bool = False
) -> torch.Tensor:
    return _laid(_reduced_table(dtype, op, tuple(seeds)), dtype, n, shift, constant)


LAYOUTS = ("contiguous", "strided", "transposed", "channels_last", "offset", "expanded")


def shape_of(n: int, layout: str) -> tuple[int, ...]:
    if layout in ("contiguous", "strided", "offset", "expanded"):
        return (n,)
    a = next((p for p in (3, 11, 17, 2, 5, 7) if n % p == 0), 1)
    if layout == "transposed":
        return (a, n // a)
    b = next((p for p in (11, 31, 2, 5, 7) if n // a % p == 0), 1)
    return (1, a, b, n // a // b)


def laid_out(flat: torch.Tensor, layout: str) -> torch.Tensor:
    """The same elements in the same (logical) order, in another place of memory each. expanded: flat is constant."""
    dtype, n = flat.dtype, flat.numel()
    plain = PLAIN[flat.element_size()]
    raw = flat.view(plain).clone()
    if layout == "strided":
        wide = torch.zeros(n, 2, dtype=plain)
        wide[:, 0] = raw
        raw = wide[:, 0]
    elif layout == "transposed":
        raw = raw.view(shape_of(n, layout)).t().contiguous().t()
    elif layout == "channels_last":
        raw = raw.view(shape_of(n, layout)).contiguous(memory_format=torch.channels_last)
    elif layout == "offset":
        wide = torch.zeros(n + 5, dtype=plain)
        wide[3 : 3 + n] = raw
        raw = wide[3 : 3 + n]
    elif layout == "expanded" and n > 0:
        raw = raw[:1].expand(n)
    return raw.view(dtype)


def empty(dtype: torch.dtype, n: int, layout: str) -> torch.Tensor:
    """Where a result goes: zeros. Nothing can be written to an expanded tensor."""
    size = torch.empty(0, dtype=dtype).element_size()
    return laid_out(torch.zeros(n * size, dtype=torch.uint8).view(dtype), "offset" if layout == "expanded" else layout)


def check(actual: torch.Tensor, wanted: torch.Tensor, what: object) -> None:
    """Equal bytes, but that one NaN is as good as another, and one zero as the other."""
    dtype = wanted.dtype
    size = wanted.element_size()
    assert actual.dtype == dtype
    assert actual.numel() == wanted.numel(), what
    if wanted.numel() == 0:
        return
    got = torch.empty(wanted.numel(), dtype=PLAIN[size]).copy_(actual.view(PLAIN[size]).reshape(-1))
    want = wanted.view(PLAIN[size])
    differs = (got != want).nonzero().view(-1)
    if len(differs) == 0:
        return
    both = torch.cat([x[differs].view(torch.uint8).view(-1, size) for x in (got, want)], 1)
    kinds, which = torch.unique(both, dim=0, return_inverse=True)
    pairs = zip(*(decoded(bytes(x.flatten().tolist()), dtype) for x in kinds.split(size, 1)), strict=True)
    for i, (a, b) in enumerate(pairs):
        parts = [(a.real, b.real), (a.imag, b.imag)] if dtype in COMPLEX else [(a, b)]
        same = dtype not in FP8 and all(x == y or (x != x and y != y) for x, y in parts)
        assert same, f"{what}: element {differs[which == i].tolist()[:3]} of {len(want)} is {a}, not {b}"
