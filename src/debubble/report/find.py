"""Measured pipelines in → what `debubble find` prints out, as text or JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from debubble.errors import Code, Gap, NoPipeline, as_gap
from debubble.ledger.hop_health import expected_rate
from debubble.ledger.ledger import Ledger
from debubble.ledger.repair import times_expected
from debubble.report.find_tables import (
    count_layers,
    hop_table,
    layers_of,
    pipeline_table,
    stage_table,
)
from debubble.report.fold import FEW, show_members, show_range
from debubble.report.inspect import gap_json, rank_table
from debubble.report.job import job_json, job_note
from debubble.report.ledger import ledger_findings, ledger_json, ledger_tables
from debubble.report.replicas import replica_findings, replica_tables, replicas_json
from debubble.report.stream import stream_answer, stream_json, stream_latency
from debubble.report.text import Page
from debubble.report.theory import theory_of, theory_of_schedule
from debubble.report.unknown import reasons_for_null
from debubble.timeline.figures import PipelineFigures, RankShares
from debubble.timeline.hops import HopFigures
from debubble.timeline.job import JobFacts
from debubble.timeline.model import PassKind, RankTimeline, Timeline
from debubble.timeline.replicas import DRAGS, ReplicaFigures, shown_of
from debubble.trace.run import Run
from debubble.units import NS_PER_S, counted, show_bytes, show_duration, show_share

SCHEMA = "debubble.find/1"
# More than half of the waiting time in waits unlike the others of their rank.
_JAGGED = 0.5


def find_page(  # noqa: PLR0913 (what is known of a run, one argument each)
    figures: Sequence[PipelineFigures],
    ledger: Ledger | None,
    job: JobFacts,
    gaps: Sequence[Gap],
    next_command: str,
    *,
    replicas: ReplicaFigures | None = None,
) -> Page:
    """Lay out the answer: the bubble against theory, why and whose it is, then stages and hops."""
    worst = shown_of(figures, replicas)
    page = Page(answer=answer(worst, len(figures), drags=_drags(replicas)))
    page.findings = ledger_findings(ledger, worst.outside_ns) if ledger else []
    place = 0 if _drags(replicas) else len(page.findings)
    page.findings[place:place] = replica_findings(replicas)
    page.notes += [
        _about(worst),
        job_note(job, worst.batch_latency_ns),
        _shape_of(worst),
        _outside_of(worst),
    ]
    page.notes = [note for note in page.notes if note]
    page.tables = [
        *(ledger_tables(ledger) if ledger else ()),
        *replica_tables(replicas),
        *([pipeline_table(figures, worst)] if len(figures) > 1 else []),
        stage_table(worst, job),
        *([hop_table(worst.hops)] if worst.hops else []),
    ]
    page.gaps = list(gaps)
    page.next_command = next_command
    return page


def no_pipeline_page(run: Run, why: NoPipeline, next_command: str) -> Page:
    """Say that there is no pipeline, and what holds without one."""
    ranks = list(run.summarised())
    shares = _busy([(rank.rank, rank.busy_fraction) for rank in ranks])
    page = Page(answer=f"{why.message[:1].upper()}{why.message[1:]}. Busy: {shares}.")
    page.tables = [rank_table(ranks)]
    page.gaps = [*run.gaps, as_gap(why, code=Code.NO_PIPELINE)]
    page.next_command = next_command
    return page


def no_pipeline_json(run: Run, why: NoPipeline) -> dict[str, Any]:
    """Return the same as data: no numbers of a pipeline, each rank's own share."""
    gaps = [*run.gaps, as_gap(why, code=Code.NO_PIPELINE)]
    return {
        "schema": SCHEMA,
        "run": {"kind": None, "pipelines": [], "missing_ranks": list(run.missing_ranks)},
        "numbers": None,
        "utilisation": {
            "ranks": [
                {"rank": rank.rank, "busy_fraction": rank.busy_fraction}
                for rank in run.summarised()
            ]
        },
        "verdict": why.message,
        "warnings": [gap_json(gap) for gap in gaps],
    }


