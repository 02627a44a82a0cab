"""Prometheus export of the engines of this process. Needs ``prometheus-client``, imported on first use.

    import torch_mooncake.metrics as metrics
    metrics.register()                                   # in prometheus_client's default registry
    prometheus_client.start_http_server(9100)            # as in any other program

Every scrape asks ``engine.stats()`` of the engines that live then. All names begin with ``torch_mooncake_transfer_``
and carry the label ``engine``: the engine's name and the first four bytes of its id. So does ``peer`` of the lanes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from prometheus_client.core import Metric
    from prometheus_client.registry import CollectorRegistry

    from torch_mooncake.transfer import Engine

PREFIX = "torch_mooncake_transfer_"


class EngineCollector:
    """A collector for ``CollectorRegistry.register``. ``engines``: those to report (default: all that live)."""

    def __init__(self, engines: Iterable[Engine] | None = None) -> None:
        self._engines = None if engines is None else list(engines)

    def collect(self) -> Iterator[Metric]:
        """The metrics now. Safe from any thread. Engines that are closed report their last counts."""
        from torch_mooncake import transfer

        engines = self._engines if self._engines is not None else transfer.live_engines()
        families = _Families()
        for engine in engines:
            families.add(f"{engine.name}-{engine.id[:4].hex()}", engine.stats())
        yield from families.all()

    def describe(self) -> Iterator[Metric]:
        """Keeps ``register`` from collecting: which families there are is known."""
        yield from _Families().all()


def register(registry: CollectorRegistry | None = None, engines: Iterable[Engine] | None = None) -> EngineCollector:
    """Make the engines part of a registry (default: prometheus_client's). Returns the collector, to unregister it."""
    import prometheus_client

    collector = EngineCollector(engines)
    (registry or prometheus_client.REGISTRY).register(collector)
    return collector


class _Families:
    """One family for each name, filled engine by engine."""

    def __init__(self) -> None:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

        def counter(name: str, text: str, *labels: str) -> Any:
            return CounterMetricFamily(PREFIX + name, text, labels=("engine", *labels))

        def gauge(name: str, text: str, *labels: str) -> Any:
            return GaugeMetricFamily(PREFIX + name, text, labels=("engine", *labels))

        lane = ("peer", "transport", "rail", "lane")
        self.ops = counter("ops", "Ops that ended.", "direction", "outcome")
        self.in_flight = gauge("ops_in_flight", "Ops that have begun and not ended.")
        self.bytes = counter("bytes", "Payload sent and applied here.", "transport", "flow")
        self.op_bytes = counter("op_bytes", "Payload of ops that ended well.", "direction", "transport", "size")
        self.latency = HistogramMetricFamily(
            PREFIX + "latency_seconds",
            "From the call to the end of ops that ended well.",
            labels=("engine", "direction", "transport", "size"),
        )
        self.resent = counter("resent_slices", "Slices sent again because their lane died.")
        self.failovers = counter("failovers", "Lanes and rails taken out while their peer lives.")
        self.notifications = counter("notifications", "Notifications received.")
        self.regions = gauge("regions", "Regions that peers may open.")
        self.quarantined = gauge("quarantined_regions", "Deregistered regions that a peer can still touch.")
        self.sessions = gauge("sessions", "Peers connected.")
        self.queued = gauge("queued_tasks", "Tasks that wait for a thread of the engine.", "queue")
        self.lane_bytes = counter("lane_bytes", "What a lane carried, frames' headers included.", *lane, "flow")
        self.lane_queued = gauge("lane_queued_bytes", "Accepted and not yet given to the kernel or the NIC.", *lane)
        self.lane_up = gauge("lane_up", "1 while the lane lives.", *lane)

    def all(self) -> Iterator[Metric]:
        yield from vars(self).values()

    def add(self, engine: str, stats: dict[str, Any]) -> None:
        for direction in ("read", "write"):
            for outcome, n in stats[f"{direction}s"].items():
                self.ops.add_metric((engine, direction, outcome), n)
        for flow in ("sent", "received"):
            for transport, n in stats[f"bytes_{flow}"].items():
                self.bytes.add_metric((engine, transport, flow), n)
        for entry in stats["latencies"]:
            labels = (engine, entry["direction"], entry["transport"], size_label(entry["up_to_nbytes"]))
            self.op_bytes.add_metric(labels, entry["nbytes"])
            self.latency.add_metric(labels, _cumulative(entry["latency"]), entry["latency_sum_s"])
        for family, key in (
            (self.in_flight, "ops_in_flight"),
            (self.resent, "resent_slices"),
            (self.failovers, "failovers"),
            (self.notifications, "notifications"),
            (self.regions, "regions"),
            (self.quarantined, "quarantined_regions"),
            (self.sessions, "sessions"),
        ):
            family.add_metric((engine,), stats[key])
        for queue in ("mover", "callback"):
            self.queued.add_metric((engine, queue), stats[f"{queue}_queue"])
        for lane in stats["lanes"]:
            peer = f"{lane['peer']}-{lane['peer_id'][:8]}"
            place = (engine, peer, lane["transport"], lane["rail"], lane["lane"])
            self.lane_bytes.add_metric((*place, "sent"), lane["bytes_sent"])
            self.lane_bytes.add_metric((*place, "received"), lane["bytes_received"])
            self.lane_queued.add_metric(place, lane["queued_bytes"])
            self.lane_up.add_metric(place, int(lane["alive"]))


def size_label(up_to_nbytes: int | None) -> str:
    """4096 → "4KiB"; None (no bound) → "+Inf"."""
    if up_to_nbytes is None:
        return "+Inf"
    for shift, unit in ((20, "MiB"), (10, "KiB")):
        if up_to_nbytes >= 1 << shift:
            return f"{up_to_nbytes >> shift}{unit}"
    return str(up_to_nbytes)


def _cumulative(buckets: list[int]) -> list[tuple[str, int]]:
    """Prometheus' form of a histogram: each bucket counts what the lower ones do as well."""
    from torch_mooncake._core import LATENCY_BOUNDS_S

    out, total = [], 0
    for bound, n in zip((*map(repr, LATENCY_BOUNDS_S), "+Inf"), buckets, strict=True):
        total += n
        out.append((bound, total))
    return out
