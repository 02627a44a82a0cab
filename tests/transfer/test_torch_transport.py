"""The adapter to torch.distributed's one-sided transports, with the torch that is installed."""

from __future__ import annotations

import asyncio
import re
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import torch_mooncake as tm
from torch_mooncake import torch_transport


class Two:
    def __init__(self) -> None:
        self.a, self.b = torch_transport.Transport(), torch_transport.Transport(name="b")
        self.here, self.there = torch.arange(1000), torch.zeros(1000, dtype=torch.int64)
        self.local, self.region = self.a.register(self.here), self.b.register(self.there)
        self.remote = self.a.open(self.b.address, self.region.descriptor)

    def close(self) -> None:
        self.a.close()
        self.b.close()


@pytest.fixture
def two():
    pair = Two()
    yield pair
    pair.close()


def test_blocking_and_work(two: Two) -> None:
    assert two.local.size() == two.remote.size() == 8000
    assert two.a.write(two.local, two.remote) is None
    assert torch.equal(two.there, torch.arange(1000))
    two.here.zero_()
    work = two.a.read(two.local, two.remote, async_op=True)
    assert isinstance(work, dist.Work)
    assert work.wait(timedelta(seconds=10))
    assert work.is_completed()
    assert work.is_success()
    assert work.exception() is None
    assert torch.equal(two.here, torch.arange(1000))


def test_future_and_await(two: Two) -> None:
    work = two.a.write(two.local, two.remote, async_op=True)
    assert work is not None
    assert work.get_future().wait() is None
    assert torch.equal(two.there, torch.arange(1000))

    async def read() -> None:
        two.here.zero_()
        work = two.a.read(two.local, two.remote, async_op=True)
        assert work is not None
        await work

    asyncio.run(read())
    assert torch.equal(two.here, torch.arange(1000))


def test_errors_come_out_of_work_and_future(two: Two) -> None:
    two.b.deregister(two.region)
    work = two.a.write(two.local, two.remote, async_op=True)
    assert work is not None
    with pytest.raises(tm.KeyNotFound):
        work.wait()
    assert work.is_completed()
    assert not work.is_success()
    assert isinstance(work.exception(), tm.KeyNotFound)
    with pytest.raises(tm.KeyNotFound):
        work.get_future().wait()


def test_a_peer_that_is_gone_is_dialled_again(two: Two) -> None:
    two.b.close()
    again = torch_transport.Transport()
    view = again.register(torch.zeros(4))
    two.a.open(again.address, view.descriptor)
    with pytest.raises(tm.Error):
        two.a.open(two.b.engine.addresses[0], view.descriptor, timedelta(seconds=2))
    again.close()


def test_the_entry_point_leads_to_create_which_wants_torchs_registry() -> None:
    text = (Path(tm.__file__).parents[1] / "pyproject.toml").read_text()
    group = re.search(r'\[project\.entry-points\."torch\.distributed\.transports"\]\nmooncake = "(.+):(.+)"', text)
    assert group
    assert (group[1], group[2]) == ("torch_mooncake.torch_transport", "create")
    if torch_transport.available():
        torch_transport.create().close()
    else:
        with pytest.raises(tm.Unsupported, match=re.escape(torch.__version__)):
            torch_transport.create()
