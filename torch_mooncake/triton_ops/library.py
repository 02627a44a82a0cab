"""torch.ops.torch_mooncake_triton: the Triton implementations under the schemas of torch.ops.torch_mooncake."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from torch_mooncake import ops as _ops  # noqa: F401  (registers torch.ops.torch_mooncake)
from torch_mooncake.triton_ops import pages, scaled, weights

_IMPLEMENTATIONS: dict[str, Callable[..., Any]] = {
    "gather_pages.default": pages.gather_pages,
    "gather_pages.out": pages.gather_pages_out,
    "scatter_pages.default": pages.scatter_pages,
    "gather_pages_layers.default": pages.gather_pages_layers,
    "scatter_pages_layers.default": pages.scatter_pages_layers,
    "copy_pages.default": pages.copy_pages,
    "reshard_heads.default": pages.reshard_heads,
    "quantize_pages.default": scaled.quantize_pages,
    "quantize_pages.out": scaled.quantize_pages_out,
    "dequantize_pages.default": scaled.dequantize_pages,
    "dequantize_pages.out": scaled.dequantize_pages_out,
    "quantize_blocks.default": weights.quantize_blocks,
    "quantize_blocks.out": weights.quantize_blocks_out,
    "delta_encode.default": weights.delta_encode,
    "delta_apply.default": weights.delta_apply,
    "hash_pages.default": scaled.hash_pages,
    "hash_pages_batch.default": scaled.hash_pages_batch,
}


def _register() -> torch.library.Library:
    library = torch.library.Library("torch_mooncake_triton", "DEF")
    for full_name, implementation in _IMPLEMENTATIONS.items():
        packet, overload = full_name.split(".")
        original = getattr(getattr(torch.ops.torch_mooncake, packet), overload)
        name = packet if overload == "default" else full_name
        library.define(str(original._schema).removeprefix("torch_mooncake::"))
        for key in ("CPU", "CUDA"):
            library.impl(name, implementation, key)
        torch.library.register_fake(f"torch_mooncake_triton::{name}", original, lib=library)
    return library


_library = _register()  # its operators go when it goes
namespace = torch.ops.torch_mooncake_triton
