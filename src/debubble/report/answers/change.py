"""What `plan` and `simulate` share: a change in words and as data, and what it starts from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Self

from debubble.analysis import Analysis
from debubble.plan.change import Change
from debubble.plan.levers import LEVERS
from debubble.plan.levers.order import OrderChoice
from debubble.plan.option import Headroom, Idea, Option
from debubble.plan.plan import Plan
from debubble.report.answers.base import Part
from debubble.timeline.schedules import format_order
from debubble.units import counted, show_duration, show_gain, show_percent


class ChangePart(Part, frozen=True, kw_only=True, omit_defaults=True):
    """What is changed; the rest is left out."""

    microbatches: int | None = None
    hold: str | None = None
    split: list[int] | None = None
    schedule: str | None = None
    chunks: int | None = None
    overlap: bool | None = None
    recompute: bool | None = None
    repaired_hops: Annotated[list[list[int]] | None, "repaired"] = None
    token_scale: float | None = None
    hops: list[str] | None = None
    """Rates, as they were given: `2:3=5GB/s`."""
    by_hand: str | None = None

    @classmethod
    def of(cls, source: object, **given: Any) -> Self:
        """Return a change as data; what is held says something of another number alone."""
        if not getattr(source, "microbatches", None):
            given |= {"microbatches": None, "hold": None}
        return super().of(source, **given)


class IntervalPart(Part, frozen=True, kw_only=True, omit_defaults=True):
    """The 80 % interval of a prediction: its low end and its high end."""

    batch_latency_s: Annotated[list[float] | None, ("low_ns", "high_ns")] = None
    throughput_gain_fraction: Annotated[
        list[float] | None, ("throughput_low", "throughput_high")
    ] = None


class ProfilerPart(Part, frozen=True, kw_only=True):
    """Profiling overhead, by the job's own timers; all times are unprofiled."""

    overhead_fraction: float
    steps_timed: int
    sentence: str


def latency_interval(option: Option) -> IntervalPart:
    """Return the 80 % interval of the batch latency of an option."""
    return IntervalPart.of(option, throughput_gain_fraction=None)


def describe(change: Change) -> str:
    """Say a change in words."""
    parts = [words for lever in LEVERS if (words := lever.words(change))]
    if change.by_hand is not None:
        parts.append(change.by_hand)
    if change.token_scale is not None:
        parts.append(f"{change.token_scale:.3g} times as many tokens")
    return ", ".join(parts) or "nothing changed"


def say_gain(option: Option) -> str:
    """Write what an option gains in throughput, with its interval."""
    return show_gain(option.throughput_gain, option.throughput_low, option.throughput_high)


def describe_refused(refused: Idea) -> str:
    """Say what is refused, also where nothing of it was found that could be described."""
    if refused.lever == "split" and refused.change.split is None:
        return "another split"
    return "searched order" if refused.lever == "order" else describe(refused.change)


def headroom_bytes(ranks: Sequence[Headroom] | None) -> list[int | None] | None:
    """Return what each rank has left of its memory."""
    if ranks is None:
        return None
    return [None if rank.bytes is None else round(rank.bytes) for rank in ranks]


def peak_bytes(ranks: Sequence[Headroom] | None) -> list[int] | None:
    """Return the peak memory of each rank."""
    return None if ranks is None else [round(rank.peak_bytes) for rank in ranks]


def answer_profiler(run: Analysis) -> ProfilerPart | None:
    """Say what the profiler cost that times are rid of; None where they are not by sidecars."""
    job = run.job
    if run.basis.source != "sidecars" or job.overhead_fraction is None:
        return None
    return ProfilerPart.of(
        job,
        sentence=f"times: unprofiled; profiling overhead {show_gain(job.overhead_fraction)}, by "
        f"the job's own timers ({counted(job.steps_timed, 'step')})",
    )


def say_basis(basis: str, profiler: ProfilerPart | None = None) -> str:
    """Say on which basis times are."""
    return profiler.sentence if profiler else f"times: {basis}"


class OrderPart(Part, frozen=True, kw_only=True):
    """What an order of its own buys beyond the best schedule with a name."""

    option: int
    """Its place among all options."""
    named: str | None
    """None where none that has a name fits the memory of all ranks."""
    named_latency_s: Annotated[float | None, "named.window_ns"]
    beyond_named_fraction: Annotated[float | None, "beyond_named"]
    """Of the latency of the best with a name."""
    lower_bound_s: float
    """No order of these stages can be under it, with messages that take no time."""
    above_bound_fraction: float
    rounds: Annotated[int, "found.rounds"]
    judged_rounds: Annotated[int, "found.rounds"]
    """The same: in all rounds orders are judged by the simulator that prices all options."""
    orders_tried: Annotated[int, "found.tried"]
    order: str
    """The passes of each rank, as CSV."""


def answer_order(plan: Plan, ordered: OrderChoice) -> OrderPart:
    """Say where it stands among the options, and how far it was looked for."""
    return OrderPart.of(
        ordered,
        option=plan.options.index(ordered.option),
        named=None if ordered.named is None else ordered.named_as,
        lower_bound_s=ordered.found.lower_bound_s,
        above_bound_fraction=ordered.found.latency_s / ordered.found.lower_bound_s - 1,
        order=format_order(ordered.option.change.order or []),
    )


def say_order(ordered: OrderChoice) -> str:
    """Say what a searched order gains over the best named schedule, and the lower bound."""
    found = ordered.found
    above = show_percent(found.latency_s / found.lower_bound_s - 1)
    far = f"{counted(found.rounds, 'round')}; {above} above the lower bound"
    took = show_duration(ordered.option.window_ns)
    if ordered.named is None:
        return f"No named schedule fits memory; the searched order does: {took} ({far})."
    return (
        f"The searched order is {show_percent(ordered.beyond_named)} faster than the best named "
        f"schedule, {ordered.named_as}: {took} instead of "
        f"{show_duration(ordered.named.window_ns)} ({far})."
    )
