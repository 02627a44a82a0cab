"""What the RDMA transport's software costs. No NIC is needed, and no absolute speed is claimed.

    python benchmarks/rdma.py --json rows.json       # about five minutes on an idle machine
    python benchmarks/rdma.py --quick                # no numbers to quote

* slices: posted and completed through a driver whose requests are done at once, for each second of the processor, all
  threads counted (rdma.cpp).
* In a virtual machine with Soft-RoCE devices (tests/rdma/vm; needs QEMU): a write over one rail beside ib_write_bw with
  messages and depth of the same size, in turns; and 1000 registrations beside bare ibv_reg_mr (rdma_machine.py).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from harness import Row, Table, main

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
CANNOT = 77  # of vm.py: no QEMU, or no kernel package
PAGES = 8192


def compiled() -> Path:
    """rdma.cpp, against this build of the library."""
    program = ROOT / "build" / "rdma-bench"
    package = ROOT / "torch_mooncake"
    command = ["g++", "-O2", "-std=c++20", "-I", str(ROOT / "csrc"), str(HERE / "rdma.cpp"), "-o", str(program)]
    command += ["-L", str(package), "-ltorch_mooncake", "-libverbs", "-pthread", f"-Wl,-rpath,{package}"]
    program.parent.mkdir(exist_ok=True)
    subprocess.run(command, check=True)
    return program


def in_machine(program: Path, rounds: int) -> dict[str, list[float]] | None:
    with tempfile.TemporaryDirectory() as out:
        python = f"{sys.executable} {HERE / 'rdma_machine.py'} {program} {rounds}"
        command = [sys.executable, str(ROOT / "tests/rdma/vm/vm.py"), "--keep", out, "--seconds", "900"]
        done = subprocess.run([*command, f"{python} > /out/rows.json"], stdout=sys.stderr, check=False)
        if done.returncode == CANNOT:
            return None
        if done.returncode != 0:
            raise SystemExit(f"the virtual machine ended with {done.returncode}")
        return dict(json.loads((Path(out) / "rows.json").read_text()))


def run(args: argparse.Namespace) -> list[Row]:
    program = compiled()
    rounds = 1 if args.quick else 5
    table = Table(f"RDMA, {rounds} rounds")
    rates = []
    for _ in range(rounds):
        said = subprocess.run([program, "slices", "50" if args.quick else "400", str(PAGES)], capture_output=True)
        rates.append(float(said.stdout.split()[0]) / 1e6)
    table.measured("slices for each second of one core", rates, "M/s", limit=5)
    found = in_machine(program, rounds)
    if found is None:
        print("no virtual machine here: its rows are left out", file=sys.stderr)
        return table.rows
    mb = {name: [value / 1e6 for value in found[name]] for name in ("ours", "perftest")}
    table.measured(
        "write of 1 MiB messages, 8 under way",
        mb["ours"],
        "MB/s",
        against="ib_write_bw",
        baseline=mb["perftest"],
        ratio_limit=0.9,
        note="Soft-RoCE in an emulated machine",
    )
    for size, limit in ((1, 1.1), (16, 1.1)):  # what is not pinning costs the same for each
        table.measured(
            f"1000 registrations of {size} MiB",
            [1e3 * value for value in found[f"register {size}"]],
            "ms",
            against="ibv_reg_mr",
            baseline=[1e3 * value for value in found[f"reg_mr {size}"]],
            ratio_limit=limit,
            at_least=False,
            note="Soft-RoCE in an emulated machine",
        )
    return table.rows


if __name__ == "__main__":
    sys.exit(main(__doc__ or "", run))
