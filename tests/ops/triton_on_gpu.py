"""Every call of twins.py by the Triton twins on a GPU, against the CPU's operators."""

from __future__ import annotations

import sys

from twins import CALLS, on_cpu, on_gpu, same

from torch_mooncake import ops, triton_ops


def main() -> int:
    different = [name for name, call in CALLS.items() if not same(call(triton_ops, on_gpu), call(ops, on_cpu))]
    for name in different:
        print(name)
    print(f"{len(CALLS) - len(different)} equal, {len(different)} different")
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
