"""``torch-mooncake events``: what becomes of keys, printed or published over ZMQ as KV events."""

from __future__ import annotations

import argparse
import json
import signal
import threading
from typing import Any

from torch_mooncake.cli.objects import connect


def add_commands(commands: Any, common: argparse.ArgumentParser) -> None:
    events = commands.add_parser("events", parents=[common], help="print what becomes of keys, or publish KV events")
    events.add_argument("prefix", nargs="?", default="", help="of the keys (printing)")
    events.add_argument(
        "--zmq", metavar="ENDPOINT", help="publish KV events here until told to stop, e.g. tcp://*:5557"
    )
    events.add_argument("--replay", metavar="ENDPOINT", help="send again here what was missed, e.g. tcp://*:5558")
    events.add_argument("--shape", choices=("vllm", "vllm-map", "rfc1527"), help="of the messages (vllm)")
    events.add_argument("--namespace", help="publish this namespace of pages only")
    events.add_argument("--topic", help="first frame of the messages (empty)")
    events.set_defaults(run=_events, refuse=events.error)


def _events(args: argparse.Namespace) -> None:
    if args.zmq and args.prefix:
        args.refuse("PREFIX is for printing: --zmq publishes pages, of one --namespace or of all")
    for name in ("replay", "shape", "namespace", "topic"):
        if not args.zmq and getattr(args, name) is not None:
            args.refuse(f"--{name} is for --zmq")
    with connect(args, monitor=True) as pool:
        if args.zmq:
            return _publish(args, pool)
        with pool.subscribe(args.prefix) as subscription:
            for event in subscription:
                text = json.dumps(event._asdict()) if args.json else f"{event.kind:<8} {event.tier:<5} {event.key}"
                print(text, flush=True)
    return None


def _publish(args: argparse.Namespace, pool: Any) -> None:
    from torch_mooncake.kv.events import KVEventPublisher

    over = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: over.set())
    with KVEventPublisher(
        pool,
        args.zmq,
        replay=args.replay,
        namespace=args.namespace,
        topic=args.topic or "",
        shape=args.shape or "vllm",
    ) as publisher:
        print(json.dumps({"zmq": publisher.endpoint, "replay": publisher.replay}), flush=True)
        while not over.wait(1.0):
            if publisher.error is not None:
                raise publisher.error
