"""What the engines count against what the plan says: each rank receives its part, the trainers send each byte once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import torch_mooncake as tm
from torch_mooncake.weights import Layout, Part, Place, Publisher, Rule, Split, Subscriber, describe
from torch_mooncake.weights.plan import plan

COUNT, ROWS, COLUMNS = 6, 512, 1024


def layout(at: int, ranks: int) -> Layout:
    return Layout([Rule("w{i}", [Part("w{i}", (ROWS, -1), [Split("tp", 0)])])], {"tp": (at, ranks)})


def tensors(ranks: int, value: float) -> dict[str, torch.Tensor]:
    return {f"w{i}": torch.full((ROWS // ranks, COLUMNS), float(value)) for i in range(COUNT)}


def counted(engine: tm.Engine, what: str) -> int:
    return engine.stats()[what].get("tcp", 0)


def test_every_rank_receives_its_part_and_trainers_send_each_byte_once(opened: Callable[[Any], Any]):
    """Two trainer ranks that halve the tensors; three engines of two ranks, on a host each, and one that has it all."""
    hosts = ["t0", "t1", *(f"s{i // 2}" for i in range(6)), "all"]
    places = [Place(host, i) for i, host in enumerate(hosts)]
    engines = [opened(tm.Engine(transports=("tcp",), name=f"n{i}", host_id=h)) for i, h in enumerate(hosts)]
    trainers = [tensors(2, 0) for _ in range(2)]
    publishers = [
        opened(Publisher("p", trainers[i], layout=layout(i, 2), rank=i, world=2, engine=engines[i], place=places[i]))
        for i in range(2)
    ]
    splits = [(i % 2, 2) for i in range(6)] + [(0, 1)]
    workers = [tensors(ranks, -1) for _, ranks in splits]
    subscribers = [
        opened(Subscriber("p", mine, layout=layout(*split), engine=engines[i], place=places[i], patience_s=60))
        for i, (mine, split) in enumerate(zip(workers, splits, strict=True), 2)
    ]
    made = plan(
        [describe(mine, layout(i, 2)) for i, mine in enumerate(trainers)],
        [describe(mine, layout(*split)) for mine, split in zip(workers, splits, strict=True)],
        places,
        partial=True,
    )
    (sent, received), (_, copied) = made.traffic(), made.traffic(network=False)
    assert sent[:2].sum() == made.nbytes == COUNT * ROWS * COLUMNS * 4
    assert received[2:].sum() == 4 * made.nbytes  # once into each host
    assert copied.sum() == 0  # nobody else of its host wants the same
    for step in (1, 2):
        before = [(counted(engine, "bytes_sent"), counted(engine, "bytes_received")) for engine in engines]
        for mine in trainers:
            for tensor in mine.values():
                tensor.fill_(step)
        publish_all(publishers, step)
        for subscriber, mine in zip(subscribers, workers, strict=True):
            assert subscriber.update(timeout=60).step == step
            assert all(bool(tensor.eq(step).all()) for tensor in mine.values())
        looks = 0
        for i, subscriber in enumerate(subscribers, 2):
            taken = counted(engines[i], "bytes_received") - before[i][1]
            looked = subscriber.progress.bytes_looked
            assert received[i] <= taken <= received[i] + looked  # the last look may not have been answered
            looks += looked
        out = sum(counted(engine, "bytes_sent") - b for engine, (b, _) in zip(engines[:2], before, strict=False))
        assert made.nbytes <= out <= made.nbytes + looks


def publish_all(publishers: list[Publisher], step: int) -> None:
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(len(publishers)) as threads:
        list(threads.map(lambda publisher: publisher.publish(step=step), publishers))
