"""In which formats weights are quantised."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

from torch_mooncake.errors import InvalidArgument


@dataclass(frozen=True)
class Fp8Blocks:
    """A scale for each block of ``rows`` x ``columns`` of the last two dimensions (smaller at the edges), in
    ``name + suffix``, ``[..., ceil(rows / 128), ceil(columns / 128)]``: what DeepSeek's and Kimi's checkpoints have."""

    rows: int = 128
    columns: int = 128
    suffix: str = "_scale_inv"

    @property
    def block(self) -> tuple[int, int]:
        return self.rows, self.columns


@dataclass(frozen=True)
class Fp8Channels:
    """A scale for each row of the last two dimensions, in ``name + suffix``, ``[..., rows, 1]``."""

    suffix: str = "_scale_inv"

    @property
    def block(self) -> tuple[int, int]:
        return 1, -1


Fp8 = Fp8Blocks | Fp8Channels


def checked(quantise: Mapping[str, Fp8 | None]) -> None:
    """InvalidArgument for formats that cannot be."""
    for match, form in quantise.items():
        if form is not None and (form.suffix == "" or min(n for n in form.block if n != -1) < 1):
            raise InvalidArgument(f"{match!r} is to be quantised as {dataclasses.asdict(form)}, which cannot be")
