"""What goes into the pool comes out of it: encoding alone, without a node."""

from __future__ import annotations

import ctypes
import math
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import torch_mooncake as tm
from torch_mooncake import _core, tensors
from torch_mooncake.clock import deadline_ns
from torch_mooncake.errors import Corrupt
from torch_mooncake.tensors import DTYPES, Decoded, encode, leaf_over

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*ComplexHalf"),
    pytest.mark.filterwarnings("ignore:.*sparse|.*nested tensors|.*quantiz.*"),
]


def stored(value: Any) -> tuple[bytes, bytearray]:
    """(description, bytes) as the pool would keep them."""
    encoded = encode(value)
    data = bytearray()
    for piece in encoded.data:
        data += ctypes.string_at(*piece) if isinstance(piece, tuple) else bytes(piece)
    assert len(data) == encoded.nbytes
    return encoded.meta, data


def load(meta: bytes, data: bytearray) -> Any:
    decoded = Decoded(meta, len(data), lambda offset, nbytes: bytes(data[offset : offset + nbytes]))
    return decoded.build(lambda leaf: leaf_over(data, leaf))


def round_trip(value: Any) -> Any:
    return load(*stored(value))


def raw(tensor: torch.Tensor) -> bytes:
    """The bytes of a tensor's elements in order, whatever its strides and dtype."""
    if tensor.numel() == 0:
        return b""
    width = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}.get(tensor.element_size())
    dense = tensor.resolve_conj().resolve_neg()
    dense = (dense.view(width) if width else dense).clone(memory_format=torch.contiguous_format)
    return bytes(dense.reshape(-1).view(torch.uint8).tolist())


def random_tensor(dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    if dtype == "bool":
        return torch.randint(0, 2, shape).bool()
    data = torch.randint(0, 256, (math.prod(shape) * DTYPES[dtype],), dtype=torch.uint8)
    return (
        data.view(getattr(torch, dtype)).view(shape)
        if data.numel()
        else torch.empty(shape, dtype=getattr(torch, dtype))
    )


@pytest.mark.parametrize("dtype", sorted(DTYPES))
@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1,), (5, 7), (2, 3, 4, 5)])
@pytest.mark.parametrize("layout", ["contiguous", "transposed", "strided", "expanded", "offset"])
def test_every_dtype_shape_and_layout(dtype: str, shape: tuple[int, ...], layout: str) -> None:
    tensor = random_tensor(dtype, shape)
    if layout == "transposed":
        tensor = tensor.permute(tuple(reversed(range(tensor.dim()))))
    elif layout == "strided" and tensor.dim():
        tensor = tensor[..., ::2]
    elif layout == "expanded":
        tensor = tensor.unsqueeze(0).expand(3, *tensor.shape)
    elif layout == "offset" and tensor.dim():
        tensor = tensor[1:]
    back = round_trip(tensor)
    assert back.dtype is tensor.dtype
    assert back.shape == tensor.shape
    assert back.is_contiguous()
    assert raw(back) == raw(tensor)


@pytest.mark.parametrize("dtype", [torch.complex32, torch.complex64, torch.complex128])
def test_conjugate_and_negative_views_are_resolved(dtype: torch.dtype) -> None:
    tensor = torch.randn(4, 6, dtype=torch.complex128).to(dtype)
    for view in (tensor.conj(), tensor.conj().imag, tensor.mH, tensor.conj()[::2]):
        back = round_trip(view)
        assert not back.is_conj()
        assert not back.is_neg()
        want = view.resolve_conj().resolve_neg()
        assert back.dtype is want.dtype
        assert raw(back) == raw(want)


def test_gradients_stay_behind() -> None:
    leaf = torch.nn.Parameter(torch.randn(3))
    back = round_trip({"leaf": leaf, "graph": leaf * 2})
    assert type(back["leaf"]) is torch.Tensor
    assert not back["leaf"].requires_grad
    assert torch.equal(back["graph"], leaf.detach() * 2)


