"""Encoder outputs in the pool: what a vision encoder made of an input is made once."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

import torch

import torch_mooncake as tm
from torch_mooncake.integrations.vllm.settings import logger


@dataclass
class ECMeta:
    """Of one step: outputs that the workers take into their encoder cache, by identifier."""

    loads: dict[str, torch.Tensor] = field(default_factory=dict)


@dataclass
class _Fetch:
    output: Future[torch.Tensor | None]
    until: float
    users: set[str] = field(default_factory=set)  # requests


class EncoderOutputs:
    """Of one model and tenant. An output is a sealed object ``vllm-ec/<tenant>/<model>/<dtype>/<identifier>``, a tensor
    [embeddings, hidden size]; vLLM's identifier is a hash of the input, with the tower's LoRA. dtype: the model's."""

    def __init__(self, pool: tm.Pool, model: str, tenant: str, timeout_s: float, dtype: str = "any") -> None:
        self._pool, self.timeout_s = pool, timeout_s
        self._prefix = "/".join(["vllm-ec", *(quote(part, safe="") for part in (tenant, model, dtype)), ""])

    def key(self, identifier: str) -> str:
        return self._prefix + quote(identifier, safe="")

    def put(self, identifier: str, output: torch.Tensor) -> bool:
        """Whether it is there now. When it is not, that is logged: whoever needs it makes it again."""
        try:
            self._pool.put(
                self.key(identifier), output.detach().cpu().contiguous(), sealed=True, timeout=self.timeout_s
            )
        except tm.Error as error:
            logger.warning("an encoder output was not stored: %s: %s", type(error).__name__, error)
            return False
        return True

    def get(self, identifier: str) -> torch.Tensor | None:
        """None: it is not there, or cannot be had (which is logged)."""
        try:
            found = self._pool.get(self.key(identifier), timeout=self.timeout_s)
        except tm.KeyNotFound:
            return None
        except tm.Error as error:
            logger.warning("an encoder output was not loaded: %s: %s", type(error).__name__, error)
            return None
        if not isinstance(found, torch.Tensor):
            logger.warning("%s holds no encoder output but a %s", self.key(identifier), type(found).__name__)
            return None
        return found

    def close(self) -> None:
        self._pool.close()


class Fetcher:
    """The scheduler's side: outputs come on threads while their requests wait, no longer than ``timeout_s``. One that
    has come is handed to the workers with the step that needs it, so that nothing can fail there."""

    def __init__(self, outputs: EncoderOutputs) -> None:
        self._outputs = outputs
        self._threads = ThreadPoolExecutor(4, "tm-vllm-encoder")
        self._fetches: dict[str, _Fetch] = {}
        self._meta = ECMeta()

    def available(self, request: Any, computed: int) -> bool:
        """Whether it is known of all inputs behind ``computed`` tokens that they are here, or nowhere."""
        now, known = time.monotonic(), True
        for index, feature in enumerate(request.mm_features):
            if feature.mm_position.offset + feature.mm_position.length <= computed:
                continue
            name = feature.identifier
            if (fetch := self._fetches.get(name)) is None:
                begun = self._threads.submit(self._fetch, name, request.get_num_encoder_embeds(index))
                fetch = self._fetches[name] = _Fetch(begun, now + self._outputs.timeout_s)
            fetch.users.add(request.request_id)
            known = known and (fetch.output.done() or now >= fetch.until)
        return known

    def _fetch(self, name: str, count: int) -> torch.Tensor | None:
        try:
            found = self._outputs.get(name)
        except Exception as error:  # whatever it is, the scheduler goes on, and the input is encoded
            logger.warning("an encoder output was not loaded: %s: %s", type(error).__name__, error)
            return None
        if found is not None and (found.dim() != 2 or found.shape[0] != count):
            logger.warning("an encoder output is %s, not of %d embeddings: not used", tuple(found.shape), count)
            return None
        return found

    def has(self, name: str) -> bool:
        return self._here(name) is not None

    def _here(self, name: str) -> torch.Tensor | None:
        fetch = self._fetches.get(name)
        return fetch.output.result() if fetch is not None and fetch.output.done() else None

    def allocated(self, request: Any, index: int) -> None:
        """vLLM has room for an input's output: the workers get it with the next step if it is here."""
        name = request.mm_features[index].identifier
        if (found := self._here(name)) is not None:
            self._meta.loads[name] = found

    def build(self) -> ECMeta:
        meta, self._meta = self._meta, ECMeta()
        return meta

    def finished(self, request: Any) -> None:
        """Outputs that no other request waits for are let go."""
        for name in {feature.identifier for feature in request.mm_features or ()}:
            if (fetch := self._fetches.get(name)) is not None:
                fetch.users.discard(request.request_id)
                if not fetch.users:
                    del self._fetches[name]

    def close(self) -> None:
        self._threads.shutdown(wait=True, cancel_futures=True)
        self._outputs.close()


def take(loads: Mapping[str, torch.Tensor], cache: dict[str, torch.Tensor], device: torch.device) -> Iterable[str]:
    """Puts outputs into a worker's encoder cache; those that were not there."""
    fresh = [name for name in loads if name not in cache]
    for name in fresh:
        cache[name] = loads[name].to(device)
    return fresh