def _those(ranks: Sequence[int]) -> str:
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {show_members(ranks)}"


def _drags(replicas: ReplicaFigures | None) -> bool:
    return replicas is not None and replicas.verdict == DRAGS


def answer(one: PipelineFigures, pipelines: int = 1, *, drags: bool = False) -> str:
    """Say the bubble in a sentence."""
    why = "the one that drags" if drags else "the worst"
    of = f" (pipeline {one.pipeline}, {why} of {pipelines})" if pipelines > 1 else ""
    if one.bubble_fraction is None:
        shares = _busy([(own.rank, own.busy_fraction) for own in one.shares])
        return f"The bubble cannot be told: {_why_not(one)}. Busy: {shares}."
    who = "Ranks wait"
    if one.absent:
        who = f"In part, with no trace of {_those(one.absent)}: the other ranks wait"
    elif one.cut:
        who = "In part, of a step that the capture cuts: ranks wait"
    waits = f"{who} {_percent(one.bubble_fraction)} of the "
    if one.kind == "stream":
        return stream_answer(f"{waits}time{of}", one)
    sentence = f"{waits}batch{of}"
    expected = theory_of(one)
    if expected is not None:
        sentence += (
            f" (theory for {counted(len(one.ranks) + len(one.absent), 'rank')}, "
            f"{counted(one.microbatches or 0, 'microbatch', 'microbatches')}: {_percent(expected)})"
        )
    elif (alike := theory_of_schedule(one)) is not None:
        named = one.stated.name if one.stated else one.schedule
        sentence += f" ({named} with equal stages and free transfers: {_percent(alike)})"
    if one.apparent_fraction is not None and one.useful_fraction is not None:
        sentence += (
            f"; a dashboard would show {_percent(one.apparent_fraction)} busy, "
            f"{_percent(one.useful_fraction)} is useful"
        )
    return f"{sentence}."


def _busy(shares: Sequence[tuple[int, float | None]]) -> str:
    if len(shares) <= FEW:
        return ", ".join(f"rank {rank} {show_share(share)}" for rank, share in shares)
    known = [share for _, share in shares if share is not None]
    return f"{len(known)} ranks {show_range(known, show_share)}" if known else "unknown"


def _why_not(one: PipelineFigures) -> str:
    if not one.one_run:
        return "these ranks are not of one run"
    if one.kind == "stream":
        return "no span that all ranks share"
    return one.gaps[-1].message if one.gaps else "no such step on all ranks"


