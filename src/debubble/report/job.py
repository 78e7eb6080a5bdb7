"""What a job said of itself in → lines and fields for the verbs that use it."""

from __future__ import annotations

from typing import Any

from debubble.timeline.job import JobFacts
from debubble.units import NS_PER_S, counted, show_duration


def job_note(job: JobFacts, latency_ns: int | None) -> str:
    """Say what a step takes without the profiler; empty where nobody timed it."""
    if job.unprofiled_step_s is None:
        return ""
    step = show_duration(job.unprofiled_step_s * NS_PER_S)
    said = f"without the profiler: a step takes {step} (median of {_timed(job)})"
    batch = job.without_profiler_ns(latency_ns)
    if batch is not None and job.overhead_fraction is not None:
        said += (
            f", a batch about {show_duration(batch)}; the capture itself costs "
            f"{100 * job.overhead_fraction:+.0f} %"
        )
    return said


def latency_note(job: JobFacts) -> str:
    """Say where the latency comes from that changes are held against."""
    return (
        f"batch latency: without the profiler, which cost {100 * (job.overhead_fraction or 0):+.0f}"
        f" % by the job's own times ({_timed(job)}), on all parts of a step alike"
    )


def job_json(job: JobFacts) -> dict[str, Any] | None:
    """Return what the job said as data; None where it said nothing."""
    if job == JobFacts():
        return None
    return {
        "schedule": job.schedule,
        "microbatches": job.microbatches,
        "split": list(job.split) or None,
        "tokens": job.tokens,
        "context_lengths": list(job.context_lengths) or None,
        "unprofiled_step_time_s": job.unprofiled_step_s,
        "profiled_step_time_s": job.profiled_step_s,
        "steps_timed": job.steps_timed,
        "overhead_fraction": job.overhead_fraction,
    }


def _timed(job: JobFacts) -> str:
    return counted(job.steps_timed, "step")
