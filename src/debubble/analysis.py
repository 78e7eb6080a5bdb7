"""One run in → every fact about it, each worked out once, when it is first asked for.

The middle of the house: verbs, the watch service, `tune` and the pictures ask here, so that two of
them cannot disagree. Left of it nothing is put into words, right of it nothing is measured.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import ClassVar

from debubble.errors import Gap, NoFit, UsageError
from debubble.ledger.hop_health import LinkHealth, account_for, judge_links
from debubble.ledger.ledger import Job, Ledger
from debubble.ledger.verdict import MATTERS, Bottleneck, MainCause, find_bottleneck, name_causes
from debubble.links.hop_times import Hop
from debubble.links.judge import Past
from debubble.links.wiring import Wiring, read_topologies, read_wiring
from debubble.measure.measurement import Measurement, measure_run
from debubble.plan.baseline import AlsoRun, Baseline, measure_baseline
from debubble.plan.lever import Lever
from debubble.plan.levers import microbatches, split
from debubble.plan.plan import PricedLever, price_lever
from debubble.serving.account import StreamAccount, account_stream
from debubble.serving.batches import find_batches
from debubble.serving.plan import ServerModel, model_server
from debubble.serving.traffic import Traffic
from debubble.simulate.communication import Communication
from debubble.simulate.theory import bubble_fraction, bubble_fraction_of_stream, ideal_bubble
from debubble.timeline.figures import PipelineFigures
from debubble.timeline.fleet.survey import Means, Question, Survey, survey_run
from debubble.timeline.job import JobFacts, RunBasis, ask_job
from debubble.timeline.model import PassKind, Timeline
from debubble.timeline.replicas import ReplicaFigures, Workers
from debubble.timeline.schedules import Order, order_of
from debubble.trace.columns import RankTrace
from debubble.trace.run import Run, RunFiles
from debubble.trace.server_notes import ServerNotes, read_server_notes


@dataclass(frozen=True, slots=True, kw_only=True)
class Wires:
    """What the user says of the wires, and of what they did before."""

    classes: Sequence[str] = ()
    topologies: Sequence[str] = ()
    history: Mapping[Hop, Past] = field(default_factory=dict)


# A batch is as slow as its slowest pipeline: of many, the others never are.
MOST_REPLAYED = 7


class Analysis:
    """What is known of one run, of the pipeline to look into above all."""

    drawn: ClassVar[Callable[[Analysis], str] | None] = None
    """How it shows itself in a notebook; whoever can draw says it."""

    def _repr_html_(self) -> str | None:
        return type(self).drawn(self) if type(self).drawn else None  # type: ignore[misc]

    def __init__(self, survey: Survey, wires: Wires | None = None, step: int | None = None) -> None:
        self.run: Run = survey.run
        self.timeline: Timeline = survey.timeline
        self.traces: tuple[RankTrace, ...] = survey.traces
        self.pipelines: tuple[PipelineFigures, ...] = survey.figures
        """All that were asked for."""
        self.pipeline: PipelineFigures = survey.shown
        """The one to look into first: it drags the others, or waits most."""
        self.replicas: ReplicaFigures | None = survey.replicas
        self.workers: Workers = survey.workers
        """Which devices are slower than those of the same stages in other pipelines."""
        self.step = step
        """The one that was asked for."""
        self._found = survey.gaps
        self._wires = wires or Wires()
        self._ledgers: dict[int, Ledger | None] = {}

    @cached_property
    def job(self) -> JobFacts:
        """What the job said of itself, held against its traces."""
        return ask_job(self.run.sidecars, self.pipeline)

    @cached_property
    def basis(self) -> RunBasis:
        """Whether the run is held against others with or without the profiler, and its latency."""
        return self.job.basis_for(self.pipeline)

    @cached_property
    def _wiring(self) -> tuple[Wiring, tuple[Gap, ...]]:
        topologies, gaps = read_topologies(self._wires.topologies)
        wiring = read_wiring(self.pipeline.ranks, self._wires.classes, topologies)
        return wiring, tuple(gaps)

    def ledger_of(self, pipeline: PipelineFigures) -> Ledger | None:
        """Account for a pipeline; None where batches overlap, are cut, or are not of one run."""
        if pipeline.pipeline not in self._ledgers:
            self._ledgers[pipeline.pipeline] = account_for(
                self.timeline,
                pipeline,
                self._wiring[0],
                self._wires.history,
                self._job_around(pipeline),
            )
        return self._ledgers[pipeline.pipeline]

    def _job_around(self, pipeline: PipelineFigures) -> Job:
        """Tell what a pipeline shares its batches with; the slowest of them are replayed too."""
        others = [
            other
            for other in self.pipelines
            if other.pipeline != pipeline.pipeline and other.windows and other.one_run
        ]
        others = [other for other in others if not other.cut and other.kind == pipeline.kind]
        held = [other for other in others if other.pipeline in self.timeline.pipelines]
        # Replicas that differ in nothing but noise tell nothing of each other. Of two steps too few
        # to tell which of them drags, the slowest of each step tells that they differ.
        differ = bool(self.workers.slow or self.workers.uneven) or _windows_differ(
            [pipeline, *others]
        )
        alike = held if differ else []
        slowest = _slowest_first(alike)
        replayed = tuple(other.pipeline for other in slowest[:MOST_REPLAYED])
        took = pipeline.batch_latency_ns or 0
        batch = round(median(longest_windows([pipeline, *others]).values() or [took]))
        return Job(
            workers=self.workers,
            alike=tuple(other.pipeline for other in alike),
            beside=replayed,
            hops=tuple(hop for other in slowest[:MOST_REPLAYED] for hop in other.hops),
            longest_ns=longest_windows(others),
            not_replayed_ns=longest_windows(
                [other for other in others if other.pipeline not in replayed]
            ),
            batch_latency_ns=batch if batch > (1 + MATTERS) * took else None,
        )

    @property
    def ledger(self) -> Ledger | None:
        """Why each nanosecond of the pipeline was spent."""
        return self.ledger_of(self.pipeline)

    @cached_property
    def links(self) -> LinkHealth:
        """What each hop takes, whether it is slow, and what that costs."""
        if self.ledger is not None and self.ledger.links is not None:
            return self.ledger.links
        return judge_links(self.timeline, self.pipeline, self._wiring[0], self._wires.history)

    @cached_property
    def stream(self) -> StreamAccount | None:
        """Why each nanosecond of a stream was spent; None of what is none, or cannot be told."""
        if self.pipeline.kind != "stream" or not self.pipeline.one_run:
            return None
        batches = find_batches(self.timeline, self.pipeline, self.traces)
        if batches is None:
            return None
        return account_stream(batches, [hop.hop for hop in self.links.slow])

    @cached_property
    def server_notes(self) -> ServerNotes | None:
        """What the server said of itself around the capture, where `capture --server` noted it."""
        files = [Path(rank.file) for rank in self.pipeline.ranks if rank.file]
        names = {file.name for file in files}
        found = [
            notes
            for folder in sorted({str(file.parent) for file in files})
            # They are of the newest capture in a folder: others may lie beside it.
            if (notes := read_server_notes(folder)) and names & {*notes.traces}
        ]
        return found[0] if found else None

    @cached_property
    def causes(self) -> tuple[MainCause, ...]:
        """The causes that matter, whose they are, and what putting them right would buy."""
        return name_causes(self.ledger) if self.ledger else ()

    @cached_property
    def bottleneck(self) -> Bottleneck | None:
        """What takes more of a step than all waiting does."""
        return find_bottleneck(self.ledger, self.pipeline.outside_ns) if self.ledger else None

    @cached_property
    def measurement(self) -> Measurement:
        """The numbers that are compared, and kept: a sample a step."""
        doubts = tuple(gap for gap in self.measured_warnings if gap.touches)
        measured = measure_run(self.run, self.timeline, self.pipeline, self.job)
        return replace(measured, doubts=doubts)

    @cached_property
    def warnings(self) -> tuple[Gap, ...]:
        """Whatever was found wanting, each once: the same for whoever asks."""
        account = self.ledger.gaps if self.ledger else ()
        return tuple(dict.fromkeys((*self.measured_warnings, *self._wiring[1], *account)))

    @cached_property
    def measured_warnings(self) -> tuple[Gap, ...]:
        """The same without those of the account, for whoever asks for the numbers alone."""
        return tuple(dict.fromkeys((*self._found, *self.job.gaps)))

    @property
    def tokens(self) -> int | None:
        """Of a microbatch, where the job or its shapes tell."""
        said = self.job.tokens_of_microbatch(self.pipeline.microbatches)
        return said or self.pipeline.ranks[0].parallelism.microbatch_tokens

    @cached_property
    def theory(self) -> float | None:
        """The formula's bubble, where it applies: one stage a rank, a fixed batch."""
        pipeline = self.pipeline
        single = all(len(rank.stages) == 1 for rank in pipeline.ranks)
        if pipeline.stated is not None and pipeline.stated.agrees is not None:
            single = pipeline.stated.chunks == 1
        members = pipeline.ranks[0].members
        # Beyond an end that was not captured there may be more ranks.
        ends_known = not {*members[:1], *members[-1:]} & set(pipeline.absent)
        if pipeline.microbatches is None or not single or not ends_known or pipeline.stream:
            return None
        return bubble_fraction(len(pipeline.ranks) + len(pipeline.absent), pipeline.microbatches)

    @cached_property
    def theory_of_schedule(self) -> float | None:
        """The bubble of the schedule, stated or else found: equal stages, free transfers."""
        pipeline = self.pipeline
        if pipeline.kind == "stream" or pipeline.absent:
            return None
        if pipeline.stated is not None:
            order = pipeline.stated.order
        elif pipeline.schedule is None or pipeline.microbatches is None:
            order = None
        else:
            chunks = len(pipeline.ranks[0].stages)
            order = order_of(pipeline.schedule, len(pipeline.ranks), pipeline.microbatches, chunks)
        durations = None if order is None else _equal_stages(pipeline, order)
        return None if order is None or durations is None else ideal_bubble(order, durations)

    @cached_property
    def theory_of_stream(self) -> float | None:
        """The share that equal stages would wait with so many batches in flight."""
        stream = self.pipeline.stream
        if stream is None or stream.first_sets_pace or not stream.sure or self.pipeline.absent:
            return None
        return bubble_fraction_of_stream(len(self.pipeline.ranks), stream.in_flight)

    def baseline(  # noqa: PLR0913 (what the traces may not tell, one argument each)
        self,
        *,
        layers: tuple[int, ...] | None = None,
        limit_bytes: float | None = None,
        schedule: str | None = None,
        latency_ns: float | None = None,
        also: AlsoRun | None = None,
        communication: Communication | None = None,
    ) -> Baseline:
        """Fit what every change starts from; what is not said, the job says."""
        pipeline, job = self.pipeline, self.job
        mine = {rank.rank for rank in pipeline.ranks}
        slow = tuple(sorted(worker.rank for worker in self.workers.slow if worker.rank in mine))
        found = measure_baseline(
            self.timeline,
            pipeline,
            layers=layers or job.split_for(pipeline),
            limit_bytes=limit_bytes,
            schedule=schedule or job.schedule_for(pipeline),
            basis=self.basis.stated(latency_ns),
            also=also,
            communication=communication,
            links=self.links,
        )
        return replace(found, slow_ranks=slow)

    @cached_property
    def doubled_microbatches(self) -> PricedLever:
        """What twice the microbatches would do, of the same global batch and of one twice as large.

        The lever that `plan` weighs, by its simulator: half of the waits are no prediction.
        """
        return self._price(microbatches.DOUBLED)

    @cached_property
    def other_split(self) -> PricedLever:
        """What the best split of the layers would do, as `plan` weighs it."""
        return self._price(split.LEVER)

    def _price(self, lever: Lever) -> PricedLever:
        if self.ledger is None:
            return PricedLever(unpriced="there are no steps to predict from")
        try:
            baseline = self.baseline()
        except (UsageError, NoFit) as error:
            return PricedLever(unpriced=error.message)
        return price_lever(baseline, self.timeline, lever)

    def server_model(
        self, *, layers: tuple[int, ...] | None = None, traffic: Traffic | None = None
    ) -> ServerModel:
        """Fit a captured server; what is not said, its own metrics and the captured batches say."""
        if self.stream is None:
            raise NoFit(
                "these batches cannot be followed from stage to stage",
                hint="capture forward passes of all ranks at once, one stage a rank",
            )
        layers = layers or self.job.split_for(self.pipeline)
        if layers is None:
            told = [self.layers_of(stage) for stage in range(self.stream.batches.stages)]
            layers = tuple(count for count in told if count) if all(told) else None
        around = self.server_notes.around if self.server_notes else None
        lengths = None
        if around and around.first_tokens and around.tokens_in_per_s and around.tokens_out_per_s:
            each = around.seconds / around.first_tokens
            lengths = (around.tokens_in_per_s * each, around.tokens_out_per_s * each)
        return model_server(
            self.stream,
            self.traces,
            layers=layers,
            traffic=traffic,
            tokens_out_per_s=around.tokens_out_per_s if around else None,
            requests_running=around.requests_running if around else None,
            requests_waiting=around.requests_waiting if around else None,
            tokens_in_out=lengths,
        )

    def layers_of(self, stage: int) -> int | None:
        """Return the layers that kernels show of a stage, else those that the job names."""
        for rank in self.pipeline.ranks:
            for layers in rank.layers:
                if layers.stage == stage:
                    return layers.layers
        said = self.job.split_for(self.pipeline)
        return said[stage] if said and stage < len(said) else None


