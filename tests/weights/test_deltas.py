"""What has changed, in the place of the version: the same bits as in full, in few bytes; in full where it must be."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from processes import Child, eventually
from safetensors import torch as safetensors
from test_direct import same, tensor_parallel

import torch_mooncake as tm
from torch_mooncake import weights
from torch_mooncake.weights import Fp8Blocks, Layout, Place, Publisher, Subscriber
from torch_mooncake.weights.board import VERSION

SIZE = 1 << 20  # elements of a tensor: bfloat16, 2 MiB
COUNT = 4
NBYTES = COUNT * SIZE * 2


def tensors(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {f"w{i}": torch.randn(SIZE, generator=generator).bfloat16() for i in range(COUNT)}


def step_of(of: dict[str, torch.Tensor], seed: int, share: float = 0.02) -> None:
    """An optimiser's step: a share of the elements is another one."""
    generator = torch.Generator().manual_seed(seed)
    for tensor in of.values():
        if tensor.numel():
            flat = tensor.view(-1)
            chosen = torch.rand(flat.shape, generator=generator) < share
            flat[chosen] = torch.randn(int(chosen.sum()), generator=generator).to(flat.dtype)


class Trainer:
    """On a host of its own, as all of these are."""

    def __init__(self, opened: Callable[[Any], Any], mine: dict[str, torch.Tensor], **options: Any) -> None:
        self.engine = opened(tm.Engine(transports=("tcp",), name="trainer", host_id="trainer"))
        self.tensors = mine
        self.publisher = opened(Publisher("policy", mine, engine=self.engine, place=Place("trainer"), **options))

    def sent(self) -> int:
        return int(self.engine.stats()["bytes_sent"].get("tcp", 0))


class Worker:
    def __init__(self, opened: Callable[[Any], Any], like: dict[str, torch.Tensor], name: str, **options: Any) -> None:
        self.engine = opened(tm.Engine(transports=("tcp",), name=name, host_id=name))
        self.tensors = {key: torch.zeros_like(tensor) for key, tensor in like.items()}
        options.setdefault("patience_s", 60)
        self.subscriber = opened(Subscriber("policy", self.tensors, engine=self.engine, place=Place(name), **options))

    def update(self) -> weights.Update:
        update: weights.Update = self.subscriber.update(timeout=60)
        return update


@pytest.mark.parametrize("flip", ["copy", "swap"])
def test_the_same_bits_in_few_bytes(opened, flip):
    """Two workers, one a relay: the trainer sends what has changed once."""
    trainer = Trainer(opened, tensors(0))
    workers = [Worker(opened, trainer.tensors, f"w{i}", flip=flip) for i in range(2)]
    for step in range(1, 5):
        before = trainer.sent()
        trainer.publisher.publish(step=step)
        for worker in workers:
            update = worker.update()
            assert (update.step, update.nbytes) == (step, NBYTES)
            assert same(worker.tensors, trainer.tensors)
            progress = worker.subscriber.progress
            assert progress.delta_nbytes == update.delta_nbytes
            if step == 1:
                assert (update.delta_nbytes, progress.full_nbytes) == (0, NBYTES)
            else:
                assert 0 < update.delta_nbytes <= 0.035 * NBYTES
                assert progress.full_nbytes == 0
        if step > 1:
            assert trainer.publisher.delta_nbytes == update.delta_nbytes
            assert trainer.sent() - before < 0.035 * NBYTES + (1 << 20)  # and boards
        step_of(trainer.tensors, step)


def test_on_one_host_all_bytes_are_quicker(opened):
    trainer, worker = tensors(0), tensors(1)
    publisher, subscriber = opened(Publisher("policy", trainer)), opened(Subscriber("policy", worker))
    for step, mode in enumerate(("auto", "auto", "delta", "full", "delta")):
        publisher.publish(step=step, mode=mode)
        update = subscriber.update(timeout=30)
        assert same(worker, trainer)
        assert (update.delta_nbytes > 0) == (mode == "delta")
        assert (publisher.delta_nbytes > 0) == (mode == "delta")
        step_of(trainer, step)
    with pytest.raises(tm.InvalidArgument, match="not 'half'"):
        publisher.publish(mode="half")


