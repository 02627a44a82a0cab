"""Versions of weights: whole or not at all, in place, and told apart by name, shape and dtype."""

import os
import subprocess
import sys
import threading
import time

import pytest
import torch
from torch import nn

import torch_mooncake as tm
from torch_mooncake import weights


class Tied(nn.Module):
    """An embedding and an output layer that share one tensor, a bf16 layer and a buffer."""

    def __init__(self, seed: int, tied: bool = True) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(50, 16)
        self.head = nn.Linear(16, 50, bias=False)
        self.middle = nn.Linear(16, 16).to(torch.bfloat16)
        self.register_buffer("scale", torch.rand(()))
        if tied:
            self.head.weight = self.embed.weight


def same(left: nn.Module, right: nn.Module) -> bool:
    a, b = left.state_dict(), right.state_dict()
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_an_update_copies_into_the_models_own_tensors():
    trainer, worker = Tied(1), Tied(2)
    places = {name: tensor.data_ptr() for name, tensor in worker.state_dict().items()}
    published = weights.publish(trainer, "policy", step=7)
    update = weights.subscribe(worker, "policy").update(timeout=10)
    assert (update.serial, update.step) == (published.serial, published.step) == (1, 7)
    assert same(trainer, worker)
    assert {name: tensor.data_ptr() for name, tensor in worker.state_dict().items()} == places
    once = 50 * 16 * 4 + (16 * 16 + 16) * 2 + 4
    assert published.nbytes == update.nbytes == once


def test_later_versions_follow_each_other():
    trainer, worker = Tied(1), Tied(2)
    policy = weights.subscribe(worker, "policy")
    for step in range(4):
        with torch.no_grad():
            trainer.middle.weight.add_(1)
        assert weights.publish(trainer, "policy", step=step).serial == step + 1
        assert policy.update(timeout=10).step == step
        assert same(trainer, worker)
    assert sorted(tm.keys("weights/policy")) == ["weights/policy", "weights/policy/4"]  # old versions are gone


def test_a_subscriber_that_slept_gets_the_newest():
    trainer, worker = Tied(1), Tied(2)
    policy = weights.subscribe(worker, "policy")
    for step in range(3):
        weights.publish(trainer, "policy", step=step)
    assert policy.update(timeout=10).step == 2
    with pytest.raises(tm.DeadlineExceeded, match="newer than serial 3"):
        policy.update(timeout=0.05)


def test_update_waits_for_a_version():
    trainer, worker = Tied(1), Tied(2)
    timer = threading.Timer(0.3, weights.publish, (trainer, "policy"))
    timer.start()
    assert weights.subscribe(worker, "policy").update(timeout=20).step is None
    assert same(trainer, worker)
    timer.join()


def test_nothing_published():
    with pytest.raises(tm.DeadlineExceeded, match="at all"):
        weights.subscribe(Tied(1), "policy").update(timeout=0.05)


def test_tied_there_and_not_here():
    trainer, worker = Tied(1), Tied(2, tied=False)
    weights.publish(trainer, "policy")
    weights.subscribe(worker, "policy").update(timeout=10)
    assert same(trainer, worker)
    assert worker.head.weight.data_ptr() != worker.embed.weight.data_ptr()


def test_a_model_that_differs_is_left_alone_and_told_how():
    weights.publish({f"w{index:02}": torch.zeros(2) for index in range(14)}, "policy")
    mine = {f"w{index:02}": torch.ones(3) for index in range(12)} | {"w12": torch.ones(2), "extra": torch.ones(1)}
    with pytest.raises(tm.LayoutMismatch) as caught:
        weights.subscribe(mine, "policy").update(timeout=10)
    lines = str(caught.value).splitlines()
    assert "extra: float32[1] in the model, not published" in lines[1]
    assert "w00: published as float32[2], float32[3] in the model" in lines[2]
    assert len(lines) == 12
    assert lines[-1].strip() == "and 4 more"
    assert all(tensor.eq(1).all() for tensor in mine.values())


def test_dtypes_are_compared():
    weights.publish({"w": torch.zeros(2, dtype=torch.bfloat16)}, "policy")
    with pytest.raises(tm.LayoutMismatch, match=r"w: published as bfloat16\[2\], float32\[2\] in the model"):
        weights.subscribe({"w": torch.zeros(2)}, "policy").update(timeout=10)


@pytest.mark.parametrize("name", ["", "a/b"])
def test_names_are_checked(name):
    with pytest.raises(tm.InvalidArgument):
        weights.publish({"w": torch.zeros(1)}, name)


def test_what_is_not_weights_is_a_type_error():
    with pytest.raises(TypeError, match="'w' is a int"):
        weights.publish({"w": 1}, "policy")
    with pytest.raises(TypeError, match="not list"):
        weights.publish([torch.zeros(1)], "policy")


def test_a_version_that_does_not_fit_leaves_the_old_one_current():
    weights.publish({"w": torch.ones(4)}, "policy", step=1)
    with pytest.raises(tm.PoolFull):
        weights.publish({"w": torch.zeros(128 << 20, dtype=torch.uint8)}, "policy", step=2, timeout=3)
    mine = {"w": torch.zeros(4)}
    assert weights.subscribe(mine, "policy").update(timeout=10).step == 1
    assert mine["w"].eq(1).all()


PUBLISHER = """
import torch
import torch_mooncake as tm
from torch_mooncake import weights
tm.init()
step = 0
while True:
    step += 1
    weights.publish({f"w{i}": torch.full((1000,), float(step)) for i in range(20)}, "policy", step=step)
    print(step, flush=True)
"""


def test_never_half_a_version_while_a_publisher_goes_on_and_is_killed():
    publisher = subprocess.Popen([sys.executable, "-c", PUBLISHER], stdout=subprocess.PIPE, env=os.environ)
    try:
        publisher.stdout.readline()
        mine = {f"w{index}": torch.zeros(1000) for index in range(20)}
        policy = weights.subscribe(mine, "policy")
        until = time.monotonic() + 3
        seen = 0
        while time.monotonic() < until:
            step = policy.update(timeout=10).step
            assert all(tensor.eq(step).all() for tensor in mine.values())
            seen += 1
        assert seen > 1
        publisher.kill()
        publisher.wait()
        fresh = weights.subscribe(mine, "policy")
        step = fresh.update(timeout=10).step
        assert all(tensor.eq(step).all() for tensor in mine.values())
    finally:
        publisher.kill()
        publisher.communicate()