def analyse_found(
    found: RunFiles,
    question: Question | None = None,
    means: Means | None = None,
    wires: Wires | None = None,
) -> Analysis:
    """Read a run that was found, and measure what is asked about."""
    question = question or Question()
    return Analysis(survey_run(found, question, means), wires, question.step)


def analyse_served(found: RunFiles, in_flight: int | None, means: Means | None = None) -> Analysis:
    """Read a server that may be known to keep so many batches in flight, or what else it is.

    It keeps fewer where it has less to do: then its captures are believed.
    """
    if in_flight is not None:
        with suppress(UsageError):
            return analyse_found(found, Question(in_flight=in_flight), means)
    return analyse_found(found, means=means)


def longest_windows(pipelines: Sequence[PipelineFigures]) -> dict[int, int]:
    """Return, of each step that all have, the window of the slowest."""
    windows = [{w.step: w.length_ns for w in pipeline.windows} for pipeline in pipelines]
    steps = set.intersection(*(set(mine) for mine in windows)) if windows else set()
    return {step: max(mine[step] for mine in windows) for step in sorted(steps)}


def _slowest_first(pipelines: Sequence[PipelineFigures]) -> list[PipelineFigures]:
    """Order pipelines: first those that are the slowest in one step or another."""
    windows = sorted(
        (
            (w.step, -w.length_ns, number)
            for number, one in enumerate(pipelines)
            for w in one.windows
        )
    )
    best: dict[int, tuple[int, int]] = {}
    behind: dict[int, int] = {}
    for step, length, number in windows:
        behind[step] = behind.get(step, -1) + 1
        best[number] = min(best.get(number, (behind[step], length)), (behind[step], length))
    return [pipelines[number] for number in sorted(best, key=lambda number: best[number])]


