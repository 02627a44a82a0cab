"""cmake/ptxas.py: what ptxas said of the kernels, as a table; a kernel that spills fails the build."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "cmake" / "ptxas.py"
NAME = "_ZN14torch_mooncake2kv4cuda12_GLOBAL__N_111hash_kernelEi"


def remarks(arch: str, spilled: int, registers: int) -> str:
    return (
        f"ptxas info    : Compiling entry function '{NAME}' for '{arch}'\n"
        f"ptxas info    : Function properties for {NAME}\n"
        f"    0 bytes stack frame, {spilled} bytes spill stores, {spilled} bytes spill loads\n"
        f"ptxas info    : Used {registers} registers, used 1 barriers, 16 bytes smem\n"
    )


def report(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, SCRIPT, "report", *options, folder], capture_output=True, text=True)


def test_a_table_of_registers(tmp_path):
    (tmp_path / "a.cu.o.ptxas").write_text(remarks("sm_80", 0, 72) + remarks("sm_100", 0, 64))
    done = report(tmp_path)
    assert done.returncode == 0
    header, row = (line.split() for line in done.stdout.splitlines())
    assert header == ["registers", "sm_80", "sm_100", "shared", "spilled"]
    assert row == ["hash_kernel", "72", "64", "16", "0"]
    assert report(tmp_path, "-q").stdout == ""


def test_a_spill_fails(tmp_path):
    (tmp_path / "a.cu.o.ptxas").write_text(remarks("sm_80", 0, 72) + remarks("sm_90", 8, 255))
    done = report(tmp_path, "-q")
    assert done.returncode == 1
    assert done.stderr == "hash_kernel on sm_90: 0 bytes of stack, 16 spilled\n"


def test_no_kernels_fail(tmp_path):
    assert report(tmp_path).returncode == 1


def test_the_compiler_is_run_and_its_remarks_kept(tmp_path):
    """The compiler is a shell that says what ptxas says, and a warning."""
    output = tmp_path / "a.cu.o"
    says = f"printf '%s' \"{remarks('sm_90', 0, 40)}\" >&2; echo careful >&2; touch {output}"
    command = [sys.executable, SCRIPT, "compile", "sh", "-c", says, "-o", str(output)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "careful\n")
    assert output.exists()
    assert report(tmp_path).stdout.splitlines()[1].split() == ["hash_kernel", "40", "16", "0"]
    failing = [sys.executable, SCRIPT, "compile", "sh", "-c", "exit 3", "-o", str(output)]
    assert subprocess.run(failing).returncode == 3
