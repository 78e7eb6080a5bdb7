"""What is shown in → Prometheus' text format; labels are bounded: no run, no path."""

from __future__ import annotations

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    disable_created_metrics,
    generate_latest,
)

from debubble import __version__
from debubble.annexes.watch.board import Board, Pipeline
from debubble.annexes.watch.judge import KINDS

# A pipeline of more stages is shown as a whole only.
MOST_STAGES = 64
# What is no bubble among the causes: the rest is.
_WORK = frozenset({"compute", "collective", "collective_wait"})

_PIPELINE, _STAGE = ("pipeline",), ("pipeline", "stage")
_HOP = ("pipeline", "src_stage", "dst_stage")
_BUCKET = ("pipeline", "context_bucket")
_DRIFT = ("pipeline", "metric", "context_bucket")
# What each says, and its labels.
GAUGES: dict[str, tuple[str, tuple[str, ...]]] = {
    "build_info": ("The debubble that answers.", ("version",)),
    "last_capture_timestamp_seconds": ("Time of the last capture.", _PIPELINE),
    "last_scan_timestamp_seconds": ("Time when a source was last read.", _PIPELINE),
    "source_up": ("1 where a source can be read and asked, else 0.", _PIPELINE),
    "alerts_open": ("Alerts that nobody acknowledged.", ("pipeline", "kind")),
    "bubble_ratio": ("The bubble, by cause and in all.", ("pipeline", "cause")),
    "bubble_theoretical_ratio": ("The schedule's own bubble.", ("pipeline", "schedule")),
    "batch_latency_seconds": ("Batch latency of the last capture.", _BUCKET),
    "microbatches_per_second": ("Throughput of the last capture.", _BUCKET),
    "traffic_ratio": ("Requests by context length.", _BUCKET),
    "stage_bubble_ratio": ("The bubble of a stage.", _STAGE),
    "useful_compute_ratio": ("Compute of a stage.", _STAGE),
    "gpu_busy_ratio": ("Utilisation of a stage as dashboards show it.", _STAGE),
    "stage_peak_memory_bytes": ("Peak memory of a stage.", _STAGE),
    "stage_memory_limit_bytes": ("Memory of its rank.", _STAGE),
    "link_bandwidth_bytes_per_second": ("Bandwidth of a hop.", _HOP),
    "link_latency_seconds": ("Time of a message on the wire.", _HOP),
    "link_slow": ("1 where a hop is slow by its peers, else 0.", _HOP),
    "link_efficiency_ratio": ("Bandwidth of a hop over that of its peers.", _HOP),
    "link_attributed_bubble_seconds": ("Cost of a slow hop to each batch of the capture.", _HOP),
    "drift_score": ("Distance of a figure from an alert; 1 or more is one.", _DRIFT),
    "reference_captures": ("Captures of the reference; no alert before it has all.", _DRIFT),
    "reference_captures_needed": ("Captures that a reference takes.", _PIPELINE),
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
disable_created_metrics()  # type: ignore[no-untyped-call]


class _Page:
    """The gauges of one page, made as they get values."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._gauges: dict[str, Gauge] = {}

    def put(self, name: str, value: float | None, *labels: str) -> None:
        """Add a value, where it is known."""
        if value is None:
            return
        if name not in self._gauges:
            words, names = GAUGES[name]
            self._gauges[name] = Gauge(f"debubble_{name}", words, names, registry=self.registry)
        self._gauges[name].labels(*labels).set(value)


def write_metrics(board: Board) -> bytes:
    """Write the page that Prometheus scrapes."""
    page = _Page()
    page.put("build_info", 1, __version__)
    words, labels = "Captures by what became of them.", (*_PIPELINE, "outcome")
    captures = Counter("debubble_captures", words, labels, registry=page.registry)
    words = "How often a source failed."
    failures = Counter("debubble_source_failures", words, _PIPELINE, registry=page.registry)
    for pipeline in board.pipelines:
        name, health = pipeline.name, pipeline.health
        outcomes = {state: pipeline.counts.get(state, 0) for state in ("stored", "failed")}
        for outcome, count in (outcomes | {"refused": health.refused}).items():
            captures.labels(name, outcome).inc(count)
        failures.labels(name).inc(health.failures)
        page.put("last_scan_timestamp_seconds", health.scanned_s, name)
        page.put("source_up", not health.troubles, name)
        kinds = [alert.kind for alert in board.open_alerts if alert.pipeline == name]
        for kind in KINDS:
            page.put("alerts_open", kinds.count(kind), name, kind)
        page.put("reference_captures_needed", pipeline.reference, name)
        for standing in pipeline.standings:
            which = (name, standing.metric, str(standing.context_bucket or "unknown"))
            page.put("drift_score", standing.score, *which)
            page.put("reference_captures", standing.reference_captures, *which)
        _put_capture(page, pipeline)
    return generate_latest(page.registry)


def _put_capture(page: _Page, pipeline: Pipeline) -> None:
    """Put what the last capture gave on the page."""
    name, latest = pipeline.name, pipeline.latest
    if latest is None or latest.finding is None:
        return
    page.put("last_capture_timestamp_seconds", latest.captured_s, name)
    finding = latest.finding
    metrics, bucket = finding.metrics, str(finding.bucket or "unknown")
    page.put("bubble_ratio", metrics.get("bubble_fraction"), name, "total")
    for cause, value in finding.causes.items():
        page.put("bubble_ratio", None if cause in _WORK else value, name, cause)
    schedule = finding.schedule or "unknown"
    page.put("bubble_theoretical_ratio", finding.theory, name, schedule)
    page.put("batch_latency_seconds", metrics.get("batch_latency_s"), name, bucket)
    page.put("microbatches_per_second", metrics.get("microbatches_per_s"), name, bucket)
    whole = sum(finding.requests.values()) or 1
    for length, count in finding.requests.items():
        page.put("traffic_ratio", count / whole, name, str(length))
    if len(finding.stages) <= MOST_STAGES:
        for stage in finding.stages:
            for key, gauge in _STAGE_GAUGES.items():
                page.put(gauge, getattr(stage, key), name, stage.stage)
    if len(finding.hops) <= 2 * MOST_STAGES:
        for hop in finding.hops:
            for key, gauge in _HOP_GAUGES.items():
                page.put(gauge, getattr(hop, key), name, hop.source, hop.destination)
