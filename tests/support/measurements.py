"""Measurements for tests: of recorded runs, and with samples of one's own."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from debubble.measure.measurement import (
    Environment,
    Measurement,
    RankMemory,
    StepSample,
    measure_run,
)
from debubble.timeline.build import build_run
from debubble.timeline.figures import measure_pipeline
from debubble.trace.run import find_run, read_run


def measured(folder: Path) -> Measurement:
    run = read_run(find_run([str(folder)]))
    timeline = build_run(run)
    return measure_run(run, timeline, measure_pipeline(timeline, 0))


def sampled(
    latencies: Sequence[float],
    *,
    step_times: Sequence[float | None] = (),
    bubble: float = 0.3,
    peak: int = 10,
    limit: int | None = 100,
    context: int | None = None,
    **more: object,
) -> Measurement:
    """Make a measurement of two ranks with these batch latencies."""
    times = step_times or latencies
    given = {
        "kind": "training",
        "ranks": (0, 1),
        "stages": 2,
        "microbatches": 8,
        "schedule": "1f1b",
        "split": (4, 4),
        "message_bytes": 1024,
        "tokens": None,
        "samples": tuple(
            StepSample(
                capture="here",
                step=number,
                bubble_fraction=bubble,
                batch_latency_s=latency,
                step_time_s=time,
                context=context,
            )
            for number, (latency, time) in enumerate(zip(latencies, times, strict=True))
        ),
        "memory": tuple(
            RankMemory(rank=rank, peak_bytes=peak, reserved_bytes=peak, limit_bytes=limit)
            for rank in range(2)
        ),
        "environment": Environment(devices=("NVIDIA H200",), versions=(("nccl", "2.28.9"),)),
    }
    return Measurement(**(given | more))
