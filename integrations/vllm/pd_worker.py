"""A worker's side of the PD connector: an engine, and what sends and receives on it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch_mooncake as tm
from torch_mooncake.integrations.vllm.caches import layer_numbers, paged
from torch_mooncake.integrations.vllm.pd_decode import Decode
from torch_mooncake.integrations.vllm.pd_orders import PDMeta, PDPlace
from torch_mooncake.integrations.vllm.pd_prefill import Prefill
from torch_mooncake.integrations.vllm.settings import Settings

if TYPE_CHECKING:
    import torch


class PDWorker:
    """Of one tensor-parallel rank; a producer has a `Prefill`, a consumer a `Decode`. Used by the worker's thread."""

    def __init__(self, settings: Settings, rank: int, *, sends: bool, receives: bool) -> None:
        self._settings, self._rank, self._sends, self._receives = settings, rank, sends, receives
        self._engine: tm.Engine | None = None
        self._numbers: dict[str, int] = {}
        self.prefill: Prefill | None = None
        self.decode: Decode | None = None

    def register(self, caches: Mapping[str, torch.Tensor]) -> None:
        """vLLM's caches, of which layers, block size and heads are compared with every peer's."""
        kv = paged(caches, self._settings)
        self._numbers = layer_numbers(caches)
        extra = self._settings.extra
        host, token = str(extra.get("host", "127.0.0.1")), tm.Config.from_env().token
        bracketed = f"[{host}]" if ":" in host else host
        options: dict[str, Any] = {"transports": tuple(extra["transports"])} if "transports" in extra else {}
        name = f"vllm-{'prefill' if self._sends else 'decode'}-{self._rank}"
        self._engine = tm.Engine(f"tcp://{bracketed}:0", name=name, **options)
        if self._sends:
            self.prefill = Prefill(self._engine, kv, self._rank, self._settings, token)
        if self._receives:
            self.decode = Decode(self._engine, kv, self._rank, self._settings, token)

    def place(self) -> PDPlace | None:
        """Where decode asks for what this rank has; None if it sends nothing."""
        return None if self.prefill is None else self.prefill.place

    def preempted(self, meta: PDMeta) -> None:
        if self.prefill is not None:
            self.prefill.preempt(meta)

    def begin(self, meta: PDMeta) -> None:
        """Before the step's first layer."""
        if self.prefill is not None:
            self.prefill.begin(meta)

    def layer(self, name: str) -> None:
        """A layer of the step is computed. Layers that share their cache with an earlier one have nothing to send."""
        if self.prefill is not None:
            self.prefill.layer(self._numbers[name])

    def load(self, meta: PDMeta) -> None:
        if self.decode is not None:
            self.decode.begin(meta.receives)
            self.decode.cancel(meta.cancelled)
            self.decode.unwanted(meta.unwanted)
        if self.prefill is not None:
            self.prefill.heed(meta)

    def end(self) -> None:
        """After the step's last layer."""
        if self.prefill is not None:
            self.prefill.end()

    def results(self, finished: set[str]) -> tuple[set[str], set[str]]:
        """(requests whose blocks are free, requests whose blocks are in place or have failed)."""
        sent = set() if self.prefill is None else self.prefill.sent(finished)
        return sent, set() if self.decode is None else self.decode.received()

    def failed_blocks(self) -> set[int]:
        return set() if self.decode is None else self.decode.failed_blocks()

    def close(self) -> None:
        for side in (self.prefill, self.decode):
            if side is not None:
                side.close()
        self.prefill = self.decode = None
        if self._engine is not None:
            self._engine.close()
