"""The files of one capture in → all that is kept of it. Runs in a worker process."""

from __future__ import annotations

import io
import os
import signal
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from debubble.analysis import Analysis, analyse_found
from debubble.annexes.watch.supervise import PATIENCE
from debubble.errors import DebubbleError, NoPipeline, NoSplitFits, UsageError
from debubble.ledger.hop_health import HopHealth
from debubble.links.hop_times import Verdict
from debubble.measure.measurement import Measurement, context_bucket, middle
from debubble.plan.lever import Permissions
from debubble.plan.plan import make_plan
from debubble.report.answers.change import describe
from debubble.report.answers.find import answer_find
from debubble.report.answers.server_plan import answer_server_plan
from debubble.report.find import find_page
from debubble.report.text import Page, print_page
from debubble.timeline.figures import PipelineFigures
from debubble.timeline.fleet.survey import Means
from debubble.timeline.job import JobFacts
from debubble.trace.digest import DigestPlace
from debubble.trace.run import find_run
from debubble.units import NS_PER_S

UNKNOWN_BUCKET = 0
"""Where nobody told the context length."""
THEORY, CAUSE = "theory", "cause/"
"""What points are called that are no metric: the second is followed by the cause."""
# Room for what is shown; a report of a thousand ranks is not.
_LONGEST_REPORT = 64_000
# Clocks that count from a machine's start are younger than those that count from 1970.
_CALENDAR_S = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """What one rank of the pipeline did."""

    stage: str
    bubble: float | None
    useful: float | None
    busy: float | None
    peak_bytes: int | None
    limit_bytes: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Hop:
    """One wire of the pipeline."""

    source: str
    destination: str
    wire_s: float | None
    bytes_per_s: float | None
    slow: bool | None = None
    """By its peers; None where these do not tell."""
    efficiency: float | None = None
    """What it carries over what it should by its peers; 1 where it carries more."""
    cost_s: float | None = None
    """What a batch would save with this hop as it should be; None where that is not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedChange:
    """What the planner would do today."""

    change: str
    """In words; empty where nothing is worth doing."""
    gain: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What is kept of one capture beside its measurement."""

    bucket: int
    context_source: str | None
    """label, server or tokens: who told the context length."""
    counts: dict[int, float]
    """Requests by context bucket: the traffic."""
    metrics: dict[str, float]
    causes: dict[str, float]
    """Shares of ranks × window."""
    theory: float | None
    schedule: str | None
    stages: tuple[Stage, ...]
    hops: tuple[Hop, ...]
    plan: PlannedChange | None
    """None where no plan can be made."""
    warnings: tuple[str, ...]
    report: str
    no_plan: str = ""
    """Why there is none."""
    captured_s: float | None = None
    """When its first pass began, or its last file was written; None where nothing tells."""
    batch_s: float | None = None
    """What a batch takes of each rank: causes are shares of it."""

    def points(self) -> dict[str, float]:
        """Return what is drawn over time: metrics, theory, and causes in seconds of a batch."""
        causes = {
            f"{CAUSE}{cause}": share * (self.batch_s or 0.0) for cause, share in self.causes.items()
        }
        theory = {} if self.theory is None else {THEORY: self.theory}
        return self.metrics | theory | {cause: took_s for cause, took_s in causes.items() if took_s}


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The answer of a worker: a finding with its measurement, or why there is none."""

    finding: Finding | None = None
    measurement: Measurement | None = None
    problem: str = ""
    given_up: bool = False
    """Not for what its files hold: another time it may be analysed."""
    seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What a worker is told."""

    files: tuple[str, ...]
    timeout_s: float
    traffic: Mapping[int, float] = field(default_factory=dict)
    """The server's requests by bucket, where it counts them."""
    digests: DigestPlace | None = None
    """Where a digest of each rank is kept."""
    written_s: float | None = None
    """When the last of its files was, where that is known."""


def analyse(task: Task) -> Outcome:
    """Read and measure one capture; what debubble cannot read is said, not raised."""
    began = time.monotonic()

    def ring(_number: int, _frame: object) -> None:
        raise _TooLate

    # Again and again: an alarm that rings in a destructor is swallowed there.
    signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, task.timeout_s, PATIENCE.poll_s)
    try:
        measurement, finding = _analyse(task)
    except _TooLate:
        problem = f"its analysis took longer than {task.timeout_s:g} s"
        return Outcome(problem=problem, given_up=True)
    except MemoryError:
        return Outcome(problem="it does not fit into memory", given_up=True)
    except DebubbleError as error:
        return Outcome(problem=str(error), seconds=time.monotonic() - began)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    return Outcome(finding=finding, measurement=measurement, seconds=time.monotonic() - began)


class _TooLate(BaseException):
    """Passes everything that would go on."""


def _analyse(task: Task) -> tuple[Measurement, Finding]:
    means = Means(digests=task.digests)
    run = analyse_found(find_run(task.files), means=means)
    figures, measurement = run.pipeline, run.measurement
    if not figures.windows and figures.stream is None:
        raise NoPipeline("no step was captured whole, so nothing can be measured")
    counts, bucket, told_by = _contexts(measurement, run.job, task.traffic)
    plan, no_plan = _plan(run)
    metrics = _metrics(measurement)
    rate = metrics.get("microbatches_per_s")
    batch_s = metrics.get("batch_latency_s")
    if figures.kind == "stream":
        batch_s = 1 / rate if rate else None
    starts_ns = run.timeline.passes.start_ns
    began_s = int(starts_ns.min()) / NS_PER_S if len(starts_ns) else 0.0
    accounted = run.ledger or run.stream
    return measurement, Finding(
        bucket=bucket,
        context_source=told_by,
        counts=counts,
        metrics=metrics,
        causes={str(cause): share for cause, share in accounted.shares().items()}
        if accounted
        else {},
        theory=run.theory.schedule_bubble_fraction,
        schedule=figures.schedule,
        stages=_stages(measurement, figures),
        hops=tuple(_hop(health) for health in run.links.hops),
        plan=plan,
        no_plan=no_plan,
        warnings=tuple(f"{gap.code}: {gap}" for gap in run.warnings),
        report=_as_text(find_page(answer_find(run))),
        captured_s=began_s if began_s > _CALENDAR_S else task.written_s,
        batch_s=batch_s,
    )


