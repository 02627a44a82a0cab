"""``torch-mooncake doctor``: what this machine allows, what is set, what that costs, and how to fix it.

Exit status: 0 if everything needed is there (advice may remain), 1 if something is broken.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import platform
from pathlib import Path
from typing import Any

from torch_mooncake import __version__
from torch_mooncake.cli import checks, emit
from torch_mooncake.cli.checks import Check
from torch_mooncake.config import Config


def add_commands(commands: Any, common: argparse.ArgumentParser) -> None:
    parser = commands.add_parser("doctor", help="check this machine and show all settings")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.set_defaults(run=_doctor)


def _doctor(args: argparse.Namespace) -> int:
    config = Config.from_env()
    native = _native()
    found = [native, _node(config), *(checks.machine() if native.ok else []), *checks.ssds(config.ssd)]
    settings = config.describe()
    document = {
        "version": __version__,
        "ok": all(check.ok for check in found if check.required),
        "checks": [dataclasses.asdict(check) for check in found],
        "settings": {name: value for name, _, value, _ in settings},
    }
    lines = [f"torch-mooncake {__version__}, Python {platform.python_version()}, Linux {platform.release()}", ""]
    for check in found:
        mark = "ok" if check.ok else "!!" if check.required else "--"
        lines.append(f"  [{mark}] {check.name}: {check.value}")
        if not check.ok and check.advice:
            lines.append(f"       {check.advice}")
    lines += ["", "Settings (environment variable, value, meaning):"]
    lines += [f"  {env:<20} {value!s:<36} {doc}" for _, env, value, doc in settings]
    emit(args, document, "\n".join(lines))
    return 0 if document["ok"] else 1


def _native() -> Check:
    try:
        from torch_mooncake import _core
    except ImportError as error:
        return Check("native core", False, str(error), "build the package: pip install .", required=True)
    same = __version__ == _core.VERSION
    advice = f"the Python part is {__version__}: rebuild"
    return Check("native core", same, f"version {_core.VERSION}", advice, required=True)


def _node(config: Config) -> Check:
    from torch_mooncake import node

    if not os.access(node.EXECUTABLE, os.X_OK):
        advice = "build the package: pip install ."
        return Check("node executable", False, f"{node.EXECUTABLE} is missing", advice, required=True)
    running = (Path(config.runtime_dir) / config.pool / "node.sock").exists()
    value = f"{node.socket_address(config)} ({'there' if running else 'not started yet'})"
    return Check("node", True, value, required=True)
