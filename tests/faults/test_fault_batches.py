"""Completion is truth: for every batch size and every size of slice, each byte is looked at in the instant in which
``wait()`` returns, and so is what lies around it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from fault_ways import MiB, random_bytes

COUNTS = (0, 1, 31, 32, 33, 63, 64, 65, 1000, 100_000)
SIZES = (0, 1, 7, 8, 511, 512, (64 << 10) - 1, 64 << 10, (64 << 10) + 1)
SLOT, BLOCK = 40, 24  # a slice of BLOCK bytes in each slot: no two touch


def scattered(count: int, nbytes: int, seed: int) -> tuple[Any, Any]:
    """Offsets of ``count`` slices on the two sides, each slot at most once."""
    rng = np.random.default_rng(seed)
    return tuple(rng.permutation(nbytes // SLOT)[:count].astype(np.int64) * SLOT for _ in range(2))  # type: ignore[return-value]


def moved(into: Any, to: Any, out_of: Any, source: Any, block: int) -> Any:
    """What ``into`` must look like after every slice was copied."""
    want = into.copy()
    steps = np.arange(block)
    want[(to[:, None] + steps).ravel()] = out_of[(source[:, None] + steps).ravel()]
    return want


def test_every_slice_is_there_when_wait_returns(way: str, make_two: Any) -> None:
    two = make_two(way, 100_000 * SLOT)
    for seed, count in enumerate(COUNTS):
        local, remote = scattered(count, two.nbytes, seed)
        offsets = {"local_offsets": local, "remote_offsets": remote, "nbytes": BLOCK}
        two.local[:] = random_bytes(two.nbytes, seed)
        two.fill_there(255)
        want = moved(two.window, remote, two.local, local, BLOCK)
        two.engine.write(two.region, two.remote, **offsets).wait()
        assert np.array_equal(two.there(), want), f"write of {count} slices"

        two.fill_there(random_bytes(two.nbytes, seed + 100))
        want = moved(two.local, local, two.window, remote, BLOCK)
        op = two.engine.read(two.region, two.remote, **offsets)
        op.wait()
        assert np.array_equal(two.local, want), f"read of {count} slices"
        assert op.nbytes == op.bytes_done == count * BLOCK


def test_slices_of_every_size(way: str, make_two: Any) -> None:
    two = make_two(way, MiB)
    for seed, size in enumerate(SIZES):
        two.local[:] = random_bytes(two.nbytes, seed)
        two.fill_there(0)
        pairs = [(two.region[a : a + size], two.remote[b : b + size]) for a, b in ((3, 100_000), (200_001, 400_007))]
        want = two.window.copy()
        for a, b in ((3, 100_000), (200_001, 400_007)):
            want[b : b + size] = two.local[a : a + size]
        two.engine.write(pairs).wait()
        assert np.array_equal(two.there(), want), f"write of {size} bytes"
        two.local[:] = 0
        two.engine.read(pairs).wait()
        assert np.array_equal(two.local[3 : 3 + size], want[100_000 : 100_000 + size]), f"read of {size} bytes"
        assert not two.local[3 + size : 200_001].any()


@pytest.mark.slow
@pytest.mark.parametrize("size", [(4 << 30) - 1, 4 << 30, (4 << 30) + 1])
def test_around_four_gibibytes(way: str, size: int, make_two: Any) -> None:
    """Where 32-bit sizes and offsets break. Marks at random places and at the powers of two; all else is zero."""
    two = make_two(way, size)
    rng = np.random.default_rng(size)
    edges = [0, (2 << 30) - 1, 2 << 30, (4 << 30) - 2, size - 1]
    places = np.unique(np.concatenate([rng.integers(0, size, 1000), edges]))
    two.local[places] = np.arange(len(places)) % 255 + 1
    two.engine.write(two.region, two.remote, timeout=120).wait()
    there = two.there()
    assert np.array_equal(there[places], two.local[places])
    assert sum(int(np.count_nonzero(there[i : i + 64 * MiB])) for i in range(0, size, 64 * MiB)) == len(places)
    two.local[places] = 0
    two.engine.read(two.region[size // 2 :], two.remote[size // 2 :], timeout=120).wait()
    upper = places[places >= size // 2]
    assert np.array_equal(two.local[upper], there[upper])
    assert not two.local[places[places < size // 2]].any()
