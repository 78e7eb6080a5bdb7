"""A stream's figures in → its sentence, its note and its part of the JSON out."""

from __future__ import annotations

from typing import Any

from debubble.simulate.theory import bubble_fraction_of_stream
from debubble.timeline.bubble import StreamFigures
from debubble.timeline.figures import PipelineFigures
from debubble.units import NS_PER_S, counted, show_duration


def stream_theory(one: PipelineFigures) -> float | None:
    """Return the share that equal stages would wait with so many batches in flight."""
    if one.stream is None:
        return None
    return bubble_fraction_of_stream(len(one.ranks), one.stream.in_flight)


def stream_answer(waits: str, one: PipelineFigures) -> str:
    """Say how many batches were in flight, and what that alone would cost."""
    expected, stream = stream_theory(one), one.stream
    if stream is None or expected is None:
        return f"{waits}."
    if stream.in_flight == stream.most_in_flight:
        batches = counted(stream.most_in_flight, "batch", "batches")
    else:
        batches = f"{stream.in_flight:.1f} batches ({stream.most_in_flight} at most)"
    return (
        f"{waits} with {batches} in flight "
        f"(theory for {counted(len(one.ranks), 'rank')}: {100 * expected:.0f} %)."
    )


def stream_latency(stream: StreamFigures) -> str:
    """Say how long a batch takes, in the middle and at the slow end."""
    if stream.batch_latency_ns is None or stream.batch_latency_p95_ns is None:
        return "no batch was captured from the first stage to the last"
    return (
        f"batch latency {show_duration(stream.batch_latency_ns)} in the middle of "
        f"{counted(stream.batches, 'batch', 'batches')}, p95 "
        f"{show_duration(stream.batch_latency_p95_ns)}"
    )


def stream_json(one: PipelineFigures) -> dict[str, Any] | None:
    """Return what only a stream has."""
    stream = one.stream
    if stream is None:
        return None
    latest = stream.batch_latency_p95_ns
    return {
        "window_s": (stream.end_ns - stream.start_ns) / NS_PER_S,
        "batches_in_flight": stream.in_flight,
        "mean_batches_in_flight": stream.batches_in_flight,
        "most_batches_in_flight": stream.most_in_flight,
        "batch_latency_p95_s": None if latest is None else latest / NS_PER_S,
        "batches": stream.batches,
        "bubble_fraction_of_equal_stages": stream_theory(one),
    }
