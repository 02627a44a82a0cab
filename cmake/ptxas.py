"""What ptxas says of each kernel, kept beside its object file and shown as a table.

    ptxas.py compile NVCC ARGS...    run the compiler; the remarks of `-Xptxas -v` go to OBJECT.ptxas
    ptxas.py report [-q] FOLDER      registers, shared memory and spills of all kernels in it; status 1 if one spills

CMake puts the first before nvcc (CUDA_COMPILER_LAUNCHER); `make cuda` prints the second.
"""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ENTRY = re.compile(r"Compiling entry function '(\w+)' for '(\w+)'")
SPILL = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
USED = re.compile(r"Used (\d+) registers")
SHARED = re.compile(r"(\d+) bytes smem")
# As c++filt writes those of csrc/kv/quantize.h.
ENUMERATORS = {
    "(WideType)0": "fp32",
    "(WideType)1": "fp16",
    "(WideType)2": "bf16",
    "(NarrowType)0": "fp8",
    "(NarrowType)1": "int8",
}


@dataclass
class Kernel:
    name: str  # mangled
    arch: str
    stack_nbytes: int = 0
    spill_nbytes: int = 0
    registers: int = 0
    shared_nbytes: int = 0


def compile_one(command: list[str]) -> int:
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True)
    remarks = [line for line in done.stderr.splitlines() if line.startswith(("ptxas info", "    "))]
    others = [line for line in done.stderr.splitlines() if line not in remarks]
    if others:
        print("\n".join(others), file=sys.stderr)
    if done.returncode == 0 and "-o" in command:
        Path(command[command.index("-o") + 1] + ".ptxas").write_text("\n".join(remarks))
    return done.returncode


def read(text: str) -> list[Kernel]:
    """Remarks come kernel by kernel: its name and architecture, its spills, its registers."""
    kernels: list[Kernel] = []
    for line in text.splitlines():
        if found := ENTRY.search(line):
            kernels.append(Kernel(*found.groups()))
        elif found := SPILL.search(line):
            kernels[-1].stack_nbytes = int(found[1])
            kernels[-1].spill_nbytes = int(found[2]) + int(found[3])
        elif found := USED.search(line):
            kernels[-1].registers = int(found[1])
            shared = SHARED.search(line)
            kernels[-1].shared_nbytes = int(shared[1]) if shared else 0
    return kernels


def readable(names: list[str]) -> dict[str, str]:
    """Mangled names to what stands before the parameters, without namespaces."""
    try:
        text = subprocess.run(["c++filt"], input="\n".join(names), capture_output=True, text=True, check=True).stdout
    except FileNotFoundError:  # no binutils: mangled names say it, too
        return {name: name for name in names}
    short = {}
    for name, full in zip(names, text.splitlines(), strict=True):
        full = re.sub(r"^void |\(anonymous namespace\)::|torch_mooncake::|\bkv::|\bcuda::", "", full)
        full = full[: full.rindex(">(") + 1] if ">(" in full else full.split("(")[0]
        for enumerator, text in ENUMERATORS.items():
            full = full.replace(enumerator, text)
        short[name] = full.replace("> >", ">>").strip()
    return short


def report(folder: Path, quiet: bool) -> int:
    kernels = [kernel for file in sorted(folder.rglob("*.ptxas")) for kernel in read(file.read_text())]
    if not kernels:
        print(f"no kernel was compiled in {folder}", file=sys.stderr)
        return 1
    archs = sorted({kernel.arch for kernel in kernels}, key=lambda arch: int(arch.removeprefix("sm_")))
    names = readable(sorted({kernel.name for kernel in kernels}))
    rows: dict[str, dict[str, Kernel]] = {}
    for kernel in kernels:
        rows.setdefault(names[kernel.name], {})[kernel.arch] = kernel
    if not quiet:
        width = max(map(len, rows))
        print(f"{'registers':<{width}}" + "".join(f"{arch:>8}" for arch in archs) + "   shared   spilled")
        for name, by_arch in sorted(rows.items()):
            cells = "".join(f"{by_arch[arch].registers if arch in by_arch else '-':>8}" for arch in archs)
            shared = max(kernel.shared_nbytes for kernel in by_arch.values())
            spilled = sum(kernel.spill_nbytes + kernel.stack_nbytes for kernel in by_arch.values())
            print(f"{name:<{width}}{cells}{shared:>9}{spilled:>10}")
    bad = [kernel for kernel in kernels if kernel.spill_nbytes or kernel.stack_nbytes]
    for kernel in bad:
        where = f"{names[kernel.name]} on {kernel.arch}"
        print(f"{where}: {kernel.stack_nbytes} bytes of stack, {kernel.spill_nbytes} spilled", file=sys.stderr)
    return 1 if bad else 0


def main(arguments: list[str]) -> int:
    if len(arguments) > 1 and arguments[0] == "compile":
        return compile_one(arguments[1:])
    if len(arguments) > 1 and arguments[0] == "report":
        return report(Path(arguments[-1]), "-q" in arguments)
    print(__doc__, file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