def _windows_differ(pipelines: Sequence[PipelineFigures]) -> bool:
    """Tell whether the slowest of each step mostly takes clearly longer than most do."""
    windows: dict[int, list[int]] = {}
    for pipeline in pipelines:
        for window in pipeline.windows:
            windows.setdefault(window.step, []).append(window.length_ns)
    times = [
        max(all_of) / max(sorted(all_of)[(len(all_of) - 1) // 2], 1)
        for all_of in windows.values()
        if len(all_of) == len(pipelines)
    ]
    return bool(times) and median(times) > 1 + MATTERS


def _equal_stages(pipeline: PipelineFigures, order: Order) -> dict[str, float] | None:
    """Share what all stages take equally among those of an order; None where a kind is unknown.

    A schedule that was stated may split backward passes that ran whole, or the other way round.
    """
    total = dict.fromkeys("FBIW", 0.0)
    for row in pipeline.stages:
        total[PassKind(row.kind).name] += row.median_ns
    whole, halves = total["B"], total["I"] + total["W"]
    if not whole:
        total["B"] = halves
    if not halves:
        total["I"] = total["W"] = whole / 2
    actions = [action for actions in order for action in actions]
    if not all(total[kind] for kind in {action.kind for action in actions}):
        return None
    stages = len({action.stage for action in actions})
    return {kind: total[kind] / stages for kind in "FBIW"}
