"""An `Analysis` in → what `debubble find` answers: the bubble, against theory, why and whose."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

import msgspec

from debubble.analysis import Analysis
from debubble.errors import Code
from debubble.measure.measurement import Numbers
from debubble.measure.worth import Rates, Tariff
from debubble.report.answers.base import (
    Answer,
    AnswerWarning,
    Part,
    explain_nulls,
    list_warnings,
    seconds,
)
from debubble.report.answers.inspect import FIND_SCHEMA, say_busy
from debubble.report.answers.ledger import (
    WITHOUT_TRACE,
    AccountPart,
    BottleneckPart,
    NamedCause,
    ReplayPart,
    SavingPart,
    answer_account,
    answer_bottleneck,
    answer_causes,
    answer_replay,
    answer_savings,
)
from debubble.report.answers.links import HopPart, hop_parts
from debubble.report.answers.microbatches import MoreMicrobatchesPart, answer_more_microbatches
from debubble.report.answers.replicas import ReplicasPart, say_replicas
from debubble.report.answers.serving import (
    ProfilerPart,
    SchedulerPart,
    answer_profiler,
    answer_scheduler,
    answer_stream_causes,
)
from debubble.serving.hosts import HostTime
from debubble.serving.phases import PhaseFigures
from debubble.simulate.expected import Theory, theory_of_stream
from debubble.timeline.figures import Deviation, PipelineFigures, RankShares, Shape
from debubble.timeline.job import JobFacts
from debubble.timeline.model import PassKind
from debubble.timeline.replicas import DRAGS
from debubble.timeline.steps import SkippedStep, numbered
from debubble.units import NS_PER_S, counted, show_members, show_percent


class FrameworkPart(Part, frozen=True, kw_only=True):
    """Whose framework ran it, and how it divides the job."""

    name: Annotated[str | None, "framework"]
    tensor: int | None
    context: int | None
    expert: int | None
    data: int | None
    sharded: int | None
    microbatch_size: int | None
    sequence: int | None
    recomputes: bool


class StatedPart(Part, frozen=True, kw_only=True):
    """The schedule as the user states it, and whether the run has it."""

    schedule: Annotated[str, "name"]
    chunks: int | None
    agrees: bool | None
    deviation: Deviation | None


class RunPart(Part, frozen=True, kw_only=True):
    """What ran: all pipelines by their ranks, and the shape of the one to look into."""

    capture: str
    captures: list[str]
    kind: str
    pipelines: list[list[int]]
    ranks: int
    stages: int
    chunks: int
    microbatches: int | None
    schedule: str | None
    framework: FrameworkPart
    stated: StatedPart | None
    steps: Annotated[list[int], "windows.step"]
    devices: list[str]
    clock_uncertainty_s: float | None
    missing_ranks: list[int]
    partial: bool
    one_run: bool
    steps_inferred: bool
    steps_left_out: Annotated[list[SkippedStep], "left_out"]


class JobPart(Part, frozen=True, kw_only=True):
    """What the job said of itself."""

    schedule: str | None
    microbatches: int | None
    split: list[int] | None
    tokens: int | None
    context_lengths: list[int] | None
    unprofiled_step_time_s: Annotated[float | None, "unprofiled_step_s"]
    profiled_step_time_s: Annotated[float | None, "profiled_step_s"]
    steps_timed: int
    overhead_fraction: float | None


class UtilisationPart(Part, frozen=True, kw_only=True):
    """The same of all ranks."""

    apparent_fraction: float | None
    useful_fraction: float | None
    ranks: Annotated[list[RankShares], "shares"]


class StreamPart(Part, frozen=True, kw_only=True):
    """What only a stream has."""

    window_s: Annotated[float, "length_ns"]
    batches_in_flight: Annotated[float, "in_flight"]
    batches_in_flight_sure: Annotated[bool, "sure"]
    """False where captures do not show which batch of one rank is which of the next: it may then be
    some batches off."""
    first_sets_pace: bool
    """The first stage does, so that the driver may allow more batches in flight than these."""
    mean_batches_in_flight: Annotated[float, "batches_in_flight"]
    most_batches_in_flight: Annotated[int, "most_in_flight"]
    batch_latency_p95_s: float | None
    batches: int
    bubble_fraction_of_equal_stages: float | None
    turn_s: float | None
    """Time between batches that leave the last stage."""
    phases: list[PhaseFigures]
    phases_labelled: bool | None
    """Phases come from names in the traces; else from sizes and launches."""
    profiler: ProfilerPart | None
    scheduler: SchedulerPart | None
    hosts: list[HostTime]


class PassPart(Part, frozen=True, kw_only=True):
    """What one kind of pass takes."""

    median_s: float
    mad_s: float
    n: Annotated[int, "count"]


class LayerKindPart(Part, frozen=True, kw_only=True):
    """Layers of one kind in a row: `dense`, or with `experts`."""

    name: str
    layers: int
    layer_s: float


class StagePart(Part, frozen=True, kw_only=True):
    """One stage."""

    stage: int
    rank: int
    layers: int | None
    layer_s: float | None
    layer_kinds: list[LayerKindPart]
    passes: dict[str, PassPart]


class MemoryPart(Part, frozen=True, kw_only=True):
    """What one rank holds."""

    rank: int
    static_bytes: Annotated[int | None, "memory.static_bytes"]
    per_microbatch_bytes: Annotated[int | None, "memory.per_microbatch_bytes"]
    transient_bytes: Annotated[int | None, "memory.transient_bytes"]
    peak_bytes: Annotated[int | None, "memory.peak_bytes"]
    passes_peak_bytes: Annotated[int | None, "memory.passes_peak_bytes"]
    between_peak_bytes: Annotated[int | None, "memory.between_peak_bytes"]
    peak_reserved_bytes: Annotated[int | None, "memory.peak_reserved_bytes"]
    most_in_flight: Annotated[int | None, "memory.most_in_flight"]
    limit_bytes: Annotated[int | None, "memory.limit_bytes"]
    job_peak_bytes: Annotated[int | None, "memory.job_peak_bytes"]
    free_bytes: Annotated[int | None, "memory.free_bytes"]
    other_bytes: Annotated[int | None, "memory.other_bytes"]


class PipelinePart(Part, frozen=True, kw_only=True):
    """One pipeline of the job, in a line."""

    pipeline: int
    ranks: Annotated[list[int], "ranks.rank"]
    missing_ranks: Annotated[list[int], "absent"]
    bubble_fraction: float | None
    batch_latency_s: float | None
    peak_memory_bytes: int | None


class FindAnswer(Answer, frozen=True, kw_only=True):
    """The pipeline to look into in full, the others as a line each."""

    schema: str = FIND_SCHEMA
    basis: Annotated[str, "basis.traced"]
    """Of all times unless named otherwise: profiled, or unprofiled."""
    run: RunPart
    numbers: Numbers
    job: JobPart | None
    theory: Theory
    longest_stage_bubble: Annotated[float | None, "pipeline.longest_stage_bubble"]
    bubble_over_ideal: Annotated[float | None, "pipeline.bubble_over_ideal"]
    utilisation: Annotated[UtilisationPart, "pipeline"]
    outside: Annotated[dict[str, float], "pipeline.outside_ns"]
    side_work: Annotated[dict[str, float], "pipeline.side_fractions"]
    """Work beside the passes, as a share of the batch, mean of all ranks."""
    stream: StreamPart | None
    shape: Annotated[Shape | None, "pipeline.shape"]
    ledger: AccountPart | None
    savings: list[SavingPart] | None
    more_microbatches: MoreMicrobatchesPart | None
    rates: Rates | None
    """The rates that savings are valued at; null where no GPU is known."""
    replay: ReplayPart | None
    named: list[NamedCause]
    bottleneck: BottleneckPart | None
    stages: list[StagePart]
    memory: Annotated[list[MemoryPart], "pipeline.ranks"]
    hops: list[HopPart]
    pipelines: list[PipelinePart]
    shown_pipeline: Annotated[int, "pipeline.pipeline"]
    """The one that everything else is about."""
    replicas: ReplicasPart | None
    unknown: dict[str, str] = msgspec.field(default_factory=dict)
    """Why what is null cannot be said."""
    verdict: str
    warnings: list[AnswerWarning]

    @property
    def shown(self) -> PipelinePart:
        """The pipeline to look into, in a line."""
        return next(line for line in self.pipelines if line.pipeline == self.shown_pipeline)


def answer_find(analysis: Analysis, tariff: Tariff | None = None) -> FindAnswer:
    """Say what the bubble is, why, and whose it is; and what is saved is worth, by a tariff."""
    rates = analysis.rates(tariff)
    pipeline, ledger, stream = analysis.pipeline, analysis.ledger, analysis.stream
    account, step_ns = ledger or stream, None if stream else pipeline.step_time_ns
    replicas = analysis.replicas
    answer = FindAnswer.of(
        analysis,
        run=_run_part(analysis),
        job=None if analysis.job == JobFacts() else JobPart.of(analysis.job),
        stream=_stream_part(analysis),
        ledger=answer_account(account) if account else None,
        savings=answer_savings(account, step_ns, rates) if account else None,
        more_microbatches=answer_more_microbatches(analysis.doubled_microbatches)
        if ledger
        else None,
        rates=rates,
        replay=answer_replay(account) if account else None,
        named=answer_stream_causes(analysis) if stream else answer_causes(analysis),
        bottleneck=answer_bottleneck(analysis.bottleneck),
        stages=_stage_parts(analysis),
        hops=hop_parts(analysis),
        pipelines=[_pipeline_part(figures) for figures in analysis.pipelines],
        replicas=ReplicasPart.of(replicas, sentence=say_replicas(replicas)) if replicas else None,
        verdict=say_bubble(analysis),
        warnings=list_warnings(analysis.warnings),
    )
    return msgspec.structs.replace(answer, unknown=explain_nulls(answer, _reasons(pipeline)))


def _run_part(analysis: Analysis) -> RunPart:
    run, pipeline = analysis.run, analysis.pipeline
    known = pipeline.ranks[0].parallelism
    if known.data is None and analysis.replicas is not None:  # DeepSpeed's groups have no names
        known = replace(known, data=len(analysis.replicas.replicas))
    uncertainty_s = analysis.timeline.clock_uncertainty_ns / NS_PER_S if pipeline.one_run else None
    return RunPart.of(
        pipeline,
        capture=run.found.capture.name,
        captures=[capture.name for capture in run.found.captures],
        pipelines=[[rank.rank for rank in figures.ranks] for figures in analysis.pipelines],
        ranks=len(pipeline.ranks),
        stages=len({stage for rank in pipeline.ranks for stage in rank.stages}),
        chunks=max(len(rank.stages) for rank in pipeline.ranks),
        framework=FrameworkPart.of(known, recomputes=pipeline.ranks[0].recomputes),
        devices=sorted({d.name for trace in run.ranks for d in trace.header.devices}),
        clock_uncertainty_s=uncertainty_s,
        missing_ranks=list(run.missing_ranks),
        partial=bool(pipeline.absent) or pipeline.cut,
        steps_inferred=analysis.timeline.inferred and bool(pipeline.windows),
    )


def _stream_part(analysis: Analysis) -> StreamPart | None:
    stream, account = analysis.pipeline.stream, analysis.stream
    if stream is None:
        return None
    return StreamPart.of(
        stream,
        bubble_fraction_of_equal_stages=theory_of_stream(analysis.pipeline),
        turn_s=seconds(account.turn_ns) if account else None,
        phases=analysis.phases,
        phases_labelled=account.batches.labelled if account else None,
        profiler=answer_profiler(analysis),
        scheduler=answer_scheduler(analysis),
        hosts=analysis.hosts,
    )


def _stage_parts(analysis: Analysis) -> list[StagePart]:
    pipeline = analysis.pipeline
    known = {layers.stage: layers for rank in pipeline.ranks for layers in rank.layers}
    stages: dict[int, StagePart] = {}
    for row in pipeline.stages:
        stage = stages.setdefault(
            row.stage,
            StagePart(
                stage=row.stage,
                rank=row.rank,
                layers=analysis.layers_of(row.stage),
                layer_s=seconds(known[row.stage].layer_ns if row.stage in known else None),
                layer_kinds=[
                    LayerKindPart.of(kind)
                    for kind in (known[row.stage].kinds if row.stage in known else ())
                ],
                passes={},
            ),
        )
        stage.passes[PassKind(row.kind).name] = PassPart.of(row)
    return list(stages.values())


def _pipeline_part(pipeline: PipelineFigures) -> PipelinePart:
    peaks = [rank.peak_memory_bytes for rank in pipeline.ranks]
    return PipelinePart.of(
        pipeline,
        batch_latency_s=None if pipeline.stream else seconds(pipeline.batch_latency_ns),
        peak_memory_bytes=max((peak for peak in peaks if peak is not None), default=None),
    )


def _torn(analysis: Analysis) -> list[int]:
    """Return ranks whose files end early: what they did later, no collective shows."""
    names = {rank.rank for rank in analysis.pipeline.ranks}
    gaps = [gap for gap in analysis.warnings if gap.code == Code.TRUNCATED]
    return sorted({gap.rank for gap in gaps if gap.rank is not None and gap.rank in names})


def say_bubble(analysis: Analysis) -> str:
    """Say the bubble in a sentence."""
    pipeline, count = analysis.pipeline, len(analysis.pipelines)
    drags = analysis.replicas is not None and analysis.replicas.verdict == DRAGS
    which = "which slows the others" if drags else "the worst"
    of = [f"pipeline {pipeline.pipeline} of {count}, {which}"] if count > 1 else []
    if pipeline.bubble_fraction is None:
        shares = say_busy([(rank.rank, rank.busy_fraction) for rank in pipeline.shares])
        return f"Bubble unknown: {_why_no_bubble(pipeline)}. Busy: {shares}."
    who = "Ranks wait"
    if pipeline.absent:
        noun = "rank" if len(pipeline.absent) == 1 else "ranks"
        absent = f"{noun} {show_members(pipeline.absent)}"
        who = f"In part, with no trace of {absent}: the other ranks wait"
    elif pipeline.kind == "stream" and (torn := _torn(analysis)):
        who = f"In part, with a trace of {numbered('rank', torn)} that ends early: ranks wait"
    elif analysis.stream is not None and analysis.stream.gaps:
        who = "In part, of batches whose replay does not land: ranks wait"
    elif pipeline.cut:
        who = "In part, of a step that the capture cuts: ranks wait"
    waits = f"{who} {show_percent(pipeline.bubble_fraction)} of the "
    if pipeline.kind == "stream":
        return _say_stream(f"{waits}time{_in_brackets(of)}", analysis)
    theory = analysis.theory
    if theory.bubble_fraction is not None:
        of.append(
            f"theory for {counted(len(pipeline.ranks) + len(pipeline.absent), 'rank')}, "
            f"{counted(pipeline.microbatches or 0, 'microbatch', 'microbatches')}: "
            f"{show_percent(theory.bubble_fraction)}"
        )
    elif theory.schedule_bubble_fraction is not None:
        named = pipeline.stated.name if pipeline.stated else pipeline.schedule
        alike = show_percent(theory.schedule_bubble_fraction)
        of.append(f"{named} with balanced stages and zero-cost transfers: {alike}")
    sentence = f"{waits}batch{_in_brackets(of)}"
    apparent, useful = pipeline.apparent_fraction, pipeline.useful_fraction
    # Without a device there is no utilisation that would mislead anybody.
    on_device = any(rank.device[1] >= 0 for rank in pipeline.ranks)
    if apparent is not None and useful is not None and on_device:
        sentence += f"; device utilisation {show_percent(apparent)}, useful {show_percent(useful)}"
    return f"{sentence}."


def _in_brackets(words: list[str]) -> str:
    return f" ({'; '.join(words)})" if words else ""


def _say_stream(waits: str, analysis: Analysis) -> str:  # noqa: PLR0911 (one sentence each)
    """Say how many batches were in flight, and what that alone would cost."""
    stream, expected = analysis.pipeline.stream, theory_of_stream(analysis.pipeline)
    if analysis.pipeline.absent:  # what is in flight in stages without a trace does not show
        return f"{waits}."
    if stream is not None and stream.first_sets_pace:
        least = f"{stream.usual_in_flight} or more batches in flight"
        return f"{waits} with {least} (the first stage sets the pace, so more would not show)."
    if stream is not None and not stream.sure:
        low, high = stream.may_be
        so_many = f"{low} or more" if high is None else f"{low} to {high}"
        if stream.hosts_hide_more:
            return f"{waits} with {so_many} batches in flight: no label tells what waits in hosts."
        return (
            f"{waits} with {so_many} batches in flight (not exact: batches of neighbouring ranks "
            "could not be matched)."
        )
    if stream is None or expected is None:
        return f"{waits}."
    if analysis.stream is not None and analysis.stream.batches.starved:
        requests = counted(analysis.stream.batches.requests, "request")
        return f"{waits} with {requests} at once."
    if stream.kept is not None:
        batches = counted(stream.kept, "batch", "batches")
    else:
        batches = f"{stream.in_flight:.1f} batches ({stream.most_in_flight} at most)"
    ranks = counted(len(analysis.pipeline.ranks), "rank")
    return f"{waits} with {batches} in flight (theory for {ranks}: {show_percent(expected)})."


def _why_no_bubble(pipeline: PipelineFigures) -> str:
    if not pipeline.one_run:
        return "these ranks are not of one run"
    if pipeline.kind == "stream":
        return "the ranks were captured at different times"
    return pipeline.gaps[-1].message if pipeline.gaps else "no such step on all ranks"


def _reasons(pipeline: PipelineFigures) -> dict[str, str]:
    """Return why each thing may be null, by its path."""
    streams = pipeline.kind == "stream"
    no_steps = "batches overlap: a stream has no steps" if streams else "no step is whole"
    no_account = "passes are not forward ones, one stage a rank" if streams else no_steps
    no_account = no_account if pipeline.one_run else "these ranks are not of one run"
    no_job = "needs a sidecar with unprofiled step times beside the traces"
    no_memory = "record with profile_memory=True, on a device"
    unjudged = "needs a reference for the hop: peers, --history or --class"
    not_repaired = "needs an account of the steps, and measured messages of the hop"

    def steps_or(why: str) -> str:
        return no_steps if streams else why

    return {
        "run.microbatches": steps_or("steps or stages differ in their number"),
        "run.schedule": steps_or("the order of passes matches no known schedule"),
        "run.framework.name": "no framework is recognised in the traces",
        "run.clock_uncertainty_s": "these ranks are not of one run",
        "numbers.bubble_fraction": "the ranks were captured at different times"
        if streams
        else no_steps,
        "numbers.batch_latency_s": no_steps,
        "numbers.step_time_s": steps_or("needs two steps"),
        "numbers.peak_memory_bytes[]": no_memory,
        "numbers.microbatches_per_s": no_steps,
        "numbers.tokens_per_s": steps_or(
            "tokens of a step are not in the traces: give tokens= to debubble.capture"
        ),
        "numbers.unprofiled_batch_latency_s": no_job,
        "theory.bubble_fraction": steps_or("the formula needs one stage per rank, and all ranks"),
        "theory.schedule_bubble_fraction": steps_or(
            "needs a schedule, all its ranks and all kinds of passes"
        ),
        "ledger": no_account,
        "savings": no_account,
        "more_microbatches": no_account,
        "replay": no_account,
        "stream.turn_s": "too few batches were captured from the first stage to the last",
        "stream.phases_labelled": no_account,
        "stream.profiler": "needs the server's own metrics: capture with --server",
        "stream.phases[].tokens": "record with record_shapes=True",
        "stream.phases[].padded_tokens": "record with record_shapes=True",
        "stream.scheduler": "the traces have no labels of an engine's scheduler",
        "bottleneck": WITHOUT_TRACE if pipeline.absent else "the bubble is the largest",
        "stages[].layers": "layers are neither visible in the kernels nor stated by the job",
        "hops[].bytes": "the table has no column of bytes"
        if pipeline.ranks[0].timers
        else "record with record_shapes=True",
        "hops[].from_stage": "these ranks hold several neighbouring stages: see `stages`",
        "hops[].to_stage": "these ranks hold several neighbouring stages: see `stages`",
        "hops[].wire_s.median": "every message had left before its receive began",
        "hops[].bytes_per_s": "no message of known size was waited for",
        "hops[].expected_bytes_per_s": unjudged,
        "hops[].times_expected": unjudged,
        "hops[].times": unjudged,
        "hops[].cost_per_batch_s": not_repaired,
    }
