"""An `Analysis` in → the steps that the page can show, as columns."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from debubble.analysis import Analysis
from debubble.ledger.account import Wait
from debubble.ledger.causes import NUMBER_OF
from debubble.ledger.ledger import Ledger
from debubble.serving.account import StreamAccount
from debubble.simulate.program import Times
from debubble.timeline.figures import PipelineFigures
from debubble.timeline.memory import allocator_curve
from debubble.timeline.model import I64, Passes, RankTimeline, Timeline
from debubble.trace.columns import RankTrace

AnyArray = NDArray[Any]
# Half of what 32 bits count: a replay may last longer than the step.
_MOST = 2**31


def pack(column: AnyArray, kind: str) -> str:
    """Write a column as base64 of little-endian numbers: u1, u2, u4, i2, i4, f4."""
    return base64.b64encode(column.astype(f"<{kind}").tobytes()).decode("ascii")


def tick_for(length_ns: int) -> int:
    """Return the shortest tick, in ns, that counts a stretch in 32 bits: 1 up to two seconds."""
    return max(1, -(-length_ns // _MOST))


def ticks(moments_ns: AnyArray, begin_ns: int, length_ns: int) -> AnyArray:
    """Count moments in ticks from a begin on, none of them outside."""
    counted: AnyArray = np.clip(moments_ns - begin_ns, 0, length_ns) // tick_for(length_ns)
    return counted


View = dict[str, Any]
# Of one page: steps beyond it are left out and counted. A step of 16 ranks and 64 microbatches
# takes 0.2 MB.
MOST_BYTES = 4_500_000
# Points of a rank's memory curve in one step: more than a wide screen has columns.
_MEMORY_BINS = 700


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineView:
    """One pipeline, as it is drawn."""

    timeline: Timeline
    figures: PipelineFigures
    ledger: Ledger | None
    stream: StreamAccount | None = None
    """Of one whose batches overlap, where it can be accounted for."""
    traces: Sequence[RankTrace] = ()
    """Of its ranks, where they are at hand: they hold the memory curves."""


def pipelines_shown(analysis: Analysis) -> list[PipelineView]:
    """Return every pipeline that is held, the one to look into first."""
    first, held = analysis.pipeline, analysis.timeline.pipelines
    others = [pipe for pipe in analysis.pipelines if pipe is not first and pipe.pipeline in held]
    return [
        PipelineView(
            timeline=analysis.timeline,
            figures=figures,
            ledger=analysis.ledger_of(figures),
            stream=analysis.stream if figures is first else None,
            traces=analysis.traces,
        )
        for figures in (first, *others)
    ]


def views_of(shown: PipelineView, most_bytes: int = MOST_BYTES) -> tuple[list[View], int]:
    """Return the steps of a pipeline until the page is full, and how many are left out."""
    if not shown.figures.one_run:
        return [], 0
    views: list[View] = []
    steps = _steps(shown)
    used = 0
    accounted = shown.ledger or shown.stream
    waits = accounted.waits if accounted else ()
    for step in steps:
        view = _view(shown, step, [wait for wait in waits if wait.step == step])
        used += len(msgspec.json.encode(view))
        if views and used > most_bytes:
            break
        views.append(view)
    return views, len(steps) - len(views)


def _steps(shown: PipelineView) -> list[int | None]:
    """Return steps that have a ledger, else all that were measured; None is the whole capture."""
    if shown.ledger is not None:
        return [step.number for step in shown.ledger.steps]
    return [window.step for window in shown.figures.windows] or [None]


def _view(shown: PipelineView, step: int | None, waits: Sequence[Wait]) -> View:
    ranks = shown.figures.ranks
    every = shown.timeline.passes
    shown_rows = np.isin(every.rank, [rank.rank for rank in ranks])
    passes = every.where(shown_rows if step is None else shown_rows & (every.step == step))
    if len(passes):
        begin, end = int(passes.start_ns.min()), int(passes.end_ns.max())
    else:
        begin, end = 0, 1
    length = max(end - begin, 1)
    return {
        "pipeline": shown.figures.pipeline,
        "step": step,
        "tick_ns": tick_for(length),
        "length": length // tick_for(length),
        "lanes": [_lane(rank) for rank in ranks],
        "passes": _pass_columns(passes, ranks, begin, length),
        "waits": _wait_columns(waits, ranks, begin, length),
        "messages": _message_columns(shown, step, begin, length),
        "memory": _memory(shown, begin, length),
        "replays": _replays(shown, step, length),
    }


def _lane(rank: RankTimeline) -> dict[str, str]:
    stages = ", ".join(map(str, rank.stages))
    return {
        "rank": f"rank {rank.rank}",
        "stages": f"stage{'s' if len(rank.stages) > 1 else ''} {stages}",
    }


def _places(rank: Any, ranks: Sequence[RankTimeline]) -> I64:
    lane = {lane.rank: number for number, lane in enumerate(ranks)}
    return np.array([lane[number] for number in np.asarray(rank).tolist()], dtype=np.int64)


def _counts(lane: I64, ranks: Sequence[RankTimeline]) -> list[int]:
    """Return how many rows each lane has; rows are sorted by lane."""
    counts: list[int] = np.bincount(lane, minlength=len(ranks)).tolist()
    return counts


def _pass_columns(
    passes: Passes, ranks: Sequence[RankTimeline], begin: int, length: int
) -> dict[str, Any]:
    lane = _places(passes.rank, ranks)
    order = np.lexsort((passes.start_ns, lane))
    return {
        "counts": _counts(lane, ranks),
        "start": pack(ticks(passes.start_ns[order], begin, length), "u4"),
        "end": pack(ticks(passes.end_ns[order], begin, length), "u4"),
        "kind": pack(passes.kind[order], "u1"),
        "microbatch": pack(passes.microbatch[order], "i4"),
        "stage": pack(passes.stage[order], "i2"),
    }


def _wait_columns(
    waits: Sequence[Wait], ranks: Sequence[RankTimeline], begin: int, length: int
) -> dict[str, Any]:
    lane = _places([wait.rank for wait in waits], ranks)
    start = np.array([wait.start_ns for wait in waits], dtype=np.int64)
    end = np.array([wait.end_ns for wait in waits], dtype=np.int64)
    cause = np.array([NUMBER_OF[wait.cause] for wait in waits], dtype=np.int64)
    names = list(dict.fromkeys(wait.waits_for for wait in waits))
    number = {name: row for row, name in enumerate(names)}
    whom = np.array([number[wait.waits_for] for wait in waits], dtype=np.int64)
    order = np.lexsort((start, lane))
    return {
        "counts": _counts(lane, ranks),
        "start": pack(ticks(start[order], begin, length), "u4"),
        "end": pack(ticks(end[order], begin, length), "u4"),
        "cause": pack(cause[order], "u1"),
        "whom": pack(whom[order], "u4"),
        "names": names,
    }


def _message_columns(
    shown: PipelineView, step: int | None, begin: int, length: int
) -> dict[str, str]:
    """Write messages from the moment both sides are there, or they leave into a buffer."""
    ranks, every = shown.figures.ranks, shown.timeline.transfers
    names = [rank.rank for rank in ranks]
    shown_rows = np.isin(every.source, names) & np.isin(every.destination, names)
    moved = every.where(shown_rows if step is None else shown_rows & (every.step == step))
    buffered = moved.buffered
    both = moved.met_ns
    start = np.where(buffered, moved.send_start_ns, both)
    order = np.argsort(start, kind="stable")
    return {
        "source": pack(_places(moved.source, ranks)[order], "u2"),
        "target": pack(_places(moved.destination, ranks)[order], "u2"),
        "start": pack(ticks(start[order], begin, length), "u4"),
        "end": pack(ticks(moved.receive_end_ns[order], begin, length), "u4"),
        "bytes": pack(moved.message_bytes[order], "f4"),
    }


def _memory(shown: PipelineView, begin: int, length: int) -> list[dict[str, Any]]:
    """Write each rank's allocator curve: the highest and the last point of each bit of time."""
    traces = {trace.rank: trace for trace in shown.traces}
    curves = []
    for lane, rank in enumerate(shown.figures.ranks):
        trace = traces.get(rank.rank)
        moments, held = allocator_curve(trace) if trace else (np.zeros(0, dtype=np.int64),) * 2
        if not len(held):
            continue
        moments = moments + rank.clock_offset_ns
        first = int(np.searchsorted(moments, begin, side="right"))
        last = int(np.searchsorted(moments, begin + length, side="right"))
        kept = _thinned(moments[first:last], held[first:last], begin, length) + first
        # What was held before the step began is where its curve begins.
        kept = np.concatenate(([max(first - 1, 0)], kept)).astype(np.int64)
        memory = rank.memory
        curves.append(
            {
                "lane": lane,
                "time": pack(ticks(moments[kept], begin, length), "u4"),
                "bytes": pack(held[kept], "f4"),
                "limit": memory.limit_bytes if memory else None,
            }
        )
    return curves


