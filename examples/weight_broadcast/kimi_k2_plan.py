"""Plans a full update of Kimi-K2 from 256 trainer ranks to inference engines, and says how long it would take.

    python kimi_k2_plan.py                        # 8 engines of 32 ranks, 400 Gbit/s NICs
    python kimi_k2_plan.py --engines 8 --tp 16 --gbit 200
    python kimi_k2_plan.py --plot nics.svg        # what every NIC does when

No weights are needed and none are moved: manifests are shapes. The time is that of the network model
(torch_mooncake.weights.simulate), beside the bound that no schedule can beat.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import kimi_k2
import plot

from torch_mooncake.weights.plan import plan
from torch_mooncake.weights.simulate import Network, simulate


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--engines", type=int, default=8, help="inference engines (default: %(default)s)")
    parser.add_argument("--tp", type=int, default=32, help="ranks of each, a divisor of 384 (default: %(default)s)")
    parser.add_argument("--gbit", type=float, default=400, help="rate of each rank's NIC (default: %(default)s)")
    parser.add_argument(
        "--payload", type=float, default=0.94, help="part of that rate that is not headers (default: %(default)s)"
    )
    parser.add_argument("--plot", type=Path, metavar="FILE.svg", help="draw the NICs over time")


def report(args: argparse.Namespace) -> dict[str, Any]:
    """Plans, predicts and prints. SystemExit if the trainers would not send each byte exactly once."""
    shapes = kimi_k2.Shapes()
    sources = kimi_k2.trainers(shapes)
    targets = kimi_k2.servers(shapes, instances=args.engines, tp=args.tp)
    places = [*kimi_k2.places(len(sources), "trainer"), *kimi_k2.places(len(targets), "server")]
    began = time.process_time()
    made = plan(sources, targets, places)
    planned = time.process_time() - began
    sent, received = made.traffic()
    if sent[: len(sources)].sum() != made.nbytes:
        raise SystemExit(f"the trainers would send {sent[: len(sources)].sum()} bytes of {made.nbytes} unique ones")
    rate = args.gbit * 1e9 / 8
    said = simulate(made, Network(nic=rate, payload=args.payload))
    ingress = float(received.max() / rate)
    egress = made.nbytes / len(sources) / rate
    rows = [
        ("parameters", f"{shapes.parameters / 1e12:.3f} T"),
        ("planned in", f"{planned:.1f} s of a core: {len(made.routes)} routes, {len(made.chunk_route)} chunks"),
        ("unique bytes", f"{made.nbytes / 1e9:.1f} GB"),
        (
            "sent by all trainers",
            f"{sent[: len(sources)].sum() / 1e9:.1f} GB, each byte once; at most "
            f"{sent[: len(sources)].max() / 1e9:.2f} GB a rank",
        ),
        (
            "received by a server rank",
            f"{received.max() / 1e9:.2f} GB, of {max(t.nbytes for t in targets) / 1e9:.2f} GB that it holds",
        ),
        ("bound: ingress", f"{ingress:.3f} s"),
        ("bound: egress of trainers", f"{egress:.3f} s"),
        (
            "predicted",
            f"{said.seconds:.3f} s on {args.gbit:g} Gbit/s NICs with {args.payload:g} of it payload, "
            f"{said.seconds / ingress:.2f} of the bound",
        ),
    ]
    for name, value in rows:
        print(f"{name:<28}{value}")
    if args.plot:
        args.plot.write_text(plot.svg(said, rate))
        print(f"{'NICs over time':<28}{args.plot}")
    return {
        "planned_s": planned, "nbytes": made.nbytes, "received_by_a_rank": int(received.max()),
        "bound_ingress_s": ingress, "bound_egress_s": egress, "predicted_s": said.seconds,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments(parser)
    report(parser.parse_args())


if __name__ == "__main__":
    main()
