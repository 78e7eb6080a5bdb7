"""An idea in → an option: what it assumes, predicts and needs, and whether memory suffices."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import hypot

from debubble.plan.baseline import Baseline
from debubble.plan.change import SEARCHED, Change
from debubble.simulate.communication import runs
from debubble.simulate.predict import Prediction, enough_draws, mean_lengths, predict
from debubble.timeline.schedules import Order
from debubble.units import NS_PER_S, show_bytes, show_percent

# Of a backward pass: norms alone have less for their weights.
_NO_WEIGHTS = 0.05
_DRAWS = 240


@dataclass(frozen=True, slots=True, kw_only=True)
class Headroom:
    """What one rank has left; None is what is not known."""

    limit_bytes: float | None
    """The device's memory, or what was given for it."""
    peak_bytes: float
    unallocated_bytes: float | None
    """Reserved by PyTorch and not allocated: fragments, which it may or may not use."""
    other_bytes: float | None
    """Held by others than PyTorch: NCCL, contexts, other processes."""

    @property
    def bytes(self) -> float | None:
        """The limit minus the peak; below 0 the rank does not fit."""
        return None if self.limit_bytes is None else self.limit_bytes - self.peak_bytes

    @property
    def fits(self) -> bool | None:
        """Whether the peak, and what others hold, stay below the limit."""
        if self.bytes is None:
            return None
        return self.bytes - (self.other_bytes or 0.0) >= 0

    def __str__(self) -> str:
        if self.bytes is None:
            return "headroom unknown: the trace does not state the device's memory"
        if self.bytes < 0:
            return (
                f"{show_bytes(-self.bytes)} over the limit of {show_bytes(self.limit_bytes or 0)}"
            )
        return f"{show_bytes(self.bytes)} left of {show_bytes(self.limit_bytes or 0)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Idea:
    """A change to be weighed, and what comes with it."""

    lever: str
    change: Change
    assumptions: tuple[str, ...] = ()
    reason: str = ""
    """Why it will not be done; empty where it may be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One thing to do."""

    idea: Idea
    window_ns: int
    low_ns: int
    high_ns: int
    bubble_fraction: float
    microbatches_per_s: float
    """Counted in microbatches of the measured size."""
    headroom: tuple[Headroom, ...] | None
    latency_gain: float
    """Of the batch latency; below 0 it takes longer, as a larger batch does."""
    throughput_gain: float
    throughput_low: float
    throughput_high: float
    assumptions: tuple[str, ...]
    by_replay: bool = False
    """What was measured is replayed with something put right: nothing is simulated."""

    @property
    def lever(self) -> str:
        """What kind of change it is."""
        return self.idea.lever

    @property
    def change(self) -> Change:
        """What would be done."""
        return self.idea.change

    @property
    def fits_memory(self) -> bool | None:
        """Whether every rank stays below its limit; None where that is not known."""
        return all_fit(self.headroom)


def weigh(baseline: Baseline, idea: Idea, found: Prediction | None = None) -> Option:
    """Predict a change, where that was not done, and hold it against the run as it is."""
    found = predict_idea(baseline, idea) if found is None else found
    # What the run as it is is missed by, a change may be missed by as well.
    off = abs(baseline.misfit) * found.window_ns
    low = found.window_ns - hypot(found.window_ns - found.low_ns, off)
    high = found.window_ns + hypot(found.high_ns - found.window_ns, off)
    factor = baseline.correction
    return held_against(
        baseline,
        idea,
        (found.window_ns * factor, low * factor, high * factor),
        bubble_fraction=found.bubble_fraction,
        headroom=headroom_after(baseline, idea.change),
        assumptions=tuple(_assumed(baseline, idea)),
    )


def held_against(  # noqa: PLR0913 (all that an option is made of)
    baseline: Baseline,
    idea: Idea,
    windows_ns: tuple[float, float, float],
    *,
    bubble_fraction: float,
    headroom: tuple[Headroom, ...] | None,
    assumptions: tuple[str, ...] = (),
    by_replay: bool = False,
) -> Option:
    """Hold what a batch would take, and the ends of its interval, against the run as it is."""
    source, change = baseline.source, idea.change
    window, low, high = map(round, windows_ns)
    work = (change.microbatches or source.microbatches) * baseline.microbatch_scale(change)
    now = source.microbatches / (baseline.window_ns + baseline.outside_ns)
    gains = [work / (ns + baseline.outside_ns) / now - 1 for ns in (window, high, low)]
    return Option(
        idea=idea,
        window_ns=window,
        low_ns=low,
        high_ns=high,
        bubble_fraction=bubble_fraction,
        microbatches_per_s=work / (window + baseline.outside_ns) * NS_PER_S,
        headroom=headroom,
        latency_gain=1 - window / baseline.window_ns,
        throughput_gain=gains[0],
        throughput_low=gains[1],
        throughput_high=gains[2],
        assumptions=(*idea.assumptions, *assumptions),
        by_replay=by_replay,
    )


def predict_idea(baseline: Baseline, idea: Idea) -> Prediction:
    """Simulate a change many times over."""
    what_if = baseline.what_if(idea.change)
    return predict(
        baseline.source,
        what_if,
        draws=enough_draws(what_if.order, _DRAWS),
        engine=baseline.engine(idea.change),
        same_launch=_as_it_is(baseline, idea),
    )


