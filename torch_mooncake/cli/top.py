"""``torch-mooncake top``: the pool's nodes, live. Plain text: ``--once`` and ``--json`` work without a terminal."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from typing import Any

from torch_mooncake.cli import human
from torch_mooncake.cli.objects import connect, quota_lines
from torch_mooncake.errors import Error, InvalidArgument

_RATES = ("lookups", "misses", "commits", "removals", "evictions", "refusals")


def add_commands(commands: Any, common: argparse.ArgumentParser) -> None:
    top = commands.add_parser("top", parents=[common], help="the pool's nodes, live (Ctrl-C ends)")
    top.add_argument("--once", action="store_true", help="print once and end")
    top.add_argument("--interval", type=float, default=1.0, metavar="SECONDS", help="between two looks (1)")
    top.set_defaults(run=_top)


def _top(args: argparse.Namespace) -> None:
    if not 0.1 <= args.interval <= 3600:
        raise InvalidArgument("--interval is 0.1 to 3600 seconds")
    live = sys.stdout.isatty() and not args.once and not args.json
    with connect(args, monitor=True) as pool:
        before: dict[str, Any] | None = None
        then = time.monotonic()
        while True:
            try:
                stat: dict[str, Any] | None = pool.stat(timeout=min(args.timeout, 10))
            except Error as error:
                if args.once:
                    raise
                stat, problem = None, f"{type(error).__name__}: {error}"
            now = time.monotonic()
            if stat is None:
                text = json.dumps({"error": problem}) if args.json else problem
            else:
                rates = _rates(before, stat, now - then)
                text = json.dumps({**stat, "per_s": rates}) if args.json else render(stat, rates)
            _show(text, live)
            if args.once:
                return
            before, then = stat, now
            time.sleep(args.interval)


def _show(text: str, live: bool) -> None:
    if live:  # from the upper left corner, each line's rest cleared, and what is below
        height = shutil.get_terminal_size().lines
        lines = text.splitlines()[: height - 1]
        sys.stdout.write("\x1b[H" + "".join(f"{line}\x1b[K\n" for line in lines) + "\x1b[J")
    else:
        sys.stdout.write(text + "\n")
    sys.stdout.flush()


def _rates(before: dict[str, Any] | None, now: dict[str, Any], seconds: float) -> dict[str, float]:
    """Counts per second over all nodes. A worker that was started anew counts from zero."""
    if before is None:
        return {}
    old = {node["id"]: node for node in before["nodes"]}
    rates = dict.fromkeys(_RATES, 0.0)
    for node in now["nodes"]:
        last = old.get(node["id"])
        for name in _RATES:
            grown = node[name] - last[name] if last and last["starts"] == node["starts"] else node[name]
            rates[name] += max(0, grown) / max(seconds, 1e-3)
    return rates


def render(stat: dict[str, Any], rates: dict[str, float]) -> str:
    nodes = stat["nodes"]
    used, limit = (sum(node[name] for node in nodes) for name in ("used_bytes", "limit_bytes"))
    lines = [
        f"pool view {stat['view']}: {len(nodes)} nodes, {stat['keys']} keys, {human(used)} of {human(limit)} used, "
        f"{sum(node['clients'] for node in nodes)} clients",
        "  ".join(f"{name} {value:.0f}/s" for name, value in rates.items()) or "rates: from the second look on",
        "",
        f"{'NODE':<10}{'STATE':<10}{'USED':>11}{'LIMIT':>11}  {'':<20}{'EXTENTS':>9}{'PINNED':>8}{'LIMBO':>11}"
        f"{'CLIENTS':>8}{'WAITING':>8}{'EVICTED':>9}  ADDRESS",
    ]
    for node in nodes:
        state = "draining" if node["draining"] else "ready" if node["ready"] else "not ready"
        share = node["used_bytes"] / node["limit_bytes"] if node["limit_bytes"] else 0
        bar = "#" * round(18 * min(1, share))
        lines.append(
            f"{node['id'][:8] + ('*' if node['is_home'] else ''):<10}{state:<10}{human(node['used_bytes']):>11}"
            f"{human(node['limit_bytes']):>11}  {'[' + bar.ljust(18, '.') + ']':<20}{node['extents']:>9}"
            f"{node['pinned']:>8}{human(node['limbo_bytes']):>11}{node['clients']:>8}{node['waiting']:>8}"
            f"{node['evictions']:>9}  {node['address']}"
        )
        if node["unready"] and not node["draining"]:
            lines.append(f"          {node['unready']}")
    lines.append("* directory")
    lines += quota_lines(stat["quotas"])
    return "\n".join(lines)
