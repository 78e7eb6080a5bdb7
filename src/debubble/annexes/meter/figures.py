"""Finished steps of a rank in → what it did, whether it got slower, and who drags.

A rank sees its own passes and waits. What ranks of a pipeline tell each other (`RankReport`) makes
one window of them: bubble, and the rank that got slower.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import NamedTuple

from debubble.annexes import drift
from debubble.annexes.meter.record import END, OP, PASSES, PEER, STAGE, START, Step
from debubble.units import NS_PER_S

# A job has many ranks, and steps enough: the reference may be longer than that of captures.
CHART = drift.Chart(worse="up", reference=4 * drift.REFERENCE)
_REMEMBERED_STEPS = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFigures:
    """What one rank did in one step."""

    number: int
    start_ns: int
    """Of its first pass."""
    end_ns: int
    """Of its last pass."""
    step_ns: int
    """From beat to beat."""
    busy_ns: int
    passes_ns: Mapping[tuple[int, str], float]
    """The median of each stage and kind."""
    waits_ns: Mapping[int, int]
    """By the rank that was waited for, the way of its messages included."""


def measure_step(step: Step) -> StepFigures | None:
    """Add up a step; None where no pass was in it."""
    lengths: dict[tuple[int, str], list[int]] = {}
    waits: dict[int, int] = {}
    passes = []
    for row in step.rows:
        if row[OP] in PASSES:
            start, end = row[START], row[END]
            lengths.setdefault((row[STAGE], row[OP]), []).append(end - start)
            passes.append((start, end))
    if not passes:
        return None
    passes.sort()
    free = step.start_ns
    received = [row for row in step.rows if row[OP].endswith("-recv")]
    for row in sorted(received, key=lambda row: int(row[END])):
        start, end, peer = row[START], row[END], row[PEER]
        before = bisect_left(passes, (end, 0)) - 1
        begins = max(start, free, passes[before][1] if before >= 0 else 0)
        if end > begins:
            waits[peer] = waits.get(peer, 0) + end - begins
            free = end
    return StepFigures(
        number=step.number,
        start_ns=passes[0][0],
        end_ns=max(end for _, end in passes),
        step_ns=step.end_ns - step.start_ns,
        busy_ns=sum(end - start for start, end in passes),
        passes_ns={name: median(values) for name, values in lengths.items()},
        waits_ns=waits,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReport:
    """What a rank tells the others of its pipeline, a second or so after it was."""

    rank: int
    steps: dict[int, tuple[int, int, int]]
    """Of the newest steps: the start of the first pass, the end of the last, and busy, in ns."""
    slower_by: float
    since_step: int

    def to_text(self) -> str:
        """Write it as JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: str | bytes) -> RankReport:
        """Read it back."""
        fields = json.loads(text)
        fields["steps"] = {int(step): tuple(times) for step, times in fields["steps"].items()}
        return cls(**fields)


@dataclass(frozen=True, slots=True, kw_only=True)
class Straggler:
    """The rank that got slower than it was, and drags its pipeline."""

    rank: int
    since_step: int
    slower_by: float
    """0.05: what it does takes 5 % longer than it did."""


class Figure(NamedTuple):
    """One number, as metrics and scalars name it."""

    name: str
    labels: Mapping[str, str]
    value: float


@dataclass(slots=True)
class RankFigures:
    """What a rank remembers of itself: its newest steps, and its level of busy time."""

    rank: int
    recent: deque[StepFigures] = field(default_factory=lambda: deque(maxlen=_REMEMBERED_STEPS))
    track: drift.Track = field(default_factory=drift.Track)

    def take(self, figures: StepFigures, *, disturbed: bool = False) -> bool:
        """Take a step in; True where the rank got slower, beyond doubt and for the first time.

        Steps under a profiler (`disturbed`) are slower for that, and say nothing.
        """
        self.recent.append(figures)
        if disturbed or figures.busy_ns <= 0:
            return False
        before = drift.is_alarm(self.track, CHART)
        self.track = drift.advance(self.track, figures.busy_ns, CHART, figures.number)
        return not before and drift.is_alarm(self.track, CHART)

    def report(self) -> RankReport:
        """Return what the others are told."""
        track, since, slower_by = self.track, self.track.up.since, 0.0
        if drift.is_alarm(track, CHART) and track.level is not None and track.recent is not None:
            slower_by = track.recent / track.level - 1
        return RankReport(
            rank=self.rank,
            steps={step.number: (step.start_ns, step.end_ns, step.busy_ns) for step in self.recent},
            slower_by=slower_by,
            since_step=-1 if since is None else int(since),
        )

    def figures(self) -> list[Figure]:
        """Return this rank's newest figures: medians of the steps remembered."""
        recent = list(self.recent)
        if not recent:
            return []
        figures = [
            Figure("step_seconds", {}, median(step.step_ns for step in recent) / NS_PER_S),
            Figure("busy_seconds", {}, median(step.busy_ns for step in recent) / NS_PER_S),
        ]
        for peer in sorted({peer for step in recent for peer in step.waits_ns}):
            wait_ns = median(step.waits_ns.get(peer, 0) for step in recent)
            figures.append(Figure("wait_seconds", {"for_rank": str(peer)}, wait_ns / NS_PER_S))
        for stage, kind in sorted({name for step in recent for name in step.passes_ns}):
            name = (stage, kind)
            length = median(step.passes_ns[name] for step in recent if name in step.passes_ns)
            where = {"stage": str(stage), "pass": kind}
            figures.append(Figure("pass_seconds", where, length / NS_PER_S))
        return figures


def bubble_of(ranks: Iterable[RankReport]) -> float | None:
    """Return the bubble of a pipeline: the median over the steps that all its ranks told."""
    reports = list(ranks)
    if not reports:
        return None
    bubbles = []
    for step in set.intersection(*(set(report.steps) for report in reports)):
        spans = [report.steps[step] for report in reports]
        window = max(end for _, end, _ in spans) - min(start for start, _, _ in spans)
        if window > 0:
            bubbles.append(1 - sum(busy for _, _, busy in spans) / (len(spans) * window))
    return median(bubbles) if bubbles else None


def find_straggler(ranks: Iterable[RankReport]) -> Straggler | None:
    """Return the rank that got slower by most."""
    slowest = max(ranks, key=lambda report: report.slower_by, default=None)
    if slowest is None or slowest.slower_by <= 0:
        return None
    return Straggler(rank=slowest.rank, since_step=slowest.since_step, slower_by=slowest.slower_by)