def test_too_much_has_changed(opened):
    """Of one tensor nearly all, of the others little: chunk by chunk. Then of all: as if there were no deltas."""
    trainer = Trainer(opened, tensors(0))
    worker = Worker(opened, trainer.tensors, "w0")
    trainer.publisher.publish()
    worker.update()
    step_of(trainer.tensors, 1)
    trainer.tensors["w2"].normal_()
    trainer.publisher.publish()
    update = worker.update()
    progress = worker.subscriber.progress
    assert same(worker.tensors, trainer.tensors)
    assert SIZE * 2 <= progress.full_nbytes < NBYTES
    assert 0 < update.delta_nbytes < 0.035 * NBYTES
    for tensor in trainer.tensors.values():
        tensor.normal_()
    trainer.publisher.publish()
    assert worker.update().delta_nbytes == 0
    assert same(worker.tensors, trainer.tensors)


def test_who_has_another_version_gets_all_bytes(opened, monkeypatch):
    """One that missed the base, and one that comes late; both take deltas after that."""
    trainer = Trainer(opened, tensors(0))
    first, missed = (Worker(opened, trainer.tensors, f"w{i}") for i in range(2))
    trainer.publisher.publish(step=1)
    for worker in (first, missed):
        assert worker.update().step == 1
    attempt = missed.subscriber._attempt
    monkeypatch.setattr(
        missed.subscriber, "_attempt", lambda head: time.sleep(0.01) if head.version == 2 else attempt(head)
    )
    step_of(trainer.tensors, 1)
    trainer.publisher.publish(step=2)
    assert first.update().delta_nbytes > 0
    late = Worker(opened, trainer.tensors, "late", patience_s=1.0)  # it may be put behind the one that missed it
    update = late.update()
    assert (update.step, update.delta_nbytes) == (2, 0)
    step_of(trainer.tensors, 2)
    trainer.publisher.publish(step=3)
    for worker in (first, missed, late):
        update = worker.update()
        assert (update.step, update.delta_nbytes > 0) == (3, worker is not missed)
        assert same(worker.tensors, trainer.tensors)
    step_of(trainer.tensors, 3)
    trainer.publisher.publish(step=4)
    for worker in (first, missed, late):
        assert worker.update().delta_nbytes > 0
        assert same(worker.tensors, trainer.tensors)


def test_a_damaged_blob_is_taken_in_full(opened, monkeypatch):
    trainer = Trainer(opened, tensors(0))
    worker = Worker(opened, trainer.tensors, "w0")
    trainer.publisher.publish()
    worker.update()
    step_of(trainer.tensors, 1)
    make = trainer.publisher._maker._area.make

    def damaged(slot: int, *rest: Any) -> Any:
        blob = make(slot, *rest)
        trainer.publisher._area.bytes(slot, blob)[100] ^= 1
        return blob

    monkeypatch.setattr(trainer.publisher._maker._area, "make", damaged)
    trainer.publisher.publish()
    assert worker.update().nbytes == NBYTES
    assert same(worker.tensors, trainer.tensors)
    progress = worker.subscriber.progress
    assert progress.full_nbytes == NBYTES
    assert progress.delta_nbytes > 0
    monkeypatch.undo()
    step_of(trainer.tensors, 2)
    trainer.publisher.publish()
    assert worker.update().delta_nbytes > 0
    assert worker.subscriber.progress.full_nbytes == 0
    assert same(worker.tensors, trainer.tensors)


