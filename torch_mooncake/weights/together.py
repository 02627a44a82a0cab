"""Several sources of weights as one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from torch_mooncake.errors import InvalidArgument
from torch_mooncake.weights.files import Checkpoint, Share
from torch_mooncake.weights.shards import Local, Manifest, Piece, Whole
from torch_mooncake.weights.sources import Source, Tensors

if TYPE_CHECKING:
    from torch_mooncake.transfer import Engine
    from torch_mooncake.weights.arena import Arena


class Together(Source):
    """What one rank publishes, from several places: checkpoints, each whole (no other rank reads it), models or state
    dicts, streams. InvalidArgument if two of them have the same tensor."""

    def __init__(self, sources: Sequence[Source | Checkpoint | torch.nn.Module | Mapping[str, torch.Tensor]]) -> None:
        self._sources = tuple(_source(each) for each in sources)
        wholes: list[Whole] = []
        locals_: list[Local] = []
        pieces: list[Piece] = []
        aliases: dict[str, str] = {}
        for source in self._sources:
            manifest = source.manifest
            if twice := sorted({whole.name for whole in wholes} & manifest.names):
                raise InvalidArgument(f"two sources have the tensor {twice[0]!r}")
            moved = (len(wholes), len(locals_))
            pieces += [p._replace(whole=p.whole + moved[0], local=p.local + moved[1]) for p in manifest.pieces()]
            wholes += manifest.wholes
            locals_ += manifest.locals
            aliases |= manifest.aliases
        self.manifest = Manifest.of(wholes, locals_, pieces, aliases)

    def fill(self, engine: Engine, arena: Arena, slot: int, first: int = 0) -> None:
        for source in self._sources:
            source.fill(engine, arena, slot, first)
            first += len(source.manifest.locals)


def _source(given: Source | Checkpoint | torch.nn.Module | Mapping[str, torch.Tensor]) -> Source:
    if isinstance(given, Checkpoint):
        return Share(given, 0, 1)
    return given if isinstance(given, Source) else Tensors(given, None)