def _contexts(
    measurement: Measurement, job: JobFacts, traffic: Mapping[int, float]
) -> tuple[dict[int, float], int, str | None]:
    """Return requests by bucket, the bucket of this capture, and who told."""
    if job.context_lengths:
        counts: dict[int, float] = {}
        for length in job.context_lengths:
            bucket = context_bucket([length]) or UNKNOWN_BUCKET
            counts[bucket] = counts.get(bucket, 0.0) + 1.0
        return counts, context_bucket(job.context_lengths) or UNKNOWN_BUCKET, "label"
    if traffic:
        return dict(traffic), _middle_bucket(traffic), "server"
    if measurement.tokens:
        bucket = context_bucket([measurement.tokens]) or UNKNOWN_BUCKET
        return {bucket: 1.0}, bucket, "tokens"
    return {}, UNKNOWN_BUCKET, None


def _middle_bucket(traffic: Mapping[int, float]) -> int:
    """Return the bucket of the median request."""
    below, half = 0.0, sum(traffic.values()) / 2
    for bucket in sorted(traffic):
        below += traffic[bucket]
        if below >= half:
            return bucket
    return UNKNOWN_BUCKET


def _metrics(measurement: Measurement) -> dict[str, float]:
    peaks = [rank.peak_bytes for rank in measurement.memory if rank.peak_bytes is not None]
    # As traced: captures of one source may have sidecars or none, and drift must not see that.
    batches = measurement.batch_latencies_s(measurement.traced)
    steps = measurement.step_times_s(measurement.traced)
    values = {
        "bubble_fraction": middle(measurement.bubble_fractions),
        "batch_latency_s": middle(batches),
        "microbatches_per_s": middle(measurement.rates_per_s(steps or batches)),
        "peak_memory_bytes": float(max(peaks)) if peaks else None,
    }
    return {name: value for name, value in values.items() if value is not None}


def _stages(measurement: Measurement, figures: PipelineFigures) -> tuple[Stage, ...]:
    memory = {peak.rank: peak for peak in measurement.memory}
    shares = {share.rank: share for share in figures.shares}
    return tuple(
        Stage(
            stage="+".join(map(str, rank.stages)) or f"rank{rank.rank}",
            bubble=shares[rank.rank].bubble_fraction if rank.rank in shares else None,
            useful=shares[rank.rank].useful_fraction if rank.rank in shares else None,
            busy=shares[rank.rank].apparent_fraction if rank.rank in shares else None,
            peak_bytes=memory[rank.rank].peak_bytes if rank.rank in memory else None,
            limit_bytes=memory[rank.rank].limit_bytes if rank.rank in memory else None,
        )
        for rank in figures.ranks
    )


def _hop(health: HopHealth) -> Hop:
    hop, judged = health.times.figures, health.judgement
    told = judged.verdict != Verdict.UNKNOWN
    return Hop(
        source=str(hop.stages[0][0]),
        destination=str(hop.stages[0][1]),
        wire_s=None if hop.wire_ns is None else hop.wire_ns / NS_PER_S,
        bytes_per_s=hop.bytes_per_s,
        slow=judged.slow if told else None,
        efficiency=min(1.0, 1 / judged.times) if told and judged.times else None,
        cost_s=None if health.cost_ns is None else health.cost_ns / NS_PER_S,
    )


def _plan(run: Analysis) -> tuple[PlannedChange | None, str]:
    """Plan on today's costs, or say why not."""
    if run.pipeline.kind == "stream":
        return _plan_server(run)
    try:
        links = run.links if run.ledger else None
        baseline = run.baseline()
        allowed = Permissions(framework=baseline.framework, empty_ends=True)
        plan = make_plan(baseline, run.timeline, links=links, allowed=allowed)
    except (UsageError, NoPipeline, NoSplitFits) as error:
        return None, str(error)
    if plan.best is None:
        return PlannedChange(change=""), ""
    return PlannedChange(change=describe(plan.best.change), gain=plan.best.throughput_gain), ""


def _plan_server(run: Analysis) -> tuple[PlannedChange | None, str]:
    """Plan a stream on the traffic that it had when it was captured, or say why not."""
    try:
        answer = answer_server_plan(run, run.plan_server())
    except DebubbleError as error:
        return None, str(error)
    if answer.recommended is None:
        return PlannedChange(change=""), ""
    best = answer.options[answer.recommended]
    return PlannedChange(change=best.what, gain=best.gain_fraction), ""


def _as_text(page: Page) -> str:
    from rich.console import Console  # noqa: PLC0415 (slow to import, and only workers need it)

    out = io.StringIO()
    console = Console(file=out, width=120, no_color=True, highlight=False, emoji=False)
    print_page(page, console)
    return out.getvalue()[:_LONGEST_REPORT]


def prepare_worker(service: int) -> None:
    """Leave Ctrl-C to the service, and end with it, however it ends.

    The service may have died before this: then its number is not that of the parent any more.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def end_when_orphaned() -> None:
        while os.getppid() == service:
            time.sleep(PATIENCE.poll_s)
        os._exit(1)

    threading.Thread(target=end_when_orphaned, daemon=True).start()
