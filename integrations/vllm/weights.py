"""vLLM's weight transfer on torch_mooncake: trainers publish, the workers of all engines follow.

In the engine: ``weight_transfer_config={"backend": "torch_mooncake"}``. vLLM finds the backend where torch_mooncake is
installed: it is an entry point of its plug-ins.

In every rank of the trainer:

    from torch_mooncake.integrations.vllm.weights import ShardSource, TrainerInit
    engine = WeightTransferTrainerFactory.trainer_init(
        TrainerInit("policy", world=4, rank=rank), client=client, source=ShardSource(fsdp_model))
    engine.send_weights()                  # after each step

Workers bring a version into memory of their own while the engine serves; only when all of it is there does the model
change, through vLLM's layerwise reload. So an update that fails on the way leaves the model as it was. What vLLM calls
packing is the planner's work: small tensors travel together, in chunks of 1 to 16 MiB.

Importing this module registers the backend. It needs vLLM.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar

import torch
from vllm.distributed.weight_transfer.base import (
    ModuleSource,
    TrainerInitInfo,
    TrainerWeightTransferEngine,
    VLLMWeightSyncClient,
    WeightSource,
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory, WeightTransferTrainerFactory

import torch_mooncake as tm
from torch_mooncake import weights

BACKEND = "torch_mooncake"


@dataclass
class InitInfo(WeightTransferInitInfo):
    """What a worker is told once. ``tensors``: (name, dtype, shape) as the checkpoint has them. ``address``, ``pool``:
    where trainer and workers meet, as for ``tm.Pool``; a token, if one is needed, is TM_TOKEN of the worker."""

    name: str
    tensors: list[list[Any]]
    address: str | None = None
    pool: str | None = None


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """``version``: the one that all workers shall have."""

    version: int
    timeout_s: float = 300.0


class MooncakeWeightTransferEngine(WeightTransferEngine[InitInfo, UpdateInfo]):
    """A worker's side. It has two copies of the checkpoint's tensors in shared memory, of which other workers read."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False  # a draft model would be another name

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._opened = contextlib.ExitStack()
        self._subscriber: weights.Subscriber | None = None
        self._tensors: dict[str, torch.Tensor] = {}
        self._reloading = False

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """PoolUnavailable if there is no pool at the address. Again: for another trainer."""
        self.shutdown()
        self._tensors = {
            name: torch.empty(tuple(shape), dtype=getattr(torch, dtype)) for name, dtype, shape in init_info.tensors
        }
        with contextlib.ExitStack() as opened:
            pool = opened.enter_context(tm.Pool(init_info.address, pool=init_info.pool))
            self._subscriber = opened.enter_context(
                weights.Subscriber(init_info.name, self._tensors, flip="swap", pool=pool)
            )
            self._opened = opened.pop_all()

    def start_weight_update(self) -> None:
        """Nothing: until all of the version is here, the model stays as it is."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Waits for the version and loads it. The model is as it was after DeadlineExceeded, PeerLost, LayoutMismatch,
        and Cancelled (another version is current by now: workers of one engine must not differ). Not after what the
        model's ``load_weights`` raises: it has some of the version's weights until another update succeeds."""
        from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        if self._subscriber is None:
            raise tm.InvalidArgument("init_weight_transfer_engine comes before update_weights")
        deadline = time.monotonic() + update_info.timeout_s
        while self._subscriber.version < update_info.version:
            self._subscriber.update(timeout=max(0.0, deadline - time.monotonic()))
        if self._subscriber.version != update_info.version:
            raise tm.Cancelled(
                f"version {update_info.version} of {self._subscriber.name!r} was asked for, and "
                f"{self._subscriber.version} has come: the trainer went on before all workers had it"
            )
        initialize_layerwise_reload(self.model)
        self._reloading = True
        with disable_mtp_completeness_check():
            self.model.load_weights(iter(self._tensors.items()))

    def finish_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        if self._reloading:
            finalize_layerwise_reload(self.model, self.model_config)
            self._reloading = False

    def shutdown(self) -> None:
        self._subscriber, self._tensors = None, {}
        self._opened.close()


