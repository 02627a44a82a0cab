"""Packages of which a few modules can be had without the rest: their ``__init__`` is not run."""

from __future__ import annotations

import sys
import types
from importlib.metadata import distribution
from pathlib import Path


def bare(distribution_name: str, *packages: str) -> None:
    """Makes ``packages`` importable folders of an installed distribution, without what they import by themselves."""
    root = Path(str(distribution(distribution_name).locate_file("")))
    for name in packages:
        module = types.ModuleType(name)
        module.__path__ = [str(root.joinpath(*name.split(".")))]
        sys.modules[name] = module
