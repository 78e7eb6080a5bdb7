"""Captures in → the numbers of a run as samples per step: what is compared, and what is kept."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import pairwise
from statistics import median
from typing import Any, TypeVar

import msgspec

from debubble.errors import Gap, UsageError
from debubble.measure.prediction import Prediction
from debubble.timeline.figures import PipelineFigures
from debubble.timeline.job import Basis, JobFacts, ask_job
from debubble.timeline.model import RankTimeline, Timeline, ranks_a_device
from debubble.trace.run import Run
from debubble.units import NS_PER_S

_Value = TypeVar("_Value")

# Below this, what attention adds with the context cannot be seen.
_SHORTEST_CONTEXT = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSample:
    """One step of one capture; of a stream, the one window of a capture."""

    capture: str
    step: int | None
    bubble_fraction: float
    batch_latency_s: float | None
    step_time_s: float | None
    """To the start of the next step; None where that was not captured."""
    stream_per_s: float | None = None
    """Batches per second of a stream, which has no steps."""
    context: int | None = None
    """The bucket of its context lengths, where the job told them: a power of two, at least 128."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory:
    """The peak of one rank, and what it may hold: its share where ranks share a device."""

    rank: int
    peak_bytes: int | None
    reserved_bytes: int | None
    limit_bytes: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSamples:
    """What users of a server saw under a load: a sample a request, or a part of the time."""

    load: str
    """Which load it was, in words."""
    open_loop: bool
    """Whether requests came at a rate, whatever the server did: throughput tells nothing then."""
    out_per_s: tuple[float, ...]
    """Tokens of answers: of a closed loop what each request got, times the clients; else of each
    run."""
    in_per_s: tuple[float, ...]
    """Tokens of prompts, of each run."""
    ttft_s: tuple[float, ...]
    tpot_s: tuple[float, ...]
    latency_s: tuple[float, ...]
    failed: int
    prompt_tokens: float | None = None
    """Of a prompt, the mean, and of an answer: loads of other lengths are other work."""
    output_tokens: float | None = None

    @property
    def runs(self) -> int:
        """How many loads it was made of."""
        return len(self.in_per_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """What the numbers were measured on, as the traces tell."""

    devices: tuple[str, ...] = ()
    versions: tuple[tuple[str, str], ...] = ()
    world_size: int | None = None
    record_shapes: bool | None = None
    profile_memory: bool | None = None
    with_stack: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """One pipeline in one setting; None is what is not known."""

    kind: str
    """training, forward, stream; serving, where users were asked and no rank."""
    ranks: tuple[int, ...] = ()
    stages: int = 0
    microbatches: int | None = None
    schedule: str | None = None
    split: tuple[int, ...] | None = None
    """Layers of each stage."""
    message_bytes: int | None = None
    """The largest message from stage to stage: it grows with the tokens of a microbatch."""
    tokens: int | None = None
    """Of a microbatch, where somebody said so: no trace tells."""
    samples: tuple[StepSample, ...] = ()
    memory: tuple[RankMemory, ...] = ()
    environment: Environment = Environment()
    traced: Basis = Basis.PROFILED
    """On which basis the samples are."""
    unprofiled_s: tuple[tuple[int | None, float], ...] = ()
    """Steps timed without the profiler by the job itself: the bucket of context, and seconds."""
    unprofiled_batches_s: tuple[tuple[int | None, float], ...] = ()
    """The batches of those steps; empty where they tell nothing of what the profiler costs."""
    partial: bool = False
    """A rank has no trace, no step was captured whole, or the ranks are of different runs."""
    doubts: tuple[Gap, ...] = ()
    """What says that its traces are not as they were recorded."""
    repeated: int = 0
    """Captures that were given again, and count once."""
    served: ServerSamples | None = None
    """What users of a server saw."""
    predicted: tuple[Prediction, ...] = ()
    """What a plan predicted of changes to it, where that was kept."""

    @property
    def captures(self) -> tuple[str, ...]:
        """The captures it was made of."""
        return tuple(dict.fromkeys(sample.capture for sample in self.samples))

    @property
    def bubble_fractions(self) -> tuple[float, ...]:
        """One a step."""
        return tuple(sample.bubble_fraction for sample in self.samples)

    @property
    def basis(self) -> Basis:
        """On which basis it is held against predictions and other runs."""
        return Basis.UNPROFILED if self.unprofiled_batches_s else self.traced

    def batch_latencies_s(self, basis: Basis) -> tuple[float, ...]:
        """Return one a step; none on a basis on which nothing was timed."""
        if basis == Basis.UNPROFILED and self.unprofiled_batches_s:
            return tuple(length for _, length in self.unprofiled_batches_s)
        if basis != self.traced:
            return ()
        return _known(sample.batch_latency_s for sample in self.samples)

    def step_times_s(self, basis: Basis) -> tuple[float, ...]:
        """Return one a step that another one follows; none on a basis that was not timed."""
        if basis == Basis.UNPROFILED and self.unprofiled_batches_s:
            return tuple(length for _, length in self.unprofiled_s)
        if basis != self.traced:
            return ()
        return _known(sample.step_time_s for sample in self.samples)

    @property
    def contexts(self) -> frozenset[int]:
        """The buckets of context lengths that its steps are of; empty where not all are known."""
        found = {sample.context for sample in self.samples}
        return frozenset() if None in found else frozenset(_known(found))

    def rates_per_s(self, lengths: Sequence[float]) -> tuple[float, ...]:
        """Return microbatches per second, by what its steps or batches take.

        Of a server under a load it is tokens of answers.
        """
        if self.served is not None:
            return self.served.out_per_s
        if self.kind == "stream":
            return _known(sample.stream_per_s for sample in self.samples)
        if self.microbatches is None:
            return ()
        return tuple(self.microbatches / length for length in lengths)


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One measurement as the history keeps it."""

    number: int
    name: str
    created_s: float
    """Seconds since 1970."""
    measurement: Measurement
    tags: dict[str, str]

    @property
    def created(self) -> str:
        """When it was made, in UTC."""
        return datetime.fromtimestamp(self.created_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def measure_run(
    run: Run, timeline: Timeline, figures: PipelineFigures, job: JobFacts | None = None
) -> Measurement:
    """Take the samples of one capture, with what its job said of itself."""
    ranks = figures.ranks
    job = job or ask_job(run.sidecars, figures)
    basis, step_s = job.basis_for(figures), job.unprofiled_step_s
    # The profiler slows all parts of a step alike: a batch takes its share of each step.
    share = 0.0
    if basis.source == "sidecars" and basis.batch_latency_ns and step_s:
        share = basis.batch_latency_ns / NS_PER_S / step_s
    context = context_bucket(job.context_lengths)
    return Measurement(
        kind=figures.kind,
        ranks=tuple(rank.rank for rank in ranks),
        stages=len({stage for rank in ranks for stage in rank.stages}),
        microbatches=figures.microbatches,
        schedule=figures.schedule or job.schedule_for(figures),
        split=_split(ranks) or job.split_for(figures),
        # Batches of a server are of many sizes: the largest message says nothing of their work.
        message_bytes=None
        if figures.kind == "stream"
        else max(
            (hop.message_bytes for hop in figures.hops if hop.message_bytes > 0), default=None
        ),
        tokens=job.tokens_of_microbatch(figures.microbatches),
        samples=_samples(run.found.capture.name, context, timeline, figures),
        traced=basis.traced,
        unprofiled_s=tuple((context, length) for length in job.unprofiled_steps_s),
        unprofiled_batches_s=tuple(
            (context, share * length) for length in job.unprofiled_steps_s if share
        ),
        memory=tuple(_memory(rank, ranks_a_device(ranks)) for rank in ranks),
        environment=_environment(run),
        partial=bool(figures.absent) or figures.cut or not figures.one_run,
    )


def join_measurements(parts: Sequence[Measurement]) -> Measurement:
    """Put captures of one setting together; what must be the same and is not is named.

    A capture that is given twice is no more evidence than once.
    """
    count = len(parts)
    parts = tuple({identity_of(part, number): part for number, part in enumerate(parts)}.values())
    first = replace(parts[0], repeated=parts[0].repeated + count - len(parts))
    if len(parts) == 1:
        return first
    for other in parts[1:]:
        for field in ("kind", "ranks", "stages", "microbatches", "schedule", "split", "traced"):
            mine, its = getattr(first, field), getattr(other, field)
            if mine != its:
                raise UsageError(
                    f"captures that are put together differ in {field}: {mine} and {its}",
                    hint="commas join captures of one setting; compare different ones",
                )
    on_one_basis = all(part.unprofiled_batches_s for part in parts)
    return replace(
        first,
        samples=tuple(
            replace(sample, capture=f"{number}: {sample.capture}")
            for number, part in enumerate(parts, start=1)
            for sample in part.samples
        ),
        memory=tuple(_largest(group) for group in zip(*(p.memory for p in parts), strict=True)),
        tokens=_shared([part.tokens for part in parts]),
        message_bytes=_shared([part.message_bytes for part in parts]),
        unprofiled_s=tuple(pair for part in parts for pair in part.unprofiled_s),
        unprofiled_batches_s=tuple(
            pair for part in parts for pair in part.unprofiled_batches_s if on_one_basis
        ),
        served=_joined([part.served for part in parts if part.served is not None]),
        predicted=tuple(dict.fromkeys(kept for part in parts for kept in part.predicted)),
        partial=any(part.partial for part in parts),
        doubts=tuple(dict.fromkeys(gap for part in parts for gap in part.doubts)),
    )


def identity_of(part: Measurement, number: int = 0) -> tuple[object, ...]:
    """Return what tells a capture from others, wherever it was read from.

    No two runs last the same nanoseconds; one without samples is told by its number. What a job
    notes of steps after the capture comes later than the capture.
    """
    if part.served is not None:
        return (part.served,)
    if not part.samples:
        return (number,)
    samples = tuple(replace(sample, capture="", context=None) for sample in part.samples)
    return (part.ranks, part.microbatches, part.schedule, part.split, samples)


def _joined(parts: Sequence[ServerSamples]) -> ServerSamples | None:
    """Put loads of one setting together."""
    if not parts:
        return None
    for other in parts[1:]:
        if (other.load, other.open_loop) != (parts[0].load, parts[0].open_loop):
            raise UsageError(
                f"loads that are put together differ: {parts[0].load}, and {other.load}",
                hint="commas join runs under one load; compare different ones",
            )
    fields = ("out_per_s", "in_per_s", "ttft_s", "tpot_s", "latency_s")
    joined: dict[str, Any] = {
        name: tuple(value for part in parts for value in getattr(part, name)) for name in fields
    }
    return replace(parts[0], failed=sum(part.failed for part in parts), **joined)


def context_bucket(lengths: Sequence[int]) -> int | None:
    """Return the power of two that holds the longest; None where no length is known."""
    if not lengths:
        return None
    return int(max(_SHORTEST_CONTEXT, 1 << (max(lengths) - 1).bit_length()))


def _shared(values: Sequence[_Value | None]) -> _Value | None:
    return values[0] if len(set(values)) == 1 else None


def _samples(
    capture: str, context: int | None, timeline: Timeline, figures: PipelineFigures
) -> tuple[StepSample, ...]:
    if figures.stream is not None:
        stream = figures.stream
        latency_ns = stream.batch_latency_ns
        return (
            StepSample(
                capture=capture,
                step=None,
                bubble_fraction=stream.bubble_fraction,
                batch_latency_s=None if latency_ns is None else latency_ns / NS_PER_S,
                step_time_s=None,
                stream_per_s=stream.batches_per_s,
                context=context,
            ),
        )
    follows = dict(pairwise(timeline.steps))
    starts = {window.step: window.start_ns for window in figures.windows}
    samples = []
    for window in figures.windows:
        following = starts.get(follows.get(window.step, -1))
        samples.append(
            StepSample(
                capture=capture,
                step=window.step,
                bubble_fraction=window.bubble_fraction,
                batch_latency_s=window.length_ns / NS_PER_S,
                step_time_s=None if following is None else (following - window.start_ns) / NS_PER_S,
                context=context,
            )
        )
    return tuple(samples)


def _split(ranks: Sequence[RankTimeline]) -> tuple[int, ...] | None:
    """Return the layers of each stage, where all are known."""
    layers = {stage.stage: stage.layers for rank in ranks for stage in rank.layers}
    stages = sorted(stage for rank in ranks for stage in rank.stages)
    return tuple(layers[s] for s in stages) if stages and set(stages) <= set(layers) else None


def _memory(rank: RankTimeline, sharing: int) -> RankMemory:
    known = rank.memory
    limit = known.limit_bytes if known else None
    peaks = _known((known.peak_bytes, known.job_peak_bytes)) if known else ()
    return RankMemory(
        rank=rank.rank,
        peak_bytes=max(peaks, default=None),
        reserved_bytes=known.peak_reserved_bytes if known else None,
        limit_bytes=None if limit is None else limit // sharing,
    )


def _largest(group: Sequence[RankMemory]) -> RankMemory:
    return RankMemory(
        rank=group[0].rank,
        peak_bytes=max(_known(rank.peak_bytes for rank in group), default=None),
        reserved_bytes=max(_known(rank.reserved_bytes for rank in group), default=None),
        limit_bytes=min(_known(rank.limit_bytes for rank in group), default=None),
    )


def _environment(run: Run) -> Environment:
    headers = [trace.header for trace in run.ranks]
    versions = {pair for header in headers for pair in header.versions}
    told = {name for name, _ in versions}
    said = {pair for sidecar in run.sidecars for pair in sidecar.environment.items()}
    versions |= {(name, version) for name, version in said if name not in told}

    def any_rank(flags: Iterable[bool | None]) -> bool | None:
        """Return True where any rank says so: one slow rank holds up all."""
        known = _known(flags)
        return any(known) if known else None

    return Environment(
        devices=tuple(sorted({device.name for header in headers for device in header.devices})),
        versions=tuple(sorted(versions)),
        world_size=run.world_size,
        record_shapes=any_rank(header.record_shapes for header in headers),
        profile_memory=any_rank(header.profile_memory for header in headers),
        with_stack=any_rank(header.with_stack for header in headers),
    )


def _known(values: Iterable[_Value | None]) -> tuple[_Value, ...]:
    return tuple(value for value in values if value is not None)


def middle(values: Sequence[float]) -> float | None:
    """Return the median; None of nothing."""
    return float(median(values)) if values else None


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
