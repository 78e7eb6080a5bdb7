"""Measured pipelines in → the tables of `debubble find`, folded where they would fill a screen."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from debubble.report.fold import FEW, STANDING_OUT, farthest, show_members, show_range
from debubble.report.text import Table
from debubble.timeline.figures import PipelineFigures, StageFigures
from debubble.timeline.job import JobFacts
from debubble.timeline.model import PassKind, StageLayers
from debubble.timeline.transfers import HopFigures
from debubble.units import show_bytes, show_duration, show_share

_Value = TypeVar("_Value")


def pipeline_table(figures: Sequence[PipelineFigures], shown_in_full: PipelineFigures) -> Table:
    """Lay out replicas: the one shown in full, those that stand out, the others as one."""
    table = Table(columns=("pipeline", "ranks", "bubble", "batch latency", "peak memory"))
    shown = set(range(len(figures)))
    if len(figures) > FEW // 2:
        shown = {place for place, one in enumerate(figures) if one is shown_in_full}
        shown |= farthest([one.bubble_fraction for one in figures])
        shown |= farthest([one.batch_latency_ns for one in figures])
    table.rows += [_pipeline_row(figures[place]) for place in sorted(shown)]
    rest = [one for place, one in enumerate(figures) if place not in shown]
    if rest:
        table.rows.append(_other_pipelines(rest))
    return table


def _pipeline_row(one: PipelineFigures) -> tuple[str, ...]:
    peaks = _known([rank.peak_memory_bytes for rank in one.ranks])
    return (
        str(one.pipeline),
        show_members([rank.rank for rank in one.ranks])
        + (f" ({len(one.ranks)} of {len(one.ranks) + len(one.absent)})" if one.absent else ""),
        show_share(one.bubble_fraction),
        "–" if one.batch_latency_ns is None else show_duration(one.batch_latency_ns),
        show_bytes(max(peaks)) if peaks else "–",
    )


def _other_pipelines(rest: Sequence[PipelineFigures]) -> tuple[str, ...]:
    bubbles = _known([one.bubble_fraction for one in rest])
    latencies = _known([one.batch_latency_ns for one in rest])
    peaks = _known([rank.peak_memory_bytes for one in rest for rank in one.ranks])
    return (
        f"{len(rest)} others",
        f"{sum(len(one.ranks) for one in rest)} ranks",
        show_range(bubbles, show_share) if bubbles else "–",
        show_range(latencies, show_duration) if latencies else "–",
        show_bytes(max(peaks)) if peaks else "–",
    )


def stage_table(one: PipelineFigures, job: JobFacts) -> Table:
    """Lay out what each kind of pass takes on each stage."""
    table = Table(columns=("stage", "rank", "layers", "pass", "median", "spread", "count"))
    shown, folded = _fold_stages(one.stages)
    for row in shown:
        table.rows.append(
            (
                str(row.stage),
                str(row.rank),
                _show_layers(one, job, [row.stage]),
                PassKind(row.kind).name,
                show_duration(row.median_ns),
                f"± {show_duration(row.mad_ns)}",
                str(row.count),
            )
        )
    for kind, rest in folded.items():
        table.rows.append(
            (
                f"{len(rest)} others",
                "",
                _show_layers(one, job, [row.stage for row in rest]),
                kind.name,
                show_range([row.median_ns for row in rest], show_duration),
                f"± {show_duration(max(row.mad_ns for row in rest))}",
                show_range([row.count for row in rest], str),
            )
        )
    return table


def _fold_stages(
    rows: Sequence[StageFigures],
) -> tuple[list[StageFigures], dict[PassKind, list[StageFigures]]]:
    """Keep the stages whose passes stand out, of any kind."""
    if len(rows) <= 2 * FEW:
        return list(rows), {}
    kinds = {kind: [row for row in rows if row.kind == kind] for kind in PassKind}
    kept = {
        mine[place].stage
        for mine in kinds.values()
        for place in farthest([row.median_ns for row in mine], STANDING_OUT // 2)
    }
    folded = {
        kind: [row for row in mine if row.stage not in kept] for kind, mine in kinds.items() if mine
    }
    return [row for row in rows if row.stage in kept], folded


def hop_table(hops: Sequence[HopFigures]) -> Table:
    """Lay out what each hop takes, and who waits for it."""
    table = Table(columns=("hop", "size", "wire", "wait", "buffered", "count"))
    shown = set(range(len(hops)))
    if len(hops) > 2 * FEW:
        shown = farthest([hop.wire_ns for hop in hops]) | farthest([hop.wait_ns for hop in hops])
    table.rows += [_hop_row(hops[place]) for place in sorted(shown)]
    rest = [hop for place, hop in enumerate(hops) if place not in shown]
    if rest:
        wires, sizes = _known([hop.wire_ns for hop in rest]), [hop.message_bytes for hop in rest]
        table.rows.append(
            (
                f"{len(rest)} others",
                "unknown" if min(sizes) < 0 else show_range(sizes, show_bytes),
                show_range(wires, show_duration) if wires else "hidden",
                show_range([hop.wait_ns for hop in rest], show_duration),
                show_range([hop.buffered_fraction for hop in rest], show_share),
                show_range([hop.count for hop in rest], str),
            )
        )
    return table


def _hop_row(hop: HopFigures) -> tuple[str, ...]:
    return (
        f"{hop.source} → {hop.destination}",
        "unknown" if hop.message_bytes < 0 else show_bytes(hop.message_bytes),
        "hidden" if hop.wire_ns is None else show_duration(hop.wire_ns),
        show_duration(hop.wait_ns),
        show_share(hop.buffered_fraction),
        str(hop.count),
    )


def layers_of(one: PipelineFigures, stage: int) -> StageLayers | None:
    """Return what kernels show of a stage's layers."""
    found = (layers for rank in one.ranks for layers in rank.layers if layers.stage == stage)
    return next(found, None)


def count_layers(one: PipelineFigures, job: JobFacts, stage: int) -> int | None:
    """Return the layers that kernels show, else those that the job names."""
    found, said = layers_of(one, stage), job.split_for(one)
    if found is not None:
        return found.layers
    return said[stage] if said and stage < len(said) else None


def _show_layers(one: PipelineFigures, job: JobFacts, stages: Sequence[int]) -> str:
    counts = _known([count_layers(one, job, stage) for stage in stages])
    return show_range(counts, str) if counts else "–"


def _known(values: Sequence[_Value | None]) -> list[_Value]:
    return [value for value in values if value is not None]
