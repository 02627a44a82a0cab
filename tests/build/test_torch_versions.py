"""csrc/torch compiles against the headers of every torch that is supported, not only of the one that is installed.

Each torch's wheel is fetched once (0.5 GiB), its headers (60 MiB) are kept under build/torch-versions, the rest goes.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CACHE = ROOT / "build" / "torch-versions"
SOURCES = sorted((ROOT / "csrc" / "torch").glob("*.cpp"))


def headers_of(version: str) -> Path:
    headers = CACHE / version / "torch" / "include"
    if headers.exists():
        return headers
    CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE) as folder:
        pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:", "-d", folder]
        # A machine's constraints are about what is installed there, which this is not.
        env = {**os.environ, "PIP_CONSTRAINT": os.devnull}
        subprocess.run([*pip, f"torch=={version}.*"], check=True, env=env)
        (wheel,) = Path(folder).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder, [name for name in archive.namelist() if name.startswith("torch/include/")])
        headers.parent.parent.mkdir(exist_ok=True)
        (Path(folder) / "torch").rename(headers.parent)
    return headers


def compiled(source: Path, headers: Path) -> str:
    """What the compiler says against it; "" if nothing."""
    flags = ["-std=c++20", "-fsyntax-only", "-Wall", "-Wextra", "-Werror", "-D_GLIBCXX_USE_CXX11_ABI=1"]
    if source.name.startswith("c10d"):
        flags += ["-DTORCH_EXTENSION_NAME=_c10d", "-DTORCH_API_INCLUDE_EXTENSION_H", '-DTM_BUILT_TORCH="x"']
    else:
        flags += ["-DTORCH_TARGET_VERSION=0x020b000000000000"]  # the stable ABI
    include = ["-I", ROOT / "csrc"]
    for folder in (headers, headers / "torch/csrc/api/include", sysconfig.get_paths()["include"]):
        include += ["-isystem", folder]
    done = subprocess.run(["c++", *flags, *include, source], capture_output=True, text=True, check=False)
    return done.stderr or ("" if done.returncode == 0 else f"exit status {done.returncode}")


@pytest.mark.network
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("version", ["2.11", "2.12", "2.13", "2.14", "2.15"])
def test_compiles(version: str) -> None:
    assert SOURCES
    headers = headers_of(version)
    with ThreadPoolExecutor(int(os.environ.get("TM_JOBS", "2"))) as pool:
        complaints = list(pool.map(lambda source: compiled(source, headers), SOURCES))
    assert not any(complaints), "\n".join(complaints)
