"""From a located object to the caller's value: mapped, converted, or copied into ``out``."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from torch_mooncake import _core, sharding
from torch_mooncake.errors import Corrupt, InvalidArgument, LayoutMismatch
from torch_mooncake.objects import Description, describe
from torch_mooncake.tensors import (
    DTYPES,
    Array,
    Block,
    Bytes,
    Leaf,
    Node,
    Sharded,
    Tensor,
    Text,
    build,
    dense,
    leaf_nbytes,
    leaf_over,
    numpy_dtype,
)

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh

_MAX_GAP = 4096  # leaves closer than this are read in one go, over a scratch buffer
_MIN_RANGE = 64  # bytes; layouts that share less at a time are copied through a dense tensor


def load(
    client: _core.Client,
    found: _core.Object,
    deadline: int,
    *,
    out: Any = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    readonly: bool = False,
    placements: Sequence[Any] | None = None,
    mesh: DeviceMesh | None = None,
) -> Any:
    """The value of ``found``. KeyNotFound if it was superseded since it was looked up."""
    description = describe(client, found, deadline)
    if description.simple and out is device is dtype is placements is mesh is None:
        return description.over(client.map(found, readonly or description.copied, deadline))
    if out is not None:
        if device is not None or dtype is not None or readonly or placements is not None:
            raise InvalidArgument("out= decides device, dtype and placements: give none, and no readonly=")
        target = dense_target(description, out)
        if target is not None:
            client.read(found, 0, (target,), deadline)
            return out
        reader = Reader(client, found, deadline)
        targets: list[tuple[Leaf, Any, str]] = []
        match(build(description.root, lambda leaf: leaf), out, "", targets)
        for leaf, target, path in targets:
            reader.plan(leaf, target, path)
        reader.run()
        return out
    if placements is not None or mesh is not None:
        if placements is None or mesh is None:
            raise InvalidArgument("placements= and mesh= belong together")
        if device is not None or readonly:
            raise InvalidArgument("mesh= decides the device of a DTensor of one's own: give no device=, no readonly=")
        return _distributed(client, found, deadline, description, mesh, placements, dtype)
    leaves = description.leaves
    if not leaves:
        return build(description.root, lambda leaf: None)
    converts = dtype is not None or (device is not None and str(device) != "cpu")
    if any(isinstance(leaf, Sharded) for leaf in leaves):
        value = fresh(client, found, deadline, description.root)
        return _converted(value, device, dtype) if converts else value
    if not converts:
        return description.over(client.map(found, readonly or description.copied, deadline))
    memory = client.map(found, True, deadline)

    def convert(leaf: Leaf) -> Any:
        value = leaf_over(memory, leaf)
        if isinstance(leaf, Tensor):
            return value.to(device=device, dtype=dtype, copy=True)
        return value.copy() if isinstance(leaf, Array) else value

    return build(description.root, convert)


def dense_target(description: Description, out: Any) -> Any:
    """Where all of a value of one dense leaf goes in one piece: (address, nbytes) or a buffer; None: ``values.load``
    knows how, or says why not."""
    leaf = description.root
    if type(leaf) is Tensor:
        torch = sys.modules.get("torch")
        if torch is None or type(out) is not torch.Tensor or leaf.offset:
            return None
        if out.dtype is not getattr(torch, leaf.dtype) or out.shape != leaf.shape or not dense(out, torch):
            return None
        return out.data_ptr(), description.nbytes
    if type(leaf) is Array and type(out) is np.ndarray and not leaf.offset:
        if (out.dtype.str, out.shape) != (leaf.dtype, leaf.shape) or not (
            out.flags.c_contiguous and out.flags.writeable
        ):
            return None
        return out.__array_interface__["data"][0], description.nbytes
    if type(leaf) is Bytes and type(out) is bytearray and not leaf.offset and len(out) == leaf.nbytes:
        return out
    return None


def fresh(client: _core.Client, found: _core.Object, deadline: int, root: Node) -> Any:
    """The value of (a part of) an object in memory of its own."""
    reader = Reader(client, found, deadline)
    texts: list[tuple[bytearray, Leaf]] = []

    def target(leaf: Leaf) -> Any:
        if isinstance(leaf, (Tensor, Sharded)):
            import torch

            value: Any = torch.empty(leaf.shape, dtype=getattr(torch, leaf.dtype))
        elif isinstance(leaf, Array):
            value = np.empty(leaf.shape, numpy_dtype(leaf.dtype))
        else:
            value = bytearray(leaf.nbytes)
            texts.append((value, leaf))
            reader.jobs.append((leaf.offset, leaf.nbytes, value))
            return value
        reader.plan(leaf, value, "")
        return value

    value = build(root, target)
    reader.run()
    if not texts:
        return value
    final = {id(buffer): _text_or_bytes(buffer, leaf) for buffer, leaf in texts}
    return _replaced(value, final)


def _text_or_bytes(buffer: bytearray, leaf: Leaf) -> bytes | str:
    if not isinstance(leaf, Text):
        return bytes(buffer)
    try:
        return buffer.decode()
    except UnicodeDecodeError as error:
        raise Corrupt(f"a str of the object is not UTF-8: {error}") from None


def _replaced(value: Any, final: dict[int, Any]) -> Any:
    if isinstance(value, bytearray):
        return final[id(value)]
    if isinstance(value, dict):
        return {key: _replaced(item, final) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_replaced(item, final) for item in value)
    return value


def _converted(value: Any, device: Any, dtype: Any) -> Any:
    import torch

    if isinstance(value, torch.Tensor):
        return value.to(device=device, dtype=dtype)
    if isinstance(value, dict):
        return {key: _converted(item, device, dtype) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_converted(item, device, dtype) for item in value)
    return value


def _distributed(
    client: _core.Client,
    found: _core.Object,
    deadline: int,
    description: Description,
    mesh: DeviceMesh,
    placements: Sequence[Any],
    dtype: torch.dtype | None,
) -> Any:
    """This process's share of a tensor, as a DTensor."""
    leaf = description.root
    if not isinstance(leaf, (Tensor, Sharded)):
        raise InvalidArgument("placements= is for a key that holds one tensor; see get_state_dict for more")
    import torch
    from torch.distributed.tensor import DTensor

    share = sharding.share(leaf.shape, mesh, placements)
    local = torch.empty(share.box.shape, dtype=getattr(torch, leaf.dtype))
    reader = Reader(client, found, deadline)
    reader.plan_tensor(leaf, local, share.box)
    reader.run()
    return DTensor.from_local(
        local.to(device=mesh.device_type, dtype=dtype),
        mesh,
        placements,
        run_check=False,
        shape=torch.Size(leaf.shape),
        stride=sharding.contiguous_strides(leaf.shape),
    )


