"""Regions whose bytes are read where they lie, and the owner that waits for whoever does."""

from __future__ import annotations

import pytest
import torch

import torch_mooncake as tm


@pytest.mark.parametrize("transport", ["local", "shm"])
def test_a_leased_region_is_not_taken_back(transport: str) -> None:
    with tm.Engine(transports=(transport,)) as owner, tm.Engine(transports=(transport,)) as reader:
        memory = tm.empty(4096, torch.uint8).fill_(7)
        region = owner.register(memory, writable=False)
        remote = reader.connect(owner.listening[0]).open(region.descriptor())
        assert remote.transport == transport
        seen = torch.frombuffer(remote.lease(), dtype=torch.uint8)
        memory[5] = 9
        assert seen.tolist() == [7] * 5 + [9] + [7] * 4090
        with pytest.raises(tm.Busy):
            owner.deregister(region, 0.1)
        assert remote.lease() is None  # it is being taken back
        part = seen[10:20]
        del seen
        with pytest.raises(tm.Busy):
            owner.deregister(region, 0.1)
        del part
        owner.deregister(region, 10)


def test_bytes_of_another_host_are_not_leased() -> None:
    with tm.Engine(transports=("tcp",), host_id="a") as owner, tm.Engine(transports=("tcp",), host_id="b") as reader:
        region = owner.register(tm.empty(64, torch.uint8), writable=False)
        assert reader.connect(owner.addresses[0]).open(region.descriptor()).lease() is None
