"""Paged KV: operators on the CPU (kv_ops.py) and on a GPU (kv_gpu.py).

python benchmarks/kv.py --json rows.json     # some minutes on an idle machine
python benchmarks/kv.py --quick              # no numbers to quote
"""

from __future__ import annotations

import argparse
import sys

import kv_gpu
import kv_ops
import torch
from harness import Row, Table, main


def run(args: argparse.Namespace) -> list[Row]:
    found = []
    for title, module in (
        (f"Paged-KV operators on the CPU, {torch.get_num_threads()} threads", kv_ops),
        ("Paged-KV operators on a GPU", kv_gpu),
    ):
        table = Table(title)
        module.rows(table, args.quick)
        found += table.rows
    return found


if __name__ == "__main__":
    sys.exit(main(__doc__ or "", run))
