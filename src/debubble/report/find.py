"""Measured pipelines in → what `debubble find` says to people."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from debubble.errors import Code, Gap, NoPipeline, as_gap
from debubble.ledger.ledger import Ledger
from debubble.report.find_tables import (
    hop_table,
    pipeline_table,
    stage_table,
)
from debubble.report.fold import FEW, show_members, show_range
from debubble.report.inspect import rank_table
from debubble.report.job import job_note
from debubble.report.ledger import ledger_findings, ledger_tables
from debubble.report.replicas import replica_findings, replica_tables
from debubble.report.stream import stream_answer, stream_latency
from debubble.report.text import Page
from debubble.report.theory import theory_of, theory_of_schedule
from debubble.timeline.figures import PipelineFigures
from debubble.timeline.job import JobFacts
from debubble.timeline.replicas import DRAGS, ReplicaFigures, shown_of
from debubble.trace.run import Run
from debubble.units import counted, show_bytes, show_count, show_duration, show_share

# Pipelines of one job that differ by less take as long: steps vary by as much.
_SEVERAL, _SLOWER = 2, 0.02
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
    page = Page(answer=answer(worst, len(figures), drags=drags_others(replicas)))
    page.findings = ledger_findings(ledger, worst.outside_ns) if ledger else []
    place = 0 if drags_others(replicas) else len(page.findings)
    page.findings[place:place] = replica_findings(replicas)
    page.notes += [
        say_framework(worst),
        _about(worst),
        _slowest_of(figures),
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


def _those(ranks: Sequence[int]) -> str:
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {show_members(ranks)}"


def drags_others(replicas: ReplicaFigures | None) -> bool:
    """Tell whether the pipeline to look into is the one that drags the others."""
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


def _slowest_of(figures: Sequence[PipelineFigures]) -> str:
    """Name the pipeline of a job that takes longest, where the others do not take as long."""
    known = {
        one.pipeline: one.batch_latency_ns
        for one in figures
        if one.stream is None and one.batch_latency_ns is not None
    }
    if len(known) < _SEVERAL:
        return ""
    slowest = max(known, key=lambda pipeline: known[pipeline])
    others = median(length for pipeline, length in known.items() if pipeline != slowest)
    if known[slowest] < (1 + _SLOWER) * others:
        return ""
    takes, elsewhere = show_duration(known[slowest]), show_duration(others)
    return f"slowest: pipeline {slowest}, a batch takes {takes}, {elsewhere} in the others"


def say_framework(one: PipelineFigures) -> str:
    """Say whose framework ran it and how it divides the job; empty where nothing tells."""
    known = one.ranks[0].parallelism
    if known.framework is None:
        return ""
    name = {"megatron": "Megatron", "deepspeed": "DeepSpeed"}.get(known.framework, known.framework)
    sizes = {
        "pipeline": len(one.ranks[0].members) or len(one.ranks),
        "tensor": known.tensor,
        "context": known.context,
        "expert": known.expert,
        "data": known.data,
        "sharded": known.sharded,
    }
    parts = [f"{what} {size}" for what, size in sizes.items() if size and size > 1]
    if known.microbatch_size is not None:
        samples = counted(known.microbatch_size, "sample")
        parts.append(f"microbatches of {samples} x {show_count(known.sequence or 0)} tokens")
        if one.microbatches:
            batch = known.microbatch_size * one.microbatches * (known.data or 1)
            parts.append(f"batch of {counted(batch, 'sample')}")
    if one.ranks[0].recomputes:
        parts.append("activations recomputed")
    return f"{name}: {', '.join(parts)}"


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
    if one.ranks[0].recomputes and one.ranks[0].parallelism.framework is None:
        parts.append("activations recomputed")
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


def _percent(fraction: float) -> str:
    return f"{100 * fraction:.0f} %"
