"""What the two sides of the PD connector tell each other, and what a request says of itself."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import torch_mooncake as tm


@dataclass(frozen=True)
class Send:
    """Prefill, for one step: ``blocks`` are a request's, in the order of its tokens, of which those before ``ready``
    are whole after the step; ``total`` are its prompt's."""

    request_id: str
    transfer_id: str
    digest: bytes
    blocks: list[int]
    ready: int
    total: int


@dataclass(frozen=True)
class Receive:
    """Decode: ``blocks`` are for the prompt's positions from ``skip`` on."""

    request_id: str
    transfer_id: str
    digest: bytes
    blocks: list[int]
    skip: int
    remote: list[str]  # doors of all prefill ranks
    incarnations: list[str]  # of them, as far as they are known


@dataclass
class PDMeta:
    """Of one step. ``dropped``: prefill's transfers that end early, and why; ``preempted``: those of them whose blocks
    are taken with this step; ``cancelled``: decode's requests; ``unwanted``: what prefill need not keep any more (its
    transfer, and the doors)."""

    sends: list[Send] = field(default_factory=list)
    dropped: dict[str, str] = field(default_factory=dict)
    preempted: list[str] = field(default_factory=list)
    receives: list[Receive] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)
    unwanted: list[tuple[str, list[str]]] = field(default_factory=list)


@dataclass(frozen=True)
class PDPlace:
    """Of a prefill rank: its door, and which life of the process it is."""

    address: str
    incarnation: str


def prompt_digest(request: Any, model: str) -> bytes | None:
    """What decides the content of a prompt's blocks: the model, tokens, LoRA, cache salt, multi-modal inputs. None: the
    prompt is not tokens."""
    tokens = request.prompt_token_ids
    if tokens is None or getattr(request, "prompt_embeds", None) is not None:
        return None
    lora = getattr(request, "lora_request", None)
    features = getattr(request, "mm_features", None) or ()
    said = [
        model,
        "" if lora is None else str(lora.lora_name),
        str(getattr(request, "cache_salt", None) or ""),
        *(str(feature.identifier) for feature in features),
    ]
    digest = hashlib.blake2b(digest_size=16, person=b"tm-vllm-prompt")
    for text in said:
        data = text.encode()
        digest.update(len(data).to_bytes(8, "little") + data)
    digest.update(np.asarray(tokens, "<i8").tobytes())
    return digest.digest()


def remote_of(params: dict[str, Any]) -> list[str]:
    """Doors of prefill's ranks: a list, or one address for a single rank. InvalidArgument if there is none."""
    remote = params.get("remote")
    found = [remote] if isinstance(remote, str) else list(remote or ())
    if not found or not all(isinstance(address, str) for address in found):
        raise tm.InvalidArgument(f'kv_transfer_params: "remote" is a list of host:port, not {remote!r}')
    return found
