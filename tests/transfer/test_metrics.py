"""stats() as Prometheus sees it, and the ranges in torch.profiler's traces."""

from __future__ import annotations

import json
import subprocess
import sys
import threading

import prometheus_client
import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families

import torch_mooncake as tm
from torch_mooncake import metrics


class Pair:
    def __init__(self, a: tm.Engine, b: tm.Engine, nbytes: int) -> None:
        self.here, self.there = bytearray(nbytes), bytearray(nbytes)
        self.local = a.register(self.here)
        self.peer = a.connect(b.addresses[0])
        self.remote = self.peer.open(b.register(self.there).descriptor())


def scrape(registry: prometheus_client.CollectorRegistry) -> dict[str, prometheus_client.Metric]:
    text = prometheus_client.generate_latest(registry).decode()
    return {family.name: family for family in text_string_to_metric_families(text)}


def value(family: prometheus_client.Metric, **labels: str) -> float:
    found = [s.value for s in family.samples if all(s.labels.get(k) == v for k, v in labels.items())]
    assert len(found) == 1, (family.name, labels, family.samples)
    return found[0]


def test_the_exposition_says_what_stats_says() -> None:
    with tm.Engine(transports=["tcp"], name="a") as a, tm.Engine(transports=["tcp"], name="b") as b:
        pair = Pair(a, b, 200_000)
        for _ in range(3):
            a.write(pair.local, pair.remote).wait()
        a.read(pair.local[:100], pair.remote[:100], notify=b"n").wait()
        b.next_notification(10)
        registry = prometheus_client.CollectorRegistry()
        metrics.register(registry, [a, b])
        families = scrape(registry)
        name = f"a-{a.id[:4].hex()}"
        prefix = metrics.PREFIX
        assert all(family.startswith(prefix) for family in families)
        assert value(families[prefix + "ops"], engine=name, direction="write", outcome="done") == 3
        assert value(families[prefix + "ops"], engine=name, direction="read", outcome="failed") == 0
        assert value(families[prefix + "bytes"], engine=name, transport="unix", flow="sent") == 600_000
        assert value(families[prefix + "bytes"], engine=name, transport="unix", flow="received") == 100
        assert value(families[prefix + "op_bytes"], engine=name, direction="write", size="1MiB") == 600_000
        assert value(families[prefix + "notifications"], engine=f"b-{b.id[:4].hex()}") == 1
        assert value(families[prefix + "quarantined_regions"], engine=name) == 0
        lanes = [s for s in families[prefix + "lane_up"].samples if s.labels["engine"] == name]
        assert len(lanes) >= 3
        assert all(s.value == 1 for s in lanes)
        # Units and kinds as Prometheus wants them.
        assert families[prefix + "latency_seconds"].type == "histogram"
        for counter in ("ops", "bytes", "op_bytes", "resent_slices", "failovers", "notifications", "lane_bytes"):
            assert families[prefix + counter].type == "counter"
            assert {s.name for s in families[prefix + counter].samples} == {f"{prefix}{counter}_total"}


def test_stats_are_json() -> None:
    with tm.Engine(transports=["tcp"]) as a, tm.Engine(transports=["tcp"]) as b:
        pair = Pair(a, b, 200_000)
        a.write(pair.local, pair.remote).wait()
        stats = a.stats()
        assert stats["lanes"][0]["peer_id"] == b.id.hex()
        assert json.loads(json.dumps(stats)) == stats


def test_lanes_of_peers_of_one_name_are_told_apart() -> None:
    with tm.Engine(transports=["tcp"]) as a, tm.Engine(transports=["tcp"]) as b, tm.Engine(transports=["tcp"]) as c:
        pairs = [Pair(a, b, 100), Pair(a, c, 100)]
        registry = prometheus_client.CollectorRegistry()
        metrics.register(registry, [a, b, c])
        samples = scrape(registry)[metrics.PREFIX + "lane_up"].samples
        of_a = [s.labels for s in samples if s.labels["engine"] == f"{a.name}-{a.id[:4].hex()}"]
        assert {labels["peer"].rpartition("-")[2] for labels in of_a} == {b.id[:4].hex(), c.id[:4].hex()}
        assert len({tuple(sorted(s.labels.items())) for s in samples}) == len(samples)
        assert all(pair.peer.alive for pair in pairs)


def test_histograms_are_cumulative_and_add_up() -> None:
    with tm.Engine(name="a") as a, tm.Engine() as b:
        pair = Pair(a, b, 4096)
        for _ in range(50):
            a.write(pair.local, pair.remote).wait()
        registry = prometheus_client.CollectorRegistry()
        metrics.register(registry, [a])
        samples = scrape(registry)[metrics.PREFIX + "latency_seconds"].samples
        assert {s.labels["transport"] for s in samples} == {"local"}
        assert {s.labels["size"] for s in samples} == {"4KiB"}
        buckets = [(float(s.labels["le"]), s.value) for s in samples if s.name.endswith("_bucket")]
        assert buckets == sorted(buckets)
        assert [n for _, n in buckets] == sorted(n for _, n in buckets)
        assert buckets[-1] == (float("inf"), 50)
        assert buckets[0][0] == pytest.approx(256e-9)
        assert buckets[-2][0] == pytest.approx(2**35 * 1e-9)
        (total,) = [s.value for s in samples if s.name.endswith("_sum")]
        assert 0 < total < 10
        assert total == pytest.approx(a.stats()["latencies"][0]["latency_sum_s"])


def test_all_live_engines_are_reported_and_gone_ones_are_not() -> None:
    registry = prometheus_client.CollectorRegistry()
    metrics.register(registry)
    engine = tm.Engine(name="passing")
    stop = threading.Event()

    def churn() -> None:
        while not stop.is_set():
            tm.Engine(name="churn").close()

    thread = threading.Thread(target=churn)
    thread.start()
    try:
        for _ in range(20):
            scrape(registry)
    finally:
        stop.set()
        thread.join()
    label = f"passing-{engine.id[:4].hex()}"
    assert value(scrape(registry)[metrics.PREFIX + "sessions"], engine=label) == 0
    engine.close()
    del engine
    engines = {s.labels["engine"] for s in scrape(registry)[metrics.PREFIX + "sessions"].samples}
    assert label not in engines


def test_prometheus_client_is_optional() -> None:
    code = (
        "import sys; sys.modules['prometheus_client'] = None\n"
        "import torch_mooncake.metrics as m, torch_mooncake as tm; tm.Engine().close()\n"
        "try: m.register()\nexcept ImportError: print('told')"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "told\n"


def test_a_profiler_sees_ranges_and_nothing_is_recorded_without_one() -> None:
    with tm.Engine() as a, tm.Engine() as b:
        pair = Pair(a, b, 4096)
        a.write(pair.local, pair.remote).wait()
        with torch.profiler.profile() as profiler:
            a.write(pair.local, pair.remote).wait()
            a.read(pair.local, pair.remote).wait()
        a.write(pair.local, pair.remote).wait()
        counts = {e.key: e.count for e in profiler.key_averages() if e.key.startswith("torch_mooncake::")}
        assert counts == {"torch_mooncake::write": 1, "torch_mooncake::read": 1, "torch_mooncake::wait": 2}


def test_an_engine_needs_no_torch() -> None:
    code = (
        "import sys, torch_mooncake as tm\n"
        "a, b = tm.Engine(), tm.Engine()\n"
        "l = a.register(bytearray(64)); r = a.connect(b.addresses[0]).open(b.register(bytearray(64)).descriptor())\n"
        "a.write(l, r).wait(); print('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"
