"""What a publisher publishes: a model's tensors, tensors that come one after another, or a checkpoint's files."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from torch_mooncake import sharding
from torch_mooncake.errors import InvalidArgument, LayoutMismatch
from torch_mooncake.tensors import DTYPES
from torch_mooncake.weights.describe import described
from torch_mooncake.weights.layout import Layout
from torch_mooncake.weights.manifest import tensors_of
from torch_mooncake.weights.shards import Local, Manifest, Piece, Whole

if TYPE_CHECKING:
    from torch_mooncake.transfer import Engine
    from torch_mooncake.weights.arena import Arena


class Source(ABC):
    """``manifest``: packed; this rank's part, the same for every version. ``progress``: what ``fill`` calls with bytes
    that have come from files."""

    manifest: Manifest
    progress: Callable[[int], None] | None = None

    @abstractmethod
    def fill(self, engine: Engine, arena: Arena, slot: int, first: int = 0) -> None:
        """Puts the tensors, as they are now, into a slot of the arena, which was made of ``manifest`` (of several
        sources' manifests: this one's tensors are those from number ``first`` on). The slot may be in any state when
        this raises: it is published by nobody then."""


class Tensors(Source):
    """A module's tensors, or a state dict's. LayoutMismatch from ``fill`` if they have other shapes by now."""

    def __init__(
        self, model_or_state_dict: torch.nn.Module | Mapping[str, torch.Tensor], layout: Layout | None
    ) -> None:
        self._model = model_or_state_dict
        self.manifest = described(tensors_of(model_or_state_dict), layout, packed=True)

    @torch.no_grad()
    def fill(self, engine: Engine, arena: Arena, slot: int, first: int = 0) -> None:
        here = local_tensors(self._model)
        all_views = arena.views(slot)
        views = {local.name: all_views[local.name] for local in self.manifest.locals}
        for name, view in views.items():
            if name not in here or here[name].shape != view.shape:
                raise LayoutMismatch(f"{name}: {list(view.shape)} when the publisher was made, not any more")
        for name, view in views.items():
            view.copy_(here[name])


class Stream(Source):
    """Whole tensors that come one after another, and need not be in memory together (what an exporter gathers).

    ``declared``: (name, shape, dtype) of each; ``tensors``: called for each version, gives (name, tensor) of all of
    them, once each, in any order. ``held``: this rank publishes these only; others may come and are dropped, as are
    those that are None. LayoutMismatch from ``Publisher.publish`` if what comes is not what was declared.
    """

    def __init__(
        self,
        declared: Iterable[tuple[str, Sequence[int], torch.dtype]],
        tensors: Callable[[], Iterable[tuple[str, torch.Tensor | None]]],
        *,
        held: Iterable[str] | None = None,
    ) -> None:
        self._tensors = tensors
        keep = None if held is None else set(held)
        wholes: dict[str, Whole] = {}
        for name, shape, dtype in declared:
            if name in wholes:
                raise InvalidArgument(f"{name} is declared twice")
            if keep is None or name in keep:
                text = str(dtype).removeprefix("torch.")
                if text not in DTYPES:
                    raise LayoutMismatch(f"{name}: {text} tensors do not travel")
                wholes[name] = Whole(name, tuple(shape), text)
        if keep is not None and (unknown := sorted(keep - wholes.keys())):
            raise InvalidArgument(f"held, and not declared: {', '.join(unknown[:10])}")
        pieces = [
            Piece(i, i, (0,) * len(whole.shape), whole.shape, 0, sharding.contiguous_strides(whole.shape))
            for i, whole in enumerate(wholes.values())
            if 0 not in whole.shape
        ]
        self.manifest = Manifest.of(wholes.values(), [Local(*whole) for whole in wholes.values()], pieces)

    @torch.no_grad()
    def fill(self, engine: Engine, arena: Arena, slot: int, first: int = 0) -> None:
        all_views = arena.views(slot)
        views = {local.name: all_views[local.name] for local in self.manifest.locals}
        for name, tensor in self._tensors():
            view = views.get(name)
            if view is None or tensor is None:
                continue
            if tensor.shape != view.shape or tensor.dtype != view.dtype:
                kinds = [f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}" for t in (tensor, view)]
                raise LayoutMismatch(f"{name}: {kinds[0]} came, {kinds[1]} was declared")
            view.copy_(tensor)
            del views[name]
        if views:
            raise LayoutMismatch(f"declared, and did not come (or came twice): {', '.join(list(views)[:10])}")


def local_tensors(model_or_state_dict: torch.nn.Module | Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors of this process's memory, by name: of a DTensor, its local shard."""
    found = tensors_of(model_or_state_dict)
    return {
        name: tensor.to_local() if sharding.is_dtensor(tensor) else tensor  # type: ignore[attr-defined]
        for name, tensor in found.items()
    }
