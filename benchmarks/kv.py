"""Paged KV: operators on the CPU (kv_ops.py), pages pushed to another process (kv_push.py), operators on a GPU.

python benchmarks/kv.py --peers .venv-peers --json rows.json     # some minutes on an idle machine
python benchmarks/kv.py --quick                                  # no numbers to quote
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import kv_gpu
import kv_ops
import kv_push
import torch
from harness import Row, Table, main


def run(args: argparse.Namespace) -> list[Row]:
    on_cpu = Table(f"Paged-KV operators on the CPU, {torch.get_num_threads()} threads")
    kv_ops.rows(on_cpu, args.quick)
    pushed = Table("Pages from a prefill process to a decode process")
    kv_push.rows(pushed, args.quick, Path(args.peers) if args.peers else None)
    on_gpu = Table("Paged-KV operators on a GPU")
    kv_gpu.rows(on_gpu, args.quick)
    return on_cpu.rows + pushed.rows + on_gpu.rows


if __name__ == "__main__":
    sys.exit(main(__doc__ or "", run, kv_push.arguments))
