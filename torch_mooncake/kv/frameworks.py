"""Caches of serving frameworks as groups of tensors: what their tensors' dimensions mean. Strides say the rest.

Nothing here imports a framework: the arguments are the tensors they hand out. Written after vLLM 0.32, SGLang 0.5.23,
LMDeploy 0.18 and the published interface of TensorRT-LLM.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from torch_mooncake.errors import InvalidArgument, Unsupported

if TYPE_CHECKING:
    from torch_mooncake.kv.cache import GroupTensors, PlaneTensor

SGLANG_LAYOUTS = ("layer_first", "page_first", "page_first_direct", "page_head")


def _types() -> tuple[type[GroupTensors], type[PlaneTensor]]:
    from torch_mooncake.kv.cache import GroupTensors, PlaneTensor

    return GroupTensors, PlaneTensor


# --- vLLM ---


def vllm_groups(
    caches: Mapping[str, torch.Tensor | Sequence[torch.Tensor]],
    *,
    mla: bool = False,
    layer_ids: Mapping[str, int] | None = None,
    groups: Sequence[Sequence[str]] | None = None,
    windows: Mapping[str, int] | None = None,
) -> list[GroupTensors]:
    """vLLM's caches by layer name: `[B, H, N, C]` views (blocks, KV heads, tokens of a block, content), in any of its
    physical orders. C is a head's key and then its value, of one size; with `mla` (H is 1) one latent.

    A layer of another rank, or a sequence of tensors, is a state (Mamba): each tensor `[B, ...]`, blocks contiguous.
    `groups`: names of the layers that share block ids (vLLM's KV cache groups), all in one by default, but states and
    attention apart. `layer_ids` gives the model's number of each name, else the number in the name counts
    ("model.layers.7.self_attn"). `windows`: tokens of each sliding-window layer, by name.
    """
    if not caches:
        raise InvalidArgument("a paged KV cache needs at least one layer")
    ids = {name: _layer_id(name) for name in caches} if layer_ids is None else dict(layer_ids)
    if missing := [name for name in caches if name not in ids]:
        raise InvalidArgument(f"layer_ids does not name {missing}")
    if len({ids[name] for name in caches}) != len(caches):
        raise InvalidArgument(f"two layers have one number: {sorted(ids[name] for name in caches)}; give layer_ids")
    is_state = {name: not isinstance(cache, torch.Tensor) or cache.dim() != 4 for name, cache in caches.items()}
    if groups is None:
        groups = [part for part in ([n for n in caches if is_state[n] is state] for state in (False, True)) if part]
    elif sorted(name for names in groups for name in names) != sorted(caches):
        raise InvalidArgument("groups do not name every layer once")
    make_group, _ = _types()
    out = []
    for index, names in enumerate(groups):
        names = sorted(names, key=ids.__getitem__)
        if len({is_state[name] for name in names}) > 1:
            raise InvalidArgument(f"group {index} has attention layers and states")
        found = {(windows or {}).get(name) for name in names}
        if len(found) > 1:
            raise InvalidArgument(f"group {index} has layers of different windows: {sorted(map(str, found))}")
        kind = "state" if is_state[names[0]] else "mla" if mla else "attention"
        if kind == "state":
            planes = {ids[name]: _state_planes(caches[name], name) for name in names}
        else:
            planes = {ids[name]: [_vllm_plane(caches[name], name, mla)] for name in names}
        out.append(make_group(planes, f"group{index}", kind, window=found.pop(), replicated=mla and kind == "mla"))
    return out


def _vllm_plane(cache: Any, name: str, mla: bool) -> PlaneTensor:
    _, plane = _types()
    if mla:
        if cache.shape[1] != 1:
            raise InvalidArgument(f"layer {name!r}: an MLA cache has one head, not {cache.shape[1]}")
        return plane(cache, "PHND")
    if cache.shape[3] % 2:
        raise InvalidArgument(f"layer {name!r}: content of {cache.shape[3]} elements is not a key and a value")
    return plane(cache.unflatten(3, (2, cache.shape[3] // 2)), "PHNKD")


def _layer_id(name: str) -> int:
    numbers = re.findall(r"(?<![0-9A-Za-z])\d+(?![0-9A-Za-z])", name)
    if len(numbers) != 1:
        raise InvalidArgument(f"layer name {name!r} does not have one number in it; give layer_ids")
    return int(numbers[0])


def _state_planes(tensors: Any, name: str) -> list[PlaneTensor]:
    _, plane = _types()
    given = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
    out = []
    for index, tensor in enumerate(given):
        role = "state" if len(given) == 1 else f"state{index}"
        out.append(plane(flat_pages(tensor, f"layer {name!r}"), "PD", role))
    return out


def flat_pages(tensor: torch.Tensor, where: str) -> torch.Tensor:
    """`[pages, ...]` as a view `[pages, elements]`. InvalidArgument when a page is not contiguous."""
    if tensor.dim() < 1 or not tensor[:0].numel() == 0 or (tensor.shape[0] and not tensor[0].is_contiguous()):
        raise InvalidArgument(f"{where}: pages of a state are not contiguous: {tuple(tensor.shape)}, {tensor.stride()}")
    elements = tensor.shape[1:].numel()
    stride = tensor.stride(0) if tensor.shape[0] > 1 else elements
    return tensor.as_strided((tensor.shape[0], elements), (stride, 1))


# --- SGLang ---


def sglang_groups(
    buffers: torch.Tensor | Sequence[torch.Tensor] | tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]],
    *,
    layout: str = "layer_first",
    page_size: int | None = None,
    mla: bool = False,
    first_layer: int = 0,
) -> list[GroupTensors]:
    """SGLang's pools. Page `p` of a pool addressed by token is its tokens `p * page_size` up to the next page's.

    Host pool: `kv_buffer`, one tensor. Device pool (`layout="layer_first"`): `(k_buffer, v_buffer)`, lists of one
    `[tokens, H, D]` a layer, or with `mla` one list of `[tokens, 1, C]`.

    | layout            | keys and values      | mla                  |
    |-------------------|----------------------|----------------------|
    | layer_first       | (2, L, tokens, H, D) | (L, tokens, 1, C)    |
    | page_first        | (2, tokens, L, H, D) | (tokens, L, 1, C)    |
    | page_first_direct | (2, P, L, N, H, D)   | (P, L, N, 1, C)      |
    | page_head         | (2, P, H, N, L, D)   |                      |

    `page_size` is needed where tokens are addressed. `first_layer`: the model's number of the first one here.
    """
    if layout == "page_unified":
        raise Unsupported("SGLang's layout 'page_unified'")
    if layout not in SGLANG_LAYOUTS or (mla and layout == "page_head"):
        raise InvalidArgument(f"layout {layout!r} is none of {', '.join(SGLANG_LAYOUTS)}" + (" for MLA" if mla else ""))
    if isinstance(buffers, torch.Tensor):
        layers = _sglang_host(buffers, layout, page_size, mla)
    elif layout != "layer_first":
        raise InvalidArgument(f"a pool of one tensor a layer has layout 'layer_first', not {layout!r}")
    else:
        layers = _sglang_device(buffers, page_size, mla)
    make_group, _ = _types()
    planes = {first_layer + index: of for index, of in enumerate(layers)}
    return [make_group(planes, kind="mla" if mla else "attention", replicated=mla)]


def _sglang_host(buffer: torch.Tensor, layout: str, page_size: int | None, mla: bool) -> list[list[PlaneTensor]]:
    _, plane = _types()
    axes = {"layer_first": "LTHD", "page_first": "TLHD", "page_first_direct": "PLNHD", "page_head": "PHNLD"}[layout]
    axes = axes if mla else "K" + axes
    if buffer.dim() != len(axes):
        raise InvalidArgument(f"a {layout} pool has {len(axes)} dimensions, not {buffer.dim()}")
    if "T" in axes:
        at = axes.index("T")
        buffer = _by_page(buffer, at, page_size)
        axes = axes.replace("T", "PN")
    elif page_size not in (None, buffer.shape[axes.index("N")]):
        raise InvalidArgument(f"page_size is {page_size}, the pool's pages have {buffer.shape[axes.index('N')]} tokens")
    at = axes.index("L")
    return [[plane(layer, axes.replace("L", ""))] for layer in buffer.unbind(at)]


def _sglang_device(buffers: Any, page_size: int | None, mla: bool) -> list[list[PlaneTensor]]:
    _, plane = _types()
    if mla:
        return [[plane(_by_page(layer, 0, page_size), "PNHD")] for layer in buffers]
    keys, values = buffers
    return [
        [plane(_by_page(k, 0, page_size), "PNHD", "k"), plane(_by_page(v, 0, page_size), "PNHD", "v")]
        for k, v in zip(keys, values, strict=True)
    ]


def _by_page(tensor: torch.Tensor, at: int, page_size: int | None) -> torch.Tensor:
    """Dimension `at`, of tokens, as two: pages, tokens of a page."""
    if page_size is None or page_size < 1 or tensor.shape[at] % page_size:
        raise InvalidArgument(f"page_size {page_size} does not divide the pool's {tensor.shape[at]} token slots")
    return tensor.unflatten(at, (tensor.shape[at] // page_size, page_size))


# --- TensorRT-LLM, V1 ---


def trtllm_v1_groups(
    pool: torch.Tensor,
    *,
    kv_heads: int,
    page_size: int,
    order: str = "HND",
    layer_ids: Sequence[int] | None = None,
    window: int | None = None,
) -> list[GroupTensors]:
    """TensorRT-LLM's `[num_blocks, num_layers, kv_factor, elements]`, kv_factor 2, or 1 for MLA. `order` is that of
    the elements of a block: `[heads, tokens, head_dim]` ("HND") or `[tokens, heads, head_dim]` ("NHD")."""
    if pool.dim() != 4 or pool.shape[2] not in (1, 2):
        raise InvalidArgument(f"shape {tuple(pool.shape)} is not [blocks, layers, 1 or 2, elements]")
    shape = block_shape(int(pool.shape[3]), kv_heads, page_size, order)
    ids = range(pool.shape[1]) if layer_ids is None else layer_ids
    if len(ids) != pool.shape[1]:
        raise InvalidArgument(f"{len(ids)} layer_ids for {pool.shape[1]} layers")
    make_group, plane = _types()
    mla = pool.shape[2] == 1
    layers = [layer.unflatten(2, shape) for layer in pool.unbind(1)]
    planes = {
        layer: [plane(tensor.squeeze(1) if mla else tensor, f"P{order}" if mla else f"PK{order}")]
        for layer, tensor in zip(ids, layers, strict=True)
    }
    return [make_group(planes, kind="mla" if mla else "attention", window=window, replicated=mla)]


def block_shape(elements: int, kv_heads: int, page_size: int, order: str) -> tuple[int, int, int]:
    """Sizes of the axes `order` ("HND" or "NHD") of a block. InvalidArgument when they do not divide it."""
    if order not in ("HND", "NHD"):
        raise InvalidArgument(f"order {order!r} is neither 'HND' nor 'NHD'")
    if kv_heads < 1 or page_size < 1 or elements % (kv_heads * page_size):
        raise InvalidArgument(f"{elements} elements are not {kv_heads} heads of {page_size} tokens")
    dim = elements // (kv_heads * page_size)
    return (kv_heads, page_size, dim) if order == "HND" else (page_size, kv_heads, dim)


# --- LMDeploy ---

LMDEPLOY_ALIGNMENT = 256  # bytes


def lmdeploy_groups(
    pool: torch.Tensor,
    *,
    entries: Mapping[str, tuple[Sequence[int], torch.dtype]],
    axes: str = "NHD",
    mla: bool = False,
    layer_ids: Sequence[int] | None = None,
) -> list[GroupTensors]:
    """LMDeploy's packed pool, uint8 `[num_layers, num_blocks, nbytes]`: a block is its `entries` one after the other,
    each at a multiple of 256 bytes. `entries`: name to (shape of a block, dtype), in the pool's order:

        {"k": ((N, H, D), torch.float16), "v": ((N, H, D), torch.float16)}                            16 bit
        {"k": …int8, "v": …int8, "k_scale": ((N, H, 2), torch.float16), "v_scale": …}                 quantised

    `axes` names the dimensions of every entry. With `mla` the entries belong to one latent: call it "kv".
    """
    if pool.dtype != torch.uint8 or pool.dim() != 3:
        raise InvalidArgument(f"a packed pool is uint8 [layers, blocks, bytes], not {pool.dtype} {tuple(pool.shape)}")
    if pool.stride(2) != 1 and pool.shape[2] > 1:
        raise InvalidArgument("the bytes of a block are not contiguous")
    ids = range(pool.shape[0]) if layer_ids is None else layer_ids
    if len(ids) != pool.shape[0]:
        raise InvalidArgument(f"{len(ids)} layer_ids for {pool.shape[0]} layers")
    make_group, plane = _types()
    planes: dict[int, list[PlaneTensor]] = {layer: [] for layer in ids}
    offset = 0
    for role, (shape, dtype) in entries.items():
        nbytes = torch.Size(shape).numel() * dtype.itemsize
        if offset + nbytes > pool.shape[2]:
            raise InvalidArgument(f"entry {role!r} ends at byte {offset + nbytes} of blocks of {pool.shape[2]} bytes")
        typed = pool[:, :, offset : offset + nbytes].view(dtype).unflatten(2, tuple(shape))
        for layer, tensor in zip(ids, typed.unbind(0), strict=True):
            planes[layer].append(plane(tensor, f"P{axes}", role))
        offset += -(-nbytes // LMDEPLOY_ALIGNMENT) * LMDEPLOY_ALIGNMENT
    if offset != pool.shape[2]:
        raise InvalidArgument(f"the entries make blocks of {offset} bytes, the pool's have {pool.shape[2]}")
    return [make_group(planes, kind="mla" if mla else "attention", replicated=mla)]