def _as_it_is(baseline: Baseline, idea: Idea) -> bool:
    """Tell whether nothing changes: then it is the run that was measured, and no other launch."""
    return idea.change == Change(hold=idea.change.hold) and not baseline.source.repaired


def quick_latency_s(baseline: Baseline, change: Change) -> float:
    """Return the batch latency of a change, every pass and message at its mean."""
    engine = baseline.engine(change)
    lengths = mean_lengths(engine, baseline.source, baseline.what_if(change))
    return float(engine.windows(lengths)[0]) * baseline.correction / NS_PER_S


def headroom_after(baseline: Baseline, change: Change) -> tuple[Headroom, ...] | None:
    """Return what each rank would have left; None where memory is not known."""
    peaks = baseline.peaks(change)
    if peaks is None:
        return None
    return tuple(
        headroom(
            peak.peak_bytes,
            limit_bytes=limit,
            measured_peak_bytes=rank.memory.peak_bytes if rank.memory else None,
            measured_reserved_bytes=rank.memory.peak_reserved_bytes if rank.memory else None,
            other_bytes=others,
        )
        for peak, limit, others, rank in zip(
            peaks, baseline.limits, baseline.others, baseline.ranks, strict=True
        )
    )


def headroom(
    peak_bytes: float,
    *,
    limit_bytes: float | None,
    measured_peak_bytes: float | None = None,
    measured_reserved_bytes: float | None = None,
    other_bytes: float | None = None,
) -> Headroom:
    """Hold a peak against a limit; what the measured run reserved in vain, it will again."""
    unallocated = None
    if measured_peak_bytes is not None and measured_reserved_bytes is not None:
        unallocated = max(0.0, measured_reserved_bytes - measured_peak_bytes)
    return Headroom(
        limit_bytes=limit_bytes,
        peak_bytes=peak_bytes,
        unallocated_bytes=unallocated,
        other_bytes=other_bytes,
    )


def all_fit(ranks: Sequence[Headroom] | None) -> bool | None:
    """Tell whether every rank stays below its limit; None where that is not known."""
    known = [None] if ranks is None else [rank.fits for rank in ranks]
    if False in known:
        return False
    return None if None in known else True


def _assumed(baseline: Baseline, idea: Idea) -> Iterator[str]:
    """Say what the run does not show, and which hops stay slow."""
    source, change = baseline.source, idea.change
    what_if = baseline.what_if(change)
    if cuts_backward(baseline, change):
        yield _apart(list(source.passes.weight_shares.values()))
    if baseline.microbatch_scale(change) != 1.0:
        yield from _grown(baseline)
    if source.passes.slope:
        slope = show_percent(source.passes.slope)
        yield f"ranks share a device: each active rank slows the others by {slope}"
    if change.microbatches or change.schedule:
        yield from source.wires.assumed
    if source.microbatches == 1 and change.microbatches:
        yield "each added microbatch takes as long as the recorded one"
    if change.recompute:
        yield "recomputing repeats the forward pass of all layers"
    elif change.recompute is False:
        yield "without recomputing, activations take memory that was not measured"
    if change.schedule not in {None, SEARCHED} and not runs(
        baseline.framework, change.schedule or ""
    ):
        yield f"{baseline.framework} has no {change.schedule}: simulated as torch runs it"
    if change.split is None and len(what_if.layers) != len(source.passes.layers):
        yield "layers are split evenly over the new stages"
    names = [rank.rank for rank in baseline.ranks]
    yield from (
        f"hop {names[here]}:{names[there]} stays {slow.times:.1f} times as slow as the others"
        for (here, there), slow in source.wires.slow.items()
        if (here, there) not in dict(change.hops_ns)
    )


def _apart(shares: Sequence[float]) -> str:
    """Say what weight gradients take of a backward pass, and how that is known."""
    if not shares:
        return "weight gradients (W) take half of a backward pass, and splitting it costs 5 %"
    mean = sum(shares) / len(shares)
    if mean < _NO_WEIGHTS:
        return "weight gradients take almost no time: splitting the backward gains nothing"
    return (
        f"weight gradients (W) take {show_percent(mean)} of a backward pass (measured), and "
        "splitting it costs 5 %"
    )


def _grown(baseline: Baseline) -> Iterator[str]:
    """Say how passes and messages are taken to grow with tokens."""
    yield "passes and messages scale with tokens; attention is not measured apart"
    stays = baseline.source.passes.stays.values()
    if max(stays) > min(stays):
        yield "gradient accumulation takes the same time for any number of tokens"


def cuts_backward(baseline: Baseline, change: Change) -> bool:
    """Tell whether a change has input and weight gradients apart, and the run has not."""
    if change.schedule is None or baseline.source.passes.splits_backward:
        return False
    return splits_backward(baseline.what_if(change).order)


def cuts_untold(baseline: Baseline, change: Change) -> bool:
    """Tell whether it does so, and nothing in the run tells what weight gradients take."""
    return not baseline.source.passes.weight_shares and cuts_backward(baseline, change)


def splits_backward(order: Order) -> bool:
    """Tell whether an order has weight gradients apart from input gradients."""
    return any(action.kind == "W" for actions in order for action in actions)


@contextmanager
def collect_later() -> Iterator[None]:
    """Let the collector rest: programs hold no circles, and it would go through them all each time.

    A tenth of the time of a large plan.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
