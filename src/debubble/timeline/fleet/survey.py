"""The files of a run in → all its pipelines measured, whether it has two ranks or thousands.

One way for runs of any size. What is done a rank or a part at a time is a map; what joins them is
small:

    files ─ read ─► ranks ─ find_parts ─► parts ─ measure_part ─► figures of all, one to look into
            map      │                             map
                     └ held in memory, or beyond `HELD_RANKS` as digests on disk (`shelf.py`)
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain

import numpy as np

from debubble.errors import Code, DebubbleError, Gap, NoPipeline, TraceError, UsageError
from debubble.timeline.build import (
    BuiltPart,
    Loader,
    Part,
    build_parts,
    build_run,
    held,
    join_parts,
    load_part,
    renumber,
)
from debubble.timeline.figures import PipelineFigures, measure_pipeline
from debubble.timeline.inside import measure_inside, put_inside
from debubble.timeline.job import ask_job
from debubble.timeline.meetings import meet_in_stages
from debubble.timeline.model import Intervals, RankTimeline, Role, Timeline, role_of
from debubble.timeline.replicas import (
    ReplicaFigures,
    Workers,
    compare_workers,
    judge_run,
    shown_of,
)
from debubble.timeline.schedules import SCHEDULES, Statement, state_schedule
from debubble.timeline.steps import marks_steps, only_steps
from debubble.timeline.transfers import rank_of
from debubble.trace.captures import Capture
from debubble.trace.columns import RankTrace
from debubble.trace.digest import DigestPlace
from debubble.trace.engine import LOCAL, Engine, GivenEngine, LocalEngine, Progress, map_files
from debubble.trace.optable import FORMAT as OP_TABLES
from debubble.trace.run import Run, RunFiles, read_run, unreadable
from debubble.trace.sidecar import Sidecar
from debubble.trace.source import DEFAULT_LIMITS, Limits
from debubble.units import show_ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """Which pipeline, which step, and what the user knows of the run."""

    pipeline: int | None = None
    step: int | None = None
    statement: Statement | None = None


def measure_asked(
    timeline: Timeline, pipelines: Sequence[int], sidecars: Sequence[Sidecar], question: Question
) -> tuple[PipelineFigures, ...]:
    """Measure pipelines one by one; the job's word tells an order that no known schedule has."""
    measured = []
    for pipeline in pipelines:
        figures = measure_pipeline(timeline, pipeline, question.step, question.statement)
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
            hint=f"--pipeline takes one of: {show_ranks(known)}",
        )
    if question.step is not None and question.step not in timeline.steps:
        raise UsageError(
            f"there is no step {question.step}",
            hint=f"--step takes one of: {show_ranks(timeline.steps)}",
        )
    return known if question.pipeline is None else (question.pipeline,)


