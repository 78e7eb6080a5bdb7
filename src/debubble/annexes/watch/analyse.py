"""The files of one capture in → all that is kept of it, found out in a process apart."""

from __future__ import annotations

import io
import multiprocessing
import os
import signal
import threading
import time
import traceback
from collections.abc import Mapping
from multiprocessing.connection import Connection

import msgspec

from debubble.analysis import Analysis, analyse_found
from debubble.annexes.watch.log import log
from debubble.errors import Code, DebubbleError, NoPipeline, NoSplitFits, UsageError
from debubble.ledger.hop_health import HopHealth
from debubble.links.hop_times import Verdict
from debubble.measure.measurement import Measurement, context_bucket, middle
from debubble.plan.lever import Permissions
from debubble.plan.plan import make_plan
from debubble.report.answers.change import describe
from debubble.report.answers.find import answer_find
from debubble.report.answers.server_plan import answer_server_plan
from debubble.report.find import find_page
from debubble.report.text import print_page
from debubble.timeline.figures import PipelineFigures
from debubble.timeline.fleet.survey import Means
from debubble.timeline.job import JobFacts
from debubble.trace.digest import DigestPlace
from debubble.trace.run import find_run
from debubble.units import NS_PER_S

UNKNOWN_BUCKET = 0
"""Where nobody told the context length."""
# Clocks that count from a machine's start are younger than those that count from 1970.
_CALENDAR_S = 1e9
# Between two looks whether an analysis takes too long, or the service stops.
_LOOK_S = 0.5


