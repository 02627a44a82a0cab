"""Safetensors files in and out, beside the reference implementation; hostile headers."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import torch_mooncake as tm
from torch_mooncake._core import MAX_KEY_BYTES
from torch_mooncake.safetensors_io import _TORCH_DTYPE, parse_header


def tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    some = {
        f"of.{name}": (torch.randn(3, 5) * 3).to(getattr(torch, name))
        for name in _TORCH_DTYPE.values()
        if name != "float8_e8m0fnu"
    }
    big = {"layers.0.weight": torch.randn(300, 1000), "layers.0.bias": torch.randn(7, dtype=torch.bfloat16)}
    return some | big | {"empty": torch.empty(0, 4), "scalar": torch.tensor(2.5), "π": torch.ones(1)}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(
        a[k].dtype is b[k].dtype
        and a[k].shape == b[k].shape
        and bytes(a[k].reshape(-1).view(torch.uint8).tolist()) == bytes(b[k].reshape(-1).view(torch.uint8).tolist())
        for k in a
    )


def test_a_file_of_the_reference_comes_in_and_goes_out(pool: tm.Pool, tmp_path: Path) -> None:
    value = tensors()
    save_file(value, tmp_path / "in.safetensors", metadata={"format": "pt", "note": "π"})
    keys = tm.import_safetensors(tmp_path / "in.safetensors", "model/", version="v1")
    assert sorted(keys) == sorted(f"model/{name}" for name in value)
    os.unlink(tmp_path / "in.safetensors")
    assert same({name: tm.get(f"model/{name}") for name in value}, value)
    assert tm.info("model/scalar").label == "v1"
    weight = tm.get("model/layers.0.weight")
    weight.zero_()  # the caller's own

    nbytes = tm.export_safetensors("model/", tmp_path / "out.safetensors")
    assert nbytes == (tmp_path / "out.safetensors").stat().st_size
    assert same(load_file(tmp_path / "out.safetensors"), value)
    with safe_open(tmp_path / "out.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt", "note": "π"}
    again = tm.import_safetensors(tmp_path / "out.safetensors", "again/")
    assert len(again) == len(value)
    some = ["model/scalar", "model/empty", "model/scalar"]  # once each
    tm.export_safetensors("model/", tmp_path / "some.safetensors", keys=some)
    assert sorted(load_file(tmp_path / "some.safetensors")) == ["empty", "scalar"]
    assert sorted(os.listdir(tmp_path)) == ["out.safetensors", "some.safetensors"]


def test_what_cannot_be_exported_makes_no_file(pool: tm.Pool, tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(b"before")
    with pytest.raises(tm.KeyNotFound, match="no tensor"):
        tm.export_safetensors("none/", path)
    tm.put("a/t", torch.ones(3))
    tm.put("a/d", {"t": torch.ones(3)})
    with pytest.raises(tm.LayoutMismatch, match="a/d"):
        tm.export_safetensors("a/", path)
    with pytest.raises(tm.KeyNotFound):
        tm.export_safetensors("a/", path, keys=["a/t", "a/none"])
    tm.put("b/c", torch.ones(3, dtype=torch.complex128))
    with pytest.raises(tm.Unsupported, match="complex128"):
        tm.export_safetensors("b/", path)
    with pytest.raises(tm.IoError, match="No such file"):
        tm.export_safetensors("a/t", tmp_path / "none" / "x")
    with pytest.raises(tm.DeadlineExceeded):
        tm.export_safetensors("a/", path, keys=["a/t"], timeout=0)
    assert path.read_bytes() == b"before"
    assert os.listdir(tmp_path) == ["x.safetensors"]


def file_of(header: Any, data: bytes = b"", size: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if size is None else size).to_bytes(8, "little") + text + data


def entry(dtype: Any = "F32", shape: Any = (2,), offsets: Any = (0, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


HOSTILE = {
    "nothing": b"",
    "seven bytes": b"\x01" * 7,
    "no header": file_of(b"", size=0)[:8],
    "longer than the file": file_of({}, size=1 << 40),
    "longest": b"\xff" * 8 + b"{}",
    "not json": file_of(b"{'a'"),
    "not utf-8": file_of(b'{"\xff":1}'),
    "a list": file_of([]),
    "deep": file_of(b"[" * 100_000),
    "nan": file_of(b'{"a":NaN}'),
    "twice": file_of(b'{"a":%s,"a":%s}' % (json.dumps(entry()).encode(), json.dumps(entry()).encode()), bytes(8)),
    "metadata": file_of({"__metadata__": {"a": 1}}),
    "a field missing": file_of({"a": {"dtype": "F32", "shape": [2]}}, bytes(8)),
    "a field too many": file_of({"a": {**entry(), "x": 1}}, bytes(8)),
    "dtype of a number": file_of({"a": entry(dtype=3)}, bytes(8)),
    "negative shape": file_of({"a": entry(shape=(-2,))}, bytes(8)),
    "fractional shape": file_of({"a": entry(shape=(2.0,))}, bytes(8)),
    "boolean shape": file_of({"a": entry(shape=(True,), offsets=(0, 4))}, bytes(4)),
    "huge shape": file_of({"a": entry(shape=(1 << 62, 1 << 62))}, bytes(8)),
    "many dimensions": file_of({"a": entry(shape=[1] * 65, offsets=(0, 4))}, bytes(4)),
    "three offsets": file_of({"a": entry(offsets=(0, 8, 8))}, bytes(8)),
    "backwards": file_of({"a": entry(offsets=(8, 0))}, bytes(8)),
    "wrong size": file_of({"a": entry(offsets=(0, 12))}, bytes(12)),
    "overlap": file_of({"a": entry(), "b": entry(offsets=(4, 12))}, bytes(12)),
    "the same bytes": file_of({"a": entry(), "b": entry()}, bytes(8)),
    "gap": file_of({"a": entry(), "b": entry(offsets=(12, 20))}, bytes(20)),
    "does not begin at 0": file_of({"a": entry(offsets=(4, 12))}, bytes(12)),
    "half a surrogate pair": file_of(b'{"a":%s,"\\ud800":%s}' % (
        json.dumps(entry()).encode(), json.dumps(entry(offsets=(8, 16))).encode()), bytes(16)),
    "metadata with half a surrogate pair": file_of(b'{"__metadata__":{"k":"\\udc00"},"a":%s}' % (
        json.dumps(entry()).encode()), bytes(8)),
    "truncated": file_of({"a": entry()}, bytes(7)),
    "longer": file_of({"a": entry()}, bytes(9)),
}  # fmt: skip


def test_a_malformed_file_is_corrupt_and_puts_nothing(pool: tm.Pool, tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    accepted = []
    for name, content in HOSTILE.items():
        path.write_bytes(content)
        try:
            tm.import_safetensors(path, "x/")
            accepted.append(name)
        except tm.Corrupt as error:
            assert "x.safetensors" in str(error)  # noqa: PT017
    assert accepted == []
    assert tm.keys() == []


def test_names_that_make_no_key_are_found_before_the_first_put(pool: tm.Pool, tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    for prefix, name in (("", ""), ("x/", "n" * 5000), ("\ud800", "b"), ("p" * (MAX_KEY_BYTES - 3), "four")):
        path.write_bytes(file_of({"a": entry(), name: entry(offsets=(8, 16))}, bytes(16)))
        with pytest.raises(tm.InvalidArgument, match="key"):
            tm.import_safetensors(path, prefix)
    assert tm.keys() == []
    with pytest.raises(tm.InvalidArgument, match="Unicode"):
        tm.put("\udfff", 1)


def test_errors_of_the_pool_are_not_the_files(pool: tm.Pool, tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(file_of({"a": entry()}, bytes(8)))
    with pytest.raises(tm.KeyNotFound) as raised:
        tm.import_safetensors(path, parent="x")
    assert "x.safetensors" not in str(raised.value)


def test_unknown_dtypes_and_files_that_are_not_there(pool: tm.Pool, tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    for dtype in ("F4", "F128", "float32", ""):
        path.write_bytes(file_of({"a": entry(), "b": entry(dtype=dtype, offsets=(8, 16))}, bytes(16)))
        with pytest.raises(tm.Unsupported, match="dtype"):
            tm.import_safetensors(path, "x/")
    with pytest.raises(tm.IoError, match="No such file"):
        tm.import_safetensors(tmp_path / "none")
    assert tm.keys() == []


@given(st.integers(0, 200), st.integers(0, 255), st.integers(0, 40))
@settings(max_examples=200, deadline=None)
def test_a_damaged_header_never_describes_bytes_outside(where: int, byte: int, cut: int) -> None:
    good = file_of({"a": entry(), "b": entry("I64", (3, 1), (8, 32)), "__metadata__": {"k": "v"}}, bytes(32))
    bad = bytearray(good)
    bad[where % len(bad)] = byte
    for data in (bytes(bad), good[: len(good) - cut]):
        try:
            header = parse_header(data, len(data))
        except (tm.Corrupt, tm.Unsupported):
            continue
        assert sum(t.nbytes for t in header.tensors) == len(data) - min(t.offset for t in header.tensors)
        assert all(t.offset >= 0 and t.offset + t.nbytes <= len(data) for t in header.tensors)
