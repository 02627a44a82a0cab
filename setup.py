"""Build of torch_mooncake: setuptools for the Python part, CMake + Ninja for the native part.

Environment: TM_CUDA=1 adds the CUDA plug-in; TM_TORCH=0 leaves out what needs torch; TM_JOBS sets the parallelism
(default: the cores); TM_CMAKE_ARGS is passed on to CMake. The native build lives in build/<interpreter>/ and is
incremental; one build runs there at a time.
"""

from __future__ import annotations

import fcntl
import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
BUILD = ROOT / "build" / str(sys.implementation.cache_tag)


TOOLS = BUILD / "tools"  # what the environment lacks of the build's requirements


def tool(name: str) -> str:
    """The path of cmake or ninja: beside this interpreter (their wheels put them there), on PATH, or fetched."""
    beside = Path(sys.executable).parent / name
    return str(beside) if beside.exists() else shutil.which(name) or str(fetch(name) / "bin" / name)


def fetch(name: str) -> Path:
    """Installs one of pyproject's build requirements below the build folder: `--no-build-isolation` does not."""
    folder = TOOLS / name
    if not (folder / name).exists():
        print(f"{name} is not installed: fetching it into {folder}", flush=True)
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(folder), name]
        if subprocess.run(pip).returncode != 0:
            raise SystemExit(f"torch_mooncake's build needs {name}, which could not be fetched: pip install {name}")
    return folder


def run(command: list[str], environment: dict[str, str]) -> None:
    if code := subprocess.run(command, env=environment).returncode:
        raise SystemExit(f"torch_mooncake's native build failed (exit status {code}): {shlex.join(command)}")


class CMakeBuild(build_ext):
    """Builds every native target at once and copies the result into the package (or beside its sources)."""

    def run(self) -> None:
        with_torch = os.environ.get("TM_TORCH", "1") != "0"
        if with_torch and importlib.util.find_spec("torch") is None:
            raise SystemExit(
                f"torch_mooncake's build found no torch for {sys.executable}: install torch first and build with `pip "
                "install --no-build-isolation .`, or set TM_TORCH=0 to leave out the ops and the distributed backend"
            )
        BUILD.mkdir(parents=True, exist_ok=True)
        with open(BUILD / ".lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            self.configure_and_build(with_torch)
            for source, target in self.files():
                replace(source, target)

    def configure_and_build(self, with_torch: bool) -> None:
        cmake, ninja = tool("cmake"), tool("ninja")
        if importlib.util.find_spec("nanobind") is None:
            fetch("nanobind")
        python_path = [*map(str, TOOLS.glob("*")), *filter(None, [os.environ.get("PYTHONPATH")])]
        configure = [
            cmake,
            *("-S", str(ROOT), "-B", str(BUILD), "-G", "Ninja"),
            f"-DCMAKE_MAKE_PROGRAM={ninja}",
            f"-DPython_EXECUTABLE={sys.executable}",
            f"-DTM_VERSION={self.distribution.get_version()}",
            f"-DTM_TORCH={'ON' if with_torch else 'OFF'}",
            f"-DTM_CUDA={'ON' if os.environ.get('TM_CUDA', '0') == '1' else 'OFF'}",
            *shlex.split(os.environ.get("TM_CMAKE_ARGS", "")),
        ]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(python_path)}
        stamp = BUILD / ".configured"  # Ninja runs CMake again by itself when a CMake file changes
        if not stamp.exists() or stamp.read_text() != "\n".join(configure):
            stamp.unlink(missing_ok=True)
            run(configure, environment)
            stamp.write_text("\n".join(configure))
        jobs = os.environ.get("TM_JOBS", str(len(os.sched_getaffinity(0))))
        build = [cmake, "--build", str(BUILD), "--target", "tm_package", "-j", jobs]
        run(build, environment)

    def files(self) -> list[tuple[Path, Path]]:
        """(built file, its place in the package)."""
        package = BUILD / "torch_mooncake"
        base = ROOT if self.inplace else Path(self.build_lib)
        built = [p for pattern in ("*.so", "bin/*") for p in sorted(package.glob(pattern))]
        return [(p, base / "torch_mooncake" / p.relative_to(package)) for p in built]

    def get_outputs(self) -> list[str]:
        return [str(target) for _, target in self.files()]

    def get_output_mapping(self) -> dict[str, str]:
        return {}


def replace(source: Path, target: Path) -> None:
    """Copies by rename: processes that have the old file mapped keep it whole."""
    before, now = (p.stat() if p.exists() else None for p in (target, source))
    assert now is not None
    if before and (before.st_size, before.st_mtime_ns) == (now.st_size, now.st_mtime_ns):
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    fresh = target.with_name(target.name + ".new")
    shutil.copy2(source, fresh)
    os.replace(fresh, target)


setup(ext_modules=[Extension("torch_mooncake._core", sources=[])], cmdclass={"build_ext": CMakeBuild})
