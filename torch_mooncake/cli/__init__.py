"""``torch-mooncake``: node, drain, top, doctor, bench, ls, get, put, rm, exists, info, stat, weights.
All but the last run without torch."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from typing import Any

import torch_mooncake
from torch_mooncake import errors

EXIT_ERROR, EXIT_MISSING = 1, 3
EXIT_STATUS = """exit status:
  0    done
  1    an error, told on stderr (and on stdout as {"error": CODE, "message": ...} with --json)
  2    wrong usage
  3    a key is not there; for node: this host has a node of that pool
  130  interrupted (Ctrl-C)
"""


def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    try:
        return int(args.run(args) or 0)
    except errors.KeyNotFound as error:
        return _fail(args, error, EXIT_MISSING)
    except BrokenPipeError:  # whoever read our output has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_ERROR
    except (errors.Error, OSError) as error:
        return _fail(args, error, EXIT_ERROR)
    except KeyboardInterrupt:
        return 130


def _fail(args: argparse.Namespace, error: Exception, status: int) -> int:
    if args.json:
        print(json.dumps({"error": getattr(error, "code", "IO"), "message": str(error)}))
    print(f"torch-mooncake: {type(error).__name__}: {error}", file=sys.stderr)
    return status


def _parser() -> argparse.ArgumentParser:
    from torch_mooncake.cli import bench, copy, doctor, events, node, objects, top, weights

    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--json", action="store_true", help="print one JSON document")
    common.add_argument("--address", metavar="HOST:PORT", help="node to use (default: this host's)")
    common.add_argument("--pool", help="name of this host's pool (TM_POOL)")
    common.add_argument(
        "--timeout", type=seconds, default=30, metavar="SECONDS", help="deadline of the whole command, beyond --wait"
    )

    parser = argparse.ArgumentParser(
        prog="torch-mooncake",
        description="The pool of tensors, from the shell.",
        epilog=EXIT_STATUS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"torch-mooncake {torch_mooncake.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for module in (node, top, doctor, bench, objects, copy, events, weights):
        module.add_commands(commands, common)
    return parser


def seconds(text: str) -> float:
    """A duration, for argparse: 0 or more; "inf" is for ever."""
    value = float(text)
    if not value >= 0:
        raise ValueError(text)
    return value


def emit(args: argparse.Namespace, document: Any, text: str) -> None:
    """Print ``text``, or ``document`` with --json."""
    print(json.dumps(document) if args.json else text, end="\n" if args.json or text else "")


def human(nbytes: int) -> str:
    """1536 → "1.5 KiB"."""
    value = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def run() -> None:
    """Entry point of ``python -m torch_mooncake``."""
    sys.exit(main())


__all__ = ["EXIT_ERROR", "EXIT_MISSING", "emit", "human", "main", "run", "seconds"]
