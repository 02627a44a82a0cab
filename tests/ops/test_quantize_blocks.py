"""quantize_blocks: bit for bit against the definition in torch, whatever the shape, block and strides."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from twins import numbers

from torch_mooncake import ops

FP8, INT8 = torch.float8_e4m3fn, torch.int8
LARGEST = {FP8: 448.0, INT8: 127.0}


def reference(weight: torch.Tensor, block: tuple[int, int], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Block by block, in torch."""
    *batch, rows, columns = weight.shape
    row_step, column_step = (n if step == -1 else step for n, step in zip((rows, columns), block, strict=True))
    row_blocks, column_blocks = (
        1 if step == -1 else -(-n // step) for n, step in zip((rows, columns), block, strict=True)
    )
    q = torch.empty(weight.shape, dtype=dtype)
    scales = torch.empty(*batch, row_blocks, column_blocks)
    for i in range(row_blocks):
        for j in range(column_blocks):
            at = (..., slice(i * row_step, (i + 1) * row_step), slice(j * column_step, (j + 1) * column_step))
            x = weight[at].float()
            finite = torch.where(x.isfinite(), x.abs(), 0.0).flatten(-2)
            amax = finite.amax(-1) if finite.shape[-1] else finite.new_zeros(finite.shape[:-1])
            scale = (amax / LARGEST[dtype]).clamp(min=2.0**-100)
            y = x * (1.0 / scale)[..., None, None]
            if dtype == FP8:
                nan = torch.tensor(float("nan")).copysign(1.0 - 2.0 * weight[at].signbit().float())
                q[at] = torch.where(x.isnan(), nan, y.clamp(-448, 448)).to(FP8)
            else:
                q[at] = y.clamp(-127, 127).round().nan_to_num(0).to(INT8)
            scales[..., i, j] = scale
    return q, scales


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def check(weight: torch.Tensor, block: tuple[int, int], dtype: torch.dtype = FP8) -> None:
    q, scales = ops.quantize_blocks(weight, block, dtype)
    expected, expected_scales = reference(weight, block, dtype)
    assert q.is_contiguous()
    assert same(scales, expected_scales)
    assert same(q, expected)


@st.composite
def cases(draw: st.DrawFn):
    batch = draw(st.lists(st.integers(1, 3), max_size=2))
    rows, columns = draw(st.integers(1, 40)), draw(st.sampled_from([1, 5, 31, 32, 33, 64, 100]))
    block = (draw(st.sampled_from([1, 3, 16, -1])), draw(st.sampled_from([1, 7, 32, -1])))
    dtype = draw(st.sampled_from([torch.float32, torch.float16, torch.bfloat16]))
    weight = numbers([*batch, rows, columns], dtype, draw(st.integers(0, 999)))
    if draw(st.booleans()):
        weight = weight.transpose(-1, -2).contiguous().transpose(-1, -2)
    return weight, block, draw(st.sampled_from([FP8, INT8]))


@settings(max_examples=100, deadline=None)
@given(cases())
def test_is_the_definition(case):
    check(*case)


@pytest.mark.parametrize("shape", [[128, 128], [256, 512], [300, 200], [127, 129], [1, 7168], [2, 257, 130]])
@pytest.mark.parametrize("block", [(128, 128), (1, -1)])
def test_as_checkpoints_have_it(shape, block):
    weight = numbers(shape, torch.bfloat16, 3)
    check(weight, block)
    _, scales = ops.quantize_blocks(weight, block)
    rows = -(-shape[-2] // 128) if block[0] == 128 else shape[-2]
    assert list(scales.shape) == [*shape[:-2], rows, -(-shape[-1] // 128) if block[0] == 128 else 1]


def test_whole_blocks_are_pages():
    """The arithmetic is that of quantize_pages."""
    weight = numbers([256, 384], torch.float32, 1)
    q, scales = ops.quantize_pages(weight.unflatten(1, (3, 128)).unflatten(0, (2, 128)), (0, 2))
    got = ops.quantize_blocks(weight)
    assert same(got[0], q.view(256, 384))
    assert same(got[1], scales)


def test_dequantised_it_is_close():
    weight = torch.randn(200, 300)
    q, scales = ops.quantize_blocks(weight)
    spread = scales.repeat_interleave(128, 0)[:200].repeat_interleave(128, 1)[:, :300]
    assert bool(((q.float() * spread - weight).abs() <= torch.maximum(weight.abs() / 16, spread / 1024) * 1.001).all())


def test_zeros_and_what_is_not_finite():
    weight = torch.zeros(4, 4)
    weight[2, 2], weight[2, 3], weight[3, 3] = float("inf"), float("nan"), 7.0
    q, scales = ops.quantize_blocks(weight, (2, 2))
    assert scales.flatten().tolist() == torch.tensor([2.0**-100, 2.0**-100, 2.0**-100, 7 / 448]).tolist()
    assert q.float()[:2].eq(0).all()
    assert q.float()[2:, 2:].nan_to_num(-1).tolist() == [[448.0, -1.0], [0.0, 448.0]]


@pytest.mark.parametrize("shape", [[0, 4], [4, 0], [0, 0], [0, 3, 4], [2, 0, 4]])
def test_nothing_to_quantise(shape):
    for block in ((2, 2), (1, -1), (-1, -1)):
        q, scales = ops.quantize_blocks(torch.ones(shape), block)
        assert q.shape == torch.Size(shape)
        expected = [1 if step == -1 else -(-n // step) for n, step in zip(shape[-2:], block, strict=True)]
        assert list(scales.shape) == [*shape[:-2], *expected]
        assert scales.eq(2.0**-100).all()


def test_out_of_any_strides():
    weight = numbers([130, 70], torch.bfloat16, 2)
    wide, scales = torch.zeros(130, 80, dtype=FP8), torch.empty(3, 2)
    q = wide[:, 5:75]
    assert ops.quantize_blocks(weight, (64, 64), out=(q, scales)) == (q, scales)
    expected = reference(weight, (64, 64), FP8)
    assert same(q, expected[0])
    assert same(scales, expected[1])
    assert wide[:, :5].float().eq(0).all()
    assert wide[:, 75:].float().eq(0).all()


def test_what_does_not_fit_is_named():
    weight = torch.ones(4, 6)
    q, scales = ops.quantize_blocks(weight, (2, 2))

    def refused(match: str, *args, **kwargs) -> None:
        with pytest.raises(ValueError, match=match):
            ops.quantize_blocks(*args, **kwargs)

    refused("weight has 0 dimensions", torch.tensor(1.0))
    refused("weight has 1 dimensions", torch.ones(3))
    refused("weight has to be float32, float16 or bfloat16", weight.double())
    refused("dtype has to be float8_e4m3fn or int8", weight, (2, 2), torch.float8_e5m2)
    refused("block_rows is 0, not 1 or more, or -1", weight, (0, 2))
    refused("block_cols is -2", weight, (1, -2))
    refused(r"scales has shape \[2, 3\], expected \[4, 1\]", weight, (1, -1), out=(q, scales))
    refused(r"q has shape \[4, 5\], expected \[4, 6\]", weight, (2, 2), out=(q[:, :5], scales))
    refused("scales has to be float32", weight, (2, 2), out=(q, scales.half()))
    refused("scales has to be contiguous", weight, (2, 2), out=(q, torch.ones(3, 2).t()))
    refused("q is written, but its elements overlap", weight, (2, 2), out=(q[:1, :1].expand(4, 6), scales))
    odd = torch.ones(2, 2, 2, 2, 2).permute(2, 1, 0, 3, 4)
    refused("dimensions that do not merge", odd, (1, 1))


@pytest.mark.parametrize("overload", ["default", "out"])
def test_opcheck(overload):
    weight = torch.rand(5, 7)
    packet = torch.ops.torch_mooncake.quantize_blocks
    if overload == "default":
        torch.library.opcheck(packet.default, (weight, 2, -1, FP8))
    else:
        kwargs = {"q": torch.zeros(5, 7, dtype=INT8), "scales": torch.zeros(3, 4)}
        torch.library.opcheck(packet.out, (weight, 2, 2), kwargs)


def test_compiles_without_graph_break():
    def step(weight: torch.Tensor) -> torch.Tensor:
        q, scales = ops.quantize_blocks(weight * 2, (4, 4))
        return q.float() + scales.sum()

    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager", dynamic=True)
    for n in (6, 11):
        weight = torch.rand(n, 9)
        assert torch.equal(compiled(weight), step(weight))
