"""``torch-mooncake doctor``: what this machine allows, what is set, and what that costs."""

from __future__ import annotations

import argparse
import dataclasses
import os
import platform
from pathlib import Path
from typing import Any

from torch_mooncake import __version__
from torch_mooncake.cli import emit, human
from torch_mooncake.config import Config


def add_commands(commands: Any, common: argparse.ArgumentParser) -> None:
    parser = commands.add_parser("doctor", help="check this machine and show all settings")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.set_defaults(run=_doctor)


@dataclasses.dataclass
class Check:
    name: str
    ok: bool
    value: str
    advice: str = ""  # what to do if not ok


def _doctor(args: argparse.Namespace) -> int:
    config = Config.from_env()
    checks = [_native(), _node(config), *_kernel()]
    settings = config.describe()
    document = {
        "version": __version__,
        "checks": [dataclasses.asdict(check) for check in checks],
        "settings": {name: value for name, _, value, _ in settings},
    }
    lines = [f"torch-mooncake {__version__}, Python {platform.python_version()}, Linux {platform.release()}", ""]
    for check in checks:
        lines.append(f"  [{'ok' if check.ok else '--'}] {check.name}: {check.value}")
        if not check.ok and check.advice:
            lines.append(f"       {check.advice}")
    lines += ["", "Settings (environment variable, value, meaning):"]
    lines += [f"  {env:<20} {value!s:<36} {doc}" for _, env, value, doc in settings]
    emit(args, document, "\n".join(lines))
    return 0 if all(check.ok for check in checks[:2]) else 1


def _native() -> Check:
    try:
        from torch_mooncake import _core
    except ImportError as error:
        return Check("native core", False, str(error), "build the package: pip install .")
    same = __version__ == _core.VERSION
    return Check("native core", same, f"version {_core.VERSION}", f"the Python part is {__version__}: rebuild")


def _node(config: Config) -> Check:
    from torch_mooncake import node

    if not os.access(node.EXECUTABLE, os.X_OK):
        return Check("node executable", False, f"{node.EXECUTABLE} is missing", "build the package: pip install .")
    running = (Path(config.runtime_dir) / config.pool / "node.sock").exists()
    return Check("node", True, f"{node.socket_address(config)} ({'there' if running else 'not started yet'})")


def _kernel() -> list[Check]:
    def read(path: str) -> str:
        try:
            return Path(path).read_text().strip()
        except OSError:
            return "unknown"

    huge = read("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
    chosen = huge[huge.find("[") + 1 : huge.find("]")] if "[" in huge else huge
    ptrace = read("/proc/sys/kernel/yama/ptrace_scope")
    congestion = read("/proc/sys/net/ipv4/tcp_congestion_control")
    limit = os.sysconf("SC_OPEN_MAX")
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return [
        Check("memory", True, f"{human(memory)}, {os.cpu_count()} CPUs"),
        Check(
            "shared-memory huge pages",
            chosen in ("advise", "always", "within_size", "force"),
            chosen,
            "zero-copy reads fault on 4 KiB pages; root: "
            "echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled",
        ),
        Check(
            "process_vm_readv between processes",
            ptrace in ("0", "unknown"),
            f"yama ptrace_scope {ptrace}",
            "memory that is not shared goes over Unix sockets; root: sysctl kernel.yama.ptrace_scope=0",
        ),
        Check(
            "TCP congestion control",
            congestion != "bbr",
            congestion,
            "bbr halves loopback; it does no harm between hosts",
        ),
        Check("open files", limit < 0 or limit >= 4096, str(limit), "raise `ulimit -n` to 4096 or more"),
    ]
