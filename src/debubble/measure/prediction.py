"""What a plan predicted of changes to a run, kept beside it → how that stands afterwards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from statistics import median
from typing import TYPE_CHECKING, Any

from debubble.plan.baseline import even_split
from debubble.plan.change import Hold
from debubble.timeline.job import Basis
from debubble.units import show_between, show_gain, show_known, show_seconds, show_times

if TYPE_CHECKING:
    from debubble.measure.measurement import Measurement

# A step that is a hundredth larger than another is the same batch, rounded.
SAME_BATCH = 0.01
# So many samples do not cut into any number of microbatches: the largest of them tells its size.
NEARLY = 0.1
# Of a change, by its names in plans and in answers: what no figure of the later run tells.
_UNSEEN = (
    *("overlap", "recompute"),
    *("repaired", "repaired_hops", "token_scale", "order", "by_hand"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """One change, and what a batch was to take with it."""

    words: str
    basis: Basis
    before_s: float
    """The batch latency that the change starts from."""
    batch_latency_s: float
    low_s: float
    high_s: float
    """An 80 % interval."""
    bubble_fraction: float
    microbatches: int | None
    """None, here and below: as it was."""
    hold: Hold
    split: tuple[int, ...] | None
    schedule: str | None
    unseen: bool
    """Whether it changes something that figures of the later run do not tell."""

    @classmethod
    def of(cls, change: Any, **figures: Any) -> Prediction:
        """Return the prediction of a change of a plan, or of one as an answer has it."""
        return cls(
            microbatches=change.microbatches,
            hold=change.hold or "microbatch",
            split=None if change.split is None else tuple(change.split),
            schedule=change.schedule,
            unseen=any(getattr(change, name, None) is not None for name in _UNSEEN),
            **figures,
        )

    def on(self, basis: Basis, before: Measurement) -> Prediction:
        """Return it on another basis, where the run before the change was timed on both.

        The profiler slows all parts of a step alike.
        """
        here, there = (before.batch_latencies_s(each) for each in (self.basis, basis))
        if not here or not there:
            return self
        factor = median(there) / median(here)
        names = ("before_s", "batch_latency_s", "low_s", "high_s")
        scaled: dict[str, Any] = {name: factor * getattr(self, name) for name in names}
        return replace(self, basis=basis, **scaled)

    def fits(self, before: Measurement, after: Measurement) -> bool:
        """Tell whether the later run is the earlier with this change, as far as figures tell."""
        if (self.schedule or before.schedule) != after.schedule:
            return False
        if (self.microbatches or before.microbatches) != after.microbatches:
            return False
        split = self.split or before.split
        if split and len(split) != after.stages <= sum(split):  # cut evenly, unless it is said
            split = even_split(sum(split), after.stages)
        if split and after.split and split != after.split:
            return False
        sizes = batches_of(before, after)
        grows = self.microbatches is not None and self.hold == "microbatch"
        expected = (self.microbatches or 1) / (before.microbatches or 1) if grows else 1.0
        return sizes is None or abs(sizes[1] / sizes[0] / expected - 1) <= SAME_BATCH


class Came(StrEnum):
    """What came of a prediction."""

    AS_PREDICTED = "as predicted"
    SLOWER = "slower than predicted"
    FASTER = "faster than predicted"
    ANOTHER_BATCH = "another batch than predicted"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictionCheck:
    """What a plan had predicted of the change, and how that stands."""

    change: str
    """As the plan words it."""
    basis: Basis
    batch_latency_s: float
    interval: tuple[float, float]
    """The low end and the high end of 80 %."""
    measured_s: float | None
    """On the same basis; null where nothing was timed on it."""
    verdict: Came
    sentence: str


def batches_of(before: Measurement, after: Measurement) -> tuple[float, float] | None:
    """Return the batches in microbatches of the size they have before; None where not known."""
    if before.microbatches is None or after.microbatches is None:
        return None
    scale = 1.0
    if before.tokens and after.tokens:
        scale = after.tokens / before.tokens
    elif before.message_bytes and after.message_bytes:
        scale = after.message_bytes / before.message_bytes
    return float(before.microbatches), after.microbatches * scale


def find_prediction(
    predictions: Sequence[Prediction],
    before: Measurement,
    after: Measurement,
    words: str | None = None,
) -> Prediction | None:
    """Return what was predicted of the change between two runs, or of the one so worded.

    What figures do not show may have been made or not: that has to be said.
    """
    if words is not None:
        return next((kept for kept in predictions if kept.words == words), None)
    seen = (kept for kept in predictions if not kept.unseen and kept.fits(before, after))
    return next(seen, None)


def growth_of(before: Measurement, after: Measurement) -> float | None:
    """Return how many times as large a batch is as before; None where nothing tells."""
    told = (before.tokens and after.tokens) or (before.message_bytes and after.message_bytes)
    sizes = batches_of(before, after) if told else None
    return None if sizes is None else sizes[1] / sizes[0]


def check_prediction(
    prediction: Prediction,
    before: Measurement | None,
    after: Measurement,
    why_slower: str = "",
) -> PredictionCheck:
    """Hold a prediction against the run after the change; `before` tells what the batch was.

    `why_slower` is what slowed the run besides; else its compute and waiting say where it differs.
    """
    if before is not None and not after.batch_latencies_s(prediction.basis):
        prediction = prediction.on(after.traced, before)
    lengths = after.batch_latencies_s(prediction.basis)
    took = float(median(lengths)) if lengths else None
    held = "" if before is None else _say_held(prediction, growth_of(before, after))
    if held:
        came, why = Came.ANOTHER_BATCH, held
    elif took is None:
        came, why = Came.UNKNOWN, f"{prediction.basis}; measured {after.traced} alone"
    elif prediction.low_s <= took <= prediction.high_s:
        came, why = Came.AS_PREDICTED, ""
    else:
        came = Came.SLOWER if took > prediction.high_s else Came.FASTER
        slowed = why_slower if came is Came.SLOWER else ""
        why = slowed or _what_differs(prediction, after, took)
    interval = (prediction.low_s, prediction.high_s)
    ends = show_between(*map(show_seconds, interval))
    sentence = f"predicted {show_seconds(prediction.batch_latency_s)} ({ends})"
    if came is Came.UNKNOWN:
        sentence += f", {why}"
    else:
        sentence += f", measured {show_known(took, show_seconds)}: {came}"
        sentence += f": {why}" if why else ""
    return PredictionCheck(
        change=prediction.words,
        basis=prediction.basis,
        batch_latency_s=prediction.batch_latency_s,
        interval=interval,
        measured_s=took,
        verdict=came,
        sentence=sentence,
    )


def _say_held(prediction: Prediction, grown: float | None) -> str:
    """Say that a job keeps something else than was predicted as its microbatches change."""
    if grown is None or prediction.microbatches is None:
        return ""
    same = abs(grown - 1) <= NEARLY
    if same and prediction.hold == "microbatch":
        return "the job holds its batch, so that its microbatches shrank"
    if not same and prediction.hold == "batch":
        return f"the job holds its microbatches, so that its batch is {show_times(grown)} as large"
    return ""


def _what_differs(prediction: Prediction, after: Measurement, took: float) -> str:
    """Say how compute and waiting differ from what they were to be."""
    was, wait = prediction.batch_latency_s, prediction.bubble_fraction
    now = float(median(after.bubble_fractions)) if after.bubble_fractions else wait
    shares = {"compute": (was * (1 - wait), took * (1 - now)), "waiting": (was * wait, took * now)}
    return ", ".join(
        f"{name} {show_gain(came / planned - 1)}"
        for name, (planned, came) in shares.items()
        if planned > 0
    )
