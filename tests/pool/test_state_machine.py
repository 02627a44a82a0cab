"""The pool beside a dict: whatever is done, both say the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

import torch_mooncake as tm

KEYS = [f"k{i}" for i in range(5)]
keys = st.sampled_from(KEYS)
sizes = st.sampled_from([0, 1, 63, 4096, 5000, 32_768, 100_000, 1_000_000])


class PoolAndDict(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.model: dict[str, tuple[int, int, str]] = {}  # key -> (size, fill, label)
        self.held: list[tuple[torch.Tensor, int, int]] = []  # what was got, and what it must keep saying
        self.count = 0

    @initialize()
    def empty(self) -> None:
        tm.delete(KEYS)

    def value(self, size: int) -> torch.Tensor:
        self.count = (self.count + 1) % 251
        return torch.full((size,), self.count, dtype=torch.uint8)

    @rule(key=keys, size=sizes, label=st.sampled_from(["", "a", "b"]))
    def put(self, key: str, size: int, label: str) -> None:
        tm.put(key, self.value(size), version=label or None)
        self.model[key] = (size, self.count, label)

    @rule(key=keys, size=sizes)
    def put_keep(self, key: str, size: int) -> None:
        result = tm.put(key, self.value(size), if_exists="keep")
        assert result.stored == (key not in self.model)
        self.model.setdefault(key, (size, self.count, ""))

    @rule(key=keys, size=sizes)
    def put_error(self, key: str, size: int) -> None:
        if key in self.model:
            with pytest.raises(tm.KeyExists):
                tm.put(key, self.value(size), if_exists="error")
        else:
            tm.put(key, self.value(size), if_exists="error")
            self.model[key] = (size, self.count, "")

    @rule(key=keys)
    def delete(self, key: str) -> None:
        assert tm.delete(key) == (self.model.pop(key, None) is not None)

    @rule(key=keys, readonly=st.booleans(), label=st.sampled_from([None, "a", "b"]))
    def get(self, key: str, readonly: bool, label: str | None) -> None:
        found = self.model.get(key)
        if found is None or (label is not None and found[2] != label):
            with pytest.raises(tm.KeyNotFound):
                tm.get(key, version=label, readonly=readonly)
            return
        size, fill, _ = found
        tensor = tm.get(key, version=label, readonly=readonly)
        assert tensor.shape == (size,)
        self.held.append((tensor, size, fill))

    @rule(key=keys)
    def scribble(self, key: str) -> None:
        if key in self.model:
            tm.get(key).fill_(255)

    @rule()
    def out_and_many(self) -> None:
        values = tm.get_many(KEYS, missing="mask")
        assert [v is not None for v in values] == [k in self.model for k in KEYS]
        for key, (size, fill, _) in self.model.items():
            out = torch.empty(size, dtype=torch.uint8)
            tm.get(key, out=out)
            assert bool((out == fill).all())

    @rule()
    def release(self) -> None:
        self.held.clear()

    def teardown(self) -> None:
        self.held.clear()

    @invariant()
    def same_keys(self) -> None:
        assert tm.keys("k") == sorted(self.model)
        assert tm.exists(KEYS) == [k in self.model for k in KEYS]

    @invariant()
    def held_tensors_keep_their_bytes(self) -> None:
        for tensor, size, fill in self.held[-20:]:
            assert int(tensor.sum(dtype=torch.int64)) == size * fill


def test_pool_and_dict_agree(pool: Any) -> None:
    run_state_machine_as_test(
        PoolAndDict,
        settings=settings(
            max_examples=40, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )
