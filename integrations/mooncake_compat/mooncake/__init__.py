"""``mooncake.engine`` and ``mooncake.store`` on torch_mooncake, for programs that import Mooncake's own.

Refuses to stand in front of an installed Mooncake: an ImportError says so, whichever of the two was found first.
"""

from __future__ import annotations

from importlib import metadata

PROVIDED_BY = "torch_mooncake"


def _refuse_to_shadow() -> None:
    real = sorted(
        {
            str(found.metadata["Name"])
            for found in metadata.distributions()
            if str(found.metadata["Name"] or "").lower().replace("_", "-").startswith("mooncake-transfer-engine")
        }
    )
    if real:
        raise ImportError(
            f"{' and '.join(real)} is installed, and torch-mooncake-compat does not stand in front of it: "
            f"pip uninstall {' '.join(real)}, and reinstall torch-mooncake-compat, or uninstall that"
        )


_refuse_to_shadow()
