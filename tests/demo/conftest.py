"""The demo is an example, not a package: its directory goes on the path, as when its scripts are run."""

import sys
from pathlib import Path

import torch

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "pd_disaggregation"
sys.path.insert(0, str(EXAMPLE))
torch.set_num_threads(1)  # as in the workers, which run beside the tests
