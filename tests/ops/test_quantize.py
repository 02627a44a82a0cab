"""quantize_pages and dequantize_pages: bit for bit against torch's own casts, and within bounds of float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torch_mooncake import ops

FP8, INT8 = torch.float8_e4m3fn, torch.int8
WIDE = [torch.float32, torch.float16, torch.bfloat16]
LARGEST = {FP8: 448.0, INT8: 127.0}
FLOOR = 2.0**-100


def spread(scales: torch.Tensor, axes: tuple[int, ...], dim: int) -> torch.Tensor:
    """Scales with a dimension of 1 wherever the pages have none of their own."""
    shape = [1] * dim
    for axis, size in zip(axes, scales.shape, strict=True):
        shape[axis] = size
    return scales.reshape(shape)


def reference(pages: torch.Tensor, axes: tuple[int, ...], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """The definition, in torch."""
    x = pages.float()
    finite = torch.where(x.isfinite(), x.abs(), 0.0)
    rest = [d for d in range(x.dim()) if d not in axes]
    amax = finite.amax(rest) if rest else finite
    scales = (amax / LARGEST[dtype]).clamp(min=FLOOR)
    y = x * spread(1.0 / scales, axes, x.dim())
    if dtype == FP8:
        nan = torch.tensor(float("nan")).copysign(1.0 - 2.0 * pages.signbit().float())  # float() may lose its sign
        return torch.where(x.isnan(), nan, y.clamp(-448, 448)).to(FP8), scales
    return y.clamp(-127, 127).round().nan_to_num(0).to(INT8), scales


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def check(pages: torch.Tensor, axes: tuple[int, ...], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    q, scales = ops.quantize_pages(pages, axes, dtype)
    expected, expected_scales = reference(pages, axes, dtype)
    assert q.shape == pages.shape
    assert q.is_contiguous()
    assert same(scales, expected_scales)
    assert same(q, expected)
    for wide in WIDE:
        back = ops.dequantize_pages(q, scales, axes, wide)
        right = (q.float() * spread(scales, axes, q.dim())).to(wide)
        assert back.dtype == wide
        assert same(back.nan_to_num(0.0, posinf=None), right.nan_to_num(0.0, posinf=None))
        assert torch.equal(back.isnan(), right.isnan())
    return q, scales


def numbers(shape: list[int], dtype: torch.dtype, seed: int, special: bool = False) -> torch.Tensor:
    """Of very different sizes; `special`: NaN, infinities and zeros of both signs, denormals, the largest as well."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator) * torch.exp2(torch.randn(shape, generator=generator) * 4)
    x = x.clamp(-3e4, 3e4).to(dtype)
    if special and x.numel():
        largest = torch.finfo(dtype).max
        values = [float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 1e-40, -largest, largest, 2.0**-20]
        picks = torch.tensor(values).to(dtype)
        picks = torch.cat([picks, -picks[:1]])
        chosen = torch.randint(0, len(picks), shape, generator=generator)
        x = torch.where(torch.rand(shape, generator=generator) < 0.1, picks[chosen], x)
    return x


@st.composite
def cases(draw: st.DrawFn):
    shape = draw(st.lists(st.integers(1, 9), min_size=1, max_size=4))
    shape[-1] = draw(st.sampled_from([1, 3, 16, 31, 64, 65, 100, 128]))
    axes = tuple(a for a in range(len(shape)) if a == 0 or draw(st.booleans()))
    pages = numbers(shape, draw(st.sampled_from(WIDE)), draw(st.integers(0, 999)), draw(st.booleans()))
    if draw(st.booleans()):  # a view that lies otherwise
        pages = pages.flip(0).transpose(0, -1).contiguous().transpose(0, -1)
    return pages, axes, draw(st.sampled_from([FP8, INT8]))


@settings(max_examples=250, deadline=None)
@given(cases())
def test_is_the_definition(case):
    check(*case)


@pytest.mark.parametrize("dtype", [FP8, INT8])
@pytest.mark.parametrize("wide", WIDE)
def test_every_number_of_sixteen_bits(wide, dtype):
    """Every fp16 and bf16 there is (as float32 too), under scales of one, of the smallest and of others."""
    bits = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)
    every = bits.view(torch.float16 if wide == torch.float32 else wide).to(wide)
    for largest in (448.0, 127.0, 0.3, 1e-38, 60000.0):
        kept = torch.where(every.float().abs() <= largest, every, torch.zeros((), dtype=wide))
        kept[-1] = largest
        check(kept.reshape(1, -1), (0,), dtype)
    check(every.reshape(64, -1), (0,), dtype)  # with NaN and infinities among them


