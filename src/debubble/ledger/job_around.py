"""A pipeline and the others of its job in → what its batches are shared with."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from debubble.ledger.ledger import Job
from debubble.ledger.verdict import MATTERS
from debubble.timeline.figures import PipelineFigures
from debubble.timeline.model import Timeline
from debubble.timeline.replicas import Workers

# A batch is as slow as its slowest pipeline: of many, the others never are.
MOST_REPLAYED = 7


def job_around(
    pipeline: PipelineFigures,
    pipelines: Sequence[PipelineFigures],
    timeline: Timeline,
    workers: Workers,
) -> Job:
    """Tell what a pipeline shares its batches with; the slowest of them are replayed too."""
    others = [
        other
        for other in pipelines
        if other.pipeline != pipeline.pipeline and other.windows and other.one_run
    ]
    others = [other for other in others if not other.cut and other.kind == pipeline.kind]
    held = [other for other in others if other.pipeline in timeline.pipelines]
    # Replicas that differ in nothing but noise tell nothing of each other. Of two steps too few
    # to tell which of them drags, the slowest of each step tells that they differ.
    differ = bool(workers.slow or workers.uneven) or _windows_differ([pipeline, *others])
    alike = held if differ else []
    slowest = _slowest_first(alike)
    replayed = tuple(other.pipeline for other in slowest[:MOST_REPLAYED])
    took = pipeline.batch_latency_ns or 0
    batch = round(median(longest_windows([pipeline, *others]).values() or [took]))
    return Job(
        workers=workers,
        alike=tuple(other.pipeline for other in alike),
        beside=replayed,
        hops=tuple(hop for other in slowest[:MOST_REPLAYED] for hop in other.hops),
        longest_ns=longest_windows(others),
        not_replayed_ns=longest_windows(
            [other for other in others if other.pipeline not in replayed]
        ),
        batch_latency_ns=batch if batch > (1 + MATTERS) * took else None,
    )


def longest_windows(pipelines: Sequence[PipelineFigures]) -> dict[int, int]:
    """Return, of each step that all have, the window of the slowest."""
    windows = [{w.step: w.length_ns for w in pipeline.windows} for pipeline in pipelines]
    steps = set.intersection(*map(set, windows)) if windows else set()
    return {step: max(lengths[step] for lengths in windows) for step in sorted(steps)}


def _slowest_first(pipelines: Sequence[PipelineFigures]) -> list[PipelineFigures]:
    """Order pipelines: first those that are the slowest in one step or another."""
    windows = sorted(
        (window.step, -window.length_ns, number)
        for number, pipeline in enumerate(pipelines)
        for window in pipeline.windows
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
        max(lengths) / max(sorted(lengths)[(len(lengths) - 1) // 2], 1)
        for lengths in windows.values()
        if len(lengths) == len(pipelines)
    ]
    return bool(times) and median(times) > 1 + MATTERS
