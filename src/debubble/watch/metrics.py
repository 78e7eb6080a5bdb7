"""What is shown in → Prometheus' text format; labels are bounded: no run, no path."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from debubble import __version__
from debubble.errors import MissingExtra
from debubble.watch.judge import KINDS

try:
    from prometheus_client import CollectorRegistry, generate_latest
    from prometheus_client.core import (
        CounterMetricFamily,
        GaugeMetricFamily,
        HistogramMetricFamily,
        Metric,
    )
    from prometheus_client.registry import Collector
except ImportError as missing:
    raise MissingExtra(
        "the service needs prometheus-client", hint="pip install 'debubble[watch]'"
    ) from missing

# A pipeline of more stages is shown as a whole only.
MOST_STAGES = 64
LATENCY_BOUNDS_S = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
# What is bubble among the causes: the rest is work.
_WORK = frozenset({"compute", "collective", "collective_wait"})


class Counts:
    """What this process counted itself; threads add to it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.analysis_seconds = 0.0
        self.analyses = 0
        self.refusals: dict[str, int] = {}
        self.scans: dict[str, float] = {}
        self.failures: dict[str, int] = {}
        self._troubles: dict[str, dict[str, str]] = {}
        self._newer = True

    def analysed(self, seconds: float) -> None:
        """Count one analysis."""
        with self._lock:
            self.analyses += 1
            self.analysis_seconds += seconds

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


class _Families(Collector):
    """The families of one page."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = tuple(families)

    def collect(self) -> Iterator[Metric]:
        return iter(self._families)


def write_metrics(
    view: Mapping[str, Any],
    histograms: Mapping[str, Mapping[int, tuple[list[int], float]]],
    counts: Counts,
) -> bytes:
    """Write the page that Prometheus scrapes."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(
        _Families(
            [
                *_service(view, counts),
                *_numbers(view["pipelines"]),
                *_stages(view["pipelines"]),
                *_links(view["pipelines"]),
                *_drift(view["pipelines"]),
                _latency(histograms),
            ]
        )
    )
    return generate_latest(registry)


def _gauge(name: str, words: str, labels: list[str]) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"debubble_{name}", words, labels=labels)


def _service(view: Mapping[str, Any], counts: Counts) -> Iterator[Metric]:
    build = _gauge("build_info", "Which debubble answers.", ["version"])
    build.add_metric([__version__], 1)
    captures = CounterMetricFamily(
        "debubble_captures", "Captures by what became of them.", labels=["pipeline", "outcome"]
    )
    last = _gauge("last_capture_timestamp_seconds", "When the last one came.", ["pipeline"])
    for pipeline in view["pipelines"]:
        for outcome in ("stored", "unreadable"):
            captures.add_metric([pipeline["name"], outcome], pipeline["captures"].get(outcome, 0))
        refusals = counts.refusals.get(pipeline["name"], 0)
        captures.add_metric([pipeline["name"], "refused"], refusals)
        if pipeline["latest"]:
            last.add_metric([pipeline["name"]], pipeline["latest"]["found_s"])
    scans = _gauge("last_scan_timestamp_seconds", "When a source was last read.", ["pipeline"])
    for name, at_s in sorted(counts.scans.items()):
        scans.add_metric([name], at_s)
    given_up = _gauge("captures_given_up", "Captures that wait to be tried again.", ["pipeline"])
    well = _gauge("source_up", "1 where a source can be read and asked, else 0.", ["pipeline"])
    failures = CounterMetricFamily(
        "debubble_source_failures", "How often a source failed.", labels=["pipeline"]
    )
    for pipeline in view["pipelines"]:
        given_up.add_metric([pipeline["name"]], pipeline["captures"].get("given_up", 0))
        well.add_metric([pipeline["name"]], 0 if pipeline["troubles"] else 1)
        failures.add_metric([pipeline["name"]], counts.failures.get(pipeline["name"], 0))
    alerts = _gauge("alerts_open", "Alerts that nobody acknowledged.", ["pipeline", "kind"])
    for pipeline in view["pipelines"]:
        for kind in KINDS:
            same = (
                alert
                for alert in view["open_alerts"]
                if (alert["pipeline"], alert["kind"]) == (pipeline["name"], kind)
            )
            alerts.add_metric([pipeline["name"], kind], sum(1 for _ in same))
    seconds = CounterMetricFamily("debubble_analysis_seconds", "Time spent in analysis.")
    seconds.add_metric([], counts.analysis_seconds)
    yield from (build, captures, last, scans, given_up, well, failures, alerts, seconds)


