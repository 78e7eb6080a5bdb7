"""The types of a comparison: its verdict, what each number did, what else differs."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from debubble.measure.measurement import Measurement
from debubble.measure.prediction import PredictionCheck
from debubble.measure.statistics import Spread
from debubble.timeline.job import Basis


class Verdict(StrEnum):
    """What came of a change."""

    BETTER = "better"
    WORSE = "worse"
    NO_CLEAR_CHANGE = "no_clear_change"
    NOT_COMPARABLE = "not_comparable"
    UNSAFE_MEMORY = "unsafe_memory"


class Confidence(StrEnum):
    """What the verdict rests on."""

    TESTED = "tested"
    INDICATIVE = "indicative"


class Direction(StrEnum):
    """What one number did."""

    BETTER = "better"
    WORSE = "worse"
    UNCLEAR = "unclear"


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """What a number did: a share of itself; of the bubble, in points."""

    before: Spread | None
    after: Spread | None
    change: float | None
    """After over before, minus 1; of a bubble, after minus before."""
    ci: tuple[float, float] | None
    """Where the change lies, at 95 %."""
    p: float | None
    direction: Direction
    tested: bool
    """False: too few samples for any test; the direction is an indication."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryChange:
    """The peak of one rank before and after, and what is left."""

    rank: int
    before_bytes: int | None
    after_bytes: int | None
    limit_bytes: int | None
    headroom_bytes: int | None
    """What is left after the change."""
    unsafe: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Something besides the numbers that is not the same."""

    what: str
    before: str
    after: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CauseChange:
    """A cause of the ledger, as shares of the batch, or of the time of a stream."""

    cause: str
    before_fraction: float
    after_fraction: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Two measurements, and what to make of them."""

    before: Measurement
    after: Measurement
    verdict: Verdict
    confidence: Confidence
    decided_by: str
    """The number that decides: batch_latency, or throughput where batches differ."""
    bases: tuple[Basis, Basis]
    """Of the times before and after: the same, unless a side has none on the other's."""
    deltas: dict[str, Delta]
    """What each number did, by its name."""
    memory: tuple[MemoryChange, ...]
    setting: tuple[Difference, ...]
    """What was changed: schedule, split, microbatches."""
    environment: tuple[Difference, ...]
    """What changed beside it: devices, versions, the profiler's own settings."""
    reasons: tuple[str, ...]
    """Why they cannot be compared, or why the verdict is not what one number says."""
    notes: tuple[str, ...]
    needed: int | None
    """Samples a side that would show such a change; None where that cannot be told."""
    detectable: float | None
    """The smallest change that these samples would show."""
    threshold: float
    predicted: PredictionCheck | None
    """What a plan had predicted of it; None where nothing is kept of this change."""
    throughput_unit: str
    """tokens, or microbatches (of the size they have before)."""

    @property
    def deciding(self) -> Delta:
        """What the number that decides did."""
        return self.deltas[self.decided_by]
