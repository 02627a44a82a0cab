"""State dicts: names as torch's distributed checkpoint makes them, and loading in place."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from torch_mooncake import _core, values
from torch_mooncake.errors import InvalidArgument, LayoutMismatch
from torch_mooncake.objects import describe
from torch_mooncake.tensors import Dict, List, Node, Sharded, Tensor

_SHOWN = 10


class Place(NamedTuple):
    """A leaf of a nest, and how to replace it."""

    value: Any
    container: Any
    key: Any


def resolved(state_dict: Any) -> dict[str, Any]:
    """With each value that has a ``state_dict()`` replaced by it. TypeError for what is no mapping."""
    if not isinstance(state_dict, Mapping):
        raise TypeError(f"a state dict is a mapping, not a {type(state_dict).__name__}")
    return {key: item.state_dict() if _is_stateful(item) else item for key, item in state_dict.items()}


def _is_stateful(value: Any) -> bool:
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


def load(client: _core.Client, found: _core.Object, deadline: int, into: Any, strict: bool) -> Any:
    """The state dict of ``found``; with ``into``, in place. Errors as ``Pool.get_state_dict`` says."""
    description = describe(client, found, deadline)
    if not isinstance(description.root, Dict):
        raise LayoutMismatch(f"key {found.key.decode()!r} holds no state dict")
    if into is None:
        return values.load(client, found, deadline)
    nest = resolved(into)
    have, want = _named(_node_leaves(description.root)), _named(_value_leaves(nest))
    missing, unexpected = sorted(want.keys() - have.keys()), sorted(have.keys() - want.keys())
    if strict and (missing or unexpected):
        raise LayoutMismatch(
            f"state dict {found.key.decode()!r} differs in its names; not in the pool: {_some(missing)}; "
            f"not wanted: {_some(unexpected)}"
        )
    reader = values.Reader(client, found, deadline)
    others = []
    torch = sys.modules.get("torch")
    for name in want.keys() & have.keys():
        node, place = have[name].value, want[name]
        if torch is not None and isinstance(place.value, torch.Tensor) != isinstance(node, (Tensor, Sharded)):
            raise LayoutMismatch(f"{name!r} is a tensor on one side only")
        if isinstance(node, (Tensor, Sharded)):
            reader.plan(node, place.value, name)
        else:
            others.append((node, place))
    fresh = values.fresh(client, found, deadline, List(tuple(node for node, _ in others)))
    reader.run()
    for (_, place), value in zip(others, fresh, strict=True):
        place.container[place.key] = value
    for key, item in into.items():
        if _is_stateful(item):
            item.load_state_dict(nest[key])
        elif nest[key] is not item:
            into[key] = nest[key]
    return into


def _named(leaves: Iterator[tuple[tuple[Any, ...], Place]]) -> dict[str, Place]:
    found: dict[str, Place] = {}
    for path, place in leaves:
        name = ".".join(map(str, path))
        if name in found:
            raise InvalidArgument(f"two values of the state dict have the name {name!r}")
        found[name] = place
    return found


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return (", ".join(names[:_SHOWN]) or "none") + more


# Mappings are walked, lists only if they hold tensors or mappings, everything else is a leaf.


def _value_leaves(root: Any) -> Iterator[tuple[tuple[Any, ...], Place]]:
    torch = sys.modules.get("torch")

    def is_tensor(value: Any) -> bool:
        return torch is not None and isinstance(value, torch.Tensor)

    def children(value: Any) -> Iterator[tuple[Any, Any]]:
        return iter(value.items()) if isinstance(value, Mapping) else enumerate(value)

    return _leaves(root, lambda v: isinstance(v, Mapping), lambda v: isinstance(v, list), is_tensor, children)


def _node_leaves(root: Node) -> Iterator[tuple[tuple[Any, ...], Place]]:
    def children(node: Any) -> Iterator[tuple[Any, Any]]:
        return iter(node.items) if isinstance(node, Dict) else enumerate(node.items)

    def is_tensor(node: Any) -> bool:
        return isinstance(node, (Tensor, Sharded))

    return _leaves(root, lambda n: isinstance(n, Dict), lambda n: isinstance(n, List), is_tensor, children)


def _leaves(
    root: Any,
    is_dict: Callable[[Any], bool],
    is_list: Callable[[Any], bool],
    is_tensor: Callable[[Any], bool],
    children: Callable[[Any], Iterator[tuple[Any, Any]]],
) -> Iterator[tuple[tuple[Any, ...], Place]]:
    def walked(value: Any) -> bool:
        if is_dict(value):
            return True
        return is_list(value) and any(
            is_tensor(item) or ((is_dict(item) or is_list(item)) and walked(item)) for _, item in children(value)
        )

    stack: list[tuple[tuple[Any, ...], Place]] = [((), Place(root, None, None))]
    while stack:
        path, place = stack.pop()
        if walked(place.value) or place.container is None:
            stack.extend(((*path, key), Place(item, place.value, key)) for key, item in children(place.value))
        else:
            yield path, place
