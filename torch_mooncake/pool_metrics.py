"""Prometheus export of a pool's nodes. Needs ``prometheus-client``, imported on first use.

``torch-mooncake node --http`` serves the metrics of that node. A program that has a pool may export all its nodes:

    registry.register(PoolCollector(pool.stat))

All names begin with ``torch_mooncake_pool_``; the label ``node`` is the first eight digits of the node's id.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from torch_mooncake.errors import Error

if TYPE_CHECKING:
    from prometheus_client.core import Metric

PREFIX = "torch_mooncake_pool_"

# name in stat()["nodes"], metric, text
_GAUGES = (
    ("ready", "ready", "1 while the node takes new objects."),
    ("draining", "draining", "1 while the node is leaving."),
    ("is_home", "is_home", "1 on the directory node."),
    ("limit_bytes", "limit_bytes", "Memory lent."),
    ("used_bytes", "used_bytes", "Memory of extents, whatever their state, but for what is granted."),
    ("prepared_bytes", "prepared_bytes", "Memory of objects that are being written."),
    ("limbo_bytes", "limbo_bytes", "Memory of what was freed and is still pinned or fenced."),
    ("fenced_bytes", "fenced_bytes", "Memory in limbo because its writer may still write."),
    ("granted_bytes", "granted_bytes", "Memory that clients have in advance."),
    ("extents", "extents", "Objects' parts on this node."),
    ("pinned", "pinned_extents", "Extents that somebody reads in place."),
    ("soft_pinned_bytes", "soft_pinned_bytes", "Memory of keys that are evicted last."),
    ("hard_pinned_bytes", "hard_pinned_bytes", "Memory of keys that are never evicted."),
    ("clients", "clients", "Sessions of users."),
    ("waiting", "waiting_writers", "Writers that wait for room."),
    ("to_copy", "keys_to_copy", "Keys with fewer replicas than they were put with (told by the directory's node)."),
    ("ssd.limit_bytes", "ssd_limit_bytes", "Disk space that may be used."),
    ("ssd.used_bytes", "ssd_used_bytes", "Disk space of the log's files."),
    ("ssd.records", "ssd_records", "Objects' parts that can be read from SSDs."),
    ("ssd.record_bytes", "ssd_record_bytes", "Disk space of those."),
    ("ssd.out_of_service", "ssd_out_of_service", "SSD folders given up because they failed."),
)
_COUNTERS = (
    ("starts", "worker_starts", "Workers that the keeper has started; above 1 something ended one."),
    ("evictions", "evictions", "Extents evicted to make room."),
    ("reservations", "reservations", "Extents handed to writers."),
    ("refusals", "full", "Times a writer found no room, each try counted."),
    ("lookups", "lookups", "Keys looked up here."),
    ("misses", "misses", "Keys looked up here that were not there."),
    ("commits", "commits", "Objects' versions that became visible."),
    ("removals", "removals", "Keys removed by their users."),
    ("copies", "copies", "Replicas made here of what other nodes hold: lost ones, and those of leaving nodes."),
    ("copied_bytes", "copied_bytes", "Bytes of those."),
    ("ssd.demotions", "ssd_demotions", "Objects' parts written to SSDs."),
    ("ssd.promotions", "ssd_promotions", "Objects' parts brought back from SSDs."),
    ("ssd.dropped", "ssd_dropped", "Evicted without being written: the queue was full, or the log had no room."),
    ("ssd.refused", "ssd_refused", "Evicted without being written: not admitted, or too large."),
    ("ssd.reclaimed", "ssd_reclaimed", "Lost on SSDs as the oldest."),
    ("ssd.errors", "ssd_errors", "Reads, writes and files that failed."),
    ("ssd.corrupt", "ssd_corrupt", "Records whose checksum did not match."),
)


class PoolCollector:
    """A collector for ``CollectorRegistry.register``. ``stat``: returns what ``Pool.stat`` does, at each scrape.

    When ``stat`` raises one of the library's errors, the scrape says ``torch_mooncake_pool_up 0`` and nothing else.
    """

    def __init__(self, stat: Callable[[], dict[str, Any]]) -> None:
        self._stat = stat

    def describe(self) -> list[Metric]:
        """Keeps ``register`` from asking the pool."""
        return []

    def collect(self) -> Iterator[Metric]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        try:
            stat = self._stat()
        except Error:
            yield GaugeMetricFamily(PREFIX + "up", "1 if the nodes answer.", 0)
            return
        yield GaugeMetricFamily(PREFIX + "up", "1 if the nodes answer.", 1)
        yield GaugeMetricFamily(PREFIX + "view", "Number of the membership's view.", stat["view"])
        yield GaugeMetricFamily(PREFIX + "keys", "Keys in the directory, told by its node.", stat["keys"])
        for kind, rows in ((GaugeMetricFamily, _GAUGES), (CounterMetricFamily, _COUNTERS)):
            for field, name, text in rows:
                family = kind(PREFIX + name, text, labels=("node",))
                for node in stat["nodes"]:
                    table, _, key = field.rpartition(".")
                    family.add_metric((node["id"][:8],), float((node[table] if table else node)[key]))
                yield family
