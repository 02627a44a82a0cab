"""Where things are in this repository."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
COMPAT = ROOT / "integrations" / "mooncake_compat"
