"""One run in → every fact about it, each worked out once, when it is first asked for.

The middle of the house: verbs, the watch service, `tune` and the pictures ask here, so that two of
them cannot disagree. Left of it nothing is put into words, right of it nothing is measured.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from debubble.errors import Code, Gap, NoFit, UsageError
from debubble.ledger.account import Wait
from debubble.ledger.causes import Cause
from debubble.ledger.hop_health import LinkHealth, account_for, judge_links
from debubble.ledger.ledger import MATTERS, Ledger, job_around
from debubble.ledger.verdict import Bottleneck, MainCause, find_bottleneck, name_causes
from debubble.links.hop_times import Hop, Past
from debubble.links.wiring import Wiring, read_topologies, read_wiring
from debubble.measure.measurement import Measurement, Numbers, measure_run, numbers_of
from debubble.measure.worth import Rates, Tariff, count_rates
from debubble.plan.ask import WhatIfAnswer, ask
from debubble.plan.baseline import Baseline, measure_baseline
from debubble.plan.change import Change, Hold
from debubble.plan.lever import Lever, OrderSearch, Permissions
from debubble.plan.levers import microbatches, split
from debubble.plan.option import Idea
from debubble.plan.plan import Plan, PricedLever, make_plan, price_lever
from debubble.plan.request import ANY, ChangeRequest, Stated, layers_differ
from debubble.plan.server import ServerPlan, ServerQuestion
from debubble.serving.account import StreamAccount, account_stream
from debubble.serving.batches import find_batches
from debubble.serving.hosts import HostTime, measure_hosts
from debubble.serving.model import ServerModel, model_server
from debubble.serving.phases import PhaseFigures, measure_phases
from debubble.serving.traffic import Traffic
from debubble.simulate.expected import Theory, theory_of
from debubble.timeline.figures import PipelineFigures, measure_pipeline
from debubble.timeline.fleet.survey import Means, Question, Survey, survey_run
from debubble.timeline.job import JobFacts, RunBasis, ask_job
from debubble.timeline.model import Timeline
from debubble.timeline.replicas import ReplicaFigures, Workers
from debubble.timeline.steps import numbered
from debubble.trace.columns import RankTrace
from debubble.trace.run import Run, RunFiles
from debubble.trace.server_notes import ServerNotes, notes_beside
from debubble.units import show_percent


@dataclass(frozen=True, slots=True, kw_only=True)
class Wires:
    """What the user says of the wires, and of what they did before."""

    classes: Sequence[str] = ()
    topologies: Sequence[str] = ()
    history: Mapping[Hop, Past] = field(default_factory=dict)


class Analysis:
    """What is known of one run, of the pipeline to look into above all."""

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
    def numbers(self) -> Numbers:
        """The three numbers, and throughput."""
        return numbers_of(self.pipeline, self.job)

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
                job_around(pipeline, self.pipelines, self.timeline, self.workers),
            )
        return self._ledgers[pipeline.pipeline]

    @property
    def ledger(self) -> Ledger | None:
        """Why each nanosecond of the pipeline was spent."""
        return self.ledger_of(self.pipeline)

    @property
    def waits(self) -> Sequence[Wait]:
        """The waits of its steps, each with its cause; nothing where there is no account."""
        return self.ledger.waits if self.ledger else ()

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
    def phases(self) -> list[PhaseFigures]:
        """What batches of each phase of a stream take; nothing of what is none."""
        return measure_phases(self.stream.batches) if self.stream else []

    @cached_property
    def hosts(self) -> list[HostTime]:
        """What hosts do with the time of a batch; nothing where no label tells their turns."""
        return list(measure_hosts(self.stream.batches, self.traces)) if self.stream else []

    @cached_property
    def server_notes(self) -> ServerNotes | None:
        """What the server said of itself around the capture, where `capture --server` noted it."""
        return notes_beside([rank.file for rank in self.pipeline.ranks if rank.file])

    @cached_property
    def causes(self) -> tuple[MainCause, ...]:
        """The causes that matter, whose they are, and what putting them right would buy."""
        return name_causes(self.ledger) if self.ledger else ()

    @property
    def shares(self) -> dict[Cause, float] | None:
        """Of each cause, its share of the batch, or of the time of a stream."""
        account = self.ledger or self.stream
        return account.shares() if account else None

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
        accounted = self.ledger or self.stream
        account = accounted.gaps if accounted else ()
        if self.job.steps_timed:  # then it is known how much the profiler cost
            account = tuple(gap for gap in account if gap.code is not Code.HOSTS_SLOWED)
        gaps = (*self.measured_warnings, *self._unmet, *self._wiring[1], *account)
        return tuple(dict.fromkeys(gaps))

    @property
    def _unmet(self) -> tuple[Gap, ...]:
        """Bound what ranks wait where members of their collectives were not captured."""
        bubble, missing = self.pipeline.bubble_fraction, self.run.missing_ranks
        met = {rank.rank for rank in self.pipeline.ranks if len(rank.shared)}
        inside = [
            1 - rank.useful_fraction - rank.bubble_fraction
            for rank in self.pipeline.shares
            if rank.rank not in met
            and rank.useful_fraction is not None
            and rank.bubble_fraction is not None
        ]
        more = sum(inside) / max(len(self.pipeline.shares), 1)
        if not missing or bubble is None or more < MATTERS:
            return ()
        return (
            Gap(
                code=Code.MISSING_RANKS,
                message=f"without {numbered('rank', missing)} it is unknown who came last to "
                f"collectives inside passes: ranks wait {show_percent(bubble)} if those are work, "
                f"{show_percent(bubble + more)} if those are waiting",
                hint="add the traces of all ranks",
            ),
        )

    @cached_property
    def measured_warnings(self) -> tuple[Gap, ...]:
        """The same without those of the account, for whoever asks for the numbers alone."""
        return tuple(dict.fromkeys((*self._found, *self.job.gaps)))

    @property
    def tokens(self) -> int | None:
        """Of a microbatch, where the job or its shapes tell."""
        stated = self.job.tokens_of_microbatch(self.pipeline.microbatches)
        return stated or self.pipeline.ranks[0].parallelism.microbatch_tokens

    @cached_property
    def theory(self) -> Theory:
        """The bubble by the formula, and by the schedule; of a stream neither."""
        return theory_of(self.pipeline)

    def baseline(self, stated: Stated | None = None) -> Baseline:
        """Fit what every change starts from; what is not stated, the job says."""
        stated = stated or Stated()
        pipeline, job = self.pipeline, self.job
        inside = {rank.rank for rank in pipeline.ranks}
        slow = sorted(worker.rank for worker in self.workers.slow if worker.rank in inside)
        fitted = measure_baseline(
            self.timeline,
            pipeline,
            layers=stated.layers or job.split_for(pipeline),
            limit_bytes=stated.limit_bytes,
            schedule=stated.schedule or job.schedule_for(pipeline),
            basis=self.basis,
            links=self.links,
        )
        return replace(fitted, slow_ranks=tuple(slow))

    def warnings_with(self, baseline: Baseline) -> tuple[Gap, ...]:
        """Return all warnings, each once: of the run, and of what was stated of it."""
        return tuple(dict.fromkeys((*self.warnings, *layers_differ(baseline))))

    def what_if(self, request: ChangeRequest, stated: Stated | None = None) -> WhatIfAnswer:
        """Fit the run, change it as is asked, and simulate it."""
        stated, pipeline = stated or Stated(), self.pipeline
        known = pipeline.schedule or stated.schedule or self.job.schedule_for(pipeline)
        if pipeline.windows and known is None:
            raise UsageError(
                "the schedule that ran was not recognised",
                hint="give --schedule-measured, such as 1f1b",
            )
        baseline = self.baseline(stated)
        return ask(baseline, request.idea(baseline, self.tokens))

    def plan(  # noqa: PLR0913 (a run, and what is known and wanted besides)
        self,
        stated: Stated | None = None,
        *,
        planned_for: str | None = None,
        hold: Hold | None = None,
        most_microbatches: int | None = None,
        search: OrderSearch | None = None,
        barred: frozenset[str] = frozenset(),
    ) -> Plan:
        """Weigh every lever, alone and together.

        `planned_for` is the framework that must be able to run all options: else the run's own;
        `ANY` lifts that. `hold` is what stays where the number of microbatches changes: else the
        batch of a run that trains, with larger ones apart, and either where nothing is trained.
        Levers that are `barred`, by their keys, are not weighed.
        """
        baseline = self.baseline(stated)
        framework = planned_for or baseline.framework
        return make_plan(
            baseline,
            self.timeline,
            most_microbatches=most_microbatches,
            links=self.links if self.ledger else None,
            ledger=self.ledger,
            allowed=Permissions(
                framework=None if framework == ANY else framework,
                barred=barred,
                hold=hold,
            ),
            search=search,
        )

    def planned_steps(self, plan: Plan) -> tuple[tuple[str, Timeline, PipelineFigures], ...]:
        """Return the run now, and with the best option of a plan as it is predicted, by name.

        Both are on the basis of the plan: of unprofiled times the run now is simulated, for what
        was measured was profiled. Nothing is returned where nothing is to be done, or a replay
        predicts it: that has no step to draw.
        """
        best = plan.best or next(iter(plan.recommended), None)
        if best is None or best.by_replay:
            return ()
        predicted = {"planned": ask(plan.baseline_for(best), best.idea)}
        steps = [("measured", self.timeline, self.pipeline)]
        if plan.baseline.basis != self.basis.traced:
            unchanged = ask(plan.baseline, Idea(lever="", change=Change()))
            unchanged = replace(unchanged, correction=plan.baseline.correction)
            predicted, steps = {"now (simulated)": unchanged, **predicted}, []
        for name, what_if in predicted.items():
            timeline = what_if.draw()
            steps.append((name, timeline, measure_pipeline(timeline, 0)))
        return tuple(steps)

    def rates(self, tariff: Tariff | None = None) -> Rates | None:
        """Return what savings are counted by; None where no device is known."""
        return count_rates(self.pipelines, self.run.sidecars, tariff or Tariff())

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
            absent = numbered("rank", self.pipeline.absent)
            raise NoFit(
                f"no trace of {absent}: batches cannot be followed through its stage"
                if self.pipeline.absent
                else "these batches cannot be followed from stage to stage",
                hint="capture forward passes of all ranks at once, one stage a rank",
            )
        layers = layers or self.job.split_for(self.pipeline)
        if layers is None:
            counts = [self.layers_of(stage) for stage in range(self.stream.batches.stages)]
            layers = tuple(count for count in counts if count) if all(counts) else None
        around = self.server_notes.around if self.server_notes else None
        return model_server(self.stream, self.traces, layers=layers, traffic=traffic, around=around)

    def plan_server(self, question: ServerQuestion | None = None) -> ServerPlan:
        """Rank what could be changed in a captured server."""
        question = question or ServerQuestion()
        return question.plan(self._server(question))

    def ask_server(self, question: ServerQuestion) -> ServerPlan:
        """Change a captured server as is asked."""
        return question.ask(self._server(question))

    def _server(self, question: ServerQuestion) -> ServerModel:
        around = self.server_notes.around if self.server_notes else None
        running = around.requests_running if around else None
        traffic = question.load.traffic(running) if question.load else None
        return self.server_model(layers=question.layers, traffic=traffic)

    def layers_of(self, stage: int) -> int | None:
        """Return the layers that kernels show of a stage, else those that the job names."""
        for rank in self.pipeline.ranks:
            for layers in rank.layers:
                if layers.stage == stage:
                    return layers.layers
        split = self.job.split_for(self.pipeline)
        return split[stage] if split and stage < len(split) else None


def analyse_found(
    found: RunFiles,
    question: Question | None = None,
    means: Means | None = None,
    wires: Wires | None = None,
) -> Analysis:
    """Read a run that was found, and measure what is asked about."""
    question = question or Question()
    return Analysis(survey_run(found, question, means), wires, question.step)
