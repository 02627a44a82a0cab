"""Blobs: objects gathered from addresses and scattered to addresses."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
import torch

import torch_mooncake as tm


def at(tensor: torch.Tensor, start: int = 0, nbytes: int | None = None) -> tuple[int, int]:
    return tensor.data_ptr() + start, tensor.nbytes - start if nbytes is None else nbytes


def noise(nbytes: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("sizes", [(1,), (5, 0, 7), (4096, 100_000), (1 << 20, 1, 3 << 20), (64,) * 300])
def test_pieces_are_one_object_in_their_order(pool, sizes):
    source = [noise(size, i) for i, size in enumerate(sizes)]
    blobs = tm.Blobs(pool)
    (result,) = blobs.put_from(["blob"], [[at(piece) for piece in source]])
    whole = b"".join(piece.numpy().tobytes() for piece in source)
    assert result.stored
    assert pool.get("blob") == whole
    assert blobs.nbytes(["blob"]) == [len(whole)]
    out = torch.zeros(len(whole) + 64, dtype=torch.uint8)
    cut = len(whole) // 3
    assert blobs.get_into(["blob"], [[at(out, 0, cut), at(out, cut)]]) == [len(whole)]
    assert out[: len(whole)].numpy().tobytes() == whole
    assert not out[len(whole) :].any()


def test_each_key_has_an_outcome_of_its_own(pool):
    blobs = tm.Blobs(tm)
    data = noise(10_000)
    blobs.put_from(["a", "b"], [[at(data, 0, 100)], [at(data, 100, 9000)]])
    out = torch.zeros(10_000, dtype=torch.uint8)
    short, missing, good = blobs.get_into(["b", "c", "a"], [[at(out, 0, 8999)], [at(out)], [at(out, 9500, 100)]])
    assert isinstance(short, tm.LayoutMismatch)
    assert isinstance(missing, tm.KeyNotFound)
    assert good == 100
    assert torch.equal(out[9500:9600], data[:100])
    assert not out[:9500].any()
    sizes = blobs.nbytes(["a", "c"])
    assert sizes[0] == 100
    assert isinstance(sizes[1], tm.KeyNotFound)


def test_keep_replace_and_nothing(pool):
    blobs = tm.Blobs(pool)
    one, two = noise(50, 1), noise(60, 2)
    blobs.put_from(["k"], [[at(one)]])
    (kept,) = blobs.put_from(["k"], [[at(two)]], if_exists="keep")
    assert not kept.stored
    assert blobs.nbytes(["k"]) == [50]
    blobs.put_from(["k"], [[at(two)]])
    assert pool.get("k") == two.numpy().tobytes()
    blobs.put_from(["empty"], [[]])
    assert pool.get("empty") == b""
    assert blobs.get_into(["empty"], [[]]) == [0]
    assert blobs.put_from([], []) == blobs.get_into([], []) == blobs.nbytes([]) == []


def test_what_goes_with_a_blob_is_told_without_reading_it(pool):
    blobs = tm.Blobs(pool)
    data = noise(100)
    blobs.put_from(["a", "b"], [[at(data)], [at(data, 0, 10)]], metas=[{"shape": [2, 50], "of": "k"}, None])
    assert blobs.look(["a", "b"]) == [(100, {"shape": [2, 50], "of": "k"}), (10, {})]
    assert pool.info("a").meta == {"shape": [2, 50], "of": "k"}
    with pytest.raises(tm.InvalidArgument, match="1 metas"):
        blobs.put_from(["a", "b"], [[], []], metas=[None])
    with pytest.raises(TypeError, match="meta"):
        blobs.put_from(["a"], [[]], metas=[{"x": object()}])


def test_values_of_put_can_be_read_into_addresses(pool):
    tensor, array = torch.arange(1000, dtype=torch.float32), np.arange(500, dtype=np.int16)
    pool.put("tensor", tensor)
    pool.put("array", array)
    pool.put("bytes", b"some bytes")
    pool.put("nest", {"a": tensor, "b": array})
    out = ctypes.create_string_buffer(8192)
    blobs = tm.Blobs(pool)
    for key, value in (("tensor", tensor.numpy()), ("array", array), ("bytes", np.frombuffer(b"some bytes", "u1"))):
        assert blobs.get_into([key], [[(ctypes.addressof(out), 8192)]]) == [value.nbytes]
        assert out.raw[: value.nbytes] == value.tobytes()
    (refused,) = blobs.get_into(["nest"], [[(ctypes.addressof(out), 8192)]])
    assert isinstance(refused, tm.LayoutMismatch)


def test_mistakes_are_told_before_anything_is_done(pool):
    blobs = tm.Blobs(pool)
    with pytest.raises(tm.InvalidArgument, match="2 keys, but 1"):
        blobs.put_from(["a", "b"], [[]])
    with pytest.raises(tm.InvalidArgument, match="1 keys, but 0"):
        blobs.get_into(["a"], [])
    with pytest.raises(tm.InvalidArgument):
        blobs.put_from([""], [[]])
    assert pool.keys() == []


def test_a_full_pool_is_the_key_s_own_outcome(small):
    blobs = tm.Blobs(small)
    data = noise(8 << 20)
    outcomes = blobs.put_from([f"k{i}" for i in range(6)], [[at(data)]] * 6, pin="hard", timeout=1)
    assert any(isinstance(outcome, tm.PoolFull) for outcome in outcomes)
    assert sum(small.exists([f"k{i}" for i in range(6)])) == sum(not isinstance(o, Exception) for o in outcomes)


def test_from_another_host(pool, child):
    """A client whose host id differs reads over the network: into private memory, in pieces."""
    blobs = tm.Blobs(pool)
    data = noise(300_000, 5)
    blobs.put_from(["far"], [[at(data)]])
    other = child({"TM_HOST_ID": "elsewhere"})
    got = other(
        """
import torch, hashlib, torch_mooncake as tm
out = torch.zeros(300_000, dtype=torch.uint8)
n = tm.Blobs(tm).get_into(["far"], [[(out.data_ptr(), 1000), (out.data_ptr() + 1000, 299_000)]])
result = [n, hashlib.sha256(out.numpy().tobytes()).hexdigest()]
tm.close()
"""
    )
    import hashlib

    assert got == [[300_000], hashlib.sha256(data.numpy().tobytes()).hexdigest()]