# Parts are built where their ranks lie, whoever read them: in this process, or by its workers.
HERE, WORKERS_HERE = GivenEngine(executor=None), LocalEngine(worth_bytes=0)
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

    def may_hold(self, found: RunFiles) -> bool:
        """Tell whether all of a run may be held in memory."""
        return len(found.capture.files) <= self.held_ranks

    def read(self, found: RunFiles) -> Run:
        """Read a run that is held."""
        return read_run(
            found,
            engine=self.engine,
            limits=self.limits,
            rank=self.rank,
            on_progress=self.on_progress,
            digests=self.digests,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RanksRead:
    """A run, read, and where its ranks lie."""

    run: Run
    """Of ranks that are not held, headers, groups and peers."""
    loaders: Mapping[int, Loader]
    marked: bool
    """Some rank marks steps."""
    held: bool
    """In memory, all of them."""


def survey_run(
    found: RunFiles, question: Question | None = None, means: Means | None = None
) -> Survey:
    """Read a run and measure the pipelines asked about; raises `NoPipelineIn` where it has none."""
    means, question = means or Means(), question or Question()
    if means.may_hold(found):
        return measure_run(means.read(found), question, means)
    from debubble.timeline.fleet.shelf import read_spooled, spooling  # noqa: PLC0415 (only large runs)

    with spooling() as spool:
        return _measure(read_spooled(found, means, spool), question, means)


def inspect_run(found: RunFiles, means: Means | None = None) -> Run:
    """Read a run for what its files hold; of a large one ranks come light, with summaries."""
    means = means or Means()
    if means.may_hold(found):
        return means.read(found)
    from debubble.timeline.fleet.shelf import read_spooled  # noqa: PLC0415 (only large runs)

    return read_spooled(found, means, None).run


def measure_run(run: Run, question: Question, means: Means | None = None) -> Survey:
    """Measure a run that is held whole; raises `NoPipelineIn` where it has no pipeline."""
    marked = any(marks_steps(trace) for trace in run.ranks)
    read = RanksRead(run=run, loaders=held(run.ranks), marked=marked, held=True)
    return _measure(read, question, means or Means())


def _measure(read: RanksRead, question: Question, means: Means) -> Survey:
    """Measure all pipelines, and look into the one that drags the others, or waits most."""
    run, keeps = read.run, read.held
    lost: list[Gap] = []

    def measure_parts(parts: Sequence[Part]) -> list[tuple[Part, BuiltPart]]:
        """Measure parts where their ranks lie: on this machine, in this process if held."""
        nonlocal keeps
        keeps = read.held or len(parts) == 1
        task = partial(measure_part, question=question, keeps=keeps)
        engine: Engine = HERE if keeps else WORKERS_HERE
        show = None if keeps else means.on_progress
        measured = []
        with closing(map_files(task, parts, engine, means.limits, show)) as outcomes:
            for part, outcome in outcomes:
                if isinstance(outcome, TraceError):
                    lost.append(unreadable(outcome))
                else:
                    measured.append((part, outcome))
        return measured

    with _naming(run):
        if run.tables and not run.ranks:
            table = build_run(run)
            if run.sidecars:
                table = look_inside_passes(run, table, means)
            figures = measure_asked(table, table.pipelines, run.sidecars, question)
            return _survey(run, figures, table, question)
        built, whole = build_parts(
            run.ranks, read.loaders, run.sidecars, marked=read.marked, build=measure_parts
        )
    run = replace(run, gaps=(*run.gaps, *lost))
    parts = [part for _, part in built]
    survey = _survey(run, _number_alike(parts, whole, run), whole, question)
    if keeps:
        timeline, traces = whole, tuple(trace for part in parts for trace in part.traces)
        mates: Iterable[RankTrace] = ()
    else:
        ranks = {rank.rank for rank in survey.shown.ranks}
        part = load_part(
            next(part for part, _ in built if ranks <= set(part.loaders)), means.limits
        )
        numbers = {members: number for number, members in whole.members.items()}
        timeline = replace(renumber(join_parts([part]), numbers), gaps=whole.gaps)
        traces, mates = part.traces, _load_stage_mates(read, part.traces, ranks, means.limits)
    timeline = meet_in_stages(timeline, chain(traces, mates))
    # What is known of them in full takes the place of what came back from workers.
    full = {
        pipeline.pipeline: replace(pipeline, ranks=timeline.ranks_of(pipeline.pipeline))
        for pipeline in survey.figures
        if pipeline.pipeline in timeline.pipelines
    }
    return replace(
        survey,
        figures=tuple(full.get(pipeline.pipeline, pipeline) for pipeline in survey.figures),
        shown=full[survey.shown.pipeline],
        timeline=timeline,
        traces=traces,
    )


def _survey(
    run: Run, every: Sequence[PipelineFigures], whole: Timeline, question: Question
) -> Survey:
    """Hold the pipelines asked about against each other and against all others."""
    asked = pipelines_asked(whole, question)
    figures = tuple(pipeline for pipeline in every if pipeline.pipeline in asked)
    replicas = judge_run(figures)
    streams = any(pipeline.kind == "stream" or not pipeline.windows for pipeline in every)
    stages = {pipeline.pipeline: pipeline.stages for pipeline in every}
    return Survey(
        run=run,
        figures=figures,
        shown=shown_of(figures, replicas),
        replicas=replicas,
        workers=Workers() if streams else compare_workers(stages),
        timeline=whole,
        traces=(),
    )


def measure_part(part: Part, limits: Limits, *, question: Question, keeps: bool) -> BuiltPart:
    """Build a part and measure all its pipelines; keep the figures alone, or everything."""
    built = load_part(part, limits)
    timeline = built.timeline
    if timeline is None:
        return built if keeps else replace(built, traces=())
    figures = measure_asked(timeline, timeline.pipelines, part.sidecars, question)
    if keeps:
        return replace(built, figures=figures)
    nothing = np.zeros(0, dtype=np.intp)
    return BuiltPart(
        timeline=replace(
            timeline,
            ranks=_without_intervals(timeline.ranks),
            passes=timeline.passes.where(nothing),
            transfers=timeline.transfers.where(nothing),
        ),
        figures=tuple(
            replace(pipeline, ranks=_without_intervals(pipeline.ranks)) for pipeline in figures
        ),
    )


def _without_intervals(ranks: Sequence[RankTimeline]) -> tuple[RankTimeline, ...]:
    nothing = Intervals.no_rows()
    return tuple(
        replace(
            rank,
            busy=nothing,
            occupied=nothing,
            apparent=nothing,
            unissued=nothing,
            outside=(),
            side_work=(),
        )
        for rank in ranks
    )


def _number_alike(parts: Sequence[BuiltPart], whole: Timeline, run: Run) -> list[PipelineFigures]:
    """Return the figures of all parts, numbered as in the whole run; groups are shared objects."""
    numbers = {members: number for number, members in whole.members.items()}
    groups = {rank_of(trace): trace.groups for trace in run.ranks}
    numbered = []
    for pipeline in (pipeline for part in parts for pipeline in part.figures):
        number = numbers[pipeline.ranks[0].members]
        ranks = tuple(
            replace(
                rank,
                pipeline=number,
                collectives=rank.collectives
                and replace(rank.collectives, groups=groups[rank.rank]),
            )
            for rank in pipeline.ranks
        )
        numbered.append(replace(pipeline, pipeline=number, ranks=ranks))
    return sorted(numbered, key=lambda pipeline: pipeline.pipeline)


def _load_stage_mates(
    read: RanksRead, traces: Sequence[RankTrace], shown: Collection[int], limits: Limits
) -> Iterator[RankTrace]:
    """Yield, one by one, the ranks of other pipelines that share stages with those shown."""
    groups = {group for trace in traces if trace.rank in shown for group in trace.groups}
    mates = {rank for group in groups if role_of(group) is Role.INNER for rank in group.ranks}
    for rank in sorted((mates & set(read.loaders)) - {trace.rank for trace in traces}):
        yield read.loaders[rank](limits)


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
        message="a meter sees no gaps inside passes: they count as busy, so the "
        "true bubble is larger",
        hint="have a few steps captured (`touch debubble-meter/capture-now`), and give the whole "
        "folder of the meter",
    )
    return replace(timeline, gaps=(*timeline.gaps, busy))


def _read_beside(capture: Capture, run: Run, means: Means) -> Run:
    """Read another capture of the same folder."""
    found = replace(run.found, capture=capture, gaps=())
    return replace(means, on_progress=None).read(found)


@contextmanager
def _naming(run: Run) -> Iterator[None]:
    """Let whoever catches that there is no pipeline know in which run."""
    try:
        yield
    except NoPipeline as why:
        raise NoPipelineIn(why, run) from why
