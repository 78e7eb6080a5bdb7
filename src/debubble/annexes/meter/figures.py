"""Finished steps of a rank in → what it did, whether it got slower, and who drags.

A rank sees its own passes and waits. What ranks of a pipeline tell each other (`RankReport`) makes
one window of them: bubble, and the rank that all wait for.
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
# A rank with so much more to do than the median of its pipeline drags it, also if it always did.
_DRAGS = 0.05
_REMEMBERED = 32


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
    """By the rank that was waited for."""
    arrivals_ns: Mapping[int, int]
    """The quickest message from each rank: what its way took at the least."""
    received: Mapping[int, int]
    """Messages from each rank."""


def measure_step(step: Step) -> StepFigures | None:
    """Add up a step; None where no pass was in it."""
    lengths: dict[tuple[int, str], list[int]] = {}
    waits: dict[int, int] = {}
    arrivals: dict[int, int] = {}
    received: dict[int, int] = {}
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
    for row in sorted((row for row in step.rows if row[OP].endswith("-recv")), key=_by_end):
        start, end, peer = row[START], row[END], row[PEER]
        received[peer] = received.get(peer, 0) + 1
        arrivals[peer] = min(arrivals.get(peer, end - start), end - start)
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
        arrivals_ns=arrivals,
        received=received,
    )


def _by_end(row: list[object]) -> int:
    return row[END]  # type: ignore[return-value]


@dataclass(frozen=True, slots=True, kw_only=True)
class Straggler:
    """The rank that its pipeline waits for."""

    rank: int
    since_step: int
    """The step it got slower at; the first that was metered where it always was."""
    slower_by: float
    """0.05: what it does takes 5 % longer than it did; or than the others' does, if always."""
    always: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReport:
    """What a rank tells the others of its pipeline, a second or so after it was."""

    rank: int
    steps: dict[int, tuple[int, int, int]]
    """Of the newest steps: the start of the first pass, the end of the last, and busy, in ns."""
    busy_ns: float
    step_ns: float
    slower_by: float
    since_step: int
    first_step: int

    def to_text(self) -> str:
        """Write it as JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: str | bytes) -> RankReport:
        """Read it back."""
        said = json.loads(text)
        said["steps"] = {int(step): tuple(times) for step, times in said["steps"].items()}
        return cls(**said)


class Figure(NamedTuple):
    """One number, as metrics and scalars name it."""

    name: str
    labels: Mapping[str, str]
    value: float


@dataclass(slots=True)
class RankFigures:
    """What a rank remembers of itself: its newest steps, and its level of busy time."""

    rank: int
    recent: deque[StepFigures] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))
    track: drift.Track = field(default_factory=drift.Track)
    quickest_ns: dict[int, int] = field(default_factory=dict)
    """The quickest message of all from each rank."""
    first_step: int = -1

    def take(self, figures: StepFigures, *, disturbed: bool = False) -> bool:
        """Take a step in; True where the rank got slower, beyond doubt and for the first time.

        Steps under a profiler (`disturbed`) are slower for that, and say nothing.
        """
        self.recent.append(figures)
        if self.first_step < 0:
            self.first_step = figures.number
        for peer, took in figures.arrivals_ns.items():
            self.quickest_ns[peer] = min(self.quickest_ns.get(peer, took), took)
        if disturbed or figures.busy_ns <= 0:
            return False
        before = drift.is_alarm(self.track, CHART)
        self.track = drift.advance(self.track, figures.busy_ns, CHART, figures.number)
        return not before and drift.is_alarm(self.track, CHART)

    @property
    def since_step(self) -> int:
        """The step since which it takes longer; -1 where it does not."""
        since = self.track.up.since
        return -1 if since is None else int(since)

    @property
    def slower_by(self) -> float:
        """By how much longer what the rank does takes than it did; 0 without an alarm."""
        track = self.track
        if not drift.is_alarm(track, CHART) or track.level is None or track.recent is None:
            return 0.0
        return track.recent / track.level - 1

    def tell(self) -> RankReport | None:
        """Return what the others are told; None before the first step."""
        if not self.recent:
            return None
        return RankReport(
            rank=self.rank,
            steps={one.number: (one.start_ns, one.end_ns, one.busy_ns) for one in self.recent},
            busy_ns=median(one.busy_ns for one in self.recent),
            step_ns=median(one.step_ns for one in self.recent),
            slower_by=self.slower_by,
            since_step=self.since_step,
            first_step=self.first_step,
        )

    def figures(self) -> list[Figure]:
        """Return this rank's newest figures: medians of the steps remembered."""
        recent = list(self.recent)
        if not recent:
            return []
        found = [
            Figure("step_seconds", {}, median(one.step_ns for one in recent) / NS_PER_S),
            Figure("busy_seconds", {}, median(one.busy_ns for one in recent) / NS_PER_S),
        ]
        for peer in sorted({peer for one in recent for peer in one.received}):
            waited = median(one.waits_ns.get(peer, 0) for one in recent)
            messages = median(one.received.get(peer, 0) for one in recent)
            hop = self.quickest_ns[peer]
            moving = min(waited, messages * hop)
            whom = {"for_rank": str(peer)}
            found.append(Figure("wait_seconds", whom, (waited - moving) / NS_PER_S))
            found.append(Figure("transfer_seconds", {"from_rank": str(peer)}, moving / NS_PER_S))
            found.append(Figure("hop_seconds", {"from_rank": str(peer)}, hop / NS_PER_S))
        for stage, kind in sorted({name for one in recent for name in one.passes_ns}):
            name = (stage, kind)
            length = median(one.passes_ns[name] for one in recent if name in one.passes_ns)
            where = {"stage": str(stage), "pass": kind}
            found.append(Figure("pass_seconds", where, length / NS_PER_S))
        return found


def bubble_of(told: Iterable[RankReport]) -> float | None:
    """Return the bubble of a pipeline: the median over the steps that all its ranks told."""
    ranks = list(told)
    if not ranks:
        return None
    common = set.intersection(*(set(one.steps) for one in ranks))
    found = []
    for step in common:
        spans = [one.steps[step] for one in ranks]
        window = max(end for _, end, _ in spans) - min(start for start, _, _ in spans)
        if window > 0:
            found.append(1 - sum(busy for _, _, busy in spans) / (len(spans) * window))
    return median(found) if found else None


def find_straggler(told: Iterable[RankReport]) -> Straggler | None:
    """Return the rank that got slower by most; else one that always had more to do."""
    ranks = list(told)
    slower = max(ranks, key=lambda one: one.slower_by, default=None)
    if slower is not None and slower.slower_by > 0:
        return Straggler(
            rank=slower.rank,
            since_step=slower.since_step,
            slower_by=slower.slower_by,
            always=False,
        )
    if len(ranks) < 2:
        return None
    longest = max(ranks, key=lambda one: one.busy_ns)
    usual = median(one.busy_ns for one in ranks)
    if usual <= 0 or longest.busy_ns <= usual * (1 + _DRAGS):
        return None
    return Straggler(
        rank=longest.rank,
        since_step=longest.first_step,
        slower_by=longest.busy_ns / usual - 1,
        always=True,
    )
