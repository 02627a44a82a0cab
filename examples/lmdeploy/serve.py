"""LMDeploy's command line with torch_mooncake as its migration backend "Mooncake": arguments as for ``lmdeploy``.

python examples/lmdeploy/serve.py serve api_server MODEL --backend pytorch --role Prefill --migration-backend Mooncake
"""

from __future__ import annotations

import sys

from torch_mooncake.integrations import lmdeploy


def main() -> int:
    from lmdeploy.cli.entrypoint import run

    lmdeploy.register()
    run()  # exits by itself where it fails
    return 0


if __name__ == "__main__":
    sys.exit(main())