def test_tensors_lie_at_multiples_of_64_bytes_and_of_a_page_from_64_KiB() -> None:
    value = {"a": torch.zeros(1, dtype=torch.uint8), "b": torch.zeros(3), "c": torch.zeros(1 << 16, dtype=torch.uint8)}
    meta, data = stored(value)
    offsets = [leaf.offset for leaf in Decoded(meta, len(data), lambda o, n: b"").leaves()]
    assert offsets == [0, 64, 4096]


scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=300)
arrays = st.sampled_from(["<f4", "<i8", ">u2", "|b1", "<c8", "<M8[ns]", "<U3", "|S4"]).map(
    lambda d: np.zeros((2, 3), d)
)
tensors_ = st.builds(
    random_tensor, st.sampled_from(["float32", "bfloat16", "int64", "bool"]), st.sampled_from([(), (0,), (3,), (2, 5)])
)
nested = st.recursive(
    scalars | st.binary(max_size=300) | arrays | tensors_,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(max_size=8) | st.integers(-5, 5), inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
    ),
    max_leaves=12,
)


def same(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return a.dtype is b.dtype and a.shape == b.shape and raw(a) == raw(b)
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)


@given(nested)
@settings(max_examples=300, deadline=None)
def test_nested_values(value: Any) -> None:
    assert same(round_trip(value), value)


def test_bytes_like_objects_come_back_as_bytes() -> None:
    big = bytes(range(256)) * 1000
    for value in (b"", b"abc", bytearray(b"abc"), memoryview(b"abc"), memoryview(big)[::2], memoryview(np.arange(6.0))):
        assert round_trip(value) == bytes(value if not isinstance(value, memoryview) else value.tobytes())
    assert math.isnan(round_trip(float("nan")))


def test_state_dicts_of_models_and_optimizers() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(3, 4)).sum().backward()
    optimizer.step()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 3}
    back = round_trip(state)
    torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8)).load_state_dict(back["model"])
    optimizer.load_state_dict(back["optimizer"])
    assert all(torch.equal(back["model"][name], tensor) for name, tensor in model.state_dict().items())


def test_a_description_of_any_length_fits() -> None:
    value = {f"layers.{i}.weight": torch.full((1,), float(i)) for i in range(30_000)}
    meta, data = stored(value)
    assert len(meta) < 100
    back = load(meta, data)
    assert list(back) == list(value)
    assert back["layers.29999.weight"].item() == 29999.0


class Subclass(torch.Tensor):
    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: torch.eye(3).to_sparse(), "sparse tensor"),
        (lambda: torch.eye(3).to_sparse_csr(), "sparse tensor"),
        (lambda: torch.quantize_per_tensor(torch.ones(2), 1.0, 0, torch.qint8), "quantised"),
        (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "nested"),
        (
            lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
            "which cannot be put",
        ),
        (lambda: torch.empty(2, device="meta"), "meta tensor"),
        (lambda: torch.Tensor._make_subclass(Subclass, torch.ones(2)), "subclass, Subclass"),
        (object, "builtins.object"),
        (lambda: {1, 2}, "builtins.set"),
        (lambda: np.float64(1.0), r"use \.item\(\)"),
        (lambda: np.array([object()]), "numpy array of dtype object"),
        (lambda: {(1, 2): 3}, "key of type tuple"),
        (lambda: "\ud800", "not valid Unicode"),
        (lambda: msgspec.json.Decoder, "which cannot be put"),
    ],
)
def test_what_cannot_be_put_is_a_TypeError_that_says_where(make: Any, says: str) -> None:
    with pytest.raises(TypeError, match=rf"the value at \['a'\]\[1\]\['b'\].*{says}"):
        encode({"a": [0, {"b": make()}]})


def test_an_array_of_elements_without_bytes_cannot_be_put() -> None:
    with pytest.raises(TypeError, match="dtype"):
        encode(np.zeros(3, [("a", "S0")])["a"])


def test_nesting_is_bounded() -> None:
    deepest: Any = 1
    for _ in range(64):
        deepest = [deepest]
    assert round_trip(deepest) == deepest
    value: Any = 1
    for _ in range(100):
        value = [value]
    with pytest.raises(TypeError, match="nested deeper than 64"):
        encode(value)


