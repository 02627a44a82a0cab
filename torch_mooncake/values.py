"""From a located object to the caller's value: mapped, converted, or copied into ``out``."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import numpy as np

from torch_mooncake import _core
from torch_mooncake.errors import InvalidArgument, LayoutMismatch
from torch_mooncake.tensors import Array, Bytes, Decoded, Leaf, Tensor, leaf_nbytes, leaf_over

if TYPE_CHECKING:
    import torch

_MAX_GAP = 4096  # leaves closer than this are read in one go, over a scratch buffer


def load(
    client: _core.Client,
    found: _core.Object,
    deadline: int,
    *,
    out: Any = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    readonly: bool = False,
) -> Any:
    """The value of ``found``. KeyNotFound if it was superseded since it was looked up."""

    def read(offset: int, nbytes: int) -> bytes:
        buffer = bytearray(nbytes)
        client.read(found, offset, [buffer], deadline)
        return bytes(buffer)

    decoded = Decoded(found.meta, found.nbytes, read)
    if out is not None:
        if device is not None or dtype is not None or readonly:
            raise InvalidArgument("out= decides device and dtype: give no device=, dtype= or readonly=")
        return _Reader(client, found, deadline).into(decoded, out)
    if next(decoded.leaves(), None) is None:
        return decoded.build(lambda leaf: None)
    converts = dtype is not None or (device is not None and str(device) != "cpu")
    if not converts:
        # Bytes and str are copied out by the decoder anyway.
        copied = not any(isinstance(leaf, (Tensor, Array)) for leaf in decoded.leaves())
        memory = client.map(found, readonly or copied, deadline)
        return decoded.build(lambda leaf: leaf_over(memory, leaf))
    memory = client.map(found, True, deadline)

    def convert(leaf: Leaf) -> Any:
        value = leaf_over(memory, leaf)
        if isinstance(leaf, Tensor):
            return value.to(device=device, dtype=dtype, copy=True)
        return value.copy() if isinstance(leaf, Array) else value

    return decoded.build(convert)


class _Reader:
    """Reads leaves straight into the caller's memory."""

    def __init__(self, client: _core.Client, found: _core.Object, deadline: int) -> None:
        self.client, self.found, self.deadline = client, found, deadline
        self.jobs: list[tuple[int, int, Any]] = []  # (offset, nbytes, (address, nbytes) or buffer)
        self.copies: list[tuple[Any, Any]] = []  # (destination, what was read) for those not read in place

    def into(self, decoded: Decoded, out: Any) -> Any:
        """Fill ``out`` (shaped like the value, or one leaf) and return it."""
        targets: list[tuple[Leaf, Any, str]] = []
        _match(decoded.build(lambda leaf: leaf), out, "", targets)
        for leaf, target, path in targets:
            self._plan(leaf, target, path)
        self._read()
        for destination, temporary in self.copies:
            destination.copy_(temporary)
        return out

    def _plan(self, leaf: Leaf, out: Any, path: str) -> None:
        nbytes = leaf_nbytes(leaf)
        torch = sys.modules.get("torch")
        if isinstance(leaf, Tensor):
            if torch is None or not isinstance(out, torch.Tensor):
                raise LayoutMismatch(f"{_where(path)} is a tensor, out is a {type(out).__name__}")
            have, want = (leaf.dtype, leaf.shape), (str(out.dtype).removeprefix("torch."), tuple(out.shape))
            if have != want:
                raise LayoutMismatch(f"{_where(path)} is {_layout(*have)}, out is {_layout(*want)}")
            target = out.detach()
            if target.device.type != "cpu" or not target.is_contiguous() or target.is_conj() or target.is_neg():
                temporary = torch.empty(leaf.shape, dtype=out.dtype)
                self.copies.append((target, temporary))
                target = temporary
            self.jobs.append((leaf.offset, nbytes, (target.data_ptr(), nbytes)))
        elif isinstance(leaf, Array):
            if not isinstance(out, np.ndarray) or (out.dtype.str, out.shape) != (leaf.dtype, leaf.shape):
                have_ = _layout(out.dtype.str, out.shape) if isinstance(out, np.ndarray) else type(out).__name__
                raise LayoutMismatch(f"{_where(path)} is {_layout(leaf.dtype, leaf.shape)}, out is {have_}")
            if not out.flags.c_contiguous or not out.flags.writeable:
                raise InvalidArgument(f"{_where(path)}: out must be a writable, C-contiguous array")
            self.jobs.append((leaf.offset, nbytes, (out.__array_interface__["data"][0], nbytes)))
        elif isinstance(leaf, Bytes):
            if torch is not None and isinstance(out, torch.Tensor):
                raise LayoutMismatch(f"{_where(path)} is {nbytes} bytes, out is a tensor")
            view = memoryview(out)
            if view.nbytes != nbytes:
                raise LayoutMismatch(f"{_where(path)} is {nbytes} bytes, out has {view.nbytes}")
            if view.readonly:
                raise InvalidArgument(f"{_where(path)}: out must be writable")
            self.jobs.append((leaf.offset, nbytes, out))
        else:
            raise LayoutMismatch(f"{_where(path)} is a str: out= takes tensors, arrays and bytes")

    def _read(self) -> None:
        run: list[Any] = []
        start = end = 0
        for offset, nbytes, target in sorted((job for job in self.jobs if job[1]), key=lambda job: job[0]):
            if run and (offset < end or offset - end > _MAX_GAP):
                self.client.read(self.found, start, run, self.deadline)
                run = []
            if not run:
                start = end = offset
            if offset > end:
                run.append(bytearray(offset - end))
            run.append(target)
            end = offset + nbytes
        if run:
            self.client.read(self.found, start, run, self.deadline)


def _match(value: Any, out: Any, path: str, targets: list[tuple[Leaf, Any, str]]) -> None:
    """Pair the leaves of ``value`` (descriptions in their place) with those of ``out``."""
    if isinstance(value, dict):
        if not isinstance(out, dict) or value.keys() != out.keys():
            raise LayoutMismatch(f"{_where(path)} is a dict of {list(value)[:8]}, out is not a dict of the same keys")
        for key, item in value.items():
            _match(item, out[key], f"{path}[{key!r}]", targets)
    elif type(value) in (list, tuple):
        if not isinstance(out, (list, tuple)) or len(value) != len(out):
            raise LayoutMismatch(f"{_where(path)} is a sequence of {len(value)}, out is not")
        for i, (item, target) in enumerate(zip(value, out, strict=True)):
            _match(item, target, f"{path}[{i}]", targets)
    elif isinstance(value, Leaf):
        targets.append((value, out, path))
    elif type(value) is not type(out) or value != out:
        raise LayoutMismatch(f"{_where(path)} is {value!r}, which cannot be copied into {out!r}")


def _where(path: str) -> str:
    return f"the value at {path}" if path else "the value"


def _layout(dtype: str, shape: tuple[int, ...]) -> str:
    return f"{dtype} {list(shape)}"
