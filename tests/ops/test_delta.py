"""delta_encode and delta_apply: exact by bits for every dtype, small, and safe from any bytes."""

from __future__ import annotations

import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from twins import noise

from torch_mooncake import ops

DTYPES = [torch.bool, torch.float8_e4m3fn, torch.bfloat16, torch.float16, torch.int32, torch.float32, torch.float64,
          torch.complex64]  # fmt: skip


def bits(t: torch.Tensor) -> torch.Tensor:
    return t.contiguous().reshape(-1).view(torch.uint8)


def arrays(
    dtype: torch.dtype, shape: list[int], share: float, length: int, seed: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Random bits, and the same with a share of the elements changed, in stretches of `length`."""
    generator = torch.Generator().manual_seed(seed)
    base, other = noise(shape, torch.uint8 if dtype == torch.bool else dtype, seed), None
    if dtype == torch.bool:
        base = base > 127
    other = noise(shape, torch.uint8 if dtype == torch.bool else dtype, seed + 1)
    other = other > 127 if dtype == torch.bool else other
    numel = base.numel()
    chosen = (torch.rand(-(-numel // length), generator=generator) < share).repeat_interleave(length)[:numel]
    size = base.element_size()
    fresh = torch.where(chosen.repeat_interleave(size), bits(other), bits(base)).view(dtype).reshape(shape)
    return base, fresh


@settings(max_examples=80, deadline=None)
@given(
    st.sampled_from(DTYPES),
    st.lists(st.sampled_from([1, 2, 7, 33, 100]), max_size=3),
    st.sampled_from([0.0, 0.01, 0.1, 0.9, 1.0]),
    st.sampled_from([1, 3, 5, 40]),
    st.integers(0, 999),
)
def test_what_is_encoded_comes_back(dtype, shape, share, length, seed):
    base, fresh = arrays(dtype, shape, share, length, seed)
    blob = ops.delta_encode(base, fresh)
    assert blob is not None
    target = base.clone()
    ops.delta_apply(blob, target)
    assert torch.equal(bits(target), bits(fresh))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    assert torch.equal(ops.delta_encode(base, fresh), blob)
    torch.set_num_threads(threads)


def test_bits_count_not_values():
    base = torch.tensor([0.0, float("nan"), 1.0, -1.0])
    fresh = torch.tensor([-0.0, -float("nan"), 1.0, -1.0])
    blob = ops.delta_encode(base, fresh)
    target = base.clone()
    ops.delta_apply(blob, target)
    assert torch.equal(bits(target), bits(fresh))
    assert struct.unpack_from("<8sQQQQII", bytes(blob))[3] == 2
    assert ops.delta_encode(base, base.clone()).numel() == 48 + 8


def test_two_per_cent_of_bfloat16():
    base, fresh = arrays(torch.bfloat16, [1 << 20], 0.02, 1, 3)
    spread = ops.delta_encode(base, fresh).numel() / base.nbytes
    together = ops.delta_encode(*arrays(torch.bfloat16, [1 << 20], 0.02, 50, 3)).numel() / base.nbytes
    assert 0.028 < spread <= 0.035
    assert together < 0.75 * spread


def test_a_limit():
    base, fresh = arrays(torch.float32, [10_000], 0.1, 1, 4)
    blob = ops.delta_encode(base, fresh)
    assert torch.equal(ops.delta_encode(base, fresh, limit=blob.numel()), blob)
    assert ops.delta_encode(base, fresh, limit=blob.numel() - 1) is None
    assert ops.delta_encode(base, fresh, limit=0) is None


@pytest.mark.parametrize("shape", [[], [0], [3, 0], [1]])
def test_small_ones(shape):
    base, fresh = torch.zeros(shape), torch.ones(shape)
    target = base.clone()
    ops.delta_apply(ops.delta_encode(base, fresh), target)
    assert torch.equal(target, fresh)


def test_ranges():
    """Rows of a matrix's middle columns, into a dense matrix and back into another place of the same width."""
    base, fresh = arrays(torch.bfloat16, [9, 700], 0.1, 3, 5)
    offsets = torch.arange(9) * 1400 + 200
    nbytes = torch.full((9,), 1000)
    blob = ops.delta_encode_ranges(bits(base), bits(fresh), offsets, nbytes, 2)
    dense = base[:, 100:600].contiguous()
    assert torch.equal(blob, ops.delta_encode(dense, fresh[:, 100:600].contiguous()))
    ops.delta_apply(blob, dense)
    assert torch.equal(bits(dense), bits(fresh[:, 100:600]))
    there = base.clone()
    ops.delta_apply_ranges(blob, there.view(-1).view(torch.uint8), offsets, nbytes)
    assert torch.equal(bits(there[:, 100:600]), bits(fresh[:, 100:600]))
    assert torch.equal(bits(there[:, :100]), bits(base[:, :100]))
    copied = torch.zeros_like(bits(base))
    ops.delta_apply_ranges(blob, copied, offsets, nbytes, base=bits(base))
    assert torch.equal(copied.view(9, -1)[:, 200:1200], bits(fresh).view(9, -1)[:, 200:1200])
    assert not copied.view(9, -1)[:, :200].any()
    with pytest.raises(ValueError, match="target and base share memory"):
        ops.delta_apply_ranges(blob, copied, offsets, nbytes, base=copied)
    turned = base[:, 100:600].flip(0).contiguous()
    ops.delta_apply_ranges(blob, turned.view(-1).view(torch.uint8), torch.arange(8, -1, -1) * 1000, nbytes)
    assert torch.equal(bits(turned), bits(fresh[:, 100:600].flip(0)))


def test_damage_is_noticed_and_nothing_written():
    base, fresh = arrays(torch.bfloat16, [6000], 0.05, 1, 6)
    blob = ops.delta_encode(base, fresh)
    generator = torch.Generator().manual_seed(0)
    for at in torch.randint(0, blob.numel(), (200,), generator=generator).tolist():
        bad, target = blob.clone(), base.clone()
        bad[at] ^= 1 << (at % 8)
        with pytest.raises(ValueError, match="the delta is malformed"):
            ops.delta_apply(bad, target)
        assert torch.equal(bits(target), bits(base))
    for n in (0, 47, 48, 100, blob.numel() - 1):
        with pytest.raises(ValueError, match="the delta is malformed"):
            ops.delta_apply(blob[:n].clone(), base.clone())


def test_what_does_not_fit_is_named():
    base, blob = torch.zeros(8), ops.delta_encode(torch.zeros(8), torch.ones(8))
    flat, offsets = torch.zeros(32, dtype=torch.uint8), torch.tensor([0])

    def refused(match: str, call, *args, error: type[Exception] = ValueError) -> None:
        with pytest.raises(error, match=match):
            call(*args)

    refused("fresh and base differ in dtype", ops.delta_encode, base, base.int())
    refused(r"fresh has shape \[7\], expected \[8\]", ops.delta_encode, base, base[:7])
    refused("base has to be contiguous", ops.delta_encode, torch.zeros(4, 2).t(), torch.zeros(4, 2).t())
    refused("base has elements of 16 bytes", ops.delta_encode, base.cdouble(), base.cdouble())
    refused("the delta is of 8 elements of 4 bytes, target has 8 of 2", ops.delta_apply, blob, base.half())
    refused("target has 7 of 4", ops.delta_apply, blob, base[:7])
    refused("target has to be contiguous", ops.delta_apply, blob, torch.zeros(4, 2).t())
    refused("blob has to be uint8 of one dimension", ops.delta_apply, base, base)
    refused("target and blob share memory", ops.delta_apply, blob, blob[: 8 * 4].view(torch.float32))
    refused("element", ops.delta_encode_ranges, flat, flat, offsets, torch.tensor([32]), 3)
    refused("whole elements of 4", ops.delta_encode_ranges, flat, flat, offsets, torch.tensor([30]), 4)
    refused("offsets has to be int64", ops.delta_encode_ranges, flat, flat, offsets.int(), torch.tensor([32]), 4)
    for at, n in ((0, 33), (-1, 4), (33, 0), (8, -4), (4, 2**63 - 1)):
        refused(
            "range 0 is", ops.delta_apply_ranges, blob, flat, torch.tensor([at]), torch.tensor([n]), error=IndexError
        )
    refused("the target has 4", ops.delta_apply_ranges, blob, flat, offsets, torch.tensor([16]))


OPCHECKS = {
    "delta_encode": lambda: (torch.zeros(9), torch.ones(9), -1),
    "delta_apply": lambda: (ops.delta_encode(torch.zeros(9), torch.ones(9)), torch.zeros(9)),
    "delta_table": lambda: (ops.delta_encode(torch.zeros(9), torch.ones(9)),),
    "delta_encode_ranges": lambda: (
        torch.zeros(8, dtype=torch.uint8), torch.ones(8, dtype=torch.uint8), torch.tensor([0]), torch.tensor([8]), 2, -1
    ),
    "delta_apply_ranges": lambda: (
        ops.delta_encode(torch.zeros(2), torch.ones(2)), torch.zeros(8, dtype=torch.uint8), torch.tensor([0]),
        torch.tensor([8]), torch.ones(8, dtype=torch.uint8)
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", OPCHECKS)
def test_opcheck(name):
    torch.library.opcheck(getattr(torch.ops.torch_mooncake, name).default, OPCHECKS[name]())