# --- hostile descriptions ---


def document(*root: Any) -> bytes:
    return b"TMv\x00" + msgspec.msgpack.encode([1, list(root)])


@pytest.mark.parametrize(
    "meta",
    [
        b"garbage",
        b"TMv\x00",
        b"TMv\x00\xff\xff",
        b"TMv\x02" + bytes(16),
        b"TMv\x01" + (1 << 60).to_bytes(8, "little") + (8).to_bytes(8, "little"),
        b"TMv\x01" + bytes(5),
        b"TMv\x00" + msgspec.msgpack.encode([2, [0, 1]]),
        document(99, 1),
        document(4, "float32", [2], 96),  # 8 bytes at 96 of 100
        document(4, "float32", [1 << 40, 1 << 40], 0),
        document(4, "float32", [-1], 0),
        document(4, "float32", [2], -8),
        document(4, "int3", [2], 0),
        document(4, "__class__", [2], 0),
        document(4, "float32", [1] * 65, 0),
        document(5, "|O8", [1], 0),
        document(5, "<f999", [1], 0),
        document(5, "f4,(1000000000,)f4", [0], 0),
        document(4, "float32", [0, 1 << 63], 0),
        document(4, "float32", [0, 1 << 62, 1 << 62], 0),
        document(5, "<f4", [0, 1 << 63], 0),
        document(5, "|S0", [1 << 60], 0),
        document(5, "<U0", [2], 0),
        document(5, "<U99999999999999999999", [0], 0),
        document(6, [[4, "float32", [2], 0], [4, "float32", [2], 4]]),  # overlap
        document(6, [[2, 0, 100], [2, 0, 100]]),
        document(9, "float32", [4], "", [[0, [[[0, 2]]]], [4, [[[2, 2]]]]]),
        document(9, "float32", [4], "", [[0, [[[2, 3]]]]]),  # beyond the tensor
        document(9, "float32", [4], "", [[0, [[[2, 1], [1, 1]]]]]),
        document(9, "float32", [4], "", [[0, []]]),
        document(9, "float32", [-4], "", []),
        document(2, 0, 101),
        document(2, 50, -1),
        document(3, 0, 1 << 62),
        document(1, "not hex"),
        document(8, [[[1], [0, 1]]]),
        b"TMv\x00" + msgspec.msgpack.encode([1, [6, [[6, [[0]]]]]]),
        b"TMv\x00\x92\x01" + b"\x92\x06\x91" * 66 + b"\x92\x00\xc0",
        b"TMv\x00\x92\x01" + b"\x92\x06\x91" * 300 + b"\x92\x00\xc0",
        b"TMv\x00\x92\x01" + b"\x92\x06\x91" * 5000 + b"\x92\x00\xc0",
    ],
)  # fmt: skip
def test_a_malformed_description_is_corrupt(meta: bytes) -> None:
    data = bytearray(100)
    with pytest.raises(Corrupt):
        load(meta, data)


@given(st.binary(max_size=64), st.integers(0, 80), st.integers(0, 255))
@settings(max_examples=500, deadline=None)
def test_a_damaged_description_never_reads_outside(tail: bytes, where: int, byte: int) -> None:
    meta, data = stored({"a": torch.arange(5), "b": [b"xyz", "q" * 400], "c": np.arange(3)})
    damaged = bytearray(meta)
    damaged[where % len(damaged)] = byte
    for candidate in (bytes(damaged), meta[:where], b"TMv\x00" + tail):
        try:
            load(candidate, data)
        except Corrupt:
            pass


HUGE = 1 << 44
HOSTILE_BLOCKS = {
    "none of a huge tensor": ([HUGE], []),
    "one of a huge tensor": ([HUGE], [[0, [[[0, 4]]]]]),
    "a hole": ([8], [[0, [[[0, 2], [3, 2]]]]]),
    "the same elements twice": ([4], [[0, [[[0, 2]]]], [8, [[[0, 2]]]]]),
    "an overlap": ([4], [[0, [[[0, 2]]]], [8, [[[1, 2]]]]]),
    "an overlap that makes up for a hole": ([2, 2], [[0, [[[0, 2]], [[0, 1]]]], [8, [[[0, 1]], [[0, 2]]]]]),
    "of a scalar, two": ([], [[0, []], [8, []]]),
}


