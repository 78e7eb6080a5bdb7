"""Measured pipelines in → what `debubble find --json` prints out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from debubble.errors import Code, Gap, NoPipeline, as_gap
from debubble.ledger.hop_health import LinkHealth
from debubble.ledger.ledger import Ledger
from debubble.report.find import answer, drags_others
from debubble.report.find_tables import count_layers, layers_of
from debubble.report.inspect import gap_json
from debubble.report.job import job_json
from debubble.report.ledger import ledger_json
from debubble.report.links import verdict_json
from debubble.report.replicas import replicas_json
from debubble.report.stream import stream_json
from debubble.report.theory import theory_of, theory_of_schedule
from debubble.report.unknown import reasons_for_null
from debubble.timeline.figures import PipelineFigures, RankShares
from debubble.timeline.job import JobFacts
from debubble.timeline.model import PassKind, RankTimeline, Timeline
from debubble.timeline.replicas import ReplicaFigures, shown_of
from debubble.timeline.transfers import HopFigures
from debubble.trace.run import Run
from debubble.units import NS_PER_S

SCHEMA = "debubble.find/1"


def find_json(  # noqa: PLR0913 (what is known of a run, one argument each)
    run: Run,
    timeline: Timeline,
    figures: Sequence[PipelineFigures],
    ledger: Ledger | None,
    gaps: Sequence[Gap],
    *,
    job: JobFacts,
    links: LinkHealth | None = None,
    replicas: ReplicaFigures | None = None,
) -> dict[str, Any]:
    """Return the answer as data: the pipeline to look into in full, the others as one line each."""
    worst = shown_of(figures, replicas)
    return {
        "schema": SCHEMA,
        "run": _run_json(run, timeline, figures, worst),
        "numbers": _numbers_json(worst, job),
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
        "hops": [_hop_json(hop, links) for hop in worst.hops],
        "replicas": replicas_json(replicas),
        "unknown": reasons_for_null(worst, job),
        "verdict": answer(worst, len(figures), drags=drags_others(replicas)),
        "warnings": [gap_json(gap) for gap in gaps],
    }


def no_pipeline_json(run: Run, why: NoPipeline) -> dict[str, Any]:
    """Return the same as data: no numbers of a pipeline, each rank's own share."""
    gaps = [*run.gaps, as_gap(why, code=Code.NO_PIPELINE)]
    return {
        "schema": SCHEMA,
        "run": {
            **_capture_json(run),
            "kind": None,
            "pipelines": [],
            "missing_ranks": list(run.missing_ranks),
        },
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


def _run_json(
    run: Run, timeline: Timeline, figures: Sequence[PipelineFigures], one: PipelineFigures
) -> dict[str, Any]:
    """Return what ran: all pipelines by their ranks, and the shape of the one to look into."""
    uncertainty_s = timeline.clock_uncertainty_ns / NS_PER_S if one.one_run else None
    return {
        **_capture_json(run),
        "kind": one.kind,
        "pipelines": [[rank.rank for rank in each.ranks] for each in figures],
        "ranks": len(one.ranks),
        "stages": len({stage for rank in one.ranks for stage in rank.stages}),
        "chunks": max(len(rank.stages) for rank in one.ranks),
        "microbatches": one.microbatches,
        "schedule": one.schedule,
        "framework": _framework_json(one),
        "stated": _stated_json(one),
        "steps": [window.step for window in one.windows],
        "devices": sorted({d.name for trace in run.ranks for d in trace.header.devices}),
        "clock_uncertainty_s": uncertainty_s,
        "missing_ranks": list(run.missing_ranks),
        "partial": bool(one.absent) or one.cut,
        "one_run": one.one_run,
        "steps_inferred": timeline.inferred and bool(one.windows),
        "steps_left_out": [{"step": left.step, "why": left.why} for left in one.left_out],
    }


def _framework_json(one: PipelineFigures) -> dict[str, Any]:
    """Return whose framework ran it and how it divides the job; null where nothing tells."""
    known = one.ranks[0].parallelism
    return {
        "name": known.framework,
        "tensor": known.tensor,
        "context": known.context,
        "expert": known.expert,
        "data": known.data,
        "sharded": known.sharded,
        "microbatch_size": known.microbatch_size,
        "sequence": known.sequence,
        "recomputes": one.ranks[0].recomputes,
    }


def _capture_json(run: Run) -> dict[str, Any]:
    """Return which capture was read, of those that were there."""
    return {
        "capture": run.found.capture.name,
        "captures": [capture.name for capture in run.found.captures],
    }


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


def _numbers_json(one: PipelineFigures, job: JobFacts) -> dict[str, Any]:
    return {
        "bubble_fraction": one.bubble_fraction,
        "batch_latency_s": _seconds(one.batch_latency_ns),
        "step_time_s": _seconds(one.step_time_ns),
        "peak_memory_bytes": [rank.peak_memory_bytes for rank in one.ranks],
        "microbatches_per_s": _rate(one),
        "tokens_per_s": _tokens_per_s(one, job),
        "unprofiled_batch_latency_s": _seconds(job.without_profiler_ns(one.batch_latency_ns)),
    }


def _rate(one: PipelineFigures) -> float | None:
    if one.stream is not None:
        return one.stream.batches_per_s
    step = one.step_time_ns or one.batch_latency_ns
    return one.microbatches * NS_PER_S / step if one.microbatches and step else None


def _tokens_per_s(one: PipelineFigures, job: JobFacts) -> float | None:
    """Return tokens a second of steps without the profiler, where the job told their number."""
    if job.tokens is None or job.unprofiled_step_s is None or one.stream is not None:
        return None
    return job.tokens / job.unprofiled_step_s


def _shares_json(shares: RankShares) -> dict[str, Any]:
    return {
        "rank": shares.rank,
        "apparent_fraction": shares.apparent_fraction,
        "useful_fraction": shares.useful_fraction,
        "bubble_fraction": shares.bubble_fraction,
        "busy_fraction": shares.busy_fraction,
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


def _memory_json(rank: RankTimeline) -> dict[str, Any]:
    fields = (
        "static_bytes",
        "per_microbatch_bytes",
        "transient_bytes",
        "peak_bytes",
        "passes_peak_bytes",
        "between_peak_bytes",
        "peak_reserved_bytes",
        "most_in_flight",
        "limit_bytes",
        "job_peak_bytes",
        "free_bytes",
        "other_bytes",
    )
    return {"rank": rank.rank} | {name: getattr(rank.memory, name, None) for name in fields}


def _hop_json(hop: HopFigures, links: LinkHealth | None) -> dict[str, Any]:
    alone = len(hop.stages) == 1
    health = links.of((hop.source, hop.destination)) if links else None
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
        "expected_bytes_per_s": health.expected_bytes_per_s if health else None,
        **verdict_json(health),
    }


def _seconds(nanoseconds: int | None) -> float | None:
    return None if nanoseconds is None else nanoseconds / NS_PER_S
