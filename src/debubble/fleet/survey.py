"""The files of a run in → all its pipelines measured, whether it has four ranks or thousands.

A small run is read and built at once. Of a large one, each rank is reduced where it is read, each
part is built from its digests in a worker of this machine, and only the pipeline that is shown is
ever held in full. Both ways give the same figures.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace

from debubble.errors import Gap, NoPipeline, TraceError
from debubble.fleet.fleet import Fleet, order_parts, read_fleet
from debubble.fleet.part import PartFigures, PartOrder, load_part, measure_part, settle_figures
from debubble.fleet.question import Question, measure_asked, pipelines_asked
from debubble.fleet.spool import Spool, spooling
from debubble.timeline.build import all_inferred_alike, build_run, join_parts, renumber
from debubble.timeline.chain import rank_of
from debubble.timeline.figures import PipelineFigures
from debubble.timeline.model import Timeline
from debubble.timeline.replicas import ReplicaFigures, judge_run, shown_of
from debubble.trace.columns import RankTrace
from debubble.trace.digest.place import DigestPlace
from debubble.trace.engine import LOCAL, Engine, LocalEngine, Progress, map_files
from debubble.trace.run import Found, Run, read_run, unreadable
from debubble.trace.source import DEFAULT_LIMITS, Limits

# Up to here a run is held whole: the largest pipelines have about as many ranks.
HELD_RANKS = 64

# Digests lie on this machine, so parts are built on it, whoever read the ranks.
_HERE = LocalEngine(worth_bytes=0)


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
    timeline: Timeline
    """Of the whole run, or of a large one the part that is shown."""
    traces: tuple[RankTrace, ...]
    """The ranks of the timeline."""

    @property
    def gaps(self) -> tuple[Gap, ...]:
        """Whatever was found wanting, each once."""
        measured = (gap for one in self.figures for gap in one.gaps)
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

    def read(self, found: Found) -> Run:
        """Read a run that is held whole."""
        return read_run(
            found,
            engine=self.engine,
            limits=self.limits,
            rank=self.rank,
            on_progress=self.on_progress,
            digests=self.digests,
        )

    def scout(self, found: Found, spool: Spool | None) -> Fleet:
        """Read a run that is not."""
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
    found: Found, question: Question | None = None, means: Means | None = None
) -> Survey:
    """Read a run and measure the pipelines asked about; raises `NoPipelineIn` where it has none."""
    means, asked = means or Means(), question or Question()
    if len(found.capture.files) <= means.held_ranks:
        return _survey_whole(means.read(found), asked)
    with spooling() as spool:
        fleet = means.scout(found, spool)
        if fleet.run.tables and not fleet.run.ranks:
            return _survey_whole(fleet.run, asked)
        return _survey_fleet(fleet, asked, means.on_progress)


def inspect_run(found: Found, means: Means | None = None) -> Run:
    """Read a run for what its files hold; of a large one ranks come light, with summaries."""
    means = means or Means()
    if len(found.capture.files) <= means.held_ranks:
        return means.read(found)
    return means.scout(found, None).run


def _survey_whole(run: Run, asked: Question) -> Survey:
    with _naming(run):
        return _measure_held(run, build_run(run), run.ranks, asked)


def _measure_held(
    run: Run, timeline: Timeline, traces: tuple[RankTrace, ...], asked: Question
) -> Survey:
    figures = measure_asked(timeline, pipelines_asked(timeline, asked), run.sidecars, asked)
    replicas = judge_run(figures)
    return Survey(
        run=run,
        figures=figures,
        shown=shown_of(figures, replicas),
        replicas=replicas,
        timeline=timeline,
        traces=traces,
    )


@contextmanager
def _naming(run: Run) -> Iterator[None]:
    """Let whoever catches that there is no pipeline know in which run."""
    try:
        yield
    except NoPipeline as why:
        raise NoPipelineIn(why, run) from why


def _survey_fleet(fleet: Fleet, asked: Question, on_progress: Progress | None) -> Survey:
    orders, gaps = order_parts(fleet, asked)
    if len(orders) == 1:
        part = load_part(orders[0], fleet.limits)
        with _naming(fleet.run):
            timeline = join_parts([part.timeline], gaps)
        return _measure_held(fleet.run, timeline, part.traces, asked)
    measured, lost = _measure_parts(orders, fleet.limits, on_progress)
    if not all_inferred_alike([part.timeline for _, part in measured]):
        orders = [replace(order, marked=False, may_infer=False) for order, _ in measured]
        measured, more = _measure_parts(orders, fleet.limits, on_progress)
        lost += more
    run = replace(fleet.run, gaps=(*fleet.run.gaps, *lost))
    with _naming(run):
        whole = join_parts([part.timeline for _, part in measured], gaps)
    numbers = {members: number for number, members in whole.members.items()}
    wanted = frozenset(pipelines_asked(whole, asked))
    groups = {rank_of(trace): trace.groups for trace in run.ranks}
    figures = sorted(
        (one for _, part in measured for one in settle_figures(part.figures, numbers, groups)),
        key=lambda one: one.pipeline,
    )
    figures = [one for one in figures if one.pipeline in wanted]
    replicas = judge_run(figures)
    worst = shown_of(figures, replicas)
    order = next(order for order, _ in measured if worst.ranks[0].rank in order.ranks)
    part = load_part(order, fleet.limits)
    timeline = renumber(replace(join_parts([part.timeline]), gaps=whole.gaps), numbers)
    shown = measure_asked(timeline, [worst.pipeline], run.sidecars, asked)[0]
    return Survey(
        run=run,
        figures=tuple(shown if one.pipeline == shown.pipeline else one for one in figures),
        shown=shown,
        replicas=replicas,
        timeline=timeline,
        traces=part.traces,
    )


def _measure_parts(
    orders: Sequence[PartOrder], limits: Limits, on_progress: Progress | None
) -> tuple[list[tuple[PartOrder, PartFigures]], list[Gap]]:
    """Measure all parts on this machine's processors; name those that could not be."""
    measured, lost = [], []
    measuring = map_files(measure_part, orders, _HERE, limits, on_progress, ordered=True)
    with closing(measuring):
        for order, outcome in measuring:
            if isinstance(outcome, TraceError):
                lost.append(unreadable(outcome))
            else:
                measured.append((order, outcome))
    return measured, lost
