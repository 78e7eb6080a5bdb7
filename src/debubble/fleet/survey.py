"""The files of a run in → all its pipelines measured, whether it has four ranks or thousands.

A small run is read and built at once. Of a large one (`large.py`, imported only then), each rank is
reduced where it is read, each part is built from its digests in a worker of this machine, and only
the pipeline that is shown is ever held in full. Both ways give the same figures.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from debubble.errors import Code, DebubbleError, Gap, NoPipeline, UsageError
from debubble.schedules import SCHEDULES, Statement, state_schedule
from debubble.timeline.build import all_inferred_alike, build_run, join_parts, renumber
from debubble.timeline.chain import rank_of
from debubble.timeline.figures import PipelineFigures, measure_pipeline, measure_stages
from debubble.timeline.inside import measure_inside, put_inside
from debubble.timeline.job import ask_job
from debubble.timeline.model import Timeline
from debubble.timeline.replicas import (
    ReplicaFigures,
    Workers,
    compare_workers,
    judge_run,
    shown_of,
)
from debubble.timeline.steps import only_steps
from debubble.trace.captures import Capture
from debubble.trace.columns import RankTrace
from debubble.trace.digest.content import DigestPlace
from debubble.trace.engine import LOCAL, Engine, Progress
from debubble.trace.format import Sidecar
from debubble.trace.optable import FORMAT as OP_TABLES
from debubble.trace.run import Run, RunFiles, read_run
from debubble.trace.source import DEFAULT_LIMITS, Limits

if TYPE_CHECKING:
    from debubble.fleet.large import Fleet, Spool

# As many numbers as anyone would read.
_NUMBERS_SHOWN = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """Which pipeline, which step, and what the user knows of the run."""

    pipeline: int | None = None
    step: int | None = None
    statement: Statement | None = None
    in_flight: int | None = None
    """Of a server: how many batches it keeps in flight."""


def measure_asked(
    timeline: Timeline, pipelines: Sequence[int], sidecars: Sequence[Sidecar], question: Question
) -> tuple[PipelineFigures, ...]:
    """Measure pipelines one by one; the job's word tells an order that no known schedule has."""
    measured = []
    for pipeline in pipelines:
        figures = measure_pipeline(
            timeline, pipeline, question.step, question.statement, question.in_flight
        )
        if question.in_flight is not None and figures.kind != "stream":
            raise UsageError(
                "--in-flight-measured is about a server, and this run has steps",
                hint="leave it out",
            )
        unknown = figures.schedule is None and figures.kind != "stream"
        if unknown and question.statement is None:
            said = ask_job(sidecars, figures).schedule
            if said is not None and said in SCHEDULES:
                stated = state_schedule(said)
                figures = measure_pipeline(timeline, pipeline, question.step, stated)
        measured.append(figures)
    return tuple(measured)


def pipelines_asked(timeline: Timeline, question: Question) -> tuple[int, ...]:
    """Return the pipelines asked for; say what there is where there is no such one, or no step."""
    known = timeline.pipelines
    if question.pipeline is not None and question.pipeline not in known:
        raise UsageError(
            f"there is no pipeline {question.pipeline}",
            hint=f"--pipeline takes one of: {_listed(known)}",
        )
    if question.step is not None and question.step not in timeline.steps:
        raise UsageError(
            f"there is no step {question.step}",
            hint=f"--step takes one of: {_listed(timeline.steps)}",
        )
    return known if question.pipeline is None else (question.pipeline,)


def _listed(numbers: Sequence[int]) -> str:
    shown = ", ".join(str(number) for number in numbers[:_NUMBERS_SHOWN])
    return shown if len(numbers) <= _NUMBERS_SHOWN else f"{shown}, … {numbers[-1]}"


# Up to here a run is held whole: the largest pipelines have about as many ranks.
HELD_RANKS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """A run, measured."""

    run: Run
    """Of a large run, its ranks are light: headers, groups and peers."""
    figures: tuple[PipelineFigures, ...]
    """Of every pipeline that was asked for."""
    shown: PipelineFigures
    """The one to look into first: it drags the others, or waits most."""
    replicas: ReplicaFigures | None
    """What they wait for each other, where they reduce together."""
    workers: Workers
    """The devices of all pipelines, also of those not asked for, held against each other."""
    timeline: Timeline
    """Of the whole run, or of a large one the part that is shown."""
    traces: tuple[RankTrace, ...]
    """The ranks of the timeline."""

    @property
    def gaps(self) -> tuple[Gap, ...]:
        """Whatever was found wanting, each once."""
        measured = (gap for pipeline in self.figures for gap in pipeline.gaps)
        judged = self.replicas.gaps if self.replicas else ()
        return tuple(dict.fromkeys((*self.run.gaps, *self.timeline.gaps, *measured, *judged)))