def test_a_base_that_is_another_one_is_noticed_by_the_checksums(opened):
    """Somebody wrote into the memory that holds the base: what is made of it has wrong checksums, and comes in full."""
    trainer = Trainer(opened, tensors(0))
    worker = Worker(opened, trainer.tensors, "w0")
    trainer.publisher.publish()
    worker.update()
    slot = worker.subscriber._memory.board.header[:, VERSION].tolist().index(1)
    worker.subscriber._arena.views(slot)["w1"][5] = 77
    step_of(trainer.tensors, 1)
    trainer.publisher.publish()
    worker.update()
    assert same(worker.tensors, trainer.tensors)
    assert 0 < worker.subscriber.progress.full_nbytes < NBYTES


def test_on_one_host_they_are_compared_too(opened):
    """With flip="swap" the base is the model's own tensors, and something wrote to them."""
    trainer, worker = tensors(0), tensors(1)
    publisher, subscriber = opened(Publisher("policy", trainer)), opened(Subscriber("policy", worker, flip="swap"))
    publisher.publish()
    subscriber.update(timeout=30)
    worker["w1"][5] = 77
    step_of(trainer, 1)
    publisher.publish(mode="delta")
    assert subscriber.update(timeout=30).delta_nbytes > 0
    assert same(worker, trainer)


def test_odd_tensors(opened):
    """0-d, empty, tied, strided, of other element sizes and shared out otherwise on both sides."""
    shared = torch.randn(300, 70)
    mine = {
        "scalar": torch.tensor(1.5), "none": torch.zeros(0, 3), "a": shared, "tied": shared, "i": torch.arange(9000),
        "t": torch.randn(64, 32).t(), "d": torch.randn(3000, dtype=torch.float64), "b": torch.rand(5000) < 0.5,
    }  # fmt: skip
    trainer = Trainer(opened, mine)
    worker = Worker(opened, mine, "w0")
    for step in range(3):
        trainer.publisher.publish(mode="delta")
        assert (worker.update().delta_nbytes > 0) == (step > 0)
        assert same(worker.tensors, mine)
        mine["scalar"].add_(1)
        mine["a"][3, step] = 9.0
        mine["b"][17] = not mine["b"][17]
        mine["t"][2, 2] += 1


