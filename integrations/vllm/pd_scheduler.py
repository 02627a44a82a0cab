"""The scheduler's side of the PD connector: which requests send their prompt's blocks, and which receive them."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch_mooncake as tm
from torch_mooncake.integrations.vllm.pd_orders import PDMeta, PDPlace, Receive, Send, prompt_digest, remote_of
from torch_mooncake.integrations.vllm.settings import Settings, logger
from torch_mooncake.integrations.vllm.steps import Steps


@dataclass
class _Sending:
    """A prefill request."""

    transfer_id: str
    digest: bytes
    tokens: int
    ready: int = 0  # blocks that workers know of
    told: bool = False
    dropped: bool = False


class PDScheduler:
    """Used by the scheduler's thread. Nothing here waits.

    Prefill: ``kv_transfer_params`` with ``do_remote_decode`` (and a ``transfer_id``, or one is made). The answer's have
    what the decode engine needs. Decode: with ``do_remote_prefill``, ``transfer_id`` and ``remote``. Blocks of a
    prefill request are held until workers say that they are sent, or not wanted any more.
    """

    def __init__(self, settings: Settings, *, sends: bool, receives: bool) -> None:
        self._settings, self._may_send, self._may_receive = settings, sends, receives
        self._places: list[PDPlace] = []
        self._sending: dict[str, _Sending] = {}
        self._asked_for: dict[str, int] = {}  # decode requests: blocks that are here already
        self._receiving: set[str] = set()
        self._done: set[str] = set()  # decode requests that have had their transfer, however it ended
        self._steps = Steps()
        self._meta = PDMeta()
        if receives and not settings.recompute:
            logger.warning("kv_load_failure_policy is not 'recompute': a request whose prefill engine is lost fails")

    def places(self, places: Mapping[int, PDPlace]) -> None:
        """Of this engine's ranks."""
        self._places = [places[rank] for rank in sorted(places)]

    def _params(self, request: Any) -> dict[str, Any]:
        return getattr(request, "kv_transfer_params", None) or {}

    def matched(self, request: Any, computed: int) -> tuple[int | None, bool]:
        """(tokens of the prompt behind ``computed``, whether they come meanwhile)."""
        params = self._params(request)
        if not self._may_receive or not params.get("do_remote_prefill") or request.request_id in self._done:
            return 0, False
        count = request.num_prompt_tokens - computed
        if count <= 0 or prompt_digest(request, self._settings.model) is None:
            return 0, False
        try:
            remote_of(params)
        except tm.InvalidArgument as error:
            logger.warning("%s is computed here: %s", request.request_id, error)
            return 0, False
        self._asked_for[request.request_id] = computed // self._settings.block_size
        return count, True

    def allocated(self, request: Any, blocks: list[int], external: int) -> None:
        """The request has ``blocks``; ``external`` tokens of them are to come."""
        name, params = request.request_id, self._params(request)
        if external and name in self._asked_for:
            skip = self._asked_for.pop(name)
            total = -(-request.num_prompt_tokens // self._settings.block_size)
            digest = prompt_digest(request, self._settings.model)
            assert digest is not None
            self._done.add(name)
            self._receiving.add(name)
            self._meta.receives.append(
                Receive(
                    name,
                    str(params.get("transfer_id", "")),
                    digest,
                    blocks[skip:total],
                    skip,
                    remote_of(params),
                    [str(each) for each in params.get("incarnations") or ()],
                )
            )
        elif self._may_send and params.get("do_remote_decode") and name not in self._sending:
            digest = prompt_digest(request, self._settings.model)
            if digest is None:
                logger.warning("%s is not sent: its prompt is not tokens", name)
                return
            transfer = str(params.get("transfer_id") or uuid.uuid4().hex)
            self._sending[name] = _Sending(transfer, digest, request.num_prompt_tokens)
            self._steps.follow(name)

    def build(self, output: Any) -> PDMeta:
        """What the workers are told with this step."""
        meta, self._meta = self._meta, PDMeta()
        for name in output.preempted_req_ids or ():
            if (sending := self._sending.get(name)) is not None and sending.told and not sending.dropped:
                sending.dropped = True
                meta.dropped[sending.transfer_id] = "the prefill request was preempted"
                meta.preempted.append(sending.transfer_id)
        size = self._settings.block_size
        for name, progress in self._steps.scheduled(output):
            sending = self._sending[name]
            total = -(-sending.tokens // size)
            ready = total if progress.computed >= sending.tokens else progress.computed // size
            if sending.dropped or ready <= sending.ready:
                continue
            sending.ready, sending.told = ready, True
            blocks = progress.blocks[:ready]
            meta.sends.append(Send(name, sending.transfer_id, sending.digest, blocks, ready, total))
        return meta

    def received(self, names: set[str]) -> None:
        """These have ended on all ranks."""
        self._receiving -= names

    def finished(self, request: Any) -> tuple[bool, dict[str, Any] | None]:
        """(whether workers still use the request's blocks, what the answer says)."""
        name, params = request.request_id, self._params(request)
        self._asked_for.pop(name, None)
        self._steps.forget(name)
        if name in self._receiving:
            self._receiving.discard(name)
            self._meta.cancelled.append(name)
        elif self._may_receive and params.get("do_remote_prefill") and name not in self._done:
            self._unwanted(params)
        self._done.discard(name)
        sending = self._sending.pop(name, None)
        if sending is None:
            return False, None
        whole = sending.ready * self._settings.block_size >= sending.tokens
        if not sending.told or sending.dropped or not whole or _aborted(request):
            if not sending.dropped:
                self._meta.dropped[sending.transfer_id] = "the prefill request ended early"
            return sending.told, None
        return True, {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "transfer_id": sending.transfer_id,
            "remote": [place.address for place in self._places],
            "incarnations": [place.incarnation for place in self._places],
        }

    def _unwanted(self, params: dict[str, Any]) -> None:
        """A decode request that ends before it has had blocks: prefill need not keep its own."""
        try:
            self._meta.unwanted.append((str(params.get("transfer_id", "")), remote_of(params)))
        except tm.InvalidArgument:
            return  # nobody who could be told

    @property
    def pending(self) -> bool:
        """Whether there is something to be told to workers though no request may be left."""
        return bool(self._meta.dropped or self._meta.cancelled or self._meta.unwanted)


def _aborted(request: Any) -> bool:
    return getattr(getattr(request, "status", None), "name", "") in ("FINISHED_ABORTED", "FINISHED_ERROR")