class NoPipelineIn(NoPipeline):
    """No pipeline, in a run that could be read."""

    def __init__(self, why: NoPipeline, run: Run) -> None:
        super().__init__(why.message, hint=why.hint)
        self.run = run


@dataclass(frozen=True, slots=True, kw_only=True)
class Means:
    """How a run is read."""

    engine: Engine = LOCAL
    limits: Limits = DEFAULT_LIMITS
    rank: int | None = None
    """Of a single file that has none."""
    digests: DigestPlace | None = None
    on_progress: Progress | None = None
    held_ranks: int = HELD_RANKS
    """Up to so many files are held at once."""

    def read(self, found: RunFiles) -> Run:
        """Read a run that is held whole."""
        return read_run(
            found,
            engine=self.engine,
            limits=self.limits,
            rank=self.rank,
            on_progress=self.on_progress,
            digests=self.digests,
        )

    def scout(self, found: RunFiles, spool: Spool | None) -> Fleet:
        """Read a run that is not."""
        from debubble.fleet.large import read_fleet  # noqa: PLC0415 (only large runs need it)

        return read_fleet(
            found,
            spool,
            engine=self.engine,
            limits=self.limits,
            rank=self.rank,
            on_progress=self.on_progress,
            digests=self.digests,
        )


def survey_run(
    found: RunFiles, question: Question | None = None, means: Means | None = None
) -> Survey:
    """Read a run and measure the pipelines asked about; raises `NoPipelineIn` where it has none."""
    means, question = means or Means(), question or Question()
    if len(found.capture.files) <= means.held_ranks:
        run = means.read(found)
        if not (run.tables and run.sidecars and not run.ranks):
            return measure_run(run, question)
        with _naming(run):
            timeline = look_inside_passes(run, build_run(run, question.in_flight), means)
        return _measure_held(run, timeline, run.ranks, question)
    from debubble.fleet.large import spooling  # noqa: PLC0415 (only large runs need it)

    with spooling() as spool:
        fleet = means.scout(found, spool)
        if fleet.run.tables and not fleet.run.ranks:
            return measure_run(fleet.run, question)
        return _survey_fleet(fleet, question, means)


def inspect_run(found: RunFiles, means: Means | None = None) -> Run:
    """Read a run for what its files hold; of a large one ranks come light, with summaries."""
    means = means or Means()
    if len(found.capture.files) <= means.held_ranks:
        return means.read(found)
    return means.scout(found, None).run


def measure_run(run: Run, question: Question) -> Survey:
    """Measure a run that is held whole; raises `NoPipelineIn` where it has no pipeline."""
    with _naming(run):
        return _measure_held(run, build_run(run, question.in_flight), run.ranks, question)


# What a meter and the captures it has taken are called: the job's start, and the first step.
_OF_A_JOB = re.compile(r"(\d{8}-\d{6})-step(\d+)$")


def look_inside_passes(run: Run, timeline: Timeline, means: Means) -> Timeline:
    """Put gaps into a meter's passes, as the newest capture of the same job shows them.

    A job that meters itself and was captured leaves both in one folder; without a capture, what
    lies inside passes counts as busy, and that is said.
    """
    asked = _OF_A_JOB.search(run.sidecars[0].capture or "")
    of_this_job: dict[bool, dict[int, Capture]] = {True: {}, False: {}}
    for capture in run.found.captures:
        named = _OF_A_JOB.search(capture.files[0].file.rpartition("/")[0])
        if asked and named and named[1] == asked[1]:
            is_table = capture.files[0].format == OP_TABLES.name
            of_this_job[is_table][int(named[2])] = capture
    for first, capture in sorted(of_this_job[False].items(), reverse=True):
        tables = [table for began, table in sorted(of_this_job[True].items()) if began <= first]
        try:
            captured = build_run(_read_beside(capture, run, means))
            metered = build_run(_read_beside(tables[-1], run, means)) if tables else captured
        except DebubbleError:
            continue  # an older one may do
        steps = range(first, first + len(captured.steps))
        metered = only_steps(metered, [step for step in metered.steps if step in steps])
        inside = measure_inside(captured, metered)
        if not inside or not steps:
            continue
        told = Gap(
            code=Code.GAPS_FROM_CAPTURE,
            message="a meter sees no gaps inside passes: they are taken from the capture of steps "
            f"{steps[0]} to {steps[-1]}, {capture.name}",
            hint="have other steps captured where the job has changed since",
        )
        return replace(put_inside(timeline, inside), gaps=(*timeline.gaps, told))
    busy = Gap(
        code=Code.GAPS_COUNT_AS_BUSY,
        message="a meter sees no gaps inside passes: they count as busy, so that the bubble is "
        "larger than this by what kernels leave between each other",
        hint="have a few steps captured (`touch debubble-meter/capture-now`), and give the whole "
        "folder of the meter",
    )
    return replace(timeline, gaps=(*timeline.gaps, busy))


