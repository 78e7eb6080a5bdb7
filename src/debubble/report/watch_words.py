"""Metrics and context buckets in → the words that alerts and pages use for them."""

from __future__ import annotations

from debubble.units import NS_PER_S, show_bytes, show_count, show_duration, show_share

_METRICS = {
    "bubble_fraction": "bubble",
    "batch_latency_s": "batch latency",
    "microbatches_per_s": "throughput",
    "peak_memory_bytes": "peak memory",
}


def say_metric(metric: str) -> str:
    """Name a metric."""
    return _METRICS.get(metric, metric)


def say_bucket(bucket: int) -> str:
    """Name a bucket of context lengths; 0 is one that nobody told."""
    return f"up to {show_count(bucket)} tokens" if bucket else "an unknown context length"


def show_metric(metric: str, value: float | None) -> str:
    """Write a value of a metric with its unit."""
    if value is None:
        return "–"
    if metric == "bubble_fraction":
        return show_share(value)
    if metric == "batch_latency_s":
        return show_duration(value * NS_PER_S)
    return show_bytes(value) if metric == "peak_memory_bytes" else f"{value:.3g} /s"