def _thinned(moments: I64, held: I64, begin: int, length: int) -> I64:
    """Return rows of the highest and the last point in each of some equal bits of time."""
    if len(moments) <= 2 * _MEMORY_BINS:
        return np.arange(len(moments))
    bit = (moments - begin) * _MEMORY_BINS // (length + 1)
    by_height = np.lexsort((held, bit))
    ends = np.flatnonzero(np.diff(bit, append=-1) != 0)
    highest = by_height[np.flatnonzero(np.diff(bit[by_height], append=-1) != 0)]
    return np.unique(np.concatenate((ends, highest)))


def _replays(shown: PipelineView, step: int | None, length: int) -> list[dict[str, Any]]:
    """Write the step replayed unchanged, and with nothing wrong: the same passes, other times."""
    ledger = shown.ledger
    if ledger is None or not ledger.replays:
        return []
    remedies = next(remedy for remedy in ledger.remedies if remedy.step.number == step)
    same, ideal = remedies.run(remedies.step.lengths), remedies.run(remedies.nothing_wrong())
    return [
        _replayed("replayed", "the replay of this step, unchanged", same, length),
        _replayed(
            "ideal", "balanced stages, no jitter, zero-cost transfers, no late hosts", ideal, length
        ),
    ]


def _replayed(name: str, words: str, times: Times, length: int) -> dict[str, Any]:
    begin = int(times.pass_start.min())
    window = int(times.window_ns)
    tick = tick_for(length)
    return {
        "name": name,
        "words": words,
        "length": window // tick,
        "start": pack((times.pass_start - begin) // tick, "u4"),
        "end": pack((times.pass_end - begin) // tick, "u4"),
    }
