"""The demo is an example, not a package: its directory goes on the path, as when its scripts are run."""

import sys
from pathlib import Path

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "pd_disaggregation"
sys.path.insert(0, str(EXAMPLE))