def find_json(  # noqa: PLR0913 (what is known of a run, one argument each)
    run: Run,
    timeline: Timeline,
    figures: Sequence[PipelineFigures],
    ledger: Ledger | None,
    gaps: Sequence[Gap],
    *,
    job: JobFacts,
    replicas: ReplicaFigures | None = None,
) -> dict[str, Any]:
    """Return the answer as data: the pipeline to look into in full, the others as one line each."""
    worst = shown_of(figures, replicas)
    return {
        "schema": SCHEMA,
        "run": {
            "kind": worst.kind,
            "pipelines": [[rank.rank for rank in one.ranks] for one in figures],
            "ranks": len(worst.ranks),
            "stages": len({stage for rank in worst.ranks for stage in rank.stages}),
            "chunks": max(len(rank.stages) for rank in worst.ranks),
            "microbatches": worst.microbatches,
            "schedule": worst.schedule,
            "stated": _stated_json(worst),
            "steps": [window.step for window in worst.windows],
            "devices": sorted({d.name for trace in run.ranks for d in trace.header.devices}),
            "clock_uncertainty_s": timeline.clock_uncertainty_ns / NS_PER_S
            if worst.one_run
            else None,
            "missing_ranks": list(run.missing_ranks),
            "partial": bool(worst.absent) or worst.cut,
            "one_run": worst.one_run,
            "steps_inferred": timeline.inferred and bool(worst.windows),
            "steps_left_out": [{"step": one.step, "why": one.why} for one in worst.left_out],
        },
        "numbers": {
            "bubble_fraction": worst.bubble_fraction,
            "batch_latency_s": _seconds(worst.batch_latency_ns),
            "step_time_s": _seconds(worst.step_time_ns),
            "peak_memory_bytes": [rank.peak_memory_bytes for rank in worst.ranks],
            "microbatches_per_s": _rate(worst),
            "tokens_per_s": _tokens_per_s(worst, job),
            "unprofiled_batch_latency_s": _seconds(job.without_profiler_ns(worst.batch_latency_ns)),
        },
        "job": job_json(job),
        "theory": {
            "bubble_fraction": theory_of(worst),
            "schedule_bubble_fraction": theory_of_schedule(worst),
        },
        "longest_stage_bubble": worst.longest_stage_bubble,
        "bubble_over_ideal": worst.bubble_over_ideal,
        "utilisation": {
            "apparent_fraction": worst.apparent_fraction,
            "useful_fraction": worst.useful_fraction,
            "ranks": [_shares_json(shares) for shares in worst.shares],
        },
        "outside": {what: _seconds(length) for what, length in worst.outside_ns.items()},
        "stream": stream_json(worst),
        "shape": _shape_json(worst),
        **ledger_json(ledger, worst.outside_ns),
        "stages": _stages_json(worst, job),
        "memory": [_memory_json(rank) for rank in worst.ranks],
        "hops": [_hop_json(hop, ledger) for hop in worst.hops],
        "replicas": replicas_json(replicas),
        "unknown": reasons_for_null(worst, job),
        "verdict": answer(worst, len(figures), drags=_drags(replicas)),
        "warnings": [gap_json(gap) for gap in gaps],
    }


def _about(one: PipelineFigures) -> str:
    parts = [
        f"ranks {show_members([rank.rank for rank in one.ranks])}",
        _schedule_of(one),
    ]
    if one.stream is not None:
        parts[1] = stream_latency(one.stream)
    elif one.batch_latency_ns is not None:
        steps = counted(len(one.windows), "step")
        parts.append(f"batch latency {show_duration(one.batch_latency_ns)} (median of {steps})")
    peaks = [rank.peak_memory_bytes for rank in one.ranks if rank.peak_memory_bytes is not None]
    if peaks:
        parts.append(f"peak memory {_peaks(peaks)}")
    return "; ".join(parts)


def _peaks(peaks: Sequence[int]) -> str:
    if len(peaks) <= FEW:
        return " ".join(show_bytes(peak) for peak in peaks)
    return show_range(peaks, show_bytes)


def _schedule_of(one: PipelineFigures) -> str:
    found = one.schedule or "schedule unknown"
    if one.stated is None:
        return found
    if one.stated.agrees:
        return f"{one.stated.name}, as stated"
    return f"{found} ({one.stated.name} was stated)"


def _stated_json(one: PipelineFigures) -> dict[str, Any] | None:
    if one.stated is None:
        return None
    off = one.stated.deviation
    return {
        "schedule": one.stated.name,
        "chunks": one.stated.chunks,
        "agrees": one.stated.agrees,
        "deviation": off
        and {
            "rank": off.rank,
            "step": off.step,
            "place": off.place,
            "found": off.found,
            "expected": off.expected,
        },
    }


def _shape_json(one: PipelineFigures) -> dict[str, Any] | None:
    if one.shape is None:
        return None
    return {
        "jagged_fraction": one.shape.jagged_fraction,
        "where": one.shape.where,
        "median_wait_s": one.shape.median_wait_ns / NS_PER_S,
        "waits": one.shape.waits,
    }


