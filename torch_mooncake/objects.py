"""What a located object is: the value its one writer described, or what several writers' parts are together."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import msgspec

from torch_mooncake import _core
from torch_mooncake.errors import Corrupt, LayoutMismatch
from torch_mooncake.tensors import (
    Array,
    Block,
    Bytes,
    Decoded,
    Dict,
    Elsewhere,
    List,
    Node,
    Sharded,
    Tensor,
    Text,
    Tuple,
    check_blocks,
    is_spilled,
    leaf_nbytes,
    leaves_of,
    loader,
)


class Description:
    """What an object holds. Immutable."""

    __slots__ = ("_loader", "copied", "leaves", "nbytes", "root", "simple", "user")

    def __init__(self, root: Node, user: dict[str, Any] | None) -> None:
        self.root = root  # with offsets in the whole object
        self.user = user
        self.leaves = tuple(leaves_of(root))
        self.copied = not any(isinstance(leaf, (Tensor, Array)) for leaf in self.leaves)  # by the decoder, anyway
        self.simple = bool(self.leaves) and not any(isinstance(leaf, Sharded) for leaf in self.leaves)  # can be mapped
        self.nbytes = sum(map(leaf_nbytes, self.leaves)) if self.simple else 0
        self._loader: Callable[[Any], Any] | None = None

    def over(self, memory: Any) -> Any:
        """The value over the object's memory, see ``leaf_over``."""
        if self._loader is None:
            self._loader = loader(self.root)
        return self._loader(memory)


_memo: dict[tuple[bytes, int], Description] = {}  # of objects of one writer, by metadata and size
_MEMO_ENTRIES = 1024
_MEMO_BYTES = 4096  # of metadata


def describe(client: _core.Client, found: _core.Object, deadline: int) -> Description:
    """Corrupt if a part's description is malformed; LayoutMismatch if the writers of one value do not agree."""
    single = found.single
    if single is None or is_spilled(single[0]) or len(single[0]) > _MEMO_BYTES:
        return _describe(client, found, deadline)
    known = _memo.get(single)
    if known is None:
        if len(_memo) >= _MEMO_ENTRIES:
            _memo.clear()
        known = _memo[single] = _describe(client, found, deadline)
    return known


def describe_peeked(client: _core.Client, found: _core.Object, deadline: int) -> Description | None:
    """As ``describe``, of what ``peek_many`` found. None: its description lies in its bytes, and they are on an SSD."""
    if "ssd" in found.tiers and "dram" not in found.tiers and any(is_spilled(meta) for _, _, meta in found.parts):
        return None
    return describe(client, found, deadline)


def _describe(client: _core.Client, found: _core.Object, deadline: int) -> Description:
    parts = [_part(client, found, deadline, *part) for part in found.parts]
    user = parts[0].user
    if len(parts) == 1:
        if parts[0].shared:
            raise Corrupt("a value of several writers is in one part")
        check_blocks(parts[0].root)
        return Description(parts[0].root, user)
    roots = [_moved(part.root, offset) for part, (offset, _, _) in zip(parts, found.parts, strict=True)]
    if len({part.shared for part in parts}) > 1:
        raise LayoutMismatch("some writers put a share of one value, others a value of their own")
    root = _merged(roots, "") if parts[0].shared else List(tuple(roots))
    check_blocks(root)
    return Description(root, user)


def _part(client: _core.Client, found: _core.Object, deadline: int, at: int, nbytes: int, meta: bytes) -> Decoded:
    def read(offset: int, count: int) -> bytes:
        buffer = bytearray(count)
        client.read(found, at + offset, [buffer], deadline)
        return bytes(buffer)

    return Decoded(meta, nbytes, read)


def _moved(node: Node, by: int) -> Node:
    if isinstance(node, List):
        return List(tuple(_moved(item, by) for item in node.items))
    if isinstance(node, Tuple):
        return Tuple(tuple(_moved(item, by) for item in node.items))
    if isinstance(node, Dict):
        return Dict(tuple((key, _moved(item, by)) for key, item in node.items))
    if isinstance(node, Sharded):
        blocks = tuple(msgspec.structs.replace(block, offset=block.offset + by) for block in node.blocks)
        return msgspec.structs.replace(node, blocks=blocks)
    if isinstance(node, (Bytes, Text, Tensor, Array)):
        return msgspec.structs.replace(node, offset=node.offset + by)
    return node


def _merged(nodes: list[Node], path: str) -> Node:
    """One value from its writers' shares, that of part 0 first."""
    first = nodes[0]

    def differ() -> LayoutMismatch:
        where = f" at {path}" if path else ""
        return LayoutMismatch(f"the writers of this object describe different values{where}")

    if isinstance(first, Elsewhere):
        raise Corrupt(f"part 0 leaves {path or 'the value'} to another part")
    if isinstance(first, Dict):
        keys = [key for key, _ in first.items]
        items = []
        if not all(isinstance(node, Dict) and [key for key, _ in node.items] == keys for node in nodes):
            raise differ()
        for i, key in enumerate(keys):
            items.append(
                (key, _merged([node.items[i][1] for node in nodes if isinstance(node, Dict)], f"{path}[{key!r}]"))
            )
        return Dict(tuple(items))
    if isinstance(first, (List, Tuple)):
        same = [node.items for node in nodes if type(node) is type(first) and len(node.items) == len(first.items)]
        if len(same) != len(nodes):
            raise differ()
        columns = zip(*same, strict=True)
        return type(first)(tuple(_merged(list(column), f"{path}[{i}]") for i, column in enumerate(columns)))
    if isinstance(first, Sharded):
        head = (first.dtype, first.shape, first.layout)
        blocks: list[Block] = []
        for node in nodes:
            if not isinstance(node, Sharded) or (node.dtype, node.shape, node.layout) != head:
                raise differ()
            blocks.extend(node.blocks)
        return msgspec.structs.replace(first, blocks=tuple(blocks))
    if not all(isinstance(node, Elsewhere) for node in nodes[1:]):
        raise differ()
    return first


class Rounds:
    """Counts the puts of each key that this process took part in, so that the n-th of every writer meet, and what a
    writer that was late for one round brings never mixes with the next. Any thread. Remembers the last 65 536 keys: all
    writers of an SPMD program forget the same ones."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: OrderedDict[str, int] = OrderedDict()

    def next(self, key: str) -> str:
        with self._lock:
            count = self._counts.pop(key, 0) + 1
            self._counts[key] = count
            if len(self._counts) > 1 << 16:
                self._counts.popitem(last=False)
        return f"#{count}"
