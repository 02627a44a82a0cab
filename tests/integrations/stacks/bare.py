"""Packages of which a few modules can be had without the rest: their ``__init__`` is not run."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from importlib.metadata import distribution
from pathlib import Path
from typing import Any


def bare(distribution_name: str, *packages: str) -> None:
    """Makes ``packages`` importable folders of an installed distribution, without what they import by themselves."""
    root = Path(str(distribution(distribution_name).locate_file("")))
    for name in packages:
        module = types.ModuleType(name)
        module.__path__ = [str(root.joinpath(*name.split(".")))]
        sys.modules[name] = module


class _Nothing(type):
    """Stands for whatever a module that is not here would have, where only names are needed to import another."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _nothing(name)


def _nothing(name: str) -> Any:
    return _Nothing(
        name,
        (),
        {
            "__init__": lambda self, *args, **kwargs: None,
            "__call__": lambda self, *args, **kwargs: args[0] if args and callable(args[0]) else None,
        },
    )


class _Module(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _nothing(name)


class Absent(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds packages of other hardware (GPU kernels, video) that a module imports and its tests here do not use."""

    def __init__(self, *names: str) -> None:
        self._names = names

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name.partition(".")[0] in self._names:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> Any:
        module = _Module(spec.name)
        module.__path__ = []
        module.__version__ = "0.0.0"
        return module

    def exec_module(self, module: Any) -> None:
        """There is nothing in it."""
