"""What is shown in → Prometheus' text format; labels are bounded: no run, no path."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from typing import Any

from debubble import __version__
from debubble.annexes.watch.judge import KINDS
from debubble.errors import MissingExtra

try:
    from prometheus_client import CollectorRegistry, generate_latest
    from prometheus_client.core import (
        CounterMetricFamily,
        GaugeMetricFamily,
        Metric,
    )
    from prometheus_client.registry import Collector
except ImportError as missing:
    raise MissingExtra(
        "the service needs prometheus-client", hint="pip install 'debubble[watch]'"
    ) from missing

# A pipeline of more stages is shown as a whole only.
MOST_STAGES = 64
# What is bubble among the causes: the rest is work.
_WORK = frozenset({"compute", "collective", "collective_wait"})


class Counts:
    """What this process counted itself; threads add to it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.analysis_seconds = 0.0
        self.refusals: dict[str, int] = {}
        self.scans: dict[str, float] = {}
        self.failures: dict[str, int] = {}
        self._troubles: dict[str, dict[str, str]] = {}
        self._newer = True

    def analysed(self, seconds: float) -> None:
        """Count one analysis."""
        with self._lock:
            self.analysis_seconds += seconds
            self._newer = True

    def changed(self) -> None:
        """Note that something else did."""
        with self._lock:
            self._newer = True

    def refused(self, source: str) -> None:
        """Count a capture that a server did not let us take."""
        with self._lock:
            self.refusals[source] = self.refusals.get(source, 0) + 1
            self._newer = True

    def scanned(self, source: str, now_s: float) -> None:
        """Note that a source was looked into."""
        with self._lock:
            self.scans[source] = now_s
            self._newer = True

    def trouble(self, source: str, part: str, problem: str) -> None:
        """Note what is the matter with a part of a source: its folder, its server."""
        with self._lock:
            self._troubles.setdefault(source, {})[part] = problem
            self.failures[source] = self.failures.get(source, 0) + 1
            self._newer = True

    def well(self, source: str, part: str) -> None:
        """Note that nothing is, any more."""
        with self._lock:
            if self._troubles.get(source, {}).pop(part, None) is not None:
                self._newer = True

    def troubles(self) -> dict[str, list[str]]:
        """Return what is the matter now, by source."""
        with self._lock:
            return {
                source: [f"{part}: {problem}" for part, problem in sorted(parts.items())]
                for source, parts in self._troubles.items()
            }

    def is_newer(self) -> bool:
        """Tell whether there is anything new since the last time."""
        with self._lock:
            newer, self._newer = self._newer, False
            return newer


_PIPELINE, _STAGE = ("pipeline",), ("pipeline", "stage")
_HOP = ("pipeline", "src_stage", "dst_stage")
_BUCKET = ("pipeline", "context_bucket")
_DRIFT = ("pipeline", "metric", "context_bucket")
# Every gauge: what it says, and its labels.
GAUGES: dict[str, tuple[str, tuple[str, ...]]] = {
    "build_info": ("Which debubble answers.", ("version",)),
    "last_capture_timestamp_seconds": ("When the last one was taken.", _PIPELINE),
    "last_scan_timestamp_seconds": ("When a source was last read.", _PIPELINE),
    "captures_given_up": ("Captures that wait to be tried again.", _PIPELINE),
    "source_up": ("1 where a source can be read and asked, else 0.", _PIPELINE),
    "alerts_open": ("Alerts that nobody acknowledged.", ("pipeline", "kind")),
    "bubble_ratio": ("The bubble, by cause and in all.", ("pipeline", "cause")),
    "bubble_theoretical_ratio": ("The schedule's own bubble.", ("pipeline", "schedule")),
    "batch_latency_seconds": ("Batch latency of the last capture.", _BUCKET),
    "microbatches_per_second": ("Throughput of the last capture.", _BUCKET),
    "traffic_ratio": ("Requests by context length.", _BUCKET),
    "stage_bubble_ratio": ("The bubble of a stage.", _STAGE),
    "useful_compute_ratio": ("What a stage computes.", _STAGE),
    "gpu_busy_ratio": ("What a utilisation dashboard shows.", _STAGE),
    "stage_peak_memory_bytes": ("The most memory in use.", _STAGE),
    "stage_memory_limit_bytes": ("What its rank may hold.", _STAGE),
    "link_bandwidth_bytes_per_second": ("What a hop carried.", _HOP),
    "link_latency_seconds": ("What a message took on the wire.", _HOP),
    "link_slow": ("1 where a hop is slow by its peers, else 0.", _HOP),
    "link_efficiency_ratio": ("What a hop carried, of what its peers do.", _HOP),
    "link_attributed_bubble_seconds": ("What a slow hop costs each batch of the capture.", _HOP),
    "drift_score": ("How near a figure is to an alert; 1 or more is one.", _DRIFT),
    "reference_captures": ("Captures of the reference; no alert before it has all.", _DRIFT),
    "reference_captures_needed": ("How many it takes.", _PIPELINE),
}
_STAGE_GAUGES = {
    "bubble": "stage_bubble_ratio",
    "useful": "useful_compute_ratio",
    "busy": "gpu_busy_ratio",
    "peak_bytes": "stage_peak_memory_bytes",
    "limit_bytes": "stage_memory_limit_bytes",
}
_HOP_GAUGES = {
    "bytes_per_s": "link_bandwidth_bytes_per_second",
    "wire_s": "link_latency_seconds",
    "slow": "link_slow",
    "efficiency": "link_efficiency_ratio",
    "cost_s": "link_attributed_bubble_seconds",
}