def _shape_of(one: PipelineFigures) -> str:
    if one.shape is None:
        return "no waits between passes" if one.windows else ""
    places = {"everywhere": "on all ranks alike", "middle": "mostly in the middle of the pipeline"}
    where = places.get(one.shape.where, f"mostly on the {one.shape.where} rank")
    evenness = "jagged" if one.shape.jagged_fraction > _JAGGED else "even"
    middle = show_duration(one.shape.median_wait_ns)
    return f"waits between passes: {evenness}, {middle} in the middle, {where}"


def _outside_of(one: PipelineFigures) -> str:
    parts = [
        f"{what.replace('_', ' ')} {show_duration(length)}"
        for what, length in one.outside_ns.items()
    ]
    return f"between two steps: {', '.join(parts)}" if parts else ""


def _tokens_per_s(one: PipelineFigures, job: JobFacts) -> float | None:
    """Return tokens a second of steps without the profiler, where the job told their number."""
    if job.tokens is None or job.unprofiled_step_s is None or one.stream is not None:
        return None
    return job.tokens / job.unprofiled_step_s


def _stages_json(one: PipelineFigures, job: JobFacts) -> list[dict[str, Any]]:
    stages: dict[int, dict[str, Any]] = {}
    for row in one.stages:
        layers = layers_of(one, row.stage)
        stage = stages.setdefault(
            row.stage,
            {
                "stage": row.stage,
                "rank": row.rank,
                "layers": count_layers(one, job, row.stage),
                "layer_s": layers.layer_ns / NS_PER_S if layers else None,
                "passes": {},
            },
        )
        stage["passes"][PassKind(row.kind).name] = {
            "median_s": row.median_ns / NS_PER_S,
            "mad_s": row.mad_ns / NS_PER_S,
            "n": row.count,
        }
    return list(stages.values())


def _shares_json(shares: RankShares) -> dict[str, Any]:
    return {
        "rank": shares.rank,
        "apparent_fraction": shares.apparent_fraction,
        "useful_fraction": shares.useful_fraction,
        "bubble_fraction": shares.bubble_fraction,
        "busy_fraction": shares.busy_fraction,
    }


def _memory_json(rank: RankTimeline) -> dict[str, Any]:
    fields = (
        "static_bytes",
        "per_microbatch_bytes",
        "transient_bytes",
        "peak_bytes",
        "peak_reserved_bytes",
        "most_in_flight",
        "limit_bytes",
        "job_peak_bytes",
        "free_bytes",
        "other_bytes",
    )
    return {"rank": rank.rank} | {name: getattr(rank.memory, name, None) for name in fields}


def _hop_json(hop: HopFigures, ledger: Ledger | None) -> dict[str, Any]:
    alone = len(hop.stages) == 1
    times = times_expected(ledger, (hop.source, hop.destination)) if ledger else None
    return {
        "from_rank": hop.source,
        "to_rank": hop.destination,
        "from_stage": hop.stages[0][0] if alone else None,
        "to_stage": hop.stages[0][1] if alone else None,
        "stages": [list(pair) for pair in hop.stages],
        "bytes": hop.message_bytes if hop.message_bytes >= 0 else None,
        "wire_s": {
            "median": _seconds(hop.wire_ns),
            "p95": _seconds(hop.wire_p95_ns),
            "n": hop.wires,
        },
        "wait_s": {"median": _seconds(hop.wait_ns), "p95": _seconds(hop.wait_p95_ns)},
        "n": hop.count,
        "buffered_fraction": hop.buffered_fraction,
        "bytes_per_s": hop.bytes_per_s,
        "expected_bytes_per_s": expected_rate(hop.bytes_per_s, times),
    }


def _rate(one: PipelineFigures) -> float | None:
    if one.stream is not None:
        return one.stream.batches_per_s
    step = one.step_time_ns or one.batch_latency_ns
    return one.microbatches * NS_PER_S / step if one.microbatches and step else None


def _seconds(nanoseconds: int | None) -> float | None:
    return None if nanoseconds is None else nanoseconds / NS_PER_S


def _percent(fraction: float) -> str:
    return f"{100 * fraction:.0f} %"
