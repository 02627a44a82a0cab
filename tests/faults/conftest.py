"""Fixtures of the fault suite."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from fault_ways import WAYS, MiB, Two
from processes import Child
from verbs import VERBS


@pytest.fixture(scope="module", params=list(WAYS))
def way(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def make_two(child: Any) -> Iterator[Callable[..., Two]]:
    """``make_two(way, nbytes, ...)``: see Two. Closed after the test."""
    made: list[Two] = []

    def make(way: str, *args: Any, **options: Any) -> Two:
        made.append(Two(way, child, *args, **options))
        return made[-1]

    yield make
    for two in made:
        two.close()


@pytest.fixture(scope="module")
def lasting_two(way: str) -> Iterator[Two]:
    """One pair for all tests of a file that leave it as it was: 32 MiB on each side; over emulated NICs, 8."""
    children: list[Child] = []

    def child(env: dict[str, str] | None = None) -> Child:
        children.append(Child(env))
        return children[-1]

    two = Two(way, child, (8 if VERBS else 32) * MiB)
    yield two
    two.close()
    for c in children:
        assert c.close() == 0