class Reader:
    """Reads leaves straight into the caller's memory: plan() what is wanted, then run() once."""

    def __init__(self, client: _core.Client, found: _core.Object, deadline: int) -> None:
        self.client, self.found, self.deadline = client, found, deadline
        self.jobs: list[tuple[int, int, Any]] = []  # (offset, nbytes, (address, nbytes) or buffer)
        self.regions: list[tuple[sharding.Ranges, Any]] = []  # ranges into a tensor
        self.copies: list[tuple[Any, Any]] = []  # (destination, what was read) for those not read in place

    def plan(self, leaf: Leaf, out: Any, path: str) -> None:
        """Read all of ``leaf`` (a DTensor's share of it) into ``out``. LayoutMismatch if they differ."""
        nbytes = leaf_nbytes(leaf)
        torch = sys.modules.get("torch")
        if isinstance(leaf, (Tensor, Sharded)):
            if torch is None or not isinstance(out, torch.Tensor):
                raise LayoutMismatch(f"{where(path)} is a tensor, out is a {type(out).__name__}")
            have, want = (leaf.dtype, leaf.shape), (str(out.dtype).removeprefix("torch."), tuple(out.shape))
            if have != want:
                raise LayoutMismatch(f"{where(path)} is {_layout(*have)}, out is {_layout(*want)}")
            if sharding.is_dtensor(out):
                box = sharding.share_of(out).box
                self.plan_tensor(leaf, out.to_local(), box)
            else:
                self.plan_tensor(leaf, out, sharding.whole(leaf.shape))
        elif isinstance(leaf, Array):
            if not isinstance(out, np.ndarray) or (out.dtype.str, out.shape) != (leaf.dtype, leaf.shape):
                have_ = _layout(out.dtype.str, out.shape) if isinstance(out, np.ndarray) else type(out).__name__
                raise LayoutMismatch(f"{where(path)} is {_layout(leaf.dtype, leaf.shape)}, out is {have_}")
            if not out.flags.c_contiguous or not out.flags.writeable:
                raise InvalidArgument(f"{where(path)}: out must be a writable, C-contiguous array")
            self.jobs.append((leaf.offset, nbytes, (out.__array_interface__["data"][0], nbytes)))
        elif isinstance(leaf, Bytes):
            if torch is not None and isinstance(out, torch.Tensor):
                raise LayoutMismatch(f"{where(path)} is {nbytes} bytes, out is a tensor")
            view = memoryview(out)
            if view.nbytes != nbytes:
                raise LayoutMismatch(f"{where(path)} is {nbytes} bytes, out has {view.nbytes}")
            if view.readonly:
                raise InvalidArgument(f"{where(path)}: out must be writable")
            self.jobs.append((leaf.offset, nbytes, out))
        else:
            raise LayoutMismatch(f"{where(path)} is a str: out= takes tensors, arrays and bytes")

    def plan_tensor(self, leaf: Tensor | Sharded, target: Any, box: sharding.Box) -> None:
        """Read what ``box`` is of the tensor into ``target``, a tensor of the box's shape, any strides, any device."""
        import torch

        if hasattr(target, "trigger_wait"):  # a collective's result, which may be on its way yet
            target = target.trigger_wait()
        target = target.detach()
        if tuple(target.shape) != box.shape:
            raise LayoutMismatch(f"out= holds {list(target.shape)} on this rank, where the layout has {box.shape}")
        if box.numel == 0:
            return
        itemsize = DTYPES[leaf.dtype]
        blocks = leaf.blocks if isinstance(leaf, Sharded) else (Block(leaf.offset, sharding.whole(leaf.shape).runs),)
        direct = target.device.type == "cpu" and not target.is_conj() and not target.is_neg()
        if direct and target.dtype == getattr(torch, leaf.dtype):
            if target.is_contiguous() and len(blocks) == 1 and blocks[0].runs == box.runs:
                nbytes = box.numel * itemsize
                self.jobs.append((blocks[0].offset, nbytes, (target.data_ptr(), nbytes)))
                return
            if target.is_contiguous() or _rows_are_long(target, itemsize):
                self._plan_blocks(blocks, box, target, itemsize)
                return
        temporary = torch.empty(box.shape, dtype=getattr(torch, leaf.dtype))
        self.copies.append((target, temporary))
        self.plan_tensor(leaf, temporary, box)

    def _plan_blocks(self, blocks: Sequence[Block], box: sharding.Box, target: Any, itemsize: int) -> None:
        found = [sharding.overlap(b.box, b.offset, box, target.stride(), itemsize) for b in blocks]
        ranges = np.concatenate(found or [np.empty((0, 3), np.int64)])
        if int(ranges[:, 2].sum()) != box.numel * itemsize:
            raise Corrupt(f"the object's blocks hold {int(ranges[:, 2].sum())} of {box.numel * itemsize} bytes")
        self.regions.append((ranges, target))

    def run(self) -> None:
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
        for ranges, target in self.regions:
            span = sum((n - 1) * stride for n, stride in zip(target.shape, target.stride(), strict=True)) + 1
            data = np.ascontiguousarray(ranges).tobytes()
            nbytes = span * target.element_size()
            self.client.read_ranges(self.found, data, target.data_ptr(), nbytes, self.deadline)
        for destination, temporary in self.copies:
            destination.copy_(temporary)


def _rows_are_long(target: Any, itemsize: int) -> bool:
    """Whether a strided tensor's last dimension is dense and long enough to be read row by row."""
    return target.stride(-1) == 1 and target.shape[-1] * itemsize >= _MIN_RANGE and 0 not in target.stride()


def match(value: Any, out: Any, path: str, targets: list[tuple[Leaf, Any, str]]) -> None:
    """Pair the leaves of ``value`` (descriptions in their place) with those of ``out``."""
    if isinstance(value, dict):
        if not isinstance(out, dict) or value.keys() != out.keys():
            raise LayoutMismatch(f"{where(path)} is a dict of {list(value)[:8]}, out is not a dict of the same keys")
        for key, item in value.items():
            match(item, out[key], f"{path}[{key!r}]", targets)
    elif type(value) in (list, tuple):
        if not isinstance(out, (list, tuple)) or len(value) != len(out):
            raise LayoutMismatch(f"{where(path)} is a sequence of {len(value)}, out is not")
        for i, (item, target) in enumerate(zip(value, out, strict=True)):
            match(item, target, f"{path}[{i}]", targets)
    elif isinstance(value, Leaf):
        targets.append((value, out, path))
    elif type(value) is not type(out) or value != out:
        raise LayoutMismatch(f"{where(path)} is {value!r}, which cannot be copied into {out!r}")


def where(path: str) -> str:
    return f"the value at {path}" if path else "the value"


def _layout(dtype: str, shape: tuple[int, ...]) -> str:
    return f"{dtype} {list(shape)}"
