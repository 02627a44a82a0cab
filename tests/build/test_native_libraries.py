"""What the built libraries need and export: one build runs on every machine, with or without the hardware."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "torch_mooncake"
HARDWARE = re.compile(r"cuda|cudart|cufile|nccl|ibverbs|rdmacm|mlx5", re.IGNORECASE)
C_AND_CXX = {"libc.so.6", "libm.so.6", "libstdc++.so.6", "libgcc_s.so.1", "libpthread.so.0", "ld-linux-x86-64.so.2"}


def built() -> dict[str, Path]:
    return {path.name.split(".")[0]: path for path in [*PACKAGE.glob("*.so"), *PACKAGE.glob("bin/*")]}


def needed(path: Path) -> set[str]:
    text = subprocess.run(["readelf", "-d", str(path)], check=True, capture_output=True, text=True).stdout
    return set(re.findall(r"\(NEEDED\).*\[(.+?)\]", text))


def test_everything_was_built():
    assert {"libtorch_mooncake", "_core", "_ops", "_c10d", "torch-mooncake-node"} <= built().keys()


@pytest.mark.parametrize("name", sorted(built()))
def test_nothing_links_hardware_libraries(name):
    assert not [library for library in needed(built()[name]) if HARDWARE.search(library)]


@pytest.mark.parametrize("name", ["libtorch_mooncake", "torch-mooncake-node"])
def test_the_core_needs_only_c_and_cxx(name):
    assert needed(built()[name]) - {"libtorch_mooncake.so"} <= C_AND_CXX


def test_the_core_exports_only_its_own_names():
    command = ["nm", "-D", "-C", "--defined-only", str(built()["libtorch_mooncake"])]
    lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    names = [line.split(maxsplit=2)[2] for line in lines]
    assert len(names) > 20
    foreign = r"(guard variable for |typeinfo (name )?for |vtable for |VTT for )?torch_mooncake"
    assert not [name for name in names if not re.match(foreign, name)]
