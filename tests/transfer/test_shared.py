"""tm.empty: tensors in shared memory."""

from __future__ import annotations

import os

import pytest
import torch

import torch_mooncake as tm


def test_shapes_and_dtypes() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.bool, torch.complex64, torch.float8_e4m3fn):
        for shape in (3, (2, 5), (0,), (), (1 << 20,)):
            tensor = tm.empty(shape, dtype)
            assert tensor.shape == (torch.Size((shape,)) if isinstance(shape, int) else torch.Size(shape))
            assert tensor.dtype is dtype
            assert tensor.is_contiguous()
            tensor.view(torch.uint8).fill_(1) if tensor.dim() else tensor.fill_(1)
    assert tm.empty(3).dtype is torch.get_default_dtype()
    assert tm.empty((4, 4), shared=False).shape == (4, 4)


def test_tensors_do_not_overlap_and_are_given_back() -> None:
    fds = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        tensors = [tm.empty(n, torch.uint8).fill_(i) for i, n in enumerate((1, 4096, 5000, 1 << 20, 3 << 20) * 8)]
        assert all(bool((t == i).all()) for i, t in enumerate(tensors))
        views = [t[: len(t) // 2 + 1] for t in tensors]
        tensors.clear()
        assert all(bool((v == i).all()) for i, v in enumerate(views))
        views.clear()
    assert len(os.listdir("/proc/self/fd")) <= fds


def test_more_than_the_host_has_is_an_error() -> None:
    with pytest.raises((tm.PoolFull, tm.InvalidArgument, MemoryError)):
        tm.empty(1 << 50, torch.uint8)