@pytest.mark.parametrize(("have", "want"), [(2, 1), (1, 2)])
def test_from_one_tensor_parallel_degree_to_another(opened, have, want):
    wholes = {
        "embed": torch.randn(21, 8), "o": torch.randn(8, 16), "norm": torch.randn(8),
        **{n: torch.randn(16, 8) for n in "qkv"}, **{f"expert.{e}": torch.randn(8, 12) for e in range(8)},
    }  # fmt: skip
    trainers = []
    for at in range(have):
        mine, layout = tensor_parallel(wholes, have, at)
        trainers.append((opened(Publisher("policy", mine, layout=layout, rank=at, world=have)), mine))
    workers = []
    for at in range(want):
        mine, layout = tensor_parallel(wholes, want, at)
        workers.append((opened(Subscriber("policy", mine, layout=layout, place=Place("other", at))), mine))
    for step in range(3):
        for at, (_, mine) in enumerate(trainers):
            for name, value in tensor_parallel(wholes, have, at)[0].items():
                mine[name].copy_(value)
        publish = {"step": step, "mode": "delta"}
        threads = [threading.Thread(target=publisher.publish, kwargs=publish) for publisher, _ in trainers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        deltas = 0
        for at, (subscriber, mine) in enumerate(workers):
            deltas += subscriber.update(timeout=30).delta_nbytes
            assert same(mine, tensor_parallel(wholes, want, at)[0])
        assert (deltas > 0) == (step > 0)
        wholes["expert.5"][2, 3] += 1
        wholes["q"][0, 0] += 1
        wholes["embed"][20, 7] += 1


def test_quantised_weights(opened):
    """What changes in FP8 is less than what changes in the trainer."""
    mine = {"w": torch.randn(512, 2048)}
    trainer = Trainer(opened, mine, layout=Layout(quantise={"w": Fp8Blocks()}))
    served = {"w": torch.zeros(512, 2048, dtype=torch.float8_e4m3fn), "w_scale_inv": torch.zeros(4, 16)}
    worker = Worker(opened, served, "w0")
    for step in range(2):
        trainer.publisher.publish(step=step)
        update = worker.update()
        q, scales = tm.ops.quantize_blocks(mine["w"])
        assert torch.equal(worker.tensors["w"].view(torch.uint8), q.view(torch.uint8))
        assert torch.equal(worker.tensors["w_scale_inv"], scales)
        assert (update.delta_nbytes > 0) == (step > 0)
        mine["w"][::50].mul_(1.01)


WORKER = """
import torch, torch_mooncake as tm
from torch_mooncake import weights
torch.set_num_threads(1)
tm.init()
engine = tm.Engine(transports=("tcp",), name=name, host_id=name)
mine = {f"w{i}": torch.zeros(size, dtype=torch.bfloat16) for i in range(count)}
subscriber = weights.Subscriber("policy", mine, engine=engine, place=weights.Place(name), flip=flip, patience_s=60)
"""
UPDATE = """
update = subscriber.update(timeout=60)
result = update.step, update.delta_nbytes, [int(t.view(torch.int16).long().sum()) for t in mine.values()]
"""


def test_between_processes(child: Callable[..., Child], opened):
    trainer = Trainer(opened, tensors(0))
    workers = [child() for _ in range(2)]
    for i, worker in enumerate(workers):
        worker(WORKER, name=f"w{i}", flip=("copy", "swap")[i], size=SIZE, count=COUNT)
    for step in range(1, 4):
        trainer.publisher.publish(step=step)
        sums = [int(tensor.view(torch.int16).long().sum()) for tensor in trainer.tensors.values()]
        for worker in workers:
            got, delta_nbytes, theirs = worker(UPDATE)
            assert got == step
            assert theirs == sums
            assert (delta_nbytes > 0) == (step > 1)
        step_of(trainer.tensors, step)
    for worker in workers:
        worker("subscriber.close(); engine.close(); tm.close()")


def test_versions_that_follow_each_other_at_once(opened):
    """Deltas are being made, and taken, while the next version comes: what arrives is always one version, whole."""
    trainer = Trainer(opened, tensors(0))
    worker = Worker(opened, trainer.tensors, "w0", flip="swap")
    seen = 0
    known = {}
    for step in range(1, 16):
        trainer.publisher.publish(step=step)
        known[step] = {name: tensor.clone() for name, tensor in trainer.tensors.items()}
        if step % 4 == 0:
            assert eventually(lambda: all(trainer.publisher.delivered().values()))
        if (update := worker.subscriber.try_update()) is not None:
            assert same(worker.tensors, known[update.step])
            seen = update.step
        step_of(trainer.tensors, step, 0.01)
    while seen < 15:
        seen = worker.update().step
        assert same(worker.tensors, known[seen])


def test_checkpoints_on_disk(opened, tmp_path):
    """One after the other: what has changed between two files."""
    mine = tensors(0)
    safetensors.save_file(mine, tmp_path / "1.safetensors")
    step_of(mine, 1)
    safetensors.save_file(mine, tmp_path / "2.safetensors")
    publisher = opened(Publisher("policy", weights.Checkpoint(tmp_path / "1.safetensors")))
    worker = {name: torch.zeros_like(tensor) for name, tensor in mine.items()}
    subscriber = opened(Subscriber("policy", worker))
    publisher.publish(mode="delta")
    assert subscriber.update(timeout=30).delta_nbytes == 0
    publisher.publish(source=weights.Checkpoint(tmp_path / "2.safetensors"), mode="delta")
    assert 0 < subscriber.update(timeout=30).delta_nbytes < 0.035 * NBYTES
    assert same(worker, mine)