def _numbers(pipelines: list[dict[str, Any]]) -> Iterator[Metric]:
    labels = ["pipeline", "context_bucket"]
    rate = _gauge("microbatches_per_second", "Throughput of the last capture.", labels)
    theory = _gauge(
        "bubble_theoretical_ratio", "The schedule's own bubble.", ["pipeline", "schedule"]
    )
    bubble = _gauge("bubble_ratio", "The bubble, by cause and in all.", ["pipeline", "cause"])
    share = _gauge("traffic_ratio", "Requests by context length.", labels)
    for pipeline in pipelines:
        latest = pipeline["latest"]
        if not latest or "numbers" not in latest:
            continue
        bucket = str(latest["context_bucket"] or "unknown")
        numbers = latest["numbers"]
        if "bubble_fraction" in numbers:
            bubble.add_metric([pipeline["name"], "total"], numbers["bubble_fraction"])
        for cause, value in latest["causes"].items():
            if cause not in _WORK:
                bubble.add_metric([pipeline["name"], cause], value)
        if "microbatches_per_s" in numbers:
            rate.add_metric([pipeline["name"], bucket], numbers["microbatches_per_s"])
        if latest["theory_bubble_fraction"] is not None:
            names = [pipeline["name"], latest["schedule"] or "unknown"]
            theory.add_metric(names, latest["theory_bubble_fraction"])
        whole = sum(latest["requests"].values())
        for length, count in latest["requests"].items() if whole else ():
            share.add_metric([pipeline["name"], length], count / whole)
    yield from (bubble, theory, rate, share)


def _stages(pipelines: list[dict[str, Any]]) -> Iterator[Metric]:
    labels = ["pipeline", "stage"]
    families = {
        "bubble": _gauge("stage_bubble_ratio", "The bubble of a stage.", labels),
        "useful": _gauge("useful_compute_ratio", "What a stage computes.", labels),
        "busy": _gauge("gpu_busy_ratio", "What a utilisation dashboard shows.", labels),
        "peak_bytes": _gauge("stage_peak_memory_bytes", "The most memory in use.", labels),
        "limit_bytes": _gauge("stage_memory_limit_bytes", "What its rank may hold.", labels),
    }
    for pipeline in pipelines:
        stages = (pipeline["latest"] or {}).get("stages", [])
        for stage in stages if len(stages) <= MOST_STAGES else []:
            for field, family in families.items():
                if stage[field] is not None:
                    family.add_metric([pipeline["name"], stage["stage"]], stage[field])
    yield from families.values()


def _links(pipelines: list[dict[str, Any]]) -> Iterator[Metric]:
    labels = ["pipeline", "src_stage", "dst_stage"]
    cost = "What a slow hop costs each batch of the capture."
    families = {
        "bytes_per_s": _gauge("link_bandwidth_bytes_per_second", "What a hop carried.", labels),
        "wire_s": _gauge("link_latency_seconds", "What a message took on the wire.", labels),
        "slow": _gauge("link_slow", "1 where a hop is slow by its peers, else 0.", labels),
        "efficiency": _gauge(
            "link_efficiency_ratio", "What a hop carried, of what its peers do.", labels
        ),
        "cost_s": _gauge("link_attributed_bubble_seconds", cost, labels),
    }
    for pipeline in pipelines:
        hops = (pipeline["latest"] or {}).get("hops", [])
        for hop in hops if len(hops) <= 2 * MOST_STAGES else []:
            names = [pipeline["name"], hop["source"], hop["destination"]]
            for field, family in families.items():
                if hop[field] is not None:
                    family.add_metric(names, float(hop[field]))
    yield from families.values()


def _drift(pipelines: list[dict[str, Any]]) -> Iterator[Metric]:
    score = _gauge(
        "drift_score",
        "How near a figure is to an alert; above 1 is one.",
        ["pipeline", "metric", "context_bucket"],
    )
    for pipeline in pipelines:
        for track in pipeline["drift"]:
            if track["score"] is not None:
                bucket = str(track["context_bucket"] or "unknown")
                score.add_metric([pipeline["name"], track["metric"], bucket], track["score"])
    yield score


def _latency(
    histograms: Mapping[str, Mapping[int, tuple[list[int], float]]],
) -> HistogramMetricFamily:
    family = HistogramMetricFamily(
        "debubble_batch_latency_seconds",
        "Batch latency of all captures.",
        labels=["pipeline", "context_bucket"],
    )
    bounds = [*map(str, LATENCY_BOUNDS_S), "+Inf"]
    for name, buckets in histograms.items():
        for bucket, (below, total) in sorted(buckets.items()):
            labels = [name, str(bucket or "unknown")]
            family.add_metric(labels, list(zip(bounds, below, strict=True)), total)
    return family