class _Page(Collector):
    """The families of one page."""

    def __init__(self) -> None:
        self._gauges = {
            name: GaugeMetricFamily(f"debubble_{name}", words, labels=labels)
            for name, (words, labels) in GAUGES.items()
        }
        self.others: list[Metric] = []

    def put(self, name: str, value: float | None, *labels: str) -> None:
        """Add a value, where it is known."""
        if value is not None:
            self._gauges[name].add_metric(labels, float(value))

    def collect(self) -> Iterator[Metric]:
        return iter((*self._gauges.values(), *self.others))


def write_metrics(view: Mapping[str, Any], counts: Counts) -> bytes:
    """Write the page that Prometheus scrapes."""
    page = _Page()
    page.put("build_info", 1, __version__)
    words, labels = "Captures by what became of them.", (*_PIPELINE, "outcome")
    captures = CounterMetricFamily("debubble_captures", words, labels=labels)
    words = "How often a source failed."
    failures = CounterMetricFamily("debubble_source_failures", words, labels=_PIPELINE)
    for pipeline in view["pipelines"]:
        name, outcomes = pipeline["name"], pipeline["captures"]
        for outcome in ("stored", "unreadable"):
            captures.add_metric([name, outcome], outcomes.get(outcome, 0))
        captures.add_metric([name, "refused"], counts.refusals.get(name, 0))
        failures.add_metric([name], counts.failures.get(name, 0))
        page.put("last_scan_timestamp_seconds", counts.scans.get(name), name)
        page.put("captures_given_up", outcomes.get("given_up", 0), name)
        page.put("source_up", not pipeline["troubles"], name)
        alerts = [alert["kind"] for alert in view["open_alerts"] if alert["pipeline"] == name]
        for kind in KINDS:
            page.put("alerts_open", alerts.count(kind), name, kind)
        page.put("reference_captures_needed", pipeline["reference"], name)
        for track in pipeline["drift"]:
            which = (name, track["metric"], str(track["context_bucket"] or "unknown"))
            page.put("drift_score", track["score"], *which)
            page.put("reference_captures", track["reference_captures"], *which)
        if pipeline["latest"]:
            _put_capture(page, name, pipeline["latest"])
    seconds = CounterMetricFamily("debubble_analysis_seconds", "Time spent in analysis.")
    seconds.add_metric([], counts.analysis_seconds)
    page.others = [captures, failures, seconds]
    registry = CollectorRegistry(auto_describe=False)
    registry.register(page)
    return generate_latest(registry)


def _put_capture(page: _Page, name: str, latest: Mapping[str, Any]) -> None:
    """Put what the last capture gave on the page."""
    page.put("last_capture_timestamp_seconds", latest["captured_s"], name)
    if "numbers" not in latest:
        return
    numbers, bucket = latest["numbers"], str(latest["context_bucket"] or "unknown")
    page.put("bubble_ratio", numbers.get("bubble_fraction"), name, "total")
    for cause, value in latest["causes"].items():
        page.put("bubble_ratio", None if cause in _WORK else value, name, cause)
    theory, schedule = latest["theory_bubble_fraction"], latest["schedule"] or "unknown"
    page.put("bubble_theoretical_ratio", theory, name, schedule)
    page.put("batch_latency_seconds", numbers.get("batch_latency_s"), name, bucket)
    page.put("microbatches_per_second", numbers.get("microbatches_per_s"), name, bucket)
    whole = sum(latest["requests"].values()) or 1
    for length, count in latest["requests"].items():
        page.put("traffic_ratio", count / whole, name, length)
    stages, hops = latest["stages"], latest["hops"]
    for stage in stages if len(stages) <= MOST_STAGES else []:
        for key, gauge in _STAGE_GAUGES.items():
            page.put(gauge, stage[key], name, stage["stage"])
    for hop in hops if len(hops) <= 2 * MOST_STAGES else []:
        for key, gauge in _HOP_GAUGES.items():
            page.put(gauge, hop[key], name, hop["source"], hop["destination"])