class ShardSource(ModuleSource):
    """A module whose shards are published where they are: no rank gathers anything. Its parameters are DTensors (FSDP2,
    ``parallelize_module``), or plain, and then each is whole on this rank."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__(module)
        self.module = module


@dataclass
class TrainerInit(TrainerInitInfo):
    """``world``: ranks of the trainer, which all call ``trainer_init`` and ``send_weights``. ``timeout_s``: for one
    update. ``address`` and ``pool``: as for ``tm.Pool``; the address must be one that the workers reach, too."""

    backend: ClassVar[str] = BACKEND
    name: str = "policy"
    world: int = 1
    address: str | None = None
    pool: str | None = None
    timeout_s: float = field(default=300.0)


class MooncakeTrainerWeightTransferEngine(TrainerWeightTransferEngine[TrainerInit]):
    """A trainer rank's side. A ``ShardSource``'s shards are published as they lie. Any other source is iterated, and
    the ranks publish what they hold (``held_names``), or equal parts of what all of them have."""

    init_info_cls = TrainerInit

    def __init__(
        self, *, client: VLLMWeightSyncClient, source: WeightSource, info: TrainerInit, is_sender: bool = True
    ) -> None:
        super().__init__(client=client, source=source, is_sender=is_sender)
        self._info = info
        published: Mapping[str, torch.Tensor] | weights.Stream
        if isinstance(source, ShardSource):
            published = dict(source.module.named_parameters())
        else:
            published = self._stream(source, info)
        with contextlib.ExitStack() as opened:
            pool = opened.enter_context(tm.Pool(info.address, pool=info.pool))
            self.publisher = opened.enter_context(
                weights.Publisher(info.name, published, rank=info.rank, world=info.world, pool=pool)
            )
            self._opened = opened.pop_all()
        self.version = self.publisher.version  # that the workers have been told of

    @staticmethod
    def _stream(source: WeightSource, info: TrainerInit) -> weights.Stream:
        metas = source.metadata()
        held = source.held_names()
        if held is None:
            sizes = [math.prod(meta.shape) * meta.dtype.itemsize for meta in metas]
            total, at, held = max(1, sum(sizes)), 0, []
            for meta, nbytes in zip(metas, sizes, strict=True):
                if min(info.world - 1, at * info.world // total) == info.rank:
                    held.append(meta.name)
                at += nbytes
        return weights.Stream([(m.name, m.shape, m.dtype) for m in metas], lambda: iter(source), held=held)

    @classmethod
    def trainer_init(
        cls, init_info: TrainerInit, *, client: VLLMWeightSyncClient, source: WeightSource | None = None
    ) -> MooncakeTrainerWeightTransferEngine:
        """InvalidArgument without a source. Otherwise what ``tm.Pool``, ``weights.Publisher`` and the client raise."""
        if source is None:
            raise tm.InvalidArgument("weights are published from a WeightSource: ShardSource(model), for one")
        engine = cls(client=client, source=source, info=init_info, is_sender=init_info.is_sender)
        metas = source.metadata()  # by all ranks: it may be a collective
        if engine.is_sender:
            tensors = [[m.name, str(m.dtype).removeprefix("torch."), list(m.shape)] for m in metas]
            info = InitInfo(init_info.name, tensors, init_info.address, init_info.pool)
            client.init_weight_transfer_engine(asdict(info))
        return engine

    def send_weights(self, step: int | None = None) -> None:
        """Publishes the tensors as they are now and, on rank 0, has every worker take them. DeadlineExceeded, or what
        the client raises: a worker that could not has the weights that it had, others may have the new ones, and the
        next call goes on from there."""
        published = self.publisher.publish(step=step, timeout=self._info.timeout_s)
        if not self.is_sender:
            return
        self.client.start_weight_update()
        try:
            self.client.update_weights(asdict(UpdateInfo(published.serial, self._info.timeout_s)))
        except BaseException:
            with contextlib.suppress(Exception):  # workers that have failed have ended their session, and say so
                self.client.finish_weight_update()
            raise
        self.client.finish_weight_update()
        self.version = published.serial

    def shutdown(self) -> None:
        self._opened.close()


def register() -> None:
    """Makes the backend known to vLLM's factories. May be called again."""
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, MooncakeWeightTransferEngine)
        WeightTransferTrainerFactory.register_engine(BACKEND, MooncakeTrainerWeightTransferEngine)


register()