@pytest.mark.parametrize("dtype", [FP8, INT8])
def test_halfway_between_two_codes(dtype):
    """Ties go to even: exact halves of neighbouring codes, and the floats beside them."""
    codes = torch.arange(127, dtype=torch.uint8).view(FP8).float() if dtype == FP8 else torch.arange(128).float()
    middle = (codes[1:] + codes[:-1]) / 2
    beside = [middle, middle.nextafter(torch.tensor(0.0)), middle.nextafter(torch.tensor(1e9))]
    x = torch.cat([*beside, -middle, torch.tensor([LARGEST[dtype]])])  # so that the scale is one
    q, scales = check(x.reshape(1, -1), (0,), dtype)
    assert scales.item() == 1.0
    assert q.float().unique().numel() > 100


@pytest.mark.parametrize("dtype", [FP8, INT8])
@pytest.mark.parametrize("wide", WIDE)
@pytest.mark.parametrize("head_dim", [64, 80, 61])
def test_error_is_within_the_stated_bound_of_float64(wide, dtype, head_dim):
    pages = numbers([20, 16, 3, head_dim], wide, head_dim)
    q, scales = ops.quantize_pages(pages, (0, 2), dtype)
    x, scale = pages.double(), scales.double()[:, None, :, None]
    bound = torch.maximum(x.abs() / 16, scale / 1024) * (1 + 2**-20) if dtype == FP8 else scale / 2 * (1 + 2**-15)
    error = (ops.dequantize_pages(q, scales, (0, 2)).double() - x).abs()
    assert bool((error <= bound).all())
    assert bool((error > bound / 2).any())  # the bound is no exaggeration
    for narrow in (torch.float16, torch.bfloat16):  # and half a place of the dtype on top
        back = ops.dequantize_pages(q, scales, (0, 2), narrow).double()
        place = torch.finfo(narrow).eps / 2 * (x.abs() + bound) + torch.finfo(narrow).smallest_normal
        inside = x.abs() < torch.finfo(narrow).max / 2
        assert bool((((back - x).abs() <= bound + place) | ~inside).all())


@pytest.mark.parametrize("dtype", [FP8, INT8])
def test_special_values(dtype):
    nan, inf = float("nan"), float("inf")
    pages = torch.tensor(
        [[0.0, -0.0, 0, 0], [1, nan, -nan, 0.5], [inf, -inf, 2, 1], [nan, nan, inf, nan], [1e-45, 0, 0, 0]]
    )
    q, scales = check(pages, (0,), dtype)
    largest = LARGEST[dtype]
    assert scales.tolist() == torch.tensor([FLOOR, 1 / largest, 2 / largest, FLOOR, FLOOR]).tolist()
    back = ops.dequantize_pages(q, scales, (0,))
    assert torch.equal(back[0], torch.zeros(4))
    assert back[2].tolist() == pytest.approx([2, -2, 2, 1], rel=0.01)
    if dtype == FP8:
        assert back[1].isnan().tolist() == [False, True, True, False]
        assert q.view(torch.uint8)[0].tolist() == [0, 0x80, 0, 0]
    else:
        assert q[1].tolist()[1:3] == [0, 0]


def test_flushing_denormals_changes_nothing():
    pages = numbers([8, 64], torch.float32, 1) * 1e-38
    before = [ops.quantize_pages(pages, (0,), dtype) for dtype in (FP8, INT8)]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    assert torch.set_flush_denormal(True)
    try:
        after = [ops.quantize_pages(pages, (0,), dtype) for dtype in (FP8, INT8)]
        backs = [ops.dequantize_pages(q, scales, (0,)) for q, scales in after]
    finally:
        torch.set_flush_denormal(False)
        torch.set_num_threads(threads)
    for (q, scales), (q2, scales2), back in zip(before, after, backs, strict=True):
        assert same(q, q2)
        assert same(scales, scales2)
        assert same(back, ops.dequantize_pages(q, scales, (0,)))


@pytest.mark.parametrize("layers", [1, 128])
@pytest.mark.parametrize("kv_heads", [1, 64])
def test_layers_and_heads(layers, kv_heads):
    pages = numbers([layers, 2, 2, 3, kv_heads, 7], torch.bfloat16, layers)  # layer, page, K/V, token, head, element
    check(pages, (0, 1, 2, 4), FP8)
    check(pages.transpose(0, 1), (0, 4), INT8)


def test_large_pages_on_threads():
    check(numbers([300, 16, 8, 64], torch.bfloat16, 1), (0, 2), FP8)
    check(numbers([3, 40000], torch.float32, 1), (0,), INT8)