@pytest.mark.parametrize(("shape", "blocks"), HOSTILE_BLOCKS.values(), ids=HOSTILE_BLOCKS)
def test_blocks_that_do_not_make_a_tensor_are_corrupt(pool: tm.Pool, shape: list[int], blocks: list[Any]) -> None:
    meta = document(9, "float32", shape, "", blocks)
    pool._client(deadline_ns(30)).put("k", meta, [bytes(100)], _core.PutOptions(), deadline_ns(30))
    for ask in (pool.get, pool.info, pool.get_state_dict):
        with pytest.raises(Corrupt):
            ask("k")
    good = document(9, "float32", [2, 2], "", [[0, [[[0, 2]], [[0, 1]]]], [8, [[[0, 2]], [[1, 1]]]]])
    pool._client(deadline_ns(30)).put("k", good, [bytes(100)], _core.PutOptions(), deadline_ns(30))
    assert pool.get("k").eq(torch.zeros(2, 2)).all()


def test_an_empty_description_is_plain_bytes() -> None:
    assert load(b"", bytearray(b"raw")) == b"raw"


def test_the_table_of_dtypes_is_right() -> None:
    assert {name: getattr(torch, name).itemsize for name in tensors.DTYPES} == tensors.DTYPES


@pytest.mark.parametrize("dtype", DTYPES)
def test_plain_is_what_encode_says_of_dense_tensors(dtype: str) -> None:
    for shape in [(7,), (2, 3, 4), (), (1, 5), (4096,)]:
        tensor = random_tensor(dtype, shape)
        known = tensors.plain(tensor)
        if tensor.is_complex():
            assert known is None  # may be conjugated lazily
            continue
        assert known is not None
        meta, (address, nbytes) = known
        assert (meta, ctypes.string_at(address, nbytes)) == (stored(tensor)[0], bytes(stored(tensor)[1]))
        inner = torch.cat([tensor.reshape(-1).view(torch.uint8)] * 2)[tensor.nbytes :].view(tensor.dtype).view(shape)
        known = tensors.plain(inner)  # a view with an offset
        assert known is not None
        assert ctypes.string_at(*known[1]) == raw(tensor)


def test_plain_is_nothing_else() -> None:
    for value in [
        torch.randn(4, 5).t(),
        torch.randn(8)[::2],
        torch.ones(1).expand(4),
        torch._neg_view(torch.randn(3)),
        torch.empty(0),
        torch.empty(3, 0),
        torch._efficientzerotensor(3),
        torch.eye(3).to_sparse(),
        torch.zeros(3, device="meta"),
        torch.nested.nested_tensor([torch.randn(2), torch.randn(3)]),
        torch.quantize_per_tensor(torch.randn(3), 1.0, 0, torch.qint8),
        type("Mine", (torch.Tensor,), {})([1.0]),
        *(None, True, 5, 1.5, "text", bytearray(b"x"), np.ones(3), [b"x"], {"a": b"x"}),
    ]:
        assert tensors.plain(value) is None, value
        assert tensors.plain_batch([b"x", value]) is None, value
    assert tensors.plain(torch.nn.Parameter(torch.ones(3))) is not None


def test_plain_bytes_are_put_and_never_written() -> None:
    for value in (b"", b"x", bytes(range(256)) * 20):
        known = tensors.plain(value)
        assert known is not None
        assert (known[0], ctypes.string_at(*known[1])) == (stored(value)[0], value)
    assert tensors.plain_batch([torch.ones(3), b"x"]) is not None
    assert tensors.plain_batch([torch.ones(3), b"x"], writable=True) is None
    assert tensors.plain_batch([torch.ones(3)], writable=True) is not None