def _read_beside(capture: Capture, run: Run, means: Means) -> Run:
    """Read another capture of the same folder."""
    found = replace(run.found, capture=capture, gaps=())
    return replace(means, on_progress=None).read(found)


def _measure_held(
    run: Run, timeline: Timeline, traces: tuple[RankTrace, ...], question: Question
) -> Survey:
    figures = measure_asked(timeline, pipelines_asked(timeline, question), run.sidecars, question)
    several = len(timeline.pipelines) > 1
    replicas = judge_run(figures) if several else None
    return Survey(
        run=run,
        figures=figures,
        shown=shown_of(figures, replicas) if several else figures[0],
        replicas=replicas,
        workers=_find_workers(timeline, figures) if several else Workers(),
        timeline=timeline,
        traces=traces,
    )


def _find_workers(timeline: Timeline, figures: Sequence[PipelineFigures]) -> Workers:
    """Compare the devices of all pipelines, also of those that were not asked about."""
    if any(pipeline.kind == "stream" or not pipeline.windows for pipeline in figures):
        return Workers()
    stages = {pipeline.pipeline: pipeline.stages for pipeline in figures}
    kept = only_steps(timeline, [window.step for window in figures[0].windows])
    for other in set(timeline.pipelines) - set(stages):
        stages[other] = measure_stages(kept, timeline.ranks_of(other))
    return compare_workers(stages)


@contextmanager
def _naming(run: Run) -> Iterator[None]:
    """Let whoever catches that there is no pipeline know in which run."""
    try:
        yield
    except NoPipeline as why:
        raise NoPipelineIn(why, run) from why


def _survey_fleet(fleet: Fleet, question: Question, means: Means) -> Survey:
    """Measure part by part; of several, hold the one in full whose pipeline is shown."""
    from debubble.fleet import large  # noqa: PLC0415 (only large runs need it)

    limits, on_progress = means.limits, means.on_progress
    orders, gaps = large.order_parts(fleet, question)
    if len(orders) == 1:
        part = large.load_part(orders[0], limits)
        with _naming(fleet.run):
            timeline = join_parts([part.timeline], gaps)
        return _measure_held(fleet.run, timeline, part.traces, question)
    measured, lost = large.measure_parts(orders, limits, on_progress)
    if not all_inferred_alike([part.timeline for _, part in measured]):
        orders = [replace(order, marked=False, may_infer=False) for order, _ in measured]
        measured, more = large.measure_parts(orders, limits, on_progress)
        lost += more
    run = replace(fleet.run, gaps=(*fleet.run.gaps, *lost))
    with _naming(run):
        whole = join_parts([part.timeline for _, part in measured], gaps)
    numbers = {members: number for number, members in whole.members.items()}
    wanted = frozenset(pipelines_asked(whole, question))
    groups = {rank_of(trace): trace.groups for trace in run.ranks}
    every = [
        pipeline
        for _, part in measured
        for pipeline in large.settle_figures(part.figures, numbers, groups)
    ]
    every.sort(key=lambda pipeline: pipeline.pipeline)
    figures = [pipeline for pipeline in every if pipeline.pipeline in wanted]
    streams = any(pipeline.kind == "stream" for pipeline in every)
    replicas = judge_run(figures)
    worst = shown_of(figures, replicas)
    order = next(order for order, _ in measured if worst.ranks[0].rank in order.ranks)
    part = large.load_part(order, limits)
    timeline = renumber(replace(join_parts([part.timeline]), gaps=whole.gaps), numbers)
    shown = measure_asked(timeline, [worst.pipeline], run.sidecars, question)[0]
    return Survey(
        run=run,
        figures=tuple(
            shown if pipeline.pipeline == shown.pipeline else pipeline for pipeline in figures
        ),
        shown=shown,
        replicas=replicas,
        workers=Workers()
        if streams
        else compare_workers({pipeline.pipeline: pipeline.stages for pipeline in every}),
        timeline=timeline,
        traces=part.traces,
    )
