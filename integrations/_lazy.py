"""Names of a package that are imported when they are first asked for: with them comes the program they are for."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any


def lazily(package: str, home: dict[str, str]) -> Callable[[str], Any]:
    """A module's ``__getattr__``; ``home`` says which submodule each name is of. Errors: those of importing it, such as
    ModuleNotFoundError for the program that is not installed."""

    def find(name: str) -> Any:
        if name not in home:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(f"{package}.{home[name]}"), name)

    return find
