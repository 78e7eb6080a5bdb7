"""A measured pipeline and its job in → the three numbers, and throughput."""

from __future__ import annotations

import msgspec

from debubble.timeline.figures import PipelineFigures
from debubble.timeline.job import Basis, JobFacts
from debubble.units import NS_PER_S


class Numbers(msgspec.Struct, frozen=True, kw_only=True):
    """The three numbers, and throughput; None is what cannot be said."""

    bubble_fraction: float | None
    batch_latency_s: float | None
    step_time_s: float | None
    peak_memory_bytes: tuple[int | None, ...]
    """Of each rank."""
    microbatches_per_s: float | None
    """Batches, of a stream."""
    tokens_per_s: float | None
    """Of steps without the profiler, where the job told how many tokens they have."""
    unprofiled_batch_latency_s: float | None


def numbers_of(pipeline: PipelineFigures, job: JobFacts) -> Numbers:
    """Return the numbers of a pipeline."""
    stream, basis = pipeline.stream, job.basis_for(pipeline)
    step_ns = pipeline.step_time_ns or pipeline.batch_latency_ns
    rate = pipeline.microbatches * NS_PER_S / step_ns if pipeline.microbatches and step_ns else None
    timed_s = None if stream is not None else job.unprofiled_step_s
    unprofiled_ns = basis.batch_latency_ns if basis.name is Basis.UNPROFILED else None

    def in_s(length_ns: int | None) -> float | None:
        return None if length_ns is None else length_ns / NS_PER_S

    return Numbers(
        bubble_fraction=pipeline.bubble_fraction,
        batch_latency_s=in_s(pipeline.batch_latency_ns),
        step_time_s=in_s(pipeline.step_time_ns),
        peak_memory_bytes=tuple(rank.peak_memory_bytes for rank in pipeline.ranks),
        microbatches_per_s=stream.batches_per_s if stream else rate,
        tokens_per_s=None if job.tokens is None or timed_s is None else job.tokens / timed_s,
        unprofiled_batch_latency_s=in_s(unprofiled_ns),
    )
