"""Tensors between Ray's actors over the engine: real Ray, processes of its own."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import ray
import torch
from places import ROOT
from processes import command_line, eventually

from torch_mooncake.integrations import ray as tm_ray

STACK = ("ray", "register_tensor_transport, actors that pass CPU tensors, garbage collection, a killed sender")
tm_ray.register()  # before an actor's class names the transport
SHAPES = [(1000, 257), (3,), (0, 4), (2, 2, 2)]


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    folders = [ROOT, *(ROOT / "tests" / folder for folder in ("", "integrations", "integrations/stacks"))]
    env = {"PYTHONPATH": os.pathsep.join(map(str, folders)), "TM_RUNTIME_DIR": "/tmp/tm-ray"}
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, runtime_env={"env_vars": env})
    tm_ray.register()
    yield
    ray.shutdown()


@ray.remote(enable_tensor_transport=True, num_cpus=0)
class Sender:
    @ray.method(tensor_transport="torch_mooncake")
    def one(self) -> torch.Tensor:
        return torch.arange(100_000, dtype=torch.float32)

    @ray.method(tensor_transport="torch_mooncake")
    def several(self) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(5)
        made: dict[str, Any] = {str(shape): torch.randn(shape, generator=generator) for shape in SHAPES}
        made["strided"] = torch.arange(24).reshape(4, 6).t()
        made["half"] = torch.ones(7, dtype=torch.bfloat16)
        return made

    def pid(self) -> int:
        return os.getpid()

    def registered(self) -> int:
        from ray.experimental.rdt.util import get_tensor_transport_manager

        return int(get_tensor_transport_manager(tm_ray.NAME).engine().stats()["regions"])


@ray.remote(enable_tensor_transport=True, num_cpus=0)
class Receiver:
    def total(self, tensor: torch.Tensor) -> float:
        return float(tensor.double().sum())

    def described(self, values: dict[str, Any]) -> dict[str, Any]:
        return {
            name: [list(value.shape), str(value.dtype), value.double().sum().item()] for name, value in values.items()
        }

    def transport(self) -> str:
        from ray.experimental.rdt.util import get_tensor_transport_manager

        return type(get_tensor_transport_manager(tm_ray.NAME)).__name__


def test_a_tensor_goes_from_actor_to_actor(cluster: None):
    sender, receiver = Sender.remote(), Receiver.remote()
    found = ray.get(receiver.total.remote(sender.one.remote()), timeout=60)
    assert found == float(torch.arange(100_000, dtype=torch.float64).sum())
    assert ray.get(receiver.transport.remote()) == "TorchMooncakeTransport"


def test_several_tensors_of_any_shape(cluster: None):
    sender, receiver = Sender.remote(), Receiver.remote()
    generator = torch.Generator().manual_seed(5)
    expected = {str(shape): torch.randn(shape, generator=generator) for shape in SHAPES}
    expected["strided"] = torch.arange(24).reshape(4, 6).t()
    expected["half"] = torch.ones(7, dtype=torch.bfloat16)
    found = ray.get(receiver.described.remote(sender.several.remote()), timeout=60)
    assert found == {k: [list(v.shape), str(v.dtype), v.double().sum().item()] for k, v in expected.items()}


def test_one_object_for_several_receivers_and_memory_that_comes_back(cluster: None):
    sender, receivers = Sender.remote(), [Receiver.remote() for _ in range(2)]
    sent = sender.one.remote()
    totals = ray.get([each.total.remote(sent) for each in receivers for _ in range(2)], timeout=60)
    assert len(set(totals)) == 1
    assert ray.get(sender.registered.remote()) == 1
    del sent
    assert eventually(lambda: ray.get(sender.registered.remote(), timeout=30) == 0, timeout=30)


def test_a_sender_that_is_killed_is_an_error_and_no_hang(cluster: None):
    sender, receiver = Sender.remote(), Receiver.remote()
    sent = sender.one.remote()
    ray.get(receiver.total.remote(sent), timeout=60)
    pid = ray.get(sender.pid.remote(), timeout=60)
    ray.kill(sender)
    assert eventually(lambda: not command_line(pid), timeout=60)  # ray.kill does not wait for its end
    with pytest.raises(ray.exceptions.RayError):
        ray.get(receiver.total.remote(sent), timeout=90)
    other = Receiver.remote()
    assert ray.get(other.total.remote(Sender.remote().one.remote()), timeout=60) > 0