def test_out_of_any_strides():
    pages = numbers([4, 6, 3, 16], torch.float32, 2)
    pool = torch.zeros(4, 3, 2, 6, 16, dtype=INT8)
    q, scales = pool[:, :, 1].transpose(1, 2), torch.empty(4, 3)
    assert ops.quantize_pages(pages, (0, 2), out=(q, scales)) == (q, scales)
    expected, expected_scales = reference(pages, (0, 2), INT8)
    assert torch.equal(q, expected)
    assert torch.equal(scales, expected_scales)
    assert not pool[:, :, 0].any()
    wide = torch.zeros(4, 3, 6, 17, dtype=torch.float16)
    out = wide[..., :16].transpose(1, 2)
    assert ops.dequantize_pages(q, scales, (0, 2), out=out) is out
    assert same(out, (q.float() * scales[:, None, :, None]).half())
    assert not wide[..., 16].any()


@pytest.mark.parametrize("shape", [[0, 4, 8], [3, 0, 8], [3, 4, 0]])
def test_nothing_to_quantise(shape):
    q, scales = ops.quantize_pages(torch.ones(shape), (0, 1))
    assert q.shape == torch.Size(shape)
    assert scales.tolist() == torch.full(shape[:2], FLOOR).tolist()
    assert ops.dequantize_pages(q, scales, (0, 1), torch.float16).shape == torch.Size(shape)


def test_what_does_not_fit_is_named():
    pages = torch.ones(3, 4, 8)
    q, scales = ops.quantize_pages(pages, (0, 1))

    def refused(match: str, call, *args, **kwargs) -> None:
        with pytest.raises(ValueError, match=match):
            call(*args, **kwargs)

    quantize, back = ops.quantize_pages, ops.dequantize_pages
    refused("pages has to be float32, float16 or bfloat16", quantize, pages.double(), (0,))
    refused("dtype has to be float8_e4m3fn or int8", quantize, pages, (0,), torch.uint8)
    refused(r"scale_axes \[\] have to begin with 0", quantize, pages, ())
    refused(r"scale_axes \[1\] have to begin with 0", quantize, pages, (1,))
    refused(r"scale_axes \[0, 2, 1\] have to ascend", quantize, pages, (0, 2, 1))
    refused(r"scale_axes\[1\] is 3, not in \[0, 3\)", quantize, pages, (0, 3))
    refused(r"scale_axes\[0\] is -1", quantize, pages, (-1,))
    refused(r"q has shape \[3, 8, 4\], expected \[3, 4, 8\]", quantize, pages, (0, 1), out=(q.view(3, 8, 4), scales))
    refused(r"scales has shape \[3, 4\], expected \[3\]", quantize, pages, (0,), out=(q, scales))
    refused("scales has to be float32", quantize, pages, (0, 1), out=(q, scales.half()))
    refused("q has to be float8_e4m3fn or int8", quantize, pages, (0, 1), out=(q.view(torch.uint8), scales))
    refused("scales has to be contiguous", quantize, pages, (0, 1), out=(q, torch.ones(4, 3).t()))
    refused("q is written, but its elements overlap", quantize, pages, (0, 1), out=(q[:1, :1].expand(3, 4, 8), scales))
    refused("dtype has to be float32, float16 or bfloat16", back, q, scales, (0, 1), torch.int8)
    refused("q has to be float8_e4m3fn or int8", back, pages, scales, (0, 1))
    refused(r"out has shape \[3, 4, 7\]", back, q, scales, (0, 1), out=torch.ones(3, 4, 7))
    odd = torch.zeros([2] * 14)[..., ::1].permute(*range(0, 14, 2), *range(1, 14, 2))
    refused("dimensions that do not merge", quantize, odd, (0,))


OPCHECKS = {
    "quantize_pages.default": lambda: ((torch.rand(5, 3, 4), [0, 1], FP8), {}),
    "quantize_pages.out": lambda: (
        (torch.rand(5, 3, 4), [0, 1]),
        {"q": torch.zeros(5, 3, 4, dtype=INT8), "scales": torch.zeros(5, 3)},
    ),
    "dequantize_pages.default": lambda: (
        (torch.ones(5, 3, 4, dtype=INT8), torch.rand(5), [0], torch.bfloat16),
        {},
    ),
    "dequantize_pages.out": lambda: (
        (torch.ones(5, 3, 4, dtype=INT8), torch.rand(5, 3), [0, 1]),
        {"out": torch.zeros(5, 3, 4)},
    ),
}


@pytest.mark.parametrize("name", OPCHECKS)
def test_opcheck(name):
    packet, overload = name.split(".")
    args, kwargs = OPCHECKS[name]()
    torch.library.opcheck(getattr(getattr(torch.ops.torch_mooncake, packet), overload), args, kwargs)


def test_compiles_without_graph_break():
    def step(pages: torch.Tensor) -> torch.Tensor:
        q, scales = ops.quantize_pages(pages * 2, (0, 2))
        return ops.dequantize_pages(q, scales, (0, 2), torch.float16) + 1

    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager", dynamic=True)
    for n in (2, 3):
        pages = torch.rand(n, 4, 3, 8)
        assert torch.equal(compiled(pages), step(pages))