class Stage(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank of the pipeline did."""

    stage: str
    bubble: float | None
    useful: float | None
    busy: float | None
    peak_bytes: int | None
    limit_bytes: int | None


class Hop(msgspec.Struct, frozen=True, kw_only=True):
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


class PlannedChange(msgspec.Struct, frozen=True, kw_only=True):
    """What the planner would do today."""

    change: str
    """In words; empty where nothing is worth doing."""
    gain: float = 0.0


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """What is kept of one capture beside its measurement and its report."""

    bucket: int
    context_source: str | None
    """label, server or tokens: where the context length is from."""
    requests: dict[int, float]
    """By context bucket: the traffic."""
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
    no_plan: str = ""
    """Why there is none."""
    captured_s: float | None = None
    """When its first pass began, or its last file was written; None where nothing tells."""
    batch_s: float | None = None
    """What a batch takes of each rank: causes are shares of it."""
    has_digests: bool = False
    """Whether a digest of each of its traces was kept."""


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of a worker: a finding, its measurement and report, or why there is none."""

    finding: Finding | None = None
    measurement: Measurement | None = None
    report: str = ""
    problem: str = ""
    seconds: float = 0.0


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker is given."""

    files: tuple[str, ...]
    traffic: Mapping[int, float] = {}
    """The server's requests by bucket, where it counts them."""
    digests: DigestPlace | None = None
    """Where a digest of each rank is kept."""
    written_s: float | None = None
    """When the last of its files was, where that is known."""


class Worker:
    """A process that analyses one capture after the other: what ends it ends nobody else."""

    def __init__(self) -> None:
        self._process: multiprocessing.process.BaseProcess | None = None
        self._pipe: Connection

    def analyse(self, task: Task, limit_s: float, stop: threading.Event) -> Outcome | None:
        """Have a capture analysed; None where it is stopped."""
        if self._process is None:
            context = multiprocessing.get_context("spawn")
            self._pipe, other_end = context.Pipe()
            self._process = context.Process(target=_work, args=(other_end,), daemon=True)
            self._process.start()
            other_end.close()
        began = time.monotonic()
        problem = "its analysis was killed, perhaps for want of memory"
        try:
            self._pipe.send(task)
            while not self._pipe.poll(min(_LOOK_S, limit_s)):
                if stop.is_set() or time.monotonic() - began > limit_s:
                    problem = f"its analysis took longer than {limit_s:g} s"
                    break
            else:
                outcome: Outcome = self._pipe.recv()
                return outcome
        except (EOFError, OSError):
            pass
        self.end()
        return None if stop.is_set() else Outcome(problem=problem)

    def end(self) -> None:
        """End the process; the next capture gets another."""
        if self._process is not None:
            self._process.kill()
            self._process.join()
            self._pipe.close()
            self._process = None


def _work(pipe: Connection) -> None:
    """Analyse what comes, until the service ends; Ctrl-C is left to the service."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    threading.Thread(target=_end_with_the_service, daemon=True).start()
    while True:
        pipe.send(analyse(pipe.recv()))


def _end_with_the_service() -> None:
    service = multiprocessing.parent_process()
    if service is not None:
        service.join()
    os._exit(1)


def analyse(task: Task) -> Outcome:
    """Read and measure one capture; whatever goes wrong becomes its problem."""
    began = time.monotonic()
    try:
        outcome = _analyse(task)
    except DebubbleError as error:
        outcome = Outcome(problem=str(error))
    except MemoryError:
        outcome = Outcome(problem="it does not fit into memory")
    except Exception as error:  # noqa: BLE001 (a bug must not stop the captures after it)
        log("bug", level="error", problem=traceback.format_exc())
        outcome = Outcome(problem=f"debubble failed on it: {type(error).__name__}: {error}")
    return msgspec.structs.replace(outcome, seconds=time.monotonic() - began)


def _analyse(task: Task) -> Outcome:
    run = analyse_found(find_run(task.files), means=Means(digests=task.digests))
    figures, measurement = run.pipeline, run.measurement
    if not figures.windows and figures.stream is None:
        raise NoPipeline("no step was captured whole, so nothing can be measured")
    requests, bucket, context_source = _contexts(measurement, run.job, task.traffic)
    plan, no_plan = _plan(run)
    metrics = _metrics(measurement)
    rate = metrics.get("microbatches_per_s")
    batch_s = metrics.get("batch_latency_s")
    if figures.kind == "stream":
        batch_s = 1 / rate if rate else None
    starts_ns = run.timeline.passes.start_ns
    began_s = int(starts_ns.min()) / NS_PER_S if len(starts_ns) else 0.0
    accounted = run.ledger or run.stream
    shares = accounted.shares() if accounted else {}
    finding = Finding(
        bucket=bucket,
        context_source=context_source,
        requests=requests,
        metrics=metrics,
        causes={str(cause): share for cause, share in shares.items()},
        theory=run.theory.schedule_bubble_fraction,
        schedule=figures.schedule,
        stages=_stages(measurement, figures),
        hops=tuple(_hop(health) for health in run.links.hops),
        plan=plan,
        no_plan=no_plan,
        warnings=tuple(f"{gap.code}: {gap}" for gap in run.warnings),
        captured_s=began_s if began_s > _CALENDAR_S else task.written_s,
        batch_s=batch_s,
        has_digests=task.digests is not None
        and all(gap.code is not Code.DIGEST_NOT_WRITTEN for gap in run.warnings),
    )
    return Outcome(finding=finding, measurement=measurement, report=_report(run))


def _report(run: Analysis) -> str:
    from rich.console import Console  # noqa: PLC0415 (slow to import, and only workers need it)

    out = io.StringIO()
    console = Console(file=out, width=120, no_color=True, highlight=False, emoji=False)
    print_page(find_page(answer_find(run)), console)
    return out.getvalue()


def _contexts(
    measurement: Measurement, job: JobFacts, traffic: Mapping[int, float]
) -> tuple[dict[int, float], int, str | None]:
    """Return requests by bucket, the bucket of this capture, and what tells it."""
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
    is_known = judged.verdict != Verdict.UNKNOWN
    return Hop(
        source=str(hop.stages[0][0]),
        destination=str(hop.stages[0][1]),
        wire_s=None if hop.wire_ns is None else hop.wire_ns / NS_PER_S,
        bytes_per_s=hop.bytes_per_s,
        slow=judged.slow if is_known else None,
        efficiency=min(1.0, 1 / judged.times) if is_known and judged.times else None,
        cost_s=None if health.cost_ns is None else health.cost_ns / NS_PER_S,
    )


def _plan(run: Analysis) -> tuple[PlannedChange | None, str]:
    """Plan on today's costs, or say why not."""
    if run.pipeline.kind == "stream":
        return _plan_server(run)
    try:
        links = run.links if run.ledger else None
        baseline = run.baseline()
        allowed = Permissions(framework=baseline.framework)
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
